"""A study of texts, from what was typed to what is stored of it and of its trials."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reports.view import view_of
from search_spaces.config import TrialConfig
from search_spaces.errors import EnvironmentFault, InputError
from storage.definition import StudyDefinition
from storage.reading import read_study
from storage.records import Measured, Outcome, OutOfMemory
from sweep.data.rows import split
from sweep.data.texts import texts_directory
from sweep.paths import runs_directory
from sweep.running.replay import ReplayRunner
from sweep.study.session import Prepared, prepare, prepare_again
from tests.sweep.prepared_texts import Reader, prepared_texts
from tests.sweep.simulated_device import a_measurement
from tests.sweep.study.test_session import run


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.jsonl").write_text('{"text": "hello"}\n')
    return tmp_path


@pytest.fixture
def reader(home: Path) -> Reader:
    return Reader(prepared_texts(home / "prepared"))


def prepared(reader: Reader, *, space: str = "cpu-demo", **changes: Any) -> Prepared:
    overrides = {"data": {"texts": "mine.jsonl"}, "confirm": False, "trials": 4}
    options = {"study": None, "held": None, "stored": lambda _: None}
    for key in (*options,):
        options[key] = changes.pop(key, options[key])
    return prepare(
        space,
        overrides=overrides | changes,
        card=lambda: None,
        read_texts=reader,
        **options,  # type: ignore[arg-type]
    )


def stored(url: str, name: str) -> StudyDefinition:
    return read_study(name, url=url, home=runs_directory()).definition


def test_texts_that_are_named_are_read_for_the_model_and_held_with_the_study(
    reader: Reader, home: Path
) -> None:
    what = prepared(reader)
    (asked,) = reader.asked
    assert asked.source == str(home / "mine.jsonl")
    assert asked.model == what.model
    assert what.definition.texts == reader.texts.summary
    assert what.name == "cpu-demo-mine"


def test_a_presets_lengths_are_those_of_the_texts_and_packing_is_searched(reader: Reader) -> None:
    what = prepared(reader)
    assert what.space.dimensions["seq_len"].values() == (384, 448)
    assert what.space.dimensions["packing"].values() == ("none", "packed", "grouped")
    assert what.space.baseline_config().packing == "none"
    assert len(what.notes) == 2


def test_knobs_that_are_typed_are_held_with_texts_as_well(reader: Reader) -> None:
    what = prepared(reader, held={"seq_len": 128, "packing": "packed"})
    assert what.space.fixed["seq_len"] == 128
    assert what.space.fixed["packing"] == "packed"
    assert not {"seq_len", "packing"} & set(what.space.dimensions)
    assert what.notes == ()


def test_lengths_of_a_space_file_of_ones_own_are_kept(reader: Reader, home: Path) -> None:
    text = (
        "gpu: cpu\nmodel: demo\nbudget_gib: 1\ndata: mine.jsonl\ndimensions: {seq_len: [64, 128]}\n"
    )
    (home / "own.yaml").write_text(text)
    what = prepared(reader, space="own.yaml", data=None)
    assert what.space.dimensions["seq_len"].values() == (64, 128)
    assert what.name == "own"


def test_texts_of_which_nothing_can_be_asked_are_refused_before_anything_runs(home: Path) -> None:
    """Of rows of one token nothing is predicted, and one row is held out."""
    (home / "own.yaml").write_text(
        "gpu: cpu\nmodel: ./model\nweights: pretrained\nbudget_gib: 1\ndata: mine.jsonl\n"
        "objectives: [tokens_per_second, eval_loss]\n"
        "dimensions: {lora_rank: [4, 8]}\nfixed: {seq_len: 64, micro_batch_size: 2}\n"
    )
    (home / "model").mkdir()
    shipped = Path(__file__).parents[3] / "search_spaces/architectures/demo.json"
    (home / "model/config.json").write_text(shipped.read_text())
    (home / "model/model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    _, (held,) = split(8, 0.05, 0)
    lengths = [20] * 8
    answers = Reader(prepared_texts(home / "answers", lengths))
    assert prepared(answers, space="own.yaml", data=None).epochs is not None
    lengths[held] = 1
    with pytest.raises(InputError, match="no row with a token that carries loss in its first 64 "):
        prepared(Reader(prepared_texts(home / "none", lengths)), space="own.yaml", data=None)


@pytest.mark.parametrize("key", ["text_column", "format", "completions_only", "tokenizer"])
def test_what_is_said_of_texts_that_nobody_named_is_refused(reader: Reader, key: str) -> None:
    value = {"format": "text", "completions_only": True}.get(key, "x")
    with pytest.raises(InputError, match=f"data.{key} is about a dataset.*--data"):
        prepared(reader, data={key: value})
    assert reader.asked == []


def test_typed_texts_take_the_place_of_a_files_with_what_was_said_of_its_rows(
    reader: Reader, home: Path
) -> None:
    (home / "own.yaml").write_text(
        "gpu: cpu\nmodel: demo\nbudget_gib: 1\n"
        "data: {texts: other.jsonl, text_column: body, eval_fraction: 0.2}\n"
        "dimensions: {lora_rank: [4, 8]}\n"
    )
    data = prepared(reader, space="own.yaml").space.data
    assert (data.texts, data.text_column) == (str(home / "mine.jsonl"), None)
    assert data.eval_fraction == 0.2


def test_what_can_be_refused_without_reading_texts_is(reader: Reader) -> None:
    with pytest.raises(InputError, match="packing packed needs a dataset"):
        prepared(reader, data=None, held={"packing": "packed"})
    with pytest.raises(EnvironmentFault, match="no NVIDIA GPU"):
        prepared(reader, space="a10")
    assert reader.asked == []


def fitting(config: TrialConfig) -> Outcome:
    return Measured(measurement=a_measurement(config, peak_allocated_bytes=2**20))


def driven(what: Prepared, url: str, otherwise: Any = fitting) -> None:
    run(what, url, new_runner=lambda _: ReplayRunner(otherwise=otherwise))


def test_each_trial_keeps_what_an_epoch_is_to_it(reader: Reader, home: Path) -> None:
    url = f"sqlite:///{home}/runs/sweep.db"
    what = prepared(reader)
    driven(what, url)
    snapshot = read_study(what.name, url=url, home=runs_directory())
    tokens = int(reader.texts.summary.tokens)
    for record in snapshot.records:
        assert record.epoch.rows + record.epoch.rows_left_out == 190
        assert 0 < record.epoch.loss_tokens < record.epoch.tokens < tokens
    best = view_of(snapshot).document()
    assert best["texts"]["fingerprint"] == "cafe"
    speed = best["target_tokens_per_second"]["value"]
    assert best["epoch"]["seconds"] == pytest.approx(best["epoch"]["loss_tokens"] / speed)


def test_a_study_goes_on_with_its_own_texts_where_nobody_names_any(
    reader: Reader, home: Path
) -> None:
    url = f"sqlite:///{home}/runs/sweep.db"
    what = prepared(reader, study="mine")
    driven(what, url)
    again = prepared(reader, study="mine", data=None, stored=lambda name: stored(url, name))
    assert again.definition.texts == what.definition.texts
    assert len(reader.asked) == 2
    driven(again, url)


def test_a_study_goes_on_with_what_was_prepared_where_the_source_is_gone(
    reader: Reader, home: Path
) -> None:
    url = f"sqlite:///{home}/runs/sweep.db"
    kept = prepared_texts(texts_directory() / "cafe")
    what = prepared(reader, study="mine")
    driven(what, url)
    (home / "mine.jsonl").unlink()
    again = prepared(reader, study="mine", data=None, stored=lambda name: stored(url, name))
    assert again.texts.directory == kept.directory
    assert len(reader.asked) == 1
    confirmed = prepare_again(
        "mine", stored(url, "mine"), confirm={}, card=lambda: None, read_texts=reader
    )
    assert confirmed.definition.texts == what.definition.texts
    assert len(reader.asked) == 1


def test_a_space_file_goes_on_where_the_texts_that_it_names_are_gone(
    reader: Reader, home: Path
) -> None:
    url = f"sqlite:///{home}/runs/sweep.db"
    text = "gpu: cpu\nmodel: demo\nbudget_gib: 1\ndata: {}\ndimensions: {{lora_rank: [4, 8]}}\n"
    (home / "own.yaml").write_text(text.format("mine.jsonl"))
    kept = prepared_texts(texts_directory() / "cafe")
    driven(prepared(reader, space="own.yaml", data=None), url)
    (home / "mine.jsonl").unlink()
    again = prepared(reader, space="own.yaml", data=None, stored=lambda name: stored(url, name))
    assert again.texts.directory == kept.directory
    assert len(reader.asked) == 1
    (home / "own.yaml").write_text(text.format("{texts: mine.jsonl, completions_only: true}"))
    prepared(reader, space="own.yaml", data=None, stored=lambda name: stored(url, name))
    assert len(reader.asked) == 2


@pytest.mark.parametrize("changed", ["texts", "none", "seed", "eval_fraction"])
def test_a_study_is_not_gone_on_with_on_other_texts(
    reader: Reader, home: Path, changed: str
) -> None:
    url = f"sqlite:///{home}/runs/sweep.db"
    driven(prepared(reader, study="mine"), url)
    match changed:
        case "texts":
            other = prepared_texts(home / "other", fingerprint="beef")
            what, said = prepared(Reader(other), study="mine"), r"texts: .*cafe.* -> .*beef"
        case "none":
            what, said = prepared(reader, study="mine", data=None), r"texts: .*cafe.* -> none"
        case "seed":
            what, said = prepared(reader, study="mine", seed=5), "seed: 0 -> 5"
        case _:
            data = {"texts": "mine.jsonl", "eval_fraction": 0.2}
            what, said = prepared(reader, study="mine", data=data), "eval_fraction: 0.05 -> 0.2"
    with pytest.raises(InputError, match=said):
        driven(what, url)


def test_a_micro_batch_that_the_texts_do_not_fill_never_runs(home: Path) -> None:
    url = f"sqlite:///{home}/runs/sweep.db"
    few = Reader(prepared_texts(home / "few", [20, 30, 40, 50]))
    with pytest.raises(InputError, match="micro_batch_size is 8 and the texts make 3 rows"):
        prepared(few, held={"micro_batch_size": 8})
    what = prepared(few, trials=30, sampler="random")
    ran: list[TrialConfig] = []

    def runs(config: TrialConfig) -> Outcome:
        ran.append(config)
        return fitting(config)

    driven(what, url, runs)
    assert all(config.micro_batch_size <= 3 for config in ran)
    records = read_study(what.name, url=url, home=runs_directory()).records
    invalid = [r.outcome for r in records if r.verdict == "invalid"]
    assert invalid
    assert all(getattr(o, "rule", "") == "texts-make-no-micro-batch" for o in invalid)
    assert all("smaller micro_batch_size" in getattr(o, "detail", "") for o in invalid)


def test_an_out_of_memory_of_unpacked_rows_says_nothing_of_packed_ones(
    reader: Reader, home: Path
) -> None:
    url = f"sqlite:///{home}/runs/sweep.db"
    out_of_memory = OutOfMemory(stage="forward", step=0)
    what = prepared(reader, trials=30, sampler="random")
    driven(what, url, lambda c: out_of_memory if c.packing == "none" else fitting(c))
    records = read_study(what.name, url=url, home=runs_directory()).records
    verdicts = {r.verdict for r in records if r.config.packing != "none"}
    assert verdicts <= {"fits", "pruned_slow"}
    assert any(r.verdict == "oom" for r in records)
