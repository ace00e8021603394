"""A checkpoint whose weights are stored quantized: in what, and what a training has to ask for.

Read from ``quantization_config`` of its ``config.json``, as transformers 5.17 reads it. 4-bit
weights of bitsandbytes are trained as they are stored. All others are refused: what trains here is
quantized from 16-bit weights, and would be something else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qlora_sweep.search_spaces.documents import exists
from qlora_sweep.search_spaces.errors import InputError, listed, quote
from qlora_sweep.search_spaces.kinds import COMPUTE_DTYPES, QUANTIZATIONS, Quantization

KEY = "quantization_config"
_KEYS = (KEY, "compression_config", "quantization")
"""What transformers writes; what compressed-tensors wrote before, and MLX writes."""
_BESIDE = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}
"""Files in which NVIDIA's Model Optimizer, AutoGPTQ and AutoAWQ said it before ``config.json`` did,
and what their weights are."""
_FOUR_BIT = tuple(name for name, kind in QUANTIZATIONS.items() if kind.bits == 4)
_LEFT = "llm_int8_skip_modules"
_DTYPES = tuple(kind.torch_name for kind in COMPUTE_DTYPES.values() if kind.bits != 8)
_LAYER = re.compile(r"(?<=layers\.)\d+|(?<=layers\\\.)\d+|(?<=\bh\.)\d+")
"""Where the name of a module has the number of its decoder layer."""
_ENDINGS = re.compile(
    r"(?:[-_.](?:unsloth|dynamic|bnb|nf4|fp4|[48][-_]?bits?|gptq|awq|hqq|aqlm|autoround|mxfp4|nvfp4"
    r"|fp8|int[48]|quantized|quark|torchao|w\d+a\d+|g\d+|block|marlin|mlx))+$",
    re.IGNORECASE,
)
"""What names of quantized copies end in."""


@dataclass(frozen=True)
class StoredQuantization:
    """What a checkpoint's weights are stored in."""

    words: str
    """For a person: ``bitsandbytes nf4``, ``gptq, 4 bits``."""
    kind: Quantization | None
    """The value of ``quantization`` that it is trained as; None where it is not trained."""
    double_quant: bool = False
    """Whether the constants are quantized too."""
    compute_dtype: str = "float32"
    """Torch's name of the type that trainers compute in who ask for none."""
    left: tuple[str, ...] | None = None
    """Patterns of modules in 16 bits, as transformers matches them; None where it chooses them."""

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of a configuration that trains it as it is stored."""
        if self.kind is None:
            return {}
        return {
            "quantization": self.kind,
            "double_quant": self.double_quant,
            "quantized_fraction": 1.0,
        }


def stored_quantization(config: Mapping[str, Any], *, label: str = "") -> StoredQuantization | None:
    """Return what a config says that the weights are stored in; None where they are in 16 bits.

    Args:
        config: a parsed ``config.json``.
        label: begins a message.

    Raises:
        InputError: what it says of them cannot be read.
    """
    key = next((key for key in _KEYS if config.get(key) is not None), None)
    if key is None:
        return None
    said = config[key]
    if not isinstance(said, dict):
        raise InputError(f"{label}: {key} must be an object or null, got {quote(said)}")
    method = str(said.get("quant_method") or "")
    if said.get("load_in_4bit") or said.get("_load_in_4bit"):
        return _four_bit(said, label=f"{label}: {key}")
    if said.get("load_in_8bit") or said.get("_load_in_8bit"):
        return StoredQuantization("bitsandbytes int8", None)
    if method == "bitsandbytes":
        # transformers does not heed one that loads in neither.
        return None
    if not method and key != KEY:
        method = "compressed-tensors"
        if key == "quantization":
            method = "MLX"
    words = method or "a format that it does not name"
    bits = said.get("bits", said.get("w_bit"))
    if isinstance(bits, int) and not isinstance(bits, bool):
        words += f", {bits} bits"
    return StoredQuantization(words, None)


def said_beside(directory: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a file beside a ``config.json`` says of quantized weights; empty where the config
    says it, or none does."""
    if any(config.get(key) is not None for key in _KEYS):
        return {}
    for file, method in _BESIDE.items():
        if exists(directory / file, label=file):
            return {KEY: {"quant_method": f"{method}, says {file}"}}
    return {}


def _four_bit(said: Mapping[str, Any], *, label: str) -> StoredQuantization:
    kind = said.get("bnb_4bit_quant_type", "fp4")
    if kind not in _FOUR_BIT:
        what = f"bnb_4bit_quant_type must be {listed(_FOUR_BIT)}"
        raise InputError(f"{label}: {what}, got {quote(kind)}")
    is_double = said.get("bnb_4bit_use_double_quant", False)
    if not isinstance(is_double, bool):
        what = "bnb_4bit_use_double_quant must be true or false"
        raise InputError(f"{label}: {what}, got {quote(is_double)}")
    dtype = said.get("bnb_4bit_compute_dtype") or "float32"
    if dtype not in _DTYPES:
        what = f"bnb_4bit_compute_dtype must be {', '.join(_DTYPES)} or null"
        raise InputError(f"{label}: {what}, got {quote(dtype)}")
    left = said.get(_LEFT)
    if left is not None and not _are_patterns(left):
        raise InputError(f"{label}: {_LEFT} must be a list of names, got {quote(left)}")
    return StoredQuantization(
        words=f"bitsandbytes {kind}{' with double quantization' if is_double else ''}",
        kind=kind,
        double_quant=is_double,
        compute_dtype=dtype,
        left=None if left is None else tuple(left),
    )


def _are_patterns(value: Any) -> bool:
    """Whether a value is a list of texts that are regular expressions."""
    if not isinstance(value, list):
        return False
    for pattern in value:
        try:
            re.compile(pattern)
        except (TypeError, re.error):
            return False
    return True


def of_decoder(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a vision-language checkpoint's config says of quantized weights, with the names
    that modules have in its text decoder alone."""
    found = {key: config[key] for key in _KEYS if config.get(key) is not None}
    said = found.get(KEY)
    if isinstance(said, dict) and _are_patterns(said.get(_LEFT)):
        names = []
        for name in said[_LEFT]:
            inner = re.sub(r"^(?:model\.)?language_model\.", "", name)
            is_head = inner.startswith("lm_head")
            is_inner = inner != name and not is_head and not inner.startswith("model.")
            names.append(f"model.{inner}" if is_inner else inner)
        found[KEY] = {**said, _LEFT: names}
    return found


def unquantized_of_layer(patterns: Sequence[str], layer: int) -> tuple[str, ...]:
    """Return the patterns that leave modules of a decoder layer in 16 bits, without its number:
    equal for layers that are stored alike."""
    found = []
    for pattern in patterns:
        number = _LAYER.search(pattern)
        if number is not None and _means(pattern, number, layer):
            found.append(f"{pattern[: number.start()]}*{pattern[number.end() :]}")
    return tuple(sorted(found))


def of_chosen_layers(config: Mapping[str, Any], chosen: Sequence[int]) -> dict[str, Any]:
    """Return what a config says of quantized weights where only some of its layers are left.

    Args:
        config: a checked ``config.json``.
        chosen: for each layer that is left, its number in the whole model.
    """
    stored = stored_quantization(config)
    if stored is None or stored.left is None:
        return {}
    patterns = []
    for pattern in stored.left:
        number = _LAYER.search(pattern)
        if number is None:
            patterns.append(pattern)
            continue
        for index, layer in enumerate(chosen):
            if _means(pattern, number, layer):
                # What ends in a number would be the beginning of another one, too.
                rest = pattern[number.end() :] or r"\."
                patterns.append(f"{pattern[: number.start()]}{index}{rest}")
    return {KEY: {**config[KEY], _LEFT: patterns}}


def _means(pattern: str, number: re.Match[str], layer: int) -> bool:
    """Whether a pattern matches names in a layer: transformers takes it for their beginning."""
    is_cut = number.end() == len(pattern)
    return number[0] == str(layer) or (is_cut and str(layer).startswith(number[0]))


def name_of_base(name: str) -> str | None:
    """Return the name of what a quantized copy was made of, by its own; None where it does not
    tell: ``org/model-GPTQ-Int4`` is of ``model``."""
    own = name.rstrip("/").rpartition("/")[2]
    base = _ENDINGS.sub("", own)
    if not base or base == own:
        return None
    return base
