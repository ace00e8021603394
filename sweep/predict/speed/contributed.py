"""What contributed measurements say of a GPU's speed, as a prediction takes it up.

`sweep.predict.contributions` writes it, of files that this machine keeps; a prediction reads it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qlora_sweep.sweep.paths import runs_directory
from qlora_sweep.sweep.predict.memory.profile_store import source_digest
from qlora_sweep.sweep.predict.speed.steps import TERMS

Array = NDArray[np.float64]

NAME = "contributed_speed.json"
"""Of the file, where this machine keeps contributions and where the catalogue ships its own."""
DEVICE_SESSION, HOST_SESSION = 0.036, 0.38
"""How far whole sessions are apart beside each step's own: another GPU of the kind, another host,
another day.

By maximum likelihood of the 700 trials of seven recordings on H200s under `tests/data`
(`pytest tests/sweep/predict/test_contributions.py` leaves each out and predicts it). Of the GPU's
part the estimate is 0.014; with seven sessions 0.036 is the upper end of what nineteen in twenty
are below.
"""
_LAUNCH = len(TERMS)
SESSION: Array = np.zeros((len(TERMS) + 2, len(TERMS) + 2))
"""The covariance of the log factors between sessions."""
SESSION[:_LAUNCH, :_LAUNCH] = DEVICE_SESSION**2
SESSION[_LAUNCH, _LAUNCH] = HOST_SESSION**2


@dataclass(frozen=True)
class Contributed:
    """What contributions say of one GPU: logarithms of factors, in the order of `FACTORS`."""

    entry: Mapping[str, Any]
    """As it is stored: ``mean`` and ``covariance``, ``trials`` and ``files``."""

    @cached_property
    def mean(self) -> Array:
        """Of the factors by which the GPU's terms differ from the catalogue's rates."""
        return np.array(self.entry["mean"])

    @cached_property
    def covariance(self) -> Array:
        """Of the same, for the kind of GPU."""
        return np.array(self.entry["covariance"])

    @cached_property
    def spread(self) -> Array:
        """The covariance on a machine of which nothing is known."""
        return self.covariance + SESSION

    @property
    def trials(self) -> int:
        """Measured trials that count."""
        return int(self.entry["trials"])

    @property
    def files(self) -> int:
        """Files that they are from."""
        return sum(not file["is_outvoted"] for file in self.entry["files"])


def directory() -> Path:
    """Return where this machine keeps contributions."""
    return runs_directory() / "contributions"


def contributed_speed(gpu: str) -> Contributed | None:
    """Return what this machine's contributions, or else the catalogue's, say of a GPU."""
    path = directory() / NAME
    try:
        changed = path.stat().st_mtime_ns
    except OSError:
        return shipped_contributions(gpu)
    return _kept(path, changed).get(gpu) or shipped_contributions(gpu)


def shipped_contributions(gpu: str) -> Contributed | None:
    """Return what the catalogue's contributions say of a GPU."""
    path = Path(str(files("qlora_sweep.search_spaces") / NAME))
    return _by_gpu(json.loads(path.read_bytes())).get(gpu) if path.is_file() else None


@lru_cache(maxsize=8)
def _kept(path: Path, changed: int) -> Mapping[str, Contributed]:
    """Return what is kept by GPU; it is read again once the file has changed."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        document = json.loads(path.read_bytes())
        if document["basis"] == basis():
            return _by_gpu(document)
    # It is damaged, or its factors are of other rates, or of other code that they multiply.
    from qlora_sweep.sweep.predict import contributions

    return _by_gpu(contributions.renewed())


def _by_gpu(document: Mapping[str, Any]) -> Mapping[str, Contributed]:
    """Return a document's estimates; a GPU whose files are all outvoted has none."""
    return {gpu: Contributed(entry) for gpu, entry in document["gpus"].items() if entry["trials"]}


@cache
def basis() -> str:
    """Return a digest of the rates and the code that factors multiply."""
    shipped = files("qlora_sweep.search_spaces")
    rates = b"".join((shipped / n).read_bytes() for n in ("gpus.yaml", "speed_spreads.yaml"))
    code = source_digest("search_spaces", "sweep/predict/speed").encode()
    return hashlib.sha256(rates + code).hexdigest()
