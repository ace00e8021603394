"""Owns checking that a directory's weights are all there before minutes are spent on loading them.

Reads the headers of safetensors files, never a tensor, and no pickles. Knows nothing of models.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from search_spaces.documents import exists, open_file, read_json
from search_spaces.errors import EnvironmentFault, InputError, quote
from search_spaces.models import ModelSpec

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
HEADER_BYTES_MAX = 100_000_000
"""Limit of the format; a longer header is no safetensors file."""

_LENGTH_BYTES = 8


def check_weights(spec: ModelSpec) -> None:
    """Check that the weights of ``spec`` are complete where they are in a directory.

    A hub model's weights are checked by the download itself.

    Raises:
        InputError: no weights, a shard that is missing or cut short, or a tensor that is in none.
        EnvironmentFault: a file is there and cannot be read.
    """
    if spec.source == "shipped":
        raise InputError(
            f"model '{spec.name}' is an architecture without weights: use weights random, or name "
            "a directory or hub id"
        )
    if spec.source == "directory" and spec.path is not None:
        _check_directory(spec.path, label=Path(spec.name))


def _check_directory(directory: Path, *, label: Path) -> None:
    if exists(directory / INDEX, label=str(label / INDEX)):
        shards = _shards(directory / INDEX, label=str(label / INDEX))
        for name, tensors in shards.items():
            header = _header(directory / name, label=str(label / name))
            missing = sorted(tensors - header.keys())
            if missing:
                raise InputError(f"{label / name}: tensor '{missing[0]}' of {INDEX} is not in it")
    elif exists(directory / SINGLE, label=str(label / SINGLE)):
        _header(directory / SINGLE, label=str(label / SINGLE))
    else:
        pickled = any(directory.glob("*.bin"))
        hint = "; weights in .bin files are pickles and are not loaded" if pickled else ""
        raise InputError(f"{label}: no weights, neither {SINGLE} nor {INDEX}{hint}")


def _shards(index: Path, *, label: str) -> dict[str, set[str]]:
    """Return the tensors of each shard that an index names."""
    places = read_json(index, label=label).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise InputError(f"{label}: weight_map must name the shard of each tensor")
    shards: dict[str, set[str]] = {}
    for tensor, name in places.items():
        if not isinstance(name, str) or Path(name).name != name:
            raise InputError(
                f"{label}: weight_map: '{tensor}' must be in a file, got {quote(name)}"
            )
        shards.setdefault(name, set()).add(tensor)
    return shards


def _header(path: Path, *, label: str) -> dict[str, Any]:
    """Return a safetensors header, once the file is known to be as long as it says.

    The format: eight bytes of header length, little-endian; the header, JSON with the data offsets
    of each tensor; the data. https://github.com/huggingface/safetensors#format
    """
    try:
        size = path.stat().st_size
        with open_file(path, label=label) as file:
            start = file.read(_LENGTH_BYTES)
            length = int.from_bytes(start, "little")
            text = file.read(length) if length <= HEADER_BYTES_MAX else b""
    except FileNotFoundError as error:
        raise InputError(f"{label}: this shard is missing") from error
    except OSError as error:
        raise EnvironmentFault(f"{label}: cannot be read: {error.strerror}") from error
    if start == b"version ":
        raise InputError(f"{label}: a Git LFS pointer, not the weights: run 'git lfs pull'")
    if len(start) < _LENGTH_BYTES or (length <= HEADER_BYTES_MAX and len(text) < length):
        raise _truncated(label, expected=_LENGTH_BYTES + length, actual=size)
    header, data_bytes = _parse(text, label=label)
    expected = _LENGTH_BYTES + length + data_bytes
    if size != expected:
        raise _truncated(label, expected=expected, actual=size)
    return header


def _parse(text: bytes, *, label: str) -> tuple[dict[str, Any], int]:
    """Return the tensors of a header, and how many bytes their data takes."""
    try:
        header = json.loads(text)
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        data_bytes = max((int(entry["data_offsets"][1]) for entry in tensors.values()), default=0)
    except (ValueError, RecursionError, AttributeError, TypeError, LookupError) as error:
        raise InputError(f"{label}: not a safetensors file, its header cannot be read") from error
    return tensors, data_bytes


def _truncated(label: str, *, expected: int, actual: int) -> InputError:
    kind = "cut short" if actual < expected else "longer than its header says"
    return InputError(f"{label}: {kind}: expected {expected:,} bytes, found {actual:,}")
