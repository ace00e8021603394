"""The edge: the one place where errors become a message and an exit code.

0 done, 1 done and nothing fits, 2 bad input, 3 environment, 4 an error of ours, 130 interrupted.
"""

from __future__ import annotations

import errno
import os
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import typer

from qlora_sweep.search_spaces import errors
from qlora_sweep.search_spaces.redaction import learn_environment, shown
from qlora_sweep.sweep import stop_signals
from qlora_sweep.sweep.installation import missing_words
from qlora_sweep.sweep.paths import crash_log_directory
from qlora_sweep.sweep.stop_signals import INTERRUPTED
from qlora_sweep.sweep.terminal.console import ReaderGoneError, note, note_folded

OUR_ERROR = 4
"""Exit code of a mistake in sweep, which no other machine would mend."""
_EXPECTED = (errors.EnvironmentFault, errors.InputError, errors.NothingFits)
WORST_FIRST = (INTERRUPTED, OUR_ERROR, *(error.exit_code for error in _EXPECTED), 0)
"""What a command ends with."""
_FULL = "free some space, or set SWEEP_HOME to another disk"
_MORE_PROCESSES = "raise the limit of processes, with `ulimit -u` say, or end some"
_MORE_MEMORY = "end what takes it, or raise `ulimit -v`"
_CURES = {
    errno.EMFILE: errors.MORE_DESCRIPTORS,
    errno.ENFILE: errors.MORE_DESCRIPTORS,
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EAGAIN: _MORE_PROCESSES,
    errno.EFBIG: "raise the limit of a file's size, with `ulimit -f unlimited` say",
    errno.ENOMEM: _MORE_MEMORY,
    errno.EROFS: "mount it writable, or set SWEEP_HOME to another disk",
    errno.ELOOP: "remove the links that lead in a circle",
}
"""What to do where the system refuses something, by its error number."""
_NO_THREAD = "can't start new thread"
"""Python's own words."""


def guarded(command: Callable[[], int | None]) -> int:
    """Run a command; return its exit code, or that of its error once that has been printed."""
    learn_environment()
    try:
        return _unless_asked(command) or 0
    except ReaderGoneError:
        return 0
    except (KeyboardInterrupt, typer.Abort):
        note("Interrupted.")
        return INTERRUPTED
    except errors.SweepError as error:
        return _refuse(str(error), error.exit_code)
    except typer.TyperException as error:
        return _refuse(_plainly(error), errors.InputError.exit_code)
    except OSError as error:
        is_gone = error.errno == errno.ENOENT and error.filename is None
        gone = "the working directory was removed: change into one that exists"
        cure = gone if is_gone else _CURES.get(error.errno or 0)
        words = errors.words_of(error) + (f": {cure}" if cure else "")
        return _refuse(words, errors.EnvironmentFault.exit_code)
    except MemoryError:
        words = f"this machine's memory is used up: {_MORE_MEMORY}"
        return _refuse(words, errors.EnvironmentFault.exit_code)
    except ImportError as error:
        return _refuse(missing_words(error), errors.EnvironmentFault.exit_code)
    except Exception as error:  # noqa: BLE001 - the edge: what is left is a mistake of ours
        if isinstance(error, RuntimeError) and str(error) == _NO_THREAD:
            words = f"this machine has no room for another thread: {_MORE_PROCESSES}"
            return _refuse(words, errors.EnvironmentFault.exit_code)
        note(_report_crash(error))
        return OUR_ERROR


def _unless_asked(command: Callable[[], int | None]) -> int | None:
    """Run a command whose errors are of no interest once it was asked to stop: a library may have
    made one of what was to interrupt it.
    """
    try:
        # Whatever is done in a directory that was removed fails somewhere, in other words.
        os.getcwd()
        return command()
    except Exception as error:
        if stop_signals.asked():
            raise KeyboardInterrupt from error
        raise


def _refuse(text: str, code: int) -> int:
    note_folded(f"error: {text}", indent=2)
    return code


def _plainly(error: typer.TyperException) -> str:
    """Return what is wrong with an option, in the words of the other messages."""
    from pydantic import ValidationError

    from qlora_sweep.search_spaces.documents import explain

    names: list[str] = getattr(getattr(error, "param", None), "opts", [])
    if not names or not isinstance(error.__context__, ValidationError):
        return error.format_message()
    return f"{next(n for n in names if n[:2] == '--')} {explain(error.__context__)}"


def _report_crash(error: Exception) -> str:
    """Keep the traceback in a private file of a new name, and return one line about it."""
    from qlora_sweep.storage import files

    text = shown("".join(traceback.format_exception(error)))
    name = f"crash-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}-{os.urandom(4).hex()}.log"
    message = f"error: {errors.words_of(error)}"
    directories = [Path(tempfile.gettempdir())]
    with suppress(errors.InputError):
        directories.insert(0, crash_log_directory())
    for directory in directories:
        try:
            files.make_directory(directory)
            files.create(directory / name, text.encode())
        except OSError:
            continue
        return f"{message}\nThis is a mistake in sweep; the traceback is in {directory / name}"
    return message
