"""Prints what flash-linear-attention's own code allocates for its delta rules, and what stands
in for it does, on tensors without data: births and deaths of storages, and their peak.

Its kernels are not run: in Triton's place is a package whose kernels do nothing. Run as a program,
as both would stay in a process.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import json
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from qlora_sweep.sweep.predict.memory.tracing import stand_ins

stand_ins.install()
from qlora_sweep.sweep.predict.memory.tracing.recurrent import (  # noqa: E402
    CHUNK,
    GatedDeltaRule,
    KimiDeltaAttention,
)
from qlora_sweep.sweep.predict.memory.tracing.walk import StorageCounter  # noqa: E402

ROWS, LENGTH = 3, 197
SHAPES = [(4, 4, 128, 128), (2, 4, 128, 128), (4, 4, 96, 192)]
"""Heads of keys and of values, and their widths."""
Rule = Callable[..., torch.Tensor]


class Nothing:
    """Stands for whatever is asked of it."""

    def __init__(self, *_: Any) -> None:
        """Take anything."""

    def __getattr__(self, name: str) -> Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()

    def __call__(self, *_: Any, **__: Any) -> Nothing:
        return Nothing()


class Kernel:
    """A kernel that does nothing; and what tunes one, which returns it."""

    arg_names: Sequence[str] = ()
    user_defined_pre_hook = user_defined_post_hook = reset_to_zero = restore_value = None

    def __init__(self, *_: Any, **__: Any) -> None:
        self.__name__ = "kernel"

    def __getitem__(self, _grid: Any) -> Callable[..., None]:
        return lambda *_, **__: None


class NoDriver:
    """The runtime of a machine without a GPU."""

    def __getattr__(self, _: str) -> Any:
        raise RuntimeError("there is no driver")


def _jit(function: Any = None, **_: Any) -> Any:
    return Kernel() if function is not None else _jit_of


def _jit_of(_: Any) -> Kernel:
    return Kernel()


def _unchanged(*_: Any, **__: Any) -> Callable[[Any], Any]:
    return lambda function: function


def _autotune(*_: Any, cache_results: bool = False, **__: Any) -> Callable[[Any], Any]:
    return lambda function: function


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds Triton, all of it."""

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != "triton":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        class Module(types.ModuleType):
            def __getattr__(self, name: str) -> Nothing:
                if name.startswith("__"):
                    raise AttributeError(name)
                return Nothing()

        return Module(spec.name)

    def exec_module(self, module: Any) -> None:
        vars(module).update(
            __version__="3.7.1",
            jit=_jit,
            heuristics=_unchanged,
            autotune=_autotune,
            cdiv=lambda count, size: -(-count // size),
            next_power_of_2=lambda number: 1 << (number - 1).bit_length(),
            Autotuner=Kernel,
            constexpr=Nothing,
        )
        if module.__name__ == "triton":
            module.runtime = NoDriver()


def real_rules() -> dict[str, Rule]:
    """Return the package's own functions, imported without what else the package imports."""
    spec = importlib.util.find_spec("fla")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent
    sys.meta_path.insert(0, Finder())
    for name in ("fla", "fla.ops", "fla.ops.common", "fla.modules"):
        package: Any = types.ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        package.__version__ = "0"
        sys.modules[name] = package
    from fla.ops.common import chunk_o
    from fla.ops.gated_delta_rule import chunk
    from fla.ops.kda.chunk import chunk_kda

    # As on a GPU with as much shared memory as an A100 has.
    chunk_o.check_shared_mem = lambda *_: True

    def rule_of(function: Any) -> Rule:
        def rule(*given: torch.Tensor) -> torch.Tensor:
            q, k, v, g, beta = given
            output, _ = function(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)
            return output  # type: ignore[no-any-return]

        return rule

    return {"gated": rule_of(chunk.chunk_gated_delta_rule), "kimi": rule_of(chunk_kda)}


def stand_in(function: Any) -> Rule:
    def rule(*given: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = function.apply(*given, True, -(-LENGTH // CHUNK))
        return output

    return rule


STAND_INS = {"gated": stand_in(GatedDeltaRule), "kimi": stand_in(KimiDeltaAttention)}


def given(
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    *,
    is_contiguous: bool,
    decays: int | None,
) -> Iterator[torch.Tensor]:
    """Yield queries, keys, values, decays (of so many channels each, or of one alone) and betas, as
    split off a transposed tensor or not."""
    key_heads, heads, keys, values = shape
    for count, width in ((key_heads, keys), (key_heads, keys), (heads, values)):
        each = torch.empty(ROWS, LENGTH, count * width, dtype=dtype, device="meta")
        if not is_contiguous:
            each = torch.empty(ROWS, count * width, LENGTH, dtype=dtype, device="meta").mT
        yield each.unflatten(2, (count, width))
    channels = () if decays is None else (decays,)
    yield torch.empty(ROWS, LENGTH, heads, *channels, device="meta")
    yield torch.empty(ROWS, LENGTH, heads, dtype=dtype, device="meta")


def counted(rule: Rule, tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Return what a pass in each direction allocates: bytes that are born, in order, what is kept
    between the passes, and the peak."""
    for tensor in tensors:
        tensor.requires_grad_()
    grad = torch.empty_like(tensors[2], memory_format=torch.contiguous_format)
    ledger = StorageCounter(ignored=[*tensors, grad])
    with ledger:
        output = rule(*tensors)
        kept = len(ledger.live)
        between = len(ledger.events)
        torch.autograd.grad(output, tensors, grad)
    alive = peak = kept_bytes = 0
    for number, (storage, is_birth) in enumerate(ledger.events):
        alive += ledger.sizes[storage] if is_birth else -ledger.sizes[storage]
        peak = max(peak, alive)
        if number + 1 == between:
            kept_bytes = alive
    return {"born": ledger.sizes, "kept": kept, "kept_bytes": kept_bytes, "peak": peak}


def main() -> None:
    real = real_rules()
    rows = []
    for name, dtype, shape, is_contiguous in itertools.product(
        STAND_INS, (torch.bfloat16, torch.float32), SHAPES, (True, False)
    ):
        key_heads, heads, keys, _ = shape
        if name == "kimi" and key_heads != heads:
            # transformers gives it as many of both.
            continue
        row: dict[str, Any] = {"case": f"{name} {dtype} {shape} {is_contiguous}"}
        for side, rules in (("real", real), ("stand_in", STAND_INS)):
            decays = keys if name == "kimi" else None
            tensors = list(given(shape, dtype, is_contiguous=is_contiguous, decays=decays))
            row[side] = counted(rules[name], tensors)
        rows.append(row)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
