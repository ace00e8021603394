"""`sweep contribute` and `sweep calibrate` once their options are read."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from qlora_sweep.reports import units
from qlora_sweep.search_spaces.documents import is_directory
from qlora_sweep.search_spaces.errors import EnvironmentFault, InputError
from qlora_sweep.storage.contributions import Contribution, contribution_of, read_contribution
from qlora_sweep.storage.files import checked_output, write_output
from qlora_sweep.storage.reading import read_study
from qlora_sweep.sweep.paths import runs_directory, storage_url
from qlora_sweep.sweep.terminal import console, drawing


def contribute(
    study: str,
    *,
    output: str | None,
    is_dry: bool,
    is_sure: bool,
    storage: str | None,
    as_json: bool,
) -> None:
    """Show what a study contributes, and write it once a person agrees."""
    found = contribution_of(read_study(study, url=storage_url(storage), home=runs_directory()))
    name = output or f"contribution-{found.surface.gpu}-{found.digest}.jsonl"
    path = checked_output(name, what="a contribution", endings=(".jsonl",), is_forced=None)
    header, *rows = (json.loads(line) for line in found.text.splitlines())
    trials = {"fits": len(found.measured), "oom": len(rows) - len(found.measured)}
    words = (
        f"{header['measured_on']}, {header['model']}, {header['date']}: "
        f"{units.plural(trials['fits'], 'trial')} measured, {trials['oom']} out of memory, "
        f"{len(found.text):,} bytes; no name, path, host or dataset is in it."
    )
    document = {"file": name, "digest": found.digest, "trials": trials, "header": header}
    if is_dry:
        text = f"{words}\n\n{found.text.rstrip()}"
        console.say_result(document | {"written": False, "rows": rows}, text, as_json=as_json)
    elif path is None:
        console.say_as_is(found.text.rstrip())
    else:
        console.note_folded(words)
        if console.agreed(f"Write it to {name}?", command=f"contribute {study}", is_sure=is_sure):
            write_output(path, found.text.encode())
            console.say_result(document | {"written": True}, name, as_json=as_json)
        else:
            console.note("Nothing was written.")


def calibrate(
    named: Sequence[str] | None,
    *,
    forgotten: str | None,
    catalogue: str | None,
    as_json: bool,
    predictor: Any = None,
) -> int:
    """Check files and keep the good ones, or list what is kept; say what that does to each GPU."""
    # What predicts takes longer to import than the help.
    from qlora_sweep.sweep.predict import contributions as known
    from qlora_sweep.sweep.predict.memory.profile_store import TracingChildren
    from qlora_sweep.sweep.predict.speed.contributed import shipped_contributions
    from qlora_sweep.sweep.terminal.plan import tracing

    is_shipped, files = catalogue is not None, list(_files(named or ()))
    if is_shipped and forgotten is not None:
        raise InputError("--forget and --catalogue are different questions: keep one")
    what, option = "a catalogue's file", "--catalogue"
    path = checked_output(catalogue, what=what, endings=(".json",), is_forced=None, option=option)
    if is_shipped and not files:
        raise InputError("--catalogue: name the files, or their folder, that it is made of")
    kept = [] if is_shipped else known.kept()
    told, before, after = list[dict[str, Any]](), dict[str, Any](), dict[str, Any]()
    with (
        closing(TracingChildren(outlive=True)) as children,
        console.working("checking") as progress,
    ):
        predict = predictor or tracing(children)
        if forgotten is not None:
            gpu = next((one.surface.gpu for one in kept if one.digest == forgotten), None)
            if gpu is None:
                raise InputError(f"--forget {forgotten}: no such file is kept")
            before[gpu] = _recommended(gpu, predict)
            kept = [one for one in kept if one.digest != forgotten]
        for file in files:
            try:
                found = _read(file)
                gpu = found.surface.gpu
                shipped = None if is_shipped else shipped_contributions(gpu)
                replaced = known.refuse_copy(found, kept, shipped)
                memory = predict(found.surface.model, found.surface.card)
                traced = progress("structures traced")
                known.check(found, predictor=memory, shipped=shipped, on_progress=traced)
            except InputError as error:
                console.note_folded(f"refused: {error}", indent=2)
                told.append({"file": str(file), "digest": None, "refused": str(error)})
                continue
            if gpu not in before and not is_shipped:
                before[gpu] = _recommended(gpu, predict)
            kept = [one for one in kept if one is not replaced] + [found]
            told.append({"file": str(file), "digest": found.digest, "refused": None})
        if is_shipped or not before:
            evidence = known.evidence_document(kept, is_shipped=is_shipped)
        else:
            evidence = known.keep(kept)
            after = {gpu: _recommended(gpu, predict) for gpu in before}
    is_vain = bool(told) and all(one["refused"] for one in told)
    if path is not None and not is_vain:
        write_output(path, json.dumps(evidence).encode())
    if is_shipped and path is None:
        console.say_as_is(json.dumps(evidence))
    else:
        gpus = {gpu: entry["files"] for gpu, entry in evidence["gpus"].items()}
        document = {"files": told, "gpus": gpus, "before": before, "after": after}
        console.say_result(document, _text(document), as_json=as_json)
    return InputError.exit_code if is_vain else 0


def _read(path: Path) -> Contribution:
    try:
        return read_contribution(path)
    except EnvironmentFault as error:
        # One of a folder's, which is no reason to leave the others.
        raise InputError(str(error)) from error


def _files(named: Sequence[str]) -> Iterator[Path]:
    """Yield the files that were named, a folder's by name."""
    if "" in named:
        raise InputError("calibrate: '' is no file: the name is empty")
    for name in named:
        is_folder = is_directory(Path(name), label=name)
        found = sorted(Path(name).glob("*.jsonl")) if is_folder else [Path(name)]
        if not found:
            raise InputError(f"{name}: no file in it ends in .jsonl")
        yield from found


def _recommended(gpu: str, predictor: Any) -> dict[str, Any] | None:
    """Return what `sweep plan` recommends for a GPU, and how fast it is."""
    from qlora_sweep.sweep.planning.question import PlanRequest
    from qlora_sweep.sweep.terminal.dataset import prepared
    from qlora_sweep.sweep.terminal.plan import answer

    request = PlanRequest(space=gpu, as_json=True)
    found = answer(request, read_texts=prepared, predictor=predictor)
    shown = found.documents[0]["recommended"]
    keys = ("config", "tokens_per_second", "tokens_per_second_range")
    return shown and {key: shown[key] for key in keys}


def _text(document: Mapping[str, Any]) -> str:
    """Return what is kept and what it does, for a person."""
    rows = [
        (
            *(gpu, file["digest"], file["model"], file["date"], str(file["trials"])),
            f"{file['times_predicted_seconds']:.2f}",
            "outvoted" if file["is_outvoted"] else "counts",
        )
        for gpu, of in document["gpus"].items()
        for file in of
    ]
    header = ("GPU", "digest", "model", "date", "trials", "measured/predicted s", "")
    nothing = "Nothing is kept: `sweep calibrate FILE` keeps what others measured."
    lines = [drawing.table(header, rows, width=console.width_of(sys.stdout)) if rows else nothing]
    for gpu in document["before"]:
        for when in ("before", "after"):
            if (speed := document[when][gpu]) is not None:
                rate = units.rate(speed["tokens_per_second"])
                low, high = map(units.rate, speed["tokens_per_second_range"])
                lines.append(f"{gpu} {when}: {rate} tokens/s ({low} to {high}), as recommended")
    return "\n".join(lines)
