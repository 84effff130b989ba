"""Size and cost of a model, counted from its config without building it.

What is counted as work: matrix products only, two operations a multiplication and
addition. A projection costs 2 d_in d_out a token. Attention scores and values cost
4 H K operations a key seen, and a token of a T-token document sees (T + 1) / 2 keys on
average, fewer with a window. The delta rule costs 6 K V a value head: reading what a
key recalls, writing the correction, reading with the query; Mamba-2 recalls nothing and
costs 4 V N a head. The chunked forms do more of it, which is the price of parallelism
and no useful work. A token pays for the experts it visits, not for the others. An
n-gram memory costs the projection of the rows that a token reads and its convolution;
hashing and reading are no products, however large the tables are. A backward pass costs
twice the forward pass, so training costs three times it; rematerialised layers are not
counted again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import jax.numpy as jnp

from jaxaccel.models.config import DecoderConfig, MixerConfig
from jaxaccel.nn.attention import AttentionConfig
from jaxaccel.nn.engram_config import EngramConfig
from jaxaccel.nn.gated_deltanet import GatedDeltaNetConfig
from jaxaccel.nn.mamba2 import Mamba2Config
from jaxaccel.nn.mlp import MLPConfig
from jaxaccel.nn.router import MoEConfig


_F32_BYTES = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """One part of a model, or several added up.

    Attributes:
      params: parameters, buffers such as a router's bias included.
      active_params: parameters that one token's forward pass reads; of an embedding
        table, one row, of a memory's table, one for each order and head.
      param_bytes: bytes of the parameters as held.
      state_bytes: bytes a sequence keeps whatever its length (recurrent state in f32 or
        the type that its layer names, convolution inputs in the compute dtype, a
        memory's last tokens).
      kv_bytes_per_token: bytes of keys and values a token adds, in the compute dtype;
        a window bounds how many of them a decoder would need to keep.
      forward_flops: operations of one token's forward pass, a mean over the document.
    """

    params: int = 0
    active_params: int = 0
    param_bytes: int = 0
    state_bytes: int = 0
    kv_bytes_per_token: int = 0
    forward_flops: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            **{
                field.name: getattr(self, field.name) + getattr(other, field.name)
                for field in dataclasses.fields(Cost)
            }
        )

    def times(self, count: int) -> Cost:
        """The cost of `count` such parts."""
        return Cost(
            **{
                field.name: getattr(self, field.name) * count
                for field in dataclasses.fields(Cost)
            }
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table.

    Attributes:
      name: what it is, such as "layer 0: gdn + moe".
      count: how many of them the model has.
      cost: of one of them.
    """

    name: str
    count: int
    cost: Cost


@dataclasses.dataclass(frozen=True, kw_only=True)
class Description:
    """What a model is made of and what it costs.

    Attributes:
      config: the model.
      seq_len: tokens T of the documents that the attention cost is averaged over.
      rows: parts in the order of the forward pass, a memory's before the layers that
        they stand in front of; the prediction block is the last.
    """

    config: DecoderConfig
    seq_len: int
    rows: tuple[Row, ...]

    @property
    def total(self) -> Cost:
        """Everything, the prediction block included."""
        return _sum(self.rows)

    @property
    def trunk(self) -> Cost:
        """What produces the next token's logits: all but the prediction block."""
        return _sum(row for row in self.rows if row.name != "mtp")

    @property
    def training_flops(self) -> float:
        """Operations a token in training: three forward passes of everything."""
        return 3.0 * self.total.forward_flops

    def table(self) -> str:
        """The rows and totals as text."""
        head = (
            "part",
            "count",
            "params each",
            "active each",
            "state B/seq",
            "KV B/token",
            "MFLOP/token",
        )
        lines: list[tuple[str, ...]] = [head]
        for row in self.rows:
            lines.append((row.name, str(row.count), *_cells(row.cost)))
        lines.append(("total", "", *_cells(self.total)))
        widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
        text = []
        for line in lines:
            cells = [line[0].ljust(widths[0])]
            cells += [
                cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True)
            ]
            text.append("  ".join(cells).rstrip())
        rule = "-" * max(map(len, text))
        text = [text[0], rule, *text[1:-1], rule, text[-1]]
        return "\n".join([*text, "", *self._summary()])

    def _summary(self) -> list[str]:
        total, trunk = self.total, self.trunk
        params, active = total.params, trunk.active_params
        cache = trunk.state_bytes + trunk.kv_bytes_per_token * self.seq_len
        return [
            f"parameters     {params:,} ({_short(params, 'B')}), "
            f"{_bytes(total.param_bytes)}",
            f"active a token {active:,} ({_short(active, 'B')})",
            f"cache          {_bytes(trunk.state_bytes)} a sequence + "
            f"{_bytes(trunk.kv_bytes_per_token)} a token = {_bytes(cache)} at "
            f"{self.seq_len:,} tokens",
            f"FLOPs a token  {_short(trunk.forward_flops)} forward, "
            f"{_short(self.training_flops)} training, documents of "
            f"{self.seq_len:,} tokens",
            *self._memory_summary(),
        ]

    def _memory_summary(self) -> list[str]:
        engram = self.config.engram
        if engram is None:
            return []
        num_rows = _num_rows(engram, self.config.vocab_size)
        size = sum(num_rows) * engram.head_dim
        num_bytes = sum(num_rows) * engram.row_bytes
        return [
            f"memory tables  {size:,} ({_short(size, 'B')}), {_bytes(num_bytes)}: "
            f"{sum(num_rows):,} rows, a token reads "
            f"{engram.num_columns * len(num_rows):,}"
        ]


def describe(config: DecoderConfig, seq_len: int = 4096) -> Description:
    """Counts a model.

    Args:
      config: the model; nothing of it is built.
      seq_len: tokens T of a document.

    Returns:
      The description.

    Raises:
      ValueError: `seq_len` is not positive.
    """
    if seq_len < 1:
        raise ValueError(f"seq_len={seq_len} must be positive")
    count = _Counter(config, seq_len)
    norm = count.vector(config.d_model)
    rows = [Row(name="embed", count=1, cost=count.embedding())]
    if config.engram is not None:
        rows += count.memory(config.engram)
    if config.single_part:
        # Layers of a kind are equal: one row each, in the order of their first.
        kinds = config.layer_types
        rows += [
            Row(
                name=f"layer: {kind}",
                count=kinds.count(kind),
                cost=count.block(*config.layer_parts(kind)),
            )
            for kind in dict.fromkeys(kinds)
        ]
    else:
        mlp_name = "moe" if isinstance(config.mlp, MoEConfig) else "mlp"
        rows += [
            Row(
                name=f"layer {position}: {kind} + {mlp_name}",
                count=config.num_periods,
                cost=count.block(*config.layer_parts(kind)),
            )
            for position, kind in enumerate(config.pattern)
        ]
    rows.append(Row(name="final_norm", count=1, cost=norm))
    rows.append(Row(name="lm_head", count=1, cost=count.head()))
    if config.num_mtp_layers:
        own = norm.times(3) + count.linear(2 * config.d_model, config.d_model)
        shared = Cost(forward_flops=count.head().forward_flops)  # no weights of its own
        # It drafts from a hidden state and keeps no cache in `Decoder.init_cache`.
        block = dataclasses.replace(
            count.block(config.attention, config.mlp),
            state_bytes=0,
            kv_bytes_per_token=0,
        )
        rows.append(Row(name="mtp", count=1, cost=own + block + shared))
    return Description(config=config, seq_len=seq_len, rows=tuple(rows))


class _Counter:
    """Costs of the parts of one model."""

    def __init__(self, config: DecoderConfig, seq_len: int):
        self._config = config
        self._seq_len = seq_len
        self._param_bytes = jnp.dtype(config.param_dtype).itemsize
        self._compute_bytes = config.compute_dtype.itemsize

    def vector(self, size: int, *, f32: bool = False) -> Cost:
        """Parameters that take part in no matrix product."""
        width = _F32_BYTES if f32 else self._param_bytes
        return Cost(params=size, active_params=size, param_bytes=size * width)

    def linear(
        self, d_in: int, d_out: int, *, bias: bool = False, f32: bool = False
    ) -> Cost:
        weights = self.vector(d_in * d_out + (d_out if bias else 0), f32=f32)
        return weights + Cost(forward_flops=2 * d_in * d_out)

    def embedding(self) -> Cost:
        size = self._config.vocab_size * self._config.d_model
        whole = self.vector(size)
        tied = self._config.tie_embeddings
        # A tied table is read whole, by the output layer.
        active = size if tied else self._config.d_model
        return dataclasses.replace(whole, active_params=active)

    def head(self) -> Cost:
        config = self._config
        cost = self.linear(config.d_model, config.vocab_size)
        if config.tie_embeddings:
            return Cost(forward_flops=cost.forward_flops)
        return cost

    def memory(self, config: EngramConfig) -> list[Row]:
        """The hash, and each layer's table with what makes use of it."""
        vocab = self._config.vocab_size
        hashed = Cost(state_bytes=4 * (config.orders[-1] - 1))  # i32 classes
        if config.compress or config.compressed_size is not None:
            # The map from tokens to classes, of which a token reads its own.
            classes = self.vector(vocab, f32=True)
            hashed += dataclasses.replace(classes, active_params=1)
        rows = [Row(name="memory: hash", count=1, cost=hashed)]
        tables = _num_rows(config, vocab)
        for place, num_rows in zip(config.places, tables, strict=True):
            cost = self.table(config, num_rows) + self.engram(config)
            rows.append(Row(name=f"memory before layer {place}", count=1, cost=cost))
        return rows

    def table(self, config: EngramConfig, num_rows: int) -> Cost:
        return Cost(
            params=num_rows * config.head_dim,
            active_params=config.width,
            param_bytes=num_rows * config.row_bytes,
        )

    def engram(self, config: EngramConfig) -> Cost:
        """What a layer does with the rows that it reads."""
        d_model, streams = self._config.d_model, config.streams
        channels, preset = streams * d_model, config.preset
        cost = self.linear(config.width, channels + d_model, bias=preset.has_bias)
        cost += self.vector(channels, f32=True).times(2)
        if preset.has_conv:
            width = config.conv_width
            cost += self.vector((width + 1) * channels, f32=True)
            kept = (width - 1) * config.dilation
            cost += Cost(
                state_bytes=kept * channels * self._compute_bytes,
                forward_flops=2 * width * channels,
            )
        return cost

    def block(
        self, mixer: MixerConfig | None, mlp: MLPConfig | MoEConfig | None
    ) -> Cost:
        """A layer of these parts, each with its norm."""
        cost = self.vector(self._config.d_model).times(2 - (mixer, mlp).count(None))
        if isinstance(mixer, AttentionConfig):
            cost += self.attention(mixer)
        elif isinstance(mixer, Mamba2Config):
            cost += self.mamba(mixer)
        elif mixer is not None:
            cost += self.gated_deltanet(mixer)
        if isinstance(mlp, MoEConfig):
            cost += self.moe(mlp)
        elif mlp is not None:
            cost += self.mlp(mlp)
        return cost

    def attention(self, config: AttentionConfig) -> Cost:
        d_model, bias = self._config.d_model, config.use_bias
        d_query = config.num_heads * config.head_dim
        d_key = config.num_kv_heads * config.head_dim
        into_query = self.linear(d_model, d_query, bias=bias)
        cost = into_query.times(2 if config.output_gate else 1)
        cost += self.linear(d_model, d_key, bias=bias).times(2)
        cost += self.linear(d_query, d_model, bias=bias)
        if config.qk_norm:
            cost += self.vector(config.head_dim).times(2)
        if config.sinks:
            cost += self.vector(config.num_heads, f32=True)
        keys = _mean_keys(self._seq_len, config.window)
        return cost + Cost(
            kv_bytes_per_token=2 * d_key * self._compute_bytes,
            forward_flops=4 * d_query * keys,
        )

    def gated_deltanet(self, config: GatedDeltaNetConfig) -> Cost:
        d_model, heads = self._config.d_model, config.num_value_heads
        d_value = heads * config.value_dim
        channels, width = config.conv_channels, config.conv_width
        cost = self.linear(d_model, channels + d_value + 2 * heads)
        cost += self.vector(width * channels) + Cost(forward_flops=2 * width * channels)
        cost += self.vector(2 * heads, f32=True) + self.vector(config.value_dim)
        cost += self.linear(d_value, d_model)
        state = config.key_dim * d_value
        return cost + Cost(
            state_bytes=state * _F32_BYTES
            + (width - 1) * channels * self._compute_bytes,
            forward_flops=6 * state,
        )

    def mamba(self, config: Mamba2Config) -> Cost:
        d_model, heads = self._config.d_model, config.num_heads
        channels, width = config.conv_channels, config.conv_width
        cost = self.linear(d_model, channels + config.d_inner + heads)
        cost += self.vector((width + 1) * channels)
        cost += Cost(forward_flops=2 * width * channels)
        cost += self.vector(3 * heads, f32=True) + self.vector(config.d_inner)
        cost += self.linear(config.d_inner, d_model)
        state = config.d_inner * config.state_dim
        return cost + Cost(
            state_bytes=state * jnp.dtype(config.state_dtype).itemsize
            + (width - 1) * channels * self._compute_bytes,
            forward_flops=4 * state,
        )

    def mlp(self, config: MLPConfig) -> Cost:
        d_model = self._config.d_model
        matrices = 3 if config.activation == "swiglu" else 2
        return self.linear(d_model, config.d_ff).times(matrices)

    def moe(self, config: MoEConfig) -> Cost:
        d_model = self._config.d_model
        d_expert = config.d_latent or d_model
        gated = config.activation == "swiglu"
        expert = self.linear(d_expert, config.d_ff).times(3 if gated else 2)
        if config.use_bias:
            expert += self.vector((1 + gated) * config.d_ff + d_expert)
        every, visited = expert.times(config.num_experts), expert.times(config.top_k)
        cost = dataclasses.replace(
            every,
            active_params=visited.active_params,
            forward_flops=visited.forward_flops,
        )
        cost += self.linear(d_model, config.num_experts, bias=config.use_bias, f32=True)
        if config.bias_update_rate > 0:
            cost += self.vector(config.num_experts, f32=True)
        if config.shared_d_ff:
            cost += self.mlp(
                MLPConfig(d_ff=config.shared_d_ff, activation=config.activation)
            )
        if config.shared_gate:
            cost += self.linear(d_model, 1)
        if config.d_latent:
            cost += self.linear(d_model, config.d_latent).times(2)
        return cost


def _num_rows(config: EngramConfig, vocab_size: int) -> tuple[int, ...]:
    """Rows of each table. They do not depend on a tokenizer, which may be unknown."""
    if config.compressed_size is None:
        config = dataclasses.replace(config, compress=False)
    return config.layout(vocab_size).num_rows


def _mean_keys(seq_len: int, window: int | None) -> float:
    """Keys a token sees on average over a document, itself among them."""
    if window is None or window >= seq_len:
        return (seq_len + 1) / 2
    return window - window * (window - 1) / (2 * seq_len)


def _sum(rows: Iterable[Row]) -> Cost:
    total = Cost()
    for row in rows:
        total += row.cost.times(row.count)
    return total


def _cells(cost: Cost) -> tuple[str, ...]:
    return (
        f"{cost.params:,}",
        f"{cost.active_params:,}",
        f"{cost.state_bytes:,}",
        f"{cost.kv_bytes_per_token:,}",
        f"{cost.forward_flops / 1e6:,.3f}",
    )


def _short(value: float, billions: str = "G") -> str:
    for unit, name in ((1e12, "T"), (1e9, billions), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:.2f} {name}"
    return f"{value:.0f}"


def _bytes(value: float) -> str:
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= unit:
            return f"{value / unit:.2f} {name}"
    return f"{value:.0f} B"
