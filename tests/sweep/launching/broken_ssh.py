"""Stands for ssh: runs each command on this machine, and breaks one of them as `BROKEN` says.

Started as ``python broken_ssh.py HOME OPTIONS -- ADDRESS COMMAND``, with a home of its own.
"""

from __future__ import annotations

import io
import os
import sys
import tarfile
import time

MARK = b"\n--- qlora-sweep answers ---\n"
VERBS = ("look", "install", "start", "follow", "ask", "end", "fetch")


def out(*parts: bytes, times: int = 1) -> None:
    for _ in range(times):
        for part in parts:
            sys.stdout.buffer.write(part)
    sys.stdout.buffer.flush()


def fail(words: bytes, code: int) -> None:
    sys.stderr.buffer.write(words)
    sys.stderr.flush()
    sys.exit(code)


def archive(*entries: tuple[str, bytes, int]) -> bytes:
    """Return an archive of entries: name, type and size that is claimed, with as much content."""
    memory = io.BytesIO()
    with tarfile.open(fileobj=memory, mode="w") as packed:
        for name, kind, size in entries:
            entry = tarfile.TarInfo(name)
            entry.type = kind
            entry.size = size
            entry.linkname = "/etc/passwd" if kind != tarfile.REGTYPE else ""
            content = b"x" * size if kind == tarfile.REGTYPE and size < 2**20 else b""
            if len(content) == size:
                packed.addfile(entry, io.BytesIO(content))
            else:
                memory.write(entry.tobuf())
    return memory.getvalue()


def a_file(name: str, size: int = 5) -> tuple[str, bytes, int]:
    return name, tarfile.REGTYPE, size


def half_of_an_archive() -> None:
    out(MARK, archive(a_file("host.db", 100_000))[:50_000])


FAULTS = {
    # What comes back of a study.
    "fetch a link": lambda: out(MARK, archive(("files/x", tarfile.SYMTYPE, 0))),
    "fetch a path": lambda: out(MARK, archive(a_file("files/../../x"))),
    "fetch an escape": lambda: out(MARK, archive(a_file("files/\x1b[2Jx"))),
    "fetch a stranger": lambda: out(MARK, archive(a_file("etc/x"))),
    "fetch a large file": lambda: out(MARK, archive(a_file("files/x", 3 * 2**30)), bytes(2**20)),
    "fetch a large header": lambda: out(
        MARK, archive(("x", tarfile.XHDTYPE, 3 * 2**30)), bytes(2**22)
    ),
    "fetch many files": lambda: out(MARK, *(archive(a_file("left/x"))[:1024] for _ in range(5000))),
    "fetch no database": lambda: out(MARK, archive(a_file("host.db", 5000))),
    "fetch half and go": lambda: (half_of_an_archive(), fail(b"Connection reset by peer\n", 255)),
    "fetch half and fail": lambda: (half_of_an_archive(), fail(b"No space left on device\n", 1)),
    "fetch nothing": lambda: out(MARK),
    # What a login script prints, or does.
    "look words alone": lambda: out(b"This account is for backups {only}.\n"),
    "look words without end": lambda: out(b"fortune " * 8192, times=10_000),
    "look another type": lambda: out(MARK, b'{"runs": "\x1b[31mno", "target": 5}'),
    "look a deep document": lambda: out(MARK, b"[" * 1_000_000),
    "look an endless document": lambda: out(MARK, b'"', *(b"x" * 2**20 for _ in range(70))),
    "look no UTF-8": lambda: out(MARK, b'{"runs": "\xff\xfe"}'),
    "find nothing": lambda: out(MARK),
    # What follows a study.
    "follow a line without end": lambda: out(MARK, b"x" * 2**20),
    "follow escapes": lambda: out(MARK, b"\x1b[2J\x1b]0;owned\x07 \xff\xfe {0}\n"),
    "end no exit": lambda: out(MARK, b'{"exit": "yes", "stdout": []}'),
    "end nothing": lambda: None,
    # What ssh or the command there says as it fails.
    "look ssh says braces": lambda: fail(b"kex: {by_hand} {0} {\n", 255),
    "look ssh says escapes": lambda: fail(b"\x1b]0;owned\x07\x1b[2J {bad}\n", 255),
    "look a huge stderr": lambda: fail(b"warning\n" * 10_000_000 + b"the end of it\n", 1),
    "install a read-only home": lambda: fail(b"[Errno 30] Read-only file system: '/h'\n", 1),
    "install no release": lambda: fail(b"ERROR: No matching distribution found for x==9\n", 1),
    "start a full disk": lambda: fail(b"[Errno 28] No space left on device\n", 1),
    "start a wrong clock": lambda: fail(b"SSL: CERTIFICATE_VERIFY_FAILED: not yet valid\n", 1),
    "start killed": lambda: os.kill(os.getpid(), 9),
}


def main() -> None:
    home, *options, command = sys.argv[1:]
    if "-O" in options:
        return
    words = command.split()
    verb = next((verb for verb in VERBS if verb in words), "find")
    broken = os.environ.get("BROKEN", "")
    if broken == "silent":
        time.sleep(60)
    if broken.split(" ")[0] == verb:
        FAULTS[broken]()
        return
    os.chdir(home)
    os.execve("/bin/sh", ["sh", "-c", command], {**os.environ, "HOME": home})


if __name__ == "__main__":
    main()
