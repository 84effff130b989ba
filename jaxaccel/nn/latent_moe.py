"""A mixture whose experts work in a latent space, by its name."""

from __future__ import annotations

from typing import Any

from flax import nnx

from jaxaccel.nn.moe import MoE
from jaxaccel.nn.router import MoEConfig


class LatentMoE(MoE):
    """`MoE` with `d_latent` (LatentMoE, arXiv 2601.18089), which is then required.

        out = (sum_j w_j W2_j act(W1_j (W_down x))) W_up + shared(x)

    At equal bytes and operations a latent D / L times narrower affords D / L times as
    many experts, and as many more of them a token; two fewer pay for the projections.
    """

    def __init__(
        self, config: MoEConfig, d_model: int, *, rngs: nnx.Rngs, **options: Any
    ):
        """Creates the parameters.

        Args:
          config: the mixture; `d_latent` is positive.
          d_model: width D.
          rngs: source of the `params` key.
          **options: further keywords of `MoE`.

        Raises:
          ValueError: `d_latent` is 0.
        """
        if not config.d_latent:
            raise ValueError(
                f"LatentMoE: d_latent={config.d_latent} must be positive, MoE is the "
                "layer without a latent"
            )
        super().__init__(config, d_model, rngs=rngs, **options)
