"""How much of a memory each stream takes; see README.md beside this file."""

from pallas_kernels.engram_gate.api import choose, engram_gate


__all__ = ["choose", "engram_gate"]
