"""`sweep contribute` once its options are read."""

from __future__ import annotations

import json
import sys

from reports import units
from search_spaces.errors import InputError
from storage.contributions import Contribution, contribution_of
from storage.files import checked_output, write_output
from storage.reading import read_study
from sweep.paths import runs_directory, storage_url
from sweep.terminal.console import confirmed, note, say_as_is, say_result

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
        lines = contribution.text.splitlines()
        text = f"{_words(contribution)}\n\n{contribution.text.rstrip()}"
        document = summary | {"lines": [json.loads(line) for line in lines]}
        say_result(document, text, as_json=as_json)
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


def _summary(contribution: Contribution) -> dict[str, object]:
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
    found = _summary(contribution)
    header, trials = contribution.header, found["trials"]
    assert isinstance(trials, dict), "as counted"
    limit, driver = header.power_limit_watts, header.driver
    machine = [
        header.measured_on,
        *([] if header.gpu_memory_bytes is None else [units.gib(header.gpu_memory_bytes)]),
        *([] if limit is None else [f"{limit:.0f} W"]),
        *([] if driver is None else [f"driver {driver}"]),
        *(f"{package} {version}" for package, version in header.versions.items()),
    ]
    return (
        f"{contribution.surface.model.name}: {units.plural(trials['fits'], 'measured trial')}, "
        f"{trials['oom']} out of memory, {header.date}; {found['bytes']:,} bytes\n"
        f"{', '.join(machine)}\n"
        "No name, path, host, user or dataset is in it."
    )
