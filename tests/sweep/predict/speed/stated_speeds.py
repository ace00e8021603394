"""What is stated of predicted speeds, derived from the committed measurements.

`python -m tests.sweep.predict.speed.stated_speeds` writes `search_spaces/speed_spreads.yaml` and
the table of docs/lab/speed.md; the tests compare both with what is derived here.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import yaml

from qlora_sweep.search_spaces.config import TrialConfig, parse_config
from qlora_sweep.search_spaces.gpus import GpuSpec, SpeedSpread, SpeedSpreads, find_gpu
from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.sweep.predict.speed.predictor import StepTimes
from tests.bench.harness import with_part
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
from tests.sweep.predict.speed.spreads import MeasuredStep, evidence_of, with_pairs

ROOT = Path(__file__).parents[4]
EVIDENCE, PAGE = ROOT / "search_spaces" / "speed_spreads.yaml", ROOT / "docs" / "lab" / "speed.md"
BEGIN, END = "<!-- coverage: derived -->\n", "<!-- end of coverage -->"
BOUNDS = ("compute", "bandwidth", "launch")
_PROJECT = re.compile(r"https://github\.com/([^/]+/[^/ ]+).*")


@dataclass(frozen=True)
class Step:
    """A measured step, and where from."""

    gpu: str
    source: str
    """The address that it was published at, or the session that it was measured in."""
    model: ModelSpec
    config: TrialConfig
    seconds: float
    is_published: bool
    is_strong: bool = True

    @property
    def project(self) -> str:
        """Whose it is. Steps of one project share hosts, a stack and what was guessed of them."""
        return _PROJECT.sub(r"\1", self.source) if self.is_published else "our own"

    def times(self, spread: SpeedSpread) -> StepTimes:
        gpu: GpuSpec = find_gpu(self.gpu).model_copy(update={"speed": spread})
        return StepTimes([self.config], model=self.model, gpu=gpu, evidence=None)

    @cached_property
    def measured(self) -> MeasuredStep:
        times = self.times(SpeedSpread())
        return MeasuredStep(
            self.gpu,
            self.project if self.is_published else self.source,
            math.log(self.seconds / float(times.seconds[0])),
            float(times.host_shares[0]),
            is_shared=self.config.data_parallel > 1,
            is_on_pairs=self.config.is_on_pairs,
        )


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
            row["gpu"],
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


def evidence(is_known: Callable[[Step], bool] = lambda step: True) -> SpeedSpreads:
    """What is stated; of some steps alone, as if no others were known.

    What steps on pairs are off by beyond the others is of one session, and is always known.
    """
    on_pairs = [step.measured for step in steps() if step.config.is_on_pairs]
    others = [step for step in steps() if not step.config.is_on_pairs]
    known = [step.measured for step in others if is_known(step)]
    return with_pairs(evidence_of(known), on_pairs)


def outcome(step: Step, spread: SpeedSpread) -> Outcome:
    found = step.times(spread).prediction(0)
    assert not isinstance(found, Exception), found
    low, high = found.step_estimate.ends
    ratio = step.seconds / found.step_seconds
    return Outcome(step, found.bottleneck, ratio, low <= step.seconds <= high, high / low)


def _held_out(group_of: Callable[[Step], str]) -> tuple[Outcome, ...]:
    """Each group of steps predicted from the evidence of the others."""
    known = {}
    for group in dict.fromkeys(map(group_of, steps())):
        known[group] = evidence(lambda step, left=group: group_of(step) != left)
    found = []
    for step in steps():
        spreads = known[group_of(step)]
        found.append(outcome(step, spreads.gpus.get(step.gpu, spreads.others)))
    return tuple(found)


@cache
def without_its_source() -> tuple[Outcome, ...]:
    """Each step predicted as if nothing of its project were known."""
    return _held_out(lambda step: step.project)


@cache
def without_its_gpu() -> tuple[Outcome, ...]:
    """Each step predicted as if nothing of its GPU were known."""
    return _held_out(lambda step: step.gpu)


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
    """The page's table: published steps by what bounds them, by GPU and by project; our own."""
    of_others, of_other_gpus = without_its_source(), without_its_gpu()
    text = "| steps | n | inside | width | error | median | inside | width | error | median |\n"
    text += "|---|---|---|---|---|---|---|---|---|---|\n"
    for is_published, whose in ((True, "published"), (False, "our own")):
        pairs = [
            (one, other)
            for one, other in zip(of_others, of_other_gpus, strict=True)
            if one.step.is_published is is_published
        ]
        groups: dict[str, Sequence[tuple[Outcome, Outcome]]] = {f"**{whose}**": pairs}
        for bound in BOUNDS:
            groups[f"{whose}, {bound}"] = [pair for pair in pairs if pair[0].bound == bound]
        for gpu in sorted({pair[0].step.gpu for pair in pairs}):
            groups[f"{whose}, {gpu}"] = [pair for pair in pairs if pair[0].step.gpu == gpu]
        groups[f"{whose}, on pairs"] = [pair for pair in pairs if pair[0].step.config.is_on_pairs]
        for project in sorted({pair[0].step.project for pair in pairs} - {whose}):
            groups[project] = [pair for pair in pairs if pair[0].step.project == project]
        for name, group in groups.items():
            text += line(name, *zip(*group, strict=True)) if group else ""
    return text


def dumped(known: SpeedSpreads) -> str:
    """The evidence as its file has it."""
    head = """\
# How far predicted speeds may be off, by measured steps: standard deviations of logarithms, and
# what each GPU is expected to take over what its rates say. docs/lab/speed.md says how;
# `python -m tests.sweep.predict.speed.stated_speeds` writes this file.
"""
    return head + yaml.safe_dump(
        known.model_dump(mode="json"), sort_keys=False, default_flow_style=None, width=200
    )


def with_table(page: str) -> str:
    return with_part(page, table(), begin=BEGIN, end=END)


if __name__ == "__main__":
    EVIDENCE.write_text(dumped(evidence()), encoding="utf-8")
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
