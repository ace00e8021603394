"""`sweep contribute` and `sweep calibrate` once their options are read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from qlora_sweep.reports import format as units
from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.storage.contributions import contribution_of, read_contribution
from qlora_sweep.storage.files import checked_output, write_output
from qlora_sweep.storage.reading import read_study
from qlora_sweep.sweep.paths import runs_directory, storage_url
from qlora_sweep.sweep.terminal import console


def contribute(study: str, *, output: str | None, storage: str | None, as_json: bool) -> None:
    """Write what a study contributes, and say what is in it."""
    found = contribution_of(read_study(study, url=storage_url(storage), home=runs_directory()))
    name = output or f"contribution-{found.surface.gpu}-{found.digest}.jsonl"
    path = checked_output(name, what="a contribution", endings=(".jsonl",), is_forced=None)
    if path is None:
        console.say_as_is(found.text.rstrip())
        return
    write_output(path, found.text.encode())
    header, *rows = (json.loads(line) for line in found.text.splitlines())
    trials = {"fits": len(found.measured), "oom": len(rows) - len(found.measured)}
    console.note_folded(
        f"{header['measured_on']}, {header['model']}, {header['date']}: "
        f"{units.plural(trials['fits'], 'trial')} measured, {trials['oom']} out of memory; "
        "no name, path, host or dataset is in it."
    )
    document = {"file": name, "digest": found.digest, "trials": trials, "header": header}
    console.say_result(document, name, as_json=as_json)


def calibrate(named: Sequence[str], *, as_json: bool) -> int:
    """Check files, keep the good ones, and say what predictions of their GPUs go by."""
    # What predicts takes longer to import than the help.
    from qlora_sweep.sweep.predict import contributions

    files = []
    lines = []
    gpus = {}
    for name in named:
        try:
            found = read_contribution(Path(name))
            times_predicted = contributions.check(found)
        except InputError as error:
            console.note_folded(f"refused: {error}", indent=2)
            files.append({"file": name, "digest": None, "refused": str(error)})
            continue
        contributions.keep(found)
        files.append({"file": name, "digest": found.digest, "refused": None})
        gpu = found.surface.gpu
        known = contributions.contributed_speed(gpu)
        assert known is not None, "a file of it is kept"
        gpus[gpu] = {"files": known.files, "trials": known.trials}
        lines.append(f"{name}: steps take {times_predicted:.2f} times what the catalogue predicts")
    for gpu, of in gpus.items():
        trials, kept = units.plural(of["trials"], "trial"), units.plural(of["files"], "file")
        lines.append(f"{gpu}: predicted by {trials} of {kept} from now on")
    console.say_result({"files": files, "gpus": gpus}, "\n".join(lines), as_json=as_json)
    return 0 if gpus else InputError.exit_code
