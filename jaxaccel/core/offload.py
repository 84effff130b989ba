"""Where the inputs of scanned layers wait for the backward pass.

`offload_scan` runs a stack of layers as one `jax.lax.scan` and rematerialises each
layer in the backward pass from its input. What differs by mode is where these inputs
are until then:

  save     nothing is rematerialised, all residuals stay on the device
  remat    on the device
  policy   in pinned host memory, by `jax.checkpoint`'s policy; each copy back is
           started where its layer needs it, so that the device waits for it
  ring     in pinned host memory; the copy of layer i-1 comes back while layer i is
           differentiated
  group    as ring, one input for every `group` layers

The gradients of all modes are those of `remat`. "ring" and "group" know reverse mode
only: `jax.jvp` through them raises.

The ring follows the double-buffered reload of Unsloth's gradient checkpointing
(unsloth-zoo#534), with a scan's own slices in place of streams and events. Hence no
`unroll`, and no index into the stored stack but the loop's: with the one XLA offloads
nothing, with the other a kernel reads host memory where a copy engine should.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxaccel.core.memory import PINNED_HOST


MODES = ("save", "remat", "policy", "ring", "group")
OFFLOADING = ("ring", "policy", "group")
"""The modes that use host memory, in the order in which they are tried."""

INPUT_NAME = "offload_scan_input"
"""`checkpoint_name` of a layer's input in mode "policy"."""

Stage = Callable[[Any, Any, Any], tuple[Any, Any]]


def offload_scan(
    body: Stage | Sequence[Stage],
    ws: Any,
    x: Any,
    consts: Any = (),
    *,
    mode: str,
    group: int = 1,
    names: Sequence[str] = (),
) -> tuple[Any, Any]:
    """Applies L layers in turn: `x, aux_i = body(w_i, x, consts)`.

    Args:
      body: (w_i, x, consts) -> (x of the same type, aux_i), or several such stages
        that make up one iteration in turn; each stage's input is kept then. It must
        not close over arrays that are differentiated, and whatever a later layer
        reads from an earlier one has to be in x.
      ws: tree of arrays [L, ...]; with several stages a tuple, one tree a stage. Any
        dtype: integers and random keys pass without a gradient.
      x: the carry, a tree of arrays, such as activations [B, T, D]. Integers in it
        are never offloaded. What no layer changes belongs into consts: here it would
        be stored once a layer.
      consts: tree of arrays that every layer gets whole.
      mode: one of `MODES`.
      group: layers that share one stored input, a divisor of L; mode "group" only.
        It costs one more forward pass, and `group` inputs on the device.
      names: further values, named by `checkpoint_name` inside `body`, that are kept
        in host memory rather than computed again; mode "policy" only.

    Returns:
      (x after the last layer, aux [L, ...]; with several stages a tuple of aux).

    Raises:
      ValueError: the mode is unknown, or `group` or `names` don't fit it.
    """
    _check_mode(mode, group, names)
    is_single = callable(body)
    stages = (body,) if is_single else tuple(body)
    ws = (ws,) if is_single else tuple(ws)
    lengths = {leaf.shape[0] for leaf in jax.tree.leaves(ws)}
    if len(lengths) != 1:
        raise ValueError(f"ws has leading axes {sorted(lengths)}, expected one length")
    (length,) = lengths
    if mode == "group":
        y, aux = _grouped(stages, ws, x, consts, length, group)
    elif mode == "ring" and length > 1:
        y, aux = _ring(stages, ws, x, consts)
    else:
        # One layer has nothing to wait for: the ring never stores the last input.
        kept = _checkpointed(
            stages, "remat" if mode == "ring" else mode, names, length > 1
        )
        y, aux = _plain(kept, ws, x, consts)
    return y, aux[0] if is_single else aux


def _check_mode(mode: str, group: int, names: Sequence[str]) -> None:
    if mode not in MODES:
        raise ValueError(
            f"mode={mode!r} is unknown, allowed are {', '.join(map(repr, MODES))}"
        )
    if group < 1 or (group > 1 and mode != "group"):
        raise ValueError(f"group={group} does not fit mode={mode!r}")
    if names and mode != "policy":
        raise ValueError(f"names={tuple(names)} need mode='policy', got {mode!r}")


def _plain(stages: Sequence[Stage], ws, x, consts):
    """The layers in one scan."""

    def iteration(x, ws):
        aux = []
        for stage, w in zip(stages, ws, strict=True):
            x, a = stage(w, x, consts)
            aux.append(a)
        return x, tuple(aux)

    return jax.lax.scan(iteration, x, ws)


def _checkpointed(
    stages: Sequence[Stage], mode: str, names: Sequence[str], in_loop: bool
) -> Sequence[Stage]:
    """The stages rematerialised from their inputs, unless the mode is "save"."""
    if mode == "save":
        return stages
    policies = jax.checkpoint_policies
    policy = policies.nothing_saveable
    if mode == "policy":
        policy = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[INPUT_NAME, *names],
            offload_src="device",
            # Any other spelling offloads nothing, silently.
            offload_dst=PINNED_HOST,
        )

    def kept(stage: Stage) -> Stage:
        def named(w, x, consts):
            # The input has to be named: naming the output offloads nothing.
            if mode == "policy":
                x = _over_floats(lambda leaf: checkpoint_name(leaf, INPUT_NAME), x)
            return stage(w, x, consts)

        # A loop keeps XLA from merging the recomputation with the forward pass.
        return jax.checkpoint(named, policy=policy, prevent_cse=not in_loop)

    return [kept(stage) for stage in stages]


def _grouped(stages: Sequence[Stage], ws, x, consts, length: int, group: int):
    """A ring over groups of layers, each rematerialised layer by layer."""
    if length % group:
        raise ValueError(f"group={group} must divide the {length} layers")
    ws = jax.tree.map(lambda w: w.reshape(-1, group, *w.shape[1:]), ws)
    kept = _checkpointed(stages, "remat", (), group > 1)

    def layers(ws, x, consts):
        return _plain(kept, ws, x, consts)

    y, aux = offload_scan(layers, ws, x, consts, mode="ring")
    return y, jax.tree.map(lambda a: a.reshape(length, *a.shape[2:]), aux)


# The ring with delayed store. Forward, iteration i stores the inputs of iteration
# i - 1, so slot i of the stored stack holds those and slot 0 holds nothing; the last
# inputs end in the carry and never leave the device. Backward, iteration i works on
# the inputs in its carry, and its own slot of the scanned stack is what iteration
# i - 1 needs: nothing waits for the copy before then. Both slots are linear in the
# loop counter, which is what XLA needs to make a copy of them rather than a kernel
# that reads host memory.


def _ring(stages: Sequence[Stage], ws, x, consts):
    @jax.custom_vjp
    def run(ws, x, consts):
        return _plain(stages, ws, x, consts)

    def forward(ws, x, consts):
        def iteration(carry, ws):
            x, previous = carry
            stored = _over_floats(_to_host, previous)
            inputs, aux = [], []
            for stage, w in zip(stages, ws, strict=True):
                inputs.append(x)
                x, a = stage(w, x, consts)
                aux.append(a)
            return (x, tuple(inputs)), (tuple(aux), stored)

        # x stands in for what is before the first layer; nobody reads it from there.
        before = (x,) * len(stages)
        (y, last), (aux, stored) = jax.lax.scan(iteration, (x, before), ws)
        return (y, aux), (ws, consts, stored, last)

    def backward(kept, cotangents):
        return _ring_backward(stages, kept, cotangents)

    run.defvjp(forward, backward)
    return run(ws, x, consts)


def _ring_backward(stages: Sequence[Stage], kept, cotangents):
    """Cotangents of (ws, x, consts), see `_ring`."""
    ws, consts, stored, last = kept
    w_trees = [_Floats(w) for w in ws]
    x_tree, consts_tree = _Floats(last[0]), _Floats(consts)
    dy, daux = _floats(cotangents[0]), [_floats(a) for a in cotangents[1]]

    def iteration(carry, slices):
        dx, inputs, dconsts = carry
        ws, stored, daux = slices
        # Read by the next iteration only: the copy has all of this one to end.
        before = _over_floats(_to_device, stored)
        dws: list[Any] = [None] * len(stages)
        for i in reversed(range(len(stages))):
            dws[i], dx, dc = _stage_cotangents(
                stages[i], ws[i], inputs[i], consts, (dx, daux[i])
            )
            # In the order of the plain scan's transpose, for equal rounding.
            dconsts = [jnp.add(a, b) for a, b in zip(dconsts, dc, strict=True)]
        return (dx, before, dconsts), dws

    zeros = [jnp.zeros(c.shape, c.dtype) for c in consts_tree.floats]
    (dx, _, dconsts), dws = jax.lax.scan(
        iteration, (dy, last, zeros), (ws, stored, daux), reverse=True
    )
    dws = tuple(tree.cotangents(d) for tree, d in zip(w_trees, dws, strict=True))
    return dws, x_tree.cotangents(dx), consts_tree.cotangents(dconsts)


def _stage_cotangents(stage: Stage, w, x, consts, cotangents):
    """Lists of cotangents of the floats in w, x and consts."""
    trees = [_Floats(tree) for tree in (w, x, consts)]

    def of_floats(*lists):
        y, aux = stage(*(t.join(f) for t, f in zip(trees, lists, strict=True)))
        return _floats(y), _floats(aux)

    _, pull = jax.vjp(of_floats, *(tree.floats for tree in trees))
    return pull(cotangents)


class _Floats:
    """A tree's floating-point leaves, which alone have gradients, as a list."""

    def __init__(self, tree: Any):
        self._leaves, self._treedef = jax.tree.flatten(tree)
        self.floats = _floats(tree)

    def join(self, floats: Sequence[Any]) -> Any:
        """The tree with other floats in it."""
        return self._merged(floats, lambda leaf: leaf)

    def cotangents(self, floats: Sequence[Any]) -> Any:
        """The tree with these cotangents; `None`, for none, in place of the rest."""
        return self._merged(floats, lambda leaf: None)

    def _merged(self, floats: Sequence[Any], rest: Callable[[Any], Any]) -> Any:
        left = iter(floats)
        leaves = [next(left) if _is_float(x) else rest(x) for x in self._leaves]
        return jax.tree.unflatten(self._treedef, leaves)


def _is_float(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def _floats(tree: Any) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(tree) if _is_float(leaf)]


def _over_floats(function: Callable[[Any], Any], tree: Any) -> Any:
    """Applies a function to the floats of a tree; integers and keys stay."""
    return jax.tree.map(lambda x: function(x) if _is_float(x) else x, tree)


def _to_host(x: jax.Array) -> jax.Array:
    return jax.device_put(x, jax.memory.Space.Host)


def _to_device(x: jax.Array) -> jax.Array:
    return jax.device_put(x, jax.memory.Space.Device)
