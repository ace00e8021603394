"""Whether a directory's weights are all there, before minutes are spent on loading them.

Reads the headers of safetensors files, never a tensor, and no pickles.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open

from qlora_sweep.search_spaces.documents import exists, open_file, read_json
from qlora_sweep.search_spaces.errors import EnvironmentFault, InputError, quote
from qlora_sweep.search_spaces.models import ModelSpec

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"

_LENGTH_BYTES = 8
_CUT_IN_HEADER = ("header too small", "invalid header length")
"""What safetensors says of a file that ends before its header does."""


def check_weights(spec: ModelSpec) -> None:
    """Check that the weights of ``spec`` are complete where they are in a directory, and stored as
    its config says.

    A hub model's weights are checked by the download itself.

    Raises:
        InputError: no weights, a shard that is missing or cut short, a tensor that is in none, or
            weights that are stored as others than the config says.
        EnvironmentFault: a file is there and cannot be read.
    """
    if spec.source == "shipped":
        raise InputError(
            f"model '{spec.name}' is an architecture without weights: use weights random, or name "
            "a directory or hub id"
        )
    if spec.source == "directory" and spec.path is not None:
        label = Path(spec.name)
        _check_stored(_check_directory(spec.path, label=label), spec, label=label)


def _check_directory(directory: Path, *, label: Path) -> set[str]:
    """Return the names of all tensors in a directory's weights."""
    if exists(directory / INDEX, label=str(label / INDEX)):
        found: set[str] = set()
        for name, tensors in _shards(directory / INDEX, label=str(label / INDEX)).items():
            here = tensors_of(directory / name, label=str(label / name))
            for missing in sorted(tensors - here):
                raise InputError(f"{label / name}: tensor '{missing}' of {INDEX} is not in it")
            found |= tensors
        return found
    if exists(directory / SINGLE, label=str(label / SINGLE)):
        return tensors_of(directory / SINGLE, label=str(label / SINGLE))
    hint = ""
    if any(directory.glob("*.bin")):
        hint = "; weights in .bin files are pickles and are not loaded"
    raise InputError(f"{label}: no weights, neither {SINGLE} nor {INDEX}{hint}")


def _check_stored(tensors: set[str], spec: ModelSpec, *, label: Path) -> None:
    """Refuse weights that are stored in something else than the config says, which would be trained
    as what they are and recorded as what it says."""
    kinds = {_quantized_as(name) for name in tensors} - {""}
    said = spec.stored
    if said is None and kinds:
        raise InputError(
            f"{label}: the weights are stored quantized ({', '.join(sorted(kinds))}), and its "
            "config.json has no quantization_config that says so: take both from one model"
        )
    if said is not None and said.kind is not None and kinds != {f"bitsandbytes {said.kind}"}:
        found = ", ".join(sorted(kinds)) or "16 bits"
        raise InputError(
            f"{label}: its config.json says that the weights are stored in {said.words}, and they "
            f"are in {found}: take both from one model"
        )


_QUANTIZED_ENDINGS = {
    ".quant_state.bitsandbytes__nf4": "bitsandbytes nf4",
    ".quant_state.bitsandbytes__fp4": "bitsandbytes fp4",
    ".SCB": "bitsandbytes int8",
    ".qweight": "gptq or awq",
    ".weight_scale_inv": "fp8",
    ".weight_scale": "fp8 or int8",
    ".weight_packed": "compressed-tensors",
    "_proj_blocks": "mxfp4",
    ".W_q": "hqq",
}
"""How the names of tensors end that only quantized weights have, and in what those are."""


def _quantized_as(tensor: str) -> str:
    """Return in what a tensor's weights are stored, by its name; nothing where that tells none."""
    for ending, kind in _QUANTIZED_ENDINGS.items():
        if tensor.endswith(ending):
            return kind
    return ""


def _shards(index: Path, *, label: str) -> dict[str, set[str]]:
    """Return the tensors of each shard that an index names."""
    weight_map = read_json(index, label=label).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{label}: weight_map must name the shard of each tensor")
    shards: dict[str, set[str]] = {}
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name:
            raise InputError(
                f"{label}: weight_map: '{tensor}' must be in a file, got {quote(name)}"
            )
        shards.setdefault(name, set()).add(tensor)
    return shards


def tensors_of(path: Path, *, label: str) -> set[str]:
    """Return the names of a file's tensors, once safetensors has found all of them in it.

    Raises:
        InputError: the file is missing, cut short or another one.
        EnvironmentFault: it cannot be read.
    """
    try:
        # Mapping something that is no file into memory would fail without saying what it is.
        open_file(path, label=label).close()
        with safe_open(path, framework="numpy") as weights:
            return set(weights.keys())
    except FileNotFoundError as error:
        raise InputError(f"{label}: this shard is missing") from error
    except OSError as error:
        raise EnvironmentFault(f"{label}: cannot be read: {error.strerror}") from error
    except SafetensorError as error:
        raise InputError(f"{label}: {_fault(path, error)}") from error


def _fault(path: Path, error: SafetensorError) -> str:
    """Say what is wrong with a file that safetensors refused, and what was expected where cut.

    A file is eight bytes with the header's length, the header, which says in JSON where each tensor
    ends, and the tensors. https://github.com/huggingface/safetensors#format
    """
    actual = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(_LENGTH_BYTES)
        expected = _LENGTH_BYTES + int.from_bytes(start, "little")
        if start == b"version ":
            return "a Git LFS pointer, not the weights: run 'git lfs pull'"
        if "not fully covered" in str(error):
            header = json.loads(file.read(expected - _LENGTH_BYTES))
            header.pop("__metadata__", None)
            expected += max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
        elif not any(words in str(error) for words in _CUT_IN_HEADER):
            return "not a safetensors file, its header cannot be read"
    kind = "longer than its header says"
    if actual < expected:
        kind = "cut short"
    return f"{kind}: expected {expected:,} bytes, found {actual:,}"


def identity_of(spec: ModelSpec, *, is_loaded: bool) -> dict[str, str | None]:
    """Return what tells the base of a training from others: its type, and the fingerprint of its
    weights where they were loaded.
    """
    directory = spec.path
    if spec.source == "hub" and directory is None:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(spec.name, "config.json")
        if isinstance(cached, str):
            directory = Path(cached).parent
    digest = None
    if is_loaded and directory:
        digest = weights_fingerprint(directory)
    return {"model_type": spec.model_type, "weights_fingerprint": digest}


def weights_fingerprint(directory: Path) -> str | None:
    """Return a hex digest of the weights in a directory: of each tensor's name, type, shape and a
    few of its bytes. Equal however they are split into files; None if they cannot be read.
    """
    try:
        names = {SINGLE}
        if (directory / INDEX).is_file():
            names = set(_shards(directory / INDEX, label=INDEX))
        tensors: list[tuple[str, str, list[int], bytes]] = []
        for name in names:
            tensors += _samples(directory / name)
    except (OSError, ValueError, KeyError, InputError):
        return None
    return hashlib.sha256(repr(sorted(tensors)).encode()).hexdigest()[:16]


def _samples(path: Path) -> Iterator[tuple[str, str, list[int], bytes]]:
    """Yield of each tensor in a file its name, type, shape and the bytes in its middle."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        for name, tensor in header.items():
            begin, end = tensor["data_offsets"]
            file.seek(_LENGTH_BYTES + length + (begin + end) // 2)
            yield name, tensor["dtype"], tensor["shape"], file.read(min(64, (end - begin) // 2))
