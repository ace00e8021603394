"""What a merge does, tensor by tensor, worked out before any weight is read.

Pure values: an adapter and a base's headers in, a plan out that a child carries out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from search_spaces.errors import InputError, did_you_mean
from sweep.merging.adapter import Adapter, TensorInfo, adapter_key

MergedDtype = Literal["bf16", "fp16"]
SAFETENSORS_DTYPES: Mapping[str, str] = {"bf16": "BF16", "fp16": "F16"}
_FLOATS = ("F64", "F32", "F16", "BF16")
_SIXTEEN = ("F16", "BF16")
_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2}
_HEAD, _TIED = "lm_head", "tie_word_embeddings"
_EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "embed_in")


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Product(_Value):
    """What is added to one weight: the product of the adapter's two matrices, scaled."""

    down: str
    """Name of A in the adapter's file."""
    up: str
    """Name of B."""
    scaling: float
    is_transposed: bool
    """Whether the weight has inputs first, as GPT-2's and embeddings have."""
    magnitude: str | None = None
    """DoRA's length of each row; None for plain LoRA."""


class Piece(_Value):
    """One tensor of the merged model."""

    name: str
    file: str | None
    """The base's file that it comes from; None where the adapter brings it whole."""
    source: str
    """Its name there."""
    dtype: str
    """That it is written in, as safetensors spells it."""
    shape: tuple[int, ...]
    product: Product | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of it as it is written."""
        count = _BYTES.get(self.dtype, 1)
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True)
class MergePlan:
    """All tensors of the merged model, in the base's order, and its config."""

    pieces: tuple[Piece, ...]
    config: dict[str, Any]

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return sum(piece.nbytes for piece in self.pieces)


def natural_dtype(tensors: Mapping[str, TensorInfo]) -> MergedDtype:
    """Return the 16-bit type that a base is stored in; bf16 for one of 32 bits."""
    return "fp16" if _most(tensors) == "F16" else "bf16"


def plan_merge(
    adapter: Adapter,
    tensors: Mapping[str, TensorInfo],
    config: Mapping[str, Any],
    *,
    dtype: MergedDtype,
) -> MergePlan:
    """Return what each tensor of the merged model is made of.

    Args:
        adapter: to be merged.
        tensors: of the base, by name.
        config: the base's ``config.json``.
        dtype: of the merged model. The few tensors that a 16-bit base keeps in fp32 stay so where
            the adapter does not touch them.

    Raises:
        InputError: the adapter does not belong to this base, or the base is not in 16 bits.
    """
    _check_base(tensors, config)
    pieces = {name: _kept(name, info, dtype, tensors) for name, info in tensors.items()}
    is_untied = _untie(pieces, adapter, config)
    for target, own in adapter.whole().items():
        name = _found(target, pieces)
        info = adapter.tensors[own]
        pieces[name] = Piece(
            name=name,
            file=None,
            source=adapter_key(own),
            dtype=SAFETENSORS_DTYPES[dtype],
            shape=info.shape,
        )
    for layer, parts in adapter.layers().items():
        name = _found(f"{layer}.weight", pieces)
        pieces[name] = _with_product(pieces[name], adapter, layer, parts, dtype)
    return MergePlan(
        tuple(pieces.values()), _merged_config(config, pieces, dtype=dtype, is_untied=is_untied)
    )


def _check_base(tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> None:
    kind = config.get("quantization_config")
    if kind:
        method = kind.get("quant_method") if isinstance(kind, dict) else None
        raise InputError(
            f"the base is stored quantized ({method or 'quantization_config'}): merging needs the "
            "16-bit one, name it with --model"
        )
    if _most(tensors) not in _FLOATS:
        raise InputError(
            f"the base's weights are {_most(tensors)}: merging needs 16-bit ones, name them with "
            "--model"
        )


def _most(tensors: Mapping[str, TensorInfo]) -> str:
    """Return the type that most matrices of a base have."""
    kinds = [info.dtype for info in tensors.values() if len(info.shape) > 1]
    return max(set(kinds), key=kinds.count, default="F32")


def _kept(
    name: str, info: TensorInfo, dtype: MergedDtype, tensors: Mapping[str, TensorInfo]
) -> Piece:
    is_wide_on_purpose = info.dtype == "F32" and _most(tensors) in _SIXTEEN
    becomes = info.dtype in _FLOATS and not is_wide_on_purpose
    return Piece(
        name=name,
        file=info.file,
        source=name,
        dtype=SAFETENSORS_DTYPES[dtype] if becomes else info.dtype,
        shape=info.shape,
    )


def _untie(pieces: dict[str, Piece], adapter: Adapter, config: Mapping[str, Any]) -> bool:
    """Give a head that shares the embedding's weights its own, where the adapter parts them."""
    touched = {layer.rpartition(".")[2] for layer in adapter.layers()}
    touched |= {name.rpartition(".")[0].rpartition(".")[2] for name in adapter.whole()}
    head = f"{_HEAD}.weight"
    if not config.get(_TIED, head not in pieces) or not touched & {_HEAD, *_EMBEDDINGS}:
        return False
    endings = tuple(f"{name}.weight" for name in _EMBEDDINGS)
    embedding = next((name for name in pieces if name.endswith(endings)), None)
    if embedding is not None and head not in pieces:
        pieces[head] = pieces[embedding].model_copy(update={"name": head})
    return True


def _found(target: str, pieces: Mapping[str, Piece]) -> str:
    """Return the base's name of a tensor; a decoder alone is stored without the outer name.

    Raises:
        InputError: it has none.
    """
    for name in (target, target.partition(".")[2]):
        if name in pieces:
            return name
    nearest = did_you_mean(target, list(pieces)) if len(pieces) < 100_000 else ""
    raise InputError(
        f"the adapter changes '{target}', which the base's files do not hold by that name: another "
        f"base, or layers that transformers stores otherwise{nearest if '?' in nearest else ''}"
    )


def _with_product(
    piece: Piece, adapter: Adapter, layer: str, parts: Mapping[str, str], dtype: MergedDtype
) -> Piece:
    is_embedding = "lora_embedding_A" in parts
    down, up = (parts[f"lora_{'embedding_' if is_embedding else ''}{half}"] for half in "AB")
    rank, inputs = _matrix(adapter, down)
    outputs, up_rank = _matrix(adapter, up)
    straight, turned = (outputs, inputs), (inputs, outputs)
    says_turned = is_embedding or bool(adapter.config.get("fan_in_fan_out"))
    # The shape tells, but for a square weight.
    is_turned = piece.shape == turned and (says_turned or piece.shape != straight)
    if rank != up_rank or (piece.shape != straight and not is_turned):
        raise InputError(
            f"the adapter's '{layer}' is {outputs} x {inputs} at rank {rank} and {up_rank}; the "
            f"base's weight is {' x '.join(map(str, piece.shape))}: another base"
        )
    magnitude = parts.get("lora_magnitude_vector")
    if magnitude is not None and is_embedding:
        raise InputError(f"the adapter's '{layer}': DoRA of an embedding is not merged")
    product = Product(
        down=adapter_key(down),
        up=adapter_key(up),
        scaling=adapter.scaling(layer, rank=rank),
        is_transposed=is_turned,
        magnitude=None if magnitude is None else adapter_key(magnitude),
    )
    return piece.model_copy(update={"product": product, "dtype": SAFETENSORS_DTYPES[dtype]})


def _matrix(adapter: Adapter, name: str) -> tuple[int, int]:
    shape = adapter.tensors[name].shape
    if len(shape) != 2 or 0 in shape:
        raise InputError(
            f"the adapter's '{name}' must be a matrix to be merged, its shape is {list(shape)}"
        )
    return shape[0], shape[1]


def _merged_config(
    config: Mapping[str, Any], pieces: Mapping[str, Piece], *, dtype: MergedDtype, is_untied: bool
) -> dict[str, Any]:
    left_out = ("quantization_config", "torch_dtype", "_name_or_path")
    merged = {key: value for key, value in config.items() if key not in left_out}
    merged["dtype"] = {"bf16": "bfloat16", "fp16": "float16"}[dtype]
    if is_untied:
        merged[_TIED] = False
    endings = tuple(f"{name}.weight" for name in _EMBEDDINGS)
    rows = {piece.shape[0] for name, piece in pieces.items() if name.endswith(endings)}
    if len(rows) == 1 and "vocab_size" in merged:
        # An adapter that came with new tokens brings the larger embedding.
        merged["vocab_size"] = max(rows)
    return merged
