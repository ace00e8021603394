"""What stands in for kernels that cannot be traced, against those kernels: what each keeps for the
backward pass, and how high it goes both ways.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
import torch.nn.functional as functional

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.sweep.predict.memory.tracing import fused, stand_ins
from qlora_sweep.sweep.predict.memory.tracing.walk import StorageCounter
from qlora_sweep.sweep.training.model import quantize_random

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]
ROWS, WIDTH, INNER, VOCABULARY, CHUNK = 2048, 2048, 5632, 32_768, 128
"""Multiples of the allocator's 512 bytes, so that counts can be equal."""
BF16 = torch.bfloat16
MIB = 2**20
"""What the allocator may leave in a block that it does not split."""
CONSTANTS_BYTES = 64 * 1024
"""Scalars, and what a row and a scale add, rounded up to the allocator's unit."""


@dataclass(frozen=True)
class Footprint:
    """Bytes above the inputs: kept after the forward pass, highest forward, highest backward."""

    kept: int
    forward: int
    backward: int


Make = Callable[[str], tuple[tuple[Any, ...], Callable[..., torch.Tensor]]]
"""From a device to the inputs, and the function of them that is differentiated."""


def on_the_gpu(make: Make) -> Footprint:
    inputs, function = make("cuda")
    for _ in range(2):  # The first one compiles, and takes workspaces.
        footprint = _measured(inputs, function)
    return footprint


def _measured(inputs: tuple[Any, ...], function: Callable[..., torch.Tensor]) -> Footprint:
    for tensor in inputs:
        if isinstance(tensor, torch.Tensor):
            tensor.grad = None
    torch.cuda.synchronize()
    # What earlier tests left in cycles must not be freed in between.
    gc.collect()
    # Blocks out of the cache may be a little larger than what was asked for.
    torch.cuda.empty_cache()
    start = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = function(*inputs)
    kept = torch.cuda.memory_allocated() - start
    forward = torch.cuda.max_memory_allocated() - start
    grad = torch.ones_like(out)
    torch.cuda.reset_peak_memory_stats()
    out.backward(grad)
    backward = torch.cuda.max_memory_allocated() - start - grad.nbytes
    return Footprint(kept, forward, backward)


def on_paper(make: Make) -> Footprint:
    inputs, function = make("meta")
    held = [t for t in inputs if isinstance(t, torch.Tensor)]
    with StorageCounter(ignored=held) as ledger:
        ledger.mark("forward")
        out = function(*inputs)
        grad = torch.ones_like(out)
        ledger.mark("backward")
        out.backward(grad)
    (_, forward), (_, backward) = ledger.segments()
    levels = list(itertools.accumulate(_changes(ledger, forward)))
    # The gradient came last, and is nobody's.
    kept = levels[-1] - grad.nbytes
    later = itertools.accumulate(_changes(ledger, backward), initial=kept)
    return Footprint(kept, max(levels[:-1]), max(later))


def _changes(ledger: StorageCounter, events: list[tuple[int, bool]]) -> list[int]:
    return [ledger.sizes[n] if is_birth else -ledger.sizes[n] for n, is_birth in events]


def tensor(device: str, *shape: int, dtype: torch.dtype = BF16, trained: bool = True) -> Any:
    return torch.ones(*shape, device=device, dtype=dtype).requires_grad_(trained)


def after(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Let gradients flow on into a tensor made before, as inside a model, not into a leaf."""

    def run(x: torch.Tensor, *others: Any) -> torch.Tensor:
        return function(x * 1.0, *others)

    return run


def norm(device: str) -> Any:
    if device == "meta":
        function = lambda x, w: fused._Norm.apply(x, w, True)  # noqa: E731
    else:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        function = lambda x, w: LigerRMSNormFunction.apply(x, w, 1e-5, 0.0, "llama", True)  # noqa: E731
    inputs = (tensor(device, ROWS, WIDTH), tensor(device, WIDTH, trained=False))
    return inputs, after(function)


def gated(device: str) -> Any:
    if device == "meta":
        product = fused._GatedProduct.apply
    else:
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        product = LigerSiLUMulFunction.apply
    inputs = (tensor(device, ROWS, INNER), tensor(device, ROWS, INNER))
    return inputs, lambda gate, up: product(gate * 1.0, up * 1.0)


def rotation(device: str) -> Any:
    if device == "meta":
        rotate = fused._Rotation.apply
    else:
        from liger_kernel.ops.rope import LigerRopeFunction

        rotate = LigerRopeFunction.apply

    def rotated(q: Any, k: Any, cos: Any, sin: Any) -> torch.Tensor:
        first, second = rotate((q * 1.0).transpose(1, 2), (k * 1.0).transpose(1, 2), cos, sin)
        return torch.cat([first, second], dim=1)

    heads = (tensor(device, 1, ROWS, 16, 128), tensor(device, 1, ROWS, 4, 128))
    angles = (tensor(device, 1, ROWS, 128, trained=False) for _ in range(2))
    return (*heads, *angles), rotated


def loss(device: str) -> Any:
    if device == "meta":
        function = lambda x, h, t: fused._FusedLoss.apply(x, h, t, CHUNK)  # noqa: E731
    else:
        from liger_kernel.ops.fused_linear_cross_entropy import (
            LigerFusedLinearCrossEntropyFunction,
        )

        function = lambda x, h, t: LigerFusedLinearCrossEntropyFunction.apply(x, h, t)[0]  # noqa: E731
    labels = torch.zeros(ROWS, device=device, dtype=torch.int64)
    head = tensor(device, VOCABULARY, WIDTH, trained=False)
    return (tensor(device, ROWS, WIDTH), head, labels), after(function)


def real_linear(*, is_nested: bool, kind: str) -> Any:
    """Return a layer quantized as a trial's base is: from weights of the compute type."""
    layer = bnb.nn.Linear4bit(
        WIDTH,
        INNER,
        False,
        BF16,
        compress_statistics=is_nested,
        quant_type=kind,
        device="meta",
    )
    config = TrialConfig(quantization=kind, double_quant=is_nested)
    quantize_random(layer, config=config, device=torch.device("cuda"))
    return layer


def linear(*, is_nested: bool, kind: str, dtype: torch.dtype) -> Make:
    def make(device: str) -> Any:
        if device == "meta":
            layer: Any = stand_ins.Linear4bit(
                WIDTH, INNER, False, BF16, compress_statistics=is_nested, quant_type=kind
            )
        else:
            layer = real_linear(is_nested=is_nested, kind=kind)
        return (tensor(device, ROWS, WIDTH, dtype=dtype),), after(layer)

    return make


def sdpa(device: str) -> Any:
    def attend(q: Any, k: Any, v: Any) -> torch.Tensor:
        heads = [(t * 1.0).transpose(1, 2) for t in (q, k, v)]
        if device == "meta":
            return stand_ins.scaled_dot_product_attention(
                *heads, is_causal=True, enable_gqa=True, padded_length=ROWS, has_flash=True
            )
        return functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)

    sizes = ((1, ROWS, 16, 128), (1, ROWS, 4, 128), (1, ROWS, 4, 128))
    return tuple(tensor(device, *size) for size in sizes), attend


OPERATORS: dict[str, Make] = {
    "norm": norm,
    "gated product": gated,
    "rotation": rotation,
    "fused loss": loss,
    "nf4": linear(is_nested=True, kind="nf4", dtype=BF16),
    "nf4, plain constants": linear(is_nested=False, kind="nf4", dtype=BF16),
    "fp4": linear(is_nested=True, kind="fp4", dtype=BF16),
    "nf4 of an fp32 stream": linear(is_nested=True, kind="nf4", dtype=torch.float32),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_a_stand_in_keeps_and_takes_what_the_kernel_does(name: str) -> None:
    real, paper = on_the_gpu(OPERATORS[name]), on_paper(OPERATORS[name])
    assert paper.kept == pytest.approx(real.kept, abs=CONSTANTS_BYTES), (real, paper)
    assert paper.backward == pytest.approx(real.backward, rel=0.01, abs=MIB), (real, paper)
    # A kernel that needs less on the way is only ever thought to need more.
    assert paper.forward >= real.forward - MIB, (real, paper)


def test_fused_attention_keeps_what_its_stand_in_keeps() -> None:
    real, paper = on_the_gpu(sdpa), on_paper(sdpa)
    # Of a block that is left from before, the allocator does not split up to a MiB off.
    unsplit = MIB + CONSTANTS_BYTES
    assert paper.kept == pytest.approx(real.kept, rel=0.02, abs=unsplit), (real, paper)


@pytest.mark.parametrize("is_nested", [True, False])
def test_a_packed_layer_takes_what_its_stand_in_says(is_nested: bool) -> None:
    paper = stand_ins.Linear4bit(WIDTH, INNER, False, BF16, compress_statistics=is_nested)
    real_linear(is_nested=is_nested, kind="nf4")  # The first one leaves the code's table behind.
    # What earlier tests left in cycles must not be freed in between.
    gc.collect()
    before = torch.cuda.memory_allocated()
    layer = real_linear(is_nested=is_nested, kind="nf4")
    taken = torch.cuda.memory_allocated() - before
    sizes = [paper.weight.nbytes, *paper.constant_bytes()]
    assert taken == sum(-(-size // 512) * 512 for size in sizes)
    assert layer.weight.nbytes == paper.weight.nbytes
