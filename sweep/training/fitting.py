"""8-bit products fitted to a model that has learned something, and looked at layer by layer: those
that are too far off stay in 16 bits.

An exported script carries this file beside it, with `eight_bit`, so that it trains in the products
that `sweep train` would choose. It needs torch and transformers alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from qlora_sweep.sweep.training import eight_bit
from qlora_sweep.sweep.training.eight_bit import changed

MOST_ERROR = 0.04
"""Of a product in 8 bits, relative to that in fp32; FP8's own rounding is 0.026 off. Noise of 0.025
on the products of all layers cost trainings of SmolLM2-135M 0.019 nats a token, noise of 0.05 cost
0.068: about 28 times the square of the error, so that 0.04 everywhere would cost what an NF4 base
does, 0.046. FP8 lost half of that at its own error (docs/lab/eight_bits.md; H200, 2026-11-29)."""
MOST_GRADIENT_ERROR = 0.125
"""Of an input's gradient. Noise of that size on the gradients of all layers cost a training 0.0045
nats a token, noise of 0.25 cost 0.0154 (the same trainings, one seed)."""
MOST_SHARE = 0.25
"""Of the frozen layers' weights that may stay in 16 bits: beyond it little of the gain is left."""
SHOWN_TOKENS = 4096
"""Most that a model is shown, pads included: its first examples, or the beginning of one."""
_SAMPLED_TOKENS = 512
"""Of which each layer's products are compared."""
_SCALED_UP = 2.0**10
"""A loss, so that gradients in fp16 do not vanish; the errors are relative."""
_IGNORED = -100
"""Label of a token without loss."""

Batch = dict[str, Any]


@dataclass(frozen=True)
class LayerErrors:
    """A layer's relative errors, in 8 bits and in 16, against fp32 on the same weight."""

    name: str
    weights: int
    forward: float
    gradient: float
    """Of the input's gradient; 0 below the first adapter, where none is asked for."""
    forward_16_bit: float
    gradient_16_bit: float

    @property
    def is_close(self) -> bool:
        """Whether it may multiply in 8 bits; what is no number is not close."""
        return self.forward <= MOST_ERROR and self.gradient <= MOST_GRADIENT_ERROR


class Kept(Protocol):
    """What stays in 16 bits of a model that multiplies in 8."""

    @property
    def kept_in_16_bits(self) -> Sequence[str]:
        """Names of layers."""

    @property
    def share_in_16_bits(self) -> float:
        """Of the frozen layers' weights."""


@dataclass(frozen=True)
class Fitted:
    """What fitting 8-bit products to a model came to."""

    layers: tuple[LayerErrors, ...]
    weights: int
    """Of all frozen layers that hold 4 or 8 bits."""
    loss_8_bit: float
    """Of what the model was shown, nats a token, with all products in 8 bits."""
    loss_16_bit: float
    """The same with all in 16 bits on the same base."""

    @property
    def _too_far_off(self) -> list[LayerErrors]:
        return [layer for layer in self.layers if not layer.is_close]

    @property
    def kept_in_16_bits(self) -> tuple[str, ...]:
        """Names of the layers that are too far off in 8 bits."""
        return tuple(layer.name for layer in self._too_far_off)

    @property
    def share_in_16_bits(self) -> float:
        """Of the frozen layers' weights."""
        return sum(layer.weights for layer in self._too_far_off) / self.weights


def too_many(found: Kept, compute_dtype: str) -> str | None:
    """Return why so many products stay in 16 bits that 8-bit compute is of no use; None where it
    is."""
    if found.share_in_16_bits <= MOST_SHARE:
        return None
    return (
        f"on these weights {len(found.kept_in_16_bits)} layers, {found.share_in_16_bits:.0%} of "
        f"the weights, are too far off in {compute_dtype} (docs/lab/eight_bits.md): take the "
        "fastest 16-bit configuration, with --set compute_dtype=bf16 (fp16 on a GPU without bf16)"
    )


def first_examples(
    rows: Any, collate: Callable[[list[Any]], Batch], *, tokens: int = SHOWN_TOKENS
) -> Batch:
    """Return the first rows of a dataset as a micro-batch, as many as have so many tokens with
    their pads; one at least.

    Args:
        rows: with a length, whose items the collator takes.
        collate: makes a micro-batch of any number of them.
        tokens: of a micro-batch of the training, which it has the memory for; more than
            `SHOWN_TOKENS` are not taken.
    """
    most = min(tokens, SHOWN_TOKENS)
    examples = [rows[0]]
    batch = collate(examples)
    while len(examples) < len(rows):
        count = min(2 * len(examples), len(rows))
        for index in range(len(examples), count):
            examples.append(rows[index])
        larger = collate(examples)
        if larger["input_ids"].numel() > most:
            break
        batch = larger
    return batch


def fit(
    model: Any, trained: Callable[..., Any], batch: Batch, *, kind: str, rows_per_sample: int = 1
) -> Fitted:
    """Fit 8-bit products to a trained model, and keep those that are too far off in 16 bits; alike
    in all processes that train together.

    What goes into each layer is looked at first (`eight_bit.adapt`). Then one pass in 16 bits
    compares, layer by layer, what 8 bits make of the same inputs and gradients. All of it is in the
    precision that the caller has put in force.

    Args:
        model: with adapters, on its device, in training mode.
        trained: what a step calls: the model, or what makes a loss of it.
        batch: the first examples, on the device; of more than `SHOWN_TOKENS` the beginning.
        kind: ``fp8`` or ``int8``.
        rows_per_sample: 2 where the first half of the rows and the second are pairs.
    """
    shown = beginning(batch, rows_per_sample)

    def run() -> torch.Tensor:
        loss: torch.Tensor = trained(**shown).loss
        return loss

    with without_dropout(model), as_texts(trained), _eager(model):
        with torch.no_grad():
            eight_bit.adapt(model, run)
            narrow_loss = float(run())
        with all_recomputed(model), multiplying_in(model, None):
            errors, wide_loss = _layer_errors(model, kind, run)
    layers = eight_bit.narrow_layers(model)
    weights = sum(layer.in_features * layer.out_features for layer in layers.values())
    found = Fitted(tuple(errors), weights, narrow_loss, wide_loss)
    if dist.is_available() and dist.is_initialized():
        # Sums on two GPUs may differ in their last bit, and a layer be at the bound.
        of_first_rank = [found]
        dist.broadcast_object_list(of_first_rank)
        [found] = of_first_rank
    for name, layer in layers.items():
        layer.products = None if name in found.kept_in_16_bits else kind
    return found


def beginning(batch: Batch, rows_per_sample: int = 1) -> Batch:
    """Return the first samples of a micro-batch that have `SHOWN_TOKENS` tokens at most, or the
    first tokens of one that is longer. Where none of these carries loss, all do."""
    rows, width = batch["input_ids"].shape
    samples = rows // rows_per_sample
    kept_width = min(width, SHOWN_TOKENS // rows_per_sample)
    kept = min(samples, max(1, SHOWN_TOKENS // (rows_per_sample * kept_width)))
    shown = {}
    for key, values in batch.items():
        of_kinds = values.reshape(rows_per_sample, samples, *values.shape[1:])
        part = of_kinds[:, :kept].flatten(0, 1)
        if part.dim() > 1:
            part = part[:, :kept_width]
        shown[key] = part
    if not (shown["labels"][:, 1:] != _IGNORED).any():
        shown["labels"] = shown["input_ids"].clone()
    return shown


def as_texts(trained: Any) -> AbstractContextManager[None]:
    """Let what trains on pairs return the loss of the completions' likelihood: their own vanishes
    where the chosen one is surely preferred."""
    if not hasattr(trained, "is_likelihood"):
        return contextlib.nullcontext()
    return changed([(trained, "is_likelihood", True)])


def multiplying_in(model: torch.nn.Module, products: str | None) -> AbstractContextManager[None]:
    """Let the layers that multiply in 8 bits do otherwise for a while.

    Args:
        model: whose layers; eager, as what is compiled would be compiled again.
        products: None for 16 bits; ``nf4`` for 16 bits with weights rounded to NF4 once more.
    """
    changes = []
    for layer in model.modules():
        if getattr(layer, "products", None) is not None:
            changes.append((layer, "products", products))
    return changed(changes)


def without_dropout(model: torch.nn.Module) -> AbstractContextManager[None]:
    """Drop nothing: two passes would not drop the same."""
    return changed(
        (module, name, 0.0)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, float) and (name == "p" or "dropout" in name)
    )


@contextlib.contextmanager
def all_recomputed(model: Any) -> Iterator[None]:
    """Recompute every layer where the model can, so that a pass needs little memory; then again
    those that it was."""
    changes = []
    recomputing = partial(checkpoint, use_reentrant=False)
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):
            if not hasattr(module, "_gradient_checkpointing_func"):
                module._gradient_checkpointing_func = None
            changes += [
                (module, "gradient_checkpointing", True),
                (module, "_gradient_checkpointing_func", recomputing),
            ]
    if not model.get_base_model().supports_gradient_checkpointing:
        changes.clear()
    with changed(changes):
        yield


def _eager(model: torch.nn.Module) -> AbstractContextManager[None]:
    """Run layers as they are without the compiler, which would take seconds for each new shape."""
    changes = []
    for module in model.modules():
        if module._compiled_call_impl is not None:
            changes.append((module, "_compiled_call_impl", None))
    return changed(changes)


def _layer_errors(
    model: torch.nn.Module, kind: str, run: Callable[[], torch.Tensor]
) -> tuple[list[LayerErrors], float]:
    """Return each layer's errors on what a pass in 16 bits gives it, and the loss of that pass.
    Nothing is kept of the pass."""
    layers = eight_bit.narrow_layers(model)
    forward: dict[str, tuple[float, float]] = {}
    backward: dict[str, tuple[float, float]] = {}

    def watched(name: str) -> Callable[[Any, tuple[torch.Tensor, ...], torch.Tensor], None]:
        def look(layer: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            # A layer that is recomputed comes twice.
            if name not in forward:
                forward[name] = _forward_errors(layer, kind, _sampled(inputs[0]))
            if output.requires_grad:
                output.register_hook(look_back)

        def look_back(gradient: torch.Tensor) -> None:
            backward[name] = _gradient_errors(layers[name], kind, _sampled(gradient))

        return look

    hooks = [layer.register_forward_hook(watched(name)) for name, layer in layers.items()]
    trained = [p for p in model.parameters() if p.requires_grad]
    try:
        loss = run()
        (loss * _SCALED_UP).backward()
    finally:
        for handle in hooks:
            handle.remove()
        for parameter in trained:
            parameter.grad = None
    found = []
    for name, (product, product_16_bit) in forward.items():
        # Below the first adapter nothing is asked for a gradient.
        gradient, gradient_16_bit = backward.get(name, (0.0, 0.0))
        layer = layers[name]
        found.append(
            LayerErrors(
                name=name,
                weights=layer.in_features * layer.out_features,
                forward=product,
                gradient=gradient,
                forward_16_bit=product_16_bit,
                gradient_16_bit=gradient_16_bit,
            )
        )
    return found, float(loss.detach())


def _sampled(values: torch.Tensor) -> torch.Tensor:
    """Return tokens (`_SAMPLED_TOKENS`, features) of many, evenly spread, the first among them."""
    rows = values.detach().reshape(-1, values.shape[-1])
    step = max(1, len(rows) // _SAMPLED_TOKENS)
    return rows[::step][:_SAMPLED_TOKENS]


def _forward_errors(layer: Any, kind: str, x: torch.Tensor) -> tuple[float, float]:
    """Return how far a layer's product of inputs (tokens, in) is off, in 8 bits and in 16."""
    with torch.no_grad(), changed([(layer, "products", kind)]):
        narrow = layer.forward(x)
    with torch.no_grad(), changed([(layer, "products", None)]):
        wide = layer.forward(x)
    # The pass that is looked at is under autocast, which would multiply these in 16 bits.
    with torch.autocast(x.device.type, enabled=False):
        exact = x.float() @ layer.dequantized().float().t()
    if layer.bias is not None:
        exact += layer.bias.float()
    return _off(narrow, exact), _off(wide, exact)


def _gradient_errors(layer: Any, kind: str, gradient: torch.Tensor) -> tuple[float, float]:
    """Return how far the input's gradient is off for gradients (tokens, out), in 8 bits and in
    16."""
    with torch.autocast(gradient.device.type, enabled=False):
        exact = gradient.float() @ layer.dequantized().float()
    # No input has a part in it.
    x = torch.zeros_like(exact, dtype=layer.compute_dtype, requires_grad=True)
    errors = []
    for products in (kind, None):
        with changed([(layer, "products", products)]), torch.enable_grad():
            output = layer.forward(x)
            [of_input] = torch.autograd.grad(output, x, gradient.to(output.dtype))
        errors.append(_off(of_input, exact))
    narrow, wide = errors
    return narrow, wide


def _off(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Return a relative error; 0 where there is nothing to be off from."""
    size = float(torch.linalg.vector_norm(exact))
    off = float(torch.linalg.vector_norm(found.float() - exact))
    return off / size if size else 0.0
