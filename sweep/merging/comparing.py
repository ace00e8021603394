"""The proof of a merge: the merged model's logits beside those of base plus adapter.

One model is in memory at a time. Runs in a child, as it needs torch.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from transformers.quantizers.base import get_keys_to_not_convert

from search_spaces.errors import words_of
from sweep.merging.report import Comparison, Trained
from sweep.training.eight_bit import TYPES, to_8_bits

Quantization = tuple[str, bool]
"""Of a base: its kind, and whether the constants of 4-bit weights are quantized too."""

_ROW_TOKENS = 64
_CHEAP_BYTES = 2 * 10**9
"""Of 16-bit weights: up to here a further look takes seconds on a CPU too."""
_ROOM = 1.25
"""A model takes more than its weights: activations, logits, what is being copied."""
_SEED = 0
_CHUNK_ROWS = 1


@dataclass(frozen=True)
class Models:
    """Where the models are that are compared, and how they are to be loaded."""

    base: Path
    adapter: Path
    merged: Path
    dtype: torch.dtype
    nbytes: int
    """Of the merged weights."""

    @property
    def device(self) -> torch.device:
        """The GPU, where one has room; else the CPU."""
        if torch.cuda.is_available() and torch.cuda.mem_get_info()[0] > _ROOM * self.nbytes:
            return torch.device("cuda")
        return torch.device("cpu")


def compare(
    models: Models, *, rows: int, on_step: Callable[[int, int], None] = lambda done, of: None
) -> Comparison:
    """Return how far the merged model is from base plus adapter, on rows of random tokens.

    `on_step` is called with how many models were looked at, of how many.
    """
    device = models.device
    tokens = _tokens(models.merged, rows)
    quantization = _trained_on(models.adapter)
    if device.type == "cpu" and models.nbytes > _CHEAP_BYTES:
        quantization = None
    looks = 2 if quantization is None else 3
    on_step(0, looks)
    without, reference = _unmerged(models, tokens, device)
    on_step(1, looks)
    found = _merged(models, tokens, device)
    on_step(2, looks)
    trained, failed = None, None
    if quantization is not None:
        trained, failed = _trained_or_why_not(models, quantization, tokens, found, device=device)
    difference = (found - reference).abs()
    return Comparison(
        rows=rows,
        tokens_per_row=tokens.shape[1],
        device=device.type,
        max_abs=float(difference.max()),
        mean_abs=float(difference.mean()),
        argmax_agreement=_agreement(found, reference),
        logits_spread=float(reference.std()),
        adapter_mean_abs=float((reference - without).abs().mean()),
        trained=trained,
        trained_failed=failed,
    )


# A model each, so that no name here holds one while the next is loaded.


def _unmerged(
    models: Models, tokens: torch.Tensor, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of the base alone, and with the adapter on it."""
    with _loaded(models.base, models, device) as base:
        peft = PeftModel.from_pretrained(base, models.adapter).eval()
        with peft.disable_adapter():
            without = _logits(peft, tokens, device)
        return without, _logits(peft, tokens, device)


def _merged(models: Models, tokens: torch.Tensor, device: torch.device) -> torch.Tensor:
    with _loaded(models.merged, models, device) as merged:
        return _logits(merged, tokens, device)


def _trained_or_why_not(
    models: Models,
    quantization: Quantization,
    tokens: torch.Tensor,
    merged: torch.Tensor,
    *,
    device: torch.device,
) -> tuple[Trained | None, str | None]:
    """Return how far the merged model is from what was trained, or why that cannot be told: the
    merge is proved without it."""
    kind, double_quant = quantization
    try:
        with _loaded(models.base, models, device, quantization) as base:
            peft = PeftModel.from_pretrained(base, models.adapter).eval()
            trained = _logits(peft, tokens, device)
    except (RuntimeError, ValueError, NotImplementedError, ImportError) as error:
        return None, words_of(error)
    difference = (merged - trained).abs()
    found = Trained(
        quantization=kind,
        double_quant=double_quant,
        max_abs=float(difference.max()),
        mean_abs=float(difference.mean()),
        argmax_agreement=_agreement(merged, trained),
    )
    return found, None


def _trained_on(adapter: Path) -> Quantization | None:
    """Return how the base was quantized in training, as `training.json` says, and as QLoRA does it
    where there is none; None for a base that was in 16 bits, if only in part.
    """
    try:
        text = (adapter / "training.json").read_text(encoding="utf-8")
        config = dict(json.loads(text)["config"])
    except (OSError, ValueError, KeyError, TypeError):
        config = {}
    kind = config.get("quantization", "nf4")
    if kind == "none" or config.get("quantized_fraction", 1.0) < 1.0:
        return None
    return kind, kind not in TYPES and config.get("double_quant", True)


def _tokens(directory: Path, rows: int) -> torch.Tensor:
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    length = min(_ROW_TOKENS, int(config.get("max_position_embeddings") or _ROW_TOKENS))
    generator = torch.Generator().manual_seed(_SEED)
    return torch.randint(0, int(config["vocab_size"]), (rows, length), generator=generator)


@contextmanager
def _loaded(
    directory: Path, models: Models, device: torch.device, quantization: Quantization | None = None
) -> Iterator[torch.nn.Module]:
    """Yield a model; what is left of the one before it, which refers to itself, goes first."""
    kind, double_quant = quantization or ("none", False)
    options: dict[str, Any] = {"device_map": {"": "cpu" if kind in TYPES else device}}
    if quantization is not None and kind not in TYPES:
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=kind,
            bnb_4bit_use_double_quant=double_quant,
            bnb_4bit_compute_dtype=models.dtype,
        )
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    model = AutoModelForCausalLM.from_pretrained(
        str(directory),
        dtype=models.dtype,
        attn_implementation="sdpa",
        trust_remote_code=False,
        **options,
    )
    if kind in TYPES:
        to_8_bits(model, kind, left=get_keys_to_not_convert(model), device=device)
    yield model.eval()


@torch.no_grad()
def _logits(model: torch.nn.Module, tokens: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return logits in fp32 on the host, of shape (rows, tokens, vocabulary)."""
    parts = tokens.split(_CHUNK_ROWS)
    return torch.cat([model(input_ids=part.to(device)).logits.float().cpu() for part in parts])


def _agreement(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.argmax(-1) == other.argmax(-1)).float().mean())
