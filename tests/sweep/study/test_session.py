from __future__ import annotations

import shlex
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from typer.main import get_command

from search_spaces.config import TrialConfig
from search_spaces.errors import EnvironmentFault, InputError
from search_spaces.gpus import find_gpu
from search_spaces.loading import load_space, with_fixed
from search_spaces.space import SearchSpace
from storage.reading import list_studies, read_spooled_study, read_study
from storage.records import Measured, Outcome, TrialRecord
from storage.study import OpenStudy
from sweep import cli
from sweep.paths import runs_directory
from sweep.running.device_info import ChosenCard
from sweep.running.replay import ReplayRunner
from sweep.running.runner import Lane, Lanes, Observer, Runner, keep_going
from sweep.running.wire import TrialRequest
from sweep.study import session
from sweep.study.events import Event, Interruption, Listener, SpaceTraced, StopReason, TrialFinished
from sweep.study.session import Prepared, drive, prepare, prepare_again, supervised_runner
from sweep.terminal.driving import LocalGpus
from sweep.terminal.options import settings
from tests.sweep.imagined_memory import ImaginedPredictor
from tests.sweep.simulated_device import a_measurement, train
from tests.sweep.study.test_targets import a_card


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path))
    return tmp_path


def prepared(
    space: str = "cpu-demo",
    *,
    study: str | None = None,
    held: dict[str, Any] | None = None,
    **overrides: Any,
) -> Prepared:
    card = a_card("h200")
    return prepare(space, overrides=overrides, held=held, study=study, card=lambda: card)


def cards(*indices: int) -> tuple[ChosenCard, ...]:
    return tuple(ChosenCard(at, replace(a_card("h200"), uuid=f"GPU-{at}")) for at in indices)


def test_each_chosen_card_has_a_lane_or_as_many_as_a_trial_trains_on_together() -> None:
    alone = replace(prepared("a10", study="lanes"), cards=cards(0, 2))
    assert alone.cards_per_trial == 1
    found = supervised_runner(alone)
    assert [lane.name for lane in found.all] == ["GPU 0", "GPU 2"]

    both = prepared("a10", study="lanes", held={"data_parallel": 2})
    assert both.cards_per_trial == 2
    teams = supervised_runner(replace(both, cards=cards(0, 1, 2, 3, 4)))
    assert [lane.name for lane in teams.all] == ["GPU 0 and GPU 1", "GPU 2 and GPU 3"]
    assert [lane.name for lane in supervised_runner(prepared("a10", study="lanes")).all] == [""]


def test_a_trial_of_two_cards_takes_two_of_this_machine_or_is_refused() -> None:
    both = prepared("a10", study="lanes", held={"data_parallel": 2})
    where = LocalGpus("0,")
    where.cards = cards(0)
    with pytest.raises(InputError, match=r"data_parallel 2 trains on 2 GPUs at once, and 1 is"):
        where.given_to(both)
    where.cards = cards(0, 1)
    assert len(where.given_to(both).cards) == 2


def simulated(_: Prepared) -> Runner:
    return ReplayRunner(otherwise=train)


def small(_: Prepared) -> Runner:
    """A GPU on which everything fits the demo's budget."""
    return ReplayRunner(
        otherwise=lambda config: Measured(
            measurement=a_measurement(config, peak_allocated_bytes=2**20)
        )
    )


@contextmanager
def unwatched(_study: OpenStudy, _interruption: Interruption) -> Iterator[Listener]:
    yield lambda _event: None


def run(what: Prepared, storage: str, **changes: Any) -> StopReason:
    values: dict[str, Any] = {"watch": unwatched, "warn": lambda _: None, "new_runner": simulated}
    return drive(what, storage=storage, **(values | changes))


@pytest.mark.parametrize("count", [1, 2])
def test_with_several_lanes_tpe_shares_what_it_asks_for_with_those_that_run(
    home: Path, count: int
) -> None:
    what = prepared(sampler="tpe", trials=14, confirm=False)
    changes = {"dimensions": {"lora_rank": {"low": 1, "high": 64}}, "fixed": {}}
    space = SearchSpace.model_validate(what.space.model_dump() | changes)
    what = replace(what, definition=what.definition.model_copy(update={"space": space}))
    storage = f"sqlite:///{home}/sweep.db"

    def lanes(_: Prepared) -> Lanes:
        return Lanes([Lane(small(_), name=f"GPU {at}") for at in range(count)])

    run(what, storage, new_runner=lanes)
    (study,) = optuna.get_all_study_names(storage)
    trials = optuna.load_study(study_name=study, storage=storage).get_trials()
    shared = [trial for trial in trials if any("relative_params" in k for k in trial.system_attrs)]
    assert bool(shared) is (count > 1)


def test_what_was_typed_overrides_what_the_space_says() -> None:
    what = prepared(trials=3, seed=7, sampler="random", time_budget_seconds=60.0, model=None)
    assert (what.space.trials, what.space.seed, what.space.sampler) == (3, 7, "random")
    assert what.space.time_budget_seconds == 60.0
    assert what.model.name == what.space.model == "demo"
    assert what.target.device == "cpu"


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "a10"),
        ({"gpu": "a10"}, "a10"),
        ({"gpu": "l4"}, "a10-l4"),
        ({"model": "qwen3-8b"}, "a10-qwen3-8b"),
        ({"trials": 3}, "a10"),
        ({"study": "mine"}, "mine"),
        ({"held": {"lora_rank": 8}}, "a10-90cac3"),
        ({"held": {"lora_rank": 16}}, "a10-3803f1"),
        ({"held": {"double_quant": False}}, "a10"),
        ({"held": {"compile": True, "target_modules": "qv"}}, "a10-4edef8"),
    ],
)
def test_a_study_is_named_after_its_space_and_what_it_is_for(
    changes: dict[str, Any], name: str
) -> None:
    assert prepared("a10", **changes).name == name


def test_knobs_that_are_typed_are_held_and_the_rest_is_searched() -> None:
    free, what = prepared("a10").space, prepared("a10", held={"kernels": "liger", "seq_len": 512})
    assert what.space.fixed["kernels"] == "liger"
    assert what.space.fixed["seq_len"] == 512
    assert what.space.dimensions.keys() == free.dimensions.keys() - {"kernels", "seq_len"}


@pytest.mark.parametrize(("effective", "micro"), [(16, 4), (6, 3), (1, 1)])
def test_the_baselines_micro_batch_goes_into_an_effective_batch_that_is_typed(
    effective: int, micro: int
) -> None:
    held = {"effective_batch_size": effective}
    space = with_fixed(
        load_space("a10").model_copy(update={"baseline": {"micro_batch_size": 4}}), held
    )
    assert isinstance(space, SearchSpace)
    baseline = space.baseline_config()
    assert (baseline.micro_batch_size, baseline.effective_batch_size) == (micro, effective)


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ({"lora_rank": 0}, "lora_rank must be at least 1, got 0"),
        ({"kernels": "ligr"}, "kernels must be one of"),
    ],
)
def test_knobs_that_cannot_be_held_are_refused(held: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        prepared("a10", held=held)


def test_where_all_knobs_are_held_a_command_that_answers_is_named() -> None:
    """It is typed here, and asks about the configuration that was left."""
    held = {key: d.first for key, d in prepared("a10").space.dimensions.items()}
    held |= {"target_modules": ("v_proj", "q_proj"), "double_quant": False}
    with pytest.raises(InputError, match="nothing is left to search") as refusal:
        prepared("a10", held=held, model="demo")
    command, *words = shlex.split(str(refusal.value).partition(" with sweep ")[2])
    assert command == "plan"
    plan = get_command(cli.app).commands["plan"]  # type: ignore[attr-defined]
    typed = plan.make_context("plan", words).params
    assert typed["exact"]
    # With it goes the budget.
    assert typed["space"] == "a10"
    assert typed["gpu"] == ["a10"]
    assert typed["model"] == "demo"
    left = TrialConfig(**{**prepared("a10").space.fixed, **held})
    asked = settings(typed, typed["settings"])[0]
    assert asked["micro_batch_size"] == left.micro_batch_size
    assert list(asked["target_modules"]) == ["q_proj", "v_proj"]
    assert asked["double_quant"] is False


def test_on_a_cpu_no_prediction_is_named_where_all_knobs_are_held() -> None:
    held = {key: d.first for key, d in prepared().space.dimensions.items()}
    with pytest.raises(InputError, match=r"nothing is left to search: leave one of them out$"):
        prepared(held=held)


def test_a_bigger_card_is_said_to_stand_in() -> None:
    what = prepared("a10")
    assert what.target.gpu == "a10"
    assert what.target.emulated_on == a_card("h200").product


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"trials": 0}, "trials must be at least 1, got 0"),
        ({"sampler": "tpee"}, "sampler must be one of"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"gpu": "a11"}, "unknown GPU 'a11'"),
        ({"model": "mistral"}, "unknown model 'mistral'"),
    ],
)
def test_what_cannot_be_is_refused_naming_key_and_value(
    home: Path, overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        prepared("a10", **overrides)
    assert list(home.iterdir()) == []


def test_how_the_winner_is_confirmed_can_be_typed() -> None:
    declared = prepared("a10").space.confirm
    assert declared is not None
    assert prepared("a10", confirm=False).space.confirm is None
    longer = prepared("a10", confirm={"soak_seconds": 600.0}).space.confirm
    assert longer == declared.model_copy(update={"soak_seconds": 600.0})
    assert prepared("a10", confirm={"soak_seconds": 600.0}).name == "a10"
    with pytest.raises(InputError, match="soak_seconds"):
        prepared("a10", confirm={"soak_seconds": -1.0})


def test_a_stored_study_is_measured_again_on_its_own_terms(home: Path) -> None:
    url = f"sqlite:///{home}/runs/sweep.db"
    run(prepared(trials=3, seed=7, confirm=False), url, new_runner=small)
    stored = read_study("cpu-demo", url=url, home=runs_directory())
    assert stored.confirmations == ()
    what = prepare_again(
        "cpu-demo", stored.definition, confirm={"soak_seconds": 1.0}, card=lambda: None
    )
    assert (what.name, what.space.seed, what.space.trials) == ("cpu-demo", 7, 3)
    assert run(what, url, is_anew=True, new_runner=small) is StopReason.CONFIRMED
    again = read_study("cpu-demo", url=url, home=runs_directory())
    assert len(again.records) == 3
    assert {run.purpose for run in again.confirmations} == {"confirm", "soak"}
    assert again.definition.space.confirm is not None
    assert again.definition.space.confirm.soak_seconds == 1.0


def test_on_another_card_than_the_studys_nothing_is_measured_again(home: Path) -> None:
    url = f"sqlite:///{home}/runs/sweep.db"
    h200, a10 = prepared("a10", gpu="auto"), a_card("a10")
    what = prepare_again(h200.name, h200.definition, confirm={}, card=lambda: a10)
    run(h200, url, watch=stopping_at_once)
    with pytest.raises(InputError, match="another definition"):
        run(what, url, is_anew=True)


@contextmanager
def stopping_at_once(_: OpenStudy, interruption: Interruption) -> Iterator[Listener]:
    interruption.request()
    yield lambda _event: None


def test_a_space_for_the_cpu_does_not_look_for_a_card() -> None:
    def read() -> None:
        raise AssertionError("the GPU was read")

    prepare("cpu-demo", overrides={}, study=None, card=read)


def test_a_gpu_named_over_a_space_for_the_cpu_has_its_own_budget() -> None:
    assert prepared(gpu="a10").target.budget_bytes == find_gpu("a10").budget_bytes
    assert prepared().target.budget_bytes == 28 * 2**20


def test_without_a_card_a_gpu_preset_is_refused_with_advice() -> None:
    with pytest.raises(EnvironmentFault, match="sweep plan"):
        prepare("a10", overrides={}, study=None, card=lambda: None)


def test_a_study_is_driven_to_its_end_and_resumed(home: Path) -> None:
    url = f"sqlite:///{home}/runs/sweep.db"
    assert run(prepared(trials=3), url) is StopReason.TRIALS_SPENT
    seen: list[bool] = []

    @contextmanager
    def watch(study: OpenStudy, _: Interruption) -> Iterator[Listener]:
        seen.append(study.was_resumed)
        yield lambda _event: None

    run(prepared(trials=5), url, watch=watch)
    assert seen == [True]
    assert len(read_study("cpu-demo", url=url, home=runs_directory()).records) == 5


class Meddled(ReplayRunner):
    """A runner beside which somebody closes the trials of a batch in the database."""

    def __init__(self, url: str, *, batch: int) -> None:
        super().__init__(otherwise=train)
        self._path = url.removeprefix("sqlite:///")
        self._batch = batch

    def run(self, request: TrialRequest, *, observe: Observer = keep_going) -> Outcome:
        outcome = super().run(request, observe=observe)
        if request.config.micro_batch_size == self._batch:
            with closing(sqlite3.connect(self._path)) as database, database:
                database.execute("UPDATE trials SET state = 'FAIL' WHERE state = 'RUNNING'")
        return outcome


def test_results_of_trials_that_somebody_closed_are_kept_and_taken_over_from_the_spool(
    home: Path,
) -> None:
    url = f"sqlite:///{home}/runs/sweep.db"
    batch = prepared().space.baseline_config().micro_batch_size
    meddled, said, told = Meddled(url, batch=batch), list[str](), list[TrialRecord]()

    @contextmanager
    def watch(_study: OpenStudy, _interruption: Interruption) -> Iterator[Listener]:
        yield lambda e: told.append(e.record) if isinstance(e, TrialFinished) else None

    what = prepared(sampler="random", trials=6, confirm=False, budget_gib=100.0)
    run(what, url, watch=watch, warn=said.append, new_runner=lambda _: meddled)
    assert len(meddled.ran) == len(set(meddled.ran)) == len(told) == 6
    closed = [c for c in meddled.ran if c.micro_batch_size == batch]
    assert closed
    assert {r.verdict == "lost" for r in told if r.config in closed} == {True}
    assert all(r.verdict != "lost" for r in told if r.config not in closed)
    spool = home / "runs" / "cpu-demo" / "spool.jsonl"
    command = f"sweep run SPACE --study cpu-demo --from {spool}"
    assert sum(command in line for line in said) == len(closed)
    snapshot = read_study("cpu-demo", url=url, home=runs_directory())
    assert [command in line for line in snapshot.warnings] == [True]

    again = ReplayRunner(otherwise=train)
    source = read_spooled_study(spool)
    run(what, url, carried=source, new_runner=lambda _: again)
    assert not set(again.ran) & set(closed)
    snapshot = read_study("cpu-demo", url=url, home=runs_directory())
    taken = [r for r in snapshot.records if r.carried is not None]
    assert {r.config for r in taken} == set(closed)
    assert sum(r.device_seconds for r in taken) == 0.0
    assert snapshot.warnings == ()


def test_a_spool_of_a_study_for_another_card_is_refused(home: Path) -> None:
    url = f"sqlite:///{home}/runs/sweep.db"
    run(prepared(trials=1, confirm=False), url)
    source = read_spooled_study(home / "runs" / "cpu-demo" / "spool.jsonl")
    with pytest.raises(InputError, match="measured under other conditions"):
        run(prepared("a10"), url, carried=source)
    assert [s.name for s in list_studies(url, runs_directory())] == ["cpu-demo"]


@pytest.mark.parametrize("content", ["", "garbage\n"])
def test_a_file_without_results_is_no_spool(home: Path, content: str) -> None:
    path = home / "spool.jsonl"
    with pytest.raises(InputError, match="no such file"):
        read_spooled_study(path)
    path.write_text(content)
    with pytest.raises(InputError, match="no result"):
        read_spooled_study(path)


def test_a_spool_without_what_it_was_measured_on_is_refused(home: Path) -> None:
    url = f"sqlite:///{home}/runs/sweep.db"
    run(prepared(trials=1, confirm=False), url)
    moved = home / "spool.jsonl"
    (home / "runs" / "cpu-demo" / "spool.jsonl").rename(moved)
    with pytest.raises(InputError, match=r"study\.json"):
        read_spooled_study(moved)


def test_a_listener_that_asks_to_stop_is_heard(home: Path) -> None:
    @contextmanager
    def watch(_study: OpenStudy, interruption: Interruption) -> Iterator[Listener]:
        def listen(_: Event) -> None:
            interruption.request()

        yield listen

    url = f"sqlite:///{home}/runs/sweep.db"
    assert run(prepared(trials=3), url, watch=watch) is StopReason.INTERRUPTED


class EagerRunner(ReplayRunner):
    """Notes what was done to it, in order."""

    def __init__(self) -> None:
        super().__init__(otherwise=train)
        self.calls: list[str] = []

    def start(self) -> None:
        self.calls.append("start")

    def run(self, *arguments: Any, **options: Any) -> Any:
        self.calls.append("run")
        return super().run(*arguments, **options)

    def close(self) -> None:
        self.calls.append("close")


def test_the_runner_is_started_before_the_space_is_traced_and_closed_in_the_end(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, told = EagerRunner(), []

    class Tracing(ImaginedPredictor):
        def predict_all(self, configs: Any, *, on_progress: Any = None) -> Any:
            if "trace" not in runner.calls:
                on_progress(0, 2)
                runner.calls.append("trace")
                on_progress(2, 2)
            return super().predict_all(configs)

    predictor = Tracing()
    monkeypatch.setattr(session, "TracingPredictor", lambda *_, **__: predictor)

    @contextmanager
    def watch(_study: OpenStudy, _interruption: Interruption) -> Iterator[Listener]:
        yield told.append

    url = f"sqlite:///{home}/runs/sweep.db"
    run(prepared("a10", trials=1), url, watch=watch, new_runner=lambda _: runner)
    assert runner.calls == ["start", "trace", "run", "close"]
    assert told[:2] == [SpaceTraced(0, 2), SpaceTraced(2, 2)]
    assert {c.kernels for c in predictor.asked} == {"hf", "fused-loss", "liger"}


def test_measuring_again_alone_traces_nothing_however_many_trials_are_left(home: Path) -> None:
    url = f"sqlite:///{home}/runs/sweep.db"
    run(prepared(trials=3, confirm=False), url, new_runner=small)
    stored = read_study("cpu-demo", url=url, home=runs_directory()).definition
    runner = EagerRunner()
    what = prepare_again(
        "cpu-demo",
        stored.model_copy(update={"space": stored.space.model_copy(update={"trials": 9})}),
        confirm={},
        card=lambda: None,
    )
    run(what, url, is_anew=True, new_runner=lambda _: runner)
    assert runner.calls[0] == "run"
    assert "start" not in runner.calls


def test_a_request_to_stop_while_the_space_is_traced_stops_before_the_first_trial(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Tracing(ImaginedPredictor):
        def predict_all(self, configs: Any, *, on_progress: Any = None) -> Any:
            for done in range(3):
                on_progress(done, 2)
            raise AssertionError("it went on")

    runner = EagerRunner()
    monkeypatch.setattr(session, "TracingPredictor", lambda *_, **__: Tracing())

    @contextmanager
    def watch(_study: OpenStudy, interruption: Interruption) -> Iterator[Listener]:
        yield lambda _event: interruption.request()

    url = f"sqlite:///{home}/runs/sweep.db"
    reason = run(prepared("a10"), url, watch=watch, new_runner=lambda _: runner)
    assert reason is StopReason.INTERRUPTED
    assert runner.calls == ["start", "close"]
    monkeypatch.setattr(session, "TracingPredictor", lambda *_, **__: ImaginedPredictor())
    assert run(prepared("a10", trials=1), url) is StopReason.TRIALS_SPENT


def test_what_cannot_be_traced_is_warned_of_and_the_study_goes_on(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Faulty(ImaginedPredictor):
        def predict_all(self, configs: Any, *, on_progress: Any = None) -> Any:
            raise EnvironmentFault("the tracing process gave no answer")

    monkeypatch.setattr(session, "TracingPredictor", lambda *_, **__: Faulty())
    warnings: list[str] = []
    url = f"sqlite:///{home}/runs/sweep.db"
    reason = run(prepared("a10", trials=1), url, warn=warnings.append)
    assert reason is StopReason.TRIALS_SPENT
    assert [text for text in warnings if "gave no answer" in text]


def test_a_study_with_nothing_left_to_run_starts_no_runner(home: Path) -> None:
    url = f"sqlite:///{home}/runs/sweep.db"
    run(prepared(trials=1), url)
    runner = EagerRunner()
    reason = run(prepared(trials=1), url, new_runner=lambda _: runner)
    assert reason is StopReason.TRIALS_SPENT
    assert runner.calls == ["close"]


def test_what_the_driver_says_of_the_card_stays_with_the_study(home: Path) -> None:
    url = f"sqlite:///{home}/runs/sweep.db"
    run(prepared("a10"), url, watch=stopping_at_once)
    environment = read_study("a10", url=url, home=runs_directory()).environment
    told = [environment[key] for key in ("device", "gpu", "driver", "cuda_driver")]
    assert told == ["cuda", a_card("h200").product, "570.1", "12.8"]


def test_another_space_under_the_same_name_is_refused(home: Path) -> None:
    url = f"sqlite:///{home}/runs/sweep.db"
    run(prepared(trials=1, study="night"), url)
    other = home / "other.yaml"
    other.write_text(
        "gpu: cpu\nmodel: demo\nbudget_gib: 1\ndimensions: {micro_batch_size: [1, 2]}\n"
    )
    with pytest.raises(InputError, match="another definition"):
        run(prepared(str(other), study="night"), url)


@pytest.mark.parametrize(
    ("fixed", "said"),
    [
        ("target_modules: [nope_proj]", "no linear module 'nope_proj'"),
        ("kernels: liger", "need CUDA"),
    ],
)
def test_a_space_in_which_nothing_can_be_valid_is_refused(
    tmp_path: Path, fixed: str, said: str
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "name: mine\ngpu: cpu\nmodel: demo\nbudget_gib: 0.1\n"
        f"dimensions:\n  micro_batch_size: [1, 2]\nfixed:\n  {fixed}\n"
    )
    with pytest.raises(InputError, match=said):
        prepared(str(file))


def a_t4_space(directory: Path, dtypes: str) -> str:
    file = directory / "mine.yaml"
    file.write_text(
        "name: mine\ngpu: t4\ndimensions:\n"
        "  lora_rank: {low: 1, high: 256}\n"
        f"  compute_dtype: [{dtypes}]\n"
    )
    return str(file)


@pytest.mark.parametrize("dtypes", ["bf16, fp16", "fp16, bf16"])
def test_a_space_with_anything_valid_in_it_is_taken(tmp_path: Path, dtypes: str) -> None:
    assert prepared(a_t4_space(tmp_path, dtypes)).target.gpu == "t4"


def test_a_large_space_with_nothing_valid_in_it_is_refused_naming_the_rule(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no configuration is valid: bf16-needs-ampere: bf16"):
        prepared(a_t4_space(tmp_path, "bf16"))
