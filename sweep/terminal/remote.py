"""Owns what `sweep run --host` does: what goes along, what is shown here while it runs there, and
what is kept here of it.

Knows nothing of ssh's options or of what is done there.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from search_spaces.documents import home_expanded
from search_spaces.errors import EnvironmentFault, InputError, words_of
from search_spaces.loading import preset_name
from search_spaces.models import load_model_spec
from search_spaces.space import SearchSpace
from storage.fetched import refuse_local, take_in
from storage.identity import NAME as IDENTITY
from storage.spool import NAME as SPOOL
from storage.urls import parse_url
from sweep.data.files import is_on_hub, text_files
from sweep.launching.box import prepared, reached
from sweep.launching.inputs import files_below, place
from sweep.launching.remote_study import HOME, Ended, RemoteStudy
from sweep.launching.ssh import Address, Connection, ConnectionLostError
from sweep.paths import runs_directory, storage_url
from sweep.stop_signals import INTERRUPTED
from sweep.study.asked import named
from sweep.study.events import Interruption
from sweep.terminal.commands import ENVIRONMENT
from sweep.terminal.console import folded, note, say_as_is, width_of
from sweep.terminal.typed import respelled

_STAYS = {"host", "host_python", "study", "storage", "model", "data", "tokenizer", "carried"}
"""Parameters of the run that are this machine's business, or are spelled anew."""


@dataclass(frozen=True)
class Luggage:
    """What goes along."""

    files: Mapping[str, Path]
    """Here, by the path there."""
    words: tuple[str, ...]
    """Of the run there, behind ``sweep``."""


def run(
    host: str,
    space_name: str,
    *,
    python: str | None,
    command: Any,
    words: Sequence[str],
    overrides: Mapping[str, Any],
    held: Mapping[str, Any],
    study: str | None,
    storage: str | None,
    carried: str | None,
    **_: Any,
) -> int:
    """Run a study on another machine, show it here, and fetch it; return its exit code.

    Args:
        host: where, as it was typed.
        space_name: a preset or a file here.
        python: of an environment there; None for one of sweep's own.
        command: the `sweep run` that was typed.
        words: behind its name.
        overrides, held, study, storage, carried: what they came to, as for `driving.run`.

    Raises:
        InputError: something that was typed is not right; nothing was started.
        EnvironmentFault: the machine, or something on it, is not to be had.
    """
    address, url = Address.parse(host), storage_url(storage)
    parse_url(url)
    name, space = named(space_name, overrides=overrides, held=held, study=study)
    luggage = packed(space_name, space, name, carried, command=command, words=words)
    refuse_local(name, host=str(address), url=url, home=runs_directory())
    with Connection(address) as connection:
        box = reached(connection, python=python)
        there = RemoteStudy(box, name)
        # Before anything there is touched: what runs reads it.
        was_running = there.runs()
        if not was_running:
            box = prepared(box, python=python, studies=HOME, say=_note)
            there = RemoteStudy(box, name)
            there.ship(luggage.files)
        words = () if was_running else luggage.words
        return _driven(there, words, name=name, address=address, url=url)


def _driven(
    there: RemoteStudy, words: Sequence[str], *, name: str, address: Address, url: str
) -> int:
    """Start a study there with those words, or with none go on following it, and fetch it once it
    has ended.
    """
    interruption = Interruption()
    with interruption.handling_signals():
        if not words or there.start(words):
            _note(f"Study {name} runs on {address} already; this is how it goes on.")
        try:
            ended = there.follow(
                hear=note, requests=lambda: int(interruption.is_requested()), say=_note
            )
        except ConnectionLostError as lost:
            _note(
                f"{lost}. The study goes on there; the same command follows it again, "
                "and fetches it."
            )
            return INTERRUPTED if interruption.is_requested() else ENVIRONMENT
        try:
            _keep(there, name=name, address=address, url=url)
        finally:
            # What came of it is worth knowing where it cannot be kept here, too.
            code = _told(ended, name=name, address=address)
    return code


def _keep(there: RemoteStudy, *, name: str, address: Address, url: str) -> None:
    with tempfile.TemporaryDirectory(prefix="sweep-fetched-") as directory:
        try:
            fetched = there.fetch(Path(directory))
        except OSError as error:
            raise EnvironmentFault(f"no room in {directory}: {words_of(error)}") from error
        if fetched.database.exists():
            take_in(
                name,
                host=str(address),
                database=fetched.database,
                files=fetched.files,
                url=url,
                home=runs_directory(),
            )
    if fetched.left_out:
        _note(
            f"Too large to be fetched, and left on {address} in {there.directory}/runs/{name}: "
            f"{', '.join(fetched.left_out)}."
        )


def _told(ended: Ended, *, name: str, address: Address) -> int:
    if ended.stdout:
        say_as_is(ended.stdout.removesuffix("\n"))
    if ended.code is None:
        _note(f"Study {name} ended on {address}, nobody knows how; the same command goes on.")
        return ENVIRONMENT
    return ended.code


def _note(text: str) -> None:
    note(folded(text, width_of(sys.stderr)))


def packed(
    space_name: str,
    space: SearchSpace,
    name: str,
    carried: str | None,
    *,
    command: Any,
    words: Sequence[str],
) -> Luggage:
    """Return what goes along, with the words that name it there.

    Args:
        space_name: as it was typed.
        space: what that came to, with what else was typed.
        name: of the study.
        carried: the study or spool whose trials are taken over; None for none.
        command: the `sweep run` that was typed.
        words: behind its name.

    Raises:
        InputError: something is not there, or is too large to go along.
    """
    files, options = dict[str, Path](), list[str]()
    instead = {}
    if preset_name(space_name) is None:
        instead["space"] = _put(files, "space", home_expanded(space_name))
    for option, path in (*_model(space), *_texts(space)):
        options.append(f"--{option}={_put(files, option, path)}")
    options += _as_named(space, {word.split("=")[0] for word in options})
    if carried is not None:
        options.append(f"--from={_spool(files, carried)}")
    rest = respelled(command, words, without=_STAYS, instead=instead)
    return Luggage(files, ("run", *rest, *options, f"--study={name}"))


def _put(files: dict[str, Path], kind: str, path: Path) -> str:
    """Note that something goes along; return where it is there."""
    there = f"inputs/{place(kind, path)}"
    files.update((f"{there}{below}", file) for below, file in files_below(kind, path))
    return there


def _model(space: SearchSpace) -> Iterator[tuple[str, Path]]:
    """Yield the model where it is a directory here."""
    load_model_spec(space.model)
    path = home_expanded(space.model)
    if not path.is_dir():
        return
    if space.weights == "pretrained":
        raise InputError(
            f"--host: the weights in {space.model} do not go along: name a hub id, or log in "
            "there and run it beside them"
        )
    yield "model", path


def _texts(space: SearchSpace) -> Iterator[tuple[str, Path]]:
    """Yield texts and tokenizer where they are files here."""
    if space.data is None:
        return
    if not is_on_hub(space.data.texts):
        text_files(space.data.texts)
        yield "data", home_expanded(space.data.texts)
    if space.data.tokenizer is not None and home_expanded(space.data.tokenizer).is_dir():
        yield "tokenizer", home_expanded(space.data.tokenizer)


def _as_named(space: SearchSpace, elsewhere: set[str]) -> Iterator[str]:
    """Yield the options of what is the same everywhere."""
    same = {"--model": space.model}
    if space.data is not None:
        same |= {"--data": space.data.texts, "--tokenizer": space.data.tokenizer or ""}
    for option, value in same.items():
        if option not in elsewhere and value:
            yield f"{option}={value}"


def _spool(files: dict[str, Path], carried: str) -> str:
    """Let a study's spool go along, with what says what it is about."""
    path = home_expanded(carried)
    if not ("/" in carried or path.suffix == ".jsonl"):
        path = runs_directory() / carried / SPOOL
    if not path.is_file():
        raise InputError(f"--from {carried}: {path}: no such file")
    there = f"inputs/{place('from', path.parent)}"
    for file in (path, path.with_name(IDENTITY)):
        if file.is_file():
            files[f"{there}/{file.name}"] = file
    return f"{there}/{path.name}"
