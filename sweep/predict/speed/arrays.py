"""Owns the predicted step times of many configurations at once: how fast each is, and how sure.

Pure; knows nothing of torch, storage or files. `sweep.predict.speed.predictor` answers for one
configuration from the same arrays.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from search_spaces.config import TrialConfig
from search_spaces.gpus import GpuSpec
from search_spaces.models import ModelSpec
from sweep.predict.speed.between import parallel_doubt
from sweep.predict.speed.calibration import EIGHT_BIT_DOUBT, FACTORS, Calibration, Factor, in_order
from sweep.predict.speed.kernels import MASKED_DOUBT
from sweep.predict.speed.phases import StepPhases


class StepTimes:
    """The optimizer steps of configurations on a card, under whatever calibration is asked about.

    Args:
        configs: what is to be trained; one row of every answer each.
        model: the model's config; nothing is loaded.
        gpu: the card that runs it.

    Every answer is not a number where the architecture is not known or the card has no rate for the
    compute type.
    """

    def __init__(self, configs: Sequence[TrialConfig], *, model: ModelSpec, gpu: GpuSpec) -> None:
        self.phases = StepPhases.of(configs, model=model, gpu=gpu)
        self._card = gpu.speed_uncertainty
        self._numerics = [config.numerics for config in configs]
        self._known = frozenset(("16-bit", *gpu.measured_8bit))
        doubts = [_attention_doubt(config) for config in configs]
        self._attention_doubts: NDArray[np.float64] = np.array(doubts, np.float64)
        cards = [parallel_doubt(config) for config in configs]
        self._parallel_doubts: NDArray[np.float64] = np.array(cards, np.float64)

    def seconds(self, calibration: Calibration | None) -> NDArray[np.float64]:
        """Return the seconds of each step, accumulation included.

        Args:
            calibration: factors fitted to trials on that card; None takes the catalogue's rates.
        """
        return self.phases.seconds(_factors(calibration))

    def slopes(self, calibration: Calibration | None) -> NDArray[np.float64]:
        """Return seconds per unit of each of `FACTORS`, by configuration and factor."""
        return self.phases.slopes(_factors(calibration))

    def launch_shares(self, calibration: Calibration | None) -> NDArray[np.float64]:
        """Return the share of each step that goes with the host's launches, not with the card.

        By that many per cent the step is longer where a launch costs one per cent more.
        """
        return self._shares("launch", calibration)

    def uncertainty(self, calibration: Calibration | None) -> NDArray[np.float64]:
        """Return how far each step may be off, relative: nine in ten take its seconds times 1 -
        this to 1 + this.

        The card's own, between what it is for time that the card takes and for time that the host's
        launches take; smaller after trials on the card, for further steps of the same study.
        Of packed rows attention's share is unsure beside that, so are 8-bit products where no
        training in such was measured, and a step of several GPUs.
        """
        known = self._card if calibration is None else calibration.uncertainty(self._card)
        launches = self.launch_shares(calibration)
        stated = np.asarray(launches * known.launch + (1.0 - launches) * known.device)
        attention = self._shares("attention", calibration) * self._attention_doubts
        seen = self._known if calibration is None else self._known | calibration.numerics
        doubts = [0.0 if numerics in seen else EIGHT_BIT_DOUBT for numerics in self._numerics]
        eight_bit = self._shares("eight_bit", calibration) * np.array(doubts)
        # What a GPU is off by as a whole has nothing to do with what its 8-bit products are.
        return np.asarray(np.hypot(stated, eight_bit) + attention + self._parallel_doubts)

    def _shares(self, factor: Factor, calibration: Calibration | None) -> NDArray[np.float64]:
        """Return the share of each step that goes with a factor."""
        factors, column = _factors(calibration), FACTORS.index(factor)
        part = self.phases.slopes(factors)[:, column] * factors[column]
        return np.asarray(part / self.phases.seconds(factors))


def _attention_doubt(config: TrialConfig) -> float:
    """Return how far attention's time may be off because rows are packed, relative."""
    if config.packing != "packed" or config.attention == "eager":
        return 0.0
    # Flash attention is told where texts begin, and nobody has measured what that saves.
    return MASKED_DOUBT if config.attention == "sdpa" else 1.0


def _factors(calibration: Calibration | None) -> NDArray[np.float64]:
    return in_order(None if calibration is None else calibration.factors)
