"""Rows, lines and utilisation figures."""

import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training_runs import hybrid_decoder, ragged_batch, tiny_decoder

from jaxaccel.training import perf
from jaxaccel.training.metrics import (
    Console,
    MetricsWriter,
    progress_line,
    read_metrics,
)


ROW = {
    "loss": 1.5,
    "nats_per_byte": 0.75,
    "grad_norm": 0.5,
    "lr": 1e-3,
    "tokens_per_second": 1.5e6,
    "tflops": 12.0,
    "mfu": None,
    "data_wait": 0.01,
    "peak_memory_bytes": None,
}


def test_rows_are_appended_and_later_ones_removed_on_resume(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.write("train", 2, {"loss": jnp.float32(1.0), "mfu": None})
    writer.write("eval", 1, {"nats_per_byte": 3.0})
    writer.write("eval", 2, {"nats_per_byte": 2.0})
    writer.write("train", 4, {"loss": float("nan")})
    writer.write("end", 2, {"interrupted": True})
    writer.close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"kind": "tra')  # What a kill in the middle of a line leaves.
    rows = read_metrics(tmp_path)
    assert [r["step"] for r in rows] == [2, 1, 2, 4, 2]
    assert rows[0]["loss"] == 1.0
    assert rows[3]["loss"] is None
    assert rows[4]["interrupted"] is True
    writer = MetricsWriter(tmp_path, start_step=2)
    writer.write("train", 3, {"loss": 2})
    writer.close()
    rows = read_metrics(tmp_path)
    kept = [("train", 2), ("eval", 1), ("train", 3)]
    assert [(r["kind"], r["step"]) for r in rows] == kept
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)
    MetricsWriter(tmp_path).close()
    assert read_metrics(tmp_path) == []


def test_tensorboard_files(tmp_path):
    writer = MetricsWriter(tmp_path, tensorboard=True)
    writer.write("train", 1, {"loss": 1.0, "mfu": None})
    writer.write("sample", 1, {"text": "x"})
    writer.close()
    assert list((tmp_path / "tensorboard").glob("events.*"))


def test_progress_line():
    line = progress_line(100, 7, ROW)
    assert line == (
        "step 7/100  loss 1.5000  0.7500 nats/byte  grad 0.500  lr 1.00e-03  "
        "1.50M tok/s  12 TFLOP/s  MFU n/a  data wait 1.0%  mem n/a"
    )
    known = progress_line(100, 7, ROW | {"mfu": 0.5, "peak_memory_bytes": 2**31})
    assert "MFU 50.0%" in known
    assert "mem 2.15GB" in known


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_console_is_quiet_where_nobody_watches():
    plain, terminal, quiet = io.StringIO(), Terminal(), io.StringIO()
    for stream, is_quiet in ((plain, False), (terminal, False), (quiet, True)):
        console = Console(stream=stream, is_quiet=is_quiet)
        console.status("compiling", is_progress=False)
        console.status("step 1")
        console.say("done")
    assert plain.getvalue() == "step 1\ndone\n"
    assert terminal.getvalue() == "\r\x1b[Kcompiling\r\x1b[Kstep 1\r\x1b[Kdone\n"
    assert quiet.getvalue() == ""


class Device:
    def __init__(self, kind):
        self.device_kind = kind


def test_mfu_of_known_and_unknown_devices():
    known = perf.throughput(1e6, 2.0, 1e9, [Device("NVIDIA H200")] * 2)
    assert known.tokens_per_second == 5e5
    assert known.tflops == pytest.approx(250.0)
    assert known.mfu == pytest.approx(250 / 989)
    assert perf.throughput(1e6, 2.0, 1e9, [Device("cpu")]).mfu is None
    assert perf.peak_memory_bytes() is None or jax.default_backend() != "cpu"


def test_document_length_is_that_of_the_tokens():
    batch = ragged_batch(4, 32)
    positions = np.asarray(batch.positions)[np.asarray(batch.segment_ids) > 0]
    assert (perf.mean_document_length(batch) + 1) / 2 == pytest.approx(
        (positions + 1).mean(), abs=0.5
    )


def test_flops_per_token():
    model = tiny_decoder()
    one = perf.training_flops_per_token(model, 1)
    matrices = 2 * (4 * 16 * 16 + 3 * 16 * 16) + 16 * 32
    scores = 2 * 4 * 2 * 8
    assert one == pytest.approx(3 * (2 * matrices + scores))
    assert perf.training_flops_per_token(model, 101) == pytest.approx(
        one + 3 * 50 * scores
    )
    mtp = hybrid_decoder(num_mtp_layers=1)
    assert perf.training_flops_per_token(
        mtp, 8, with_mtp=True
    ) > perf.training_flops_per_token(mtp, 8)
