"""Decoder layers compiled for the shape at hand, and what compiling took.

Compiling the whole PEFT model compiles nothing, so each layer is compiled, and one graph serves all
that are alike. Shapes are static: that costs some seconds a shape where a graph for any shape costs
a minute, and trains as fast (tests/bench/results/compile_cost.json). Graphs stay for later trials
on the same base, and on disk for later processes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.callback import callback_handler

_SHAPES_MAX = 1_000_000
"""Graphs of one layer that are kept; torch keeps eight, and would not compile what comes after."""

Graph = Callable[..., Any]


@dataclass
class Compilation:
    """What the compiler did since it was put on some layers."""

    calls: int = 0
    """Times that a compiled layer ran forward, as a recomputed one does twice."""
    seconds: float = 0.0
    """Spent on compiling, or on fetching from the disk what was compiled before."""
    _begun: float = 0.0

    def start(self, _: Any) -> None:
        """Note that the compiler begins."""
        self._begun = time.perf_counter()

    def end(self, _: Any) -> None:
        """Note that it is done."""
        self.seconds += time.perf_counter() - self._begun


class CountingCompiler:
    """A compiler whose graphs tell when they run.

    There is one for the whole process: a graph is found again by who compiled it.
    """

    def __init__(self, compiler: Callable[[torch.fx.GraphModule, Sequence[Any]], Graph]) -> None:
        self._compiler = compiler
        self.counted = Compilation()

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Graph:
        """Compile a graph; called by torch."""
        run = self._compiler(graph, inputs)

        def counting(*args: Any) -> Any:
            self.counted.calls += 1
            return run(*args)

        return counting


def _inductor(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Graph:
    """Compile a graph as torch does where nothing else is asked for."""
    # Imported at the first graph: it wants Triton on a GPU.
    from torch._inductor.compile_fx import compile_fx

    run: Graph = compile_fx(graph, inputs)  # type: ignore[assignment]
    return run


INDUCTOR = CountingCompiler(_inductor)


@contextlib.contextmanager
def compiled(
    layers: Sequence[torch.nn.Module], *, compiler: CountingCompiler = INDUCTOR
) -> Iterator[Compilation]:
    """Compile each layer when it is first called; on exit they are as they were.

    A layer is one graph or fails: what fell back to eager would not be what was asked for.
    """
    counted = compiler.counted = Compilation()
    callback_handler.register_start_callback(counted.start)
    callback_handler.register_end_callback(counted.end)
    compile_each(layers, backend=compiler)
    try:
        yield counted
    finally:
        for layer in layers:
            layer._compiled_call_impl = None
        callback_handler.remove_start_callback(counted.start)
        callback_handler.remove_end_callback(counted.end)


def compile_each(layers: Sequence[torch.nn.Module], *, backend: Any = "inductor") -> None:
    """Have each layer compiled when it is first called, for the shapes that it gets."""
    torch._dynamo.config.recompile_limit = _SHAPES_MAX
    torch._dynamo.config.accumulated_recompile_limit = _SHAPES_MAX
    # Where several GPUs train together it would cut each layer's graph up for what they send.
    torch._dynamo.config.optimize_ddp = False
    for layer in layers:
        layer.compile(backend=backend, dynamic=False, fullgraph=True)


def eager(layers: Sequence[torch.nn.Module]) -> contextlib.AbstractContextManager[None]:
    """Run layers as they are without the compiler, which would take seconds for each new shape."""
    return changed((layer, "_compiled_call_impl", None) for layer in layers)


@contextlib.contextmanager
def changed(changes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set attributes of objects; on exit they are as they were.

    Args:
        changes: objects, names of attributes that they have, and values.
    """
    with contextlib.ExitStack() as undo:
        for thing, name, value in list(changes):
            undo.callback(setattr, thing, name, getattr(thing, name))
            setattr(thing, name, value)
        yield


def forget_compiled() -> None:
    """Drop every graph, and with it whatever it refers to; the files on the disk stay."""
    torch._dynamo.reset()


def start_compiler_processes() -> None:
    """Begin with what the first compilation would wait for: processes that import torch too."""
    with contextlib.suppress(ImportError, OSError):
        # Without Triton there is no compiler: a trial that wants one says so. Where no process can
        # be started, the first graph is compiled without.
        from torch._inductor.async_compile import AsyncCompile

        AsyncCompile.warm_pool()
