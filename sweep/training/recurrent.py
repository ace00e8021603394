"""The kernels of recurrent layers on a GPU: whether they are called, and their tuning before memory
is full."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

import torch

from qlora_sweep.search_spaces.recurrent import (
    GATED_DELTA_RULE,
    RECURRENT,
    RecurrentKind,
    is_installed,
    refused_triton,
)


def called_kind(model: torch.nn.Module) -> RecurrentKind | None:
    """Return the kind of a base model's recurrent layers whose kernels transformers calls here;
    None where it has none, where they are not installed, or on a CPU."""
    config: Any = model.config
    kind = RECURRENT.get(config.get_text_config().model_type)
    if kind is None or kind.package is None or not kind.function:
        return None
    is_on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
    if is_on_cpu or not is_installed(kind.package):
        return None
    return kind


def refused(model: torch.nn.Module, capability: tuple[int, int]) -> str | None:
    """Return why the kernels of a model's recurrent layers do not train on a GPU; None where they
    do, or none are called. Of Kimi's delta attention none is compiled wrongly.

    Args:
        model: the base.
        capability: of the GPU.
    """
    kind = called_kind(model)
    if kind is not GATED_DELTA_RULE:
        return None
    try:
        version = metadata.version("triton")
    except metadata.PackageNotFoundError:
        return f"{kind.package} needs Triton, which is not installed"
    why = refused_triton(version, capability)
    if why is None:
        return None
    return f"{kind.package}: {why}"


def not_called(model: torch.nn.Module, *, has_solved: bool = False) -> str | None:
    """Return that transformers loops in plain PyTorch where kernels are installed; None where it
    calls them, or there are none to call.

    Args:
        model: the base.
        has_solved: whether a step solved triangular systems by torch, as the loop does.
    """
    kind = called_kind(model)
    if kind is None:
        return None
    if not has_solved and all(map(_calls_a_package, _functions(model, kind))):
        return None
    return (
        f"linear attention ran as a loop in plain PyTorch, although {kind.package} is installed: "
        "transformers could not import it"
    )


def _functions(model: torch.nn.Module, kind: RecurrentKind) -> Iterator[Any]:
    """Yield what the modelling code of a model's modules calls for its recurrent layers."""
    for name in sorted({type(module).__module__ for module in model.modules()}):
        function = getattr(sys.modules[name], kind.function, None)
        if function is not None:
            yield function


def _calls_a_package(function: Any) -> bool:
    """Whether a function that transformers wraps calls a package's kernel: the wrapper knows what
    it calls from the loop that it would call without one."""
    if not inspect.isfunction(function):
        return True
    known = inspect.getclosurevars(function).nonlocals
    return bool(known.get("is_new_implementation", True))


def tune(
    model: torch.nn.Module, *, rows: int, length: int, on_pass: Callable[[], object] = lambda: None
) -> None:
    """Have Triton choose the kernels of a model's recurrent layers.

    It tries each of them with a cleared second-level cache, for which it takes 256 MiB
    (`get_empty_cache_for_benchmark`): in the backward pass of a step that would come on top of all
    that layers keep. The choice depends on the shape of what is given.

    Args:
        model: a base with its adapters, of which `called_kind` returns a kind; in its precision.
        rows: of a micro-batch.
        length: of a row.
        on_pass: called after each pass: on a GPU that has tuned none of them one takes a minute
            and more.
    """
    base: Any = model
    kind = called_kind(base)
    assert kind is not None, "there is nothing to choose"
    embedding = base.get_input_embeddings().weight
    shape = rows, length, base.config.get_text_config().hidden_size
    seen = set()
    for module in base.modules():
        is_called = hasattr(sys.modules[type(module).__module__], kind.function)
        # Layers in 4 bits return another type than those in 16.
        parts = tuple(map(type, module.modules()))
        if is_called and "Delta" in type(module).__name__ and parts not in seen:
            seen.add(parts)
            hidden = torch.zeros(shape, dtype=embedding.dtype, device=embedding.device)
            hidden.requires_grad_()
            loss = module(hidden).sum()
            on_pass()
            torch.autograd.grad(loss, hidden)
            on_pass()
