"""One structure's profile: build the excerpt, walk a step, reduce what was counted."""

from __future__ import annotations

import inspect
import re
import sys
import traceback
from functools import cache
from typing import Any

import torch
from transformers import masking_utils

from search_spaces.config import TrialConfig
from search_spaces.errors import InputError, in_percent, words_of
from search_spaces.experts import LEAST_QUANTIZED_SHARE
from search_spaces.models import ModelSpec
from sweep.predict.memory.polynomials import Symbols
from sweep.predict.memory.profiles import Structure, Untraceable, is_masked_by_text
from sweep.predict.memory.tracing import fourbit, fused
from sweep.predict.memory.tracing.ledger import Ledger, PlainLoop
from sweep.predict.memory.tracing.model import (
    Excerpt,
    Traceable,
    attach,
    base_memory,
    build_base,
    excerpt,
    share_input_copies,
)
from sweep.predict.memory.tracing.walk import Walk, accounts, tapes, walk
from sweep.training.model import BaseModel, compute_type

_FP16 = re.compile(r"(?<!b)float16|\.half\b")
_SHAPE_FAULTS = ("shape", "size of tensor", "invalid for input", "must match", "split")

# transformers asks whether a mask hides anything by a sum, which has no value without data; of
# `torch.all` the ledger knows the answer.
masking_utils.fast_all = torch.all


def trace(spec: ModelSpec, structure: Structure) -> dict[str, Any]:
    """Return a structure's profile as JSON values, as `profiles.Profile.from_json` reads them.

    Raises:
        Untraceable: the model's code cannot be walked without data.
        InputError: the config cannot be built, or contradicts itself.
    """
    with fused.eight_bit_kernels(is_compiled=structure.config.compile):
        return _traced(spec, structure)


def _traced(spec: ModelSpec, structure: Structure) -> dict[str, Any]:
    try:
        config, part = structure.config, excerpt(spec)
        is_whole = len(set(part.positions)) == len(part.positions)
        assert is_whole or not structure.is_mixed, "an excerpt's layers are of one kind"
        symbols = _symbols(part, structure)
        base = build_base(config, part.spec)
        _check_quantized(base)
        on_card = _base_memory(base, part)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"it cannot be built: {_line(error)}") from error
    fuses_loss = config.kernels != "hf"
    # The compiler recomputes what is elementwise, as Liger's kernels do; not quite, so the
    # prediction says that it is less certain.
    fuses_layers = config.kernels == "liger" or config.compile
    if config.compile:
        fourbit.compile_layers(base.model)
    with fused.patched(base.model, loss=fuses_loss, layers=fuses_layers, chunk_tokens=symbols.c):
        target = _attach(base, config, symbols)
        if config.compile:
            share_input_copies(target.base)
        walked = _walk(target, symbols, structure)
    ledger = walked.ledger
    sizes, tape_of = tapes(ledger, symbols)
    account_of = accounts(ledger, symbols, gradients=_gradients(target, ledger))
    return {
        "positions": part.positions,
        "base": on_card,
        "adapters": _adapters(target, symbols),
        "segments": {name: {**account_of[name], "tape": tape} for name, tape in tape_of.items()},
        "sizes": sizes,
        "window": part.window,
        "quantized_share": base.quantized_share,
        "is_same_in_fp16": not walked.tells_halves_apart and not _names_fp16(target),
    }


def _base_memory(base: BaseModel, part: Excerpt) -> dict[str, Any]:
    """Return what the base takes, which its kernels and its adapters have no part in."""
    key = (part.spec.fingerprint, part.positions, base.config.model_copy(update={"kernels": "hf"}))
    if key not in _known_bases:
        _known_bases[key] = base_memory(base.model, base.config, part.positions)
    return _known_bases[key]


_known_bases: dict[tuple[str, tuple[int, ...], TrialConfig], dict[str, Any]] = {}


def _symbols(part: Excerpt, structure: Structure) -> Symbols:
    if structure.is_long and part.window is not None:
        return _known_symbols(part.dimensions, longer_than=part.window)
    limits = [part.longest, part.window and part.window - 1]
    longest = min((n for n in limits if n), default=None)
    return _known_symbols(part.dimensions, longest=longest)


_known_symbols = cache(Symbols)


def _check_quantized(base: BaseModel) -> None:
    """Refuse a base that would be called a 4-bit one and is not; its worker would, too late."""
    share = base.quantized_share
    if share is not None and share < LEAST_QUANTIZED_SHARE:
        raise Untraceable(
            f"only {in_percent(share)} of its matrices' weights would be in "
            f"{base.config.weight_bits} bits, as linear layers alone are: use quantization none"
        )


def _attach(base: BaseModel, config: TrialConfig, symbols: Symbols) -> Traceable:
    try:
        return attach(base, config, rank=symbols.r)
    except InputError:
        raise
    except Exception as error:
        raise Untraceable(f"adapters cannot be attached: {_line(error)}") from error


def _names_fp16(target: Traceable) -> bool:
    """Whether the model's code has anything to say of fp16 by itself."""
    names = {type(module).__module__ for module in target.base.modules()}
    return any(_module_names_fp16(n) for n in names if n.startswith("transformers.models."))


@cache
def _module_names_fp16(name: str) -> bool:
    return _FP16.search(inspect.getsource(sys.modules[name])) is not None


def _walk(target: Traceable, symbols: Symbols, structure: Structure) -> Walk:
    computed_in = compute_type(structure.config)
    try:
        return walk(
            target,
            symbols=symbols,
            autocast_dtype=None if computed_in == torch.float32 else computed_in,
            has_flash=structure.has_flash,
            is_checkpointed=structure.is_checkpointed,
            is_packed=is_masked_by_text(structure.config),
        )
    except PlainLoop as error:
        raise Untraceable(f"{_module_at_fault(error, target)} {error}") from error
    except Exception as error:
        where = _module_at_fault(error, target)
        if isinstance(error, RuntimeError) and any(f in str(error) for f in _SHAPE_FAULTS):
            raise InputError(f"its config contradicts itself in {where}: {_line(error)}") from error
        raise Untraceable(f"{where}: {_line(error)}") from error


def _module_at_fault(error: BaseException, target: Traceable) -> str:
    """Return the name of the innermost module that was running."""
    names = {id(module): name for name, module in target.base.named_modules()}
    fault = f"model type '{target.base.config.model_type}'"
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if names.get(id(module)):
            fault = f"module '{names[id(module)]}'"
    return fault


def _line(error: BaseException) -> str:
    return words_of(error)[:300]


def _adapters(target: Traceable, symbols: Symbols) -> list[list[int]]:
    """Return the elements of every trained tensor for each unit of rank, by layer, as attached."""
    return [
        [p.numel() // symbols.r for p in layer.parameters() if p.requires_grad]
        for layer in target.layers
    ]


def _gradients(target: Traceable, ledger: Ledger) -> frozenset[int]:
    numbers = [ledger.number(p.grad) for p in target.adapters() if p.grad is not None]
    return frozenset(number for number in numbers if number is not None)
