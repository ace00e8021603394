"""The type and the words of a worker's bad end: who ended it, and why."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable

from search_spaces import redaction
from search_spaces.errors import CardLost
from storage.records import CrashCause, Crashed, Ineffective, Outcome, Phase, TimedOut
from sweep.processes import End

Failure = Callable[..., Outcome]
"""What a trial without an answer came to: of the phase it was in, how its worker then ended, and
the ``words`` that it printed last."""
_HOST_MEMORY = re.compile(r"std::bad_alloc|Cannot allocate memory|\bMemoryError\b")
"""What is printed last by a process that the host refused memory, and that gave up over it."""
_DETAIL_MAX = 1000


def crash(phase: Phase, end: End, *, words: str) -> Crashed:
    """Return the outcome of a worker that ended though nobody here ended it.

    Args:
        phase: where it was.
        end: how it ended.
        words: the last that it printed.
    """
    cause = _cause(end, words)
    if cause == "host_out_of_memory" and not end.is_host_out_of_memory:
        how = f"{end}, as the host's memory ran out"
    else:
        how = f"{end}{_hint(end)}"
    return Crashed(phase=phase, cause=cause, detail=_told(f"the worker ended with {how}", words))


def nonsense(phase: Phase, _: End, *, words: str, did: str) -> Crashed:
    """Return the outcome of a worker that was ended here, for what it did."""
    detail = _told(f"the worker was ended, as {did}", words)
    return Crashed(phase=phase, cause="protocol", detail=detail)


def timed_out(phase: Phase, _: End, *, words: str, why: str) -> TimedOut:
    """Return the outcome of a worker that was ended here, as it took too long."""
    return TimedOut(phase=phase, detail=_told(f"{why}; the worker was ended", words))


def reconsidered(outcome: Outcome, phase: Phase, *, has_killed: bool) -> Outcome:
    """Return what a trial came to, where the kernel killed processes for want of memory in it.

    A compiler's process that was killed looks like a knob that takes no effect, which would never
    be tried again.
    """
    match outcome:
        case Crashed(detail=detail) | Ineffective(detail=detail) if has_killed:
            reason = "the kernel killed a process here, as the host's memory ran out"
            return Crashed(phase=phase, cause="host_out_of_memory", detail=f"{reason}: {detail}")
        case _:
            return outcome


def card_lost(process: int, device: str, *, seconds: float) -> CardLost:
    """Return the error of a worker that nothing ends."""
    held = "the card" if device == "cuda" else "its memory"
    return CardLost(
        f"the worker (process {process}) did not end within {seconds:g} s of SIGKILL: the kernel "
        f"holds it, and it holds {held}. What was measured is stored. Restart the machine, or let "
        "its administrator reset the card; then run the same command again"
    )


def shown(text: str) -> str:
    """Return text that came from a worker as it may be stored: short, without a password in it, and
    with nothing that works unseen."""
    return " | ".join(redaction.shown(text).splitlines())[:_DETAIL_MAX]


def storable(outcome: Outcome) -> Outcome:
    """Return an outcome with its words as they may be stored."""
    detail: str = getattr(outcome, "detail", "")
    fit = shown(detail)
    return outcome if fit == detail else outcome.model_copy(update={"detail": fit})


def _cause(end: End, words: str) -> CrashCause:
    if end.is_host_out_of_memory or (end.status != 0 and _HOST_MEMORY.search(words)):
        return "host_out_of_memory"
    return "signal" if end.status is not None and end.status < 0 else "exit"


def _hint(end: End) -> str:
    """Return who may have sent a signal that a process does not send itself."""
    if end.is_host_out_of_memory or end.status is None:
        return ""
    match -end.status:
        case signal.SIGKILL:
            return (
                " from outside: from a person, from a scheduler, or from the kernel where memory "
                "ran out"
            )
        case signal.SIGTERM | signal.SIGHUP | signal.SIGINT | signal.SIGQUIT | signal.SIGUSR1:
            return " from outside"
        case signal.SIGXCPU:
            return ", as a limit of processor time was reached (`ulimit -t`)"
        case signal.SIGXFSZ:
            return ", as a limit of file size was reached (`ulimit -f`)"
        case _:
            return ""


def _told(what: str, words: str) -> str:
    return shown(f"{what}; it printed last: {words}" if words else f"{what}; it printed nothing")
