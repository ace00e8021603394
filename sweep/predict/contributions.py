"""Contributions of others: checked, kept on this machine, and made into evidence of GPUs' speed.

A step's log seconds are nearly linear in the log factors of its terms, so trials update them as
a linear model with normal errors. Trials of one file share a session: host's pace, GPU's clocks.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import UTC, date, datetime
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from qlora_sweep.search_spaces.config import canonical
from qlora_sweep.search_spaces.errors import InputError, SweepError
from qlora_sweep.search_spaces.gpus import GIB, MEMORY_TOLERANCE
from qlora_sweep.storage.contributions import Contribution, read_contribution
from qlora_sweep.storage.files import replace, writing
from qlora_sweep.storage.soundness import contradicted_tokens, frozen_linear_weights
from qlora_sweep.storage.surfaces import SurfaceRow
from qlora_sweep.sweep.predict.memory.predictor import MemoryPredictor
from qlora_sweep.sweep.predict.memory.profile_store import OnProgress, tell_nobody, write_cache
from qlora_sweep.sweep.predict.speed import contributed
from qlora_sweep.sweep.predict.speed.contributed import (
    SESSION,
    Array,
    Contributed,
    shipped_contributions,
)
from qlora_sweep.sweep.predict.speed.predictor import StepTimes

LIMIT = 4.0
"""Standard deviations beyond which a trial, or a file's vote, contradicts the others.

Of the 700 trials of seven recordings under `tests/data` 1 % are further off what the others of
their file imply.
"""
OUTLIERS_MOST = 0.05
"""Share of a file's trials that may be left out as such: of those recordings at most 2 % are, or
one."""
MEMORY_TIMES = 2.0
"""How many times the stated uncertainty a peak may be off: of the 445 trials of both recorded
surfaces none is 1.5 times as far."""
CI95_WIDTH = 3.92
"""Standard deviations from end to end of a 95 % interval."""
SPREAD_MOST = 0.35
"""Standard deviation of the logarithms of measured over predicted seconds in one file, without as
many trials as may be outliers, above which its trials may contradict each other.

Of the recordings under `tests/data`, by model, none is above 0.24. With half of their trials three
times slower, whichever half, none is below 0.38.
"""
FITTED_SPREAD_MOST = 0.18
"""The same over what the GPU's own factors make of them: a GPU that is slow in one way alone, as
under a power limit, is far off the catalogue and within this. Of the recordings none is above 0.17,
of those with a slowed half none is below 0.19."""
ROUNDS = 5
"""The model is made linear again around each solution."""


def check(
    contribution: Contribution,
    *,
    predictor: MemoryPredictor,
    shipped: Contributed | None = None,
    on_progress: OnProgress = tell_nobody,
    today: date | None = None,
) -> None:
    """Refuse a file whose numbers no study could have measured.

    Args:
        contribution: the file.
        predictor: of its model's memory on its GPU.
        shipped: what the catalogue's contributions say of the GPU.
        on_progress: told of memory's predictions.
        today: the day; by default this machine's, in UTC.

    Raises:
        InputError: says which of them, in one sentence.
    """
    label, rows = contribution.surface.name, contribution.measured
    fault = _fault_of_header(contribution, today=today or datetime.now(UTC).date())
    if fault is not None:
        raise InputError(f"{label}: {fault}")
    for row in rows:
        for is_wrong, fault in _faults(row, contribution):
            if is_wrong:
                raise InputError(f"{label}: {_words(row)}: {fault}")
    most = max(1, int(OUTLIERS_MOST * len(rows)))
    memory, far = predictor.predict_all([r.config for r in rows], on_progress=on_progress), []
    for at in (at for at in range(len(rows)) if at not in memory.refused):
        predicted, peak = memory.prediction(at), rows[at].peak_allocated_bytes or 0
        expected = predicted.peak_allocated_bytes
        if abs(peak / expected - 1.0) > MEMORY_TIMES * predicted.uncertainty:
            peaks = f"a peak of {peak / GIB:.2f} GiB where {expected / GIB:.2f} is predicted"
            far.append(f"{_words(rows[at])}: {peaks}")
    if len(far) > most:
        raise InputError(f"{label}: {far[0]}; {len(far)} of {len(rows)} trials are as far off")
    session = Session(contribution, shipped)
    if not len(session.rows):
        raise InputError(f"{label}: the speed of none of its configurations is predicted")
    if len(session.outliers) > most:
        first, off = session.outliers[0]
        raise InputError(
            f"{label}: its trials contradict each other: {_words(rows[first])} is {off:.0f} "
            f"standard deviations off what the others imply; {len(session.outliers)} of "
            f"{len(rows)} are too far"
        )
    spread, fitted_spread = session.spreads(left_out=most)
    if spread > SPREAD_MOST and fitted_spread > FITTED_SPREAD_MOST:
        raise InputError(
            f"{label}: its trials contradict each other: their seconds are {np.exp(spread):.1f} "
            "times apart from trial to trial beside what is predicted, and of one GPU that was "
            f"never more than {np.exp(SPREAD_MOST):.1f} times"
        )


def _fault_of_header(contribution: Contribution, *, today: date) -> str | None:
    """Return what cannot be in a file's first line; None where all of it can."""
    header, gpu = contribution.header, contribution.surface.card
    if date.fromisoformat(header.date) > today:
        return f"date {header.date} is in the future: set the clock of the machine that measured it"
    if "torch" not in header.versions:
        return "versions do not name torch, and speeds are of a version: contribute the study again"
    memory_bytes = header.gpu_memory_bytes
    if memory_bytes is not None:
        off = abs(memory_bytes / gpu.memory_bytes - 1.0)
        if off > MEMORY_TOLERANCE:
            return (
                f"gpu_memory_bytes {memory_bytes:,} is no {gpu.product}'s, "
                f"which has {gpu.memory_bytes:,}"
            )
    return None


def _words(row: SurfaceRow) -> str:
    config = row.config
    return f"trial {config.micro_batch_size} x {config.seq_len}, rank {config.lora_rank}"


def _faults(row: SurfaceRow, contribution: Contribution) -> tuple[tuple[bool, str], ...]:
    """Return what may be impossible of a measured trial by itself, and whether it is."""
    config, card, model = row.config, contribution.surface.card, contribution.surface.model
    seconds, peak = row.step_seconds or 0.0, row.peak_allocated_bytes or 0
    reserved = row.peak_reserved_bytes or peak
    contradiction = contradicted_tokens(
        config,
        tokens_per_second=row.tokens_per_second or 0.0,
        step_seconds=seconds,
        loss_tokens=None,
    )
    low, high = row.step_seconds_ci95 or (seconds, seconds)
    # At the data sheet's peak, and with the frozen weights read once in each pass.
    phases = StepTimes([config], model=model, gpu=card, evidence=None).phases
    flops = float(np.nan_to_num(phases.model_flops[0] / phases.peak_flops[0]))
    weights = frozen_linear_weights(model)
    read = 2 * config.accumulation_steps * weights * config.weight_bits / 8
    least = max(flops, read / card.bandwidth_bytes_per_second)
    return (
        (config.data_parallel > 1, "several GPUs took it, and a contribution is of one"),
        (contradiction is not None, contradiction or ""),
        (
            not low <= seconds <= high,
            f"step_seconds {seconds:g} is outside its own interval, {low:g} to {high:g}",
        ),
        (
            not peak <= reserved <= card.memory_bytes,
            f"peaks of {peak:,} allocated and {reserved:,} reserved bytes do not go together on a "
            f"GPU of {card.memory_bytes:,}",
        ),
        (
            seconds < least,
            f"{seconds:g} s a step is less than the {least:.3g} s that the {card.name}'s peak "
            f"FLOP/s and bandwidth allow {model.name}",
        ),
    )


def refuse_copy(
    contribution: Contribution, kept: Sequence[Contribution], shipped: Contributed | None = None
) -> Contribution | None:
    """Return the kept file that this one continues, and takes the place of; None without one.

    Two studies never measure the same seconds to the last digit.

    Raises:
        InputError: its trials are a kept file's, as they are there or edited.
    """
    label, own = contribution.surface.name, _by_config(contribution)
    replaced = None
    known = [file["digest"] for file in (shipped.entry["files"] if shipped else ())]
    if contribution.digest in (*known, *(one.digest for one in kept)):
        raise InputError(f"{label}: is known already, as {contribution.digest}")
    for other in kept:
        theirs = _by_config(other) if other.surface.gpu == contribution.surface.gpu else {}
        pairs = [(own[config], theirs[config]) for config in own.keys() & theirs.keys()]
        copies = [(a, b) for a, b in pairs if _clocked(a) & _clocked(b)]
        edited = sum(a != b for a, b in copies)
        # A rounded number may be the same by chance.
        if edited and len(copies) >= min(2, len(own)):
            raise InputError(
                f"{label}: {len(copies)} trials are those of {other.digest}, {edited} of them with "
                "other numbers: one of the files was edited"
            )
        if copies and len(copies) == len(theirs) < len(own):
            replaced = other
        elif copies and not edited:
            raise InputError(f"{label}: {len(copies)} of its trials are in {other.digest} already")
    return replaced


def _by_config(contribution: Contribution) -> dict[Any, SurfaceRow]:
    return {canonical(row.config): row for row in contribution.measured}


def _clocked(row: SurfaceRow) -> set[float]:
    clocked = (row.step_seconds, row.device_seconds, *(row.step_seconds_ci95 or ()))
    return {number for number in clocked if number is not None}


class Session:
    """The measured trials of one file that have a prediction, without its outliers."""

    def __init__(self, contribution: Contribution, shipped: Contributed | None = None) -> None:
        surface, rows = contribution.surface, contribution.measured
        self.contribution = contribution
        self._times = StepTimes(
            [row.config for row in rows], model=surface.model, gpu=surface.card, evidence=None
        )
        self._log_seconds = np.log([row.step_seconds or np.nan for row in rows])
        ends = [row.step_seconds_ci95 or (1.0, 1.0) for row in rows]
        self._variances = np.array([np.log(high / low) / CI95_WIDTH for low, high in ends]) ** 2
        self.prior: tuple[Array, Array] = (np.zeros(len(SESSION)), self._times.spread)
        """Mean and covariance of the log factors before the file was seen."""
        if shipped is not None:
            self.prior = shipped.mean, shipped.covariance
        self.rows = np.flatnonzero(self._times.is_known)
        """The trials that count."""
        self.outliers: list[tuple[int, float]] = []
        """Trials that are left out, and how many standard deviations each is off."""
        while len(self.rows) > 1:
            off = self._off()
            worst = int(np.argmax(off))
            if off[worst] <= LIMIT:
                break
            self.outliers.append((int(self.rows[worst]), float(off[worst])))
            self.rows = np.delete(self.rows, worst)

    def linear(self, log_factors: Array) -> tuple[Array, Array, Array]:
        """Return slopes, measured log seconds less what is not by the slopes, and covariance."""
        slopes = self._times.slopes(log_factors, self.rows)
        rest = self._times.log_seconds(log_factors, self.rows) - slopes @ log_factors
        own = self._times.own_spread[self.rows] ** 2 + self._variances[self.rows]
        noise = np.diag(own) + slopes @ SESSION @ slopes.T
        return slopes, self._log_seconds[self.rows] - rest, noise

    def spreads(self, *, left_out: int) -> tuple[float, float]:
        """Return how far the file's trials are apart beside what the catalogue predicts, and beside
        what the GPU's own factors make of that: standard deviations of logarithms.

        Args:
            left_out: how many trials, the furthest off, do not count.
        """
        rows = np.flatnonzero(self._times.is_known)
        found = []
        for log_factors in (np.zeros(len(SESSION)), posterior([self])[0]):
            off = self._log_seconds[rows] - self._times.log_seconds(log_factors, rows)
            nearest = np.argsort(np.abs(off - np.median(off)))
            kept = nearest[: max(1, len(rows) - left_out)]
            found.append(float(off[kept].std()))
        return found[0], found[1]

    def _off(self) -> Array:
        """Return by how many standard deviations each trial is off what the others imply."""
        mean, covariance = self.prior
        slopes, seen, noise = self.linear(posterior([self])[0])
        weights = np.linalg.inv(slopes @ covariance @ slopes.T + noise)
        return np.abs(weights @ (seen - slopes @ mean)) / np.sqrt(np.diag(weights))


def posterior(
    sessions: Sequence[Session], prior: tuple[Array, Array] | None = None
) -> tuple[Array, Array]:
    """Return mean and covariance of a GPU's log factors once files of it have been seen; without a
    prior the first file's."""
    mean, covariance = prior or sessions[0].prior
    before, found = np.linalg.inv(covariance), mean
    known = before
    for _ in range(ROUNDS):
        known, told = before, before @ mean
        for session in sessions:
            slopes, seen, noise = session.linear(found)
            weighted = np.linalg.solve(noise, slopes)
            known, told = known + slopes.T @ weighted, told + weighted.T @ seen
        found = np.linalg.solve(known, told)
    return found, np.linalg.inv(known)


def evidence_document(
    contributions: Iterable[Contribution], *, is_shipped: bool = False
) -> dict[str, Any]:
    """Return the estimate of each GPU, and which files it is from.

    Args:
        contributions: the files.
        is_shipped: whether it is what the catalogue ships, which begins from the rates alone; what
            a machine keeps comes on top of that.
    """
    by_gpu: dict[str, list[Session]] = defaultdict(list)
    for contribution in sorted(contributions, key=lambda one: (one.surface.gpu, one.digest)):
        shipped = None if is_shipped else shipped_contributions(contribution.surface.gpu)
        session = Session(contribution, shipped)
        if len(session.rows):
            by_gpu[contribution.surface.gpu].append(session)
    return {"basis": contributed.basis(), "gpus": {gpu: _entry(of) for gpu, of in by_gpu.items()}}


def _entry(sessions: Sequence[Session]) -> dict[str, Any]:
    """Return what files say of one GPU: the median counts, a vote a file.

    Of one file, or an even number, the catalogue's rates have the last vote, which may leave none.
    """
    mean = sessions[0].prior[0]
    pooled = np.vstack([session.linear(mean)[0] for session in sessions]).mean(axis=0)
    alone = [posterior([session]) for session in sessions]
    votes = [float(pooled @ (own - mean)) for own, _ in alone]
    middle = median(votes if len(votes) % 2 and len(votes) > 1 else [*votes, 0.0])
    files: list[dict[str, Any]] = []
    counted: list[Session] = []
    for session, vote, (_, covariance) in zip(sessions, votes, alone, strict=True):
        # Its own session and that of the file in the middle are apart beside what it leaves open.
        spread = np.sqrt(pooled @ (covariance + 2.0 * SESSION) @ pooled)
        is_outvoted = bool(abs(vote - middle) > LIMIT * spread)
        header = session.contribution.header
        counted += [] if is_outvoted else [session]
        files.append(
            {
                "digest": session.contribution.digest,
                "model": header.model,
                "trials": len(session.rows),
                "times_predicted_seconds": float(np.exp(vote)),
                "is_outvoted": is_outvoted,
                **header.model_dump(include={"date", "versions", "driver", "power_limit_watts"}),
            }
        )
    found, covariance = posterior(counted, sessions[0].prior)
    trials = sum(len(session.rows) for session in counted)
    known = {"mean": found.tolist(), "covariance": covariance.tolist()}
    return known | {"trials": trials, "files": files}


def kept() -> list[Contribution]:
    """Return the files that this machine keeps, by digest."""
    return [read_contribution(path) for path in _paths()]


def _paths() -> list[Path]:
    return sorted(contributed.directory().glob("*.jsonl"))


def renewed() -> dict[str, Any]:
    """Return what the files that this machine keeps say by today's rates, and keep that.

    A file that cannot be read any more says nothing, and stays.
    """
    able = []
    for path in _paths():
        with suppress(SweepError):
            able.append(read_contribution(path))
    document = evidence_document(able)
    write_cache(contributed.directory() / contributed.NAME, document)
    return document


def keep(contributions: Sequence[Contribution]) -> dict[str, Any]:
    """Keep these files and no others, with what they say, which is returned."""
    directory, document = contributed.directory(), evidence_document(contributions)
    texts = {f"{one.digest}.jsonl": one.text for one in contributions}
    with writing(directory):
        for name, text in {**texts, contributed.NAME: json.dumps(document)}.items():
            replace(directory / name, text.encode())
        for path in _paths():
            if path.name not in texts:
                path.unlink()
    return document
