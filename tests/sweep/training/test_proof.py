"""The proof that a setting took effect: what ran is held against what was asked."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from search_spaces.config import KNOBS
from storage.records import Ineffective
from sweep.running.wire import RunCommand, TrialRequest, WorkerMessage, WorkerSettings
from tests.lazy import lazily
from tests.sweep.training.tiny import LAYERS, QUICK, TINY, tiny_base, tiny_config, tiny_loop

torch = lazily("torch")
adapters = lazily("sweep.training.adapters")
proof = lazily("sweep.training.proof")
step = lazily("sweep.training.step")
team = lazily("sweep.training.team")


def fault(asked: Any, loop: Any, watch: Any = None, **seen: Any) -> Any:
    return proof.ineffective(asked, proof.StepEvidence(loop, watch, **seen))


EAGER, FLASH = {"attention": "eager"}, {"attention": "flash_attention_2"}
HALF, SIXTEEN = {"quantized_fraction": 0.5}, {"quantization": "none", "double_quant": False}
FUSED = {"optimizer": "adamw_torch_fused", "lora_rank": 64}


@pytest.mark.parametrize(
    ("ran", "asked", "knob"),
    [
        ({}, EAGER, "attention"),
        ({}, FLASH, "attention"),
        (EAGER, {}, "attention"),
        ({"compute_dtype": "fp32"}, {}, "compute_dtype"),
        ({}, {"compute_dtype": "fp16"}, "compute_dtype"),
        ({}, {"upcast_fp32": False}, "upcast_fp32"),
        ({}, {"lora_dropout": 0.1}, "lora_dropout"),
        ({"lora_dropout": 1.0}, {}, "lora_dropout"),
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
        ({}, HALF, "quantized_fraction"),
        (HALF, {"quantized_fraction": 0.75}, "quantized_fraction"),
        ({}, {"quantization": "fp4"}, "quantization"),
        (SIXTEEN, {}, "quantization"),
        ({}, {"double_quant": False}, "double_quant"),
        ({}, {"kernels": "liger"}, "kernels"),
        ({}, {"compile": True}, "compile"),
        (FUSED, {"lora_rank": 64}, "optimizer"),
    ],
)
def test_each_setting_is_found_out_where_another_value_ran(
    ran: dict[str, Any], asked: dict[str, Any], knob: str
) -> None:
    config = tiny_config(**ran)
    with tiny_loop(config) as loop:
        with proof.KernelWatch() as watch:
            loop.step()
        found = fault(tiny_config(**asked), loop, watch)
        assert isinstance(found, Ineffective)
        assert found.knob == knob
        assert fault(config, loop, watch) is None


def test_every_setting_has_its_proof_and_nothing_else_has() -> None:
    assert proof.PROOFS.keys() == KNOBS.keys()


def test_segments_are_told_by_where_the_weights_lie() -> None:
    first, second = (torch.zeros(size, dtype=torch.uint8) for size in (3, 1))

    def around(tensor: Any, *, is_expandable: bool) -> dict[str, Any]:
        place = {"address": tensor.data_ptr(), "total_size": tensor.nbytes}
        return place | {"is_expandable": is_expandable}

    mixed = [around(first, is_expandable=True), around(second, is_expandable=False)]
    for tensors, share in (([first, second], 0.75), ([second], 0.0), ([], 0.0)):
        assert proof.expandable_share(tensors, mixed) == share


@pytest.mark.usefixtures("dynamo")
def test_layers_that_were_compiled_in_an_earlier_trial_prove_themselves_again() -> None:
    plain = tiny_config(optimizer="adamw_torch_fused", checkpoint_fraction=0.0)
    config = plain.model_copy(update={"compile": True})
    compiler = adapters.CountingCompiler(lambda graph, _: graph.forward)
    words = f"{LAYERS} of {2 * LAYERS} calls of layers were compiled"
    with tiny_base(plain) as base:
        for _ in range(2):
            with adapters.attached(base, plain) as attachment:
                compiling = adapters.compiled(attachment.layers, compiler=compiler)
                with compiling as attachment.compilation:
                    loop = step.TrainingLoop(attachment, config, seed=0)
                    loop.step()
                    assert fault(config, loop) is None
                    found = fault(plain, loop)
                assert found == Ineffective(knob="compile", detail="layers are compiled")
                loop.step()
                assert fault(config, loop) == Ineffective(knob="compile", detail=words)


def freeze_values(loop: Any) -> None:
    for name, parameter in loop.attached.model.named_parameters():
        if "v_proj.lora" in name:
            parameter.requires_grad_(False)


def recompute_nothing_of_the_first(loop: Any) -> None:
    loop.attached.layers[0].gradient_checkpointing = False


@pytest.mark.parametrize(
    ("spoil", "knob", "words"),
    [
        (freeze_values, "target_modules", "no adapter of v_proj learned"),
        (recompute_nothing_of_the_first, "checkpoint_fraction", f"{LAYERS - 1} of {LAYERS} layers"),
    ],
)
def test_what_was_configured_and_never_happened_is_found_out(
    spoil: Callable[[Any], None], knob: str, words: str
) -> None:
    config = tiny_config(target_modules="qv")
    with tiny_loop(config) as loop:
        spoil(loop)
        # The optimizer is made of what is to be trained.
        loop = step.TrainingLoop(loop.attached, config, seed=0)
        spoil(loop)
        loop.step()
        found = fault(config, loop)
    assert (found.knob, words in found.detail) == (knob, True)


def test_dropout_that_is_configured_and_never_called_is_found_out() -> None:
    config = tiny_config(lora_dropout=0.1)
    with tiny_loop(config) as loop:
        with proof.KernelWatch() as watch:
            loop.step()
        watch.dropouts = 0
        found = fault(config, loop, watch)
    assert found == Ineffective(knob="lora_dropout", detail="nothing was dropped")


@pytest.fixture
def flash_attn_operator() -> Iterator[Any]:
    """An operator with the name that flash-attn gives its own."""
    library = torch.library.Library("flash_attn", "DEF")
    library.define("_flash_attn_forward(Tensor q) -> Tensor")
    library.impl("_flash_attn_forward", torch.clone, "CPU")
    yield torch.ops.flash_attn._flash_attn_forward
    library._destroy()


def test_flash_attention_is_proved_by_flash_attns_own_operator(flash_attn_operator: Any) -> None:
    with tiny_loop(tiny_config()) as loop:
        loop.step()
        with proof.KernelWatch() as watch:
            flash_attn_operator(torch.zeros(1, dtype=torch.bfloat16))
            torch.zeros(2, 2, dtype=torch.bfloat16) @ torch.zeros(2, 2, dtype=torch.bfloat16)
        assert fault(tiny_config(**FLASH), loop, watch) is None
        eager = fault(tiny_config(**EAGER), loop, watch)
    assert "flash_attn::_flash_attn_forward" in eager.detail


@pytest.mark.parametrize(
    ("knob", "value"), [("attention", FLASH["attention"]), ("kernels", "liger")]
)
def test_a_value_whose_package_is_missing_is_ineffective_and_harms_no_other_trial(
    knob: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sweep.running.worker import Worker

    for package in ("flash_attn", "liger_kernel"):
        monkeypatch.setitem(sys.modules, package, None)
    told: list[WorkerMessage] = []
    settings = WorkerSettings(
        device="cpu",
        budget_bytes=2**40,
        model=TINY.to_json(),
        weights="random",
        seed=0,
        is_emulated=False,
    )
    request = TrialRequest(config=tiny_config(**{knob: value}), steps=QUICK)
    finished = Worker(settings, send=told.append).run(RunCommand(request=request))
    assert isinstance(finished.outcome, Ineffective)
    assert (finished.outcome.knob, finished.retire) == (knob, None)
    assert finished.outcome.detail


def a_look(rank: int = 1, size: int = 1) -> Any:
    from sweep.training.device import Memory

    memory = Memory(1, "backward")
    return team.Look(rank, size, adapters="same", tokens="other", held_share=1.0, memory=memory)


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ([], "1 of 2 GPUs trained"),
        ([0, 1], "a GPU trained with 0 others"),
        ([0, 1, 2], "3 of 2 GPUs trained"),
    ],
)
def test_a_card_that_did_not_train_with_the_others_is_no_team(
    others: list[int], words: str
) -> None:
    config = tiny_config(data_parallel=2)
    with tiny_loop(config) as loop:
        loop.step()
        found = fault(config, loop, looks=[a_look(rank) for rank in others])
    assert (found.knob, found.detail) == ("data_parallel", words)


def test_a_model_that_every_card_holds_is_not_sharded() -> None:
    config = tiny_config(upcast_fp32=False, optimizer="adamw_torch_fused")
    shared = config.model_copy(update={"sharding": "fsdp", "data_parallel": 2})
    with tiny_loop(config) as loop:
        loop.step()
        seen = proof.StepEvidence(loop, looks=(a_look(0), a_look()))
        assert proof.PROOFS["sharding"](shared, seen) == (
            "a GPU holds 100 % of the layers' weights, not 50 %"
        )


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32", "int64"])
def test_what_ranks_compare_is_another_where_any_bit_or_its_place_is(dtype: str) -> None:
    one = torch.tensor([[1, 4], [3, 8]], dtype=getattr(torch, dtype))
    flipped, swapped = one.clone(), one[[1, 0]]
    flipped.view(torch.uint8)[1, 0] ^= 1
    # Of the same sums, and as many times their places.
    moved = one + torch.tensor([[1, -2], [1, 0]], dtype=one.dtype)
    prints = {team.fingerprint([tensor]) for tensor in (one, flipped, swapped, moved, one.half())}
    assert len(prints) == 5
    assert team.fingerprint([one.clone()]) in prints
