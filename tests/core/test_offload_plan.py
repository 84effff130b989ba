"""A plan fits every limit, names the one it failed by, and never goes up again."""

import dataclasses
import types

import hypothesis
import hypothesis.strategies as st
import jax
import pytest

from jaxaccel.core import memory, offload, offload_plan
from jaxaccel.core.memory import HostMemory
from jaxaccel.core.offload_plan import (
    OffloadFailed,
    OffloadPlan,
    ScanSizes,
    compiler_options,
    gradient_canary,
    plan_offload,
    verify_offload,
)


GIB, MIB = 2**30, 2**20
H200 = HostMemory(
    device="NVIDIA H200", has_pinned_host=True, is_shared=False, pinned_limit=64 * GIB
)
# 32 layers of 8192 tokens of width 4096 in bfloat16.
SIZES = ScanSizes(length=32, activation_bytes=64 * MIB)


def plan(mode="ring", sizes=SIZES, host=H200, **options):
    return plan_offload(mode, sizes, host, **options)


def test_what_fits_is_taken():
    got = plan()
    assert (got.mode, got.group, got.host_bytes) == ("ring", 1, 2 * GIB)
    assert got.device_bytes == 2 * 64 * MIB
    for mode in ("save", "remat"):
        assert plan(mode).mode == mode
        assert plan(mode).device_bytes == 32 * 64 * MIB


def test_a_budget_of_one_gigabyte_takes_groups():
    got = plan(host_budget=GIB)
    assert (got.mode, got.group, got.host_bytes) == ("group", 2, GIB)
    assert "ring: needs 2 GiB of host memory (the host budget is 1 GiB)" in got.reason
    assert "policy: needs 2 GiB" in got.reason


def test_the_pinned_limit_is_named():
    long = ScanSizes(length=32, activation_bytes=8 * GIB)
    got = plan(sizes=long)
    assert (got.mode, got.group, got.host_bytes) == ("group", 4, 64 * GIB)
    assert (
        "ring: needs 256 GiB of host memory (the pinned pool has 64 GiB "
        "(XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB))" in got.reason
    )


def test_what_other_arrays_pin_counts():
    got = plan(reserved=63 * GIB)
    assert (got.mode, got.host_bytes) == ("group", GIB)
    assert "beside 63 GiB in use" in got.reason


def test_nothing_fits_a_tiny_budget():
    got = plan(host_budget=MIB)
    assert (got.mode, got.host_bytes) == ("remat", 0)
    assert "no group of 32 layers is small enough (the host budget is 1 MiB)" in (
        got.reason
    )


@pytest.mark.parametrize(
    ("host", "sizes", "reason"),
    [
        ({"has_pinned_host": False}, {}, "NVIDIA H200 has no memory of the kind"),
        ({"is_shared": True}, {}, "memory of NVIDIA H200 is the host's own"),
        ({}, {"length": 2}, "2 layers are less than 3"),
        ({}, {"activation_bytes": 2 * MIB - 1}, "less than 2097152"),
    ],
)
def test_where_offloading_is_of_no_use(host, sizes, reason):
    got = plan(
        host=dataclasses.replace(H200, **host),
        sizes=dataclasses.replace(SIZES, **sizes),
    )
    assert got.mode == "remat"
    assert got.reason.startswith("ring: ")
    assert reason in got.reason


def test_modes_that_failed_are_passed_over():
    failed = {}
    for expected in ("ring", "policy", "group", "remat"):
        got = plan(failed=failed)
        assert got.mode == expected
        failed[expected] = f"{expected} broke"
    assert got.reason == "ring: ring broke; policy: policy broke; group: group broke"


def test_every_stage_stores_an_input():
    sizes = ScanSizes(length=8, stages=4, activation_bytes=4 * MIB, num_devices=2)
    assert plan(sizes=sizes).host_bytes == 8 * 4 * 4 * MIB * 2
    assert plan(sizes=sizes).device_bytes == 2 * 4 * 4 * MIB
    named = ScanSizes(length=8, activation_bytes=4 * MIB, named_bytes=MIB)
    assert plan("policy", sizes=named).host_bytes == 8 * 5 * MIB


@hypothesis.given(
    mode=st.sampled_from(offload.OFFLOADING),
    length=st.integers(1, 48),
    stages=st.integers(1, 4),
    activation=st.integers(1, 300),
    budget=st.none() | st.integers(0, 70_000),
    reserved=st.integers(0, 2_000),
    available=st.none() | st.integers(0, 70_000),
    failed=st.sets(st.sampled_from(offload.OFFLOADING)),
)
@hypothesis.settings(max_examples=200, deadline=None)
def test_no_plan_passes_a_limit(
    mode, length, stages, activation, budget, reserved, available, failed
):
    """All sizes in MiB."""
    host = HostMemory(
        device="x",
        has_pinned_host=True,
        is_shared=False,
        pinned_limit=64 * GIB,
        available=None if available is None else available * MIB,
    )
    sizes = ScanSizes(length=length, stages=stages, activation_bytes=activation * MIB)
    got = plan(
        mode,
        sizes=sizes,
        host=host,
        host_budget=None if budget is None else budget * MIB,
        reserved=reserved * MIB,
        failed=dict.fromkeys(failed, "it failed"),
    )
    order = (*offload.OFFLOADING, "remat")
    assert order.index(got.mode) >= order.index(mode)
    assert got.mode not in failed
    if got.mode == "remat":
        assert got.host_bytes == 0
        return
    total = got.host_bytes + reserved * MIB
    assert total <= 64 * GIB
    assert budget is None or total <= budget * MIB
    assert available is None or total <= available * MIB
    assert length % got.group == 0
    assert (got.group > 1) == (got.mode == "group")


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="'rings' is unknown"):
        plan("rings")


def test_only_modes_that_offload_need_to_know_the_memory():
    assert plan("remat", host=None).mode == "remat"
    with pytest.raises(ValueError, match="mode='ring' needs memory, got None"):
        plan("ring", host=None)


# What the machine has.


def test_a_cpu_shares_its_memory():
    got = memory.host_memory()
    assert got.is_shared
    assert plan(host=got).mode == "remat"


class FakeDevice(types.SimpleNamespace):
    def addressable_memories(self):
        return [types.SimpleNamespace(kind=kind) for kind in self.kinds]


def test_devices_are_told_apart():
    gpu = FakeDevice(
        platform="gpu", device_kind="NVIDIA H200", kinds=("device", "pinned_host")
    )
    assert not memory.host_memory(gpu).is_shared
    assert memory.host_memory(gpu).has_pinned_host
    integrated = FakeDevice(**(vars(gpu) | {"device_kind": "NVIDIA GB10"}))
    assert memory.host_memory(integrated).is_shared
    bare = FakeDevice(platform="tpu", device_kind="TPU v0", kinds=("device",))
    assert not memory.host_memory(bare).has_pinned_host
    with pytest.raises(NotImplementedError, match=r"some=1 needs .* TPU v0 .* device$"):
        memory.require_pinned_host([gpu, bare], "some=1")


def test_the_pinned_limit_is_xlas(monkeypatch):
    monkeypatch.delenv(memory.PINNED_LIMIT_VARIABLE, raising=False)
    assert memory.pinned_limit() == 64 * GIB
    monkeypatch.setenv(memory.PINNED_LIMIT_VARIABLE, "128")
    assert memory.pinned_limit() == 128 * GIB
    monkeypatch.setenv(memory.PINNED_LIMIT_VARIABLE, "all")
    with pytest.raises(ValueError, match="'all' is no whole number"):
        memory.pinned_limit()


@pytest.mark.parametrize(
    ("limit", "used", "left"),
    [
        ("1000", "400", 600),
        ("1000", "1400", 0),
        ("max", "400", None),
        (None, "4", None),
    ],
)
def test_the_control_group_says_what_is_left(tmp_path, limit, used, left):
    if limit is not None:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{used}\n")
    assert memory.control_group_available(tmp_path) == left


@pytest.mark.parametrize(
    ("size", "text"), [(64 * GIB, "64 GiB"), (MIB, "1 MiB"), (3 * GIB // 2, "1.5 GiB")]
)
def test_bytes_are_readable(size, text):
    assert memory.gib(size) == text


# What runs is what was planned.


def test_command_buffers_are_off_where_copies_overlap():
    off = {"xla_gpu_enable_command_buffer": ""}
    assert [compiler_options(mode, "gpu") for mode in offload.OFFLOADING] == [off] * 3
    assert compiler_options("remat", "gpu") == {}
    assert compiler_options("ring", "cpu") == {}


class Compiled:
    def __init__(self, host_bytes, text="HloModule step"):
        self.host_bytes = host_bytes
        self.text = text

    def memory_analysis(self):
        return types.SimpleNamespace(host_temp_size_in_bytes=self.host_bytes)

    def as_text(self):
        return self.text


PLAN = OffloadPlan(mode="ring", host_bytes=2 * GIB, device_bytes=0, reason="")


def test_an_executable_that_keeps_its_promise_passes():
    verify_offload(Compiled(2 * GIB), PLAN, "gpu")
    verify_offload(Compiled(GIB), PLAN, "gpu", num_devices=2)
    verify_offload(Compiled(0), PLAN, "cpu")
    remat = OffloadPlan(mode="remat", host_bytes=0, device_bytes=0, reason="")
    verify_offload(Compiled(0, "command_buffer"), remat, "gpu")


def test_host_memory_beyond_the_plan_is_warned_of(caplog):
    verify_offload(Compiled(int(2.15 * GIB)), PLAN, "gpu")
    assert not caplog.records
    verify_offload(Compiled(int(2.25 * GIB)), PLAN, "gpu")
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "keeps 2.25 GiB in host memory, planned were 2 GiB" in record.message


@pytest.mark.parametrize(
    ("compiled", "message"),
    [
        (Compiled(0), "keeps 0 MiB in host memory, expected 2 GiB"),
        (Compiled(2 * GIB, 'x, _xla_compute_type="host"'), "computations to the host"),
        (Compiled(2 * GIB, "%command_buffer (p: f32[])"), "has command buffers"),
    ],
)
def test_an_executable_that_does_not_is_refused(compiled, message):
    with pytest.raises(OffloadFailed, match=message):
        verify_offload(compiled, PLAN, "gpu")


@pytest.mark.parametrize("mode", ["ring", "group"])
def test_the_canary_sings(mode):
    assert gradient_canary(mode, size=16) < 1e-6


def test_the_canary_falls_silent(monkeypatch):
    """Layers whose inputs come back in the wrong order."""

    def wrong(body, ws, x, consts, *, mode, **options):
        if mode == "ring":
            ws = jax.numpy.roll(ws, 1, axis=0)
        return offload.offload_scan(body, ws, x, consts, mode="remat")

    monkeypatch.setattr(offload_plan, "offload_scan", wrong)
    assert gradient_canary("ring", size=16) > offload_plan.CANARY_TOLERANCE
