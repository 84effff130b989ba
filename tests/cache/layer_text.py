"""Text for one attention layer, and caches that read it as a decoder would."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxaccel.cache import reference
from jaxaccel.cache.layer_state import AttentionSpec, Tokens
from jaxaccel.cache.plan import decode_step
from jaxaccel.nn.attention import Rotation
from jaxaccel.nn.rope import RopeConfig


THETA = 100.0
SPEC = AttentionSpec(
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    scale=8**-0.5,
    rotate=Rotation(RopeConfig(theta=THETA)),
)


@dataclasses.dataclass(frozen=True)
class Text:
    """Queries, keys and values of every token of every row, before the rotation.

    Attributes:
      q: f32[B, S, H, K].
      k, v: f32[B, S, G, K].
      sinks: f32[H] or `None`.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    sinks: np.ndarray | None = None

    def tokens(self, where, is_real=None) -> Tokens:
        """Tokens i32[B, T] of each row."""
        where = np.asarray(where, np.int32)
        is_real = np.ones(where.shape, bool) if is_real is None else is_real
        return take(self.q, self.k, self.v, self.sinks, where, is_real)

    def astype(self, dtype) -> "Text":
        """The same text in another dtype, the learned sinks apart."""
        q, k, v = (jnp.asarray(x, dtype) for x in (self.q, self.k, self.v))
        return Text(q, k, v, self.sinks)

    def row(self, b: int, length: int, spec: AttentionSpec = SPEC):
        """A row's first tokens: q [N, H, K] and k [N, G, K] rotated, and v."""
        q, k = self.q[b, :length], self.k[b, :length]
        if spec.rotate is not None:
            q, k = rotated(q, np.arange(length)), rotated(k, np.arange(length))
        return q, k, self.v[b, :length]


def rotated(x, positions):
    """x [N, heads, K] at positions i[N], by the definition, in f64."""
    half = x.shape[-1] // 2
    angle = positions[:, None, None] * THETA ** (-np.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)
    return np.concatenate([turned.real, turned.imag], axis=-1)


def take(q, k, v, sinks, where, is_real, spec=SPEC) -> Tokens:
    """`Text.tokens`, traceable."""

    def pick(x):
        return jnp.take_along_axis(x, where[:, :, None, None], axis=1)

    q, k, v = pick(q), pick(k), pick(v)
    positions = jnp.where(is_real, where, 0)
    rotate = (lambda x, _: x) if spec.rotate is None else spec.rotate
    return Tokens(
        q_pre=q,
        k_pre=k,
        q=rotate(q, positions),
        k=rotate(k, positions),
        v=v,
        positions=positions,
        is_real=jnp.asarray(is_real),
        sinks=sinks,
    )


def draw(rows=3, length=40, seed=0, spec=SPEC, sinks=False, rank=None) -> Text:
    """A text; with `rank`, keys of all heads together have that rank."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.normal(size=(rows, length, *shape)).astype(np.float32)

    groups, width = spec.num_kv_heads, spec.head_dim
    k = normal(groups, width)
    if rank is not None:
        basis = rng.normal(size=(rank, groups * width)) / rank**0.5
        k = np.einsum("bsr,rw->bsw", normal(rank), basis).astype(np.float32)
        k = k.reshape(rows, length, groups, width)
    extra = rng.normal(size=spec.num_heads).astype(np.float32) if sinks else None
    return Text(normal(spec.num_heads, width) * 1.5, k, normal(groups, width), extra)


_NEVER_READ = {
    *("k", "v", "ring_k", "ring_v", "ring_a", "out_k", "out_v"),
    *("a", "landmark", "values", "v_slot"),
}


def _poisoned(state):
    """NaN wherever an empty state holds a zero that nothing may read."""
    held = {
        name: jnp.full_like(state[name], jnp.nan)
        for name in state.names()
        if name in _NEVER_READ
    }
    return dataclasses.replace(state, **held)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 6))
def _prefill(policy, spec, room, text, count, width_mask, poison=False):
    batch, width = width_mask.shape
    where = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (batch, width))
    tokens = take(*text, where, where < count[:, None], spec)
    state = policy.init(spec, batch, room, text[0].dtype)
    state = _poisoned(state) if poison else state
    o = policy.attend_prompt(tokens, spec)
    return o, policy.prefill(state, tokens.left_aligned(), spec)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def steps(policy, spec, count, text, length, state, is_real):
    """`count` decoding steps; outputs f32[count, B, H, K] and the state."""

    def step(carry, _):
        state, at = carry
        tokens = take(*text, at[:, None], is_real[:, None], spec)
        o, state = decode_step(policy, state, tokens, spec)
        return (state, at + is_real.astype(jnp.int32)), o[:, 0]

    (state, _), o = jax.lax.scan(step, (state, length), length=count)
    return o, state


def run(
    policy,
    text: Text,
    lengths,
    count,
    *,
    room=None,
    spec=SPEC,
    width=None,
    poison=False,
):
    """Reads prompts of these lengths, then `count` tokens a row.

    With `poison`, what nothing was written to is NaN.

    Returns:
      The prompt's outputs [B, T, H, K], the steps' [count, B, H, K], the last state.
    """
    arrays = tuple(text.__dict__.values())
    lengths = jnp.asarray(lengths, jnp.int32)
    width = max(1, int(max(lengths))) if width is None else width
    room = text.k.shape[1] if room is None else room
    shape = jnp.zeros((lengths.shape[0], width))
    prompt, state = _prefill(policy, spec, room, arrays, lengths, shape, poison)
    policy.check(spec, room)
    real = jnp.ones(lengths.shape, bool)
    o, state = steps(policy, spec, count, arrays, lengths, state, real)
    return np.asarray(prompt), np.asarray(o), state


@jax.jit
def _reset(state, rows):
    stacked = jax.tree.map(lambda x: x[None], state)
    return jax.tree.map(lambda x: x[0], stacked.reset(rows))


def reset(state, rows):
    """One layer's state with rows emptied."""
    return _reset(state, jnp.asarray(rows))


def expected(text: Text, lengths, count, keep, spec=SPEC):
    """Attention over the tokens that `keep(b, q, k, v, n)` names, bool[G or 1, n]."""
    out = np.zeros((count, len(lengths), spec.num_heads, spec.head_dim))
    for b, length in enumerate(lengths):
        for i in range(count):
            q, k, v = text.row(b, length + i + 1, spec)
            kept = np.broadcast_to(
                keep(b, q, k, v, length + i + 1), (spec.num_kv_heads, length + i + 1)
            )
            out[i, b] = reference.attend(
                q[-1], k, v, kept, spec.scale, spec.logit_cap, text.sinks
            )
    return out


def everything(b, q, k, v, n):
    """Keeps all tokens."""
    return np.ones((1, n), bool)
