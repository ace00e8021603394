"""Contributions of others: checked, kept on this machine, and made into evidence of GPUs' speed.

A step's log seconds are nearly straight in the log factors of its terms, so that trials change what
the catalogue says of a GPU as a linear model with normal errors is changed. Trials of one file
share their session: its host's pace, its GPU's clocks.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from search_spaces.config import TrialConfig, canonical
from search_spaces.errors import InputError
from search_spaces.gpus import GIB
from search_spaces.linears import linear_shapes
from storage.contributions import Contribution, read_contribution
from storage.files import replace, writing
from storage.surfaces import SurfaceRow
from sweep.predict.memory.predictor import MemoryPredictor
from sweep.predict.memory.profile_store import OnProgress, tell_nobody
from sweep.predict.speed.evidence import (
    NAME,
    SESSION,
    Array,
    basis,
    contributions_directory,
    residual_spread,
    shipped_evidence,
)
from sweep.predict.speed.predictor import StepTimes

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
ROUNDS = 5
"""The model is made straight again around each solution."""
_TOLERANCE = 1e-6
"""Relative, of numbers that are worked out of each other."""
_WEIGHT_BYTES = {"nf4": 0.5, "fp4": 0.5, "fp8": 1.0, "int8": 1.0, "none": 2.0}


# Checks.


def check(
    contribution: Contribution,
    *,
    predictor: MemoryPredictor,
    on_progress: OnProgress = tell_nobody,
) -> None:
    """Refuse a file whose numbers no study could have measured.

    Raises:
        InputError: says which of them, in one sentence.
    """
    label = contribution.surface.name
    for row in contribution.measured:
        if (fault := _fault(row, contribution)) is not None:
            raise InputError(f"{label}: {_words(row.config)}: {fault}")
    rows = contribution.measured
    memory = predictor.predict_all([row.config for row in rows], on_progress=on_progress)
    far: list[str] = []
    for at, row in enumerate(rows):
        if at in memory.refused or row.peak_allocated_bytes is None:
            continue
        predicted = memory.prediction(at)
        off = row.peak_allocated_bytes / predicted.peak_allocated_bytes - 1.0
        if abs(off) > MEMORY_TIMES * predicted.uncertainty:
            peak, of = row.peak_allocated_bytes / GIB, predicted.peak_allocated_bytes / GIB
            far.append(
                f"{_words(row.config)}: a peak of {peak:.2f} GiB where {of:.2f} is predicted"
            )
    if len(far) > most_outliers(len(rows)):
        raise InputError(f"{label}: {far[0]}; {len(far)} of {len(rows)} trials are as far off")
    session = Session(contribution)
    if not len(session.rows):
        raise InputError(f"{label}: the speed of none of its configurations is predicted")
    if len(session.outliers) > most_outliers(len(session.rows)):
        first, z = session.outliers[0]
        raise InputError(
            f"{label}: its trials contradict each other: {_words(rows[first].config)} is {z:.0f} "
            f"standard deviations off what the others imply, and so are {len(session.outliers)} of "
            f"{len(rows)}"
        )


def most_outliers(trials: int) -> int:
    """Return how many of a file's trials may be left out."""
    return max(1, int(OUTLIERS_MOST * trials))


def _words(config: TrialConfig) -> str:
    return f"trial {config.micro_batch_size} x {config.seq_len}, rank {config.lora_rank}"


def _fault(row: SurfaceRow, contribution: Contribution) -> str | None:
    """Return what is impossible of a measured trial by itself; None where nothing is."""
    config, card, model = row.config, contribution.surface.card, contribution.surface.model
    seconds, peak = row.step_seconds, row.peak_allocated_bytes
    assert seconds, "what fits has seconds"
    assert peak, "what fits has a peak"
    if config.data_parallel > 1:
        return "several GPUs took it, and a contribution is of one"
    tokens = (row.tokens_per_second or 0.0) * seconds
    if abs(tokens / config.tokens_per_step - 1.0) > _TOLERANCE:
        return (
            f"tokens_per_second times step_seconds is {tokens:,.0f} tokens, and a step has "
            f"{config.tokens_per_step:,}"
        )
    low, high = row.step_seconds_ci95 or (seconds, seconds)
    if not low <= seconds <= high:
        return f"step_seconds {seconds:g} is outside its own interval, {low:g} to {high:g}"
    reserved = row.peak_reserved_bytes or peak
    if max(peak, reserved) > card.memory_bytes or reserved < peak:
        return (
            f"peaks of {peak:,} allocated and {reserved:,} reserved bytes do not go together on a "
            f"GPU of {card.memory_bytes:,}"
        )
    least = least_seconds(config, contribution)
    if seconds < least:
        return (
            f"{seconds:g} s a step is less than the {least:.3g} s that the {card.name}'s peak "
            f"FLOP/s and bandwidth allow {model.name}"
        )
    return None


def least_seconds(config: TrialConfig, contribution: Contribution) -> float:
    """Return what a step takes at the data sheet's peak FLOP/s, or to read the frozen weights twice
    in each micro-batch at its bandwidth."""
    card, model = contribution.surface.card, contribution.surface.model
    phases = StepTimes([config], model=model, gpu=card, evidence=None).phases
    by_flops = float(phases.model_flops[0] / phases.peak_flops[0])
    weights = sum(a * b for a, b in (linear_shapes(model) or {}).values()) * model.hidden_layers
    read = 2 * config.accumulation_steps * weights * _WEIGHT_BYTES[config.quantization]
    return max(float(np.nan_to_num(by_flops)), read / card.bandwidth_bytes_per_second)


def refuse_known(
    contribution: Contribution, kept: Sequence[Contribution], *, is_shipped: bool = False
) -> Contribution | None:
    """Return the kept file that this one goes on with, and takes the place of; None without one.

    Two studies never measure the same seconds to the last digit.

    Raises:
        InputError: it is kept already, whole or as a part, or it is an edited copy.
    """
    label, gpu, replaced = contribution.surface.name, contribution.surface.gpu, None
    shipped = None if is_shipped else shipped_evidence(gpu)
    known = {one.digest for one in kept}
    known |= {f["digest"] for f in (shipped.entry["files"] if shipped else ())}
    if contribution.digest in known:
        raise InputError(f"{label}: is known already, as {contribution.digest}")
    own = {canonical(row.config): row for row in contribution.measured}
    for other in (other for other in kept if other.surface.gpu == gpu):
        theirs = {canonical(row.config): row for row in other.measured}
        pairs = [(row, theirs[config]) for config, row in own.items() if config in theirs]
        shared = [_shared(*pair) for pair in pairs]
        copied, edited = shared.count(True), shared.count(None)
        if edited and edited + copied >= min(2, len(own)):
            raise InputError(
                f"{label}: {edited + copied} trials are those of {other.digest}, {edited} of them "
                "with other numbers: one of the files was edited"
            )
        if copied and copied == len(own):
            raise InputError(f"{label}: all of its trials are in {other.digest}, which is kept")
        if copied and copied == len(theirs):
            replaced = other
        elif copied:
            raise InputError(f"{label}: {copied} of its trials are those of {other.digest} too")
    return replaced


def _shared(row: SurfaceRow, other: SurfaceRow) -> bool | None:
    """Return whether two rows are one measurement; None where one is the other with some numbers
    changed."""

    def clocked(of: SurfaceRow) -> tuple[float | None, ...]:
        ends = of.step_seconds_ci95 or (None, None)
        return (of.step_seconds, of.tokens_per_second, of.device_seconds, *ends)

    same = [a == b for a, b in zip(clocked(row), clocked(other), strict=True) if a is not None]
    if not any(same):
        return False
    return True if all(same) and row == other else None


# The estimate.


class Session:
    """The measured trials of one file that have a prediction, without its outliers."""

    def __init__(self, contribution: Contribution, *, is_shipped: bool = False) -> None:
        self.contribution, self._is_shipped = contribution, is_shipped
        surface, rows = contribution.surface, contribution.measured
        self._times = StepTimes(
            [row.config for row in rows], model=surface.model, gpu=surface.card, evidence=None
        )
        self._log_seconds = np.log([row.step_seconds or np.nan for row in rows])
        self.rows = np.flatnonzero(self._times.is_known)
        """The trials that count."""
        self.outliers: list[tuple[int, float]] = []
        """Trials that are left out, and how many standard deviations each is off."""
        while len(self.rows) > 1:
            off = self._off()
            worst = int(np.argmax(np.abs(off)))
            if abs(off[worst]) <= LIMIT:
                break
            self.outliers.append((int(self.rows[worst]), float(abs(off[worst]))))
            self.rows = np.delete(self.rows, worst)

    def prior(self) -> tuple[Array, Array]:
        """Return mean and covariance of the log factors before the file was seen."""
        shipped = shipped_evidence(self.contribution.surface.gpu)
        if shipped is not None and not self._is_shipped:
            return shipped.mean, shipped.covariance
        return np.zeros(len(SESSION)), self._times.spread

    def straight(self, log_factors: Array) -> tuple[Array, Array, Array]:
        """Return slopes, measured log seconds less what is not by the slopes, and covariance."""
        slopes = self._times.slopes(log_factors, self.rows)
        rest = self._times.log_seconds(log_factors, self.rows) - slopes @ log_factors
        noise = np.diag(residual_spread(slopes) ** 2) + slopes @ SESSION @ slopes.T
        return slopes, self._log_seconds[self.rows] - rest, noise

    def _off(self) -> Array:
        """Return by how many standard deviations each trial is off what the others imply."""
        mean, covariance = self.prior()
        slopes, seen, noise = self.straight(posterior([self], mean, covariance)[0])
        weights = np.linalg.inv(slopes @ covariance @ slopes.T + noise)
        return np.asarray(weights @ (seen - slopes @ mean) / np.sqrt(np.diag(weights)))


def posterior(sessions: Iterable[Session], mean: Array, covariance: Array) -> tuple[Array, Array]:
    """Return mean and covariance of the log factors once files have been seen."""
    sessions, before, found = tuple(sessions), np.linalg.inv(covariance), mean
    known = before
    for _ in range(ROUNDS):
        known, told = before, before @ mean
        for session in sessions:
            slopes, seen, noise = session.straight(found)
            weighted = np.linalg.solve(noise, slopes)
            known, told = known + slopes.T @ weighted, told + weighted.T @ seen
        found = np.linalg.solve(known, told)
    return found, np.linalg.inv(known)


@dataclass(frozen=True)
class Vote:
    """What one file says of its GPU beside the others."""

    contribution: Contribution
    trials: int
    times: float
    """The seconds of all files' trials by this file alone, over those by the catalogue's rates."""
    is_outvoted: bool


def votes(sessions: Sequence[Session]) -> list[Vote]:
    """Return the vote of each file of one GPU: the median counts, a vote a file.

    Of two files that contradict each other the catalogue's rates are the third vote.
    """
    mean, covariance = sessions[0].prior()
    pooled = np.vstack([session.straight(mean)[0] for session in sessions]).mean(axis=0)
    found = [posterior([session], mean, covariance) for session in sessions]
    said = [float(pooled @ (own - mean)) for own, _ in found]
    middle = median([*said, 0.0] if len(said) == 2 else said)
    apart = 2.0 * pooled @ SESSION @ pooled
    spreads = [float(np.sqrt(pooled @ own @ pooled + apart)) for _, own in found]
    return [
        Vote(
            s.contribution, len(s.rows), float(np.exp(said_by)), abs(said_by - middle) > LIMIT * of
        )
        for s, said_by, of in zip(sessions, said, spreads, strict=True)
    ]


def by_gpu(
    contributions: Iterable[Contribution], *, is_shipped: bool = False
) -> dict[str, list[Session]]:
    """Return the sessions of some files by GPU, each GPU's by digest."""
    found: dict[str, list[Session]] = defaultdict(list)
    for contribution in sorted(contributions, key=lambda one: one.digest):
        session = Session(contribution, is_shipped=is_shipped)
        if len(session.rows):
            found[contribution.surface.gpu].append(session)
    return dict(sorted(found.items()))


def evidence_document(
    contributions: Iterable[Contribution], *, is_shipped: bool = False
) -> dict[str, Any]:
    """Return the estimate of each GPU, and which files it is from.

    Args:
        contributions: the files.
        is_shipped: whether it is what the catalogue ships, which begins from the rates alone; what
            a machine keeps comes on top of that.
    """
    sessions = by_gpu(contributions, is_shipped=is_shipped)
    return {"basis": basis(), "gpus": {gpu: _entry(of) for gpu, of in sessions.items()}}


def _entry(sessions: Sequence[Session]) -> dict[str, Any]:
    cast = votes(sessions)
    counted = [s for s, vote in zip(sessions, cast, strict=True) if not vote.is_outvoted]
    mean, covariance = posterior(counted, *sessions[0].prior())
    keys = {"date", "versions", "driver", "power_limit_watts"}
    return {
        "mean": mean.tolist(),
        "covariance": covariance.tolist(),
        "trials": sum(len(session.rows) for session in counted),
        "files": [
            {
                "digest": session.contribution.digest,
                "model": session.contribution.surface.model.name,
                "trials": len(session.rows),
                **session.contribution.header.model_dump(include=keys),
            }
            for session in counted
        ],
        "outvoted": [vote.contribution.digest for vote in cast if vote.is_outvoted],
    }


# What this machine keeps.


def kept() -> list[Contribution]:
    """Return the files that this machine keeps, by digest."""
    paths = sorted(contributions_directory().glob("*.jsonl"))
    return [read_contribution(path) for path in paths]


def keep(contribution: Contribution, *, instead_of: Contribution | None = None) -> None:
    """Keep a checked file, in the place of the one that it goes on with."""
    path = contributions_directory() / f"{contribution.digest}.jsonl"
    with writing(path):
        replace(path, contribution.text.encode())
    if instead_of is not None:
        forget(instead_of.digest)


def forget(digest: str) -> None:
    """Keep a file no longer.

    Raises:
        InputError: none of this digest is kept.
    """
    path = contributions_directory() / f"{digest}.jsonl"
    known = {one.stem for one in contributions_directory().glob("*.jsonl")}
    if digest not in known:
        raise InputError(f"no contribution {digest} is kept: `sweep calibrate` lists them")
    path.unlink()


def estimate_anew() -> dict[str, Any]:
    """Work out and keep what the kept files say; return it."""
    document, path = evidence_document(kept()), contributions_directory() / NAME
    with writing(path):
        replace(path, json.dumps(document).encode())
    return document
