"""Engram: memory that is looked up by hashed n-grams (arXiv 2601.07372)."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxaccel.data.batch import PackingMetadata
from jaxaccel.data.compressed_vocab import CompressedVocabulary
from jaxaccel.nn.engram_config import EngramConfig
from jaxaccel.nn.implementation import Implementations, implementation_of
from jaxaccel.nn.linear import Linear
from jaxaccel.quant.mxfp8 import BLOCK_SIZE, quantize, unpack
from pallas_kernels.engram_gate import engram_gate as take_gated
from pallas_kernels.engram_gather import engram_gather
from pallas_kernels.engram_gather.reference import factors
from pallas_kernels.engram_hash import empty_history, engram_hash
from pallas_kernels.host_gather import host_gather


# No table has this row: a lookup of it gives NaN.
_NO_ROW = 2**31 - 1


class TableRows(nnx.Variable):
    """Rows of a table; no `nnx.Param`, so that no dense gradient of it exists."""


class TokenClasses(nnx.Variable):
    """The map from token ids to classes."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class EngramState:
    """What the memory remembers of a text between calls.

    Attributes:
      history: i32[B, N - 1], classes of the last tokens, see `engram_hash`.
      conv: one [B, (W - 1) N, G, D] per layer with a table, normed values that the
        convolution still reaches, newest last; empty without a convolution.
    """

    history: jax.Array
    conv: tuple[jax.Array, ...]

    def reset(self, rows: jax.Array) -> Self:
        """Empties the rows where bool[B] is true."""
        return dataclasses.replace(
            self,
            history=jnp.where(rows[:, None], -1, self.history),
            conv=tuple(
                jnp.where(rows[:, None, None, None], jnp.zeros((), x.dtype), x)
                for x in self.conv
            ),
        )


def init_engram_state(
    config: EngramConfig, batch: int, d_model: int, vocab_size: int, dtype: DTypeLike
) -> EngramState:
    """The state before any token."""
    conv = ()
    if config.preset.has_conv:
        kept = (config.conv_width - 1) * config.dilation
        shape = (batch, kept, config.streams, d_model)
        conv = tuple(jnp.zeros(shape, dtype) for _ in config.layers)
    return EngramState(
        history=empty_history(batch, config.layout(vocab_size)), conv=conv
    )


class NGramHash(nnx.Module):
    """Row numbers of all layers' tables from tokens.

    Attributes:
      classes: i32[V], class of each token; only with `compressed_size`. -1, "not set",
        makes every row number one that no table has, and so the output NaN.
    """

    def __init__(
        self,
        config: EngramConfig,
        vocab_size: int,
        *,
        implementation: Implementations = None,
    ):
        """Draws multipliers and primes; the map is set by `set_vocabulary`."""
        self.config = config
        self.vocab_size = vocab_size
        self.layout = config.layout(vocab_size)
        self.implementation = implementation_of("engram_hash", implementation)
        if config.compressed_size is not None:
            self.classes = TokenClasses(jnp.full((vocab_size,), -1, jnp.int32))

    def set_vocabulary(self, vocabulary: CompressedVocabulary) -> None:
        """Sets the map.

        Raises:
          ValueError: it is not the one that the config was made for.
        """
        if self.config.vocabulary != vocabulary.fingerprint:
            raise ValueError(
                f"the model's hash is for the map {self.config.vocabulary}, this one "
                f"is {vocabulary.fingerprint}: every row number would be wrong"
            )
        vocabulary.check(size=self.layout.vocab_size)
        if len(vocabulary.token_map) > self.vocab_size:
            raise ValueError(
                f"the map has {len(vocabulary.token_map)} tokens, the model "
                f"{self.vocab_size}"
            )
        # A model may have more ids than its tokenizer; those stay without a class.
        rest = self.vocab_size - len(vocabulary.token_map)
        padded = jnp.pad(
            jnp.asarray(vocabulary.token_map), (0, rest), constant_values=-1
        )
        self.classes[...] = padded

    def __call__(
        self,
        tokens: jax.Array,
        meta: PackingMetadata,
        history: jax.Array | None = None,
        is_dead: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Hashes.

        Args:
          tokens: i32[B, T].
          meta: where documents begin.
          history: i32[B, N - 1], of an earlier call.
          is_dead: bool[B, T], tokens that stand for something that is no text.

        Returns:
          (ids i32[B, T, L, C], history i32[B, N - 1]). A token without a class has
          ids that no table has.
        """
        config = self.config
        classes = tokens
        if config.compressed_size is not None:
            index = jnp.where(tokens < 0, self.vocab_size, tokens)
            classes = jnp.take(
                self.classes[...], index, axis=0, mode="fill", fill_value=-1
            )
        known = (classes >= 0) & (classes < self.layout.vocab_size)
        is_last = None
        if config.boundary == "eos":
            is_last = tokens == jnp.int32(config.eos_id)
        # Where documents are borders to the memory too.
        borders = config.boundary == "segment" and meta.ids_are_given
        ids, history = engram_hash(
            jnp.where(known, classes, 0),
            self.layout,
            is_first=meta.is_first if borders else None,
            is_last=is_last,
            is_dead=is_dead,
            is_real=meta.is_real if meta.ids_are_given else None,
            history=history,
            implementation=self.implementation,
        )
        # Tokens that take nothing may be anything; their gradient must be finite too.
        known = known | ~meta.is_real
        if is_dead is not None:
            known = known | is_dead
        return jnp.where(known[:, :, None, None], ids, _NO_ROW), history


class EngramTable(nnx.Module):
    """The rows of one layer.

    Attributes:
      rows: table_dtype[rows, d], all heads of all orders in one array.
      scales: u8[rows, d / 32], exponents of powers of two, with rows of 8 bits alone.
    """

    def __init__(
        self, num_rows: int, head_dim: int, *, dtype: DTypeLike, rngs: nnx.Rngs
    ):
        """Draws the rows, normal with deviation `1 / sqrt(d)`."""
        draw = jax.nn.initializers.normal(head_dim**-0.5)
        self.is_narrow = jnp.dtype(dtype).itemsize == 1
        if not self.is_narrow:
            self.rows = TableRows(draw(rngs.params(), (num_rows, head_dim), dtype))
            return
        drawn = draw(rngs.params(), (num_rows, head_dim), jnp.bfloat16)
        values, scales = quantize(drawn)
        self.rows, self.scales = TableRows(values), TableRows(scales)

    def __call__(self, ids: jax.Array, implementation: Any = None) -> jax.Array:
        """Looks up i32[B, T, C]; gives [B, T, C, d], NaN for a row that there isn't."""
        scale = self.scales[...] if self.is_narrow else None
        return engram_gather(
            self.rows[...], ids, scale=scale, implementation=implementation
        )


class GatheredRows(nnx.Module):
    """Takes an `EngramTable`'s place where a batch's rows were gathered before.

    Attributes:
      rows: [K, d], each row that the batch reads once, or as it comes from a host; u32
        rows of `quant.mxfp8.pack` where the table has 8 bits.
      slots: i32[B, T, C], place of each lookup's row.
    """

    def __init__(self, rows: jax.Array, slots: jax.Array):
        """Holds the arrays."""
        self.rows = TableRows(rows)
        self.slots = TableRows(slots)

    def __call__(self, ids: jax.Array, implementation: Any = None) -> jax.Array:
        """The rows of `slots`; `ids` are what they were made from."""
        if ids.shape != self.slots[...].shape:
            raise ValueError(
                f"rows were gathered for {list(self.slots.shape)} lookups, this call "
                f"has {list(ids.shape)}"
            )
        rows, scale, slots = self.rows[...], None, self.slots[...]
        if rows.dtype == jnp.uint32:
            rows, scale = unpack(rows)
        return engram_gather(rows, slots, scale=scale, implementation=implementation)


class HostRows(nnx.Module):
    """Takes an `EngramTable`'s place where the table stays in the host's memory.

    The device reads the rows of a lookup when it gets there, within the program that
    looks up: the host neither hashes nor gathers.

    Attributes:
      rows: [rows, d] in the memory kind "pinned_host"; u32 rows of `quant.mxfp8.pack`
        where the table has 8 bits.
    """

    def __init__(self, rows: jax.Array, *, implementation: Implementations = None):
        """Holds the table.

        Args:
          rows: the table.
          implementation: of the lookup.
        """
        self.rows = TableRows(rows)
        self.read_by = implementation_of("host_gather", implementation)

    def __call__(self, ids: jax.Array, implementation: Any = None) -> jax.Array:
        """As `EngramTable`; `implementation` is that of tables on the device."""
        del implementation
        table = self.rows[...]
        rows = host_gather(table, ids, implementation=self.read_by)
        is_row = (ids >= 0) & (ids < table.shape[0])
        if rows.dtype == jnp.uint32:
            values, scales = unpack(rows)
            blocks = values.astype(jnp.float32).reshape(*scales.shape, BLOCK_SIZE)
            blocks = blocks * factors(scales)[..., None]
            rows = blocks.reshape(values.shape).astype(jnp.bfloat16)
        return jnp.where(is_row[..., None], rows, jnp.array(jnp.nan, rows.dtype))


def engram_gate(
    h: jax.Array,
    keys: jax.Array,
    query_scale: jax.Array,
    key_scale: jax.Array,
    *,
    eps: float = 1e-6,
    clamp: float = 1e-6,
    copies_sign: bool = False,
) -> jax.Array:
    """How much of the memory each stream takes, all in f32.

    s = <rms(h) q, rms(k) w> / sqrt(D);  gate = sigmoid(sign(s) sqrt(max(|s|, clamp)))

    Args:
      h: [B, T, G, D] residual streams.
      keys: [B, T, G, D].
      query_scale, key_scale: f32[G, D], gains of the two norms.
      eps: of the norms.
      clamp: smallest |s| whose root is taken; no gradient below it.
      copies_sign: whether +0 and -0 have their signs; else both give one half.

    Returns:
      f32[B, T, G].

    Source: Engram (arXiv 2601.07372), section 2; the root is that of the published
    code.
    """
    h, keys = h.astype(jnp.float32), keys.astype(jnp.float32)
    gain = (query_scale * key_scale).astype(jnp.float32)[None, None]
    width = h.shape[-1]
    score = jnp.sum(h * keys * gain, axis=-1)  # [B, T, G]
    for x in (h, keys):
        score = score * jax.lax.rsqrt(jnp.mean(x * x, axis=-1) + eps)
    score = score * width**-0.5
    root = jnp.sqrt(jnp.maximum(jnp.abs(score), clamp))
    if copies_sign:
        return jax.nn.sigmoid(jnp.copysign(root, score))
    return jax.nn.sigmoid(jnp.sign(score) * root)


def dilated_conv(
    x: jax.Array,
    weight: jax.Array,
    dilation: int,
    *,
    documents: jax.Array | None = None,
) -> jax.Array:
    """Depthwise causal convolution whose taps lie `dilation` tokens apart, f32 sums.

    Args:
      x: [B, T, G, D].
      weight: [W, G, D]; the last row multiplies the current token.
      dilation: tokens between two taps.
      documents: i32[B, T], where given, taps that fall into another document are 0.

    Returns:
      f32[B, T, G, D].
    """
    width, time = weight.shape[0], x.shape[1]
    total = jnp.zeros(x.shape, jnp.float32)
    for tap in range(width):
        back = (width - 1 - tap) * dilation
        if back >= time and back:
            continue
        shifted = jnp.pad(x[:, : time - back], ((0, 0), (back, 0), (0, 0), (0, 0)))
        term = shifted.astype(jnp.float32) * weight[tap].astype(jnp.float32)[None, None]
        if documents is not None and back:
            there = jnp.pad(
                documents[:, : time - back], ((0, 0), (back, 0)), constant_values=-1
            )
            term = jnp.where((there == documents)[:, :, None, None], term, 0.0)
        total = total + term
    return total


def _cached_conv(
    x: jax.Array, weight: jax.Array, dilation: int, state: jax.Array, meta: Any
) -> tuple[jax.Array, jax.Array]:
    """`dilated_conv` behind a state; padding is passed over. No one differentiates it.

    Args:
      x: [B, T, G, D].
      weight: [W, G, D].
      dilation: tokens between two taps.
      state: [B, (W - 1) dilation, G, D].
      meta: one document a row.

    Returns:
      (f32[B, T, G, D], the new state).
    """
    kept = state.shape[1]

    def rows(array, index):  # [B, n, G, D] at i32[B, m]
        return jnp.take_along_axis(array, index[:, :, None, None], axis=1)

    order = jnp.argsort(~meta.is_real, axis=1, stable=True).astype(jnp.int32)
    row = jnp.concatenate([state, rows(x, order).astype(state.dtype)], axis=1)
    y = dilated_conv(row, weight, dilation)[:, kept:]
    place = jnp.maximum(jnp.cumsum(meta.is_real, axis=1, dtype=jnp.int32) - 1, 0)
    count = jnp.sum(meta.is_real, axis=1, keepdims=True, dtype=jnp.int32)
    last = count + jnp.arange(kept, dtype=jnp.int32)[None]
    return rows(y, place), rows(row, last)


class Gain(nnx.Module):
    """What a norm of each stream multiplies by.

    Attributes:
      scale: f32[G, D], ones at first.
    """

    def __init__(self, shape: tuple[int, int]):
        """Creates the gain."""
        self.scale = nnx.Param(jnp.ones(shape, jnp.float32))


class Engram(nnx.Module):
    """Adds to each residual stream what the text's last n-grams are remembered by.

    Attributes:
      table: EngramTable, or `GatheredRows` in its place.
      kv_proj: Linear [C d, (G + 1) D]: keys of G streams, then the shared value.
      query_norm, key_norm: gains of the norms of stream and key.
      conv_norm: gain of the norm in front of the convolution.
      conv_kernel: f32[W, G D]; both only with a convolution.
    """

    def __init__(
        self,
        config: EngramConfig,
        d_model: int,
        num_rows: int,
        *,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        implementation: Implementations = None,
        rngs: nnx.Rngs,
    ):
        """Creates the parameters.

        Args:
          config: the memory.
          d_model: width D of a stream.
          num_rows: rows of this layer's table, `HashLayout.num_rows`.
          dtype: dtype of the computation; the gate and the sums are f32.
          param_dtype: dtype of the projection.
          implementation: of the lookup and the gate.
          rngs: source of the `params` key.
        """
        self.lookup_by = implementation_of("engram_gather", implementation)
        self.gate_by = implementation_of("engram_gate", implementation)
        self.table: Any = EngramTable(
            num_rows, config.head_dim, dtype=jnp.dtype(config.table_dtype), rngs=rngs
        )
        shape = (config.streams, d_model)
        self.kv_proj = Linear(
            config.width,
            (config.streams + 1) * d_model,
            use_bias=config.preset.has_bias,
            dtype=dtype,
            param_dtype=param_dtype,
            rngs=rngs,
        )
        self.query_norm, self.key_norm = Gain(shape), Gain(shape)
        if config.preset.has_conv:
            self.conv_norm = Gain(shape)
            taps = (config.conv_width, config.streams * d_model)
            filters = jnp.zeros(taps, jnp.float32)
            if not config.preset.zero_init_conv:
                bound = config.conv_width**-0.5
                filters = jax.random.uniform(
                    rngs.params(), taps, jnp.float32, -bound, bound
                )
            self.conv_kernel = nnx.Param(filters)
        self.config = config
        self.d_model = d_model
        self.dtype = jnp.dtype(dtype)

    def __call__(
        self,
        h: jax.Array,
        ids: jax.Array,
        meta: PackingMetadata,
        conv_state: jax.Array | None = None,
        is_dead: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array | None]:
        """What is to be added to the streams in front of a layer.

        Args:
          h: [B, T, G, D], or [B, T, D] with one stream.
          ids: i32[B, T, C], of `NGramHash`.
          meta: where documents begin.
          conv_state: [B, (W - 1) N, G, D] left by earlier calls, each row is one
            document then.
          is_dead: bool[B, T], tokens that take nothing.

        Returns:
          (an array of h's shape, zero on padding and dead tokens; the new state).

        Raises:
          ValueError: h has other streams than the config says.
        """
        config, shape = self.config, h.shape
        if h.ndim == 3:
            h = h[:, :, None]
        if h.shape[2:] != (config.streams, self.d_model):
            raise ValueError(
                f"h has shape {list(shape)}, expected [B, T, {config.streams}, "
                f"{self.d_model}]"
            )
        with jax.named_scope("engram"):
            live = meta.is_real if is_dead is None else meta.is_real & ~is_dead
            # What is convolved is not rounded before.
            has_conv = config.preset.has_conv
            value, _ = take_gated(  # [B, T, G, D]
                h,
                self._keys_and_value(ids),
                self.query_norm.scale[...],
                self.key_norm.scale[...],
                is_live=live,
                dtype=jnp.float32 if has_conv else self.dtype,
                implementation=self.gate_by,
                **self._gate_options(),
            )
            y = value
            if has_conv:
                mixed, conv_state = self._convolve(value, meta, conv_state)
                y = jnp.where(live[:, :, None, None], y + jax.nn.silu(mixed), 0.0)
        return y.astype(self.dtype).reshape(shape), conv_state

    def gates(self, h: jax.Array, ids: jax.Array) -> jax.Array:
        """How much of the memory each stream takes, f32[B, T, G]; see `__call__`."""
        h = h[:, :, None] if h.ndim == 3 else h
        return engram_gate(
            h,
            self._keys_and_value(ids)[:, :, :-1],
            self.query_norm.scale[...],
            self.key_norm.scale[...],
            **self._gate_options(),
        )

    def _keys_and_value(self, ids: jax.Array) -> jax.Array:
        """Keys of G streams and the value, [B, T, G + 1, D]."""
        rows = self.table(ids, self.lookup_by)  # [B, T, C, d]
        e = rows.reshape(*ids.shape[:2], self.config.width).astype(self.dtype)
        kv = self.kv_proj(e)
        return kv.reshape(*ids.shape[:2], self.config.streams + 1, self.d_model)

    def _gate_options(self) -> dict[str, Any]:
        config = self.config
        return {
            "eps": config.gate_norm_eps,
            "clamp": config.gate_clamp,
            "copies_sign": config.preset.copies_sign,
        }

    def _convolve(self, value, meta, state):
        """(f32[B, T, G, D] before the SiLU, the new state)."""
        config = self.config
        scale = jax.lax.rsqrt(
            jnp.mean(value * value, axis=-1, keepdims=True) + config.conv_norm_eps
        )
        normed = value * scale * self.conv_norm.scale[...][None, None]
        normed = normed.astype(self.dtype)
        taps = self.conv_kernel[...].reshape(-1, *value.shape[2:])  # [W, G, D]
        dilation = config.dilation
        if state is not None:
            return _cached_conv(normed, taps, dilation, state, meta)
        borders = config.boundary == "segment" and meta.ids_are_given
        documents = meta.segment_ids if borders else None
        return dilated_conv(normed, taps, dilation, documents=documents), None
