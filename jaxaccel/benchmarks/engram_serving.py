"""What `jaxaccel bench engram` serves: a 4B stack, its memory, prompts of real text."""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxaccel.core.memory import PINNED_LIMIT_VARIABLE, gib, pinned_limit
from jaxaccel.data.sources import StdlibSource
from jaxaccel.models.config import DecoderConfig
from jaxaccel.models.decoder import Decoder, init_decoder
from jaxaccel.nn.attention import AttentionConfig
from jaxaccel.nn.engram import EngramTable, TableRows
from jaxaccel.nn.engram_config import EngramConfig
from jaxaccel.nn.engram_host import with_host_tables, with_rows
from jaxaccel.nn.mlp import MLPConfig
from jaxaccel.nn.rope import RopeConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Serving:
    """What is served, and from what.

    Attributes:
      decoder: the stack, without a memory.
      engram: its memory; `bases` say how large the table is.
      rows, length: prompts of a batch lie in that many rows of that many tokens.
      batches: read in a round.
      prompt: shortest and longest prompt, tokens; lengths in between are as frequent.
      hot_rows: rows on the device in tier "hot".
      cache_bytes: memory for rows of a file.
      rounds: the first one warms up.
    """

    decoder: DecoderConfig
    engram: EngramConfig
    rows: int = 8
    length: int = 2048
    batches: int = 8
    prompt: tuple[int, int] = (100, 1024)
    hot_rows: int = 131_072
    cache_bytes: int = 2**30
    rounds: int = 3

    @classmethod
    def of_size(cls, table_gb: float, **changes: Any) -> Serving:
        """A stack of the 4B class, with rows of 1 KB as the link likes them.

        Args:
          table_gb: of the table, 1e9 bytes, at least.
          **changes: fields that differ.
        """
        decoder = DecoderConfig(
            vocab_size=151_936,
            d_model=2560,
            num_layers=36,
            pattern=("attention",),
            attention=AttentionConfig(
                num_heads=32,
                num_kv_heads=8,
                head_dim=128,
                rope=RopeConfig(theta=1e6),
                qk_norm=True,
            ),
            mlp=MLPConfig(d_ff=9728),
            tie_embeddings=True,
            dtype="bfloat16",
            param_dtype="bfloat16",
        )
        engram = EngramConfig(
            layers=(2,),
            heads=2,
            head_dim=512,
            bases=-int(-table_gb * 1e9 // (4 * 1024)),
            boundary="segment",
            table_dtype="bfloat16",
        )
        return cls(decoder=decoder, engram=engram, **changes)

    @classmethod
    def tiny(cls) -> Serving:
        """The same in miniature, to see that all of it works."""
        decoder = DecoderConfig(
            vocab_size=256,
            d_model=64,
            num_layers=3,
            pattern=("attention",),
            attention=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=16),
            mlp=MLPConfig(d_ff=64),
            tie_embeddings=True,
        )
        engram = EngramConfig(
            layers=(2,),
            heads=2,
            head_dim=128,
            bases=1000,
            boundary="segment",
            table_dtype="bfloat16",
        )
        return cls(
            decoder=decoder,
            engram=engram,
            rows=2,
            length=64,
            batches=3,
            prompt=(10, 40),
            hot_rows=128,
            cache_bytes=2**16,
            rounds=2,
        )

    @functools.cached_property
    def with_memory(self) -> DecoderConfig:
        """The stack with its memory."""
        return dataclasses.replace(self.decoder, engram=self.engram)

    @property
    def num_rows(self) -> int:
        """Rows of the table."""
        return self.engram.layout(self.decoder.vocab_size).num_rows[0]

    @property
    def table_bytes(self) -> int:
        """Bytes of the table."""
        width = jnp.dtype(self.engram.table_dtype).itemsize
        return self.num_rows * self.engram.head_dim * width


@functools.cache
def text_ids(vocab_size: int) -> np.ndarray:
    """The standard library's sources as tokens i32[N].

    Words, blanks and signs are tokens, the most frequent ones first; those for which
    there is no number share the last.
    """
    words = [w for d in StdlibSource() for w in re.findall(r"\w+|\s+|[^\w\s]", d.text)]
    ranked = collections.Counter(words).most_common(vocab_size - 1)
    number = {word: i for i, (word, _) in enumerate(ranked)}
    return np.fromiter(
        (number.get(word, vocab_size - 1) for word in words), np.int32, len(words)
    )


def word_ids(vocab_size: int, count: int) -> np.ndarray:
    """So many tokens of `text_ids`, which begins anew where it ends."""
    return np.resize(text_ids(vocab_size), count)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompts:
    """A batch: tokens and segments i32[rows, length], and how many tokens are real."""

    tokens: np.ndarray
    segments: np.ndarray

    @property
    def count(self) -> int:
        """Tokens that are not padding."""
        return int(np.sum(self.segments > 0))


def prompts(serving: Serving, part: int = 0) -> list[Prompts]:
    """The batches of a round.

    Args:
      serving: sizes.
      part: of the text; equal ones give equal batches.

    Returns:
      Pieces of the text, each row filled until the next does not fit.
    """
    rng = np.random.default_rng(part)
    shape = (serving.batches * serving.rows, serving.length)
    tokens, segments = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    at = part * tokens.size
    text = word_ids(serving.decoder.vocab_size, at + tokens.size)
    for row in range(shape[0]):
        begin, document = 0, 1
        while True:
            size = int(rng.integers(serving.prompt[0], serving.prompt[1] + 1))
            if begin + size > serving.length:
                break
            tokens[row, begin : begin + size] = text[at : at + size]
            segments[row, begin : begin + size] = document
            begin, document, at = begin + size, document + 1, at + size
    shape = (serving.batches, serving.rows, serving.length)
    pairs = zip(tokens.reshape(shape), segments.reshape(shape), strict=True)
    return [Prompts(tokens=t, segments=s) for t, s in pairs]


def random_table(num_rows: int, width: int) -> jax.Array:
    """A table bf16[num_rows, width] on the device, the same bits on any machine.

    Drawn by a hash of the place: random numbers of JAX need four times its memory.
    """

    @jax.jit
    def draw():
        shape = (num_rows, width)
        row = jax.lax.broadcasted_iota(jnp.uint32, shape, 0)
        column = jax.lax.broadcasted_iota(jnp.uint32, shape, 1)
        bits = row * jnp.uint32(0x9E3779B1) ^ column * jnp.uint32(0x85EBCA6B)
        bits = (bits ^ (bits >> 15)) * jnp.uint32(0x2C1B3C6D)
        bits = (bits ^ (bits >> 12)) * jnp.uint32(0x297A2D39)
        unit = (bits >> 8).astype(jnp.float32) * 2.0**-23 - 1.0  # [-1, 1)
        return (unit * (3 / width) ** 0.5).astype(jnp.bfloat16)

    return draw()


def pinned(array: jax.Array) -> jax.Array:
    """A copy in memory of the host that the device reads itself.

    Raises:
      ValueError: the runtime may not pin that much.
    """
    if array.nbytes > pinned_limit() and jax.default_backend() == "gpu":
        raise ValueError(
            f"the table has {gib(array.nbytes)}, the runtime may pin "
            f"{gib(pinned_limit())}: set {PINNED_LIMIT_VARIABLE} before it starts"
        )
    device = jax.local_devices()[0]
    place = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    return jax.block_until_ready(jax.device_put(array, place))


def host_view(array: jax.Array) -> np.ndarray:
    """The bytes of a pinned array as numpy sees them, without a copy."""
    buffer: Any = ctypes.c_uint8 * array.nbytes
    buffer = buffer.from_address(array.unsafe_buffer_pointer())
    buffer.owner = array  # which must live as long as the view does
    return np.frombuffer(buffer, array.dtype).reshape(array.shape)


class Models:
    """The stack without and with a memory, and their programs' arguments."""

    def __init__(self, serving: Serving):
        """Draws the weights; a table is not among them."""
        self.serving = serving
        self.plain = nnx.split(init_decoder(serving.decoder, 0))
        small = dataclasses.replace(serving.engram, bases=8)
        model = init_decoder(dataclasses.replace(serving.decoder, engram=small), 0)
        whole = nnx.eval_shape(lambda: Decoder(serving.with_memory, rngs=nnx.Rngs(0)))
        self.graphdef, _ = nnx.split(whole)
        _, self.state = nnx.split(model)

    def without_memory(self) -> tuple[Any, Any]:
        """(merge, state): the stack alone."""
        graphdef, state = self.plain
        return lambda state, *_: nnx.merge(graphdef, state), state

    def without_table(self) -> tuple[Any, Any]:
        """(merge, state): the model with a table that is nobody's, for its caches."""
        return lambda state: nnx.merge(self.graphdef, state), self.state

    def on_device(self) -> tuple[Any, Any]:
        """(merge, state): the model that looks up in the table that it is given."""

        def merge(state, table):
            model: Any = nnx.merge(self.graphdef, state)
            own = nnx.eval_shape(
                lambda: EngramTable(
                    8, self.serving.engram.head_dim, dtype=table.dtype, rngs=nnx.Rngs(0)
                )
            )
            own.rows = TableRows(table)
            model.memory.layers[0].table = own
            return model

        return merge, self.state

    def zero_copy(self) -> tuple[Any, Any]:
        """(merge, state): the device reads rows of the host's table by itself."""
        by = "mosaic" if jax.default_backend() == "gpu" else None

        def merge(state, table):
            model = nnx.merge(self.graphdef, state)
            return with_host_tables(model, (table,), implementation=by)

        return merge, self.state

    def gathered(self) -> tuple[Any, Any]:
        """(merge, state): the model that is given a batch's rows."""

        def merge(state, rows):
            return with_rows(nnx.merge(self.graphdef, state), rows)

        return merge, self.state
