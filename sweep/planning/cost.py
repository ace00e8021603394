"""Owns what a person's fine-tune costs: how much work was asked about, and its bills by offer.

Pure. Billing itself is `sweep.predict.cost`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from search_spaces.config import TrialConfig
from search_spaces.errors import InputError, quote
from search_spaces.linears import parameters
from search_spaces.models import ModelSpec
from search_spaces.prices import Offer
from sweep.planning.forecast import Forecast
from sweep.predict.cost import Bill, Workload, bill

STEPS = 1000
"""Optimizer steps where nothing else is asked."""
AMOUNT_MAX = 1e15
"""More steps, samples or tokens than this is a slip."""
CHECKPOINT_BYTES = 2
"""Bytes of a parameter as models are published: bf16."""


@dataclass(frozen=True)
class AskedWork:
    """How much training is asked about, in one of four ways; 1,000 steps where in none.

    Raises:
        InputError: in more than one way, an amount out of range, or epochs of no dataset.
    """

    steps: int | None = None
    samples: int | None = None
    tokens: int | None = None
    dataset_samples: int | None = None
    epochs: float | None = None

    def __post_init__(self) -> None:
        amounts = {
            "--steps": self.steps,
            "--samples": self.samples,
            "--tokens": self.tokens,
            "--dataset-samples": self.dataset_samples,
        }
        for option, value in {**amounts, "--epochs": self.epochs}.items():
            if value is not None and not 0 < value <= AMOUNT_MAX:
                raise InputError(
                    f"{option} must be greater than 0 and at most {AMOUNT_MAX:g}, "
                    f"got {quote(value)}"
                )
        given = [option for option, value in amounts.items() if value is not None]
        if len(given) > 1:
            raise InputError(f"{' and '.join(given)} both say how much to train: keep one")
        if self.epochs is not None and self.dataset_samples is None:
            raise InputError("--epochs needs --dataset-samples: how many samples an epoch has")

    def workload(self, config: TrialConfig, *, model: ModelSpec) -> Workload:
        """Return the work for ``config``: the fewest whole steps of its effective batch."""
        per_step, per_sample = config.samples_per_step, float(config.seq_len)
        download = float((parameters(model) or 0) * CHECKPOINT_BYTES)
        if self.samples is not None:
            return Workload.of_samples(
                self.samples,
                samples_per_step=per_step,
                tokens_per_sample=per_sample,
                download_bytes=download,
            )
        if self.tokens is not None:
            return Workload.of_tokens(
                self.tokens,
                samples_per_step=per_step,
                tokens_per_sample=per_sample,
                download_bytes=download,
            )
        if self.dataset_samples is not None:
            return Workload.of_epochs(
                1.0 if self.epochs is None else self.epochs,
                dataset_samples=self.dataset_samples,
                samples_per_step=per_step,
                tokens_per_sample=per_sample,
                download_bytes=download,
            )
        steps = STEPS if self.steps is None else self.steps
        return Workload(steps, per_step, per_sample, download_bytes=download)


def bills(
    forecast: Forecast, *, work: AskedWork, offers: Sequence[Offer], model: ModelSpec
) -> tuple[Bill, ...]:
    """Return the work's bills, the cheapest first; none where the speed is unknown."""
    if forecast.step_seconds is None:
        return ()
    workload = work.workload(forecast.config, model=model)
    every = (bill(workload, step_seconds=forecast.step_seconds, offer=offer) for offer in offers)
    return tuple(sorted(every, key=lambda one: one.usd))
