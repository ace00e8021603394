"""Contributions of others: checked, kept on this machine, and fitted as factors of a GPU's speed.

A step's log seconds are nearly linear in the log factors of its terms. Trials of one file share a
session: the host's pace, the GPU's clocks. Errors of trials and of sessions follow Student's t, so
that a trial, or a whole file, that contradicts the rest has little weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from qlora_sweep.search_spaces.config import canonical
from qlora_sweep.search_spaces.errors import InputError, SweepError
from qlora_sweep.storage.contributions import Contribution, read_contribution
from qlora_sweep.storage.files import replace, writing
from qlora_sweep.storage.soundness import contradicted_tokens, frozen_linear_weights
from qlora_sweep.storage.surfaces import SurfaceRow
from qlora_sweep.sweep.paths import runs_directory
from qlora_sweep.sweep.predict.speed.contributed import (
    DEVICE_SESSION,
    HOST_SESSION,
    SHARED,
    Array,
    Contributed,
)
from qlora_sweep.sweep.predict.speed.predictor import FACTORS, StepTimes

DEGREES_OF_FREEDOM = 4.0
"""Of Student's t: an error of three standard deviations has a third of a usual one's weight."""
AGREEING_LEAST = 0.7
"""Mean weight of a file's trials below which they contradict each other: of the recordings under
`tests/data` none is below 0.9, and where half are three times slower a half has none."""
ROUNDS = 30
"""Of reweighting, in each of which the model is made linear again around the solution."""
CI95_WIDTH = 3.92
"""Standard deviations from end to end of a 95 % interval."""


@dataclass(frozen=True)
class Session:
    """The measured trials of one file that have a prediction by the catalogue's rates."""

    times: StepTimes
    log_seconds: Array
    """(trials,)"""
    variances: Array
    """What each may be off by itself; infinite where nothing is predicted of it. (trials,)"""

    @classmethod
    def of(cls, contribution: Contribution, rows: Sequence[SurfaceRow]) -> Session:
        """Return some trials of a file."""
        surface = contribution.surface
        configs = list(map(attrgetter("config"), rows))
        times = StepTimes(configs, model=surface.model, gpu=surface.measured_on)
        ends = np.array([row.step_seconds_ci95 or (1.0, 1.0) for row in rows])  # (trials, 2)
        widths = np.log(ends[:, 1] / ends[:, 0]) / CI95_WIDTH
        log_seconds = np.log([row.step_seconds or np.nan for row in rows])  # (trials,)
        # What is not predicted teaches nothing.
        variances = np.where(times.is_known, times.own_spread**2 + widths**2, np.inf)
        return cls(times, log_seconds, variances)

    @property
    def times_predicted(self) -> float:
        """How many times as long as the catalogue predicts the median trial takes."""
        predicted = self.times.log_seconds(np.zeros(len(FACTORS)), slice(None))
        return float(np.exp(np.median((self.log_seconds - predicted)[self.times.is_known])))

    def linear(self, log_factors: Array) -> tuple[Array, Array]:
        """Return slopes, (trials, factors), and log seconds less what is not by the slopes."""
        rows = slice(None)
        slopes = self.times.slopes(log_factors, rows)
        rest = self.times.log_seconds(log_factors, rows) - slopes @ log_factors
        return slopes, self.log_seconds - rest


def fitted(sessions: Sequence[Session]) -> tuple[Contributed, list[Array]]:
    """Return the factors by which a GPU differs from the catalogue's rates, and the weight of each
    session's trials; a usual one's is 1.

    Iteratively reweighted least squares over the factors and what each session is off by: the EM
    algorithm for errors by Student's t (Lange, Little and Taylor 1989).
    """
    factors = len(FACTORS)
    unknowns = factors + 2 * len(sessions)
    solution = np.zeros(unknowns)
    information = np.zeros((unknowns, unknowns))
    weights = [np.ones_like(session.log_seconds) for session in sessions]
    session_variances = np.array([DEVICE_SESSION, HOST_SESSION] * len(sessions)) ** 2
    session_weights = np.ones_like(session_variances)
    for _ in range(ROUNDS):
        information = np.zeros((unknowns, unknowns))
        information[:factors, :factors] = np.linalg.inv(sessions[0].times.spread)
        information[factors:, factors:] = np.diag(session_weights / session_variances)
        seen = np.zeros(unknowns)
        designs = []
        for at, session in enumerate(sessions):
            own = slice(factors + 2 * at, factors + 2 * at + 2)
            slopes, measured = session.linear(solution[:factors] + SHARED @ solution[own])
            design = np.zeros((len(measured), unknowns))  # (trials, unknowns)
            design[:, :factors] = slopes
            design[:, own] = slopes @ SHARED
            designs.append((design, measured))
            weighted = design * (weights[at] / session.variances)[:, None]
            information += weighted.T @ design
            seen += weighted.T @ measured
        solution[:] = np.linalg.solve(information, seen)
        session_weights = _weights(solution[factors:] ** 2 / session_variances)
        for at, (design, measured) in enumerate(designs):
            squares = (measured - design @ solution) ** 2
            weights[at] = _weights(squares / sessions[at].variances)
    covariance = np.asarray(np.linalg.inv(information)[:factors, :factors], dtype=np.float64)
    trials = int(sum(session.times.is_known.sum() for session in sessions))
    found = Contributed(solution[:factors], covariance, files=len(sessions), trials=trials)
    return found, weights


def _weights(squares: Array) -> Array:
    """Return the weights of errors whose squares are these, in units of their variances."""
    return (DEGREES_OF_FREEDOM + 1.0) / (DEGREES_OF_FREEDOM + squares)


def sessions_of(contributions: Iterable[Contribution]) -> list[Session]:
    """Return the sessions of files of one GPU; a trial that is in two files is one."""
    known: set[Any] = set()
    sessions = []
    # A study that went on has the trials of its earlier file.
    for contribution in sorted(contributions, key=lambda one: (-len(one.measured), one.digest)):
        marked = {(canonical(row.config), row.step_seconds): row for row in contribution.measured}
        rows = [row for mark, row in marked.items() if mark not in known]
        known |= marked.keys()
        if rows:
            session = Session.of(contribution, rows)
            if session.times.is_known.any():
                sessions.append(session)
    return sessions


def directory() -> Path:
    """Return where this machine keeps contributions."""
    return runs_directory() / "contributions"


def contributed_speed(gpu: str) -> Contributed | None:
    """Return what this machine's contributions say of a GPU; None where there are none."""
    files = []
    for path in sorted(directory().glob(f"{gpu}.*.jsonl")):
        files.append((path, path.stat().st_mtime_ns))
    return _of_files(tuple(files))


@lru_cache(maxsize=8)
def _of_files(files: tuple[tuple[Path, int], ...]) -> Contributed | None:
    """Return what files of one GPU say, which are read again once one has changed; None where
    none can be read."""
    able = []
    for path, _ in files:
        with suppress(SweepError):
            able.append(read_contribution(path))
    sessions = sessions_of(able)
    if not sessions:
        return None
    return fitted(sessions)[0]


def keep(contribution: Contribution) -> None:
    """Keep a file on this machine, where predictions of its GPU go by it from now on."""
    name = f"{contribution.surface.gpu}.{contribution.digest}.jsonl"
    with writing(directory()):
        replace(directory() / name, contribution.text.encode())


def check(contribution: Contribution) -> float:
    """Return how many times as long as predicted a file's steps take.

    Raises:
        InputError: its trials cannot be of one GPU, or nothing is predicted of them.
    """
    label = contribution.surface.name
    for row in contribution.measured:
        fault = _impossible(row, contribution)
        if fault is not None:
            raise InputError(f"{label}: {fault}")
    sessions = sessions_of([contribution])
    if not sessions:
        raise InputError(f"{label}: the speed of none of its configurations is predicted")
    weights = fitted(sessions)[1][0][sessions[0].times.is_known]
    if weights.mean() < AGREEING_LEAST:
        raise InputError(f"{label}: its trials contradict each other: no one GPU measured them")
    return sessions[0].times_predicted


def _impossible(row: SurfaceRow, contribution: Contribution) -> str | None:
    """Return why one GPU cannot have measured a trial; None where it may have."""
    config = row.config
    gpu = contribution.surface.measured_on
    seconds = row.step_seconds or 0.0
    contradiction = contradicted_tokens(
        config,
        tokens_per_second=row.tokens_per_second or 0.0,
        step_seconds=seconds,
        loss_tokens=None,
    )
    if contradiction is not None:
        return contradiction
    if config.data_parallel > 1:
        return "several GPUs took a trial, and a contribution is of one"
    low, high = row.step_seconds_ci95 or (seconds, seconds)
    if not low <= seconds <= high:
        return f"step_seconds {seconds:g} is outside its own interval, {low:g} to {high:g}"
    peak = row.peak_allocated_bytes or 0
    reserved = row.peak_reserved_bytes or peak
    if not peak <= reserved <= gpu.memory_bytes:
        return (
            f"peaks of {peak:,} allocated and {reserved:,} reserved bytes do not go together on a "
            f"GPU of {gpu.memory_bytes:,}"
        )
    least = _least_seconds(row, contribution)
    if seconds < least:
        return (
            f"{seconds:g} s a step is less than the {least:.3g} s that the {gpu.name}'s peak "
            f"FLOP/s and bandwidth allow {contribution.surface.model.name}"
        )
    return None


def _least_seconds(row: SurfaceRow, contribution: Contribution) -> float:
    """Return the seconds of a step at the data sheet's peak, with the frozen weights read twice."""
    surface = contribution.surface
    config = row.config
    phases = StepTimes([config], model=surface.model, gpu=surface.measured_on).phases
    computing = float(np.nan_to_num(phases.model_flops[0] / phases.peak_flops[0]))
    weights = frozen_linear_weights(surface.model)
    read_bytes = 2 * config.accumulation_steps * weights * config.weight_bits / 8
    return max(computing, read_bytes / surface.measured_on.bandwidth_bytes_per_second)
