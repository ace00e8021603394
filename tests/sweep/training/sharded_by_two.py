"""One of two processes that shard, first a 4-bit layer, then models: prints what came of it.

Of the layer: how many of its packed weights are no numbers, whether each is as it was when whole,
and whether it computes as it did. Packed weights hold every pattern of bits: any that FSDP changed
would show. Of models whose loss reads the head's weight and never calls it, as Liger's does, for
untied and for tied weights: whether the loss of every step is as when it was whole, and what share
of the head is held between steps.

Run as ``python -m tests.sweep.training.sharded_by_two RANK FILE DEVICE``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import MethodType
from typing import Any

import bitsandbytes as bnb
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch.distributed.fsdp import fully_shard
from transformers import MistralConfig, MistralForCausalLM
from transformers.modeling_outputs import CausalLMOutput

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.sweep.training.adapters import local
from qlora_sweep.sweep.training.model import quantize_random
from qlora_sweep.sweep.training.process_group import (
    AS_STORED,
    fsdp_plugin,
    shard_on_cpu,
    share_head,
)
from tests.sweep.training.two_processes import tell_as_one_of_two

STEPS = 3
SHARDED = TrialConfig(
    data_parallel=2, sharding="fsdp", upcast_fp32=False, optimizer="adamw_torch_fused"
)
FEATURES = 1024


class Layer(torch.nn.Module):
    """A 4-bit layer beside an adapter in fp32, as every layer of a model has one."""

    def __init__(self, base: bnb.nn.Linear4bit) -> None:
        super().__init__()
        self.base, self.adapter = base, torch.nn.Linear(FEATURES, 8)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.base(rows)


def bits(device: torch.device) -> tuple[int, bool, bool]:
    """Return how many weights are no numbers, and whether bits and results stayed as they were."""
    torch.manual_seed(0)
    layer = bnb.nn.Linear4bit(
        FEATURES, FEATURES, bias=False, compute_dtype=torch.bfloat16, quant_storage=torch.bfloat16
    )
    quantize_random(layer, config=SHARDED, device=device)
    whole_layer = Layer(layer).to(device)
    rows = torch.randn(4, FEATURES, device=device, dtype=torch.bfloat16)
    whole = layer.weight.detach().clone().view(torch.int16)
    no_numbers = int(torch.isnan(layer.weight.detach().float()).sum())
    before = layer(rows)
    fully_shard(whole_layer, mp_policy=AS_STORED, reshard_after_forward=False)
    after = whole_layer(rows)
    gathered = layer.weight.detach().view(torch.int16)
    return no_numbers, bool((gathered == whole).all()), bool((before == after).all())


class FusedLoss(torch.autograd.Function):
    """Works out the gradient with the loss, and keeps no weight for later."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        with torch.enable_grad():
            own = hidden.detach().requires_grad_()
            logits = torch.nn.functional.linear(own, weight.detach())
            loss = torch.nn.functional.cross_entropy(logits, labels)
            (gradient,) = torch.autograd.grad(loss, own)
        ctx.save_for_backward(gradient)
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradients[0] * ctx.saved_tensors[0], None, None


def read_head(self: Any, ids: torch.Tensor) -> CausalLMOutput:
    """Return the loss, from the head's weight alone."""
    hidden = self.model(ids).last_hidden_state[:, :-1].flatten(0, 1)
    loss: Any = FusedLoss.apply(hidden, self.lm_head.weight, ids[:, 1:].flatten())
    return CausalLMOutput(loss=loss)


def small_model(*, is_tied: bool, device: torch.device) -> MistralForCausalLM:
    torch.manual_seed(0)
    config = MistralConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        tie_word_embeddings=is_tied,
    )
    model = MistralForCausalLM(config).to(device)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "q_proj" in name
    model.forward = MethodType(read_head, model)  # type: ignore[method-assign]
    return model


def losses(
    model: Any, ids: torch.Tensor, prepare: Callable[..., Any] = lambda *given: given
) -> list[float]:
    """Return the loss of each step; both processes see the same rows."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model, optimizer = prepare(model, torch.optim.SGD(trained, lr=0.5))
    found = []
    for _ in range(STEPS):
        loss = model(ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


def sharding_as_a_training(layers: Iterable[torch.nn.Module], device: torch.device) -> Accelerator:
    """Return an accelerator that shards what is not sharded yet."""
    AcceleratorState._reset_state(reset_partial_state=True)
    plugin = fsdp_plugin(layers)
    accelerator = Accelerator(cpu=device.type == "cpu", fsdp_plugin=plugin)
    if device.type == "cpu":
        shard_on_cpu(accelerator, plugin)
    return accelerator


def shares(device: torch.device, *, is_tied: bool) -> tuple[bool, float]:
    """Return whether losses are as without sharding, and the share of the head that is held."""
    ids = torch.arange(32, device=device).reshape(2, 16)
    expected = losses(small_model(is_tied=is_tied, device=device), ids)
    model = small_model(is_tied=is_tied, device=device)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=AS_STORED)
    share_head(model, model)
    accelerator = sharding_as_a_training(model.model.layers, device)
    found = losses(model, ids, accelerator.prepare)
    is_same = torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=1e-4)
    weight = model.lm_head.weight
    return is_same, local(weight).numel() / weight.numel()


def words(device: torch.device, _: Path) -> Iterator[Any]:
    yield from bits(device)
    for is_tied in (False, True):
        yield from shares(device, is_tied=is_tied)


if __name__ == "__main__":
    tell_as_one_of_two(words)
