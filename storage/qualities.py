"""Owns what a configuration's trainings with several seeds come to: one held-out loss. Pure.

A training's loss depends on the adapters it began with and on the order of the texts, and so on its
seed. The few configurations that the choice is between are trained with further seeds; their loss
is then the mean over the seeds, with Student's 95 % interval. As two or three losses say little of
how far losses spread, the spread is pooled over all configurations that were trained with several
seeds, as that of speeds is (`confirmations`); one that spread more keeps its own.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from search_spaces.config import TrialConfig, canonical
from storage.confirmations import Spread
from storage.objectives import measured_of, objective_value
from storage.records import Measured, QualityReport, TrialRecord

CLAIMED_RANK = 16
"""What articles about QLoRA recommend, as a rule without a loss beside it."""


def pooled_qualities(
    records: Iterable[TrialRecord], confirmations: Iterable[TrialRecord]
) -> Mapping[TrialConfig, QualityReport]:
    """Return what each canonical configuration learned, over all seeds that it was trained with.

    Args:
        records: trials of the search, each trained with the study's own seed.
        confirmations: what trained some of them with further ones.
    """
    runs: dict[TrialConfig, dict[int, QualityReport]] = {}
    for record in (*records, *(r for r in confirmations if r.purpose == "quality")):
        report = (
            record.outcome.measurement.quality if isinstance(record.outcome, Measured) else None
        )
        if report is not None:
            runs.setdefault(canonical(record.config), {})[report.seed] = report
    spread = Spread.of(_losses(known.values()) for known in runs.values())
    return {config: _pooled(tuple(known.values()), spread) for config, known in runs.items()}


def _pooled(runs: Sequence[QualityReport], spread: Spread) -> QualityReport:
    if len(runs) == 1:
        return runs[0]
    losses = _losses(runs)
    mean, own = statistics.fmean(losses), statistics.stdev(losses)
    half = spread.t * max(spread.deviation, own) / math.sqrt(len(runs))
    return runs[0].model_copy(
        update={
            "eval_loss": mean,
            "train_loss": statistics.fmean(run.train_loss for run in runs),
            "seconds": sum(run.seconds for run in runs),
            "seeds": tuple(run.seed for run in runs),
            "eval_loss_ci95": (mean - half, mean + half),
        }
    )


def claimed_pair(ranked: Iterable[TrialRecord]) -> tuple[TrialRecord, TrialRecord] | None:
    """Return the trials over which it is judged whether one rank is the best: the lowest loss of
    that rank, and of the others the lowest that differs from it in nothing else.

    Where no two are alike, the lowest losses of both; None where only one of them was trained.
    """
    judged = [r for r in ranked if r.measurement is not None and r.measurement.quality is not None]
    own = [r for r in judged if r.config.lora_rank == CLAIMED_RANK]
    others = [r for r in judged if r.config.lora_rank != CLAIMED_RANK]

    def order(pair: tuple[TrialRecord, TrialRecord]) -> tuple[float, ...]:
        losses = (objective_value("eval_loss", measured_of(record)) for record in pair)
        return (bool(differences(*pair)), *losses)

    return min(itertools.product(own, others), key=order, default=None)


def differences(one: TrialRecord, other: TrialRecord) -> tuple[str, ...]:
    """Return in what two trials differ, besides their rank, that decides what is learned."""
    first, second = (canonical(record.config) for record in (one, other))
    return tuple(k for k, of in _LEARNED_BY.items() if of(first) != of(second))


_LEARNED_BY: Mapping[str, Callable[[TrialConfig], object]] = {
    "learning rate": lambda config: config.learning_rate,
    "target modules": lambda config: config.target_modules,
    "scale (alpha over rank)": lambda config: (config.lora_alpha or 0.0) / config.lora_rank,
    "dropout": lambda config: config.lora_dropout,
    "rows a step": lambda config: config.samples_per_step,
    "length": lambda config: config.seq_len,
    "packing": lambda config: config.packing,
    "optimizer": lambda config: config.optimizer,
    "precision": lambda config: (
        config.compute_dtype,
        config.adapter_dtype,
        config.upcast_fp32,
    ),
    "base": lambda config: (
        config.quantization,
        config.double_quant,
        config.quantized_fraction,
    ),
}


def _losses(runs: Iterable[QualityReport]) -> list[float]:
    return [run.eval_loss for run in runs]
