"""How much a query group weighs each landmark; see README.md beside this file."""

from pallas_kernels.landmark_scores.api import choose, landmark_scores


__all__ = ["choose", "landmark_scores"]
