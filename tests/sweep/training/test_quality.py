"""What a configuration learns of texts: the same tokens for all, and one question."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.storage.records import Diverged, OutOfMemory, QualityReport
from qlora_sweep.sweep.training.messages import Progress, QualityCommand
from tests.lazy import lazily
from tests.sweep.training.tiny import dataset_in, tiny_base, tiny_config

torch = lazily("torch")
batching = lazily("qlora_sweep.sweep.data.batches")
devices = lazily("tests.sweep.training.devices")
LENGTHS = np.random.default_rng(1).integers(3, 40, 80)
ASKED = QualityCommand(tokens=200, seed=3, eval_seq_len=32, eval_tokens=100)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return dataset_in(tmp_path_factory.mktemp("texts"), LENGTHS, eval_fraction=0.2)


@pytest.fixture(scope="module")
def base() -> Iterator[Any]:
    with tiny_base(tiny_config()) as made:
        yield made


def outcome(base: Any, dataset: Any, config: TrialConfig, **changes: Any) -> Any:
    from qlora_sweep.sweep.training.quality import Quality

    asked = {k: changes.pop(k) for k in QualityCommand.model_fields if k in changes}
    values = {"device": devices.Full(), **changes}
    return Quality(base, config, dataset, ASKED.model_copy(update=asked), **values).run()


def learned(base: Any, dataset: Any, config: TrialConfig, **changes: Any) -> QualityReport:
    report = outcome(base, dataset, config, **changes)
    assert isinstance(report, QualityReport), report
    return report.model_copy(update={"seconds": 0.0})


def batches(dataset: Any, config: TrialConfig, *, tokens: int = ASKED.tokens) -> list[Any]:
    from qlora_sweep.sweep.data.batches import QualityBatches

    lesson = QualityBatches(dataset, config, tokens=tokens, seed=ASKED.seed)
    return [lesson[index] for index in range(len(lesson))]


def rows_of(found: list[Any]) -> list[tuple[int, ...]]:
    """Return the rows of micro-batches without their pads."""
    rows = []
    for batch in found:
        for tokens, labels in zip(batch["input_ids"], batch["labels"], strict=True):
            last = int(torch.nonzero(labels != -100).max())
            rows.append(tuple(tokens[: last + 1].tolist()))
    return rows


def test_the_same_seed_gives_the_same_loss_and_another_one_another(base: Any, dataset: Any) -> None:
    config = tiny_config(learning_rate=1e-3)
    beats: list[int] = []
    first = learned(base, dataset, config, report=lambda told: beats.append(told.step))
    assert learned(base, dataset, config) == first
    assert beats[-1] == first.steps > 1
    assert beats == sorted(beats)
    assert learned(base, dataset, config, seed=4).eval_loss != first.eval_loss
    assert learned(base, dataset, config.model_copy(update={"learning_rate": 1e-4})) != first


def test_its_learning_rate_falls_as_that_of_a_training(
    base: Any, dataset: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qlora_sweep.sweep.training.step import TrainingLoop

    rates: list[float] = []
    step = TrainingLoop.step

    def watched(self: TrainingLoop, **options: Any) -> Any:
        rates.append(self.optimizer.param_groups[0]["lr"])
        return step(self, **options)

    monkeypatch.setattr(TrainingLoop, "step", watched)
    steps = learned(base, dataset, tiny_config(learning_rate=1e-3), tokens=900).steps
    assert steps > 20
    # Trainer's linear schedule, which has no warm-up.
    assert rates == pytest.approx([1e-3 * (1 - done / steps) for done in range(steps)])


def test_what_is_learned_shows_in_the_loss_of_what_was_held_out(tmp_path: Path) -> None:
    """Texts that all say the same are soon known by heart."""
    alike = dataset_in(tmp_path, [12] * 40, eval_fraction=0.1, texts=[[5, 9, 7, 11] * 3] * 40)
    config = tiny_config(target_modules="all-linear", learning_rate=1e-2, micro_batch_size=4)
    with tiny_base(config) as base:
        little = learned(base, alike, config, tokens=44, eval_seq_len=12)
        much = learned(base, alike, config, tokens=1500, eval_seq_len=12)
    assert little.steps == 1
    assert much.eval_loss < little.eval_loss - 0.5
    assert much.train_tokens == pytest.approx(1500, abs=44)
    assert (much.eval_tokens, much.eval_seq_len, much.seed) == (4 * 11, 12, 3)


@pytest.mark.parametrize("packing", ["none", "grouped", "packed"])
def test_the_budget_is_spent_in_whole_optimizer_steps_in_which_each_token_counts_the_same(
    dataset: Any, packing: str
) -> None:
    config = tiny_config(packing=packing, effective_batch_size=8)
    found = batches(dataset, config, tokens=300)
    assert len(found) % config.accumulation_steps == 0
    tokens = [batching.loss_tokens(batch) for batch in found]
    assert sum(tokens) >= 300
    # A packed row's texts are chosen before it is known how well they fit.
    assert sum(tokens[: -config.accumulation_steps]) < 300 or packing == "grouped"
    assert all(len(batch["input_ids"]) == config.micro_batch_size for batch in found)
    step = found[: config.accumulation_steps]
    assert sum(batch[batching.WEIGHT] for batch in step) == pytest.approx(len(step))
    per_token = [batch[batching.WEIGHT] / batching.loss_tokens(batch) for batch in step]
    assert per_token == pytest.approx([per_token[0]] * len(step))


def test_every_configuration_trains_on_the_same_texts_in_the_same_order(dataset: Any) -> None:
    plain = rows_of(batches(dataset, tiny_config(seq_len=64)))
    larger = rows_of(batches(dataset, tiny_config(seq_len=64, micro_batch_size=4)))
    assert larger[: len(plain)] == plain
    cut = rows_of(batches(dataset, tiny_config(seq_len=16)))
    assert [row[:16] for row in plain] == cut[: len(plain)]
    grouped = rows_of(batches(dataset, tiny_config(seq_len=64, packing="grouped")))
    assert sorted(grouped) == sorted(plain)
    assert grouped != plain


def test_none_of_what_was_held_out_is_trained_on(dataset: Any) -> None:
    from qlora_sweep.sweep.data.collation import split

    rows = batching.open_tokens(dataset.directory)
    _, held = split(len(rows), dataset.eval_fraction, dataset.seed)
    kept = {tuple(map(int, rows[int(number)]["input_ids"])) for number in held}
    # Three epochs of all there is.
    trained = rows_of(batches(dataset, tiny_config(seq_len=64), tokens=3 * int(LENGTHS.sum())))
    assert len(trained) > 2 * len(LENGTHS)
    assert not kept & set(trained)


def test_the_question_does_not_depend_on_how_a_configuration_trains(dataset: Any) -> None:
    """Where nothing is learned, the loss is the base's, whatever was trained on."""
    plain = tiny_config(learning_rate=1e-7, compute_dtype="fp32", quantization="none")

    def answer(**changes: Any) -> QualityReport:
        config = plain.model_copy(update=changes)
        return learned(base, dataset, config, tokens=50, eval_tokens=200)

    def tokens_of_blocks(report: QualityReport) -> list[int]:
        return [tokens for _, tokens in report.eval_blocks or ()]

    with tiny_base(plain) as base:
        first = answer()
        for other in (
            answer(seq_len=8),
            answer(micro_batch_size=8, lora_dropout=0.5),
            answer(micro_batch_size=8, packing="packed"),
        ):
            assert other.eval_loss == pytest.approx(first.eval_loss, rel=1e-5)
            # So that losses of the same examples are paired.
            assert tokens_of_blocks(other) == tokens_of_blocks(first)
    assert len(tokens_of_blocks(first)) > 1
    assert sum(tokens_of_blocks(first)) == first.eval_tokens >= 200


def test_a_loss_that_is_not_finite_is_diverged(dataset: Any) -> None:
    with tiny_base(tiny_config()) as base:
        base.model.model.norm.weight.data.fill_(float("nan"))
        found = outcome(base, dataset, tiny_config())
    assert isinstance(found, Diverged)
    assert found.step == 0


def test_memory_that_runs_out_in_it_is_out_of_memory_and_the_base_goes_on(
    base: Any, dataset: Any
) -> None:
    before = {name: p.shape for name, p in base.model.named_parameters()}

    def fail(told: Progress) -> None:
        if told.step == 2:
            raise RuntimeError("not enough memory")

    found = outcome(base, dataset, tiny_config(), report=fail)
    assert isinstance(found, OutOfMemory)
    assert "training for its quality" in found.detail
    assert {name: p.shape for name, p in base.model.named_parameters()} == before
    learned(base, dataset, tiny_config())


def test_an_evaluation_without_room_for_all_rows_goes_on_with_half_of_them(
    base: Any, dataset: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qlora_sweep.sweep.data import batches

    monkeypatch.setattr(batches, "BLOCKS_MAX", 2)
    config = tiny_config(micro_batch_size=8)
    whole = learned(base, dataset, config, tokens=50)
    real = type(base.model).forward
    refused: list[int] = []

    def small(self: Any, *args: Any, **kwargs: Any) -> Any:
        rows = len(kwargs["input_ids"])
        if not self.training and rows > 2:
            refused.append(rows)
            raise RuntimeError("not enough memory")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(type(base.model), "forward", small)
    parts = learned(base, dataset, config, tokens=50)
    assert refused
    assert parts.eval_loss == pytest.approx(whole.eval_loss, rel=1e-3)
    assert parts.eval_tokens == whole.eval_tokens


@pytest.mark.parametrize(
    ("lengths", "fraction", "words"),
    [([9] * 8, 0.0, "take a larger eval_fraction"), ([1] * 8, 0.2, "carries loss")],
)
def test_texts_that_cannot_answer_are_refused(
    base: Any, tmp_path: Path, lengths: list[int], fraction: float, words: str
) -> None:
    with pytest.raises(InputError, match=words):
        outcome(base, dataset_in(tmp_path, lengths, eval_fraction=fraction), tiny_config())
