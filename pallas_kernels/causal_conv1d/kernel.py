"""Mosaic GPU kernels of `causal_conv1d`: one pass over the tokens each way.

A warpgroup has a tile of channels, 2 to 8 neighbouring ones for each thread, and walks
over `Config.time` tokens of one row, `Config.rows` at a step. A thread keeps the last
W - 1 inputs of its channels in registers, so that a token is read once, and W - 1
tokens more at the front of a strip. With `Config.stages` a ring of tensor copies runs
ahead of the arithmetic; without, the loads of a step are in flight together and other
warpgroups of the SM hide them. Warpgroups of a block share nothing: they are there
because the compiler gives a thread of a larger block fewer registers, so that more
threads are on an SM.

The backward pass walks the same way. Each token s adds to the gradients of x at s, at
s - 1, ... and at s - W + 1; the last of these is then complete and leaves, the others
stay in registers. So dy is read once too, and W - 1 tokens of x and dy more at the
back of a strip. Sums for the gradients of weight and bias stay in registers until the
strip is done and leave as one partial sum a strip: no atomics, one order.

Documents come as two bits a token, how many earlier inputs it sees (`tables.py`); a
tap that reaches further is replaced by zero, not multiplied with it, so that not even
a NaN crosses a border. The kernels see channels as [C / 256, 256]: no edge of what a
tensor copy moves may be longer.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._common import hw
from pallas_kernels._common.layout import split_index
from pallas_kernels.causal_conv1d.config import LINE, WARPGROUP, Config
from pallas_kernels.causal_conv1d.tables import MAX_REACH, WORD_TOKENS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The static part of a launch.

    Attributes:
      batch, time, dim, width: B, T, C, W.
      dtype: of x, y and the state.
      has_bias: whether there is a bias.
      packed: whether there is a table of documents.
      silu: whether the activation is SiLU; identity otherwise.
      config: how to tile.
    """

    batch: int
    time: int
    dim: int
    width: int
    dtype: Any
    has_bias: bool
    packed: bool
    silu: bool
    config: Config

    @property
    def shape(self) -> tuple[int, int]:
        """Of one token's tile of channels."""
        return self.config.channels // LINE, LINE

    @property
    def strips(self) -> int:
        """Parts of a row along the tokens."""
        return -(-self.time // self.config.time)

    @property
    def tiles(self) -> int:
        return self.dim // self.config.channels

    @property
    def layout(self) -> Any:
        """Neighbouring channels in a thread, neighbouring threads along a row."""
        return plgpu.Layout.WG_STRIDED(self.shape, self.config.channels // WARPGROUP)


class Place(NamedTuple):
    """What a warpgroup works on: a strip of a row's tokens and a tile of channels."""

    row: jax.Array
    strip: jax.Array
    start: jax.Array
    count: jax.Array
    tile: Any


class Strip:
    """Reading and masking, common to both directions.

    Args:
      plan: the static part.
      table_ref: i32[B, words] of `tables.packed_reach`; `None` without documents.
      state_ref: [B, W - 1, C / 256, 256].
    """

    def __init__(self, plan: Plan, table_ref: Any, state_ref: Any):
        self.plan, self._table, self._state = plan, table_ref, state_ref
        self.warpgroup = lax.axis_index("warpgroup")
        index = lax.axis_index("block") * plan.config.warpgroups + self.warpgroup
        rest, tile = split_index(index, plan.tiles)
        row, strip = split_index(rest, plan.strips)
        start = strip * plan.config.time
        lines = plan.shape[0]
        self.place = Place(
            row=row,
            strip=strip,
            start=start,
            count=jnp.minimum(plan.config.time, plan.time - start),
            tile=pl.ds(tile * lines, lines),
        )

    def load(self, ref: Any) -> jax.Array:
        """f32[C' / 256, 256] from one token's channels."""
        value = plgpu.load(ref, layout=self.plan.layout, optimized=False)
        return value.astype(jnp.float32)

    def at(self, ref: Any, token: Any) -> Any:
        """This warpgroup's channels of one token of [B, T, C / 256, 256]."""
        return ref.at[self.place.row, token, self.place.tile]

    def taps(self, weight_ref: Any, bias_ref: Any) -> tuple[list[jax.Array], Any]:
        taps = [
            self.load(weight_ref.at[w, self.place.tile]) for w in range(self.plan.width)
        ]
        if not self.plan.has_bias:
            return taps, None
        return taps, self.load(bias_ref.at[self.place.tile])

    def zeros(self) -> jax.Array:
        zeros = jnp.zeros(self.plan.shape, jnp.float32)
        return plgpu.layout_cast(zeros, self.plan.layout)

    def window(self, x_ref: Any) -> list[jax.Array]:
        """The W - 1 inputs in front of the strip, oldest first."""
        kept = self.plan.width - 1

        def before_row():
            return [self.load(self.at(self._state, w)) for w in range(kept)]

        def before_strip():
            first = self.place.start - kept
            return [self.load(self.at(x_ref, first + w)) for w in range(kept)]

        if self.plan.strips == 1:
            return before_row()
        return lax.cond(self.place.strip == 0, before_row, before_strip)

    def reach(self, token: jax.Array, rows: int) -> tuple[list[jax.Array], jax.Array]:
        """Earlier inputs that tokens see, and whether all of them see all.

        Args:
          token: the first; `rows` tokens from there on lie in one word.
          rows: how many.
        """
        index, offset = split_index(token, WORD_TOKENS)
        word = lax.shift_right_logical(
            self._table[self.place.row, index], 2 * offset.astype(jnp.int32)
        )
        each = [
            lax.shift_right_logical(word, jnp.int32(2 * r)) & MAX_REACH
            for r in range(rows)
        ]
        ones = -1 if rows == WORD_TOKENS else (1 << 2 * rows) - 1
        return each, (word & ones) == ones


def _keep(reach: jax.Array | None, distance: int, value: jax.Array) -> jax.Array:
    """`value` where a token sees what is `distance` in front of it, else zero."""
    if reach is None or distance == 0:
        return value
    return lax.select(reach >= distance, value, jnp.zeros_like(value))


def _sigmoid(z: jax.Array) -> jax.Array:
    # A division is not approximated even where exp is; this is one instruction more.
    root = lax.rsqrt(1.0 + jnp.exp(-z))
    return root * root


def _seen(history: Sequence[jax.Array], reach: jax.Array | None) -> list[jax.Array]:
    """The W inputs under the taps of a token, the last of `history` its own."""
    last = len(history) - 1
    return [_keep(reach, last - w, value) for w, value in enumerate(history)]


def _weigh(seen: Sequence[jax.Array], taps: Sequence[jax.Array], bias: Any):
    z = bias
    for value, tap in zip(seen, taps, strict=True):
        z = value * tap if z is None else z + value * tap
    return z


def _walk(
    strip: Strip,
    sources: Sequence[Any],
    scratch: dict[str, Any],
    step_fn: Callable,
    carry: Any,
) -> Any:
    """Runs over the tokens of a strip, whole steps first and then what is left.

    Args:
      strip: which tokens.
      sources: refs [B, T, C / 256, 256].
      scratch: "ring" and "full" with stages.
      step_fn: (first token, value, number of tokens, carry) -> carry, where
        `value(k, r)` gives source k at the r-th of these tokens, f32.
      carry: what is handed on.
    """
    plan, place = strip.plan, strip.place
    rows, stages = plan.config.rows, plan.config.stages
    steps = lax.div(place.count, jnp.int32(rows))

    ring: Any = scratch.get("ring")
    full: Any = scratch.get("full")

    def slot(i):
        return strip.warpgroup * stages + lax.rem(i, jnp.int32(stages))

    def fetch(i):
        tokens = pl.ds(place.start + i * rows, rows)
        for source, target in zip(sources, ring, strict=True):
            piece = source.at[place.row, tokens, place.tile]
            plgpu.copy_gmem_to_smem(piece, target.at[slot(i)], full.at[slot(i)])

    def step(i, carry):
        token = place.start + i * rows
        if not stages:
            # All loads are issued before the first one is needed.
            values = [
                [strip.load(strip.at(source, token + r)) for r in range(rows)]
                for source in sources
            ]
            return step_fn(token, lambda k, r: values[k][r], rows, carry)
        plgpu.barrier_wait(full.at[slot(i)])
        carry = step_fn(
            token, lambda k, r: strip.load(ring[k].at[slot(i), r]), rows, carry
        )
        plgpu.commit_smem()  # every thread has read the slot

        @pl.when(i + stages < steps)
        def _():
            fetch(i + stages)

        return carry

    for j in range(stages):
        pl.when(j < steps)(functools.partial(fetch, jnp.int32(j)))
    carry = lax.fori_loop(0, steps, step, carry)
    if plan.time % rows == 0:
        return carry

    def left(i, carry):
        token = place.start + i
        values = [strip.load(strip.at(source, token)) for source in sources]
        return step_fn(token, lambda k, r: values[k], 1, carry)

    return lax.fori_loop(steps * rows, place.count, left, carry)


def _causal_conv1d_fwd_kernel(*refs, plan: Plan, **scratch):
    inputs, (y_ref,) = _named(plan, refs, outputs=1)
    strip = Strip(plan, inputs.get("table"), inputs["state"])
    taps, bias = strip.taps(inputs["weight"], inputs.get("bias"))

    def step(token, value, rows, window):
        def convolve(reach, window):
            for r in range(rows):
                window = [*window, value(0, r)]
                z = _weigh(_seen(window, reach[r]), taps, bias)
                y = z * _sigmoid(z) if plan.silu else z
                strip.at(y_ref, token + r)[...] = y.astype(plan.dtype)
                window = window[1:]
            return window

        return _masked(strip, token, rows, convolve, window)

    _walk(strip, [inputs["x"]], scratch, step, strip.window(inputs["x"]))


def _masked(strip: Strip, token: jax.Array, rows: int, fn: Callable, carry: Any) -> Any:
    """Calls `fn(reach of each token or None, carry)`, without masks if it can."""
    everything = [None] * rows
    if not strip.plan.packed:
        return fn(everything, carry)
    reach, whole = strip.reach(token, rows)
    if not strip.plan.config.branch:
        return fn(reach, carry)
    return lax.cond(
        whole,
        functools.partial(fn, everything),
        functools.partial(fn, reach),
        carry,
    )


def _slope(z: jax.Array, plan: Plan) -> Any:
    if not plan.silu:
        return 1.0
    sigmoid = _sigmoid(z)
    return sigmoid * (1.0 + z * (1.0 - sigmoid))


class Sums(NamedTuple):
    """What the backward pass carries from token to token.

    Attributes:
      window: the last W - 1 inputs, oldest first.
      pending: gradients of the last W - 1 inputs so far, newest first.
      taps: gradients of the taps.
      bias: gradient of the bias, or `None`.
    """

    window: list[jax.Array]
    pending: list[jax.Array]
    taps: list[jax.Array]
    bias: jax.Array | None


def _causal_conv1d_bwd_kernel(*refs, plan: Plan, **scratch):
    inputs, (dx_ref, d_state_ref, partial_ref) = _named(plan, refs, outputs=3)
    strip = Strip(plan, inputs.get("table"), inputs["state"])
    place, kept = strip.place, plan.width - 1
    taps, bias = strip.taps(inputs["weight"], inputs.get("bias"))
    sources = [inputs["x"], inputs["dy"]]

    def spread(dz, reach, pending):
        """Adds what a token's dz means for the inputs under its taps."""
        terms = [taps[kept - j] * _keep(reach, j, dz) for j in range(plan.width)]
        for j in range(kept):
            # The product first: where both are products the compiler fuses the left
            # one, which is then the same wherever in a step the token stands.
            terms[j + 1] = terms[j + 1] + pending[j]
        return terms[:kept], terms[kept]

    def leave(token, done, always=False):
        """Stores the gradient of the input `kept` tokens in front of `token`."""
        done, target = done.astype(plan.dtype), token - kept

        def store():
            strip.at(dx_ref, target)[...] = done

        if always:
            store()
            return
        # What belongs to the strip in front is complete there.
        pl.when(target >= place.start)(store)

        @pl.when(target < 0)
        def _():
            strip.at(d_state_ref, token)[...] = done

    def step(token, value, rows, sums):
        def differentiate(reach, sums):
            window, pending, dtaps, dbias = sums
            for r in range(rows):
                window = [*window, value(0, r)]
                seen = _seen(window, reach[r])
                dz = value(1, r) * _slope(_weigh(seen, taps, bias), plan)
                dtaps = [d + dz * v for d, v in zip(dtaps, seen, strict=True)]
                dbias = None if dbias is None else dbias + dz
                pending, done = spread(dz, reach[r], pending)
                leave(token + r, done, always=r >= kept)
                window = window[1:]
            return Sums(window, pending, dtaps, dbias)

        return _masked(strip, token, rows, differentiate, sums)

    zeros = strip.zeros()
    sums = Sums(
        strip.window(inputs["x"]),
        [zeros] * kept,
        [zeros] * plan.width,
        zeros if plan.has_bias else None,
    )
    sums = _walk(strip, sources, scratch, step, sums)

    # The inputs at the back of the strip are also under taps of the next one.
    end = place.start + place.count
    window, pending = sums.window, sums.pending
    ahead = [jnp.minimum(end + i, plan.time - 1) for i in range(kept)]
    values = []
    if plan.strips > 1:
        values = [[strip.load(strip.at(ref, t)) for t in ahead] for ref in sources]
    for i in range(kept):
        if not values:
            done, pending = pending[-1], [zeros, *pending[:-1]]
        else:
            x, dy = values[0][i], values[1][i]
            reach = strip.reach(ahead[i], 1)[0][0] if plan.packed else None
            history = [*window, x]
            z = _weigh(_seen(history, reach), taps, bias)
            # A select, as what lies behind the row is read from a wrong token.
            dz = lax.select(
                end + i < plan.time, dy * _slope(z, plan), jnp.zeros_like(dy)
            )
            window = history[1:]
            pending, done = spread(dz, reach, pending)
        leave(end + i, done)

    results = [*sums.taps, *([] if sums.bias is None else [sums.bias])]
    for w, total in enumerate(results):
        partial_ref.at[place.row * plan.strips + place.strip, w, place.tile][...] = (
            total
        )


def _named(plan: Plan, refs: Sequence[Any], outputs: int) -> tuple[dict[str, Any], Any]:
    """Splits a kernel's refs into its inputs by name and its outputs."""
    names = ["x", "weight", "state"]
    names += ["bias"] if plan.has_bias else []
    names += ["table"] if plan.packed else []
    names += ["dy"] if len(refs) - outputs > len(names) else []
    return dict(zip(names, refs, strict=False)), refs[len(names) :]


def _lines(x: jax.Array) -> jax.Array:
    """[..., C] to [..., C / 256, 256]."""
    return x.reshape(*x.shape[:-1], -1, LINE)


def _launch(body, name: str, plan: Plan, outputs, inputs, streamed: int):
    """Calls a kernel body with the scratch that `_walk` expects.

    Args:
      body, name: the kernel.
      plan: the static part.
      outputs: shapes and dtypes, channels last.
      inputs: arrays in the order of `_named`.
      streamed: how many of the inputs a ring would hold.
    """
    config = plan.config
    if plan.dim % (config.channels * config.warpgroups):
        raise ValueError(
            f"{name}: {plan.dim} channels are no multiple of channels * warpgroups = "
            f"{config.channels} * {config.warpgroups}"
        )
    scratch: dict[str, Any] = {}
    if config.stages:
        slots = config.warpgroups * config.stages
        shape = (slots, config.rows, *plan.shape)
        scratch["ring"] = [plgpu.SMEM(shape, plan.dtype) for _ in range(streamed)]
        scratch["full"] = plgpu.Barrier(num_arrivals=streamed, num_barriers=slots)
    hw.check_smem(config.ring_bytes(streamed, plan.dtype), name)
    results = plgpu.kernel(
        functools.partial(body, plan=plan),
        out_type=tuple(
            jax.ShapeDtypeStruct((*shape[:-1], shape[-1] // LINE, LINE), dtype)
            for shape, dtype in outputs
        ),
        scratch_types=scratch,
        grid=(plan.batch * plan.strips * plan.tiles // config.warpgroups,),
        grid_names=("block",),
        num_threads=config.warpgroups,
        thread_name="warpgroup",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            # A barrier around each store would part the loads of a step. Nothing is
            # both read and written, and a slot is refilled behind `commit_smem`.
            unsafe_no_auto_barriers=True,
        ),
    )(*inputs)
    return [
        result.reshape(shape)
        for result, (shape, _) in zip(results, outputs, strict=True)
    ]


def _inputs(plan: Plan, x, weight, state, bias, table) -> list[jax.Array]:
    inputs = [_lines(x), _lines(weight), _lines(state)]
    if plan.has_bias:
        inputs.append(_lines(bias))
    if plan.packed:
        inputs.append(table)
    return inputs


def causal_conv1d_fwd(
    plan: Plan,
    x: jax.Array,
    weight: jax.Array,
    state: jax.Array,
    bias: jax.Array | None,
    table: jax.Array | None,
) -> jax.Array:
    """Launches the forward pass.

    Args:
      x: [B, T, C] in `plan.dtype`.
      weight: [W, C], float32 or `plan.dtype`.
      state: [B, W - 1, C] in `plan.dtype`.
      bias: [C], float32 or `plan.dtype`, or `None`.
      table: i32[B, ceil(T / 16)] of `tables.packed_reach`, or `None`.

    Returns:
      y, like x.

    Raises:
      ValueError: the tiling does not divide C, or its ring does not fit into shared
        memory.
    """
    (y,) = _launch(
        _causal_conv1d_fwd_kernel,
        "pk_causal_conv1d_fwd",
        plan,
        [(x.shape, plan.dtype)],
        _inputs(plan, x, weight, state, bias, table),
        streamed=1,
    )
    return y


def causal_conv1d_bwd(
    plan: Plan,
    x: jax.Array,
    weight: jax.Array,
    state: jax.Array,
    bias: jax.Array | None,
    table: jax.Array | None,
    dy: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Launches the backward pass; arguments as for `causal_conv1d_fwd`, dy like x.

    Returns:
      dx like x, dweight f32[W, C], dstate like state, dbias f32[C] or `None`.

    Raises:
      ValueError: the tiling does not divide C, or its ring does not fit into shared
        memory.
    """
    sums = plan.width + plan.has_bias
    outputs = [
        (x.shape, plan.dtype),
        (state.shape, plan.dtype),
        ((plan.batch * plan.strips, sums, plan.dim), jnp.float32),
    ]
    inputs = [*_inputs(plan, x, weight, state, bias, table), _lines(dy)]
    dx, d_state, partial = _launch(
        _causal_conv1d_bwd_kernel,
        "pk_causal_conv1d_bwd",
        plan,
        outputs,
        inputs,
        streamed=2,
    )
    total = jnp.sum(partial, axis=0)
    return dx, total[: plan.width], d_state, total[-1] if plan.has_bias else None
