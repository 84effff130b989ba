"""Guards against a run that silently measures something else than it says."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from pallas_kernels._common.dispatch import Choice


class KernelMissing(RuntimeError):
    """A kernel that must run is not in the program."""


def implementations_used(choices: Iterable[Choice]) -> dict[str, str]:
    """Says what each op of a program runs.

    Args:
      choices: what `dispatch.recorded_choices` collected while it was traced.

    Returns:
      op -> implementations in the order in which they first came, with the config of
      a kernel; calls of one op may well differ.
    """
    found: dict[str, list[str]] = {}
    for choice in choices:
        text = choice.implementation
        if choice.config is not None:
            text += f" {choice.config}"
        names = found.setdefault(choice.op, [])
        if text not in names:
            names.append(text)
    return {op: ", ".join(names) for op, names in sorted(found.items())}


def named_ops(implementation: str, ops: Iterable[str]) -> dict[str, str]:
    """The setting of a model whose `ops` run what is named.

    Without "expert_gemv" but for its kernel: its other forms copy every matrix that is
    visited, and XLA's best is the sorted product.
    """
    return {
        op: implementation
        for op in ops
        if op != "expert_gemv" or implementation == "mosaic"
    }


def kernels_in(text: str) -> set[str]:
    """Names of the Mosaic GPU kernels in the text of a lowered or compiled program."""
    found: set[str] = set()
    for line in text.splitlines():
        # The module of a kernel carries its name between null bytes.
        if "mosaic_gpu" in line and "custom" in line:
            found.update(re.findall(r'(?:\\00|[/"])(pk_\w+?)(?=\\00|[/"])', line))
    return found


def require_kernels(text: str, names: Sequence[str]) -> None:
    """Fails unless a program launches every kernel that is named.

    Args:
      text: `as_text()` of what was lowered or compiled.
      names: kernel names, such as "pk_rms_norm_fwd".

    Raises:
      KernelMissing: some are not there; they are named, and those that are.
    """
    found = kernels_in(text)
    missing = [name for name in names if name not in found]
    if missing:
        there = ", ".join(sorted(found)) or "none"
        raise KernelMissing(
            f"kernels that must run are not in the program: {', '.join(missing)}; "
            f"in it: {there}"
        )
