"""What a length cuts off a dataset: counted for every kind of examples, said before the first step,
and refused where it is much and nobody agrees; and lengths that nobody measured.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.dataset_choice import CUT_MAX, DatasetChoice
from qlora_sweep.search_spaces.errors import InputError, NothingFits
from qlora_sweep.search_spaces.models import load_model_spec
from qlora_sweep.sweep.data.collation import split
from qlora_sweep.sweep.data.prepared_dataset import prepare_dataset
from qlora_sweep.sweep.data.study_epochs import StudyEpochs, TruncatedDataset
from qlora_sweep.sweep.export.record import record_of
from qlora_sweep.sweep.finetuning.planned import longer
from qlora_sweep.sweep.finetuning.training import (
    PreparedTraining,
    TrainingRequest,
    prepare_training,
)
from qlora_sweep.sweep.predict.memory.prediction import Fit
from qlora_sweep.sweep.running.device_info import GpuInfo
from tests.sweep.export.studies import a_measurement, a_study
from tests.sweep.typed import Sweep

A10 = GpuInfo("NVIDIA A10", 24 * 2**30, 23 * 2**30, (8, 6), None, None)
DEMO = load_model_spec("demo")
SHORT = {"micro_batch_size": 2, "seq_len": 24, "optimizer": "adamw_torch_fused"}
SO = "so it goes "

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("our_own_code")]


def a_chat(n: int) -> dict[str, Any]:
    ask, answer = {"role": "user"}, {"role": "assistant"}
    first = [ask | {"content": f"What of {n}?"}, answer | {"content": f"It is {SO * (n % 4)}."}]
    return {"messages": [*first, ask | {"content": SO * (n % 5 + 1)}, answer | {"content": "Yes."}]}


KINDS: Mapping[str, Any] = {
    "text": lambda n: {"text": f"Row {n} says {SO * (n % 9)}and ends."},
    "messages": a_chat,
    "prompt-completion": lambda n: {
        "prompt": f"Say {SO * (n % 6)}: ",
        "completion": f"{SO * (n % 7)} {n}.",
    },
    "preference": lambda n: {
        "prompt": f"Say {SO * (n % 6)}: ",
        "chosen": f"{SO * (n % 7)} {n}.",
        "rejected": f"{SO * (n % 3)} no {n}.",
    },
}


@pytest.fixture
def rows(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Forty plain texts, the longest of some sixty tokens, and a configuration that cuts them."""
    monkeypatch.chdir(home)
    write(home / "rows.jsonl", "text")
    (home / "short.json").write_text(json.dumps(SHORT))
    return home


def write(path: Path, kind: str, count: int = 40) -> None:
    lines = (json.dumps(KINDS[kind](n)) for n in range(count))
    path.write_text("".join(f"{line}\n" for line in lines))


def prepared(home: Path, *, gpus: Any = (), **asked: Any) -> PreparedTraining:
    """Return a training of the demo model on ``rows.jsonl``, as it is resolved."""
    asked["dataset"] = {"texts": str(home / "rows.jsonl"), **asked.get("dataset", {})}
    given = {"model": "demo", **asked}
    request = TrainingRequest(name=str(home / "short.json"), output=home / "out", **given)

    def nothing_is_read(name: str) -> Any:
        raise AssertionError(f"{name} is no study")

    def warned(words: str) -> None:
        raise AssertionError(words)

    return prepare_training(
        request,
        read_study=nothing_is_read,
        read_dataset=prepare_dataset,
        read_gpus=lambda: gpus,
        warn=warned,
    )


def counted(directory: Path, numbers: Any, seq_len: int, each: int) -> dict[str, int]:
    """Count in the tokens themselves what a length leaves of some rows."""
    from datasets import load_from_disk

    tokens = load_from_disk(str(directory / "tokens"), keep_in_memory=True).with_format("numpy")
    found = {"examples": 0, "examples_cut": 0, "examples_left_out": 0}
    found |= {"supervised_tokens": 0, "supervised_tokens_cut": 0}
    for first in numbers[::each]:
        members = [tokens[int(first) + i] for i in range(each)]
        whole = [int(m["completion_mask"][1:].sum()) for m in members]
        left = [int(m["completion_mask"][1:seq_len].sum()) for m in members]
        starts = [m["input_ids"][:seq_len].tolist() for m in members]
        is_used = min(left) > 0 and (each == 1 or starts[0] != starts[1])
        found["examples"] += 1
        found["examples_cut"] += any(len(m["input_ids"]) > seq_len for m in members)
        found["examples_left_out"] += not is_used
        found["supervised_tokens"] += sum(whole)
        found["supervised_tokens_cut"] += sum(whole) - sum(left) * is_used
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "config", "dataset"),
    [
        ("text", {"packing": "packed"}, {}),
        ("messages", {"packing": "grouped"}, {"completions_only": True}),
        ("prompt-completion", {}, {}),
        ("preference", {"method": "dpo"}, {}),
    ],
)
def test_what_is_cut_is_counted_in_the_examples_of_every_kind(
    rows: Path, kind: str, config: dict[str, Any], dataset: dict[str, Any]
) -> None:
    write(rows / "rows.jsonl", kind)
    (rows / "short.json").write_text(json.dumps(SHORT | config))
    found = prepared(rows, dataset={"eval_fraction": 0.2, **dataset}, seed=3)
    each = 2 if kind == "preference" else 1
    directory = found.dataset.directory
    count = len(np.load(directory / "lengths.npy"))
    parts = split(count, 0.2, 3, each)
    for part, numbers in zip(("trained", "held_out"), parts, strict=True):
        said = found.truncation.to_json()[part]
        expected = counted(directory, numbers, 24, each)
        assert said.items() >= expected.items()
    assert found.truncation.is_much
    assert found.truncation.whole.examples == 40
    assert f"of the 40 {'pairs' if each == 2 else 'examples'}" in found.cut_words
    # What is offered instead cuts little, as counted above.
    assert "--seq-len " in found.ways_out()
    length = int(found.ways_out().partition("--seq-len ")[2].partition("`")[0].split()[0])
    offered = counted(directory, range(count), length, each)
    assert offered["supervised_tokens_cut"] <= CUT_MAX * offered["supervised_tokens"]


def of_lengths(dataset: Path, *, seq_len: int) -> TruncatedDataset:
    from qlora_sweep.sweep.data.prepared_dataset import PreparedDataset
    from tests.sweep.prepared_dataset import a_summary

    known = PreparedDataset(dataset, a_summary(), "mine.jsonl")
    epochs = StudyEpochs.of(known, DatasetChoice(texts="mine.jsonl", eval_fraction=0.2), seed=0)
    return epochs.truncated_dataset(seq_len)


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["none", "grouped", "packed"])
def test_an_epoch_trains_on_what_is_not_cut(tmp_path: Path, packing: str) -> None:
    from tests.sweep.data.prepared import prepared as prepared_rows
    from tests.sweep.finetuning.trainings import ended, job

    lengths = [5, 40, 12, 30, 9, 22, 17, 3, 28, 14, 33, 8, 19, 25, 60]
    answers = [3, 30, 2, 20, 8, 5, 9, 2, 27, 4, 30, 2, 3, 20, 10]
    dataset = prepared_rows(tmp_path / "texts", lengths, completions=answers)
    end = ended(job(tmp_path / "out", dataset, packing=packing))
    found = of_lengths(dataset, seq_len=32)
    trained, held_out = found.trained, found.held_out
    assert end.tokens == trained.supervised_tokens - trained.supervised_tokens_cut
    assert end.eval_tokens == held_out.supervised_tokens - held_out.supervised_tokens_cut
    assert end.rows_left_out == trained.examples_left_out
    assert found.whole.examples_left_out == 1, "an answer of ten tokens behind fifty is gone"


TYPED = ("train", "short.json", "--model", "demo", "--data", "rows.jsonl", "--output", "out")


@pytest.mark.slow
def test_a_training_that_would_lose_much_stops_and_says_what_to_do(
    rows: Path, sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = sweep(*TYPED, "--max-steps", "2")
    assert (code, out) == (2, "")
    for words in ("Length 24 cuts", "of the 40 examples", "held out", "--seq-len 64", "--yes"):
        assert words in err
    assert re.search(r"`sweep run SPACE --model demo --data \S*rows.jsonl`", err)
    assert not (rows / "out").exists()

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stdin", Terminal("n\n"))
    code, out, err = sweep(*TYPED, "--max-steps", "2")
    assert (code, out) == (2, "")
    assert "all the same? [y/N]" in err
    assert not (rows / "out").exists()

    (rows / "none.json").write_text(json.dumps(SHORT | {"seq_len": 1}))
    assert sweep(TYPED[0], "none.json", *TYPED[2:]).code == 2


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_with_yes_it_trains_and_card_and_json_say_what_was_cut_and_predicted(
    rows: Path, sweep: Sweep
) -> None:
    # Another length than the file's is planned, and compared with its plan.
    more = ("--seq-len", "20", "--max-steps", "8", "--yes", "--json")
    code, out, err = sweep(*TYPED, *more)
    assert code == 0, err
    assert "predicted" in err.partition("2 x 20")[2]
    document = json.loads(out)
    assert document == json.loads((rows / "out" / "training.json").read_text())
    assert document["config"]["seq_len"] == 20
    parts = document["truncation"]
    assert parts["seq_len"] == 20
    for key in ("examples", "examples_cut", "supervised_tokens", "supervised_tokens_cut"):
        assert parts["dataset"][key] == parts["trained"][key] + parts["held_out"][key]
    shares = parts["dataset"]
    assert shares["supervised_tokens_cut_share"] > CUT_MAX
    card = (rows / "out" / "README.md").read_text()
    assert f"cuts {shares['examples_cut']} of the 40 examples" in card
    assert "predicted" in card
    assert document["promised_basis"] == "predicted"
    low, high = document["promised_peak_allocated_bytes_range"]
    assert low < document["promised_peak_allocated_bytes"] < high
    assert document["ratios"]["peak_allocated_bytes"] == pytest.approx(
        document["peak_allocated_bytes"] / document["promised_peak_allocated_bytes"]
    )
    assert document["ratios"]["tokens_per_second"] is None, "no speed of a CPU is predicted"


@pytest.mark.slow
def test_a_length_that_nobody_measured_is_planned_on_a_gpu(rows: Path) -> None:
    same = prepared(rows, gpus=[A10])
    assert same.prediction is None
    found = prepared(rows, gpus=[A10], settings={"seq_len": 64})
    assert found.job.config.seq_len == 64
    assert not found.truncation.is_much
    planned = found.prediction
    assert planned is not None
    assert planned.tokens_per_second is not None
    assert planned.tokens_per_second_range is not None
    low, high = planned.tokens_per_second_range
    assert 0 < low < planned.tokens_per_second < high
    assert planned.peak_allocated_bytes is not None
    assert "tokens/s" in same.ways_out()
    # The way out of a length that cuts much has the same figures.
    assert str(found.plan_words).partition(": ")[2].rstrip(".") in same.ways_out()


@pytest.mark.slow
def test_what_a_trial_measured_corrects_what_is_predicted_at_another_length(rows: Path) -> None:
    at_64 = {"gpus": [A10], "settings": {"seq_len": 64}}
    unmeasured = prepared(rows, **at_64).prediction
    assert unmeasured is not None
    config, speeds = TrialConfig.model_validate(SHORT), {}
    for seconds in (0.01, 10.0):
        speed = config.tokens_per_step / seconds
        measurement = a_measurement(
            tokens_per_second=speed, step_seconds=seconds, step_seconds_ci95=None, flags=()
        )
        study = a_study(config, measurement=measurement, model=DEMO, emulated_on=None)
        (rows / "short.json").write_text(record_of(study).model_dump_json())
        found = prepared(rows, model=None, **at_64)
        assert found.prediction is not None
        speeds[seconds] = found.prediction.tokens_per_second
        assert "Measured at 2 x 24" in str(found.plan_words)
        assert prepared(rows, model=None, gpus=[A10]).prediction is None
    assert speeds[10.0] < unmeasured.tokens_per_second < speeds[0.01]  # type: ignore[operator]


@pytest.mark.slow
def test_a_length_that_cannot_be_is_refused_with_what_can(rows: Path) -> None:
    with pytest.raises(InputError, match="beyond the 1024 positions"):
        prepared(rows, gpus=[A10], settings={"seq_len": 2048})
    long = json.dumps({"text": " ".join(f"w{n}" for n in range(600))})
    (rows / "rows.jsonl").write_text(f"{long}\n" * 440)
    settings = {"seq_len": 1024, "micro_batch_size": 400}
    small = GpuInfo("NVIDIA A9", 2 * 2**30, 2 * 2**30, (8, 6), None, None)
    with pytest.raises(NothingFits, match="the budget is") as refused:
        prepared(rows, gpus=[small], settings=settings)
    size = re.search(r"--set micro_batch_size=(\d+)", str(refused.value))
    assert size is not None
    # What is named is what then fits.
    fits = prepared(rows, gpus=[small], settings={**settings, "micro_batch_size": int(size[1])})
    assert fits.prediction is not None
    assert fits.prediction.fit is Fit.YES


@pytest.mark.parametrize(
    ("budget", "positions", "expected"),
    [
        # The shortest that cuts little, as it is, and in a smaller micro-batch.
        (4 * 1000, None, (512, 4, True)),
        (2 * 1000, None, (512, 2, True)),
        # The longest that fits, and the longest that the model takes.
        (300, None, (256, 1, False)),
        (4 * 1000, 400, (400, 4, False)),
        (60, None, None),
    ],
)
def test_what_is_offered_is_the_shortest_that_cuts_little_or_the_longest_that_fits(
    budget: int, positions: int | None, expected: tuple[int, int, bool] | None
) -> None:
    lengths = np.array([40] * 60 + [500] * 40)

    def expect(config: TrialConfig) -> Any:
        needed = config.tokens_per_micro_batch
        memory = SimpleNamespace(fits=lambda room: Fit.YES if needed <= room else Fit.NO)
        told = {"peak_allocated_bytes": needed, "memory_uncertainty": 0.0}
        return SimpleNamespace(memory=memory, fit=memory.fits(budget), **told)

    known: Any = SimpleNamespace(
        budget_bytes=budget,
        expect=expect,
        is_valid=lambda _: True,
        speed=None,
        shapes=SimpleNamespace(epochs=StudyEpochs(lengths, lengths - 1, seed=0)),
    )
    config = TrialConfig(micro_batch_size=4, seq_len=64, checkpoint_fraction=1.0)
    found = longer(config, known, max_positions=positions, has_budget=True)
    if expected is None or found is None:
        assert expected is found
        return
    assert (found.config.seq_len, found.config.micro_batch_size, found.cuts_little) == expected
    assert found.prediction.peak_allocated_bytes == found.config.tokens_per_micro_batch


def test_what_is_typed_of_a_micro_batch_keeps_the_step_where_it_can() -> None:
    from qlora_sweep.sweep.finetuning.subject import as_options, with_settings

    config = TrialConfig(micro_batch_size=8, seq_len=512)
    smaller = with_settings(config, {"micro_batch_size": 2, "seq_len": 1024})
    assert (smaller.samples_per_step, smaller.accumulation_steps) == (8, 4)
    assert as_options(config, smaller) == "--seq-len 1024 --set micro_batch_size=2"
    other = with_settings(config, {"micro_batch_size": 3})
    assert (other.samples_per_step, other.accumulation_steps) == (3, 1)
    chosen = config.changed(effective_batch_size=16)
    with pytest.raises(InputError, match="effective_batch_size"):
        with_settings(chosen, {"micro_batch_size": 3})
