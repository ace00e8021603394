"""The proof that a setting took effect: what ran is held against what was asked."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from qlora_sweep.search_spaces.config import KNOBS, TrialConfig
from qlora_sweep.storage.records import Ineffective
from qlora_sweep.sweep.running.wire import RunCommand, TrialRequest, WorkerMessage, WorkerSettings
from tests.lazy import lazily
from tests.sweep.training.tiny import LAYERS, QUICK, TINY, tiny_base, tiny_config, tiny_loop

torch = lazily("torch")
adapters = lazily("qlora_sweep.sweep.training.adapters")
proof = lazily("qlora_sweep.sweep.training.proof")
step = lazily("qlora_sweep.sweep.training.step")
team = lazily("qlora_sweep.sweep.training.team")


def fault(asked: Any, loop: Any, watch: Any = None, **seen: Any) -> Any:
    return proof.ineffective(asked, proof.StepEvidence(loop, watch, **seen))


EAGER, FLASH = {"attention": "eager"}, {"attention": "flash_attention_2"}
HALF, SIXTEEN = {"quantized_fraction": 0.5}, {"quantization": "none", "double_quant": False}
FUSED = {"optimizer": "adamw_torch_fused", "lora_rank": 64}


@pytest.mark.parametrize(
    ("ran", "asked", "setting"),
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
    ran: dict[str, Any], asked: dict[str, Any], setting: str
) -> None:
    config = tiny_config(**ran)
    with tiny_loop(config) as loop:
        with proof.KernelWatch() as watch:
            loop.step()
        found = fault(tiny_config(**asked), loop, watch)
        assert isinstance(found, Ineffective)
        assert found.setting == setting
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
                assert found == Ineffective(setting="compile", detail="layers are compiled")
                loop.step()
                assert fault(config, loop) == Ineffective(setting="compile", detail=words)


def freeze_values(loop: Any) -> None:
    for name, parameter in loop.attached.model.named_parameters():
        if "v_proj.lora" in name:
            parameter.requires_grad_(False)


def recompute_nothing_of_the_first(loop: Any) -> None:
    loop.attached.layers[0].gradient_checkpointing = False


@pytest.mark.parametrize(
    ("spoil", "setting", "words"),
    [
        (freeze_values, "target_modules", "no adapter of v_proj learned"),
        (recompute_nothing_of_the_first, "checkpoint_fraction", f"{LAYERS - 1} of {LAYERS} layers"),
    ],
)
def test_what_was_configured_and_never_happened_is_found_out(
    spoil: Callable[[Any], None], setting: str, words: str
) -> None:
    config = tiny_config(target_modules="qv")
    with tiny_loop(config) as loop:
        spoil(loop)
        # The optimizer is made of what is to be trained.
        loop = step.TrainingLoop(loop.attached, config, seed=0)
        spoil(loop)
        loop.step()
        found = fault(config, loop)
    assert (found.setting, words in found.detail) == (setting, True)


def test_dropout_that_is_configured_and_never_called_is_found_out() -> None:
    config = tiny_config(lora_dropout=0.1)
    with tiny_loop(config) as loop:
        with proof.KernelWatch() as watch:
            loop.step()
        watch.dropouts = 0
        found = fault(config, loop, watch)
    assert found == Ineffective(setting="lora_dropout", detail="nothing was dropped")


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
    ("setting", "value"), [("attention", FLASH["attention"]), ("kernels", "liger")]
)
def test_a_value_whose_package_is_missing_is_ineffective_and_harms_no_other_trial(
    setting: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qlora_sweep.sweep.running.worker import Worker

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
    request = TrialRequest(config=tiny_config(**{setting: value}), steps=QUICK)
    finished = Worker(settings, send=told.append).run(RunCommand(request=request))
    assert isinstance(finished.outcome, Ineffective)
    assert (finished.outcome.setting, finished.retire) == (setting, None)
    assert finished.outcome.detail


def a_look(rank: int = 1, size: int = 1) -> Any:
    from qlora_sweep.sweep.training.device import Memory

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
def test_a_gpu_that_did_not_train_with_the_others_is_no_team(others: list[int], words: str) -> None:
    config = tiny_config(data_parallel=2)
    with tiny_loop(config) as loop:
        loop.step()
        found = fault(config, loop, looks=[a_look(rank) for rank in others])
    assert (found.setting, found.detail) == ("data_parallel", words)


def test_a_model_that_every_gpu_holds_is_not_sharded() -> None:
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


# Compiled layers: one graph for all, kept from trial to trial, never a silent fall-back.

# bitsandbytes compiles its 8-bit optimizers on a CPU.
CONFIG = tiny_config(optimizer="adamw_torch_fused", checkpoint_fraction=0.0)


class Graphs:
    """A compiler that runs graphs as they are, and counts them."""

    def __init__(self) -> None:
        self.count = 0
        self.compiler = adapters.CountingCompiler(self._compile)

    def _compile(self, graph: Any, inputs: Sequence[Any]) -> Any:
        self.count += 1
        return graph.forward


def trained(base: Any, config: TrialConfig, graphs: Graphs, *, steps: int = 1) -> Any:
    from qlora_sweep.sweep.training.step import TrainingLoop

    with adapters.attached(base, config) as attachment:
        with adapters.compiled(attachment.layers, compiler=graphs.compiler) as compilation:
            loop = TrainingLoop(attachment, config, seed=0)
            for _ in range(steps):
                loop.step()
        assert all(layer._compiled_call_impl is None for layer in attachment.layers)
    return compilation


@pytest.mark.usefixtures("dynamo")
def test_a_shape_is_compiled_once_for_all_layers_and_all_trials_on_a_base() -> None:
    graphs = Graphs()
    with tiny_base(CONFIG) as base:
        first = trained(base, CONFIG, graphs, steps=2)
        # The first layer's input wants no gradient.
        assert (graphs.count, first.calls) == (2, 2 * LAYERS)
        assert first.seconds > 0
        again = trained(base, CONFIG, graphs)
        assert (again.calls, again.seconds, graphs.count) == (LAYERS, 0.0, 2)
        wider = trained(base, CONFIG.model_copy(update={"micro_batch_size": 3}), graphs)
        assert wider.calls == LAYERS
        assert wider.seconds > 0
        assert trained(base, CONFIG, graphs).seconds == 0.0


@pytest.mark.usefixtures("dynamo")
def test_a_recomputed_layer_runs_its_graph_again() -> None:
    half = {"checkpoint_fraction": 0.5, "effective_batch_size": 4}
    config = CONFIG.model_copy(update=half)
    with tiny_base(config) as base:
        assert trained(base, config, Graphs()).calls == 2 * (LAYERS + LAYERS // 2)


def adding(*, breaks: bool) -> Any:
    class Adding(torch.nn.Module):  # type: ignore[name-defined,misc]
        def forward(self, x: Any) -> Any:
            if breaks:
                torch._dynamo.graph_break()
            return x + 1

    return Adding()


@pytest.mark.usefixtures("dynamo")
def test_no_number_of_shapes_makes_a_layer_fall_back_and_none_that_is_no_single_graph_runs() -> (
    None
):
    graphs, layer = Graphs(), adding(breaks=False)
    with adapters.compiled([layer], compiler=graphs.compiler) as compilation:
        for rows in range(2, 22):
            layer(torch.ones(rows, 2))
    assert (graphs.count, compilation.calls) == (20, 20)
    broken = adding(breaks=True)
    with (
        adapters.compiled([broken], compiler=Graphs().compiler),
        pytest.raises(torch._dynamo.exc.TorchDynamoException),
    ):
        broken(torch.ones(1))
    assert float(broken(torch.ones(1))) == 2.0


# What is put on the base for one trial, and taken off again.

attaching = lazily("qlora_sweep.sweep.training.adapters")


def test_detaching_leaves_the_base_as_it_was() -> None:
    config = tiny_config(checkpoint_fraction=0.5, target_modules="all-linear")

    def state(model: Any) -> Any:
        tensors = {name: (p.shape, p.dtype) for name, p in model.named_parameters()}
        return tensors, [name for name, _ in model.named_modules()]

    with tiny_base(config) as base:
        before = state(base.model)
        with attaching.attached(base, config) as attachment:
            assert attachment.trainable_parameters()
        assert state(base.model) == before
        assert not base.model.is_gradient_checkpointing
        assert not any(p.requires_grad for p in base.model.parameters())


ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}


@pytest.mark.parametrize(
    ("targets", "adapted"),
    [
        ("qv", {"q_proj", "v_proj"}),
        ("attention", ATTENTION),
        ("all-linear", {*ATTENTION, "gate_proj", "up_proj", "down_proj"}),
        (("up_proj",), {"up_proj"}),
    ],
)
def test_adapters_go_where_the_configuration_says(targets: object, adapted: set[str]) -> None:
    settings = {"lora_rank": 8, "lora_alpha": 4.0, "lora_dropout": 0.1}
    with tiny_loop(tiny_config(target_modules=targets, **settings)) as loop:
        layers = {n: m for n, m in loop.attached.model.named_modules() if hasattr(m, "lora_A")}
        trained = sum(p.numel() for p in loop.attached.trainable_parameters())
    assert {name.rpartition(".")[2] for name in layers} == adapted
    sizes = [layer.in_features + layer.out_features for layer in layers.values()]
    assert (trained, len(sizes)) == (8 * sum(sizes), LAYERS * len(adapted))
    for layer in layers.values():
        assert (layer.lora_dropout["default"].p, layer.scaling["default"]) == (0.1, 0.5)
