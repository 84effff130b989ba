"""Sizes, limits and launch parameters of the Mosaic GPU kernels."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, Literal, get_args

import jax.numpy as jnp

from pallas_kernels._common import hw, tuning


CHUNK = 64  # rows of a wgmma: other chunk lengths would need other kernels
HEAD_DIM = 128  # K and V
KEY_DIMS, VALUE_DIMS = (64, 128), (64, 128, 256)  # those that `head_dims` fits to it
MAX_GROUP = 4  # value heads that read one key head
SQUARE = (CHUNK, CHUNK)

STAGES = 2  # chunks in shared memory: one is read while the next arrives
STATE_WARPGROUPS = 2
HALF = HEAD_DIM // STATE_WARPGROUPS  # rows of the transposed state in each of them


class Warpgroup(enum.IntEnum):
    """What the warpgroups behind the state's do in the kernels that carry a state."""

    MIX = 2
    COPY = 3


# Registers per thread of each warpgroup; 512 in all is what a block has.
REGISTERS = (192, 192, 104, 24)
# exp is 0 in f32 from -104 on, so this floor of the log decay changes no result, but
# it keeps sums over a chunk precise.
MIN_LOG_DECAY = -110.0
LOG2_E = 1.4426950408889634


class Gate(enum.IntEnum):
    """Rows of the table of a chunk's per-token factors, in the order of the table.

    TOTAL is the sum of log2 decays from the later of the chunk's and the document's
    start up to and including a token. ENTER is the decay of the state that enters
    the chunk, 0 for documents that begin inside. LEAVE is the decay from after a
    token to the chunk's exit, 0 for documents that end inside. BETA is the writing
    strength, START the index of the document's first token (-1: before the chunk).
    """

    TOTAL = 0
    ENTER = 1
    LEAVE = 2
    BETA = 3
    START = 4


Order = Literal["queries_first", "queries_last", "values_first"]
Grads = Literal["ring", "stream"]
Keep = Literal["inputs", "states"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Launch parameters. Results depend on `segments`, `order` and `grads` in their
    rounding.

    Attributes:
      segments: stretches of time of each row that run side by side, see
        `kernel_summary`; `None` lets `plan_segments` choose. A number that does not
        divide a row's chunks pads them, at the price of copies. A state that crosses
        from one to the next is rounded otherwise than inside one, so with more than
        one, a document's bits depend on where the borders fall.
      stages: chunks in shared memory at a time in the forward kernel, 2 or 3.
      order: of the products of a chunk in the forward kernel. "queries_first" reads
        the state with Q along with K. The others read it along with the last
        products, so that less stands before what the next chunk waits for; they need
        Q weighed by the decay, in 16 bits. "queries_last" does only that;
        "values_first" multiplies the values with R along with the first products,
        too.
      grads: the kernel of the gradients that need no order: "stream",
        `kernel_grads_stream`, which copies matrix after matrix, or "ring",
        `kernel_grads_ring`, which copies halves of V.
      keep: what the forward of a gradient writes for its backward. "inputs": nothing
        more than the inverses and factors, states are computed again. "states": the
        state at each chunk's entry and what each token writes, three times the size
        of v. The forward kernel then has room for two stages.
    """

    segments: int | None = None
    stages: int = 3
    order: Order = "queries_first"
    grads: Grads = "stream"
    keep: Keep = "inputs"

    def __post_init__(self):
        if self.segments is not None and self.segments < 1:
            raise ValueError(f"segments={self.segments}, allowed are >= 1 and None")
        for name, allowed in (
            ("stages", (2, 3)),
            ("order", get_args(Order)),
            ("grads", get_args(Grads)),
            ("keep", get_args(Keep)),
        ):
            if (value := getattr(self, name)) not in allowed:
                raise ValueError(f"{name}={value!r}, allowed are {allowed}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shapes:
    """Sizes of one call.

    Attributes:
      batch, time, key_heads, value_heads, key_dim, value_dim: B, T, Hk, Hv, K, V;
        T is a multiple of 64.
      dtype: of q, k, v and o.
      segments: neighbouring rows that are one row of the caller's, cut in time.
    """

    batch: int
    time: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    dtype: Any
    segments: int = 1

    @property
    def chunks(self) -> int:
        return self.time // CHUNK

    @property
    def group(self) -> int:
        return self.value_heads // self.key_heads

    @property
    def items(self) -> int:
        """Rows times value heads: what runs side by side."""
        return self.batch * self.value_heads


def heads_of(value_dim: int) -> int:
    """Value heads that the kernels have for one of V values."""
    return max(1, value_dim // HEAD_DIM)


def shapes_of(q: Any, v: Any) -> Shapes:
    """Sizes that the kernels see of q [B, T, Hk, K] and v [B, T, Hv, V].

    T is padded to chunks, K and V are what `head_dims` makes of them.
    """
    batch, time, key_heads, _ = q.shape
    return Shapes(
        batch=batch,
        time=-(-time // CHUNK) * CHUNK,
        key_heads=key_heads,
        value_heads=v.shape[2] * heads_of(v.shape[3]),
        key_dim=HEAD_DIM,
        value_dim=HEAD_DIM,
        dtype=jnp.dtype(v.dtype),
    )


# Time of a chunk of a summary as a share of one of the forward kernel. It has two
# thirds of the products, but as many that wait for each other.
_SUMMARY_SHARE = 0.75
# What a further launch, and a step of the chain between segments, cost in chunks of
# the forward kernel.
_LAUNCH_CHUNKS, _CHAIN_CHUNKS = 4, 4
MAX_SEGMENTS = 16


def plan_segments(*, items: int, chunks: int) -> int:
    """How many segments a row should have by a model of the time it takes.

    A block holds an SM for itself, so the time is the number of turns in which the
    blocks of a launch run, times the chunks of each. One segment takes one launch of
    `items` blocks. S of them take two, of (2 S - 3) `items` blocks that summarise and
    S `items` that run, and a chain of S - 2 products between them. Nothing is gained
    once `items` fill the card, or if rows are so short that the launches count. Only
    numbers that divide the chunks come into question: others would pad, which copies
    q, k, v and o.

    Args:
      items: rows times value heads.
      chunks: of a row.

    Returns:
      The number of segments, 1 if splitting saves less than a tenth.
    """

    def turns(blocks: int) -> int:
        return -(-blocks // hw.device().sms)

    def time(segments: int) -> float:
        length = -(-chunks // segments)
        total = turns(segments * items) * float(length)
        if segments > 1:
            summaries = turns((2 * segments - 3) * items)
            total += _SUMMARY_SHARE * summaries * length
            total += _LAUNCH_CHUNKS + _CHAIN_CHUNKS * (segments - 2)
        return total

    most = min(chunks, MAX_SEGMENTS)
    best = min((x for x in range(1, most + 1) if chunks % x == 0), key=time)
    return best if time(best) < 0.9 * time(1) else 1


def table_key(shapes: Shapes) -> str:
    """The key of a call in `tuned/<device>/gated_delta_rule.json`."""
    return tuning.key(
        items=tuning.bucket(shapes.items),
        group=shapes.group,
        time=tuning.bucket(shapes.time),
        dtype=jnp.dtype(shapes.dtype).name,
    )


def heuristic(shapes: Shapes) -> Config:
    """The measured launch parameters of a call, the same for all that weren't.

    A measured number of segments serves rows of other lengths as well, so it is
    lowered to a divisor of this call's chunks.
    """
    found = tuning.lookup("gated_delta_rule", table_key(shapes))
    if found is None:
        return Config()
    names = {field.name for field in dataclasses.fields(Config)}
    config = Config(**{k: v for k, v in found.items() if k in names})
    if config.segments is None:
        return config
    most = min(config.segments, shapes.chunks)
    segments = next(x for x in range(most, 0, -1) if shapes.chunks % x == 0)
    return dataclasses.replace(config, segments=segments)


def refusal(
    *,
    time: int,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    chunk: int,
    dtype: Any,
) -> str | None:
    """Why the kernels cannot run these sizes, `None` if they can."""
    for name, dim, allowed in (
        ("K", key_dim, KEY_DIMS),
        ("V", value_dim, VALUE_DIMS),
    ):
        if dim not in allowed:
            return f"{name} = {dim}, the kernels have {', '.join(map(str, allowed))}"
    if time < 1:
        return f"T = {time}, the kernels have at least one token"
    if chunk != CHUNK:
        return f"chunk_size = {chunk}, the kernels have {CHUNK}"
    if jnp.dtype(dtype).name not in ("bfloat16", "float16"):
        return f"dtype = {jnp.dtype(dtype).name}, the kernels have bfloat16 and float16"
    most = MAX_GROUP // heads_of(value_dim)
    if (group := value_heads // key_heads) > most:
        return (
            f"{group} value heads of {value_dim} read each key head, the kernels have "
            f"1 to {most}"
        )
    return None
