"""`jaxaccel bench render`: the README's tables from the files of measurements.

A figure that is in no file under `experiments/results/` cannot get into the README:
its tables are written here, and a test compares them with the files.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from pallas_kernels._common.bench import ROOT


RESULTS = ROOT / "experiments" / "results"
Rows = Sequence[dict[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Technique:
    """A line of the README's table.

    Attributes:
      name: the technique.
      state: which implementations it has.
      module: where its code is.
      config: its gin folder.
      notebook: its notebook's stem, "" for none.
      file: result file's stem, "" for none.
      figure: rows of that file -> one sentence.
    """

    name: str
    state: str
    module: str
    config: str
    notebook: str = ""
    file: str = ""
    figure: Callable[[Rows], str] = lambda rows: ""


def _rms_norm(rows: Rows) -> str:
    found = [
        row
        for row in rows
        if row["implementation"] == "mosaic"
        and row["cache"] == "cold"
        and "16384" in row["workload"]
        and "4096" in row["workload"]
        and row["dtype"] == "bfloat16"
        and row["ms"]
    ]
    return "; ".join(
        f"{row['workload']}: {row['gbps']:.0f} GB/s, "
        f"{100 * row['share_of_ceiling']:.0f} % of copy speed"
        for row in {row["workload"]: row for row in found}.values()
    )


def _beside_peers(*workloads: str) -> Callable[[Rows], str]:
    """Times of the workloads whose names begin so, and their peers', cold caches."""

    def figure(rows: Rows) -> str:
        found: dict[str, list[str]] = {}
        for row in rows:
            name = row["workload"]
            timed = row["implementation"] == "mosaic" and row["cache"] == "cold"
            if timed and row["ms"] and name.startswith(workloads):
                times = found.setdefault(name, [f"{row['ms']:.3g} ms"])
                if row["peer_ms"]:
                    times.append(f"{row['peer']} {row['peer_ms']:.3g} ms")
        return "; ".join(f"{name}: {', '.join(x)}" for name, x in found.items())

    return figure


def _train_step(rows: Rows) -> str:
    ours = next(row for row in rows if row["implementation"] == "jaxaccel")
    if ours["ms"] is None:
        return ours["note"]
    return (
        f"{ours['parameters'] / 1e6:.0f} M parameters: {ours['tokens_per_s']:,.0f} "
        f"tokens/s, {ours['tflops']:.0f} TFLOP/s, {ours['peak_gib']:.0f} GiB, host "
        f"dispatch {ours['host_dispatch_ms']:.2f} ms; {ours['ratio']:.3f} of the time "
        "of plain JAX"
    )


def _served(rows: Rows) -> str:
    """Throughput with the largest table, by where it lies, against no memory."""
    found = [row for row in rows if row["subject"] == "inference" and row["ms"]]
    largest = max((row["table_gb"] for row in found), default=0)
    texts = [
        f"{row['implementation']} {-row['loss_to_none']:+.1%}"
        for row in found
        if row["table_gb"] == largest and "loss_to_none" in row
    ]
    return f"{largest:.0f} GB, tokens/s: {', '.join(texts)}" if texts else ""


def _offload(rows: Rows) -> str:
    """Step times over remat's, and the deepest stacks."""
    texts = []
    for mode, name in (
        ("ring", "ring"),
        ("policy", "policy"),
        ("policy+graphs", "policy with command buffers"),
        ("remat+graphs", "remat with command buffers"),
    ):
        over = [
            f"{row['ratio'] - 1:+.1%}"
            for row in rows
            if row["op"] == "offload" and row["implementation"] == mode and row["ratio"]
        ]
        if over:
            texts.append(f"{name} {', '.join(over)}")
    deepest = [
        f"{row['implementation']} {row['layers']}"
        for row in rows
        if row["op"] == "offload_longest" and row.get("layers")
    ]
    if texts:
        texts[0] = f"step time over remat's: {texts[0]}"
    return "; ".join(texts + [f"layers that fit: {', '.join(deepest)}"] * bool(deepest))


def _packed_training(rows: Rows) -> str:
    return "; ".join(
        f"{row['workload']}: {row['tokens_per_s']:,.0f} real tokens/s, "
        f"{row['ratio']:.2f} times those of a document a row"
        for row in rows
        if row["op"] == "train_packed" and row["implementation"] == "bfd"
    )


def _waterfall(rows: Rows) -> str:
    """Tokens a second of each step of decoding, by batch, and the best one's share."""
    texts = []
    for batch in sorted({row["batch"] for row in rows}):
        timed = [row for row in rows if row["batch"] == batch and row["ms"]]
        if timed:
            steps = ", ".join(
                f"{row['implementation']} {row['tokens_per_s']:,.0f}" for row in timed
            )
            share = max(row["share_of_limit"] for row in timed)
            texts.append(
                f"batch {batch}: {steps} tokens/s, at best {100 * share:.0f} % of the "
                "memory's limit"
            )
    return "; ".join(texts)


def _nemotron(rows: Rows) -> str:
    found = [
        f"{row['workload']}: {row['tokens_per_s']:,.0f} tokens/s, "
        f"{100 * row['share_of_limit']:.0f} % of the memory's limit"
        for row in rows
        if row["op"] == "nemotron_decode"
        and row["implementation"] == "mosaic"
        and row["workload"].startswith("nano ")
        and row["ms"]
    ]
    found += [
        f"training {row['workload']}: {row['tokens_per_s']:,.0f} tokens/s, MFU "
        f"{100 * row['mfu']:.0f} %"
        for row in rows
        if row["op"] == "nemotron_train_step"
        and row["implementation"] == "mosaic"
        and row["ms"]
        and row["mfu"]
    ]
    return "; ".join(found)


def _kv_cache(rows: Rows) -> str:
    """Of each cache, the largest batch that the whole model would have room for."""
    fits = [row for row in rows if row["ms"] and row["full_fits_device"]]
    largest = {row["method"]: row for row in sorted(fits, key=lambda r: r["batch"])}
    if not largest:
        return ""
    about = next(iter(largest.values()))
    speeds = "; ".join(
        f"{name} {row['tokens_per_s']:,.0f} tokens/s at {row['batch']} rows"
        for name, row in largest.items()
    )
    return f"{about['layers']} layers at {about['context']:,} tokens: {speeds}"


TECHNIQUES = (
    Technique(
        name="Root-mean-square norm, plain, zero-centred, gated",
        state="`reference`, `xla`, `mosaic` forward and backward",
        module="`pallas_kernels.rms_norm`",
        config="all",
        file="rms_norm_h200",
        figure=_rms_norm,
    ),
    Technique(
        name="Gated DeltaNet, hybrid 3:1 with gated attention",
        state="`reference`, `xla`, `mosaic` forward and backward",
        module="`jaxaccel.nn.GatedDeltaNet`",
        config="`experiments/gdn/`",
        notebook="02_gated_deltanet",
        file="gated_delta_rule_h200",
        figure=_beside_peers("qwen3_next 1x8192", "qwen3_next 1x32768"),
    ),
    Technique(
        name="The delta rule over time split between devices, documents astride",
        state="`xla`; `mosaic` by name, not measured yet; no layer uses it yet",
        module="`jaxaccel.nn.context_parallel`",
        config="",
    ),
    Technique(
        name="Decoding: from a launch an operation to a loop on the device, "
        "self-speculation",
        state="each step by gin; in layers `gemv`, `decode_attention` and "
        "`rope_append` by name",
        module="`jaxaccel.decoding`",
        config="`experiments/gdn/decode.gin`",
        file="decode_h200",
        figure=_waterfall,
    ),
    Technique(
        name="A token of a Gated DeltaNet layer in one launch, caches in place",
        state="`reference`, `xla`, `mosaic`",
        module="`pallas_kernels.gated_delta_step`",
        config="`experiments/gdn/decode.gin`",
        file="gated_delta_step_h200",
        figure=_beside_peers("qwen3_next B256"),
    ),
    Technique(
        name="Mixture of experts by one sort, in a latent, over devices",
        state="`reference`, `xla`, `mosaic` grouped products; fused ones by name",
        module="`jaxaccel.nn.MoE`, `jaxaccel.nn.LatentMoE`",
        config="`experiments/moe/`",
        notebook="04_latent_moe",
        file="grouped_matmul_h200",
        figure=_beside_peers("nemotron3_super_up M180224 K1024 N2688 E512 forward"),
    ),
    Technique(
        name="Mamba-2 hybrids from a pattern string (Nemotron 3)",
        state="`reference`, `xla`, `mosaic` both ways and for a token's many heads",
        module="`jaxaccel.nn.Mamba2`, `jaxaccel.models.nemotron_h`",
        config="`experiments/nemotron/`",
        notebook="07_nemotron",
        file="nemotron_h200",
        figure=_nemotron,
    ),
    Technique(
        name="Engram: hashed n-gram memory, tables trained by rows",
        state="`reference`, `xla`; kernels near measured sizes, others by name; tables "
        "on device, host or file",
        module="`jaxaccel.nn.engram`, `jaxaccel.core.host_table`",
        config="`experiments/engram/`",
        notebook="05_engram",
        file="engram_gather_h200",
        figure=_beside_peers("engram_27b 65536"),
    ),
    Technique(
        name="A memory's table on the host under a served model, and what it knows",
        state="read by the device, gathered ahead, from a file; 8-bit rows; "
        "tokens one by one not measured yet",
        module="`jaxaccel.nn.engram_host`, `jaxaccel.benchmarks.engram`",
        config="`experiments/engram/`",
        notebook="05_engram",
        file="engram_h200",
        figure=_served,
    ),
    Technique(
        name="gpt-oss: sinks, windows, clamped experts in MXFP4",
        state="`reference`, `xla`, `mosaic` attention",
        module="`jaxaccel.models.gpt_oss`, `jaxaccel.quant.mxfp4`",
        config="`experiments/moe/gpt_oss_20b.gin`",
    ),
    Technique(
        name="Packed sequences, document borders found once a batch",
        state="all layers and the loss, with the kernels' tables",
        module="`jaxaccel.data`",
        config="`experiments/base/`",
        notebook="03_packing_and_offload",
        file="packing_h200",
        figure=_packed_training,
    ),
    Technique(
        name="Attention that skips tiles between documents, both ways",
        state="`reference`, `xla`, `mosaic` forward and backward",
        module="`pallas_kernels.attention`",
        config="",
        notebook="03_packing_and_offload",
        file="attention_h200",
        figure=_beside_peers("gqa_8", "packed_lengths"),
    ),
    Technique(
        name="Causal convolution with SiLU, packed, with state",
        state="`reference`, `xla`, `mosaic` forward and backward",
        module="`pallas_kernels.causal_conv1d`",
        config="",
        file="causal_conv1d_h200",
        figure=_beside_peers("qwen3_next_whole 1x"),
    ),
    Technique(
        name="Activations in host memory, copied beside the kernels",
        state="ring, policy, groups, recomputation: a plan picks",
        module="`jaxaccel.core.offload`",
        config="`experiments/offload/`",
        notebook="03_packing_and_offload",
        file="offload_h200",
        figure=_offload,
    ),
    Technique(
        name="Caches of long contexts by a plan: ShadowKV, Quest, SnapKV, H2O, pages",
        state="`xla`; values on the host or the device; kernels of single steps; "
        "decoding not measured yet",
        module="`jaxaccel.cache`",
        config="`experiments/kv_cache/`",
        notebook="06_kv_caches",
        file="kv_cache_h200",
        figure=_kv_cache,
    ),
    Technique(
        name="Training step: scanned layers, chunked loss, donated state",
        state="one device, `data` x `fsdp` x `tensor`, several processes",
        module="`jaxaccel.training`",
        config="`experiments/gdn/h200.gin`",
        notebook="01_quickstart",
        file="train_step_h200",
        figure=_train_step,
    ),
)


def _read(stem: str) -> list[dict[str, Any]]:
    path = RESULTS / f"{stem}.json"
    return json.loads(path.read_text())["rows"] if path.is_file() else []


def techniques_table() -> str:
    """The table of techniques in Markdown."""
    lines = [
        "| technique | state | module | config | notebook | measured on one H200 |",
        "|---|---|---|---|---|---|",
    ]
    for item in TECHNIQUES:
        rows = _read(item.file) if item.file else []
        notebook = item.notebook and f"`notebooks/{item.notebook}.ipynb`"
        figure = item.figure(rows) if rows else ""
        cells = (item.name, item.state, item.module, item.config, notebook, figure)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def ablation_table() -> str:
    """The table of the layer-pattern ablation in Markdown."""
    rows = _read("ablation_gdn_h200")
    lines = [
        "| layers | parameters | tokens | held-out nats per byte, by seed | mean "
        "| tokens/s |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        by_seed = ", ".join(f"{value:.4f}" for value in row["heldout_by_seed"])
        lines.append(
            f"| {row['workload']} | {row['parameters'] / 1e6:.1f} M "
            f"| {row['tokens'] / 1e6:.1f} M | {by_seed} | {row['heldout']:.4f} "
            f"| {row['tokens_per_s']:,.0f} |"
        )
    return "\n".join(lines) if rows else "Not measured yet."


TABLES: dict[str, Callable[[], str]] = {
    "techniques": techniques_table,
    "ablation": ablation_table,
}


def rendered(readme: str) -> str:
    """A README with what stands between its markers written anew.

    Raises:
      ValueError: a table's markers are missing.
    """
    for name, table in TABLES.items():
        begin, end = f"<!-- BEGIN {name} -->", f"<!-- END {name} -->"
        if begin not in readme or end not in readme:
            raise ValueError(f"no {begin} and {end} in the README")
        head, rest = readme.split(begin, 1)
        tail = rest.split(end, 1)[1]
        readme = f"{head}{begin}\n{table()}\n{end}{tail}"
    return readme


def main(argv: list[str]) -> int:
    """Rewrites README.md in place."""
    parser = argparse.ArgumentParser(prog="jaxaccel bench render", description=__doc__)
    parser.add_argument("--readme", type=pathlib.Path, default=ROOT / "README.md")
    path = parser.parse_args(argv).readme
    path.write_text(rendered(path.read_text()))
    print(path)
    return 0
