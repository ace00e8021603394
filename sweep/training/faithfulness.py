"""How close a step in 8 bits comes to the same in 16: on the examples and adapters of a trial, and
layer by layer on a model's real weights, where products that are too far off stay in 16 bits.
"""

from __future__ import annotations

import contextlib
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from search_spaces.config import TrialConfig
from search_spaces.errors import in_percent
from storage.records import EightBitProducts, Faithfulness, ProductErrors
from sweep.data.batches import Batch, in_parts, loss_tokens
from sweep.training import eight_bit
from sweep.training.adapters import Attached, changed, eager, recomputed
from sweep.training.preference import Preference

if TYPE_CHECKING:
    from sweep.training.step import TrainingLoop

MICRO_BATCHES = 2
"""On which a step in 8 bits is compared at most."""
COMPARED_TOKENS = 4096
"""So many are enough: by 5,120 tokens a gradient was 46.8 and 47.1 % off, by 10,240 it was 46.0 %
(NF4 in INT8 on an H100, 2026-11-26), where 129 % are accepted."""
LOSS_RESOLUTION = torch.finfo(torch.bfloat16).eps
"""A relative difference of the loss that bf16 itself would not show."""
MOST_ERROR = 0.05
"""Of a product in 8 bits, relative to that in fp32; FP8's own rounding is 0.026 off. On
SmolLM2-135M a layer with error e cost some 0.1 e² nats a token (INT8 without `eight_bit.adapt`: 56
of 210 layers with errors of 0.025 to 0.03 cost 0.0054; one H200, 2026-11-28), so that one layer at
this bound costs 0.00025, a twentieth of the 0.005 that 8-bit compute may cost."""
MOST_GRADIENT_ERROR = 0.25
"""Of an input's gradient: its rounding is independent from token to token, and a step takes the
mean of thousands. A guard against what is broken: no training has shown where it begins to cost."""
MOST_SHARE = 0.25
"""Of the frozen layers' weights that may stay in 16 bits: beyond it little of the gain is left."""
_SAMPLED_TOKENS = 512
"""Of which each layer's products are compared."""
_SCALED_UP = 2.0**10
"""A loss, so that gradients in fp16 do not vanish; the errors are relative."""


@dataclass(frozen=True)
class _LayerErrors:
    """A layer's relative errors, in 8 bits and in 16, against fp32 on the same weight."""

    name: str
    forward: float
    gradient: float
    forward_16_bit: float
    gradient_16_bit: float

    @property
    def is_close(self) -> bool:
        """Whether it may multiply in 8 bits; what is no number is not close."""
        return self.forward <= MOST_ERROR and self.gradient <= MOST_GRADIENT_ERROR


def fit_to(
    attached: Attached, trained: torch.nn.Module, batch: Batch, config: TrialConfig
) -> EightBitProducts:
    """Fit 8-bit products to a trained model, and keep those that are too far off in 16 bits.

    What goes into each layer is looked at first (`eight_bit.adapt`). Then one pass in 16 bits
    compares, layer by layer, what 8 bits make of the same inputs and gradients. All of it is in the
    precision that the caller has put in force.

    Args:
        attached: base with adapters, on its device.
        trained: what a step calls.
        batch: the first micro-batch, on the device.
        config: how it trains.
    """
    model, layers, kind = attached.model, attached.layers, config.compute_dtype
    parts = in_parts(
        batch, -(-batch["input_ids"].numel() // COMPARED_TOKENS), config.rows_per_sample
    )
    shown = next(part for part in parts if loss_tokens(part))

    def run() -> torch.Tensor:
        loss: torch.Tensor = trained(**shown).loss
        return loss

    with _without_dropout(model), _as_texts(trained), eager(layers):
        with torch.no_grad():
            eight_bit.adapt(model, run)
            narrow_loss = float(run())
        with _all_recomputed(model, layers), multiplying_in(model, None):
            errors, wide_loss = _layer_errors(model, kind, run)
    kept = [found.name for found in errors if not found.is_close]
    keep_in_16_bits(model, kept, kind=kind)
    return EightBitProducts(
        errors=tuple(_by_projection(errors)),
        most_error=MOST_ERROR,
        most_gradient_error=MOST_GRADIENT_ERROR,
        kept_in_16_bits=tuple(kept),
        share_in_16_bits=_share(model, kept),
        loss_8_bit=narrow_loss,
        loss_16_bit=wide_loss,
    )


def _as_texts(trained: Any) -> AbstractContextManager[None]:
    """Let what trains on pairs return the loss of the completions' likelihood: their own vanishes
    where the chosen one is surely preferred."""
    if not isinstance(trained, Preference):
        return nullcontext()
    return changed([(trained, "is_likelihood", True)])


def keep_in_16_bits(model: torch.nn.Module, names: Sequence[str], *, kind: str) -> None:
    """Let the layers of some names multiply in 16 bits, and all others in 8."""
    for name, layer in _narrow_layers(model).items():
        layer.products = None if name in names else kind


def too_many(found: EightBitProducts, compute_dtype: str) -> str | None:
    """Return why so many products stay in 16 bits that 8-bit compute is of no use; None where it
    is."""
    if found.share_in_16_bits <= MOST_SHARE:
        return None
    return (
        f"on these weights {len(found.kept_in_16_bits)} layers, "
        f"{in_percent(found.share_in_16_bits)} of the weights, are too far off in {compute_dtype} "
        "(docs/eight_bits.md): take the fastest 16-bit configuration, with --set "
        "compute_dtype=bf16 (fp16 on a GPU without bf16)"
    )


def _narrow_layers(model: torch.nn.Module) -> dict[str, Any]:
    """Return the layers that hold what 8-bit products need, by name."""
    return {name: m for name, m in model.named_modules() if hasattr(m, "row_scales")}


def _share(model: torch.nn.Module, names: Sequence[str]) -> float:
    layers = _narrow_layers(model)
    weights = {name: m.in_features * m.out_features for name, m in layers.items()}
    return sum(weights[name] for name in names) / sum(weights.values())


def _by_projection(errors: Sequence[_LayerErrors]) -> Iterator[ProductErrors]:
    """Yield the errors of the layers of one name together, such as all ``down_proj``."""
    together = defaultdict[str, list[_LayerErrors]](list)
    for found in errors:
        projection = found.name.removesuffix(".base_layer").rpartition(".")[2]
        together[projection].append(found)
    for projection, of_layers in together.items():
        forward = [found.forward for found in of_layers]
        gradient = [found.gradient for found in of_layers]
        yield ProductErrors(
            projection=projection,
            layers=len(of_layers),
            forward=statistics.median(forward),
            forward_worst=max(forward),
            forward_16_bit=statistics.median(found.forward_16_bit for found in of_layers),
            gradient=statistics.median(gradient),
            gradient_worst=max(gradient),
            gradient_16_bit=statistics.median(found.gradient_16_bit for found in of_layers),
        )


def _layer_errors(
    model: torch.nn.Module, kind: str, run: Callable[[], torch.Tensor]
) -> tuple[list[_LayerErrors], float]:
    """Return each layer's errors on what a pass in 16 bits gives it, and the loss of that pass.
    Nothing is kept of the pass."""
    layers = _narrow_layers(model)
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
        found.append(_LayerErrors(name, product, gradient, product_16_bit, gradient_16_bit))
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


@contextlib.contextmanager
def _all_recomputed(model: Any, layers: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Recompute every layer where the model can, so that a pass needs little memory."""
    base = model.get_base_model()
    if not base.supports_gradient_checkpointing:
        yield
        return
    with recomputed(base, layers, range(len(layers))):
        yield


def compared(loop: TrainingLoop) -> Faithfulness:
    """Return how loss and gradients of a few micro-batches differ from those in 16 bits.

    The step in 8 bits is the one that trains, compiled or not, but for dropout. Those in 16 bits
    are eager and recompute every layer, to need less memory than that; where it recomputes as well,
    in parts of a micro-batch. Of pairs the completions' likelihood is compared: their own loss and
    its gradients vanish where the chosen one is surely preferred.
    """
    attached = loop.attached
    model = attached.model
    layers = attached.layers
    whole = [loop.next_batch()]
    while len(whole) < MICRO_BATCHES and sum(map(loss_tokens, whole)) < COMPARED_TOKENS:
        whole.append(loop.next_batch())
    count, rows = 4 if attached.checkpointed else 1, loop.rows_per_sample
    parts = [part for batch in whole for part in in_parts(batch, count, rows)]
    with _without_dropout(model), _as_texts(loop.trained):
        narrow_loss, narrow = _gradients(loop, whole)
        with eager(layers), _all_recomputed(model, layers):
            with multiplying_in(model, None):
                wide_loss, wide = _gradients(loop, parts)
            with multiplying_in(model, "nf4"):
                coarse_loss, coarse = _gradients(loop, parts)
    length, narrow_off, coarse_off = _dot(wide, wide), narrow - wide, coarse - wide
    return Faithfulness(
        loss_error=abs(narrow_loss - wide_loss) / abs(wide_loss),
        gradient_error=(_dot(narrow_off, narrow_off) / length) ** 0.5,
        gradient_cosine=_dot(narrow, wide) / (_dot(narrow, narrow) * length) ** 0.5,
        accepted_gradient_error=(_dot(coarse_off, coarse_off) / length) ** 0.5,
        accepted_loss_error=abs(coarse_loss - wide_loss) / abs(wide_loss),
    )


def unfaithful(found: Faithfulness) -> str | None:
    """Return why a step in 8 bits does not stand for one in 16; None where it does.

    What everybody accepts of a 4-bit base is the bound: what rounding the weights to NF4 does.
    """
    bounds = (
        ("the loss is", found.loss_error, max(found.accepted_loss_error, LOSS_RESOLUTION)),
        ("gradients are", found.gradient_error, found.accepted_gradient_error),
    )
    for what, error, bound in bounds:
        if not error <= bound:
            return (
                f"{what} {in_percent(error)} off 16-bit compute of the same base, and rounding the "
                f"weights to NF4 would be {in_percent(bound)}"
            )
    return None


def _gradients(loop: TrainingLoop, batches: Sequence[Batch]) -> tuple[float, torch.Tensor]:
    """Return the loss of micro-batches together, as a mean over supervised tokens, and the gradient
    of all adapters in one row on the host."""
    counts = list(map(loss_tokens, batches))
    loop.optimizer.zero_grad()
    # The mean over no tokens is no number.
    loss = sum(
        loop.add_gradients(batch, weight=count / sum(counts))
        for batch, count in zip(batches, counts, strict=True)
        if count
    )
    trained = loop.attached.trainable_parameters()
    gradients = [p.grad.float().cpu().flatten() for p in trained if p.grad is not None]
    loop.optimizer.zero_grad()
    return loss, torch.cat(gradients)


def _dot(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(torch.sum(one * other, dtype=torch.float64))


def multiplying_in(model: torch.nn.Module, products: str | None) -> AbstractContextManager[None]:
    """Let the layers that multiply in 8 bits do otherwise for a while.

    Args:
        model: whose layers; eager, as what is compiled would be compiled again.
        products: None for 16 bits; ``nf4`` for 16 bits with weights rounded to NF4 once more.
    """
    layers = (m for m in model.modules() if getattr(m, "products", None) is not None)
    return changed((layer, "products", products) for layer in layers)


def _without_dropout(model: torch.nn.Module) -> AbstractContextManager[None]:
    """Drop nothing: two passes would not drop the same."""
    return changed(
        (module, name, 0.0)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, float) and (name == "p" or "dropout" in name)
    )
