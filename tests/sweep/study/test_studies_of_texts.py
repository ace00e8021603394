"""A study of texts, from what was typed to what is stored of it and of its trials."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qlora_sweep.reports.view import view_of
from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.errors import EnvironmentFault, InputError
from qlora_sweep.search_spaces.learning_rates import in_words, learning_rate_of
from qlora_sweep.storage.records import Measured, Outcome, OutOfMemory
from qlora_sweep.sweep.data.collation import split
from qlora_sweep.sweep.data.prepared_dataset import dataset_directory
from qlora_sweep.sweep.request import RunRequest
from qlora_sweep.sweep.running.replay import ReplayRunner
from qlora_sweep.sweep.study.prepared import Prepared, prepare, prepare_again
from tests.sweep.prepared_dataset import Reader, prepared_dataset
from tests.sweep.simulated_device import a_measurement
from tests.sweep.study.test_session import home as home
from tests.sweep.study.test_session import read, run
from tests.sweep.study.test_session import url as url


@pytest.fixture(autouse=True)
def dataset(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    (home / "mine.jsonl").write_text('{"text": "hello"}\n')


@pytest.fixture
def reader(home: Path) -> Reader:
    return Reader(prepared_dataset(home / "prepared"))


def prepared(
    reader: Reader,
    *,
    space: str = "cpu-demo",
    study: Any = None,
    fixed_settings: Any = None,
    **typed: Any,
) -> Prepared:
    """Prepare a study, or go on with it where a database is named under ``url``."""
    url = typed.pop("url", None)
    overrides = {"data": {"texts": "mine.jsonl"}, "confirm": False, "trials": 4} | typed
    return prepare(
        RunRequest(
            space=space, overrides=overrides, study=study, fixed_settings=fixed_settings or {}
        ),
        read_gpu=lambda: None,
        read_dataset=reader,
        stored=lambda name: read(url, name).definition if url else None,
    )


def own_space(home: Path, data: str = "mine.jsonl") -> dict[str, Any]:
    """Write a space file that names its texts; return what is typed then."""
    head = "gpu: cpu\nmodel: demo\nbudget_gib: 1\n"
    (home / "own.yaml").write_text(f"{head}data: {data}\ndimensions: {{seq_len: [64, 128]}}\n")
    return {"space": "own.yaml", "data": None}


def test_texts_that_are_named_are_kept_with_the_study(reader: Reader, home: Path) -> None:
    what = prepared(reader)
    (asked,) = reader.asked
    assert asked.source == str(home / "mine.jsonl")
    assert asked.model == what.model
    assert what.definition.texts == reader.dataset.summary
    assert what.name == "cpu-demo-mine"


def test_a_presets_lengths_are_those_of_the_texts(reader: Reader, home: Path) -> None:
    what = prepared(reader)
    assert what.space.dimensions["seq_len"].values() == (384, 448)
    assert what.space.dimensions["packing"].values() == ("none", "packed", "grouped")
    assert what.space.baseline_config().packing == "none"
    assert len(what.notes) == 2
    held = prepared(reader, fixed_settings={"seq_len": 128, "packing": "packed"})
    assert held.space.fixed.items() >= {"seq_len": 128, "packing": "packed"}.items()
    assert not {"seq_len", "packing"} & set(held.space.dimensions)
    # A length that was typed is kept, and what it costs is said.
    (said,) = held.notes
    assert "Length 128 cuts 140 of the 200 examples" in said
    assert prepared(reader, fixed_settings={"seq_len": 448, "packing": "packed"}).notes == ()
    # Those of a file of one's own are kept.
    own = prepared(reader, **own_space(home))
    assert own.space.dimensions["seq_len"].values() == (64, 128)
    assert own.name == "own"


def write_model(home: Path) -> None:
    """Write the demo's model with a file of no weights."""
    (home / "model").mkdir()
    shipped = Path(__file__).parents[3] / "search_spaces/architectures/demo.json"
    (home / "model/config.json").write_text(shipped.read_text())
    (home / "model/model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")


def test_texts_of_which_nothing_can_be_asked_are_refused_before_anything_runs(home: Path) -> None:
    """Of rows of one token nothing is predicted, and one row is held out."""
    (home / "own.yaml").write_text(
        "gpu: cpu\nmodel: ./model\nweights: pretrained\nbudget_gib: 1\ndata: mine.jsonl\n"
        "objectives: [tokens_per_second, eval_loss]\n"
        "dimensions: {lora_rank: [4, 8]}\nfixed: {seq_len: 64, micro_batch_size: 2}\n"
    )
    write_model(home)
    _, (held,) = split(8, 0.05, 0)
    lengths = [20] * 8
    answers = Reader(prepared_dataset(home / "answers", lengths))
    assert prepared(answers, space="own.yaml", data=None).epochs is not None
    lengths[held] = 1
    with pytest.raises(InputError, match="no row with a token that carries loss in its first 64 "):
        prepared(Reader(prepared_dataset(home / "none", lengths)), space="own.yaml", data=None)


@pytest.mark.parametrize("searched", ["", "learning_rate: {low: 1e-4, high: 1e-2, log: true}"])
def test_a_search_for_loss_begins_at_the_rate_of_the_rule(home: Path, searched: str) -> None:
    (home / "own.yaml").write_text(
        "gpu: cpu\nmodel: ./model\nweights: pretrained\nbudget_gib: 1\ndata: mine.jsonl\n"
        "objectives: [eval_loss]\nfixed: {seq_len: 64, micro_batch_size: 2}\n"
        f"dimensions:\n  lora_rank: [4, 8]\n  {searched}\n"
    )
    write_model(home)
    answers = Reader(prepared_dataset(home / "answers", [20] * 8))
    found = prepared(answers, space="own.yaml", data=None)
    first = found.space.baseline_config()
    rule = learning_rate_of(first, found.model.config)
    assert first.learning_rate == (rule.recommended if searched else None)
    assert rule.value == rule.recommended
    (said,) = (note for note in found.notes if "learning rate" in note)
    assert in_words(rule.value) in said
    assert in_words(rule.high) in said
    # What is fixed is asked for.
    fixed = prepared(answers, space="own.yaml", data=None, fixed_settings={"learning_rate": 3e-3})
    assert fixed.space.baseline_config().learning_rate == 3e-3
    assert not any("learning rate" in note for note in fixed.notes)


def test_typed_texts_take_the_place_of_a_files(reader: Reader, home: Path) -> None:
    own_space(home, "{texts: other.jsonl, text_column: body, eval_fraction: 0.2}")
    data = prepared(reader, space="own.yaml").space.data
    assert (data.texts, data.text_column) == (str(home / "mine.jsonl"), None)
    assert data.eval_fraction == 0.2


def test_what_can_be_refused_without_reading_texts_is(reader: Reader) -> None:
    with pytest.raises(InputError, match=r"data.text_column is about a dataset.*--data"):
        prepared(reader, data={"text_column": "x"})
    with pytest.raises(InputError, match="packing packed needs a dataset"):
        prepared(reader, data=None, fixed_settings={"packing": "packed"})
    with pytest.raises(EnvironmentFault, match="no NVIDIA GPU"):
        prepared(reader, space="a10")
    assert reader.asked == []


def fitting(config: TrialConfig) -> Outcome:
    measured = a_measurement(config, peak_allocated_bytes=2**20, trainable_parameters=1000)
    return Measured(measurement=measured)


def driven(what: Prepared, url: str, otherwise: Any = fitting) -> ReplayRunner:
    runner = ReplayRunner(otherwise=otherwise)
    run(what, url, new_runner=lambda _: runner)
    return runner


def test_each_trial_keeps_what_an_epoch_is_to_it(reader: Reader, url: str) -> None:
    what = prepared(reader)
    driven(what, url)
    snapshot = read(url, what.name)
    tokens = int(reader.dataset.summary.tokens)
    for record in snapshot.records:
        assert record.epoch.rows + record.epoch.rows_left_out == 190
        assert 0 < record.epoch.loss_tokens < record.epoch.tokens < tokens
    best = view_of(snapshot).document()
    assert best["texts"]["fingerprint"] == "cafe"
    speed = best["target_tokens_per_second"]["value"]
    assert best["epoch"]["seconds"] == pytest.approx(best["epoch"]["loss_tokens"] / speed)


def test_a_study_goes_on_with_its_own_texts(reader: Reader, home: Path, url: str) -> None:
    what = prepared(reader, study="mine")
    driven(what, url)
    again = prepared(reader, study="mine", data=None, url=url)
    assert again.definition.texts == what.definition.texts
    assert len(reader.asked) == 2
    driven(again, url)
    # With what was prepared, where that is kept and the source is gone.
    kept = prepared_dataset(dataset_directory() / "cafe")
    (home / "mine.jsonl").unlink()
    again = prepared(reader, study="mine", data=None, url=url)
    assert again.dataset.directory == kept.directory
    stored = read(url, "mine").definition
    confirmed = prepare_again(
        "mine", stored, confirm={}, read_gpu=lambda: None, read_dataset=reader
    )
    assert confirmed.definition.texts == what.definition.texts
    assert len(reader.asked) == 2


def test_a_space_file_goes_on_without_its_texts(reader: Reader, home: Path, url: str) -> None:
    kept = prepared_dataset(dataset_directory() / "cafe")
    driven(prepared(reader, **own_space(home)), url)
    (home / "mine.jsonl").unlink()
    again = prepared(reader, **own_space(home), url=url)
    assert again.dataset.directory == kept.directory
    assert len(reader.asked) == 1
    other = own_space(home, "{texts: mine.jsonl, completions_only: true}")
    prepared(reader, **other, url=url)
    assert len(reader.asked) == 2


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ({"data": None}, r"dataset: .*cafe.* -> none"),
        ({"seed": 5}, "seed: 0 -> 5"),
        ({"data": {"texts": "mine.jsonl", "eval_fraction": 0.2}}, "eval_fraction: 0.05 -> 0.2"),
        ({}, r"dataset: .*cafe.* -> .*beef"),
    ],
)
def test_other_texts_are_refused(
    reader: Reader, home: Path, url: str, typed: dict[str, Any], said: str
) -> None:
    driven(prepared(reader, study="mine"), url)
    other = reader if typed else Reader(prepared_dataset(home / "other", fingerprint="beef"))
    with pytest.raises(InputError, match=said):
        driven(prepared(other, study="mine", **typed), url)


def test_a_micro_batch_that_the_texts_do_not_fill_never_runs(home: Path, url: str) -> None:
    few = Reader(prepared_dataset(home / "few", [20, 30, 40, 50]))
    with pytest.raises(InputError, match="micro_batch_size is 8 and the texts make 3 rows"):
        prepared(few, fixed_settings={"micro_batch_size": 8})
    what = prepared(few, trials=16, sampler="random")
    assert all(config.micro_batch_size <= 3 for config in driven(what, url).ran)
    records = read(url, what.name).records
    invalid = [r.outcome for r in records if r.verdict == "invalid"]
    rules = {getattr(outcome, "rule", "") for outcome in invalid}
    assert rules == {"texts-make-no-micro-batch", "grouped-needs-rows"}


def test_an_out_of_memory_says_nothing_of_packed_rows(reader: Reader, url: str) -> None:
    out_of_memory = OutOfMemory(stage="forward", step=0)
    what = prepared(reader, trials=16, sampler="random")
    driven(what, url, lambda c: out_of_memory if c.packing == "none" else fitting(c))
    records = read(url, what.name).records
    ran = [r for r in records if getattr(r.outcome, "rule", "") != "grouped-needs-rows"]
    verdicts = {r.verdict for r in ran if r.config.packing != "none"}
    assert verdicts <= {"fits", "pruned_slow"}
    assert any(r.verdict == "oom" for r in records)
