"""Dense feed-forward layers."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from jaxaccel.nn import few_rows
from jaxaccel.nn.implementation import Implementations
from jaxaccel.nn.linear import Linear, fan_in_init
from jaxaccel.nn.norm import RMSNorm
from pallas_kernels.grouped_matmul.activation import ALPHA


ACTIVATIONS = ("swiglu", "relu2")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLPConfig:
    """A dense feed-forward layer.

    Attributes:
      d_ff: hidden width F.
      activation: "swiglu", silu(gate x) * up x; or "relu2", relu(up x)^2, without a
        gate matrix.
    """

    d_ff: int
    activation: str = "swiglu"

    def __post_init__(self):
        if self.d_ff < 1:
            raise ValueError(f"MLPConfig: d_ff={self.d_ff} must be positive")
        check_activation("MLPConfig", self.activation)


def check_activation(owner: str, activation: str) -> None:
    """Raises ValueError, in the owner's name, unless the activation is known."""
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"{owner}: activation={activation!r} is unknown, allowed are "
            f"{', '.join(map(repr, ACTIVATIONS))}"
        )


class MLP(nnx.Module):
    """`down(act(x))`, see `MLPConfig`.

    Attributes:
      gate_proj: Linear [D, F], only for "swiglu".
      up_proj: Linear [D, F].
      down_proj: Linear [F, D].
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        activation: str = "swiglu",
        *,
        out_gain: float = 1.0,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        implementation: Implementations = None,
        rngs: nnx.Rngs,
    ):
        """Creates the projections.

        Args:
          d_model: width D.
          d_ff: hidden width F.
          activation: "swiglu" or "relu2".
          out_gain: multiplies the initial deviation of `down_proj`.
          dtype: dtype of the computation.
          param_dtype: dtype of the parameters.
          implementation: see `nn.implementation`.
          rngs: source of the `params` key.

        Raises:
          ValueError: the activation is unknown.
        """
        check_activation("MLP", activation)
        self.products = few_rows.named(implementation)
        kind = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        if activation == "swiglu":
            self.gate_proj = Linear(d_model, d_ff, **kind)
        self.up_proj = Linear(d_model, d_ff, **kind)
        self.down_proj = Linear(
            d_ff, d_model, kernel_init=fan_in_init(out_gain), **kind
        )
        self.activation = activation

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [..., D] to [..., D] in the compute dtype."""
        up = checkpoint_name(self.up_proj(x), "mlp_up")  # [..., F]
        if self.activation == "swiglu":
            gate = checkpoint_name(self.gate_proj(x), "mlp_gate")
            return self.down_proj(swiglu(gate, up))
        return self.down_proj(relu2(up))

    @property
    def awaited(self) -> tuple[Linear, ...]:
        """Maps of its first launch, see `few_rows.Stream.foresee`."""
        is_gated = self.activation == "swiglu"
        return (self.gate_proj, self.up_proj) if is_gated else (self.up_proj,)

    def added(self, x: jax.Array | few_rows.Stream, norm: RMSNorm) -> Any:
        """x [..., D] + self(norm(x)) in two launches, see `few_rows.adds_itself`."""
        if isinstance(x, few_rows.Stream) and self.activation == "swiglu":
            x.add(few_rows.product(self.awaited, norm, swiglu=True))
            x.add(few_rows.product((self.down_proj,), adds=True))
            return x
        x = few_rows.settled(x)
        return self._of_few(x, norm=norm, residual=x)

    def of_few(self, x: jax.Array) -> jax.Array:
        """self(x) where `few_rows.applies`, without a gradient."""
        return self._of_few(x, norm=None, residual=None)

    def _of_few(
        self, x: jax.Array, *, norm: RMSNorm | None, residual: jax.Array | None
    ) -> jax.Array:
        is_gated = self.activation == "swiglu"
        project = functools.partial(few_rows.project, self.products)
        (h,) = project(x, self.awaited, norm=norm, swiglu=is_gated)
        h = h if is_gated else relu2(h)
        (y,) = project(h, (self.down_proj,), residual=residual)
        return y


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """`silu(gate) * up`, the SiLU in f32; result in the inputs' dtype."""
    gated = jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)
    return gated.astype(up.dtype)


def clamped_swiglu(gate: jax.Array, up: jax.Array, limit: float) -> jax.Array:
    """`(up + 1) * gate * sigmoid(1.702 * gate)` of clamped inputs (gpt-oss).

    Args:
      gate: [..., F], at most `limit` after the clamp.
      up: [..., F], between `-limit` and `limit` after it.
      limit: the bound.

    Returns:
      [..., F] in up's dtype, computed in f32.
    """
    bounded = jnp.minimum(gate.astype(jnp.float32), limit)
    linear = jnp.clip(up.astype(jnp.float32), -limit, limit)
    return ((linear + 1) * bounded * jax.nn.sigmoid(ALPHA * bounded)).astype(up.dtype)


def relu2(up: jax.Array) -> jax.Array:
    """`relu(up)^2`, squared in f32; result in the input's dtype."""
    positive = jax.nn.relu(up.astype(jnp.float32))
    return (positive * positive).astype(up.dtype)
