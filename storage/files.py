"""Owns how files of a study are made, opened and replaced: private, and never by way of a link.

New files are for their owner alone (0600), new directories too (0700), from the moment they are
there and whatever the umask; what is there already keeps its rights. A link, a pipe, a device or a
directory where a file belongs is an `OSError` that says so, and nothing waits for a pipe's other
end. A file that the user names for output is the user's: `write_chosen` follows links and leaves
the rights to the umask.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shlex
import stat
from pathlib import Path
from typing import IO

from search_spaces.errors import EnvironmentFault

PRIVATE_FILE, PRIVATE_DIRECTORY = 0o600, 0o700
_TEMPORARY = ".sweep.tmp"
_SAFELY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_KINDS = (
    (stat.S_ISLNK, "is a symbolic link, which is not followed: remove it"),
    (stat.S_ISDIR, "is a directory where a file belongs: remove it"),
    (stat.S_ISFIFO, "is a named pipe where a file belongs: remove it"),
    (stat.S_ISSOCK, "is a socket where a file belongs: remove it"),
    (lambda _: True, "is a device where a file belongs: remove it"),
)


def make_directory(path: Path) -> None:
    """Make a directory and those above it where they are missing, for their owner alone.

    Raises:
        OSError: it cannot be made, something else is in its place, or another user put it, or a
            link to it, into a directory that everybody writes to.
    """
    there = _lstat(path)
    if there is not None:
        _require_owner(path, there)
    for directory in (*reversed(path.parents), path):
        if not directory.is_dir():
            try:
                directory.mkdir(mode=PRIVATE_DIRECTORY)
            except FileExistsError:
                if not directory.is_dir():
                    raise


def refuse_public(directory: Path) -> None:
    """Refuse a study's directory that everybody may write to.

    Raises:
        EnvironmentFault: it is one.
    """
    if directory.is_dir() and directory.stat().st_mode & stat.S_IWOTH:
        raise EnvironmentFault(
            f"everybody may write to {directory}, whose files a study trusts: take that right away "
            f"(`chmod o-w {shlex.quote(str(directory))}`)"
        )


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


def read_end(path: Path, *, count: int) -> bytes:
    """Return the last ``count`` bytes of a file, whatever its size. Raises as `open_reading`."""
    with open_reading(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - count))
        return file.read(count)


def create(path: Path, data: bytes = b"") -> None:
    """Write a file that is not there yet.

    Raises:
        FileExistsError: something is there, a link to nowhere included.
        OSError: it cannot be made.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFELY, PRIVATE_FILE)
    with os.fdopen(descriptor, "wb") as file:
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
    there = _lstat(path)
    if there is not None and not stat.S_ISLNK(there.st_mode):
        _require_file(path, there.st_mode)
    is_ours = there is not None and there.st_uid == os.geteuid() and stat.S_ISREG(there.st_mode)
    readers = there.st_mode & 0o044 if there is not None and is_ours else 0
    _swap_in(path, data, mode=PRIVATE_FILE | readers, is_durable=is_durable)


def write_chosen(path: Path, data: bytes) -> None:
    """Write a file that the user named, whole or not at all.

    A link stays one, and a device or a pipe, ``/dev/null`` say, is written to: putting a file in
    its place, as is done otherwise, would take it from everybody else.

    Raises:
        OSError: it cannot be written there; what was there before is untouched.
    """
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    try:
        target = path.resolve()
    except RuntimeError as error:
        # What Python before 3.13 raises of links in a circle.
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from error
    there = _lstat(target)
    _swap_in(target, data, mode=None if there is None else stat.S_IMODE(there.st_mode))


def lock(descriptor: int) -> None:
    """Take the lock of an open file or directory, where its file system has locks.

    Raises:
        BlockingIOError: somebody else has it.
        OSError: the system refuses it otherwise.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):
            raise


def is_temporary(path: Path) -> bool:
    """Whether a file has the name that one has until it is whole."""
    return re.fullmatch(rf"\.[0-9a-f]{{16}}{re.escape(_TEMPORARY)}", path.name) is not None


def sweep_temporary(directory: Path) -> None:
    """Remove what writers that were killed left in a directory, and nothing else that is there.

    What somebody is still writing is locked, and stays; so does what cannot be removed.
    """
    with contextlib.suppress(OSError):
        for path in filter(is_temporary, directory.iterdir()):
            with contextlib.suppress(OSError), open_reading(path) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(file.fileno()).st_uid == os.geteuid():
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
    descriptor = os.open(temporary, flags, 0o666 if mode is None else PRIVATE_FILE)
    try:
        with os.fdopen(descriptor, "wb") as file:
            # Not every file system has locks; the file is then not told from one left behind.
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if mode is not None and mode != PRIVATE_FILE:
                os.fchmod(descriptor, mode)
            file.write(data)
            file.flush()
            if is_durable:
                os.fsync(descriptor)
            temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    if is_durable:
        _sync_directory(path.parent)


def _sync_directory(directory: Path) -> None:
    """Wait until the disk has a directory's names; not every file system can be asked to."""
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _open(path: Path, flags: int) -> int:
    """Open a file of ours and nothing else; looks before, as opening a device can do something."""
    there = _lstat(path)
    if there is not None:
        _require_file(path, there.st_mode)
    try:
        descriptor = os.open(path, flags | _SAFELY, PRIVATE_FILE)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            _require_file(path, path.lstat().st_mode)
        raise
    try:
        opened = os.fstat(descriptor)
        _require_file(path, opened.st_mode)
        _require_owner(path, opened)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _lstat(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except FileNotFoundError:
        return None


def _require_file(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        reason = next(words for is_kind, words in _KINDS if is_kind(mode))
        raise OSError(errno.EINVAL, reason, str(path))


def _require_owner(path: Path, opened: os.stat_result) -> None:
    """Refuse what another user put into a directory that everybody writes to."""
    if opened.st_uid in (0, os.geteuid()) or not path.parent.stat().st_mode & stat.S_IWOTH:
        return
    raise OSError(
        errno.EPERM, "belongs to another user, in a directory that everybody can write", str(path)
    )
