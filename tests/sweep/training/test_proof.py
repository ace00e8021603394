"""The proof that a setting took effect: what ran is held against what was asked."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest

from qlora_sweep.search_spaces.config import SETTINGS, TrialConfig
from qlora_sweep.storage.records import Ineffective
from qlora_sweep.sweep.running.wire import RunCommand, TrialRequest, WorkerMessage, WorkerSettings
from tests.lazy import lazily
from tests.sweep.training.tiny import LAYERS, QUICK, TINY, tiny_base, tiny_config, tiny_loop
from tests.tables import cases

torch = lazily("torch")
adapters = lazily("qlora_sweep.sweep.training.adapters")
proof = lazily("qlora_sweep.sweep.training.proof")
step = lazily("qlora_sweep.sweep.training.step")
process_group = lazily("qlora_sweep.sweep.training.process_group")


def fault(asked: Any, loop: Any, watch: Any = None, **seen: Any) -> Any:
    return proof.ineffective(asked, proof.StepEvidence(loop, watch, **seen))


@pytest.fixture(scope="module")
def stepped() -> Iterator[Callable[..., Any]]:
    """Returns a training with these settings, and its watch, after a step; each is made once."""
    found: dict[TrialConfig, Any] = {}
    with ExitStack() as stack:

        def step_with(config: TrialConfig) -> Any:
            if config not in found:
                loop = stack.enter_context(tiny_loop(config))
                with proof.KernelWatch() as watch:
                    loop.step()
                found[config] = loop, watch
            return found[config]

        yield step_with


EAGER = {"attention": "eager"}
FLASH = {"attention": "flash_attention_2"}


@pytest.mark.parametrize(
    ("ran", "asked", "setting"),
    cases(
        """
        {} | {attention: eager} | attention
        {} | {attention: flash_attention_2} | attention
        {attention: eager} | {} | attention
        {compute_dtype: fp32} | {} | compute_dtype
        {} | {compute_dtype: fp16} | compute_dtype
        {} | {upcast_fp32: false} | upcast_fp32
        {} | {lora_dropout: 0.1} | lora_dropout
        {lora_dropout: 1.0} | {} | lora_dropout
        {} | {lora_alpha: 8} | lora_alpha
        {} | {checkpoint_fraction: 0.5} | checkpoint_fraction
        {} | {micro_batch_size: 1} | micro_batch_size
        {} | {seq_len: 8} | seq_len
        {} | {effective_batch_size: 8} | effective_batch_size
        {} | {learning_rate: 0.001} | learning_rate
        {} | {packing: packed} | packing
        {} | {adapter_dtype: bf16} | adapter_dtype
        {adapter_dtype: bf16} | {} | adapter_dtype
        {} | {expandable_segments: true} | expandable_segments
        {} | {quantized_fraction: 0.5} | quantized_fraction
        {quantized_fraction: 0.5} | {quantized_fraction: 0.75} | quantized_fraction
        {} | {quantization: fp4} | quantization
        {quantization: none, double_quant: false} | {} | quantization
        {} | {double_quant: false} | double_quant
        {} | {kernels: liger} | kernels
        {} | {compile: true} | compile
        {optimizer: adamw_torch_fused, lora_rank: 64} | {lora_rank: 64} | optimizer
        """
    ),
)
def test_each_setting_is_found_out_where_another_value_ran(
    ran: dict[str, Any], asked: dict[str, Any], setting: str, stepped: Callable[..., Any]
) -> None:
    config = tiny_config(**ran)
    loop, watch = stepped(config)
    found = fault(tiny_config(**asked), loop, watch)
    assert isinstance(found, Ineffective)
    assert found.setting == setting
    assert fault(config, loop, watch) is None


def test_every_setting_has_its_proof_and_nothing_else_has() -> None:
    assert proof.PROOFS.keys() == SETTINGS.keys()


def test_segments_are_told_by_where_the_weights_lie() -> None:
    first, second = (torch.zeros(size, dtype=torch.uint8) for size in (3, 1))

    mixed = [
        {
            "address": tensor.data_ptr(),
            "total_size": tensor.nbytes,
            "is_expandable": tensor is first,
        }
        for tensor in (first, second)
    ]
    assert proof.expandable_share([first, second], mixed) == 0.75
    assert proof.expandable_share([second], mixed) == 0.0
    assert proof.expandable_share([], mixed) == 0.0


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


def test_dropout_that_is_configured_and_never_called_is_found_out(
    stepped: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(lora_dropout=0.1)
    loop, watch = stepped(config)
    monkeypatch.setattr(watch, "dropouts", 0)
    assert fault(config, loop, watch).setting == "lora_dropout"


@pytest.fixture
def flash_attn_operator() -> Iterator[Any]:
    """An operator with the name that flash-attn gives its own."""
    library = torch.library.Library("flash_attn", "DEF")
    library.define("_flash_attn_forward(Tensor q) -> Tensor")
    library.impl("_flash_attn_forward", torch.clone, "CPU")
    yield torch.ops.flash_attn._flash_attn_forward
    library._destroy()


def test_flash_attention_is_proved_by_flash_attns_own_operator(
    flash_attn_operator: Any, stepped: Callable[..., Any]
) -> None:
    loop, _ = stepped(tiny_config())
    matrix = torch.zeros(2, 2, dtype=torch.bfloat16)
    with proof.KernelWatch() as watch:
        flash_attn_operator(matrix)
        matrix @ matrix
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
    return process_group.Look(
        rank, size, adapters="same", tokens="other", held_share=1.0, memory=memory
    )


@pytest.mark.parametrize("others", [[], [0, 1], [0, 1, 2]])
def test_a_gpu_that_did_not_train_with_the_others_is_no_team(
    others: list[int], stepped: Callable[..., Any]
) -> None:
    loop, _ = stepped(tiny_config())
    looks = [a_look(rank) for rank in others]
    assert fault(tiny_config(data_parallel=2), loop, looks=looks).setting == "data_parallel"


def test_a_model_that_every_gpu_holds_is_not_sharded(stepped: Callable[..., Any]) -> None:
    loop, _ = stepped(tiny_config())
    shared = tiny_config(
        upcast_fp32=False, optimizer="adamw_torch_fused", sharding="fsdp", data_parallel=2
    )
    seen = proof.StepEvidence(loop, looks=(a_look(0), a_look()))
    assert "100 %" in proof.PROOFS["sharding"](shared, seen)


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16"])
def test_what_ranks_compare_is_another_where_any_bit_or_its_place_is(dtype: str) -> None:
    one = torch.tensor([[1, 4], [3, 8]], dtype=getattr(torch, dtype))
    flipped, swapped = one.clone(), one[[1, 0]]
    flipped.view(torch.uint8)[1, 0] ^= 1
    # Of the same sums, and as many times their places.
    moved = one + torch.tensor([[1, -2], [1, 0]], dtype=one.dtype)
    prints = {
        process_group.fingerprint([tensor]) for tensor in (one, flipped, swapped, moved, one.half())
    }
    assert len(prints) == 5
    assert process_group.fingerprint([one.clone()]) in prints


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


@pytest.mark.usefixtures("dynamo")
def test_a_shape_is_compiled_once_for_all_layers_and_trials_and_each_trial_proves_it() -> None:
    graphs = Graphs()
    config = CONFIG.model_copy(update={"compile": True})
    with tiny_base(CONFIG) as base:
        for is_first in (True, False):
            with adapters.attached(base, CONFIG) as attachment:
                compiling = adapters.compiled(attachment.layers, compiler=graphs.compiler)
                with compiling as attachment.compilation:
                    loop = step.TrainingLoop(attachment, config, seed=0)
                    loop.step()
                    assert fault(config, loop) is None
                    assert fault(CONFIG, loop).setting == "compile"
                compilation = attachment.compilation
                # The first layer's input wants no gradient.
                assert (graphs.count, compilation.calls) == (2, LAYERS)
                assert (compilation.seconds > 0) is is_first
                loop.step()
                found = fault(config, loop)
            assert found.setting == "compile"
            assert f"{LAYERS} of {2 * LAYERS}" in found.detail


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
    graphs = Graphs()
    layer = adding(breaks=False)
    with adapters.compiled([layer], compiler=graphs.compiler) as compilation:
        for rows in range(2, 12):
            layer(torch.ones(rows, 2))
    assert (graphs.count, compilation.calls) == (10, 10)
    broken = adding(breaks=True)
    with (
        adapters.compiled([broken], compiler=Graphs().compiler),
        pytest.raises(torch._dynamo.exc.TorchDynamoException),
    ):
        broken(torch.ones(1))
    assert float(broken(torch.ones(1))) == 2.0


# What is put on the base for one trial, and taken off again.


@pytest.mark.parametrize(
    ("targets", "adapted"),
    [
        ("qv", {"q_proj", "v_proj"}),
        ("attention", {"q_proj", "k_proj", "v_proj", "o_proj"}),
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
