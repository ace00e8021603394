"""Owns `sweep verify` on the terminal: progress, the two figures beside each other, the verdict.

Knows nothing of how anything is run.
"""

from __future__ import annotations

from pathlib import Path

from reports import units
from search_spaces.documents import exists
from search_spaces.errors import InputError
from sweep.finetuning.beside import Compared
from sweep.paths import storage_url
from sweep.terminal.console import say, say_json
from sweep.terminal.listings import read
from sweep.terminal.working import working
from sweep.verifying.record import Record, record_of_export, record_of_study
from sweep.verifying.runs import verify
from sweep.verifying.verdict import Verification

NOT_AS_RECORDED = 1


def run(
    what: str,
    *,
    steps: int,
    trial: int | None,
    model: str | None,
    storage: str | None,
    as_json: bool,
) -> int:
    """Verify, print how it compares, and return the exit code: 1 where it is not as recorded."""
    record = _record(what, trial=trial, storage=storage)
    with working(f"running {record.label} for {steps} steps") as part:
        found = verify(
            record, steps=steps, model=model, tell=lambda name, done, of: part(name)(done, of)
        )
    if as_json:
        say_json(found.to_json())
    else:
        say("\n".join(lines(found)))
    return 0 if found.ok else NOT_AS_RECORDED


def _record(what: str, *, trial: int | None, storage: str | None) -> Record:
    """Return what is verified: a file or directory that is there, else a study."""
    if exists(Path(what), label=what):
        if trial is not None:
            raise InputError("--trial: an export is of one trial; leave it out")
        return record_of_export(what)
    if what.endswith((".py", ".yaml", ".yml", ".json")) or "/" in what:
        raise InputError(f"{what}: no such file")
    return record_of_study(read(what, url=storage_url(storage)), number=trial)


_RUNS = {
    "training": "our training",
    "script": "the exported script (transformers' Trainer)",
    "trl": "TRL's SFTTrainer on the exported file",
}


def lines(found: Verification) -> list[str]:
    """Return what is said of a verification, for a person."""
    verdict = "As recorded" if found.ok else "Not as recorded"
    return [
        f"{verdict}: {found.label}, {found.steps} steps of {_RUNS[found.kind]}.",
        f"tokens/s        {units.rate(found.speed.promised)} recorded, "
        f"{units.rate(found.speed.reached)} reached: {_beside(found.speed)}",
        f"peak allocated  {units.gib(found.memory.promised)} recorded, "
        f"{units.gib(found.memory.reached)} reached: {_beside(found.memory)}",
        *(f"- {difference}" for difference in found.differences),
    ]


def _beside(compared: Compared) -> str:
    if compared.ratio is None:
        return "not compared"
    within = units.percent(compared.tolerance)
    return f"{100 * (compared.ratio - 1.0):+.1f} % (within {within} is as recorded)"
