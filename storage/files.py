"""Files of a study, private and never by way of a link, and files that a person names for output.

New files of a study are for their owner alone (0600), new directories too (0700), whatever the
umask; what is there keeps its readers. A link, a pipe or a device where a file belongs is refused.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shlex
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from qlora_sweep.search_spaces.documents import is_directory
from qlora_sweep.search_spaces.errors import EnvironmentFault, InputError, listed, words_of

_TEMPORARY = ".sweep.tmp"
_SAFELY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


@contextmanager
def writing(path: Path, what: str = "") -> Iterator[None]:
    """Translate what the system refuses inside the ``with`` to `EnvironmentFault`."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or words_of(error)
        raise EnvironmentFault(f"cannot write {what}{path}: {reason}") from error


def make_directory(path: Path) -> None:
    """Make a directory and those above it where they are missing, for their owner alone.

    Raises:
        OSError: it cannot be made, or another user put it, or a link to it, into a directory that
            everybody writes to.
    """
    for directory in (*reversed(path.parents), path):
        if not directory.is_dir():
            directory.mkdir(mode=0o700, exist_ok=True)
    _require_owner(path, path.lstat())


def refuse_public(directory: Path) -> None:
    """Refuse a study's directory that everybody may write to.

    Raises:
        EnvironmentFault: it is one.
    """
    if directory.is_dir() and directory.stat().st_mode & stat.S_IWOTH:
        cure = f"`chmod o-w {shlex.quote(str(directory))}`"
        raise EnvironmentFault(f"everybody may write to {directory}, which a study trusts: {cure}")


def open_append(path: Path) -> IO[bytes]:
    """Open a file for reading and for writing at its end, made where it is missing.

    One with a second name (a hard link) gives way to a copy, so that what is written reaches this
    name alone.

    Raises:
        OSError: it cannot be opened, or is no file of ours.
    """
    make_directory(path.parent)
    descriptor = _open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    if os.fstat(descriptor).st_nlink > 1:
        with os.fdopen(descriptor, "rb") as linked:
            replace(path, linked.read())
        descriptor = _open(path, os.O_RDWR | os.O_APPEND)
    return os.fdopen(descriptor, "a+b")


def open_reading(path: Path) -> IO[bytes]:
    """Open a file to be read.

    Raises:
        FileNotFoundError: there is none.
        OSError: it cannot be opened, or is no file of ours.
    """
    return os.fdopen(_open(path, os.O_RDONLY), "rb")


def read_bytes(path: Path) -> bytes:
    """Return what is in a file. Raises what `open_reading` raises."""
    with open_reading(path) as file:
        return file.read()


def create(path: Path, data: bytes = b"") -> None:
    """Write a file that is not there yet.

    Raises:
        FileExistsError: something is there, a link to nowhere included.
        OSError: it cannot be made.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFELY
    with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
        file.write(data)


def replace(path: Path, data: bytes, *, is_durable: bool = True) -> None:
    """Put a file in the place of what has this name, whole or not at all.

    A link is replaced, not followed. Whoever could read the file before can read it still.

    Args:
        path: directories above it are made.
        data: what is to be in it.
        is_durable: waits until the disk has it.

    Raises:
        OSError: it cannot be written, or what is there is no file; what was there is untouched.
    """
    make_directory(path.parent)
    readers = 0
    with suppress(FileNotFoundError):
        there = path.lstat()
        if not stat.S_ISLNK(there.st_mode):
            _require_file(path, there)
            if there.st_uid == os.geteuid():
                readers = there.st_mode & 0o044
    _swap_in(path, data, mode=0o600 | readers, is_durable=is_durable)


def write_output(path: Path, data: bytes) -> None:
    """Write a file that a person named, whole or not at all.

    A link stays one, rights are those that the umask leaves or that were there, and a device or a
    pipe, ``/dev/null`` say, is written to.

    Raises:
        EnvironmentFault: it cannot be written there; what was there before is untouched.
    """
    with writing(path):
        if path.exists() and not path.is_file():
            path.write_bytes(data)
            return
        try:
            target = path.resolve()
        except RuntimeError as error:
            # What Python before 3.13 raises of links in a circle.
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from error
        mode = None
        if target.exists():
            mode = target.stat().st_mode & 0o7777
        _swap_in(target, data, mode=mode)


def lock(descriptor: int) -> None:
    """Take the lock of an open file or directory, where its file system has locks.

    Raises:
        BlockingIOError: somebody else has it.
        OSError: the system refuses it otherwise.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise


def synchronize(*paths: Path) -> None:
    """Wait until the disk has these files, and the names in these directories; not every file
    system can be asked for names.

    Raises:
        OSError: it does not take a file.
    """
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError:
            if not path.is_dir():
                raise
        finally:
            os.close(descriptor)


def is_temporary(path: Path) -> bool:
    """Whether a file has the name that one has until it is whole."""
    return re.fullmatch(rf"\.[0-9a-f]{{16}}{re.escape(_TEMPORARY)}", path.name) is not None


def sweep_temporary(directory: Path) -> None:
    """Remove what writers that were killed left in a directory; what is being written is locked."""
    with suppress(OSError):
        for path in filter(is_temporary, directory.iterdir()):
            with suppress(OSError), open_reading(path) as file:
                # Where the file system has no locks this fails, and the file stays.
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()


def _swap_in(path: Path, data: bytes, *, mode: int | None, is_durable: bool = True) -> None:
    """Write a file of a random name beside ``path`` and give it that name.

    Args:
        path: in a directory that is there.
        data: what is to be in it.
        mode: its rights; None for what the umask leaves of 0666.
        is_durable: waits until the disk has it.
    """
    temporary = path.with_name(f".{os.urandom(8).hex()}{_TEMPORARY}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFELY
    descriptor = os.open(temporary, flags, 0o666 if mode is None else 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            lock(descriptor)
            if mode is not None:
                os.fchmod(descriptor, mode)
            file.write(data)
            file.flush()
            if is_durable:
                os.fsync(descriptor)
            temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    if is_durable:
        with suppress(OSError):
            synchronize(path.parent)


def _open(path: Path, flags: int) -> int:
    """Open a file of ours and nothing else; looks before, as opening a device can do something."""
    with suppress(FileNotFoundError):
        _require_file(path, path.lstat())
    descriptor = os.open(path, flags | _SAFELY, 0o600)
    try:
        _require_file(path, os.fstat(descriptor))
        _require_owner(path, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _require_file(path: Path, there: os.stat_result) -> None:
    if not stat.S_ISREG(there.st_mode):
        reason = "no file"
        if stat.S_ISLNK(there.st_mode):
            reason = "a symbolic link, which is not followed"
        raise OSError(errno.EINVAL, f"is {reason}: remove it", str(path))


def _require_owner(path: Path, there: os.stat_result) -> None:
    """Refuse what another user put into a directory that everybody writes to."""
    if there.st_uid not in (0, os.geteuid()) and path.parent.stat().st_mode & stat.S_IWOTH:
        words = "belongs to another user, in a directory that everybody can write"
        raise OSError(errno.EPERM, words, str(path))


# Files that a person names.

WRITTEN_BY = "Written by qlora-sweep"
"""Begins a comment, on a line of its own, in every file of sweep's that can hold comments."""

_MARK = re.compile(
    rb'^# Written by qlora-sweep|^<meta name="generator" content="qlora-sweep">'
    rb"|<svg[^>]*><!-- Written by qlora-sweep|tEXtSoftware\0qlora-sweep",
    re.MULTILINE,
)
_DOCUMENT = re.compile(
    rb'\A{"surface": \d+, "model": |\A{"basis": "|^ +"provenance": {\n +"study": ', re.MULTILINE
)
"""What an export has in JSON, which holds no comments."""
_MARKED_BYTES = 2**12
"""A mark stands at a file's beginning."""
_DOCUMENT_BYTES = 2**20
"""A document of JSON is smaller."""
_KNOWN_ENDINGS = re.compile(
    r"\.(arrow|bmp|bz2|csv|db|docx?|eps|feather|gif|gz|html?|ini|ipynb|jpe?g|js|jsonl?|md|ndjson|od[pst]|"
    r"parquet|pdf|pkl|png|pptx?|ps|pt|py|rst|rtf|safetensors|sh|sqlite|svg|tar|tex|tgz|tiff?|toml|tsv|"
    r"txt|webp|xlsx?|xml|xz|ya?ml|zip)"
)
"""Endings that say what a file holds; any other is a part of its name."""


def checked_output(
    typed: str | None,
    *,
    what: str,
    endings: Sequence[str],
    is_forced: bool | None,
    is_marked: bool = True,
    option: str = "--output",
) -> Path | None:
    """Return the path of a file that a person named, which may be written; None where none is
    named, and for ``-``, which is stdout.

    Args:
        typed: its name; a link stands for what it points to.
        what: is written, for the message.
        endings: of its name, the usual one first; a name may also have none.
        is_forced: whether a file that sweep did not write may be replaced; None where no option
            allows it.
        is_marked: whether one that it did write may be replaced all the same.
        option: by which it was named.

    Raises:
        InputError: its ending means another format, it is a directory or in one that does not
            exist, or it would replace somebody's file.
        EnvironmentFault: it cannot be looked at.
    """
    if typed is None or typed == "-":
        return None
    path = Path(typed)
    label = f"{option}: {typed}"
    suffix = path.suffix.lower()
    if _KNOWN_ENDINGS.fullmatch(suffix) and suffix not in endings:
        raise InputError(f"{label}: {what} goes into a file that ends in {listed(endings)}")
    if typed.endswith("/") or is_directory(path, label=label):
        raise InputError(f"{label} names a directory: name a file in it")
    require_parent(path, option=option)
    if not is_forced and path.is_file() and not (is_marked and _is_replaceable(path)):
        whose = "is there already"
        if is_marked:
            whose = "is not sweep's to replace"
        force = ""
        if is_forced is not None:
            force = ", or replace it with --force"
        raise InputError(f"{label} {whose}: name another file{force}")
    return path


def require_parent(path: Path, *, option: str = "--output") -> None:
    """Refuse an output in a directory that does not exist.

    Raises:
        InputError: names that directory.
    """
    parent = Path(os.path.realpath(path)).parent
    if not is_directory(parent, label=f"{option}: {path}"):
        raise InputError(f"{option}: {path}: there is no directory {parent}: make it first")


def _is_replaceable(path: Path) -> bool:
    """Whether a file is empty, or sweep wrote it."""
    try:
        with path.open("rb") as file:
            head = file.read(_DOCUMENT_BYTES)
    except OSError as error:
        raise EnvironmentFault(f"--output: {words_of(error)}") from error
    return not head or bool(_MARK.search(head[:_MARKED_BYTES]) or _DOCUMENT.search(head))
