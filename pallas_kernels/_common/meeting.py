"""Blocks of a launch that wait for each other, by counters in device memory.

Pallas has semaphores for this. They are zeros that the call of a kernel is given and a
result of it, in one place: XLA copies the zeros in front of every launch, and where it
fuses the kernel with the slices of a scan over layers, the fusion forgets that both are
one, and blocks would count on from whatever lies there. Counters here are an argument
that is after the launch what it was before: the last block to leave makes them zero
again.

All blocks must be on the card at once. XLA, which thinks that the counters are only
read, gives the same ones to several launches: those must come one after the other, as
they do unless command buffers are asked to run at once what does not depend on each
other. A kernel that overlaps the one in front of it counts behind `overlap.wait`. A
batch of launches by `vmap` would share one launch's counters: it must be refused.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm, scf
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu


def counters(borders: int) -> jax.Array:
    """i32[borders + 1], what a kernel takes whose blocks meet so often."""
    return jnp.zeros((borders + 1,), jnp.int32)


def arrive(ref: Any, border: int) -> None:
    """Says that the block has come to a border; called by one warpgroup of it.

    What its threads have written before a `commit_smem` in front of this, other blocks
    read behind their `wait`.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def run(_, memory):
        _semaphore(memory, border).signal(1, memory_scope="gpu")

    run(ref)


def wait(ref: Any, border: int, blocks: int) -> None:
    """Waits until all blocks have come to a border; called by every warpgroup."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def run(_, memory):
        _semaphore(memory, border).wait(blocks, decrement=False, memory_scope="gpu")

    run(ref)


def leave(ref: Any, blocks: int) -> None:
    """Says that no warpgroup of the block waits any more; called by one of them."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def run(_, memory):
        i32 = ir.IntegerType.get_signless(32)
        (count,) = ir.MemRefType(memory.type).shape
        with utils.single_thread(utils.ThreadSubset.WARPGROUP):
            before = utils.inline_ptx(
                "atom.acq_rel.gpu.global.add.u32 $0, [$1], 1;",
                _pointer(memory, count - 1),
                result_types=i32,
                has_side_effects=True,
            )
            last = utils.c(blocks - 1, i32)
            is_last = arith.cmpi(arith.CmpIPredicate.eq, before, last)
            branch = scf.IfOp(is_last)
            with ir.InsertionPoint(branch.then_block):
                for i in range(count):
                    llvm.store(utils.c(0, i32), _pointer(memory, i))
                scf.yield_([])

    run(ref)


def _pointer(memory: Any, index: int) -> Any:
    return utils.memref_ptr(utils.memref_slice(memory, index))


def _semaphore(memory: Any, index: int) -> Any:
    return utils.SemaphoreRef(_pointer(memory, index))
