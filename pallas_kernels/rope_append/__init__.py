"""From projections of new tokens to queries and a longer cache; see README.md."""

from pallas_kernels.rope_append.api import choose, rope_append


__all__ = ["choose", "rope_append"]
