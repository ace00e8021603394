from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.errors import EnvironmentFault, InputError
from qlora_sweep.search_spaces.gpus import GIB, find_gpu
from qlora_sweep.search_spaces.kinds import EIGHT_BIT
from qlora_sweep.search_spaces.models import ModelSpec, load_model_spec
from qlora_sweep.storage.definition import StudySnapshot, Target
from qlora_sweep.storage.reading import list_studies, read_spooled_study, read_study
from qlora_sweep.storage.records import Measured, Outcome
from qlora_sweep.storage.study import OpenStudy
from qlora_sweep.sweep import cli
from qlora_sweep.sweep.paths import runs_directory
from qlora_sweep.sweep.predict.memory.profiles import Untraceable
from qlora_sweep.sweep.request import RunRequest
from qlora_sweep.sweep.running.device_info import ChosenGpu, GpuInfo
from qlora_sweep.sweep.running.replay import ReplayRunner
from qlora_sweep.sweep.running.runner import Runner
from qlora_sweep.sweep.study import session
from qlora_sweep.sweep.study.events import (
    Event,
    Interruption,
    Listener,
    SpaceTraced,
    StopReason,
)
from qlora_sweep.sweep.study.prepared import Prepared, prepare, prepare_again
from qlora_sweep.sweep.study.session import drive, supervised_runner
from qlora_sweep.sweep.study.targets import check_budget, least_weight_bytes, resolve_target
from qlora_sweep.sweep.terminal.driving import LocalGpus
from qlora_sweep.sweep.terminal.options import settings
from tests.storage.builders import changed
from tests.sweep.imagined_memory import ImaginedPredictor
from tests.sweep.simulated_device import a_measurement, a_space, train


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path))
    # A tracing child takes seconds to start, and the device says what fits as well.
    nothing = ImaginedPredictor(fault=Untraceable("not traced"))
    monkeypatch.setattr(session, "predictor_here", lambda *_, **__: nothing)
    return tmp_path


@pytest.fixture
def url(home: Path) -> str:
    return f"sqlite:///{home}/runs/sweep.db"


def prepared(
    space: str = "cpu-demo", *, study: Any = None, fixed_settings: Any = None, **typed: Any
) -> Prepared:
    gpu = a_gpu("h200")
    request = RunRequest(
        space=space, overrides=typed, fixed_settings=fixed_settings or {}, study=study
    )
    return prepare(request, read_gpu=lambda: gpu)


def small_a10(home: Path) -> str:
    """A space for an A10 that is looked at in no time."""
    file = home / "small.yaml"
    kernels = "{micro_batch_size: [1, 2], kernels: [hf, fused-loss, liger]}"
    file.write_text(f"gpu: a10\ndimensions: {kernels}\n")
    return str(file)


def again(stored: StudySnapshot, **confirm: Any) -> Prepared:
    return prepare_again(stored.name, stored.definition, confirm=confirm, read_gpu=lambda: None)


def read(url: str, name: str = "cpu-demo") -> StudySnapshot:
    return read_study(name, url=url, home=runs_directory())


def simulated(_: Prepared) -> Runner:
    return ReplayRunner(otherwise=train)


def small(_: Prepared) -> Runner:
    """A GPU on which everything fits the demo's budget."""

    def answer(config: TrialConfig) -> Outcome:
        return Measured(
            measurement=a_measurement(config, peak_allocated_bytes=2**20, trainable_parameters=1000)
        )

    return ReplayRunner(otherwise=answer)


def watching(listener: Listener = lambda _: None) -> Any:
    @contextmanager
    def watch(_study: OpenStudy, _interruption: Interruption) -> Iterator[Listener]:
        yield listener

    return watch


@contextmanager
def stopping_at_once(_: OpenStudy, interruption: Interruption) -> Iterator[Listener]:
    interruption.request()
    yield lambda _event: None


def run(what: Prepared, storage: str, **changes: Any) -> StopReason:
    values: dict[str, Any] = {"watch": watching(), "warn": lambda _: None, "new_runner": simulated}
    return drive(what, storage=storage, **(values | changes))


def gpus(*indices: int) -> tuple[ChosenGpu, ...]:
    return tuple(ChosenGpu(at, replace(a_gpu("h200"), uuid=f"GPU-{at}")) for at in indices)


def test_each_chosen_gpu_has_a_lane_or_as_many_as_a_trial_trains_on_together() -> None:
    alone = replace(prepared("a10"), gpus=gpus(0, 2))
    both = replace(prepared("a10", fixed_settings={"data_parallel": 2}), gpus=gpus(0, 1, 2, 3, 4))
    assert (alone.gpus_per_trial, both.gpus_per_trial) == (1, 2)
    lanes = [
        [lane.name for lane in supervised_runner(what).all]
        for what in (alone, both, prepared("a10"))
    ]
    assert lanes == [["GPU 0", "GPU 2"], ["GPU 0 and GPU 1", "GPU 2 and GPU 3"], [""]]
    where = LocalGpus("0,")
    where.gpus = gpus(0)
    with pytest.raises(InputError, match="data_parallel 2"):
        where.given_to(both)
    where.gpus = gpus(0, 1)
    assert len(where.given_to(both).gpus) == 2


# What was typed


def test_what_was_typed_overrides_what_the_space_says() -> None:
    what = prepared(trials=3, seed=7, sampler="random", time_budget_seconds=60.0, model=None)
    space = what.space
    assert (space.trials, space.seed, space.sampler) == (3, 7, "random")
    assert space.time_budget_seconds == 60.0
    assert what.model.name == space.model == "demo"
    assert (what.target.device, what.target.budget_bytes) == ("cpu", 28 * 2**20)
    # A GPU that is named has its own budget, and what is there stands in for it.
    on_a10 = prepared(gpu="a10").target
    assert on_a10.budget_bytes == find_gpu("a10").budget_bytes
    assert on_a10.emulated_on == a_gpu("h200").product


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"gpu": "l4"}, "a10-l4"),
        ({"model": "qwen3-8b"}, "a10-qwen3-8b"),
        ({"study": "mine", "trials": 3}, "mine"),
        ({"fixed_settings": {"lora_rank": 8}}, "a10-90cac3"),
        ({"fixed_settings": {"upcast_fp32": False}}, "a10"),
        ({"numerics": "16-bit"}, "a10-86e0a8"),
    ],
)
def test_a_study_is_named_after_what_it_is_of(changes: dict[str, Any], name: str) -> None:
    assert prepared("a10", **changes).name == name


def test_where_all_settings_are_fixed_a_command_that_answers_is_named() -> None:
    """It is typed here, and asks about the configuration that was left."""
    held = {key: d.first for key, d in prepared("a10").space.dimensions.items()}
    held |= {"target_modules": ("v_proj", "q_proj"), "double_quant": False}
    with pytest.raises(InputError, match="nothing is left to search") as refusal:
        prepared("a10", fixed_settings=held, model="demo")
    command, *words = shlex.split(str(refusal.value).partition(" with sweep ")[2])
    typed = get_command(cli.app).commands[command].make_context("plan", words).params  # type: ignore[attr-defined]
    # With it goes the budget.
    assert (typed["exact"], typed["space"], typed["gpu"]) == (True, "a10", ["a10"])
    assert typed["model"] == "demo"
    values = settings(typed, typed["settings"])[0]
    assert values["micro_batch_size"] == held["micro_batch_size"]
    assert list(values["target_modules"]) == ["q_proj", "v_proj"]
    assert values["double_quant"] is False


def test_how_the_winner_is_confirmed_can_be_typed() -> None:
    declared = prepared("a10").space.confirm
    longer = prepared("a10", confirm={"soak_seconds": 600.0})
    assert prepared("a10", confirm=False).space.confirm is None
    assert longer.space.confirm == changed(declared, soak_seconds=600.0)
    assert longer.name == "a10"


def test_a_space_for_the_cpu_does_not_look_for_a_gpu() -> None:
    def read() -> None:
        raise AssertionError("the GPU was read")

    prepare(RunRequest(space="cpu-demo"), read_gpu=read)


def test_a_preset_takes_the_attention_that_the_model_has(tmp_path: Path) -> None:
    capped = {**load_model_spec("qwen3-0.6b").config, "attn_logit_softcapping": 50.0}
    (tmp_path / "config.json").write_text(json.dumps(capped))
    request = RunRequest(space="h200", overrides={"model": str(tmp_path)})
    what = prepare(request, read_gpu=lambda: a_gpu("h200"))
    assert what.definition.space.values_of("attention") == ("eager",)
    assert any("eager" in note for note in what.notes)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("gpu: cpu\nmodel: demo\nfixed: {target_modules: [nope_proj]}", "no linear module 'nope_"),
        ("gpu: cpu\nmodel: demo\nfixed: {kernels: liger}", "need CUDA"),
        ("gpu: t4\nfixed: {compute_dtype: bf16}", "no configuration is valid: bf16-needs-ampere"),
    ],
)
def test_a_space_of_nothing_valid_is_refused(tmp_path: Path, lines: str, said: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"budget_gib: 8\ndimensions: {{lora_rank: {{low: 1, high: 256}}}}\n{lines}\n")
    with pytest.raises(InputError, match=said):
        prepared(str(file))
    file.write_text("gpu: t4\ndimensions: {compute_dtype: [bf16, fp16]}\n")
    assert prepared(str(file)).target.gpu == "t4"


# Driven


def test_a_stored_study_is_measured_again_on_its_own_terms(url: str) -> None:
    run(prepared(trials=3, seed=7, confirm=False), url, new_runner=small)
    assert read(url).confirmations == ()
    what = again(read(url), soak_seconds=1.0)
    assert (what.name, what.space.seed, what.space.trials) == ("cpu-demo", 7, 3)
    assert run(what, url, is_anew=True, new_runner=small) is StopReason.CONFIRMED
    known = read(url)
    assert len(known.records) == 3
    assert {run.purpose for run in known.confirmations} == {"confirm", "soak"}
    assert known.definition.space.confirm.soak_seconds == 1.0


def test_another_gpu_or_space_under_the_same_name_is_refused(home: Path, url: str) -> None:
    h200, a10 = prepared("a10", gpu="auto"), a_gpu("a10")
    run(h200, url, watch=stopping_at_once)
    on_a10 = prepare_again(h200.name, h200.definition, confirm={}, read_gpu=lambda: a10)
    with pytest.raises(InputError, match="another definition"):
        run(on_a10, url, is_anew=True)
    with pytest.raises(InputError, match="another definition"):
        run(prepared(study=h200.name), url)
    # What the driver says of the GPU stays with the study.
    environment = read(url, h200.name).environment
    told = [environment[key] for key in ("device", "gpu", "driver", "cuda_driver")]
    assert told == ["cuda", a_gpu("h200").product, "570.1", "12.8"]


def test_a_spool_of_another_space_is_refused(home: Path, url: str) -> None:
    run(prepared(trials=1, confirm=False), url)
    spool = home / "runs" / "cpu-demo" / "spool.jsonl"
    with pytest.raises(InputError, match="other conditions"):
        run(prepared("a10"), url, carried=read_spooled_study(spool))
    assert [s.name for s in list_studies(url, runs_directory())] == ["cpu-demo"]


@pytest.mark.parametrize(
    ("key", "damage"),
    [
        (r'"hidden_size": \d+', '"hidden_size": "big"'),
        (r'"versions": \{', '"versions": [], "x": {'),
    ],
)
def test_a_spool_whose_study_cannot_be_read_is_refused(
    home: Path, url: str, key: str, damage: str
) -> None:
    run(prepared(trials=1, confirm=False), url)
    spool = home / "runs" / "cpu-demo" / "spool.jsonl"
    beside = spool.with_name("study.json")
    beside.write_text(re.sub(key, damage, beside.read_text()))
    with pytest.raises(InputError, match=r"study\.json|model"):
        read_spooled_study(spool)


def test_a_file_that_is_no_spool_is_refused(home: Path) -> None:
    moved = home / "spool.jsonl"
    with pytest.raises(InputError, match="no such file"):
        read_spooled_study(moved)
    moved.write_text("garbage\n")
    with pytest.raises(InputError, match="no result"):
        read_spooled_study(moved)


class NotingRunner(ReplayRunner):
    """Notes what was done to it, in order."""

    def __init__(self) -> None:
        super().__init__(otherwise=train)
        self.calls: list[str] = []

    def start(self) -> None:
        self.calls.append("start")

    def close(self) -> None:
        self.calls.append("close")


def traced_by(monkeypatch: pytest.MonkeyPatch, predict_all: Any) -> None:
    """Have studies ask a predictor of memory whose tracing is a function."""

    class Tracing(ImaginedPredictor):
        def predict_all(self, configs: Any, *, on_progress: Any = lambda *_: None) -> Any:
            predict_all(on_progress)
            return super().predict_all(configs)

    monkeypatch.setattr(session, "predictor_here", lambda *_, **__: Tracing())


def test_the_worker_starts_while_the_space_is_traced_and_only_if_something_is_to_run(
    home: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = NotingRunner()
    started: list[bool] = []
    told: list[Event] = []

    def trace(on_progress: Any) -> None:
        started.append("start" in runner.calls)
        on_progress(0, 2)

    traced_by(monkeypatch, trace)
    what = prepared(small_a10(home), trials=1, confirm=False)
    run(what, url, watch=watching(told.append), new_runner=lambda _: runner)
    assert started[0]
    assert told[0] == SpaceTraced(0, 2)
    idle = NotingRunner()
    assert run(what, url, new_runner=lambda _: idle) is StopReason.TRIALS_SPENT
    assert idle.calls == ["close"]


def test_measuring_again_alone_traces_nothing_however_many_trials_are_left(url: str) -> None:
    run(prepared(trials=3, confirm=False), url, new_runner=small)
    stored, runner = read(url), NotingRunner()
    more = changed(stored.definition.space, trials=9)
    definition = changed(stored.definition, space=more)
    what = again(replace(stored, definition=definition))
    run(what, url, is_anew=True, new_runner=lambda _: runner)
    assert runner.calls == ["close"]
    assert runner.ran


def test_a_request_to_stop_ends_the_tracing(
    home: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trace(on_progress: Any) -> None:
        on_progress(0, 2)
        raise AssertionError("it went on")

    @contextmanager
    def watch(_study: OpenStudy, interruption: Interruption) -> Iterator[Listener]:
        yield lambda _event: interruption.request()

    traced_by(monkeypatch, trace)
    assert run(prepared(small_a10(home)), url, watch=watch) is StopReason.INTERRUPTED


def test_what_cannot_be_traced_is_a_warning_and_the_study_goes_on(
    home: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trace(_: Any) -> None:
        raise EnvironmentFault("the tracing process gave no answer")

    traced_by(monkeypatch, trace)
    warnings: list[str] = []
    what = prepared(small_a10(home), trials=1)
    assert run(what, url, warn=warnings.append) is StopReason.TRIALS_SPENT
    assert any("gave no answer" in text for text in warnings)


def a_gpu(name: str = "h200", **changes: Any) -> GpuInfo:
    spec = find_gpu(name)
    values: dict[str, Any] = {
        "product": spec.product,
        "memory_bytes": spec.memory_bytes + GIB // 2,
        "free_bytes": spec.memory_bytes,
        "compute_capability": spec.compute_capability,
        "driver": "570.1",
        "cuda": "12.8",
    }
    return GpuInfo(**(values | changes))


A10 = find_gpu("a10")
UNKNOWN = a_gpu("h200", product="NVIDIA Z1", memory_bytes=40 * GIB)
SLICE = a_gpu("a10", memory_bytes=A10.memory_bytes - 4 * GIB)
SHARED = a_gpu("h200", product="NVIDIA Z2", memory_bytes=120 * GIB, shares_host_memory=True)
GEFORCE = "NVIDIA GeForce RTX 4060 Ti"
EIGHT = a_gpu("rtx-4060-ti-16gb", memory_bytes=8188 * 2**20)
ODD = a_gpu("rtx-4060-ti-16gb", memory_bytes=32 * GIB)
OF_EIGHT = find_gpu("4060ti-8gb").budget_bytes


@pytest.mark.parametrize(
    ("asked", "here", "gpu", "budget_bytes", "emulated_on"),
    [
        ("auto", a_gpu("h200"), "h200", find_gpu("h200").budget_bytes, None),
        ("a10", a_gpu("h200"), "a10", A10.budget_bytes, find_gpu("h200").product),
        # A slice of a GPU has less than the catalogue says, and one that it does not have is its
        # own target; what shares the host's memory leaves the host some.
        ("a10", SLICE, "a10", A10.budget_bytes - 4 * GIB, None),
        ("auto", UNKNOWN, "NVIDIA Z1", 39 * GIB, None),
        ("auto", SHARED, "NVIDIA Z2", 0.85 * 120 * GIB, None),
        # Drivers call GPUs of several sizes alike.
        ("auto", EIGHT, "rtx-4060-ti-8gb", OF_EIGHT, None),
        ("auto", ODD, GEFORCE, 31 * GIB, None),
        ("4060ti-8gb", ODD, "rtx-4060-ti-8gb", OF_EIGHT, GEFORCE),
    ],
)
def test_a_target_is_what_is_here_unless_another_is_named(
    asked: str, here: GpuInfo, gpu: str, budget_bytes: float, emulated_on: str | None
) -> None:
    target = resolve_target(a_space(gpu=asked), here).target
    assert (target.device, target.gpu, target.emulated_on) == ("cuda", gpu, emulated_on)
    assert target.budget_bytes == pytest.approx(budget_bytes, abs=1)


@pytest.mark.parametrize(("gpu", "here"), [("a10", a_gpu("a10")), ("cpu", None)])
def test_a_budget_that_is_named_is_the_targets(gpu: str, here: GpuInfo | None) -> None:
    target = resolve_target(a_space(gpu=gpu, budget_gib=8), here).target
    assert target.budget_bytes == 8 * GIB
    assert target.device == ("cpu" if here is None else "cuda")


@pytest.mark.parametrize("told", [find_gpu("h200").compute_capability, None])
def test_a_configuration_must_be_valid_on_the_target_and_on_its_host(told: Any) -> None:
    """What a GPU does not tell is in the catalogue."""
    resolved = resolve_target(a_space(gpu="t4"), a_gpu("h200", compute_capability=told))
    assert resolved.compute_capability == find_gpu("t4").compute_capability
    assert resolved.host_capability == find_gpu("h200").compute_capability


def test_a_gpu_that_tells_no_capability_and_is_in_no_catalogue_has_none() -> None:
    other = a_gpu("h200", product="NVIDIA Z1", compute_capability=None)
    assert resolve_target(a_space(gpu="t4"), other).host_capability is None
    assert resolve_target(a_space(gpu="auto"), other).compute_capability is None


@pytest.mark.parametrize(
    ("changes", "gpu", "error", "message"),
    [
        ({"gpu": "auto"}, None, EnvironmentFault, "sweep doctor"),
        ({"gpu": "a10"}, None, EnvironmentFault, "no NVIDIA GPU"),
        ({"gpu": "h200"}, a_gpu("a10"), EnvironmentFault, "cannot stand in"),
        ({"gpu": "4060ti"}, EIGHT, EnvironmentFault, "8.00 GiB"),
        ({"gpu": "cpu"}, None, InputError, "budget_gib"),
        ({"gpu": "a10", "budget_gib": 30}, a_gpu("a10"), InputError, "30"),
        ({"gpu": "a11"}, a_gpu("a10"), InputError, "a11"),
    ],
)
def test_what_cannot_be_is_refused(
    changes: dict[str, Any], gpu: GpuInfo | None, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        resolve_target(a_space(**changes), gpu)


@pytest.mark.parametrize(
    ("fixed", "least"),
    [
        ({}, r"6\.5"),
        ({"quantization": "none"}, r"24\.2"),
        # Of 4, 8 and 16 bits the second is a third of the way.
        *(({"quantization": base}, r"12\.4") for base in EIGHT_BIT),
    ],
)
def test_a_budget_smaller_than_the_model_is_refused_before_anything_is_loaded(
    fixed: dict[str, Any], least: str
) -> None:
    model, space = load_model_spec("llama-2-13b"), a_space(fixed=fixed)
    small = Target(gpu="a10", device="cuda", budget_bytes=4 * GIB)
    with pytest.raises(InputError, match=rf"'llama-2-13b' needs at least {least}\d GiB.*4\.00"):
        check_budget(space, model, small)
    either = a_space(dimensions={"quantization": ["none", "nf4"]}, fixed={})
    check_budget(either, model, changed(small, budget_bytes=7 * GIB))


def test_experts_take_what_their_base_takes() -> None:
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    config = {"model_type": "mixtral", "num_local_experts": 8, "vocab_size": 32000}
    mixtral = ModelSpec("mixtral-8x7b", "directory", {**config, **sizes, **heads})
    assert (
        84 * GIB < least_weight_bytes(a_space(fixed={"quantization": "none"}), mixtral) < 87 * GIB
    )
    assert 21 * GIB < least_weight_bytes(a_space(), mixtral) < 22 * GIB
