"""A trial on texts: their largest micro-batches first, then what stands for an epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, Features, List, Value

from search_spaces.config import TrialConfig
from search_spaces.models import ModelSpec
from storage.records import Ineffective, Invalid, Measured, Measurement, Outcome
from sweep.data.batches import Texts, TrialBatches, trial_batches
from sweep.data.probing import are_apart
from sweep.training.adapters import attached
from sweep.training.messages import Progress
from sweep.training.meter import flops_per_token
from sweep.training.model import build_base
from sweep.training.step import TrainingLoop
from sweep.training.trial import (
    AHEAD_OF_TEXTS,
    DOCUMENTS_TOGETHER,
    ROWS_OF_TEXTS,
    TOKENS_OF_TEXTS,
)
from tests.bench.try_models import spec_of
from tests.sweep.data.prepared import prepared
from tests.sweep.training.tiny import BRIEF, tiny_base, tiny_config, trial_on

LENGTHS = np.random.default_rng(1).integers(3, 29, 60)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("texts"), LENGTHS)


@pytest.fixture(scope="module")
def texts(directory: Path) -> Texts:
    return Texts(directory, eval_fraction=0.1, seed=0)


def outcome_of(texts: Texts, config: TrialConfig, **changes: Any) -> Outcome:
    with tiny_base(config) as base:
        return trial_on(base, config, texts=texts, **{"steps": BRIEF, **changes}).run()


def measured(texts: Texts, config: TrialConfig, **changes: Any) -> Measurement:
    outcome = outcome_of(texts, config, **changes)
    assert isinstance(outcome, Measured), outcome
    return outcome.measurement


def shapes_of(made: TrialBatches) -> list[tuple[int, ...]]:
    """Return rows and width of each micro-batch of a round."""
    return [tuple(batch["input_ids"].shape) for batch in made.round]


def round_of(texts: Texts, config: TrialConfig, micro_steps: int = 1) -> TrialBatches:
    return trial_batches(texts, config, micro_steps=micro_steps)


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"packing": "grouped"},
        {"packing": "packed"},
        {"packing": "packed", "attention": "eager", "lora_dropout": 0.1},
        {"effective_batch_size": 4, "checkpoint_fraction": 0.0},
    ],
    ids=str,
)
def test_the_speed_is_of_the_tokens_that_carry_loss(texts: Texts, knobs: dict[str, Any]) -> None:
    config = tiny_config(**knobs)
    measurement = measured(texts, config)
    made = round_of(texts, config, config.accumulation_steps)
    tokens = made.loss_tokens * config.accumulation_steps / len(made.round)
    assert measurement.loss_tokens_per_step == pytest.approx(tokens)
    assert measurement.tokens_per_second == pytest.approx(tokens / measurement.step_seconds)
    assert measurement.samples_per_second == pytest.approx(
        config.samples_per_step / measurement.step_seconds
    )
    epoch = made.epoch
    assert measurement.padding_waste == pytest.approx(1 - epoch.tokens / epoch.padded_tokens)
    assert measurement.documents_apart is (True if config.packing == "packed" else None)
    assert DOCUMENTS_TOGETHER not in measurement.flags
    assert measurement.batch_wait_share is not None
    assert 0 < measurement.batch_wait_share < 0.2
    assert measurement.final_loss == pytest.approx(6.24, abs=0.5)


def test_of_a_few_very_long_rows_the_speed_is_still_that_of_the_epoch(tmp_path: Path) -> None:
    """One of eighty rows is eight times as long: no four micro-batches have a part of it."""
    outlier = Texts(prepared(tmp_path, [4] * 79 + [32]), eval_fraction=0.0, seed=0)
    config = tiny_config()
    made = round_of(outlier, config)
    epoch = made.epoch
    assert not made.is_as_its_epoch
    assert made.loss_tokens_per_step == pytest.approx((79 * 3 + 31) / 40)
    # A device that computes so many tokens a second takes as long for the epoch as is said.
    pass_seconds = made.padded_tokens / 100
    step = pass_seconds / len(made.round) * made.pace
    assert step * epoch.optimizer_steps == pytest.approx(epoch.padded_tokens / 100)
    measurement = measured(outlier, config, steps=BRIEF)
    assert "round_extrapolated" in measurement.flags
    tokens = measurement.tokens_per_second * measurement.step_seconds
    assert tokens == pytest.approx(made.loss_tokens_per_step)
    rows = measurement.samples_per_second * measurement.step_seconds
    assert rows == pytest.approx(config.samples_per_step)
    ends = measurement.step_seconds_ci95
    assert ends is None or ends[0] <= measurement.step_seconds <= ends[1]


def shapes_trained(
    texts: Texts, config: TrialConfig, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[int, ...]]:
    """Return the shape of every micro-batch of a trial, in order."""
    seen: list[tuple[int, ...]] = []
    real = TrainingLoop._micro_step

    def noting(self: TrainingLoop, *args: Any) -> torch.Tensor:
        loss = real(self, *args)
        seen.append(tuple(self.newest.shape))
        return loss

    monkeypatch.setattr(TrainingLoop, "_micro_step", noting)
    measured(texts, config)
    return seen


def test_the_longest_rows_come_first_and_then_one_round_after_another(
    texts: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(effective_batch_size=4)
    made = round_of(texts, config, micro_steps=2)
    seen = shapes_trained(texts, config, monkeypatch)
    largest = made.epoch.largest
    assert seen[:4] == [(largest.rows, largest.width)] * 4
    assert largest.width == max(LENGTHS)
    count = len(shapes_of(made))
    passes = [tuple(seen[first : first + count]) for first in range(4, len(seen), count)]
    assert set(passes) == {tuple(shapes_of(made))}
    assert len({width for _, width in shapes_of(made)}) > 1


def test_the_peak_is_that_of_the_longest_rows_and_not_of_the_round(texts: Texts) -> None:
    config = tiny_config(checkpoint_fraction=0.0)
    made = round_of(texts, config)
    widest = max(width for _, width in shapes_of(made))
    full = tiny_config(checkpoint_fraction=0.0, seq_len=int(made.epoch.largest.width))
    short = tiny_config(checkpoint_fraction=0.0, seq_len=min(w for _, w in shapes_of(made)))
    with tiny_base(config) as base:
        on_texts, on_full, on_short = (
            trial_on(base, c, steps=BRIEF, texts=t).run()
            for c, t in ((config, texts), (full, None), (short, None))
        )
    peaks = [
        o.measurement.peak_allocated_bytes
        for o in (on_texts, on_full, on_short)
        if isinstance(o, Measured)
    ]
    assert widest <= made.epoch.largest.width
    assert peaks[0] == pytest.approx(peaks[1], rel=0.02)
    assert peaks[0] > 1.02 * peaks[2]


def test_a_long_accumulation_is_derived_from_the_steps_that_were_run(texts: Texts) -> None:
    config = tiny_config(effective_batch_size=32)
    short = measured(texts, tiny_config(effective_batch_size=4))
    long = measured(texts, config)
    assert "accumulation_extrapolated" in long.flags
    assert "accumulation_extrapolated" not in short.flags
    assert short.loss_tokens_per_step is not None
    assert long.loss_tokens_per_step == pytest.approx(8 * short.loss_tokens_per_step)
    assert long.step_seconds > 4 * short.step_seconds


def test_texts_that_make_no_micro_batch_are_invalid(tmp_path: Path) -> None:
    few = Texts(prepared(tmp_path, [5, 6, 7]), eval_fraction=0.0, seed=0)
    outcome = outcome_of(few, tiny_config(micro_batch_size=4))
    assert isinstance(outcome, Invalid)
    assert outcome.rule == ROWS_OF_TEXTS
    assert "no more than 3 rows" in outcome.detail
    assert "take a smaller micro_batch_size" in outcome.detail


def test_tokens_that_the_model_does_not_know_are_invalid(tmp_path: Path) -> None:
    directory = prepared(tmp_path, [5] * 8)
    rows = [[1, 2, 600, 3, 4]] * 8
    features = Features({"input_ids": List(Value("int32"))})
    for path in (directory / "tokens").iterdir():
        path.unlink()
    Dataset.from_dict({"input_ids": rows}, features=features).save_to_disk(directory / "tokens")
    outcome = outcome_of(Texts(directory, eval_fraction=0.0, seed=0), tiny_config())
    assert isinstance(outcome, Invalid)
    assert (outcome.rule, "token 600" in outcome.detail) == (TOKENS_OF_TEXTS, True)


@pytest.mark.parametrize(
    ("lengths", "packing", "words"),
    [
        ([32] * 12, "packed", "no row holds more than one text"),
        ([9] * 12, "grouped", "no fewer pads than in random order"),
    ],
)
def test_packing_that_does_nothing_is_ineffective(
    tmp_path: Path, lengths: list[int], packing: str, words: str
) -> None:
    alike = Texts(prepared(tmp_path, lengths), eval_fraction=0.0, seed=0)
    outcome = outcome_of(alike, tiny_config(packing=packing))
    assert isinstance(outcome, Ineffective)
    assert outcome.knob == "packing"
    assert words in outcome.detail


def test_texts_of_a_row_that_see_each_other_are_found_out(texts: Texts) -> None:
    config = tiny_config(packing="packed", checkpoint_fraction=0.0)
    made = round_of(texts, config)
    batch = made.largest[0]
    alone = round_of(texts, tiny_config()).largest[0]
    with tiny_base(config) as base, attached(base, config) as attachment:
        model = attachment.model.get_base_model()
        assert are_apart(model, batch) is True
        # A cache, and transformers no longer looks at the positions.
        model.config.use_cache = True
        assert are_apart(model, batch) is False
        model.config.use_cache = False
        positions = torch.arange(alone["input_ids"].shape[1]).expand_as(alone["input_ids"])
        single = {**alone, "position_ids": positions}
        assert are_apart(model, single) is None


def test_a_trial_whose_packed_texts_see_each_other_says_so(texts: Texts) -> None:
    config = tiny_config(packing="packed", checkpoint_fraction=0.0)
    with tiny_base(config) as base:
        base.model.config.use_cache = True
        outcome = trial_on(base, config, texts=texts, steps=BRIEF).run()
    assert isinstance(outcome, Measured)
    assert outcome.measurement.documents_apart is False
    assert DOCUMENTS_TOGETHER in outcome.measurement.flags


def test_a_soak_evaluates_and_saves_on_texts_too(texts: Texts) -> None:
    measurement = measured(texts, tiny_config(), is_soak=True)
    assert measurement.soak is not None
    assert measurement.soak.evaluation_loss == pytest.approx(6.24, abs=0.5)
    assert measurement.soak.checkpoint_bytes > 0


def test_work_is_counted_of_what_is_computed(texts: Texts) -> None:
    config = tiny_config()
    peak = 1e12
    measurement = measured(texts, config, peak_flops=peak)
    made = round_of(texts, config)
    with tiny_base(config) as base, attached(base, config) as attachment:
        work = sum(
            rows * width * flops_per_token(attachment, base.model.config, width)
            for rows, width in shapes_of(made)
        ) / len(shapes_of(made))
    expected = work / measurement.step_seconds / peak
    assert measurement.flops_utilization == pytest.approx(expected)


def test_a_model_that_looks_ahead_is_not_trained_on_padded_rows(texts: Texts) -> None:
    tiny = spec_of("gemma3_text")
    values = {**tiny.config, "use_bidirectional_attention": True, "vocab_size": 512}
    config = tiny_config(attention="eager")
    spec = ModelSpec("both-ways", "directory", values)
    cpu = torch.device("cpu")
    base = build_base(config, spec=spec, weights="random", device=cpu, seed=0)
    try:
        outcome = trial_on(base, config, texts=texts, steps=BRIEF).run()
    finally:
        base.close()
    assert isinstance(outcome, Invalid)
    assert outcome.rule == AHEAD_OF_TEXTS
    assert "'gemma3_text' looks ahead" in outcome.detail


def test_a_model_that_is_told_no_positions_packs_nothing(
    texts: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(packing="packed")
    with tiny_base(config) as base:
        real = base.model.forward

        def forward(input_ids: Any, labels: Any = None) -> Any:
            return real(input_ids=input_ids, labels=labels)

        monkeypatch.setattr(base.model, "forward", forward)
        outcome = trial_on(base, config, texts=texts, steps=BRIEF).run()
    assert isinstance(outcome, Ineffective)
    assert (outcome.knob, "no positions" in outcome.detail) == ("packing", True)


def test_every_width_of_the_round_is_trained_on_before_anything_is_measured(
    texts: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config()
    shapes: list[tuple[int, ...]] = []
    before: list[set[tuple[int, ...]]] = []
    real = TrainingLoop._micro_step

    def noting(self: TrainingLoop, *args: Any) -> torch.Tensor:
        loss = real(self, *args)
        shapes.append(tuple(self.newest.shape))
        return loss

    def watch(beat: Progress) -> bool:
        if beat.phase == "measure" and not before:
            before.append(set(shapes))
        return False

    monkeypatch.setattr(TrainingLoop, "_micro_step", noting)
    steps = BRIEF.model_copy(update={"warmup_max": 1})
    measurement = measured(texts, config, steps=steps, report=watch)
    made = round_of(texts, config)
    assert measurement.steps_warmup == 1
    assert before[0] == {*shapes_of(made), tuple(made.largest[0]["input_ids"].shape)}
