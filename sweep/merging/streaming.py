"""Carrying out a merge plan: each tensor read, added to and written, one shard in memory.

Runs in a child, as it needs torch.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open
from safetensors.torch import save_file

from search_spaces.errors import InputError
from sweep.merging.plan import Piece, Product

SHARD_BYTES_MAX = 3 * 10**9
"""Of a file that is written: so much is held at a time, and the base's file is mapped."""
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16}


class Sources:
    """The base's files and the adapter's, opened when they are first read from.

    Two of the base's are open at a time: what is mapped of a file counts as this process's memory.
    """

    def __init__(self, base: Path, adapter: Path) -> None:
        self._base = base
        self._open: dict[str, Any] = {}
        with safe_open(adapter, framework="pt") as file:
            self._adapter = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118

    def adapter(self, name: str) -> torch.Tensor:
        """Return a tensor of the adapter's."""
        return self._adapter[name]

    def tensor(self, piece: Piece) -> torch.Tensor:
        """Return what a piece comes from."""
        if piece.file is None:
            return self._adapter[piece.source]
        if piece.file not in self._open:
            while len(self._open) > 1:
                self._open.pop(next(iter(self._open)))
            self._open[piece.file] = safe_open(self._base / piece.file, framework="pt")
        return self._open[piece.file].get_tensor(piece.source)


def write_merged(
    pieces: list[Piece],
    sources: Sources,
    directory: Path,
    *,
    shard_bytes_max: int = SHARD_BYTES_MAX,
    on_progress: Callable[[int, int], None] = lambda done, of: None,
) -> int:
    """Write the merged weights and their index; return the number of files.

    Args:
        pieces: all tensors.
        sources: they come from.
        directory: is there.
        shard_bytes_max: of one file, but for a tensor that is larger.
        on_progress: called with bytes written, of how many.

    Raises:
        InputError: a weight is too large for the type that was asked for.
        OSError: what cannot be written.
    """
    by_name = {piece.name: piece for piece in pieces}
    # Tensors without data have no storage, by which hub tells tensors that share theirs.
    empty = {
        piece.name: torch.empty(piece.shape, dtype=_torch_dtype(piece), device="meta")
        for piece in pieces
    }
    split = split_torch_state_dict_into_shards(empty, max_shard_size=shard_bytes_max)
    total, done = sum(piece.nbytes for piece in pieces), 0
    for file, names in split.filename_to_tensors.items():
        tensors = {}
        for name in names:
            tensors[name] = merged(by_name[name], sources)
            done += by_name[name].nbytes
            on_progress(done, total)
        with _writing():
            save_file(tensors, directory / file, metadata={"format": "pt"})
        tensors.clear()
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (directory / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    return len(split.filename_to_tensors)


def merged(piece: Piece, sources: Sources) -> torch.Tensor:
    """Return one tensor of the merged model, worked out in fp32.

    Raises:
        InputError: it has numbers that its type cannot hold.
    """
    base = sources.tensor(piece)
    wide = base if piece.product is None else _added(base.float(), piece.product, sources)
    dtype = _DTYPES.get(piece.dtype, wide.dtype)
    narrow = wide.to(dtype).contiguous()
    if dtype == torch.float16 and not torch.isfinite(narrow).all() and torch.isfinite(wide).all():
        raise InputError(f"'{piece.name}' has weights too large for fp16: merge with --dtype bf16")
    return narrow


def _added(weight: torch.Tensor, product: Product, sources: Sources) -> torch.Tensor:
    """Return a weight with the adapter's product on it, in fp32."""
    down, up = sources.adapter(product.down).float(), sources.adapter(product.up).float()
    straight = weight.T if product.is_transposed else weight
    total = torch.addmm(straight, up, down, alpha=product.scaling)
    if product.magnitude is not None:
        length = sources.adapter(product.magnitude).float()
        total *= (length / torch.linalg.vector_norm(total, dim=1)).unsqueeze(1)
    return total.T if product.is_transposed else total


def _torch_dtype(piece: Piece) -> torch.dtype:
    """Return a type of the same size, which is all that splitting asks for."""
    count = max(1, int(torch.Size(piece.shape).numel()))
    sizes = {8: torch.int64, 4: torch.int32, 2: torch.int16}
    return sizes.get(piece.nbytes // count, torch.int8)


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    """Say as the system does what safetensors says in words of its own."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        if "os error" not in str(error):
            raise
        raise OSError(f"the merged weights cannot be written: {error}") from error
