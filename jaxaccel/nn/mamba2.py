"""Mamba-2 (Dao and Gu, arXiv:2405.21060) in the form of Nemotron-H and Nemotron 3."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from jaxaccel.cache.recurrent import (
    PendingRecurrent,
    RecurrentCache,
    RecurrentCacheOfLayer,
)
from jaxaccel.data.batch import ChunkStarts, ConvBorders, PackingMetadata
from jaxaccel.nn import few_rows
from jaxaccel.nn.implementation import Implementations, implementation_of
from jaxaccel.nn.linear import Linear, fan_in_init
from jaxaccel.nn.norm import RMSNorm
from pallas_kernels.causal_conv1d import causal_conv1d
from pallas_kernels.causal_conv1d import choose as choose_conv
from pallas_kernels.ssd import choose as choose_ssd
from pallas_kernels.ssd import ssd
from pallas_kernels.ssd_step import Layer, ssd_step
from pallas_kernels.ssd_step import choose as choose_step


# Tokens per chunk of the table that the kernels of whole rows read, whatever
# `Mamba2Config.chunk_size` is.
_STARTS = ChunkStarts(chunk=64)
_STATE_DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mamba2Config:
    """A Mamba-2 layer.

    Attributes:
      num_heads: heads H of values, state and output.
      head_dim: V, channels of a head.
      num_groups: G; head h writes and reads along the vectors of group h // (H / G),
        and the output norm has one mean per group.
      state_dim: N, length of those vectors.
      conv_width: taps W of the short convolution over x and those vectors.
      chunk_size: tokens per chunk of the chunked form, a power of two >= 16.
      dt_limit: least and largest step size, in a prefill and in decoding alike.
      dt_min, dt_max: bounds of the log-uniform distribution of initial step sizes.
      dt_floor: least initial step size.
      rate_range: bounds of the uniform distribution of initial forgetting rates.
      state_dtype: of the state that a cache keeps, "float32" or "bfloat16"; what is
        computed with it is f32 either way.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    conv_width: int = 4
    chunk_size: int = 128
    dt_limit: tuple[float, float] = (0.0, math.inf)
    dt_min: float = 1e-3
    dt_max: float = 0.1
    dt_floor: float = 1e-4
    rate_range: tuple[float, float] = (1.0, 16.0)
    state_dtype: str = "float32"

    def __post_init__(self):
        object.__setattr__(self, "dt_limit", tuple(map(float, self.dt_limit)))
        object.__setattr__(self, "rate_range", tuple(map(float, self.rate_range)))
        for name in ("num_heads", "head_dim", "num_groups", "state_dim"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"Mamba2Config: {name}={getattr(self, name)} must be positive"
                )
        if self.chunk_size < 16 or self.chunk_size & (self.chunk_size - 1):
            raise ValueError(
                f"Mamba2Config: chunk_size={self.chunk_size} must be a power of two of "
                "at least 16"
            )
        if self.num_heads % self.num_groups:
            raise ValueError(
                f"Mamba2Config: num_heads={self.num_heads} must be a multiple of "
                f"num_groups={self.num_groups}"
            )
        if self.conv_width < 2:
            raise ValueError(
                f"Mamba2Config: conv_width={self.conv_width} must be at least 2"
            )
        if len(self.dt_limit) != 2 or not 0 <= self.dt_limit[0] < self.dt_limit[1]:
            raise ValueError(
                f"Mamba2Config: dt_limit={self.dt_limit} must be (low, high) with "
                "0 <= low < high"
            )
        if not 0 < self.dt_min <= self.dt_max or self.dt_floor <= 0:
            raise ValueError(
                f"Mamba2Config: dt_min={self.dt_min}, dt_max={self.dt_max}, dt_floor="
                f"{self.dt_floor} must be positive, dt_min at most dt_max"
            )
        if (
            len(self.rate_range) != 2
            or not 0 < self.rate_range[0] <= max(self.rate_range) == self.rate_range[1]
        ):
            raise ValueError(
                f"Mamba2Config: rate_range={self.rate_range} must be (low, high) with "
                "0 < low <= high"
            )
        if self.state_dtype not in _STATE_DTYPES:
            raise ValueError(
                f"Mamba2Config: state_dtype={self.state_dtype!r} is unknown, allowed "
                f"are {', '.join(map(repr, _STATE_DTYPES))}"
            )

    @property
    def d_inner(self) -> int:
        """H*V, the width between the projections."""
        return self.num_heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        """C, the channels of [x | b | c]."""
        return self.d_inner + 2 * self.num_groups * self.state_dim


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftedTokens:
    """What `Mamba2.verify` read and `Mamba2.commit` reads again as far as it is kept.

    Attributes:
      xbc: [B, T, C] before the convolution.
      dt: f32[B, T, H] before bias and softplus.
      is_first: bool[B], whether the first token begins a document.
    """

    xbc: jax.Array
    dt: jax.Array
    is_first: jax.Array


class Mamba2(nnx.Module):
    """A mixer whose memory is one matrix per head, see `Mamba2Config`.

    Attributes:
      z_proj: Linear [D, H*V], the output gate.
      xbc_proj: Linear [D, C], its outputs flat [x | b | c].
      dt_proj: Linear [D, H], step sizes before bias and softplus.
      conv_kernel: [W, C], the last tap on the current token.
      conv_bias: [C].
      A_log: f32[H], logarithm of the forgetting rate.
      D: f32[H], of the skip around the state.
      dt_bias: f32[H].
      norm: RMSNorm over each group's H*V/G channels, after the gate.
      out_proj: Linear [H*V, D].
    """

    def __init__(
        self,
        config: Mamba2Config,
        d_model: int,
        *,
        norm_eps: float = 1e-5,
        out_gain: float = 1.0,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        implementation: Implementations = None,
        rngs: nnx.Rngs,
    ):
        """Creates the parameters; `A_log`, `D` and `dt_bias` are f32 under any dtype.

        Args:
          config: the layer.
          d_model: width D.
          norm_eps: of the output norm.
          out_gain: multiplies the initial deviation of `out_proj`.
          dtype: dtype of the computation outside steps, decay and state.
          param_dtype: dtype of the other parameters.
          implementation: see `nn.implementation`.
          rngs: source of the `params` key.
        """
        kind = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        heads, d_inner = config.num_heads, config.d_inner
        width, channels = config.conv_width, config.conv_channels
        self.z_proj = Linear(d_model, d_inner, **kind)
        self.xbc_proj = Linear(d_model, channels, **kind)
        self.dt_proj = Linear(d_model, heads, **kind)
        bound = width**-0.5

        def uniform(shape, dtype, low, high):
            return jax.random.uniform(rngs.params(), shape, dtype, low, high)

        self.conv_kernel = nnx.Param(
            uniform((width, channels), param_dtype, -bound, bound)
        )
        self.conv_bias = nnx.Param(uniform((channels,), param_dtype, -bound, bound))
        self.A_log = nnx.Param(
            jnp.log(uniform((heads,), jnp.float32, *config.rate_range))
        )
        self.D = nnx.Param(jnp.ones((heads,), jnp.float32))
        log_dt = uniform(
            (heads,), jnp.float32, math.log(config.dt_min), math.log(config.dt_max)
        )
        dt = jnp.maximum(jnp.exp(log_dt), config.dt_floor)
        # The inverse of softplus.
        self.dt_bias = nnx.Param(dt + jnp.log(-jnp.expm1(-dt)))
        self.norm = RMSNorm(
            d_inner,
            eps=norm_eps,
            num_groups=config.num_groups,
            param_dtype=param_dtype,
            implementation=implementation,
        )
        self.out_proj = Linear(
            d_inner, d_model, kernel_init=fan_in_init(out_gain), **kind
        )
        self.config = config
        self.dtype = jnp.dtype(dtype)
        self.conv_implementation = implementation_of("causal_conv1d", implementation)
        self.ssd_implementation = implementation_of("ssd", implementation)
        self.step_implementation = implementation_of("ssd_step", implementation)
        self.products = few_rows.named(implementation)

    @property
    def _borders(self) -> ConvBorders:
        """The tables that the convolution's kernels read, if it is they that run."""
        return ConvBorders(width=self.config.conv_width)

    def tables(
        self, batch: int, time: int, *, cached: bool = False
    ) -> tuple[ChunkStarts | ConvBorders, ...]:
        """Says which tables of `PackingMetadata` a call reads.

        Args:
          batch, time: B and T of the call.
          cached: whether it has a cache; one token is then a step of decoding.

        Returns:
          The tables, none where the implementation that will run needs none.
        """
        if cached and time == 1:
            return ()
        config = self.config
        channels = config.conv_channels

        def shape(*axes):
            return jax.ShapeDtypeStruct(axes, self.dtype)

        x = shape(batch, time, config.num_heads, config.head_dim)
        b = shape(batch, time, config.num_groups, config.state_dim)
        whole = choose_ssd(
            *(x, None, None, b),
            chunk_size=config.chunk_size,
            implementation=self.ssd_implementation,
        )
        conv = choose_conv(
            shape(batch, time, channels),
            shape(config.conv_width, channels),
            bias=shape(channels),
            implementation=self.conv_implementation,
        )
        found: list[ChunkStarts | ConvBorders] = []
        if whole.implementation == "mosaic":
            found.append(_STARTS)
        # With a cache, a row's first document goes on and its borders are others.
        if conv.implementation == "mosaic" and not cached:
            found.append(self._borders)
        return tuple(found)

    def init_cache(
        self, batch: int, max_length: int, dtype: DTypeLike
    ) -> RecurrentCache:
        """Makes the state before any token; its size does not depend on the length."""
        del max_length
        config = self.config
        return RecurrentCache.empty(
            batch,
            config.conv_width,
            config.conv_channels,
            config.num_heads,
            config.head_dim,
            config.state_dim,
            dtype,
            config.state_dtype,
        )

    def __call__(
        self,
        x: jax.Array,
        meta: PackingMetadata,
        cache: RecurrentCache | RecurrentCacheOfLayer | None = None,
        length: jax.Array | None = None,
    ) -> tuple[jax.Array, RecurrentCache | RecurrentCacheOfLayer | None]:
        """Mixes along time.

        Args:
          x: [B, T, D].
          meta: documents; state and convolution restart at each one's first token.
          cache: state left by earlier calls; each row is one document then.
          length: unused, taken so that all mixers are called alike.

        Returns:
          [B, T, D] in the compute dtype, and the state after the last real token, of
          the cache's type (`None` without one).
        """
        if cache is not None and x.shape[1] == 1:
            return self._step(x, meta, cache)
        if isinstance(cache, RecurrentCacheOfLayer):
            y, row = self(x, meta, cache.row, length)
            return y, cache.replace(cast(RecurrentCache, row))
        del length
        if meta.ids_are_given:
            x = jnp.where(meta.is_real[:, :, None], x, jnp.zeros((), x.dtype))
        xbc = checkpoint_name(self.xbc_proj(x), "mamba_xbc")  # [B, T, C]
        dt = self.dt_proj(x, out_dtype=jnp.float32)  # [B, T, H]
        # One document per row from an empty state never restarts inside the row.
        restarts = meta.ids_are_given or cache is not None
        y, after = self._mix(
            xbc,
            dt,
            is_first=meta.is_first if restarts else None,
            is_real=meta.is_real if meta.ids_are_given else None,
            borders=meta.table(self._borders) if cache is None else None,
            starts=meta.table(_STARTS),
            cache=cache,
        )
        y = checkpoint_name(y, "mamba_out")  # [B, T, H*V]
        return self._out(x, y), None if cache is None else after

    def _mix(
        self,
        xbc: jax.Array,
        dt: jax.Array,
        *,
        is_first: jax.Array | None,
        is_real: jax.Array | None,
        borders: Any = None,
        starts: jax.Array | None = None,
        cache: RecurrentCache | None,
    ) -> tuple[jax.Array, RecurrentCache]:
        """Convolution and recurrence: [B, T, C], f32[B, T, H] to [B, T, H*V].

        `starts` says the same as `is_first`, `borders` the same as both masks.
        """
        config = self.config
        with jax.named_scope("conv"):
            xbc, conv = causal_conv1d(
                xbc,
                self.conv_kernel[...].astype(xbc.dtype),
                bias=self.conv_bias[...].astype(xbc.dtype),
                is_first=is_first,
                is_real=is_real,
                borders=borders,
                initial_state=None if cache is None else cache.conv.astype(xbc.dtype),
                activation="silu",
                implementation=self.conv_implementation,
            )
        if is_real is not None:
            # Again: the bias has made something of the zeros that padding was.
            xbc = jnp.where(is_real[:, :, None], xbc, jnp.zeros((), xbc.dtype))
        batch, time, _ = xbc.shape
        d_bc = config.num_groups * config.state_dim
        x, b, c = jnp.split(xbc, (config.d_inner, config.d_inner + d_bc), axis=-1)
        x = x.reshape(batch, time, config.num_heads, config.head_dim)  # [B, T, H, V]
        b, c = (
            m.reshape(batch, time, config.num_groups, config.state_dim) for m in (b, c)
        )  # [B, T, G, N]
        y, state = ssd(
            *(x, dt, -jnp.exp(self.A_log[...]), b, c),
            d=self.D[...],
            dt_bias=self.dt_bias[...],
            dt_limit=config.dt_limit,
            is_first=is_first if starts is None else None,
            starts=starts,
            is_real=is_real,
            initial_state=None if cache is None else cache.state.astype(jnp.float32),
            chunk_size=config.chunk_size,
            implementation=self.ssd_implementation,
        )
        y = y.reshape(batch, time, config.d_inner)
        if cache is None:
            return y, RecurrentCache(conv=conv, state=state)
        kept = RecurrentCache(
            conv=conv.astype(cache.conv.dtype), state=state.astype(cache.state.dtype)
        )
        return y, kept

    def _step(
        self,
        x: jax.Array,
        meta: PackingMetadata,
        cache: RecurrentCache | RecurrentCacheOfLayer,
        norm: RMSNorm | None = None,
    ) -> tuple[jax.Array, RecurrentCache | RecurrentCacheOfLayer]:
        """One token, see `__call__`; a padded row keeps its cache and gives zeros.

        With a norm, x is the stream in front of it, and the result that behind.
        """
        if few_rows.applies(self.products, x):
            maps = (self.xbc_proj, self.dt_proj, self.z_proj)
            dtypes = (self.dtype, jnp.float32, self.dtype)
            xbc, dt, z = few_rows.project(
                self.products, x, maps, norm=norm, out_dtypes=dtypes
            )
        else:
            xbc, z = self.xbc_proj(x), self.z_proj(x)
            dt = self.dt_proj(x, out_dtype=jnp.float32)
        xbc, dt, z = (p[:, 0] for p in (xbc, dt, z))
        layer = Layer(
            conv_weight=self.conv_kernel[...].astype(self.dtype),
            conv_bias=self.conv_bias[...].astype(self.dtype),
            A_log=self.A_log[...],
            D=self.D[...],
            dt_bias=self.dt_bias[...],
            norm_scale=self.norm.scale[...],
            groups=self.config.num_groups,
            norm_eps=self.norm.eps,
            dt_limit=self.config.dt_limit,
        )

        def decode(pools, slots=None, implementation=self.step_implementation):
            return ssd_step(
                *(xbc, dt, z, layer, pools.conv, pools.state, slots),
                is_real=meta.is_real[:, 0] if meta.ids_are_given else None,
                is_first=meta.is_first[:, 0],
                implementation=implementation,
            )

        if isinstance(cache, RecurrentCache):
            y, conv, state = decode(cache)
            new = RecurrentCache(conv=conv, state=state)
        else:
            pools = cache.pools
            choice = choose_step(
                *(xbc, dt, z, layer, pools.conv, pools.state),
                implementation=self.step_implementation,
            ).implementation
            if choice == "mosaic":
                # It updates the layer's part where it is.
                y, *written = decode(pools, cache.slots, choice)
                new = cache.with_pools(*written)
            else:
                y, conv, state = decode(cache.row, implementation=choice)
                new = cache.replace(RecurrentCache(conv=conv, state=state))
        return few_rows.output(self.products, x, y[:, None], self.out_proj, norm), new

    @property
    def awaited(self) -> tuple[Linear, ...]:
        """Maps behind its step, see `few_rows.Stream.foresee`."""
        return (self.out_proj,)

    def added(
        self,
        x: jax.Array,
        norm: RMSNorm,
        meta: PackingMetadata,
        cache: RecurrentCache | RecurrentCacheOfLayer | None,
        length: jax.Array | None,
    ) -> tuple[jax.Array, RecurrentCache | RecurrentCacheOfLayer | None]:
        """x [B, T, D] + self(norm(x), ...), see `few_rows.adds_itself`."""
        if cache is not None and x.shape[1] == 1:
            return self._step(x, meta, cache, norm)
        x = few_rows.settled(x)
        y, cache = self(norm(x), meta, cache, length)
        return x + y, cache

    def _out(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """Gate, norm and output projection of y [B, T, H*V]."""
        y = self.norm(y, gate=self.z_proj(x), norm_before_gate=False)
        return self.out_proj(y)

    def verify(
        self,
        x: jax.Array,
        meta: PackingMetadata,
        cache: RecurrentCache | RecurrentCacheOfLayer,
        length: jax.Array | None = None,
        norm: RMSNorm | None = None,
    ) -> tuple[jax.Array, PendingRecurrent]:
        """Mixes tokens of which only a prefix may be kept, for speculative decoding.

        Args:
          x: [B, T, D], each row its document's next tokens, then padding if any.
          meta: as for `__call__`; only the first token may begin a document.
          cache: state left by earlier calls.
          length: unused, taken so that all mixers are called alike.
          norm: if given, x is the stream in front of it, see `few_rows.adds_itself`.

        Returns:
          [B, T, D] in the compute dtype, or the stream after it, and what `commit`
          needs. Padding and what stands behind it gets values without meaning.
        """
        del length
        if norm is not None:
            x = few_rows.settled(x)
            mixed, pending = self.verify(norm(x), meta, cache)
            return x + mixed, pending
        if isinstance(cache, RecurrentCacheOfLayer):
            cache = cache.row
        drafted = DraftedTokens(
            xbc=self.xbc_proj(x),
            dt=self.dt_proj(x, out_dtype=jnp.float32),
            is_first=meta.is_first[:, 0],
        )
        y, _ = self._read(drafted, cache, None)
        tokens = cast(Any, drafted)
        return self._out(x, y), PendingRecurrent(cache=cache, tokens=tokens)

    def commit(self, pending: PendingRecurrent, accepted: jax.Array) -> RecurrentCache:
        """Keeps the first of the tokens that `verify` has seen.

        They are read again from the state before them: less to hold than a state per
        token.

        Args:
          pending: of `verify`.
          accepted: i32[B], how many to keep, 0 to T; 0 leaves a row's cache as it was.

        Returns:
          The cache as if the accepted tokens alone had been read.
        """
        drafted = cast(DraftedTokens, pending.tokens)
        time = drafted.xbc.shape[1]
        kept = jnp.arange(time, dtype=jnp.int32)[None, :] < accepted[:, None]
        return self._read(drafted, pending.cache, kept)[1]

    def _read(
        self, drafted: DraftedTokens, cache: RecurrentCache, is_real: jax.Array | None
    ) -> tuple[jax.Array, RecurrentCache]:
        """Drafts behind a cache, of which `is_real` bool[B, T] says what is kept."""
        batch, time, _ = drafted.xbc.shape
        begins = jnp.arange(time)[None, :] == jnp.zeros((batch, 1), jnp.int32)
        is_first = begins & drafted.is_first[:, None]
        if is_real is not None:
            is_first = is_first & is_real
        return self._mix(
            drafted.xbc, drafted.dt, is_first=is_first, is_real=is_real, cache=cache
        )
