"""What is stated of predicted speeds, derived from the committed measurements.

`python -m tests.sweep.predict.speed.stated_speeds` writes `search_spaces/speed_spreads.yaml` and
the table of docs/speed.md; the tests compare both with what is derived here.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from search_spaces.config import TrialConfig, parse_config
from search_spaces.gpus import GpuSpec, SpeedSpread, SpeedSpreads, find_gpu
from search_spaces.models import ModelSpec
from sweep.predict.speed.predictor import StepTimes
from sweep.predict.speed.spreads import MeasuredStep, evidence_of, with_pairs
from tests.sweep.predict.rows import (
    DATA,
    EIGHT_BIT,
    HELD_OUT,
    PAIRS,
    STUDY_STEPS,
    TABLE,
    config_of,
    model_of,
    read_rows,
)

ROOT = Path(__file__).parents[4]
EVIDENCE, PAGE = ROOT / "search_spaces" / "speed_spreads.yaml", ROOT / "docs" / "speed.md"
BEGIN, END = "<!-- coverage: derived -->\n", "<!-- end of coverage -->"
BOUNDS = ("compute", "bandwidth", "launch")


@dataclass(frozen=True)
class Step:
    """A measured step, and where from."""

    gpu: str
    source: str
    model: ModelSpec
    config: TrialConfig
    seconds: float
    is_published: bool
    is_strong: bool = True

    def times(self, spread: SpeedSpread) -> StepTimes:
        gpu: GpuSpec = find_gpu(self.gpu).model_copy(update={"speed": spread})
        return StepTimes([self.config], model=self.model, gpu=gpu, evidence=None)

    @property
    def measured(self) -> MeasuredStep:
        times = self.times(SpeedSpread())
        ratio = math.log(self.seconds / float(times.seconds[0]))
        shared = self.config.data_parallel > 1
        share, on_pairs = float(times.host_shares[0]), self.config.is_on_pairs
        return MeasuredStep(self.gpu, self.source, ratio, share, shared, on_pairs)


@dataclass(frozen=True)
class Outcome:
    """A measured step beside what is predicted of it."""

    step: Step
    bound: str
    ratio: float
    """Measured seconds over predicted ones."""
    is_inside: bool
    width: float
    """Of the stated interval: its high end over its low one."""


def published() -> list[Step]:
    """What others published."""
    models = json.loads((DATA / "published_models.json").read_text(encoding="utf-8"))
    return [
        Step(
            row["card"],
            row["source"],
            ModelSpec(row["model"], "directory", models[row["model"]]),
            parse_config(row["config"]),
            row["step_seconds"],
            is_published=True,
            is_strong=row["strength"] == "strong",
        )
        for row in read_rows("published_speeds.jsonl")
    ]


def own() -> list[Step]:
    """Steps of our own that were timed for their speed, each file a session."""
    files = {
        ("h200", "table"): TABLE,
        ("h200", "held out"): HELD_OUT,
        ("h200", "studies"): STUDY_STEPS,
        ("h200", "8 bits"): EIGHT_BIT,
        ("h100-80gb", "studies"): read_rows("studies_h100.jsonl"),
        ("h100-80gb", "pairs"): PAIRS,
    }
    return [
        Step(gpu, source, model_of(row), config_of(row), row["step_seconds"], is_published=False)
        for (gpu, source), rows in files.items()
        for row in rows
    ]


@cache
def steps() -> tuple[Step, ...]:
    """What the evidence is: our own steps, and published ones whose configuration is known."""
    return (*(step for step in published() if step.is_strong), *own())


@cache
def measured() -> tuple[MeasuredStep, ...]:
    return tuple(step.measured for step in steps())


def evidence(without: str | None = None) -> SpeedSpreads:
    """What is stated; without the steps of one GPU, as if nothing were known of it."""
    on_pairs = [row for row in measured() if row.is_on_pairs]
    others = [row for row in measured() if row.gpu != without and not row.is_on_pairs]
    return with_pairs(evidence_of(others), on_pairs)


def outcome(step: Step, spread: SpeedSpread) -> Outcome:
    found = step.times(spread).prediction(0)
    assert not isinstance(found, Exception), found
    low, high = found.step_seconds_range
    ratio = step.seconds / found.step_seconds
    return Outcome(step, found.bottleneck, ratio, low <= step.seconds <= high, high / low)


@cache
def in_sample() -> tuple[Outcome, ...]:
    known = evidence()
    return tuple(outcome(step, known.gpus[step.gpu]) for step in steps())


@cache
def left_out() -> tuple[Outcome, ...]:
    """Each GPU predicted from the others' evidence."""
    gpus = dict.fromkeys(step.gpu for step in steps())
    others = {gpu: evidence(without=gpu).others for gpu in gpus}
    return tuple(outcome(step, others[step.gpu]) for step in steps())


def line(name: str, *groups: Iterable[Outcome]) -> str:
    cells = [name]
    for group in map(list, groups):
        ratios = [one.ratio for one in group]
        inside = statistics.mean(one.is_inside for one in group)
        width = statistics.median(one.width for one in group)
        error = statistics.median(abs(ratio - 1.0) for ratio in ratios)
        median = statistics.median(ratios)
        cells += [f"{100 * inside:.0f} %", f"{width:.2f}", f"{100 * error:.0f} %", f"{median:.2f}"]
        cells[1:1] = [str(len(group))] * (len(cells) == 5)
    return f"| {' | '.join(cells)} |\n"


def table() -> str:
    """The page's table: published steps by what bounds them and by GPU, then our own."""
    seen, unseen = in_sample(), left_out()
    text = "| steps | n | inside | width | error | median | inside | width | error | median |\n"
    text += "|---|---|---|---|---|---|---|---|---|---|\n"
    for is_published, whose in ((True, "published"), (False, "our own")):
        pairs = [
            (one, other)
            for one, other in zip(seen, unseen, strict=True)
            if one.step.is_published is is_published
        ]
        groups: dict[str, Sequence[tuple[Outcome, Outcome]]] = {f"**{whose}**": pairs}
        for bound in BOUNDS:
            groups[f"{whose}, {bound}"] = [pair for pair in pairs if pair[0].bound == bound]
        for gpu in sorted({pair[0].step.gpu for pair in pairs}):
            groups[f"{whose}, {gpu}"] = [pair for pair in pairs if pair[0].step.gpu == gpu]
        groups[f"{whose}, on pairs"] = [pair for pair in pairs if pair[0].step.config.is_on_pairs]
        for name, group in groups.items():
            text += line(name, *zip(*group, strict=True)) if group else ""
    return text


def dumped(known: SpeedSpreads) -> str:
    """The evidence as its file has it."""
    head = """\
# How far predicted speeds may be off, by measured steps: standard deviations of logarithms, and
# what each GPU is expected to take over what its rates say. docs/speed.md says how it is estimated;
# `python -m tests.sweep.predict.speed.stated_speeds` writes this file.
"""
    return head + yaml.safe_dump(
        known.model_dump(mode="json"), sort_keys=False, default_flow_style=None, width=200
    )


def with_table(page: str) -> str:
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    EVIDENCE.write_text(dumped(evidence()), encoding="utf-8")
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
