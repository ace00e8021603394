"""Owns what a person's fine-tune costs: how much work was asked about, and its bills by offer.

Pure. Billing itself is `sweep.predict.cost`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from search_spaces.config import TrialConfig
from search_spaces.errors import InputError
from search_spaces.linears import parameters
from search_spaces.models import ModelSpec
from search_spaces.prices import Offer
from sweep.planning.forecast import Forecast
from sweep.predict.cost import Bill, Workload, bill

STEPS = 1000
"""Optimizer steps where nothing else is asked."""
CHECKPOINT_BYTES = 2
"""Bytes of a parameter as models are published: bf16."""


@dataclass(frozen=True)
class AskedWork:
    """How much training is asked about, in one of four ways; 1,000 steps where in none.

    Raises:
        InputError: in more than one way, or epochs of no dataset.
    """

    steps: int | None = None
    samples: int | None = None
    tokens: int | None = None
    dataset_samples: int | None = None
    epochs: float | None = None

    def __post_init__(self) -> None:
        named = {
            "--steps": self.steps,
            "--samples": self.samples,
            "--tokens": self.tokens,
            "--dataset-samples": self.dataset_samples,
        }
        given = [option for option, value in named.items() if value is not None]
        if len(given) > 1:
            raise InputError(f"{' and '.join(given)} both say how much to train: keep one")
        if self.epochs is not None and self.dataset_samples is None:
            raise InputError("--epochs needs --dataset-samples: how many samples an epoch has")

    def workload(self, config: TrialConfig, *, model: ModelSpec) -> Workload:
        """Return the work for ``config``: the fewest whole steps of its effective batch.

        Raises:
            InputError: an amount that is not positive.
        """
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
    """Return what the work costs under each offer, the cheapest first; none where speed is unknown.

    Raises:
        InputError: an amount of work that is not positive.
    """
    workload = work.workload(forecast.config, model=model)
    if forecast.step_seconds is None:
        return ()
    every = (bill(workload, step_seconds=forecast.step_seconds, offer=offer) for offer in offers)
    return tuple(sorted(every, key=lambda one: one.usd))
