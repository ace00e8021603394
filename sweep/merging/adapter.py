"""Reading an adapter's directory: what PEFT's config says of it, and which tensors it holds.

Reads JSON and the headers of safetensors files alone, so that what cannot be merged is refused at
once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from search_spaces.documents import exists, is_directory, read_json
from search_spaces.errors import EnvironmentFault, InputError, quote

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."

_UNMERGEABLE: Mapping[str, str] = {
    "target_parameters": "experts' parameters as targets",
    "trainable_token_indices": "single trained tokens",
    "layer_replication": "replicated layers",
    "alora_invocation_tokens": "an activated LoRA, which is not there for every token",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
    "arrow_config": "an Arrow router",
    "kasa_config": "KaSA",
    "velora_config": "VeLoRA",
    "monteclora_config": "MonteCLoRA",
    "megatron_config": "Megatron's parallel layers",
}
"""Keys of PEFT's config whose presence means that weights are not base plus product."""
_BASE_CHANGED = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of `init_lora_weights` that change the base before training: what was trained belongs
to that base, not to the one on the disk."""

_LORA = re.compile(
    r"(?P<layer>.+)\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B"
    r"|lora_magnitude_vector)(?P<end>\.weight|\.bias)?"
)


@dataclass(frozen=True)
class TensorInfo:
    """What a safetensors file's header says of one tensor."""

    file: str
    shape: tuple[int, ...]
    dtype: str
    """As safetensors writes it: BF16, F32, U8."""


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter that can be merged."""

    directory: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    """By their names in the file, without PEFT's prefix."""

    @property
    def base(self) -> str | None:
        """The base that it was trained on, as PEFT noted it."""
        name = self.config.get("base_model_name_or_path")
        return name if isinstance(name, str) and name else None

    def layers(self) -> dict[str, dict[str, str]]:
        """Return of each adapted layer the names of its tensors, by part (``lora_A``)."""
        found: dict[str, dict[str, str]] = {}
        for name in self.tensors:
            match = _LORA.fullmatch(name)
            if match is not None and match["end"] != ".bias":
                found.setdefault(match["layer"], {})[match["part"]] = name
        return found

    def whole(self) -> dict[str, str]:
        """Return what stands in for tensors of the base: the base's name of it, its own name."""
        own = (name for name in self.tensors if _LORA.fullmatch(name) is None)
        return {name.replace(".base_layer.", "."): name for name in own}

    def scaling(self, layer: str, *, rank: int) -> float:
        """Return the factor of a layer's product: alpha over rank, or over its root (rsLoRA)."""
        alpha = _by_pattern(self.config.get("alpha_pattern"), layer, self.config["lora_alpha"])
        return float(alpha) / (math.sqrt(rank) if self.config.get("use_rslora") else rank)


def _by_pattern(patterns: Mapping[str, Any] | None, layer: str, default: Any) -> Any:
    """Return the value of the first pattern that ends a layer's name, as PEFT matches them."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", layer):
            return value
    return default


def read_adapter(name: str) -> Adapter:
    """Return the adapter in a directory.

    Raises:
        InputError: there is none, or it is not one that can be merged; the message says why.
        EnvironmentFault: its files are there and cannot be read.
    """
    directory = Path(name)
    if not name or not is_directory(directory, label=f"adapter '{name}'"):
        raise InputError(f"adapter '{name}': no such directory")
    if not exists(directory / CONFIG, label=f"{name}/{CONFIG}"):
        raise InputError(f"adapter '{name}': no {CONFIG} in it{_training_below(directory)}")
    config = read_json(directory / CONFIG, label=f"{name}/{CONFIG}")
    _check_config(config, label=f"{name}/{CONFIG}")
    if not exists(directory / WEIGHTS, label=f"{name}/{WEIGHTS}"):
        has_pickle = (directory / "adapter_model.bin").exists()
        hint = ", only a .bin file: that is a pickle, and is not loaded" if has_pickle else ""
        raise InputError(f"adapter '{name}': no {WEIGHTS} in it{hint}")
    tensors = {
        key.removeprefix(_PREFIX): info
        for key, info in read_tensors(directory / WEIGHTS, label=f"{name}/{WEIGHTS}")
    }
    adapter = Adapter(directory.resolve(), config, tensors)
    _check_tensors(adapter, label=f"{name}/{WEIGHTS}")
    return adapter


def adapter_key(name: str) -> str:
    """Return the name in the file of what `Adapter.tensors` names."""
    return _PREFIX + name


def read_tensors(path: Path, *, label: str) -> Iterator[tuple[str, TensorInfo]]:
    """Yield the names of a safetensors file's tensors, with what its header says of them.

    Raises:
        InputError: it is no such file.
        EnvironmentFault: it cannot be read.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                part = file.get_slice(name)
                yield name, TensorInfo(path.name, tuple(part.get_shape()), part.get_dtype())
    except SafetensorError as error:
        raise InputError(f"{label}: not a whole safetensors file: {error}") from error
    except OSError as error:
        raise EnvironmentFault(f"{label}: cannot be read: {error.strerror or error}") from error


def _training_below(directory: Path) -> str:
    """Say where an adapter is, if a directory below is one: a checkpoint, say."""
    found = sorted(path.parent.name for path in directory.glob(f"*/{CONFIG}"))
    return f"; {found[-1]} below it holds one" if found else ""


def _check_config(config: Mapping[str, Any], *, label: str) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise InputError(f"{label}: peft_type must be LORA to be merged, got {quote(kind)}")
    for key, words in _UNMERGEABLE.items():
        if config.get(key):
            raise InputError(f"{label}: {key}: {words}: this is no plain LoRA and is not merged")
    made = config.get("init_lora_weights")
    if isinstance(made, str) and made.lower().startswith(_BASE_CHANGED):
        raise InputError(
            f"{label}: init_lora_weights {quote(made)} changed the base before the training: save "
            "it with PEFT's path_initial_model_for_weight_conversion, and merge that"
        )
    alpha = config.get("lora_alpha")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise InputError(f"{label}: lora_alpha must be a number, got {quote(alpha)}")
    patterns = config.get("alpha_pattern")
    if not isinstance(patterns, dict | None):
        raise InputError(f"{label}: alpha_pattern must be an object, got {quote(patterns)}")


def _check_tensors(adapter: Adapter, *, label: str) -> None:
    if not adapter.tensors:
        raise InputError(f"{label}: no tensors in it")
    for name in adapter.tensors:
        match = _LORA.fullmatch(name)
        if match is not None and match["end"] == ".bias":
            raise InputError(f"{label}: '{name}': a bias of LoRA (lora_bias) is not merged")
        if match is None and ("lora_" in name or "trainable_tokens" in name):
            raise InputError(f"{label}: '{name}': this is no plain LoRA and is not merged")
    for layer, parts in adapter.layers().items():
        kinds = {part.removeprefix("lora_embedding_").removeprefix("lora_") for part in parts}
        if missing := {"A", "B"} - kinds:
            raise InputError(f"{label}: layer '{layer}' has no {' and no '.join(sorted(missing))}")
