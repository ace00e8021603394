"""`sweep contribute` and `sweep calibrate` once their options are read."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from reports import units
from search_spaces.config import TrialConfig
from search_spaces.documents import is_directory
from search_spaces.errors import InputError
from search_spaces.gpus import GpuSpec, gpu_catalogue
from search_spaces.models import ModelSpec
from storage.contributions import Contribution, contribution_of, read_contribution
from storage.files import checked_output, write_output
from storage.reading import read_study
from sweep.paths import cache_directory, runs_directory, storage_url
from sweep.terminal.console import (
    confirmed,
    note,
    note_folded,
    say_as_is,
    say_result,
    table,
    width_of,
    working,
)

DONE = 0


def contribute(
    study: str,
    *,
    output: str | None,
    is_dry: bool,
    is_sure: bool,
    is_forced: bool,
    storage: str | None,
    as_json: bool,
) -> int:
    """Show what a study contributes, and write it once a person agrees."""
    snapshot = read_study(study, url=storage_url(storage), home=runs_directory())
    contribution = contribution_of(snapshot)
    name = output or f"contribution-{contribution.surface.gpu}-{contribution.digest}.jsonl"
    path = checked_output(name, what="a contribution", endings=(".jsonl",), is_forced=is_forced)
    summary = {"file": name, "written": not is_dry, **_summary(contribution)}
    if is_dry:
        lines = [json.loads(line) for line in contribution.text.splitlines()]
        text = f"{_words(contribution)}\n\n{contribution.text.rstrip()}"
        say_result(summary | {"lines": lines}, text, as_json=as_json)
        return DONE
    if path is None:
        say_as_is(contribution.text.removesuffix("\n"))
        return DONE
    note(_words(contribution))
    if not is_sure:
        if not sys.stdin.isatty():
            raise InputError(f"contribute {study}: nobody is here to be asked: say --yes")
        if not confirmed(f"Write it to {name}?"):
            note("Nothing was written.")
            return DONE
    write_output(path, contribution.text.encode())
    say_result(summary, name, as_json=as_json)
    return DONE


def _summary(contribution: Contribution) -> dict[str, Any]:
    surface, header, fits = contribution.surface, contribution.header, contribution.measured
    return {
        "digest": contribution.digest,
        "bytes": len(contribution.text.encode()),
        "gpu": surface.gpu,
        "product": header.measured_on,
        "model": surface.model.name,
        "trials": {"fits": len(fits), "oom": len(surface.rows) - len(fits)},
        **header.model_dump(include={"date", "driver", "gpu_memory_bytes", "power_limit_watts"}),
        "versions": header.versions,
    }


def _words(contribution: Contribution) -> str:
    found, header = _summary(contribution), contribution.header
    limit, driver = header.power_limit_watts, header.driver
    machine = [
        header.measured_on,
        *([] if header.gpu_memory_bytes is None else [units.gib(header.gpu_memory_bytes)]),
        *([] if limit is None else [f"{limit:.0f} W"]),
        *([] if driver is None else [f"driver {driver}"]),
        *(f"{package} {version}" for package, version in header.versions.items()),
    ]
    return (
        f"{found['model']}: {units.plural(found['trials']['fits'], 'measured trial')}, "
        f"{found['trials']['oom']} out of memory, {header.date}; {found['bytes']:,} bytes\n"
        f"{', '.join(machine)}\n"
        "No name, path, host, user or dataset is in it."
    )


def calibrate(
    named: Sequence[str] | None,
    *,
    forgotten: str | None,
    catalogue: str | None,
    is_forced: bool,
    as_json: bool,
    predictor: Callable[[ModelSpec, GpuSpec], Any] | None = None,
) -> int:
    """Check files and keep the good ones, or list what is kept; say what that does to each GPU."""
    # What predicts takes longer to import than the help.
    from sweep.predict import contributions as known
    from sweep.predict.memory.profile_store import TracingChildren
    from sweep.predict.speed.evidence import shipped_evidence, speed_evidence
    from sweep.terminal.plan import tracing

    path = checked_output(
        catalogue, what="a catalogue's file", endings=(".json",), is_forced=is_forced
    )
    is_shipped = catalogue is not None
    if is_shipped and not named:
        raise InputError("--catalogue: name the files, or their folder, that it is made of")
    is_listed = not named and forgotten is None
    before = {
        gpu: shipped_evidence(gpu) if is_listed else speed_evidence(gpu) for gpu in gpu_catalogue()
    }
    kept, told = [] if is_shipped else known.kept(), list[dict[str, Any]]()
    if forgotten is not None:
        known.forget(forgotten)
        kept = [one for one in kept if one.digest != forgotten]
    with closing(TracingChildren(outlive=True)) as children, working("checking") as progress:
        predict = predictor or tracing(children)
        for file in _files(named or ()):
            try:
                found = read_contribution(file)
                replaced = known.refuse_known(found, kept, is_shipped=is_shipped)
                memory = predict(found.surface.model, found.surface.card)
                known.check(found, predictor=memory, on_progress=progress("structures traced"))
            except InputError as error:
                note_folded(f"refused: {error}", indent=2)
                told.append({"file": str(file), "digest": None, "refused": str(error)})
                continue
            kept = [one for one in kept if one is not replaced] + [found]
            told.append({"file": str(file), "digest": found.digest, "refused": None})
            if not is_shipped:
                known.keep(found, instead_of=replaced)
        if is_shipped:
            evidence = known.evidence_document(kept, is_shipped=True)
            text = json.dumps(evidence, indent=1)
            if path is None:
                say_as_is(text)
            else:
                write_output(path, f"{text}\n".encode())
        elif named or forgotten:
            known.estimate_anew()
        sessions = known.by_gpu(kept, is_shipped=is_shipped)
        votes = [vote for of in sessions.values() for vote in known.votes(of)]
        after = {gpu: speed_evidence(gpu) for gpu in before}
        moved = [gpu for gpu, was in before.items() if was != after[gpu]]
        gpus = [] if is_shipped else [_effect(gpu, before[gpu], predict, progress) for gpu in moved]
    document = {"files": told, "kept": [_vote(vote) for vote in votes], "gpus": gpus}
    if not is_shipped or path is not None:
        say_result(document, _effects(document), as_json=as_json)
    is_vain = bool(told) and all(one["refused"] for one in told)
    return InputError.exit_code if is_vain else DONE


def _files(named: Sequence[str]) -> list[Path]:
    """Return the files that were named, a folder's by name."""
    found: list[Path] = []
    for name in named:
        path = Path(name)
        is_folder = is_directory(path, label=name)
        inside = sorted(path.glob("*.jsonl")) if is_folder else [path]
        if not inside:
            raise InputError(f"{name}: no file in it ends in .jsonl")
        found += inside
    return found


def _vote(vote: Any) -> dict[str, Any]:
    surface = vote.contribution.surface
    return {
        "digest": vote.contribution.digest,
        "gpu": surface.gpu,
        "model": surface.model.name,
        "date": surface.date,
        "trials": vote.trials,
        "times_predicted_seconds": vote.times,
        "is_outvoted": vote.is_outvoted,
    }


def _effect(gpu: str, before: Any, predictor: Callable[..., Any], progress: Any) -> dict[str, Any]:
    """Return what is said of a GPU's recommended configuration before and after."""
    from sweep.planning.question import PlanRequest, resolve_request
    from sweep.planning.survey import survey
    from sweep.predict.speed.evidence import speed_evidence
    from sweep.predict.speed.predictor import StepTimes
    from sweep.terminal.dataset import prepared

    request = PlanRequest(space=gpu)
    question = resolve_request(
        request, predictor=predictor, card=lambda: None, read_study=_no_study, read_texts=prepared
    )
    spec = gpu_catalogue()[gpu]
    about, forecaster = question.about(spec), question.forecaster(spec)
    assert not isinstance(about, TrialConfig), "a space was asked about"
    kept = cache_directory() / "surveys"
    best = survey(about, forecaster, directory=kept, progress=progress).recommended
    after, found = speed_evidence(gpu), {}
    for when, evidence in (("before", before), ("after", after)):
        if best is not None:
            times = StepTimes([best.config], model=question.model, gpu=spec, evidence=evidence)
            found[when] = times.prediction(0)
    return {
        "gpu": gpu,
        "files": 0 if after is None else after.files,
        "trials": 0 if after is None else after.trials,
        "model": question.model.name,
        "config": None if best is None else best.config.model_dump(mode="json"),
        **{
            when: None
            if isinstance(speed, InputError)
            else dict(
                zip(
                    ("tokens_per_second", "low", "high"),
                    (speed.tokens_per_second, *speed.tokens_per_second_range),
                    strict=True,
                )
            )
            for when, speed in found.items()
        },
    }


def _no_study(name: str, storage: str | None) -> Any:
    raise AssertionError("no study is asked for")


def _effects(document: Mapping[str, Any]) -> str:
    """Return what is kept and what it does, for a person."""
    if not document["kept"]:
        return "No contribution is kept; `sweep contribute` writes one."
    kept = [
        (
            one["digest"],
            one["gpu"],
            one["model"],
            one["date"],
            str(one["trials"]),
            f"{one['times_predicted_seconds']:.2f}",
            "outvoted by the others" if one["is_outvoted"] else "counts",
        )
        for one in document["kept"]
    ]
    header = ("digest", "gpu", "model", "date", "trials", "measured/predicted s", "")
    lines = [table(header, kept, width=width_of(sys.stdout))]
    for gpu in document["gpus"]:
        for when in ("before", "after"):
            if (speed := gpu.get(when)) is not None:
                ends = f"{units.rate(speed['low'])} to {units.rate(speed['high'])}"
                rate = units.rate(speed["tokens_per_second"])
                lines.append(f"{gpu['gpu']} {when}: {rate} tokens/s ({ends})")
    return "\n".join(lines)
