"""Row numbers of hashed n-grams; see README.md beside this file."""

from pallas_kernels.engram_hash.api import choose, empty_history, engram_hash
from pallas_kernels.engram_hash.host import hash_on_host
from pallas_kernels.engram_hash.layout import HashLayout


__all__ = ["HashLayout", "choose", "empty_history", "engram_hash", "hash_on_host"]
