"""The proof that a setting took effect: what ran is held against what was asked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from search_spaces.config import KNOBS, TrialConfig
from storage.records import Ineffective
from sweep.running.wire import RunCommand, TrialRequest, WorkerMessage, WorkerSettings
from sweep.running.worker import Worker
from sweep.training.adapters import CountingCompiler, attached, compiled
from sweep.training.device import Memory
from sweep.training.model import Unavailable, build_base
from sweep.training.proof import (
    PROOFS,
    KernelWatch,
    StepEvidence,
    expandable_share,
    ineffective,
)
from sweep.training.step import TrainingLoop
from sweep.training.team import Look, fingerprint
from tests.sweep.training.tiny import LAYERS, QUICK, TINY, tiny_base, tiny_config

FREEZE = "freeze v_proj"
"""Not a setting: the adapters of one target are left out of the training."""


def verdicts(
    ran: dict[str, Any], asked: dict[str, Any]
) -> tuple[Ineffective | None, Ineffective | None]:
    """Return what the proof says to a configuration that was not run, and to the one that was."""
    config, wanted = tiny_config(**ran), tiny_config(**asked)
    with tiny_base(config) as base, attached(base, config) as attachment:
        loop = TrainingLoop(attachment, config, seed=0)
        with KernelWatch() as watch:
            loop.step()
        return (
            ineffective(wanted, StepEvidence(loop, watch)),
            ineffective(config, StepEvidence(loop, watch)),
        )


@pytest.mark.parametrize(
    ("ran", "asked", "knob"),
    [
        ({}, {"attention": "eager"}, "attention"),
        ({}, {"attention": "flash_attention_2"}, "attention"),
        ({"attention": "eager"}, {}, "attention"),
        ({"attention": "eager"}, {"attention": "flash_attention_2"}, "attention"),
        ({"compute_dtype": "fp32"}, {}, "compute_dtype"),
        ({}, {"compute_dtype": "fp16"}, "compute_dtype"),
        ({}, {"upcast_fp32": False}, "upcast_fp32"),
        ({"upcast_fp32": False}, {}, "upcast_fp32"),
        ({}, {"lora_dropout": 0.1}, "lora_dropout"),
        ({"lora_dropout": 0.1}, {}, "lora_dropout"),
        ({}, {"lora_rank": 8, "lora_alpha": 16}, "lora_rank"),
        ({}, {"lora_alpha": 8}, "lora_alpha"),
        ({}, {"checkpoint_fraction": 0.5}, "checkpoint_fraction"),
        ({}, {"micro_batch_size": 1}, "micro_batch_size"),
        ({}, {"seq_len": 8}, "seq_len"),
        ({}, {"effective_batch_size": 8}, "effective_batch_size"),
        ({}, {"learning_rate": 1e-3}, "learning_rate"),
        ({}, {"packing": "packed"}, "packing"),
        ({}, {"adapter_dtype": "bf16"}, "adapter_dtype"),
        ({"adapter_dtype": "bf16"}, {}, "adapter_dtype"),
        ({}, {"expandable_segments": True}, "expandable_segments"),
        ({}, {"quantized_fraction": 0.5}, "quantized_fraction"),
        ({"quantized_fraction": 0.5}, {}, "quantized_fraction"),
        ({"quantized_fraction": 0.5}, {"quantized_fraction": 0.75}, "quantized_fraction"),
    ],
)
def test_each_knob_is_found_out_where_another_value_ran(
    ran: dict[str, Any], asked: dict[str, Any], knob: str
) -> None:
    fault, honest = verdicts(ran, asked)
    assert isinstance(fault, Ineffective)
    assert fault.knob == knob
    assert honest is None


def test_every_knob_has_its_proof_and_nothing_else_has() -> None:
    assert PROOFS.keys() == KNOBS.keys()


def test_segments_are_told_by_where_the_weights_lie() -> None:
    first, second = torch.zeros(3, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)

    def around(tensor: torch.Tensor, *, is_expandable: bool) -> dict[str, Any]:
        return {
            "address": tensor.data_ptr(),
            "total_size": tensor.nbytes,
            "is_expandable": is_expandable,
        }

    mixed = [around(first, is_expandable=True), around(second, is_expandable=False)]
    assert expandable_share([first, second], mixed) == 0.75
    assert expandable_share([second], mixed) == 0.0
    assert expandable_share([], mixed) == 0.0


@pytest.mark.usefixtures("dynamo")
def test_layers_that_were_compiled_in_an_earlier_trial_prove_themselves_again() -> None:
    plain = tiny_config(optimizer="adamw_torch_fused", checkpoint_fraction=0.0)
    config = plain.model_copy(update={"compile": True})
    compiler = CountingCompiler(lambda graph, _: graph.forward)
    with tiny_base(plain) as base:
        for _ in range(2):
            with attached(base, plain) as attachment:
                with compiled(attachment.layers, compiler=compiler) as attachment.compilation:
                    loop = TrainingLoop(attachment, config, seed=0)
                    loop.step()
                    assert ineffective(config, StepEvidence(loop)) is None
                    fault = ineffective(plain, StepEvidence(loop))
                assert fault == Ineffective(knob="compile", detail="layers are compiled")
                loop.step()
                fault = ineffective(config, StepEvidence(loop))
                assert fault == Ineffective(
                    knob="compile", detail=f"{LAYERS} of {2 * LAYERS} calls of layers were compiled"
                )


def test_a_target_whose_adapters_never_moved_is_found_out() -> None:
    config = tiny_config(target_modules="qv")
    with tiny_base(config) as base, attached(base, config) as attachment:
        for name, parameter in attachment.model.named_parameters():
            if "v_proj.lora" in name:
                parameter.requires_grad_(False)
        loop = TrainingLoop(attachment, config, seed=0)
        loop.step()
        fault = ineffective(config, StepEvidence(loop))
    assert fault == Ineffective(knob="target_modules", detail="no adapter of v_proj learned")


@pytest.mark.parametrize("dropout", [0.0, 0.1, 1.0])
def test_every_dropout_that_can_be_asked_for_proves_itself(dropout: float) -> None:
    _, honest = verdicts({"lora_dropout": dropout}, {})
    assert honest is None


def test_dropout_that_is_configured_and_never_called_is_found_out() -> None:
    config = tiny_config(lora_dropout=0.1)
    with tiny_base(config) as base, attached(base, config) as attachment:
        loop = TrainingLoop(attachment, config, seed=0)
        with KernelWatch() as watch:
            loop.step()
        watch.dropouts = 0
        fault = ineffective(config, StepEvidence(loop, watch))
    assert fault == Ineffective(knob="lora_dropout", detail="nothing was dropped")


@pytest.fixture
def flash_attn_operator() -> Iterator[Any]:
    """An operator with the name that flash-attn gives its own."""
    library = torch.library.Library("flash_attn", "DEF")
    library.define("_flash_attn_forward(Tensor q) -> Tensor")
    library.impl("_flash_attn_forward", torch.clone, "CPU")
    yield torch.ops.flash_attn._flash_attn_forward
    library._destroy()


def test_flash_attention_is_proved_by_flash_attns_own_operator(flash_attn_operator: Any) -> None:
    config = tiny_config()
    with tiny_base(config) as base, attached(base, config) as attachment:
        loop = TrainingLoop(attachment, config, seed=0)
        loop.step()
        with KernelWatch() as watch:
            flash_attn_operator(torch.zeros(1, dtype=torch.bfloat16))
            torch.zeros(2, 2, dtype=torch.bfloat16) @ torch.zeros(2, 2, dtype=torch.bfloat16)
        asked = tiny_config(attention="flash_attention_2")
        assert ineffective(asked, StepEvidence(loop, watch)) is None
        eager = ineffective(tiny_config(attention="eager"), StepEvidence(loop, watch))
    assert isinstance(eager, Ineffective)
    assert "flash_attn::_flash_attn_forward" in eager.detail


@pytest.mark.parametrize(
    ("knobs", "knob"),
    [({"attention": "flash_attention_2"}, "attention"), ({"kernels": "liger"}, "kernels")],
)
def test_a_value_whose_package_is_missing_is_ineffective_and_harms_no_other_trial(
    knobs: dict[str, Any], knob: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("flash_attn", "liger_kernel"):
        monkeypatch.setitem(__import__("sys").modules, package, None)
    config = tiny_config(**knobs)
    with pytest.raises(Unavailable):
        _build(config)
    events: list[WorkerMessage] = []
    settings = WorkerSettings(
        device="cpu",
        budget_bytes=2**40,
        model=TINY.to_json(),
        weights="random",
        seed=0,
        is_emulated=False,
    )
    worker = Worker(settings, send=events.append)
    finished = worker.run(RunCommand(request=TrialRequest(config=config, steps=QUICK)))
    assert isinstance(finished.outcome, Ineffective)
    assert finished.outcome.knob == knob
    assert finished.outcome.detail
    assert finished.retire is None


def _build(config: TrialConfig) -> None:
    build_base(config, spec=TINY, weights="random", device=torch.device("cpu"), seed=0).close()


def a_look(**changes: Any) -> Look:
    values: dict[str, Any] = {
        "rank": 1,
        "size": 1,
        "adapters": "same",
        "tokens": "other rows",
        "held_share": 1.0,
        "memory": Memory(1, "backward"),
    }
    return Look(**{**values, **changes})


@pytest.mark.parametrize(
    ("looks", "words"),
    [
        ([], "1 of 2 GPUs trained"),
        ([a_look(rank=0), a_look()], "a GPU trained with 0 others"),
        ([a_look(rank=0), a_look(), a_look(rank=2)], "3 of 2 GPUs trained"),
    ],
)
def test_a_card_that_did_not_train_with_the_others_is_no_team(
    looks: list[Look], words: str
) -> None:
    config = tiny_config(data_parallel=2)
    with tiny_base(config) as base, attached(base, config) as attachment:
        loop = TrainingLoop(attachment, config, seed=0)
        loop.step()
        fault = ineffective(config, StepEvidence(loop, looks=looks))
    assert fault is not None
    assert (fault.knob, fault.detail) == ("data_parallel", words)


def test_a_model_that_every_card_holds_is_not_sharded() -> None:
    config = tiny_config(upcast_fp32=False, optimizer="adamw_torch_fused")
    shared = config.model_copy(update={"sharding": "fsdp", "data_parallel": 2})
    with tiny_base(config) as base, attached(base, config) as attachment:
        loop = TrainingLoop(attachment, config, seed=0)
        loop.step()
        detail = PROOFS["sharding"](shared, StepEvidence(loop, looks=(a_look(rank=0), a_look())))
    assert detail == "a GPU holds 100 % of the layers' weights, not 50 %"


def test_a_fingerprint_tells_a_bit_and_its_place() -> None:
    whole = torch.arange(6, dtype=torch.float32)
    swapped, flipped = whole[[1, 0, 2, 3, 4, 5]], whole.clone()
    flipped[0] = -0.0
    assert fingerprint([whole]) == fingerprint([whole.clone()])
    assert len({fingerprint([t]) for t in (whole, swapped, flipped, whole.to(torch.bfloat16))}) == 4
