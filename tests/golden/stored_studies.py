"""Five studies of different kinds, made by hand and stored as a driver stores them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.gpus import GIB
from qlora_sweep.search_spaces.models import load_model_spec
from qlora_sweep.storage import records as ended
from qlora_sweep.storage.definition import StudySnapshot
from qlora_sweep.storage.ranking import measured_of, rank_study
from qlora_sweep.storage.records import TrialRecord
from qlora_sweep.sweep.sampling.encoding import Encoding
from tests.reports.synthetic import (
    LONG,
    SOAKED,
    about_loss,
    definition,
    fits,
    learned,
    plausible_study,
    record,
    snapshot,
)
from tests.storage.builders import agreeing, confirmed, open_it
from tests.sweep.export.studies import some_dataset
from tests.sweep.predict.rows import EIGHT_BIT

MODEL = load_model_spec("mistral-7b-v0.3")


def the_studies() -> Iterator[StudySnapshot]:
    """Yield them as their definitions and records say."""
    model = {"model": MODEL.to_json(), "model_fingerprint": MODEL.fingerprint}
    speed = replace(plausible_study(0), name="speed")
    for study in (speed, _of_a_front(), _of_dataset(), _of_gpus(), _of_nothing_that_fits()):
        whole = replace(study, definition=study.definition.model_copy(update=model))
        yield replace(whole, confirmations=tuple(_again(whole)))


def store(study: StudySnapshot, *, url: str, home: Path) -> None:
    """Ask for every trial of a study, begin it and tell it, as a driver does."""
    encoding = Encoding(study.definition.space)
    searched = encoding.distributions
    known = {"definition": study.definition, "environment": study.environment}
    with open_it(url, home, name=study.name, **known) as opened:
        for told in (*study.records, *study.confirmations):
            params = encoding.params_of(told.config) if told.purpose == "search" else None
            trial = opened.ask(searched, params=params) if params else opened.ask_again()
            run_kind = told.model_dump(include=set(ended.RunKind.model_fields))
            begun = opened.begin(
                trial, told.config, str(told.started_at), run_kind=ended.RunKind(**run_kind)
            )
            named = {"number": trial.number, "attempt_id": begun.id}
            opened.tell(trial, told.model_copy(update=named))
        opened.note(ended={"reason": "trials_spent", "open": 7, "most_promising": None})
        opened.add_wall_seconds(study.wall_seconds)


def _again(study: StudySnapshot) -> Iterator[TrialRecord]:
    """Yield runs in turns of the best two and the baseline, each a little slower, and soaks."""
    ranking = rank_study(study)
    rivals = {trial.number: trial.record for trial in ranking.ranked[:2]}
    if rivals and ranking.baseline is not None:
        rivals.setdefault(ranking.baseline.number, ranking.baseline.record)
    for turn, run in enumerate(confirmed(*rivals.values())):
        measured, share = measured_of(run), 0.99 - 0.003 * turn
        changes = {
            "tokens_per_second": share * measured.tokens_per_second,
            "step_seconds": measured.step_seconds / share,
            "step_seconds_ci95": tuple(end / share for end in measured.step_seconds_ci95 or ()),
            "soak": SOAKED if run.purpose == "soak" else None,
        }
        outcome = ended.Measured(measurement=measured.model_copy(update=changes))
        yield run.model_copy(update={"outcome": outcome})


def _of_a_front() -> StudySnapshot:
    space = {"objectives": ["tokens_per_second", "peak_memory"]}
    about = definition(space=space, emulated_on=None)
    return replace(plausible_study(3, trials=30), name="front", definition=about)


def _of_dataset() -> StudySnapshot:
    """Return a study on chats, of what was learned and how fast."""
    study = about_loss(
        learned(0, 16, 2.0, 0.01),
        learned(1, 64, 1.6, 0.02, speed=8_900.0),
        learned(2, 8, 2.2, speed=9_500.0),
        record(3, ended.OutOfMemory(stage="forward"), LONG),
    )
    dataset = some_dataset("messages", completions_only=True, source="mine.jsonl")
    about = study.definition.model_copy(update={"texts": dataset})
    return replace(study, name="texts", definition=about)


def _of_gpus() -> StudySnapshot:
    """Return a study on one H100 or two, whose winner computes in 8 bits."""
    values: dict[str, tuple[Any, ...]] = {
        "data_parallel": (1, 2),
        "micro_batch_size": (8, 16),
        "compute_dtype": ("bf16", "fp8"),
    }
    space = {
        "name": "h100-80gb",
        "gpu": "h100-80gb",
        "dimensions": {key: {"choices": known} for key, known in values.items()},
        "fixed": {"kernels": "liger", "upcast_fp32": False, "quantization": "fp8"},
        "baseline": {"quantization": "nf4"},
    }
    about = definition(space=space, gpu="h100-80gb", budget_bytes=78 * GIB, emulated_on=None)
    trials = [fits(0, 14_000.0, about.space.baseline_config())]
    for number, chosen in enumerate(itertools.product(*values.values()), start=1):
        config = about.space.config(dict(zip(values, chosen, strict=True)))
        close = EIGHT_BIT[0]["faithfulness"] if config.is_8bit_compute else None
        speed = 16_000.0 * config.data_parallel**0.9 * (1 + number / 20)
        measured = {"gpus": config.data_parallel, "faithfulness": close, "flags": ("throttled",)}
        trials.append(fits(number, speed, config, **measured))
    trials[3] = record(3, ended.Crashed(phase="warmup", cause="signal"), trials[3].config)
    agreed = [t.model_copy(update={"outcome": agreeing(t.outcome, t.config)}) for t in trials]
    return snapshot(agreed, name="gpus", definition=about)


def _of_nothing_that_fits() -> StudySnapshot:
    predicted_gain = ended.PredictionRecord(
        peak_allocated_bytes=28 * GIB, peak_reserved_bytes=29 * GIB
    )
    outcomes: tuple[ended.Outcome, ...] = (
        ended.OutOfMemory(stage="backward", requested_bytes=GIB, peak_allocated_bytes=21 * GIB),
        ended.DominatedOutOfMemory(by=0),
        ended.PredictedOutOfMemory(predicted_bytes=48 * GIB),
    )
    configs = [TrialConfig(micro_batch_size=batch) for batch in (8, 16, 24)]
    trials = map(record, range(3), outcomes, configs)
    return snapshot(
        (t.model_copy(update={"prediction": predicted_gain}) for t in trials), name="memory"
    )
