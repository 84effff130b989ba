"""Reading `config.json` in the spellings that checkpoints come with.

transformers 5 renamed and regrouped keys. A checkpoint may say `torch_dtype` or
`dtype`; `rope_theta` + `rope_scaling` + `partial_rotary_factor` or one
`rope_parameters`; `full_attention_interval` or `layer_types`; infinity bare or as
`{"__float__": "Infinity"}`. `HFConfig` gives each fact one name, raises for what no
model here can do, and reports keys nobody asked for.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxaccel.nn.rope import YarnScaling


_LOG = logging.getLogger(__name__)

# Facts about tokens, training or serving that change no output of the model.
_IRRELEVANT = frozenset(
    {
        "_name_or_path",
        "architectures",
        "auto_map",
        "bos_token_id",
        "eos_token_id",
        "initializer_range",
        "max_position_embeddings",
        "output_router_logits",
        "pad_token_id",
        "torchscript",
        "transformers_version",
        "use_cache",
        "use_sliding_window",
    }
)
_DTYPES = ("float32", "bfloat16", "float16")
_LAYER_KINDS = {
    "linear_attention": "gdn",
    "full_attention": "attention",
    # Older files use these words.
    "mamba": "gdn",
    "attention": "attention",
}
_STORED_KINDS = {
    "gdn": "linear_attention",
    "attention": "full_attention",
    "sliding_attention": "sliding_attention",
}
# The parameters of each rope type, as transformers names them.
_ROPE_KEYS = {"rope_type", "type", "rope_theta"}
_YARN_KEYS = {
    *("factor", "original_max_position_embeddings"),
    *("beta_fast", "beta_slow", "truncate"),
}
_MISSING = object()


def read_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the parsed `config.json` of a checkpoint folder.

    Raises:
      FileNotFoundError: the folder has none.
      ValueError: it is no JSON object.
    """
    path = pathlib.Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"no config.json in {folder}")
    try:
        raw = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path} holds a {type(raw).__name__}, expected an object")
    return raw


def plain_floats(value: Any) -> Any:
    """Replaces `{"__float__": "Infinity"}` by the float, at any depth."""
    if isinstance(value, Mapping):
        if set(value) == {"__float__"}:
            return float(value["__float__"])
        return {key: plain_floats(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_floats(item) for item in value]
    return value


class HFConfig:
    """A `config.json` that remembers what was asked of it.

    Args:
      raw: the parsed file.
      model_type: what the file must say it is.

    Raises:
      ValueError: the file is of another model.
    """

    def __init__(self, raw: Mapping[str, Any], *, model_type: str):
        self._raw: dict[str, Any] = plain_floats(raw)
        self._asked: set[str] = {"model_type"}
        found = self._raw.get("model_type")
        if found != model_type:
            raise ValueError(f"model_type is {found!r}, expected {model_type!r}")

    def take(self, key: str, default: Any = _MISSING) -> Any:
        """The value of `key`; null counts as absent.

        Raises:
          ValueError: it is absent and there is no default.
        """
        self._asked.add(key)
        value = self._raw.get(key)
        if value is None:
            if default is _MISSING:
                raise ValueError(f"config.json lacks {key!r}")
            return default
        return value

    def require(self, key: str, allowed: Sequence[Any]) -> None:
        """Accepts an absent key or one of `allowed`.

        Raises:
          NotImplementedError: another value, named with the allowed ones.
        """
        value = self.take(key, None)
        if value is not None and value not in allowed:
            raise NotImplementedError(
                f"config.json has {key}={value!r}, supported: {list(allowed)}"
            )

    def dtype(self) -> str:
        """The dtype of the weights, `float32` where the file says nothing."""
        spelled = [self.take(key, None) for key in ("dtype", "torch_dtype")]
        names = {str(name).removeprefix("torch.") for name in spelled if name}
        if len(names) > 1:
            raise ValueError(f"dtype and torch_dtype disagree: {sorted(names)}")
        name = names.pop() if names else "float32"
        if name not in _DTYPES:
            raise ValueError(f"dtype is {name!r}, expected one of {list(_DTYPES)}")
        return name

    def rope(
        self, *, default_fraction: float = 1.0, default_theta: float | None = None
    ) -> tuple[float, float]:
        """Returns (theta, share of the head dim that rotates).

        Args:
          default_fraction: what an absent `partial_rotary_factor` means.
          default_theta: what an absent `rope_theta` means; `None` makes it an error.

        Raises:
          NotImplementedError: a rope type other than the default one.
          ValueError: no theta anywhere.
        """
        # The sections of multi-axis RoPE carry equal positions on text, where it is
        # the plain one; these two keys then change nothing.
        known = {"partial_rotary_factor", "mrope_section", "mrope_interleaved"}
        _, found = self._rope_parameters({"default": known})
        fraction = found.get(
            "partial_rotary_factor",
            self.take("partial_rotary_factor", default_fraction),
        )
        return self._rope_theta(found, default_theta), float(fraction)

    def yarn(
        self, *, default_theta: float | None = None
    ) -> tuple[float, YarnScaling | None]:
        """Returns (theta, the scaling of long contexts, `None` for none).

        Args:
          default_theta: what an absent `rope_theta` means; `None` makes it an error.

        Raises:
          NotImplementedError: a rope type other than the default one and YaRN.
          ValueError: no theta, factor or original length anywhere, or bad values.
        """
        kind, found = self._rope_parameters({"default": set(), "yarn": _YARN_KEYS})
        theta = self._rope_theta(found, default_theta)
        # An older name of the same length, beside the one inside the parameters.
        length = self.take("initial_context_length", None)
        if kind == "default":
            return theta, None
        length = found.get("original_max_position_embeddings", length)
        if length is None or "factor" not in found:
            raise ValueError(
                "config.json has rope_type='yarn' and lacks its 'factor' or "
                "'original_max_position_embeddings'"
            )
        return theta, YarnScaling(
            factor=float(found["factor"]),
            original_max_position=length,
            beta_fast=float(found.get("beta_fast", 32.0)),
            beta_slow=float(found.get("beta_slow", 1.0)),
            truncate=found.get("truncate", True),
        )

    def _rope_parameters(
        self, kinds: Mapping[str, set[str]]
    ) -> tuple[str, dict[str, Any]]:
        """The rope type, one of `kinds`, and its parameters from either spelling."""
        grouped = self.take("rope_parameters", {})
        scaling = self.take("rope_scaling", {})
        found = {**scaling, **grouped}
        kind = "default"
        for source in (grouped, scaling):
            kind = source.get("rope_type", source.get("type", kind))
            if kind not in kinds:
                raise NotImplementedError(
                    f"config.json has rope_type={kind!r}, supported: {list(kinds)}"
                )
        unknown = sorted(set(found) - kinds[kind] - _ROPE_KEYS)
        if unknown:
            raise NotImplementedError(f"config.json has rope parameters {unknown}")
        return kind, found

    def _rope_theta(self, found: Mapping[str, Any], default: float | None) -> float:
        theta = found.get("rope_theta", self.take("rope_theta", default))
        if theta is None:
            raise ValueError("config.json lacks 'rope_theta' and 'rope_parameters'")
        return float(theta)

    def layer_kinds(self, num_layers: int, *, default_interval: int) -> tuple[str, ...]:
        """The kind of each layer, `gdn` or `attention`, from either spelling.

        A file with both means the list: pruned models keep the interval they had.

        Args:
          num_layers: how many are expected.
          default_interval: every how many layers attention comes, where the file
            says nothing.

        Raises:
          ValueError: an unknown word or a wrong count.
        """
        listed = self.layer_types(num_layers, _LAYER_KINDS)
        interval = self.take("full_attention_interval", None)
        if listed is None:
            step = default_interval if interval is None else interval
            if not isinstance(step, int) or step < 1:
                raise ValueError(f"full_attention_interval is {step!r}, expected >= 1")
            return tuple(
                "attention" if (i + 1) % step == 0 else "gdn" for i in range(num_layers)
            )
        return listed

    def layer_types(
        self, num_layers: int, words: Mapping[str, str]
    ) -> tuple[str, ...] | None:
        """The mixer of each layer as `layer_types` lists them; `None` without a list.

        Args:
          num_layers: how many are expected.
          words: what the file may say -> our name of it.

        Raises:
          ValueError: an unknown word or a wrong count.
        """
        listed = self.take("layer_types", None)
        if listed is None:
            return None
        unknown = sorted(set(listed) - set(words))
        if unknown:
            raise ValueError(
                f"layer_types has {unknown}, expected words of {sorted(words)}"
            )
        if len(listed) != num_layers:
            raise ValueError(
                f"layer_types has {len(listed)} layers, num_hidden_layers={num_layers}"
            )
        return tuple(words[word] for word in listed)

    def report_unknown(self) -> None:
        """Logs one warning that lists the keys that nothing has read."""
        unknown = sorted(set(self._raw) - self._asked - _IRRELEVANT)
        if unknown:
            _LOG.warning("config.json has keys that are not understood: %s", unknown)


def differences(kept: Any, wanted: Any) -> list[str]:
    """What a checkpoint's config lost of a model's.

    Args:
      kept: the config as the checkpoint would say it, a dataclass.
      wanted: the model's, of the same class.

    Returns:
      `field=value` of `wanted` for each difference, `field.inner=value` where both
      have a dataclass of one class in the field.
    """
    found = []
    for field in dataclasses.fields(wanted):
        ours, value = getattr(kept, field.name), getattr(wanted, field.name)
        if ours == value:
            continue
        if dataclasses.is_dataclass(value) and type(ours) is type(value):
            found += [f"{field.name}.{line}" for line in differences(ours, value)]
        else:
            found.append(f"{field.name}={value!r}")
    return found


def check_kept(family: str, kept: Any, wanted: Any) -> None:
    """Refuses a model that a family's config.json cannot describe.

    Args:
      family: its model type.
      kept, wanted: as for `differences`.

    Raises:
      ValueError: naming what would be lost.
    """
    if lost := differences(kept, wanted):
        raise ValueError(f"a {family} checkpoint cannot say {lost}")


def shortest_period(kinds: Sequence[str]) -> tuple[str, ...]:
    """The shortest pattern that repeats to exactly `kinds`."""
    count = len(kinds)
    for length in range(1, count + 1):
        if count % length == 0 and tuple(kinds) == tuple(kinds[:length]) * (
            count // length
        ):
            return tuple(kinds[:length])
    return tuple(kinds)


def stored_layer_types(pattern: Sequence[str], num_layers: int) -> list[str]:
    """`layer_types` as transformers 5 writes it."""
    return [_STORED_KINDS[pattern[i % len(pattern)]] for i in range(num_layers)]
