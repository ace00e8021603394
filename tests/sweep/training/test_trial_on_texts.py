"""A trial on texts: their largest micro-batches first, then what stands for an epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.dataset_choice import TOO_FEW_EXAMPLES
from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.storage.records import Ineffective, Invalid, Measurement
from tests.lazy import lazily
from tests.sweep.training.tiny import (
    BRIEF,
    TINY,
    UNIFORM_LOSS,
    dataset_in,
    measured,
    outcome_of,
    tiny_base,
    tiny_config,
    tiny_loop,
    trial_on,
)

torch = lazily("torch")
batching = lazily("qlora_sweep.sweep.data.batches")
preparing = lazily("tests.sweep.data.prepared")
trial = lazily("qlora_sweep.sweep.training.trial")
LENGTHS = np.random.default_rng(1).integers(3, 29, 60)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return dataset_in(tmp_path_factory.mktemp("texts"), LENGTHS, eval_fraction=0.1)


def on_dataset(dataset: Any, config: TrialConfig, **changes: Any) -> Measurement:
    return measured(outcome_of(config, dataset=dataset, **{"steps": BRIEF, **changes}))


def round_of(dataset: Any, config: TrialConfig) -> Any:
    steps = min(config.accumulation_steps, 2)
    return batching.trial_batches(dataset, config, micro_steps=steps)


def shapes_of(made: Any) -> list[tuple[int, ...]]:
    """Return rows and width of each micro-batch of a round."""
    return [tuple(batch["input_ids"].shape) for batch in made.round]


@pytest.mark.parametrize(
    "settings",
    [
        {"packing": "grouped"},
        {"packing": "packed", "attention": "eager", "lora_dropout": 0.1},
        {"effective_batch_size": 32, "checkpoint_fraction": 0.0},
    ],
    ids=str,
)
def test_the_speed_is_of_the_tokens_that_carry_loss(dataset: Any, settings: dict[str, Any]) -> None:
    config = tiny_config(**settings, learning_rate=2e-4)
    found = on_dataset(dataset, config)
    made = round_of(dataset, config)
    tokens = made.loss_tokens * config.accumulation_steps / len(made.round)
    assert found.loss_tokens_per_step == pytest.approx(tokens)
    assert found.tokens_per_second == pytest.approx(tokens / found.step_seconds)
    rows = found.samples_per_second * found.step_seconds
    assert rows == pytest.approx(config.samples_per_step)
    assert found.padding_waste == pytest.approx(made.epoch.waste)
    assert found.documents_apart is (True if config.packing == "packed" else None)
    assert trial.DOCUMENTS_TOGETHER not in found.flags
    is_long = config.accumulation_steps > len(made.round)
    assert ("accumulation_extrapolated" in found.flags) is is_long
    assert found.batch_wait_share is not None
    assert 0 < found.batch_wait_share < 0.2
    assert found.final_loss == pytest.approx(UNIFORM_LOSS, abs=0.5)


def test_of_a_few_very_long_rows_the_speed_is_still_that_of_the_epoch(tmp_path: Path) -> None:
    """One of eighty rows is eight times as long: no four micro-batches have a part of it."""
    outlier, config = dataset_in(tmp_path, [4] * 79 + [32]), tiny_config()
    made = round_of(outlier, config)
    assert not made.is_as_its_epoch
    assert made.loss_tokens_per_step == pytest.approx((79 * 3 + 31) / 40)
    # A device that computes so many tokens a second takes as long for the epoch as is said.
    step = made.padded_tokens / 100 / len(made.round) * made.pace
    assert step * made.epoch.optimizer_steps == pytest.approx(made.epoch.padded_tokens / 100)
    found = on_dataset(outlier, config)
    assert "round_extrapolated" in found.flags
    tokens = found.tokens_per_second * found.step_seconds
    assert tokens == pytest.approx(made.loss_tokens_per_step)
    ends = found.step_seconds_ci95
    assert ends is None or ends[0] <= found.step_seconds <= ends[1]


def test_the_longest_rows_come_first_then_one_round_after_another_and_none_is_new_when_measured(
    dataset: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qlora_sweep.sweep.training.step import TrainingLoop

    config = tiny_config(effective_batch_size=4)
    seen: list[tuple[int, ...]] = []
    before: set[tuple[int, ...]] = set()
    real = TrainingLoop._micro_step

    def noting(self: Any, *args: Any) -> Any:
        loss = real(self, *args)
        seen.append(tuple(self.newest.shape))
        return loss

    def watch(beat: Any) -> bool:
        if beat.phase == "measure" and not before:
            before.update(seen)
        return False

    monkeypatch.setattr(TrainingLoop, "_micro_step", noting)
    steps = BRIEF.model_copy(update={"warmup_max": 1})
    on_dataset(dataset, config, steps=steps, report=watch)
    made = round_of(dataset, config)
    shapes = shapes_of(made)
    largest = (made.epoch.largest.rows, max(LENGTHS))
    assert seen[:4] == [largest] * 4
    assert len(set(shapes)) > 1
    rounds, rest = divmod(len(seen) - 4, len(shapes))
    assert rest == 0
    assert seen[4:] == shapes * rounds
    assert before == {*shapes, largest}


def test_the_peak_is_that_of_the_longest_rows_and_not_of_the_round(dataset: Any) -> None:
    config = tiny_config(checkpoint_fraction=0.0)
    made = round_of(dataset, config)
    shortest = min(width for _, width in shapes_of(made))
    with tiny_base(config) as base:

        def peak(dataset: Any, length: int) -> int:
            of_length = config.model_copy(update={"seq_len": int(length)})
            trial = trial_on(base, of_length, steps=BRIEF, dataset=dataset)
            return measured(trial.run()).peak_allocated_bytes

        on_texts = peak(dataset, config.seq_len)
        assert on_texts == pytest.approx(peak(None, made.epoch.largest.width), rel=0.02)
        assert on_texts > 1.02 * peak(None, shortest)


@pytest.mark.parametrize(
    ("lengths", "packing"),
    [([32] * 12, "packed"), ([9] * 12, "grouped")],
    ids=["packed", "grouped"],
)
def test_a_packing_that_changes_nothing_is_ineffective(
    tmp_path: Path, lengths: list[int], packing: str
) -> None:
    dataset = dataset_in(tmp_path, lengths)
    outcome = outcome_of(tiny_config(packing=packing), dataset=dataset, steps=BRIEF)
    assert isinstance(outcome, Ineffective)
    assert outcome.setting == "packing"


def test_fewer_examples_than_a_micro_batch_are_invalid(tmp_path: Path) -> None:
    dataset = dataset_in(tmp_path, [5, 6, 7])
    outcome = outcome_of(tiny_config(micro_batch_size=4), dataset=dataset, steps=BRIEF)
    assert isinstance(outcome, Invalid)
    assert outcome.rule == TOO_FEW_EXAMPLES
    assert "micro_batch_size" in outcome.detail


def test_ranks_of_one_row_each_wait_less_where_rows_are_grouped(dataset: Any) -> None:
    from qlora_sweep.sweep.training.proof import PROOFS, StepEvidence

    config = tiny_config(packing="grouped", micro_batch_size=1, data_parallel=2)
    made = batching.trial_batches(dataset, config)
    with tiny_loop(config) as loop:
        assert PROOFS["packing"](config, StepEvidence(loop, batches=made)) is None


def test_tokens_that_the_model_does_not_know_are_invalid(dataset: Any) -> None:
    most = preparing.VOCABULARY - 1
    spec = ModelSpec("few-words", "directory", {**TINY.config, "vocab_size": most})
    outcome = outcome_of(tiny_config(), spec=spec, dataset=dataset, steps=BRIEF)
    assert isinstance(outcome, Invalid)
    assert outcome.rule == trial.UNKNOWN_TOKENS
    assert f"token {most}" in outcome.detail


def test_texts_of_a_row_that_see_each_other_are_found_out(dataset: Any) -> None:
    from qlora_sweep.sweep.data.probing import are_apart

    config = tiny_config(packing="packed", checkpoint_fraction=0.0)
    batch = round_of(dataset, config).largest[0]
    alone = round_of(dataset, tiny_config()).largest[0]
    with tiny_loop(config) as loop:
        model = loop.attached.model.get_base_model()
        assert are_apart(model, batch) is True
        # A cache, and transformers no longer looks at the positions.
        model.config.use_cache = True
        assert are_apart(model, batch) is False
        model.config.use_cache = False
        positions = torch.arange(alone["input_ids"].shape[1]).expand_as(alone["input_ids"])
        assert are_apart(model, {**alone, "position_ids": positions}) is None
    with tiny_base(config) as base:
        base.model.config.use_cache = True
        found = measured(trial_on(base, config, dataset=dataset, steps=BRIEF).run())
    assert found.documents_apart is False
    assert trial.DOCUMENTS_TOGETHER in found.flags


def test_compiled_layers_keep_texts_apart_or_are_found_out(dataset: Any, dynamo: None) -> None:
    """transformers warns that packed rows may be taken for one text where it is compiled as a whole
    (its pull request 41827): here the mask is made outside of the layers that are compiled."""
    from qlora_sweep.sweep.data.probing import are_apart
    from qlora_sweep.sweep.training.adapters import compile_each

    config = tiny_config(packing="packed", checkpoint_fraction=0.0)
    batch = round_of(dataset, config).largest[0]
    with tiny_loop(config) as loop:
        model = loop.attached.model.get_base_model()
        eager_loss = model(**batch).loss.item()
        compile_each(loop.attached.layers, backend="eager")
        assert model(**batch).loss.item() == pytest.approx(eager_loss, rel=1e-5)
        assert are_apart(model, batch) is True
        model.config.use_cache = True
        assert are_apart(model, batch) is False


def test_work_is_counted_of_what_is_computed(dataset: Any) -> None:
    from qlora_sweep.sweep.training.meter import flops_per_token

    config, most = tiny_config(), 1e12
    found = on_dataset(dataset, config, peak_flops={config.compute_dtype: most})
    shapes = shapes_of(round_of(dataset, config))
    work = 0.0
    with tiny_loop(config) as loop:
        for rows, width in shapes:
            of_token = flops_per_token(loop.attached, loop.attached.model.config, width)
            work += rows * width * of_token
    expected = work / len(shapes) / found.step_seconds / most
    assert found.flops_utilization == pytest.approx(expected)


def test_a_model_that_looks_ahead_is_not_trained_on_padded_rows(dataset: Any) -> None:
    from tests.families import spec_of

    values = spec_of("gemma3_text").config | {"use_bidirectional_attention": True}
    spec = ModelSpec("both-ways", "directory", values)
    outcome = outcome_of(tiny_config(attention="eager"), spec=spec, dataset=dataset, steps=BRIEF)
    assert isinstance(outcome, Invalid)
    assert outcome.rule == trial.NOT_CAUSAL


def test_a_model_that_is_told_no_positions_packs_nothing(
    dataset: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(packing="packed")
    with tiny_base(config) as base:
        real = base.model.forward

        def forward(input_ids: Any, labels: Any = None) -> Any:
            return real(input_ids=input_ids, labels=labels)

        monkeypatch.setattr(base.model, "forward", forward)
        outcome = trial_on(base, config, dataset=dataset, steps=BRIEF).run()
    assert isinstance(outcome, Ineffective)
    assert outcome.setting == "packing"
