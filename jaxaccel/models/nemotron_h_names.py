"""Names of Nemotron-H checkpoints, tied to the parameters of a `Decoder`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxaccel.models.config import DecoderConfig
from jaxaccel.models.names import (
    DepthwiseConv,
    Grouped,
    NameTable,
    Part,
    Rule,
    Same,
    Transposed,
    rule,
)
from jaxaccel.nn.router import MoEConfig


def name_table(config: DecoderConfig, block: Sequence[str]) -> NameTable:
    """Builds the table of a model.

    Args:
      config: the model, with layers of one part.
      block: kinds of the layers of the prediction block, none if there is none; they
        are the parts of one block of ours.

    Returns:
      The table.
    """
    top = [
        rule("backbone.embeddings.weight", "embed.embedding", layout=Same()),
        rule("backbone.norm_f.weight", "final_norm.scale", layout=Same()),
    ]
    if not config.tie_embeddings:
        top.append(rule("lm_head.weight", "lm_head.kernel"))
    return NameTable(
        top=tuple(top),
        blocks=tuple(_layer_rules(config, kind) for kind, _ in config.positions),
        num_layers=config.num_layers,
        places=config.layer_places,
        prefix="backbone.layers.",
        mtp=_block_rules(config, block) if block else (),
    )


def _layer_rules(config: DecoderConfig, kind: str) -> tuple[Rule, ...]:
    """Names of a layer, inside of it."""
    if kind == "attention":
        return _ATTENTION_RULES
    if kind == "mlp":
        return (_MLP_NORM, *_mlp_rules("mixer.", "mlp."))
    if kind == "moe":
        assert isinstance(config.mlp, MoEConfig)  # the config has checked it
        return (_MLP_NORM, *_moe_rules(config.mlp))
    mamba = config.mamba
    assert mamba is not None  # the config has checked it
    # One projection [z | x b c | dt]; ours are apart, so that the convolution reads
    # its input without a copy.
    projections = rule(
        "mixer.in_proj.weight",
        *(f"mixer.{name}_proj.kernel" for name in ("z", "xbc", "dt")),
        layout=Grouped(
            groups=1,
            widths=(mamba.d_inner, mamba.conv_channels, mamba.num_heads),
            pieces=((0,), (1,), (2,)),
        ),
    )
    return (projections, *_MAMBA_RULES)


def _moe_rules(config: MoEConfig) -> tuple[Rule, ...]:
    def experts(name: str, path: str) -> Rule:
        return Rule(
            f"mixer.experts.{{expert}}.{name}.weight",
            (Part(path),),
            Transposed(),
            config.num_experts,
        )

    found = [
        rule("mixer.gate.weight", "mlp.router.kernel"),
        rule("mixer.gate.e_score_correction_bias", "mlp.router.bias", layout=Same()),
        experts("up_proj", "mlp.w_in"),
        experts("down_proj", "mlp.w_out"),
    ]
    if config.shared_d_ff:
        found += _mlp_rules("mixer.shared_experts.", "mlp.shared.")
    if config.d_latent:
        found += [
            rule("mixer.fc1_latent_proj.weight", "mlp.latent_in.kernel"),
            rule("mixer.fc2_latent_proj.weight", "mlp.latent_out.kernel"),
        ]
    return tuple(found)


def _block_rules(config: DecoderConfig, block: Sequence[str]) -> tuple[Rule, ...]:
    """Names of the prediction block: what is around its layers is in its outer two."""
    last = len(block) - 1
    inner = [
        _moved(item, f"layers.{i}.", "block.")
        for i, kind in enumerate(block)
        for item in _layer_rules(config, kind)
    ]
    return (
        rule("layers.0.enorm.weight", "embed_norm.scale", layout=Same()),
        rule("layers.0.hnorm.weight", "hidden_norm.scale", layout=Same()),
        rule("layers.0.eh_proj.weight", "proj.kernel"),
        *inner,
        rule(
            f"layers.{last}.final_layernorm.weight", "final_norm.scale", layout=Same()
        ),
    )


def _moved(item: Rule, stored: str, ours: str) -> Rule:
    """A rule with prefixes on the stored name and on our paths."""
    parts = tuple(
        dataclasses.replace(part, path=ours + part.path) for part in item.parts
    )
    return dataclasses.replace(item, name=stored + item.name, parts=parts)


def _mlp_rules(stored: str, ours: str) -> tuple[Rule, ...]:
    return tuple(
        rule(f"{stored}{name}.weight", f"{ours}{name}.kernel")
        for name in ("up_proj", "down_proj")
    )


_MLP_NORM = rule("norm.weight", "mlp_norm.scale", layout=Same())
_MIXER_NORM = rule("norm.weight", "mixer_norm.scale", layout=Same())
_ATTENTION_RULES: tuple[Rule, ...] = (
    _MIXER_NORM,
    *(
        rule(f"mixer.{name}.weight", f"mixer.{name}.kernel")
        for name in ("q_proj", "k_proj", "v_proj", "o_proj")
    ),
)
# Behind the input projections.
_MAMBA_RULES: tuple[Rule, ...] = (
    _MIXER_NORM,
    rule("mixer.conv1d.weight", "mixer.conv_kernel", layout=DepthwiseConv()),
    rule("mixer.conv1d.bias", "mixer.conv_bias", layout=Same()),
    *(
        rule(f"mixer.{name}", f"mixer.{name}", layout=Same())
        for name in ("A_log", "D", "dt_bias")
    ),
    rule("mixer.norm.weight", "mixer.norm.scale", layout=Same()),
    rule("mixer.out_proj.weight", "mixer.out_proj.kernel"),
)
