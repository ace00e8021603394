"""What a configuration learns of texts: the same tokens for all, and one question."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, Features, List, Value

from search_spaces.config import TrialConfig
from search_spaces.errors import InputError
from storage.records import Diverged, OutOfMemory, QualityReport
from sweep.data.batches import WEIGHT, Texts, loss_tokens, open_tokens
from sweep.data.lesson import Lesson
from sweep.data.rows import split
from sweep.training.device import CpuDevice
from sweep.training.messages import Progress, QualityCommand
from sweep.training.model import BaseModel
from sweep.training.quality import Quality
from tests.sweep.data.prepared import prepared
from tests.sweep.training.tiny import tiny_base, tiny_config

LENGTHS = np.random.default_rng(1).integers(3, 40, 80)
ASKED = QualityCommand(tokens=200, seed=3, eval_seq_len=32, eval_tokens=100)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    return Texts(prepared(tmp_path_factory.mktemp("texts"), LENGTHS), eval_fraction=0.2, seed=0)


@pytest.fixture(scope="module")
def base() -> Any:
    with tiny_base(tiny_config()) as made:
        yield made


def quality(base: BaseModel, texts: Texts, config: TrialConfig, **changes: Any) -> Quality:
    asked = {k: v for k, v in changes.items() if k in QualityCommand.model_fields}
    question = ASKED.model_copy(update=asked)
    others = {k: v for k, v in changes.items() if k not in asked}
    values = {"device": CpuDevice(), **others}
    return Quality(base, config, texts, question, **values)


def learned(base: BaseModel, texts: Texts, config: TrialConfig, **changes: Any) -> QualityReport:
    report = quality(base, texts, config, **changes).run()
    assert isinstance(report, QualityReport), report
    return report


def batches(texts: Texts, config: TrialConfig, **changes: Any) -> list[dict[str, Any]]:
    asked = ASKED.model_copy(update=changes)
    lesson = Lesson(texts, config, tokens=asked.tokens, seed=asked.seed)
    return [lesson[index] for index in range(len(lesson))]


def texts_of(found: list[dict[str, Any]]) -> list[tuple[int, ...]]:
    """Return the rows of micro-batches without their pads."""
    rows = []
    for batch in found:
        for tokens, labels in zip(batch["input_ids"], batch["labels"], strict=True):
            last = int(torch.nonzero(labels != -100).max())
            rows.append(tuple(tokens[: last + 1].tolist()))
    return rows


def test_the_same_seed_gives_the_same_loss_and_another_one_another(
    base: BaseModel, texts: Texts
) -> None:
    config = tiny_config(learning_rate=1e-3)
    beats: list[int] = []
    first = learned(base, texts, config, report=lambda told: beats.append(told.step))
    again = learned(base, texts, config)
    assert replace_seconds(again) == replace_seconds(first)
    assert beats[-1] == first.steps > 1
    assert beats == sorted(beats)
    assert learned(base, texts, config, seed=4).eval_loss != first.eval_loss
    assert learned(base, texts, config.model_copy(update={"learning_rate": 1e-4})) != first


def replace_seconds(report: QualityReport) -> QualityReport:
    return report.model_copy(update={"seconds": 0.0})


def test_what_is_learned_shows_in_the_loss_of_what_was_held_out(tmp_path: Path) -> None:
    """Texts that all say the same are soon known by heart."""
    directory = prepared(tmp_path, [12] * 40)
    for path in (directory / "tokens").iterdir():
        path.unlink()
    rows = {"input_ids": [[5, 9, 7, 11] * 3] * 40}
    features = Features({"input_ids": List(Value("int32"))})
    Dataset.from_dict(rows, features=features).save_to_disk(directory / "tokens")
    alike = Texts(directory, eval_fraction=0.1, seed=0)
    config = tiny_config(target_modules="all-linear", learning_rate=1e-2, micro_batch_size=4)
    with tiny_base(config) as base:
        little = learned(base, alike, config, tokens=44, eval_seq_len=12)
        much = learned(base, alike, config, tokens=1500, eval_seq_len=12)
    assert little.steps == 1
    assert much.eval_loss < little.eval_loss - 0.5
    assert much.train_tokens == pytest.approx(1500, abs=44)
    assert (much.eval_tokens, much.eval_seq_len, much.seed) == (4 * 11, 12, 3)


@pytest.mark.parametrize("packing", ["none", "grouped", "packed"])
@pytest.mark.parametrize("effective", [None, 4])
def test_the_budget_is_spent_in_whole_optimizer_steps(
    texts: Texts, packing: str, effective: int | None
) -> None:
    config = tiny_config(packing=packing, effective_batch_size=effective)
    found = batches(texts, config, tokens=300)
    assert len(found) % config.accumulation_steps == 0
    tokens = [loss_tokens(batch) for batch in found]
    step = sum(tokens[-config.accumulation_steps :])
    assert sum(tokens) >= 300
    # A packed row's texts are chosen before it is known how well they fit.
    assert sum(tokens) - step < 300 or packing == "grouped"
    assert all(len(batch["input_ids"]) == config.micro_batch_size for batch in found)


def test_every_configuration_trains_on_the_same_texts_in_the_same_order(texts: Texts) -> None:
    plain = texts_of(batches(texts, tiny_config(seq_len=64)))
    larger = texts_of(batches(texts, tiny_config(seq_len=64, micro_batch_size=4)))
    assert larger[: len(plain)] == plain
    cut = texts_of(batches(texts, tiny_config(seq_len=16)))
    assert [row[:16] for row in plain] == cut[: len(plain)]
    grouped = texts_of(batches(texts, tiny_config(seq_len=64, packing="grouped")))
    assert sorted(grouped) == sorted(plain)
    assert grouped != plain


def test_none_of_what_was_held_out_is_trained_on(texts: Texts) -> None:
    rows = open_tokens(texts.directory)
    _, held = split(len(rows), texts.eval_fraction, texts.seed)
    kept = {tuple(map(int, rows[int(number)]["input_ids"])) for number in held}
    # Three epochs of all there is.
    trained = texts_of(batches(texts, tiny_config(seq_len=64), tokens=3 * int(LENGTHS.sum())))
    assert len(trained) > 2 * len(LENGTHS)
    assert not kept & set(trained)


def test_each_token_of_a_step_counts_the_same(texts: Texts) -> None:
    config = tiny_config(effective_batch_size=8)
    found = batches(texts, config)
    step = found[: config.accumulation_steps]
    assert len({loss_tokens(batch) for batch in step}) > 1
    assert sum(batch[WEIGHT] for batch in step) == pytest.approx(config.accumulation_steps)
    per_token = [batch[WEIGHT] / loss_tokens(batch) for batch in step]
    assert per_token == pytest.approx([per_token[0]] * len(step))


def test_the_question_does_not_depend_on_how_a_configuration_trains(
    base: BaseModel, texts: Texts
) -> None:
    """Where nothing is learned, the loss is the base's, whatever was trained on."""
    loss = {
        str(knobs): learned(base, texts, tiny_config(learning_rate=1e-7, **knobs), tokens=50)
        for knobs in (
            {},
            {"seq_len": 8},
            {"micro_batch_size": 8, "packing": "packed", "lora_dropout": 0.5},
        )
    }
    first, *others = loss.values()
    assert all(other.eval_loss == pytest.approx(first.eval_loss, rel=1e-3) for other in others)
    assert {report.eval_tokens for report in loss.values()} == {first.eval_tokens}
    assert first.eval_tokens >= ASKED.eval_tokens


def test_the_held_out_loss_does_not_depend_on_the_micro_batch(texts: Texts) -> None:
    """Where nothing is learned and nothing is rounded, it is the same mean over tokens."""
    exact = {"compute_dtype": "fp32", "quantization": "none", "learning_rate": 1e-7}
    reports = []
    with tiny_base(tiny_config(**exact)) as base:
        for size in (1, 3, 8):
            config = tiny_config(**exact, micro_batch_size=size)
            reports.append(learned(base, texts, config, tokens=50, eval_tokens=300))
    first, *others = reports
    assert all(r.eval_loss == pytest.approx(first.eval_loss, rel=1e-5) for r in others)
    assert {r.eval_tokens for r in reports} == {first.eval_tokens}


def test_a_loss_that_is_not_finite_is_diverged(texts: Texts) -> None:
    with tiny_base(tiny_config()) as base:
        base.model.model.norm.weight.data.fill_(float("nan"))
        outcome = quality(base, texts, tiny_config()).run()
    assert isinstance(outcome, Diverged)
    assert (outcome.step, "training for its quality" in outcome.detail) == (0, True)


class _Full(CpuDevice):
    def ran_out(self, error: BaseException) -> bool:
        return "enough" in str(error)


def test_memory_that_runs_out_in_it_is_out_of_memory_and_the_base_goes_on(
    base: BaseModel, texts: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config()
    before = {name: p.shape for name, p in base.model.named_parameters()}

    def fail(told: Progress) -> None:
        if told.step == 2:
            raise RuntimeError("not enough memory")

    outcome = quality(base, texts, config, device=_Full(), report=fail).run()
    assert isinstance(outcome, OutOfMemory)
    assert "training for its quality" in outcome.detail
    assert {name: p.shape for name, p in base.model.named_parameters()} == before
    assert isinstance(quality(base, texts, config).run(), QualityReport)


def test_an_evaluation_without_room_for_all_rows_goes_on_with_half_of_them(
    base: BaseModel, texts: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(micro_batch_size=8)
    whole = learned(base, texts, config, tokens=50)
    real = type(base.model).forward
    refused: list[int] = []

    def small(self: Any, *args: Any, **kwargs: Any) -> Any:
        rows = len(kwargs["input_ids"])
        if not self.training and rows > 2:
            refused.append(rows)
            raise RuntimeError("not enough memory")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(type(base.model), "forward", small)
    parts = learned(base, texts, config, tokens=50, device=_Full())
    assert refused
    assert parts.eval_loss == pytest.approx(whole.eval_loss, rel=1e-3)
    assert parts.eval_tokens == whole.eval_tokens


@pytest.mark.parametrize(
    ("lengths", "fraction", "words"),
    [([9] * 8, 0.0, "take a larger eval_fraction"), ([1] * 8, 0.2, "carries loss")],
)
def test_texts_that_cannot_answer_are_refused(
    base: BaseModel, tmp_path: Path, lengths: list[int], fraction: float, words: str
) -> None:
    poor = Texts(prepared(tmp_path, lengths), eval_fraction=fraction, seed=0)
    with pytest.raises(InputError, match=words):
        quality(base, poor, tiny_config()).run()
