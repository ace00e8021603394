"""What is done on the other machine: this file is sent there and run by its Python, so that it
imports nothing but Python's own library (3.11).

``python -c BOOT LENGTH VERB ARGUMENTS`` reads it from stdin; what is behind it there is the verb's.
Answers are on stdout behind `MARK`, most of them JSON. A study is kept by a process of its own
session, which holds a lock for as long as it runs, so that a connection may come and go.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import importlib.util
import json
import os
import signal
import sqlite3
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BOOT = 'import sys;exec(compile(sys.stdin.buffer.read(int(sys.argv[1])),"there","exec"))'
"""Has no single quote in it: shells differ in how they take those."""
MARK = "--- qlora-sweep answers ---"
"""Before each answer: a login may print what it likes before it."""
PACKAGE = "qlora-sweep"
STAMP = ".qlora-sweep-wheel"
"""In an environment that sweep was installed into from elsewhere: the digest of its wheel."""
ALONE = ".qlora-sweep-lock"
"""In an environment that is made or installed into by sweep: one does it at a time."""
OUT, ERR, LOCK, END, PID = "stdout", "stderr", "lock", "end.json", "pid.json"
_LOOK_SECONDS = 0.1
_PATIENCE_SECONDS = 0.3
"""Whoever looks whether a study runs holds its lock for an instant."""
_OTHERS = ("PYTHON", "SWEEP_", "VIRTUAL_ENV", "SSH_", "CONDA_PREFIX")
"""How variables begin that are of the login, or of another Python."""


def look() -> dict[str, Any]:
    """Return what this Python is, and what is installed for it."""
    versions = {d.name: d.version for d in importlib.metadata.distributions() if d.name}
    return {
        "python": sys.version.split()[0],
        "executable": sys.executable,
        "home": str(Path.home()),
        "is_environment": sys.prefix != sys.base_prefix or Path(sys.prefix, "conda-meta").exists(),
        "has_torch": importlib.util.find_spec("torch") is not None,
        "versions": versions,
        "sweep": _installed(),
        "stamp": _read(Path(sys.prefix, STAMP)),
    }


def _installed() -> str | None:
    """Return the version of sweep whose files are really here."""
    places = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    for found in importlib.metadata.distributions(name=PACKAGE, path=list(dict.fromkeys(places))):
        return found.version
    return None


def make_environment(directory: str, python: str, keep_torch: str) -> dict[str, Any]:
    """Make an environment where there is none that can install; return its Python."""
    place = Path(directory).expanduser()
    made = place / "bin" / "python"
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _alone(place):
        # Where somebody was cut off while it was made there is a Python already, and no pip.
        if not _has_pip(made):
            options = ["--system-site-packages"] if keep_torch == "yes" else []
            _done([python, "-m", "venv", *options, str(place)])
    return {"python": str(made)}


@contextlib.contextmanager
def _alone(environment: Path, how: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Wait until nobody else makes an environment, or installs into it."""
    flags = os.O_RDONLY if how == fcntl.LOCK_SH else os.O_RDWR | os.O_CREAT
    lock = os.open(environment / ALONE, flags, 0o644)
    try:
        fcntl.flock(lock, how)
        yield
    finally:
        # Given up, not closed alone: a process that was forked meanwhile has it open, too.
        fcntl.flock(lock, fcntl.LOCK_UN)
        os.close(lock)


def _has_pip(python: Path) -> bool:
    command = [str(python), "-I", "-m", "pip", "--version"]
    nothing = subprocess.DEVNULL
    try:
        done = subprocess.run(command, stdin=nothing, stdout=nothing, stderr=nothing, check=False)
    except OSError:
        return False
    return done.returncode == 0


def install(studies: str, wheel_name: str, digest: str, wheel_bytes: str) -> dict[str, Any]:
    """Install a wheel, then what it needs, held to the constraints behind it on stdin; not beneath
    a study that runs."""
    size, environment = int(wheel_bytes), Path(sys.prefix)
    with tempfile.TemporaryDirectory() as directory, _alone(environment):
        if _read(environment / STAMP) == digest:
            # Somebody else was first.
            return {}
        _refuse_beneath(_place(studies))
        wheel, constraints = Path(directory, wheel_name), Path(directory, "constraints.txt")
        wheel.write_bytes(sys.stdin.buffer.read(size))
        constraints.write_bytes(sys.stdin.buffer.read())
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        # A half-installed one must not be taken for a whole one.
        (environment / STAMP).unlink(missing_ok=True)
        _done([*pip, "--no-deps", "--force-reinstall", str(wheel)])
        _done([*pip, "--constraint", str(constraints), str(wheel)])
        (environment / STAMP).write_text(digest)
    return {}


def _refuse_beneath(studies: Path) -> None:
    """End where a study runs from this environment."""
    for job in sorted(studies.glob("*/job")):
        known = json.loads(_read(job / PID) or "{}")
        if _runs(job) and known.get("prefix", sys.prefix) == sys.prefix:
            raise SystemExit(
                f"study {job.parent.name} runs from {sys.prefix}, and another sweep would be "
                "installed beneath it: wait until it has ended, or name another environment with "
                "--with python=PATH"
            )


def _done(command: list[str]) -> None:
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
    )
    if done.returncode != 0:
        lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith(("ERROR", "Error"))]
        said = (errors or lines or [f"exit status {done.returncode}"])[0]
        raise SystemExit(f"{' '.join(command[1:4])}: {said.removeprefix('ERROR: ')}")


def put(directory: str) -> dict[str, Any]:
    """Put the files of an archive on stdin into a study's directory, unless it runs."""
    place = _place(directory)
    if _runs(place / "job"):
        return {}
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as archive:
        # The first versions of Python 3.11 have none; it is this program's own archive.
        safely: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        archive.extractall(place, **safely)
    return {}


def runs(directory: str) -> dict[str, Any]:
    """Return whether a study runs."""
    return {"runs": _runs(_place(directory) / "job")}


def start(directory: str) -> dict[str, Any]:
    """Start the command on stdin, unless one runs; return whether one did."""
    place = _place(directory)
    job = place / "job"
    job.mkdir(mode=0o700, parents=True, exist_ok=True)
    asked = json.loads(sys.stdin.buffer.read())
    with _environment_at_rest():
        lock = os.open(job / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        if not _locked(lock):
            return {"was_running": True}
        for name in (OUT, ERR, END, PID):
            (job / name).unlink(missing_ok=True)
        (job / ERR).touch(0o600)
        keeper = os.fork()
        if keeper == 0:
            try:
                _keep(place, job, asked)
            finally:
                os._exit(0)
        os.close(lock)
        _wait_until_noted(keeper, job)
    return {"was_running": False}


def _environment_at_rest() -> contextlib.AbstractContextManager[None]:
    """Wait until nobody installs into this environment, where sweep ever does."""
    if os.access(Path(sys.prefix, ALONE), os.R_OK):
        return _alone(Path(sys.prefix), fcntl.LOCK_SH)
    return contextlib.nullcontext()


def _wait_until_noted(keeper: int, job: Path) -> None:
    """Wait until a command is known to run, or to have ended; nobody notes it on a full disk."""
    is_up = True
    while not (job / PID).exists() and not (job / END).exists():
        if not is_up:
            raise SystemExit(f"nothing can be written to {job}, so nothing runs: is its disk full?")
        # Looked at before the files are, the last time.
        is_up = os.waitpid(keeper, os.WNOHANG) == (0, 0)
        time.sleep(0.02)


def _locked(lock: int) -> bool:
    """Take a lock that whoever looks may hold for a moment; return whether that came about."""
    until = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < until:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(0.05)
    return False


def _keep(place: Path, job: Path, asked: dict[str, Any]) -> None:
    """Run a command to its end, in a session of its own, and note how it ended."""
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    code = 127
    try:
        with open(job / OUT, "wb") as out, open(job / ERR, "ab") as err:
            try:
                child = subprocess.Popen(
                    _command(asked["words"]),
                    cwd=place,
                    env=_variables(),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                )
            except OSError as error:
                err.write(f"error: {error}\n".encode())
                return
        try:
            known = {"pid": child.pid, "started": _started(child.pid), "prefix": sys.prefix}
            _write(job / PID, known)
        except BaseException:
            # Nobody could follow it, or ask it to stop.
            child.kill()
            child.wait()
            raise
        status = child.wait()
        code = status if status >= 0 else 128 - status
    finally:
        _write(job / END, {"exit": code})


def _command(words: list[str]) -> list[str]:
    # As the command `sweep` starts, and never from what is in the directory.
    program = "import sys, qlora_sweep; sys.exit(qlora_sweep.main())"
    return [sys.executable, "-P", "-c", program, *words]


def _variables() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OTHERS)}
    programs = str(Path(sys.executable).parent)
    return {**kept, "SWEEP_HOME": ".", "PATH": f"{programs}{os.pathsep}{kept.get('PATH', '')}"}


def follow(directory: str, offset: str) -> None:
    """Print what the command says on stderr, from a byte on, until it has ended."""
    job = _place(directory) / "job"
    with open(job / ERR, "rb") as file:
        file.seek(int(offset))
        is_running = True
        while is_running:
            is_running = _runs(job)
            # Looked at before it is read: what was said last of all is then read too.
            said = file.read()
            if said:
                sys.stdout.buffer.write(said)
                sys.stdout.buffer.flush()
            elif is_running:
                time.sleep(_LOOK_SECONDS)


def _runs(job: Path) -> bool:
    try:
        with open(job / LOCK, "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        pass
    return False


def ask(directory: str) -> dict[str, Any]:
    """Ask the command to stop, as Ctrl-C does."""
    known = json.loads(_read(_place(directory) / "job" / PID) or "{}")
    number = known.get("pid")
    if number is not None and known["started"] == _started(number):
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGTERM)
    return {}


def end(directory: str) -> dict[str, Any]:
    """Return how the command ended, and what it printed; None for what nobody noted."""
    job = _place(directory) / "job"
    ended = json.loads(_read(job / END) or "{}")
    return {"exit": ended.get("exit"), "stdout": _read(job / OUT) or ""}


def fetch(directory: str, study: str) -> None:
    """Print an archive of a study's files and a consistent copy of its database."""
    runs = _place(directory) / "runs"
    with tempfile.TemporaryDirectory() as scratch, _archive() as archive:
        if (runs / "sweep.db").exists():
            copy = str(Path(scratch, "host.db"))
            database = sqlite3.connect(runs / "sweep.db", timeout=60)
            with contextlib.closing(database):
                database.execute("VACUUM INTO ?", (copy,))
            archive.add(copy, "host.db")
        for file in sorted((runs / study).glob("*")):
            if file.is_file() and not file.is_symlink() and not file.name.startswith("."):
                archive.add(file, f"files/{file.name}")


def _archive() -> tarfile.TarFile:
    return tarfile.open(fileobj=sys.stdout.buffer, mode="w|")


def _place(directory: str) -> Path:
    return Path(directory).expanduser()


def _started(number: int) -> str | None:
    """Return when a process was started, in the kernel's ticks: numbers are given again."""
    stat = _read(Path(f"/proc/{number}/stat"))
    return None if stat is None else stat.rpartition(")")[2].split()[19]


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _write(path: Path, document: dict[str, Any]) -> None:
    half = path.with_suffix(".half")
    half.write_text(json.dumps(document))
    half.replace(path)


VERBS = {
    verb.__name__: verb
    for verb in (look, make_environment, install, put, runs, start, follow, ask, end, fetch)
}


def _main(verb: str, arguments: list[str]) -> None:
    sys.stdout.write(f"{MARK}\n")
    sys.stdout.flush()
    answer = VERBS[verb](*arguments)
    if answer is not None:
        sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    try:
        _main(sys.argv[2], sys.argv[3:])
    except OSError as error:
        raise SystemExit(str(error)) from error
