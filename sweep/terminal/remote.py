"""`sweep run --on ssh:USER@HOST`: what goes along, what is shown here while it runs there, and what
is kept of it here."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from search_spaces.errors import EnvironmentFault, words_of
from storage.fetched import refuse_local, take_in
from storage.urls import parse_url
from sweep.launching.box import prepared, reached
from sweep.launching.inputs import packed
from sweep.launching.remote_study import HOME, Ended, RemoteStudy
from sweep.launching.ssh import Address, Connection, ConnectionLostError
from sweep.paths import runs_directory, storage_url
from sweep.request import REQUEST, RunRequest, Where
from sweep.stop_signals import INTERRUPTED
from sweep.study.events import Interruption
from sweep.terminal.commands import DONE, ENVIRONMENT
from sweep.terminal.console import folded, note, say, say_as_is, say_json, width_of

_INPUTS = "inputs"
"""Directory there, below the study's."""


def run(request: RunRequest, where: Where, *, is_dry: bool) -> int:
    """Run a study on another machine, show it here, and fetch it; return its exit code.

    Args:
        request: what was typed.
        where: the machine, and the Python of an environment there; by default one of sweep's own.
        is_dry: whether nothing is started, and what would be is said.

    Raises:
        InputError: something that was typed is not right; nothing was started.
        EnvironmentFault: the machine, or something on it, is not to be had.
    """
    address, url = Address.parse(where.address), storage_url(request.storage)
    python = where.settings.get("python")
    parse_url(url)
    sent, files = packed(request)
    assert sent.study is not None, "what is packed has a name"
    refuse_local(sent.study, host=str(address), url=url, home=runs_directory())
    if is_dry and request.as_json:
        say_json({"study": sent.study, "on": str(where), "files": list(files)})
        return DONE
    if is_dry:
        say(f"Would start or resume study {sent.study} on {address}, in {HOME}/{sent.study}.")
        for name in files:
            say(f"Would go along: {name}")
        return DONE
    with Connection(address) as connection, tempfile.TemporaryDirectory() as directory:
        box = reached(connection, python=python)
        there = RemoteStudy(box, sent.study)
        # Before anything there is touched: what runs reads it.
        was_running = there.runs()
        if not was_running:
            box = prepared(box, python=python, studies=HOME, say=_note)
            there = RemoteStudy(box, sent.study)
            own = Path(directory) / REQUEST
            own.write_text(sent.model_dump_json(), encoding="utf-8")
            shipped = {REQUEST: own, **files}
            there.ship({f"{_INPUTS}/{name}": file for name, file in shipped.items()})
        return _driven(
            there, name=sent.study, address=address, url=url, is_followed_alone=was_running
        )


def _driven(
    there: RemoteStudy, *, name: str, address: Address, url: str, is_followed_alone: bool
) -> int:
    """Start a study there, unless it runs, follow it, and fetch it once it has ended."""
    interruption = Interruption()
    with interruption.handling_signals():
        if is_followed_alone or there.start(("run", f"{_INPUTS}/{REQUEST}")):
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
