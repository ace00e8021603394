"""Experts whose weights lie on the host: what they compute is what it was, and where they are."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.kinds import HOST_SLOTS
from qlora_sweep.storage.records import Ineffective, Measured
from qlora_sweep.sweep.training import host_memory, offload
from qlora_sweep.sweep.training.adapters import with_adapters
from qlora_sweep.sweep.training.experts import (
    _Quantizer,
    dequantized,
    expert_modules,
    packed_experts,
    weight_names,
)
from qlora_sweep.sweep.training.host_memory import SLOTS
from qlora_sweep.sweep.training.model import Unavailable, skeleton
from qlora_sweep.sweep.training.offload import WeightsOnHost
from tests import families
from tests.sweep.training.tiny import BRIEF, outcome_of, tiny_base, tiny_loop, trial_on

pytestmark = pytest.mark.filterwarnings("default")
KINDS = ("qwen3_moe", "gpt_oss", "deepseek_v3", "nemotron_h")
CPU = torch.device("cpu")


def asked(kind: str, **settings: Any) -> TrialConfig:
    return families.config_of(kind, "attention", "nf4").changed(**settings)


def losses_and_gradients(config: TrialConfig, kind: str) -> tuple[list[float], list[torch.Tensor]]:
    """Return the losses of some steps, and the last one's gradients."""
    gradients: list[torch.Tensor] = []
    with tiny_loop(config, spec=families.spec_of(kind)) as loop:

        def keep() -> None:
            gradients[:] = [p.grad.clone() for p in loop.attached.trainable_parameters()]

        losses = [float(loop.step(on_gradients=keep)) for _ in range(3)]
    return losses, gradients


@pytest.mark.parametrize("checkpoint_fraction", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_they_train_as_if_they_were_on_the_device(kind: str, checkpoint_fraction: float) -> None:
    usual = asked(kind, checkpoint_fraction=checkpoint_fraction)
    losses, gradients = losses_and_gradients(usual, kind)
    for share in (0.5, 1.0):
        found = losses_and_gradients(usual.changed(offload_fraction=share), kind)
        assert found[0] == losses
        for one, other in zip(found[1], gradients, strict=True):
            assert one.equal(other)


def test_compiled_layers_fetch_too() -> None:
    config = asked("qwen3_moe", offload_fraction=0.5)
    with tiny_loop(config, spec=families.spec_of("qwen3_moe")) as loop:
        loss = float(loop.step())
    with tiny_loop(config, spec=families.spec_of("qwen3_moe")) as loop:
        for layer in loop.attached.layers:
            layer.compile(backend="aot_eager", fullgraph=True)
        assert float(loop.step()) == pytest.approx(loss, rel=1e-5)


def test_a_layer_comes_once_in_each_pass_but_those_at_its_ends() -> None:
    config = asked("qwen3_moe", offload_fraction=1.0, checkpoint_fraction=1.0)
    with tiny_loop(config, spec=families.spec_of("qwen3_moe")) as loop:
        loop.step()
        host = loop.attached.offloaded
        assert host is not None
        layers = len(host)
        assert layers > SLOTS
        host.copies = 0
        loop.step()
        assert host.copies == 2 * (layers - SLOTS)


def test_a_trial_proves_it_and_a_base_serves_others_after_it() -> None:
    config = asked("gpt_oss", offload_fraction=0.5)
    with tiny_base(config, spec=families.spec_of("gpt_oss")) as base:
        for _ in range(2):
            outcome = trial_on(base, config, steps=BRIEF).run()
            assert isinstance(outcome, Measured), outcome
        contradicted = trial_on(base, config.changed(offload_fraction=1.0), steps=BRIEF).run()
    assert isinstance(contradicted, Ineffective)
    assert contradicted.setting == "offload_fraction"


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_a_checkpoint_is_read_onto_the_host(tmp_path: Path, share: float) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    spec = families.spec_of("qwen3_moe")
    source = AutoModelForCausalLM.from_config(AutoConfig.for_model(**spec.config))
    source.save_pretrained(tmp_path)
    saved = dataclasses.replace(spec, source="directory", path=tmp_path)
    found: list[list[torch.Tensor]] = []
    for config in (asked("qwen3_moe"), asked("qwen3_moe", offload_fraction=share)):
        with tiny_base(config, spec=saved, weights="pretrained") as base:
            weights = []
            for _, experts in expert_modules(base.model):
                weights += [dequantized(experts, name).clone() for name in weight_names(experts)]
            found.append(weights)
            held = 0 if base.offloaded is None else len(base.offloaded)
    assert held == round(share * 4)
    for one, other in zip(*found, strict=True):
        assert one.equal(other)


def test_they_stay_where_the_whole_model_is_moved() -> None:
    config = asked("qwen3_moe", offload_fraction=0.5)
    with tiny_base(config, spec=families.spec_of("qwen3_moe")) as base:
        for _, experts in expert_modules(base.model):
            if not experts.is_on_host:
                continue
            experts.to("meta")
            for name in weight_names(experts):
                weight: Any = getattr(experts, name)
                assert weight.device == CPU
                assert weight.quant_state.absmax.device == CPU


def test_adapters_on_them_are_where_they_multiply() -> None:
    config = asked("qwen3_moe", offload_fraction=1.0)
    config = config.changed(target_modules=("q_proj", "gate_up_proj", "down_proj"), lora_rank=4)
    device = torch.device("meta")
    with tiny_base(config, spec=families.spec_of("qwen3_moe")) as base:
        for experts in packed_experts(base.model):
            for name in weight_names(experts):
                # As on a GPU: what is small is on the device.
                getattr(experts, name).quant_state.to(device)
        model = with_adapters(base, config)
        of_experts = [p for n, p in model.named_parameters() if "lora_" in n and ".experts." in n]
        assert {parameter.device for parameter in of_experts} == {device}


@pytest.mark.parametrize(("share", "size"), [(0.0, 0.5), (1.0, 0.0)])
def test_a_checkpoints_experts_take_nothing_of_the_device_at_first(
    share: float, size: float
) -> None:
    """transformers takes as much at once as it is told of."""
    config = asked("qwen3_moe", offload_fraction=share)
    model = skeleton(config, spec=families.spec_of("qwen3_moe"))
    quantizer: Any = _Quantizer(model.config.quantization_config)
    weights = [name for name, _ in model.named_parameters() if name.endswith("experts.down_proj")]
    for name in weights:
        assert quantizer.param_element_size(model, name, model.get_parameter(name)) == size
    assert weights


def test_a_host_that_has_too_little_left_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 2**30 + 100)
    host = WeightsOnHost(CPU)
    with pytest.raises(host_memory.HostMemoryError, match=r"1\.00 GiB are left"):
        host.add([torch.zeros(1000)])


def test_whatever_is_asked_for_is_there() -> None:
    parts = [[torch.full((97,), layer), torch.rand(5)] for layer in range(6)]
    host = WeightsOnHost(CPU)
    placed = [host.add(layer) for layer in parts]
    host.open()
    draws = random.Random(0)
    for _ in range(500):
        layer = draws.randrange(6)
        there = host.fetched(layer)
        start = 0
        for part in placed[layer]:
            assert there[start : start + part.nbytes].view(part.dtype).equal(part)
            start += host_memory.aligned(part.nbytes)
    assert host.bytes == sum(map(_bytes, parts))


def _bytes(parts: Sequence[torch.Tensor]) -> int:
    return sum(host_memory.aligned(part.nbytes) for part in parts)


def test_nothing_is_left_of_a_base_that_was_closed() -> None:
    before = dict(offload._PLACES)
    with tiny_base(asked("qwen3_moe", offload_fraction=1.0), spec=families.spec_of("qwen3_moe")):
        assert len(offload._PLACES) > len(before)
    assert before == offload._PLACES


def test_a_host_with_too_little_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(size: int, device: torch.device, *, what: str) -> torch.Tensor:
        raise host_memory.HostMemoryError(f"no {size} bytes of {what} on {device}")

    before = dict(offload._PLACES)
    monkeypatch.setattr(offload, "pinned", refuse)
    with pytest.raises(Unavailable, match=r"no .* bytes") as caught:
        outcome_of(asked("qwen3_moe", offload_fraction=1.0), spec=families.spec_of("qwen3_moe"))
    assert caught.value.setting == "offload_fraction"
    assert before == offload._PLACES


def test_those_who_predict_count_the_same_slots() -> None:
    assert SLOTS == HOST_SLOTS
