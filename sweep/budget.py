"""Owns that nothing fits above its budget: what was measured decides, whoever measured it.

Pure. Knows nothing of devices or runners.
"""

from __future__ import annotations

from storage.records import Measured, Outcome, OutOfMemory, PrunedSlow, Stage


def over_budget(
    peak_bytes: int, *, budget_bytes: int, stage: Stage, step: int = 0
) -> OutOfMemory | None:
    """Return out of memory where a measured peak is above the budget; None where it is within."""
    if peak_bytes <= budget_bytes:
        return None
    return OutOfMemory(
        stage=stage,
        step=step,
        peak_allocated_bytes=peak_bytes,
        detail=f"measured {peak_bytes:,} bytes, over the budget of {budget_bytes:,} bytes",
    )


def held_to_budget(outcome: Outcome, *, budget_bytes: int) -> Outcome:
    """Return the outcome of a trial, or out of memory where it was measured above the budget.

    Only a device knows the stage of the peak, and it says so itself; here it is the end of a step.
    """
    match outcome:
        case Measured(measurement=measured) | PrunedSlow(measurement=measured):
            peak = measured.peak_allocated_bytes
            return over_budget(peak, budget_bytes=budget_bytes, stage="optimizer") or outcome
        case _:
            return outcome
