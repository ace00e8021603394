"""The sweep over the n-th operation: one fault in each run of a driver, until nothing fires.

Run as ``python -m tests.faults.nth_operation [OPERATION:KIND[:STRIDE] ...]``; prints a line of JSON
for each, or with ``--page CASES`` the rows of docs/lab/faults.md, with at most so many cases of
each.
Every driver is a fork of this process, which has imported everything and has one thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import alembic.script.base
import alembic.util

from qlora_sweep.storage.database import close, open_for_writing
from qlora_sweep.storage.urls import parse_url
from qlora_sweep.sweep.terminal.edge import guarded
from tests.faults import short_study
from tests.faults.kinds import DONE, KINDS, Fault
from tests.faults.operations import OPERATIONS, Injector
from tests.faults.short_study import Place

HUNG_SECONDS = 90.0
"""A driver that has not ended by then never will: a study takes a second."""
ORPHAN_SECONDS = 3.0
"""A process whose driver was killed hears of it at once."""
_PR_SET_CHILD_SUBREAPER = 36
CASES_MAX = 5000
"""Far beyond any study's operations; a sweep that gets there counts what is endless."""


@dataclass(frozen=True)
class Swept:
    """What came of one kind of fault at one operation after the other."""

    operation: str
    kind: str
    cases: int
    """Runs in which the fault fired; in the next one nothing did."""
    broken: tuple[str, ...] = ()
    """What did not hold, each with its case."""


def every() -> list[tuple[str, str]]:
    """Return each operation with each kind of fault that can befall it."""
    return [(name, kind) for name, known in OPERATIONS.items() for kind in known.kinds]


def sweep(operation: str, kind: str, *, stride: int = 1) -> Swept:
    """Let the n-th operation go wrong for n = 1, 1 + stride, ... until none is left."""
    broken: list[str] = []
    for case, n in enumerate(range(1, CASES_MAX, stride)):
        fault = Fault(operation, kind, n)
        with new_place(operation) as place:
            found = list(_case(place, fault))
            has_fired = bool(place.said("fired"))
        broken += [f"{fault}: {words}" for words in found]
        if not has_fired:
            return Swept(operation, kind, case, tuple(broken))
    raise AssertionError(f"{operation} is endless")


@contextmanager
def a_place(*, has_database: bool = True, confirms: bool = True) -> Iterator[Place]:
    """Yield a new directory for a study, in memory where there is some; gone afterwards.

    Args:
        has_database: whether there is one without studies, which takes longer to make than to use.
        confirms: whether the study's winner is confirmed.
    """
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="sweep-faults-", dir=memory) as directory:
        place = Place(Path(directory), confirms=confirms)
        if has_database:
            place.runs.mkdir(parents=True)
            (place.runs / "sweep.db").write_bytes(_empty_database())
        yield place


def new_place(operation: str) -> AbstractContextManager[Place]:
    """Return a directory for a study in which an operation goes wrong."""
    known = OPERATIONS[operation]
    return a_place(has_database=not known.is_of_opening, confirms=known.confirms)


@cache
def _empty_database() -> bytes:
    # Optuna reads its schema's history anew whenever a database is opened: half of a case's time.
    alembic.script.base.util.load_python_file = cache(alembic.util.load_python_file)
    with a_place(has_database=False) as place:
        close(open_for_writing(parse_url(place.url)))
        return (place.runs / "sweep.db").read_bytes()


def _case(place: Place, fault: Fault) -> Iterator[str]:
    """Yield what does not hold of a driver that meets a fault, and of the next one."""
    status = in_a_process(place, lambda: drive(place, fault))
    has_fired = bool(place.said("fired"))
    ends = KINDS[fault.kind].ends if has_fired else frozenset({DONE})
    if status not in ends:
        yield f"ended with {status}: {place.directory.joinpath('output').read_text()[-300:]}"
    yield from short_study.broken_at_once(place)
    yield from _processes_left()
    if not has_fired:
        yield from short_study.broken(place)
        return
    status = in_a_process(place, lambda: drive(place))
    if status != DONE:
        yield f"resumed: ended with {status}: {(place.directory / 'output').read_text()[-300:]}"
        return
    yield from short_study.broken(place)


def drive(place: Place, fault: Fault | None = None) -> int:
    """Drive the study in this process, which ends with it."""
    injector, beats = None, None
    if fault is not None:
        operation = OPERATIONS[fault.operation]
        injector = Injector(
            fault,
            on_strike=lambda: place.say("fired"),
            is_over=lambda: operation.is_of_opening and bool(place.said("ran")),
        )
        operation.install(injector, place.runs)
        beats = injector if fault.operation == "beat" else None

    def work() -> int:
        worker = fault if fault is not None and operation.has_worker else None
        reason = short_study.run(place, beat=beats or (lambda do: do()), worker=worker)
        return 130 if reason == "interrupted" else 0

    code = guarded(work)
    if injector is not None:
        place.say("counted", injector.count)
    return code


def in_a_process(place: Place, work: Callable[[], int]) -> int | None:
    """Do something in a fork of this process; return its exit status, None where it hung."""
    process = os.fork()
    if process == 0:
        code = 70
        try:
            output = os.open(place.directory / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.close(output)
            code = work()
            sys.stderr.flush()
        finally:
            os._exit(code)
    deadline = time.monotonic() + HUNG_SECONDS
    while time.monotonic() < deadline:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return None


def _processes_left() -> Iterator[str]:
    """Yield what a driver that ended left running, a moment later."""
    deadline = time.monotonic() + ORPHAN_SECONDS
    while (left := _children()) and time.monotonic() < deadline:
        time.sleep(0.01)
    for child in left:
        yield f"process {child} is left"
        os.kill(child, signal.SIGKILL)


def _children() -> list[int]:
    """Return this process's children, who were a dead driver's; those that ended are let go."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return list(map(int, listed))


def adopt_orphans() -> None:
    """Become the parent of whatever a dead driver leaves, so that it is seen."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def rows(cases: int) -> Iterator[str]:
    """Yield the page's row of each operation."""
    for name, known in OPERATIONS.items():
        never = Fault(name, known.kinds[0], 10**9)
        with new_place(name) as place:
            in_a_process(place, lambda never=never, at=place: drive(at, never))
            total = len(place.said("message")) or int(place.said("counted")[0][0])
        found = [sweep(name, kind, stride=-(-total // cases)) for kind in known.kinds]
        kinds = ", ".join(f"{swept.kind} {swept.cases}" for swept in found)
        yield f"| {name} | {total} | {kinds} | {sum(len(swept.broken) for swept in found)} |"


def main() -> None:
    """Sweep what was asked for, or everything."""
    adopt_orphans()
    if sys.argv[1:2] == ["--page"]:
        for row in rows(int(sys.argv[2])):
            print(row, flush=True)
        return
    for word in sys.argv[1:] or map(":".join, every()):
        operation, kind, *stride = word.split(":")
        swept = sweep(operation, kind, stride=int(*stride or (1,)))
        print(json.dumps(asdict(swept)), flush=True)


if __name__ == "__main__":
    main()
