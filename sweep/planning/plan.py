"""Owns a plan: everything that is said of one card, and of several side by side.

Pure: space or configuration, forecaster and offers in, a plan out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from search_spaces.config import TrialConfig
from search_spaces.gpus import GpuSpec
from search_spaces.models import ModelSpec
from search_spaces.prices import Offer
from search_spaces.rules import violation
from search_spaces.space import SearchSpace
from sweep.planning.cost import STEPS, AskedWork, bills
from sweep.planning.evidence import Evidence
from sweep.planning.forecast import Forecast, Forecaster
from sweep.planning.survey import Survey, merit, thinned
from sweep.planning.table import BATCHES, LENGTHS, ShapeTable, shape_table
from sweep.predict.cost import Bill, Comparison, compare

VALUES_SHOWN = 12
"""Rows or columns that the table takes from one dimension."""
GRID_BATCHES = (1, 2, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128)


@dataclass(frozen=True)
class CardPlan:
    """What is said of one card."""

    gpu: GpuSpec
    budget_bytes: int
    model: ModelSpec
    shown: Forecast | None
    """The configuration that is asked about, or the recommended one; None where nothing fits."""
    table: ShapeTable | None
    """Other sizes of that configuration."""
    survey: Survey | None
    """Of the space; None where one configuration is asked about."""
    bills: tuple[Bill, ...]
    """Of the shown configuration, the cheapest first."""
    evidence: Evidence

    @property
    def fits(self) -> bool:
        """Whether anything fits, by the best guess."""
        return self.shown is not None and self.shown.fits

    @property
    def notes(self) -> tuple[str, ...]:
        """What is missing, and why."""
        return (*self.evidence.notes, *(self.shown.notes if self.shown is not None else ()))


def plan_space(
    found: Survey, *, forecaster: Forecaster, work: AskedWork, offers: Sequence[Offer]
) -> CardPlan:
    """Return the plan of a space that was looked over: what it holds, its fastest configuration.

    Raises:
        InputError: memory cannot be predicted.
        EnvironmentFault: the tracing process does not answer.
    """
    space, best, table = found.space, found.recommended, None
    if best is not None:
        table = shape_table(
            forecaster,
            best.config,
            batches=_shown_values(space, "micro_batch_size") or BATCHES,
            lengths=_shown_values(space, "seq_len") or LENGTHS,
        )
    return _card_plan(best, forecaster, table=table, found=found, work=work, offers=offers)


def plan_configuration(
    config: TrialConfig, *, forecaster: Forecaster, work: AskedWork, offers: Sequence[Offer]
) -> CardPlan:
    """Return the plan of one configuration, whether it fits or not. Raises as `plan_space`."""
    asked = forecaster.forecast(config)
    table = None if asked.memory is None else shape_table(forecaster, config)
    return _card_plan(asked, forecaster, table=table, found=None, work=work, offers=offers)


def _card_plan(
    shown: Forecast | None,
    forecaster: Forecaster,
    *,
    table: ShapeTable | None,
    found: Survey | None,
    work: AskedWork,
    offers: Sequence[Offer],
) -> CardPlan:
    model = forecaster.model
    return CardPlan(
        gpu=forecaster.gpu,
        budget_bytes=forecaster.budget_bytes,
        model=model,
        shown=shown,
        table=table,
        survey=found,
        bills=() if shown is None else bills(shown, work=work, offers=offers, model=model),
        evidence=forecaster.evidence,
    )


def recipe_space(gpu: GpuSpec, model: ModelSpec) -> SearchSpace:
    """Return the space of a card that is named without one: the recipe's knobs at rank 16.

    Rank and target modules stay the standard recipe's, as they buy capacity and not speed.
    """
    positions = model.max_positions or LENGTHS[-1]
    lengths = [length for length in LENGTHS if length <= positions] or [positions]
    knobs = {
        "micro_batch_size": GRID_BATCHES,
        "seq_len": lengths,
        "checkpoint_fraction": (0.0, 0.5, 1.0),
        "upcast_fp32": (True, False),
        "kernels": ("hf", "fused-loss", "liger"),
        "compile": (False, True),
    }
    return SearchSpace.model_validate(
        {
            "name": gpu.name,
            "gpu": gpu.name,
            "model": model.name,
            "dimensions": {key: {"choices": list(values)} for key, values in knobs.items()},
            "fixed": {"compute_dtype": _best_dtype(gpu, model)},
        }
    )


def _best_dtype(gpu: GpuSpec, model: ModelSpec) -> str:
    """Return bf16, or fp16 on a card that is too old for it."""
    broken = violation(
        TrialConfig(), model=model, compute_capability=gpu.compute_capability, device="cuda"
    )
    return "fp16" if broken is not None and broken.rule == "bf16-needs-ampere" else "bf16"


def _shown_values(space: SearchSpace, key: str) -> list[int]:
    """Return at most a dozen of a dimension's values; none where it is fixed."""
    values = space.dimensions[key].values() if key in space.dimensions else None
    return thinned(values or (), most=VALUES_SHOWN)


def compare_cards(
    plans: Sequence[CardPlan], *, work: AskedWork, offers: Mapping[str, Sequence[Offer]]
) -> Comparison | None:
    """Return the bills of the same work on several cards; None where fewer than two can do it.

    The same work means the same samples of the same length, for adapters of the same capacity:
    each card does it with its own fastest configuration of that class.
    """
    rivals = _rivals(plans)
    if len(rivals) < 2:
        return None
    first = rivals[0][1].config
    if work.samples is None and work.tokens is None and work.dataset_samples is None:
        steps = STEPS if work.steps is None else work.steps
        work = replace(work, steps=None, samples=steps * first.samples_per_step)
    every = [
        one
        for plan, forecast in rivals
        for one in bills(
            forecast, work=work, offers=offers.get(plan.gpu.name, ()), model=plan.model
        )
    ]
    return compare(every) if every else None


def _rivals(plans: Sequence[CardPlan]) -> list[tuple[CardPlan, Forecast]]:
    """Return each card's forecast for the same work; cards on which nothing fits have none."""
    able = [plan for plan in plans if plan.fits]
    surveys = [plan.survey for plan in able if plan.survey is not None]
    if len(surveys) < len(able):
        return [(plan, plan.shown) for plan in able if plan.shown is not None]
    if not surveys:
        return []
    common = set.intersection(*(set(one.fastest_by_class) for one in surveys))
    if not common:
        return []
    chosen = max(common, key=lambda key: merit(surveys[0].fastest_by_class[key]))
    pairs = zip(able, surveys, strict=True)
    return [(plan, one.fastest_by_class[chosen]) for plan, one in pairs]
