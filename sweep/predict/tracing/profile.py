"""Owns one structure's profile: build the excerpt, walk a step, reduce what was counted. And what its failures mean.

Knows nothing of processes or files.
"""

from __future__ import annotations

import traceback
from collections import Counter
from typing import Any

import torch
from transformers import masking_utils

from search_spaces.errors import InputError
from search_spaces.models import ModelSpec
from sweep.predict.profiles import Structure, Untraceable
from sweep.predict.tracing import liger
from sweep.predict.tracing.ledger import Ledger
from sweep.predict.tracing.model import (
    Excerpt,
    Traceable,
    attach,
    build_base,
    excerpt,
    weight_blocks,
)
from sweep.predict.tracing.segments import segments
from sweep.predict.tracing.symbols import Symbols
from sweep.predict.tracing.walk import walk

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}
_SHAPE_FAULTS = ("shape", "size of tensor", "invalid for input", "must match", "split")

# Looks for packed sequences among the positions' values, and finds none in a plain batch.
masking_utils.find_packed_sequence_indices = lambda position_ids: None


def trace(spec: ModelSpec, structure: Structure) -> dict[str, Any]:
    """Return a structure's profile as JSON values, as `profiles.Profile.from_json` reads them.

    Raises:
        Untraceable: the model's code cannot be walked without data.
        InputError: the config cannot be built, or contradicts itself.
    """
    try:
        part = excerpt(spec)
        symbols = _symbols(part, structure)
        config = structure.to_config()
        base = build_base(config, part.spec)
        weights = weight_blocks(base, part.positions)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"its config cannot be built: {_line(error)}") from error
    with liger.patched(base, structure.kernels, chunk_tokens=symbols.c):
        target = attach(base, config, rank=symbols.r)
        ledger = _walk(target, symbols, structure)
    return {
        "positions": part.positions,
        "weights": weights,
        "adapters": _adapters(target, part, symbols),
        "segments": segments(ledger, symbols, gradients=_gradients(target, ledger)),
        "window": part.window,
    }


def _symbols(part: Excerpt, structure: Structure) -> Symbols:
    limits = [part.longest, None if structure.is_long else part.window and part.window - 1]
    return Symbols(
        part.dimensions,
        longest=min((limit for limit in limits if limit), default=None),
        longer_than=part.window if structure.is_long and part.window else 0,
    )


def _walk(target: Traceable, symbols: Symbols, structure: Structure) -> Ledger:
    try:
        return walk(
            target,
            symbols=symbols,
            autocast_dtype=_AUTOCAST[structure.compute_dtype],
            is_checkpointed=structure.is_checkpointed,
        )
    except Exception as error:
        where = _module_at_fault(error, target)
        if isinstance(error, RuntimeError) and any(f in str(error) for f in _SHAPE_FAULTS):
            raise InputError(f"its config contradicts itself in {where}: {_line(error)}") from error
        raise Untraceable(f"{where}: {_line(error)}") from error


def _module_at_fault(error: BaseException, target: Traceable) -> str:
    """Return the name and class of the innermost module that was running."""
    names = {id(module): name for name, module in target.base.named_modules()}
    found = f"{type(target.base).__name__}"
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if names.get(id(module)):
            found = f"module '{names[id(module)]}' ({type(module).__name__})"
    return found


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


def _adapters(target: Traceable, part: Excerpt, symbols: Symbols) -> list[tuple[int, int]]:
    repeats = Counter(part.positions)
    elements: Counter[int] = Counter()
    for index, layer in enumerate(target.layers):
        for parameter in layer.parameters():
            if parameter.requires_grad:
                elements[parameter.numel() // symbols.r] += repeats[index]
    return sorted(elements.items())


def _gradients(target: Traceable, ledger: Ledger) -> frozenset[int]:
    numbers = [ledger.number(p.grad) for p in target.adapters() if p.grad is not None]
    return frozenset(number for number in numbers if number is not None)
