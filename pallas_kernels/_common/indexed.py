"""Reads and writes in device or shared memory at addresses of each thread's own.

`plgpu.load` moves a tile: one corner, and strides from there on. A gather has an
address for each row, and a row of 160 bytes is too short to keep a warpgroup or a bulk
copy busy. Here an array is [n, V] *pieces* of at most 16 bytes; each thread has one
piece of every 128 and works out where it lies.

What is inlined into a kernel does not run in the interpreter. There, the same values
are taken from the array as a whole, and written one piece after the other.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm, scf, vector
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._common import interpret
from pallas_kernels._common.pieces import PIECE_BYTES, WARPGROUP


WARP = 32  # threads

_WARP_KINDS = {
    "max": mgpu.utils.ReductionKind.MAX,
    "min": mgpu.utils.ReductionKind.MIN,
}


def layout(width: int) -> Any:
    """How a warpgroup holds [n, width] pieces: neighbours in neighbouring threads."""
    # [..., warp, 1, lane, 1, 1, value of a piece]
    tiled = mgpu.TiledLayout(
        plgpu.Tiling(((WARPGROUP, width), (32, width), (1, width))),
        warp_dims=(-6,),
        lane_dims=(-4,),
        vector_dim=-1,
        _check_canonical=False,
    ).canonicalize()
    return plgpu.Layout.TILED(
        tiled.tiling, tiled.warp_dims, tiled.lane_dims, tiled.vector_dim
    )


def index_layout() -> Any:
    """How a warpgroup holds one number for each piece, [n]."""
    return layout(PIECE_BYTES).reduce(1)


def iota(pieces: int) -> jax.Array:
    """i32[n], the number of each piece."""
    return plgpu.broadcasted_iota(jnp.int32, (pieces,), 0, layout=index_layout())


def everywhere(number: Any) -> jax.Array:
    """One i32 for every thread of a warpgroup."""
    number = jnp.full((WARPGROUP,), number, jnp.int32)
    return plgpu.layout_cast(number, index_layout())


def spread(numbers: jax.Array, width: int) -> jax.Array:
    """[n] to [n, width]: repeats each piece's number over its values."""
    wide = lax.broadcast_in_dim(numbers, (*numbers.shape, width), (0,))
    return plgpu.layout_cast(wide, layout(width))


def take(
    ref: Any,
    indices: tuple[jax.Array, ...],
    width: int | None = None,
    *,
    cached: bool = True,
    stays: bool = False,
    where: jax.Array | None = None,
) -> Any:
    """Reads one piece at each index.

    Args:
      ref: an array in device or shared memory, contiguous.
      indices: i32[n] for each axis of `ref`, n a multiple of 128, in `index_layout`.
      width: values V from there on along the last axis, all in one row and aligned to
        their size; `None` reads single values.
      cached: whether reads may go through the cache for what this kernel does not
        write; not for the host's memory.
      stays: whether the read stays where it is. Else the compiler moves it into a
        branch that alone uses it, such as a write by some threads, and what is read
        there waits for memory a second time.
      where: bool[n], which pieces are read, `None` for all; 0 stands for the others.

    Returns:
      [n, V] in `layout(V)`, or [n].
    """
    if interpret.is_interpreting():
        return _take_interpreted(ref, indices, width, where)
    (pieces,) = indices[0].shape
    shape = (pieces,) if width is None else (pieces, width)
    kind = index_layout() if width is None else layout(width)

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.RefType(),
            *(
                index_layout()
                for _ in (indices if where is None else (where, *indices))
            ),
        ),
        return_type=plgpu.ShapeDtypeStruct(shape, ref.dtype, layout=kind),
    )
    def read(_, memory, *arrays):
        length = 1 if width is None else width
        kept = ir.MemRefType(memory.type).element_type
        flags = [] if where is None else [_scalar(f) for f in arrays[0].registers.flat]
        places = _indices(arrays if where is None else arrays[1:])
        registers = [
            _load(memory, index, length, kept, cached, stays, *flags[i : i + 1])
            for i, index in enumerate(places)
        ]
        found = kind.to_mgpu()
        return mgpu.FragmentedArray(
            _registers=np.array(registers, dtype=object).reshape(
                found.registers_shape(shape)
            ),
            _layout=found,
            _is_signed=_signed(ref.dtype),
        )

    return read(ref, *indices) if where is None else read(ref, where, *indices)


def put(
    ref: Any, indices: tuple[jax.Array, ...], values: jax.Array, where: jax.Array
) -> None:
    """Writes pieces at indices of their own.

    Args:
      ref: an array in device or shared memory, contiguous.
      indices: i32[n] for each axis of `ref`; pieces that are written lie apart.
      values: [n, V] in `layout(V)`, of `ref`'s dtype.
      where: bool[n], which pieces are written.
    """
    if interpret.is_interpreting():
        _put_interpreted(ref, indices, values, where)
        return
    width = values.shape[1]

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.RefType(),
            layout(width),
            index_layout(),
            *(index_layout() for _ in indices),
        ),
    )
    def write(_, memory, pieces, flags, *arrays):
        rows = zip(
            pieces.registers.flat, flags.registers.flat, _indices(arrays), strict=True
        )
        for piece, flag, index in rows:
            branch = scf.IfOp(_scalar(flag))
            with ir.InsertionPoint(branch.then_block):
                kept = ir.VectorType(piece.type).element_type
                llvm.store(piece, _address(memory, index, kept))
                scf.yield_([])

    write(ref, values, where, *indices)


def copy(
    ref: Any,
    indices: tuple[jax.Array, ...],
    to: Any,
    place: tuple[Any, Any],
    where: jax.Array,
) -> None:
    """Asks for one piece at each index to come to shared memory, waiting for nothing.

    A thread may read back what it asked for itself, with `copied`, once `await_copies`
    has waited for it.

    Args:
      ref: an array in device memory, contiguous, that this kernel does not write.
      indices: i32[128] for each axis of `ref`, of pieces of 16 bytes.
      to: [places, threads, V] in shared memory, V values of `ref`'s dtype a piece.
      place: which place, and the thread that the first piece belongs to, i32 scalars.
      where: bool[128], which pieces are read; 0 stands for the others, whose indices
        need lie nowhere in particular in `ref`, but in it.
    """
    width = to.shape[-1]
    if interpret.is_interpreting():
        values = _take_interpreted(ref, indices, width, where)
        to.at[place[0], pl.ds(place[1], WARPGROUP)][...] = values
        return
    slots = _of_threads(place)

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.RefType(),
            plgpu.RefType(),
            index_layout(),
            *(index_layout() for _ in (*slots, *indices)),
        ),
    )
    def ask(_, memory, shared, flags, *arrays):
        i32 = ir.IntegerType.get_signless(32)
        kept = ir.MemRefType(memory.type).element_type
        rows = zip(
            flags.registers.flat,
            _indices(arrays[: len(slots)]),
            _indices(arrays[len(slots) :]),
            strict=True,
        )
        whole, none = (arith.constant(i32, size) for size in (PIECE_BYTES, 0))
        for flag, slot, index in rows:
            size = arith.select(_scalar(flag), whole, none)
            target = llvm.ptrtoint(i32, _address(shared, slot, kept))
            _assembly(
                "cp.async.cg.shared.global [$0], [$1], 16, $2;",
                "r,l,r",
                *(target, _address(memory, index, kept), size),
            )

    ask(ref, to, where, *slots, *indices)


def copied(to: Any, place: tuple[Any, Any]) -> jax.Array:
    """The pieces [128, V] that `copy` brought to a place, to the threads that asked."""
    if interpret.is_interpreting():
        return to[place[0], pl.ds(place[1], WARPGROUP)]
    return take(to, _of_threads(place), to.shape[-1], cached=False)


def _of_threads(place: tuple[Any, Any]) -> tuple[jax.Array, ...]:
    return everywhere(place[0]), iota(WARPGROUP) + place[1], everywhere(0)


def commit_copies() -> None:
    """Ends a group of what this thread asked for with `copy`; it may be empty."""
    if not interpret.is_interpreting():
        _alone("cp.async.commit_group;")


def await_copies(behind: int) -> None:
    """Waits until all groups of this thread but the last `behind` have arrived."""
    if not interpret.is_interpreting():
        _alone(f"cp.async.wait_group {behind};")


def _assembly(text: str, constraints: str, *operands: Any) -> None:
    llvm.inline_asm(
        ir.Type.parse("!llvm.void"),
        list(operands),
        text,
        constraints,
        has_side_effects=True,
    )


def _alone(text: str) -> None:
    """An instruction without operands."""

    @plgpu.inline_mgpu(arg_types=())
    def run(_):
        _assembly(text, "")

    run()


# Bytes that one instruction asks for; each takes its time in the unit for copies.
STRETCH = 4096


def stretch(thread: Any, size: int, warps: int) -> tuple[Any, Any]:
    """Shares out an array among the first lanes of warps.

    Args:
      thread: which one, of 32 `warps`.
      size: bytes of the array; of more than `32 warps` stretches the rest is nobody's.
      warps: that share it.

    Returns:
      Which stretch of 4096 bytes the thread has, and its bytes, 0 for none.
    """
    index = thread % WARP * warps + thread // WARP
    whole, rest = divmod(size, STRETCH)
    count = jnp.where(index < whole, STRETCH, jnp.where(index == whole, rest, 0))
    return index, count


def prefetch(ref: Any, part: Any, parts: int) -> None:
    """Asks for a warpgroup's part of an array in device memory to be in L2.

    Nothing waits for it. A launch that reads the array next finds it there, or on its
    way, instead of asking for it after the pause between two launches.

    Args:
      ref: contiguous, of a multiple of 16 bytes.
      part: i32, the warpgroup's share, of `parts`; see `stretch`.
      parts: warpgroups that share it, fewer than 2^24.
    """
    if interpret.is_interpreting():
        return
    size = math.prod(ref.shape) * jnp.dtype(ref.dtype).itemsize
    thread = iota(WARPGROUP) + part * WARPGROUP
    begin, left = stretch(thread, size, parts * (WARPGROUP // WARP))

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), index_layout(), index_layout()))
    def ask(_, memory, begins, lefts):
        i8, i64 = (ir.IntegerType.get_signless(bits) for bits in (8, 64))
        start = llvm.addrspacecast(
            llvm.PointerType.get(address_space=1), mgpu.utils.memref_ptr(memory)
        )
        for begin, left in _indices((begins, lefts)):
            none = arith.constant(left.type, 0)
            branch = scf.IfOp(arith.cmpi(arith.CmpIPredicate.sgt, left, none))
            with ir.InsertionPoint(branch.then_block):
                stretches = arith.constant(i64, STRETCH)
                offset = arith.muli(arith.extsi(i64, begin), stretches)
                _assembly(
                    "cp.async.bulk.prefetch.L2.global [$0], $1;",
                    "l,r",
                    mgpu.utils.getelementptr(start, [offset], i8),
                    left,
                )
                scf.yield_([])

    ask(ref, begin, left)


def across_warp(numbers: jax.Array, how: str) -> jax.Array:
    """Combines the numbers that the threads of each warp hold.

    Args:
      numbers: [n] in `index_layout`, i32, or f32 for "sum".
      how: "sum", whose order is fixed, "max" or "min".

    Returns:
      [n] in `index_layout`: every thread has what its 32 neighbours have together.
    """
    if how not in ("sum", *_WARP_KINDS) or (
        numbers.dtype != (jnp.float32 if how == "sum" else jnp.int32)
    ):
        raise ValueError(
            f"across_warp: {how!r} of {numbers.dtype}, allowed are 'sum' of float32, "
            "'max' and 'min' of int32"
        )
    if interpret.is_interpreting():
        found = getattr(jnp, how)(numbers.reshape(-1, WARP), axis=1)
        return jnp.repeat(found, WARP, total_repeat_length=numbers.shape[0])

    @plgpu.inline_mgpu(
        arg_types=(index_layout(),),
        return_type=plgpu.ShapeDtypeStruct(
            numbers.shape, numbers.dtype, layout=index_layout()
        ),
    )
    def combine(_, array):
        registers = np.empty_like(array.registers)
        for place, register in np.ndenumerate(array.registers):
            found = _combined(_scalar(register), how)
            if isinstance(register.type, ir.VectorType):
                found = vector.broadcast(register.type, found)
            registers[place] = found
        return mgpu.FragmentedArray(
            _registers=registers, _layout=array.layout, _is_signed=array.is_signed
        )

    return combine(numbers)


def across_lanes(pieces: jax.Array, lanes: int) -> jax.Array:
    """Adds what threads of a warp hold whose numbers are equal modulo `lanes`.

    Args:
      pieces: f32[128, V] in `layout(V)`.
      lanes: 1, 2, 4, 8, 16 or 32.

    Returns:
      f32[128, V]: every thread has the sum, whose order is fixed.
    """
    if interpret.is_interpreting():
        sums = pieces.reshape(-1, WARP // lanes, lanes, pieces.shape[1]).sum(1)
        wide = jnp.broadcast_to(
            sums[:, None], (len(sums), WARP // lanes, *sums.shape[1:])
        )
        return wide.reshape(pieces.shape)
    kind = layout(pieces.shape[1])

    @plgpu.inline_mgpu(
        arg_types=(kind,),
        return_type=plgpu.ShapeDtypeStruct(pieces.shape, jnp.float32, layout=kind),
    )
    def combine(_, array):
        registers = np.empty_like(array.registers)
        for place, register in np.ndenumerate(array.registers):
            for i in range(pieces.shape[1]):
                value = vector.extract(register, [], [i])
                value = _butterflies(value, lanes)
                register = vector.insert(value, register, [], [i])
            registers[place] = register
        return mgpu.FragmentedArray(
            _registers=registers, _layout=array.layout, _is_signed=array.is_signed
        )

    return combine(pieces)


def _combined(value: Any, how: str) -> Any:
    """One number of each thread of a warp to one number in all of them."""
    if how != "sum":
        everybody = arith.constant(ir.IntegerType.get_signless(32), 0xFFFFFFFF)
        return mgpu.utils.redux(value, everybody, _WARP_KINDS[how])
    return _butterflies(value, 1)


def _butterflies(value: Any, lanes: int) -> Any:
    """The sum over the threads of a warp with one number modulo `lanes`."""
    distance = WARP // 2
    while distance >= lanes:
        value = arith.addf(value, mgpu.utils.shfl_bfly(value, distance))
        distance //= 2
    return value


def _signed(dtype: Any) -> bool | None:
    if not jnp.issubdtype(dtype, jnp.integer):
        return None
    return bool(jnp.issubdtype(dtype, jnp.signedinteger))


def _scalar(register: Any) -> Any:
    """The one number of a register, whichever way it is kept."""
    if isinstance(register.type, ir.VectorType):
        return vector.extract(register, [], [0])
    return register


def _indices(arrays: Any) -> list[tuple[Any, ...]]:
    """One index a register from one array an axis."""
    flat = [[_scalar(r) for r in array.registers.flat] for array in arrays]
    return list(zip(*flat, strict=True))


def _address(memory: Any, index: tuple[Any, ...], kept: Any) -> Any:
    """Where an element of a contiguous array lies."""
    i64 = ir.IntegerType.get_signless(64)
    shape = ir.MemRefType(memory.type).shape
    offset = arith.constant(i64, 0)
    for size, place in zip(shape, index, strict=True):
        # Rows are counted in 32 bits, what lies in front of them is not.
        offset = arith.muli(offset, arith.constant(i64, size))
        offset = arith.addi(offset, arith.extsi(i64, place))
    start = mgpu.utils.memref_ptr(memory)
    if not mgpu.utils.is_smem_ref(memory):
        start = llvm.addrspacecast(llvm.PointerType.get(address_space=1), start)
    return mgpu.utils.getelementptr(start, [offset], kept)


def _load(
    memory: Any,
    index: tuple[Any, ...],
    length: int,
    kept: Any,
    cached: bool,
    stays: bool,
    flag: Any = None,
) -> Any:
    moved = kept
    if isinstance(kept, ir.FloatType) and ir.FloatType(kept).width == 8:
        moved = ir.IntegerType.get_signless(8)  # LLVM has no such floats
    kind = ir.VectorType.get((length,), moved)

    def load():
        # What lies in shared memory was written by this kernel.
        constant = cached and not mgpu.utils.is_smem_ref(memory)
        address = _address(memory, index, moved)
        return llvm.load(kind, address, invariant=constant, volatile_=stays)

    if flag is None:
        value = load()
    else:
        branch = scf.IfOp(flag, [kind], has_else=True)
        with ir.InsertionPoint(branch.then_block):
            scf.yield_([load()])
        otherwise = branch.else_block
        assert otherwise is not None
        with ir.InsertionPoint(otherwise):
            zero = arith.constant(moved, 0.0 if isinstance(moved, ir.FloatType) else 0)
            scf.yield_([vector.broadcast(kind, zero)])
        value = branch.results[0]
    if moved != kept:
        value = vector.bitcast(ir.VectorType.get((length,), kept), value)
    return value


def _take_interpreted(
    ref: Any, indices: Any, width: int | None, where: jax.Array | None
) -> jax.Array:
    whole = ref[...].reshape(-1)
    start = _flat(ref.shape, indices)
    if width is not None:
        start = start[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
    # Outside of the array lies what no test takes for right; NaN may be.
    is_float = jnp.issubdtype(ref.dtype, jnp.floating)
    least = float(jnp.finfo(ref.dtype).min) if is_float else jnp.iinfo(ref.dtype).min
    values = whole.at[start].get(
        mode="fill", fill_value=least, wrap_negative_indices=False
    )
    if where is None:
        return values
    where = where if width is None else where[:, None]
    return jnp.where(where, values, jnp.zeros((), values.dtype))


def _flat(shape: tuple[int, ...], indices: Any) -> jax.Array:
    start = jnp.zeros_like(indices[0])
    for size, index in zip(shape, indices, strict=True):
        start = start * size + index
    return start


def _put_interpreted(ref: Any, indices: Any, values: Any, where: Any) -> None:
    width = values.shape[1]

    def step(i, carry):
        place = [index[i] for index in indices]

        @pl.when(where[i])
        def _():
            ref.at[(*place[:-1], pl.ds(place[-1], width))][...] = values[i]

        return carry

    # Most calls write nothing, and the loop is what takes the time.
    @pl.when(jnp.any(where))
    def _():
        lax.fori_loop(0, values.shape[0], step, 0)
