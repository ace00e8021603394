"""What is done on another machine: an installation, and a command that is supervised there.

The machine's own Python runs this file, sent or laid there, so it imports nothing but Python's
library (3.9): ``python -c BOOT LENGTH VERB ARGUMENTS`` reads it from stdin, and ``python there.py
VERB ARGUMENTS`` is the same. Answers are on stdout behind `MARK`, most of them JSON.

A study that is started holds a lock for as long as it runs, so that a connection may come and go.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import sysconfig
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

BOOT = (
    "import sys;source=sys.stdin.buffer.read(int(sys.argv[1]));sys.argv[:2]=[sys.argv[0]];"
    'exec(compile(source,"there","exec"))'
)
"""Has no single quote in it: shells differ in how they take those."""
MARK = "--- qlora-sweep answers ---"
"""Before each answer: a login may print what it likes before it."""
SWEEP = """import sys
try:
    from qlora_sweep.sweep.entry_point import main
    code = main()
except Exception as error:
    words = f"{type(error).__name__}: {error}"
    print("error: this installation of qlora-sweep cannot be imported:", words, file=sys.stderr)
    code = 3
sys.exit(code)"""
"""Starts the command as `sweep` does; an installation that is broken is no study that ended."""
PACKAGE = "qlora-sweep"
STAMP = ".qlora-sweep-wheel"
"""In an environment that sweep was installed into from elsewhere: the digest of its wheel."""
ALONE = ".qlora-sweep-lock"
"""In an environment that is made or installed into by sweep: one process does it at a time."""
PARCEL = ".qlora-sweep-parcel"
"""In such an environment: what is being installed. What a killed process left, the next removes."""
PRINTED_BYTES_MAX = 16 * 1024 * 1024
"""Of what a command printed, that is answered."""
OUT = "stdout"
ERR = "stderr"
LOCK = "lock"
END = "end.json"
PID = "pid.json"
_OTHERS = ("PYTHON", "SWEEP_", "VIRTUAL_ENV", "SSH_", "CONDA_PREFIX")
"""How variables begin that are of the login, or of another Python."""


class Supervisor:
    """Runs one command, and hands on to it what asks this process to stop.

    Args:
        is_asked_once: a second request, which would cut short how the command ends, is not passed.
    """

    def __init__(self, *, is_asked_once: bool = False) -> None:
        self.heard: list[tuple[int, float]] = []
        """Signals, each with its time on the monotonic clock."""
        self.asked = 0
        """How often the command was to be asked to stop."""
        self._is_asked_once = is_asked_once
        self.child: subprocess.Popen[bytes] | None = None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, self._hear)

    def _hear(self, number: int, _frame: FrameType | None) -> None:
        self.heard.append((number, time.monotonic()))
        self.ask()

    def ask(self) -> None:
        """Ask the command to stop; before it is started, as soon as it is."""
        if not (self._is_asked_once and self.asked):
            self.asked += 1
            if self.child is not None:
                self.child.terminate()

    def run(
        self,
        command: list[str],
        *,
        tick: Callable[[], None] = lambda: None,
        seconds: float = 1.0,
        **options: Any,
    ) -> int:
        """Return the exit code of a command, 128 and the number for a signal that ended it.

        Args:
            command: gets a session of its own, and a request to stop if this process is gone.
            tick: called again and again while it runs.
            seconds: between two calls.
            options: of `subprocess.Popen`.
        """
        options.update(start_new_session=True, preexec_fn=_stop_with_parent)
        self.child = child = subprocess.Popen(command, **options)
        for _ in range(self.asked):
            child.terminate()
        while True:
            try:
                code = child.wait(seconds)
            except subprocess.TimeoutExpired:
                tick()
                continue
            if code < 0:
                return 128 - code
            return code


def _stop_with_parent() -> None:
    # PR_SET_PDEATHSIG.
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


# The installation.


def look(directory: str, python: str) -> dict[str, Any]:
    """Return whether a study runs, and what is installed for the Python that would run it."""
    return {"runs": _runs(_job(directory)), "target": _installed_for(Path(python).expanduser())}


def installed() -> dict[str, Any]:
    """Return what this Python is, and what is installed for it."""
    config = _read(Path(sys.prefix, "pyvenv.cfg")) or ""
    # Of sweep, whose files are really here: an editable one's are elsewhere.
    places = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    own = None
    for distribution in importlib.metadata.distributions(name=PACKAGE, path=places):
        own = own or distribution.version
    return {
        "executable": sys.executable,
        "is_environment": sys.prefix != sys.base_prefix or Path(sys.prefix, "conda-meta").exists(),
        "sees_system": "include-system-site-packages = true" in config,
        "has_pip": importlib.util.find_spec("pip") is not None,
        "has_torch": importlib.util.find_spec("torch") is not None,
        "versions": _versions(),
        "sweep": own,
        "stamp": _read(Path(sys.prefix, STAMP)),
    }


def _versions() -> dict[str, str]:
    """Return the version of each distribution; one whose metadata is broken is left out."""
    found = {}
    for one in importlib.metadata.distributions():
        with contextlib.suppress(KeyError):
            if one.name and one.version:
                found[one.name] = one.version
    return found


def _installed_for(python: Path) -> dict[str, Any] | None:
    """Return `installed` of another Python; None where there is none."""
    source = globals().get("source") or Path(__file__).read_bytes()
    command = [str(python), "-I", "-c", BOOT, str(len(source)), "installed"]
    try:
        done = subprocess.run(command, input=source, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return dict(json.loads(done.stdout.partition(MARK.encode())[2]))


def install(python: str, wheel: str, version: str, extra: str, studies: str) -> dict[str, Any]:
    """Install a wheel, held to constraints, for the Python of an environment.

    Args:
        python: its path; the environment is made where it is missing.
        wheel: its path, beside constraints.txt; ``-`` for an archive of both on stdin.
        version: of Python, for uv to find or fetch; '' for this one.
        extra: of the package; '' for none.
        studies: directory of studies: beneath one that runs nothing is installed; '' for none.
    """
    target = Path(python).expanduser()
    environment = target.parents[1]
    environment.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _alone(environment), _emptied(environment / PARCEL) as scratch:
        if wheel == "-":
            _unpack(scratch)
            (wheel,) = map(str, scratch.glob("*.whl"))
        stamp = hashlib.sha256(Path(wheel).read_bytes()).hexdigest()
        if _read(environment / STAMP) == stamp:
            # Somebody else was first.
            return {}
        jobs = []
        if studies:
            jobs = sorted(Path(studies).expanduser().glob("*/job"))
        for job in jobs:
            if _runs(job) and json.loads(_read(job / PID) or "{}").get("python") == str(target):
                raise SystemExit(
                    f"study {job.parent.name} runs with {target}, and another sweep would be "
                    "installed beneath it: wait until it has ended, or name another environment "
                    "with --with python=PATH"
                )
        seen, pip = _made(environment, target, version)
        # A torch that is there fits its GPU and driver, and is kept.
        lines = Path(wheel).with_name("constraints.txt").read_text().splitlines()
        if seen["has_torch"]:
            lines = [line for line in lines if not line.startswith("torch==")]
        constraints = scratch / "held.txt"
        constraints.write_text("\n".join(lines))
        what = wheel
        if extra:
            what = f"{wheel}[{extra}]"
        # A half-installed one must not be taken for a whole one.
        (environment / STAMP).unlink(missing_ok=True)
        _done(pip + ["--no-deps", "--force-reinstall", wheel])
        _done(pip + ["--constraint", str(constraints), what])
        (environment / STAMP).write_text(stamp)
    return {}


def _made(environment: Path, python: Path, version: str) -> tuple[dict[str, Any], list[str]]:
    """Make an environment where there is none; return what is in it, and what installs into it.

    That is uv where it is there. It does not see the system's packages, so pip keeps its torch.
    """
    seen = _installed_for(python)
    place = str(environment)
    uv = shutil.which("uv", path=f"{os.environ.get('PATH', '')}:{Path.home()}/.local/bin")
    has_torch = importlib.util.find_spec("torch") is not None
    keeps = has_torch and not version
    if seen:
        keeps = seen["sees_system"]
    if uv is not None and not keeps:
        if seen is None:
            _done([uv, "venv", "-q", "--allow-existing", "-p", version or sys.executable, place])
        pip = [uv, "pip", "install", "--quiet", "--python", str(python)]
    else:
        # Where somebody was cut off while it was made there is a Python already, and no pip.
        if seen is None or not seen["has_pip"]:
            command = [sys.executable, "-m", "venv", place]
            if keeps:
                command.append("--system-site-packages")
            _done(command)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    seen = _installed_for(python)
    if seen is None:
        raise SystemExit(f"{python} does not run")
    return seen, pip


@contextlib.contextmanager
def _alone(environment: Path) -> Iterator[None]:
    """Wait until no other process makes an environment, or installs into it."""
    with open(environment / ALONE, "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _emptied(directory: Path) -> Iterator[Path]:
    """Yield an empty directory, and remove it afterwards; one that was left behind is emptied."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(mode=0o700)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _done(command: list[str]) -> None:
    nothing = subprocess.DEVNULL
    done = subprocess.run(command, stdin=nothing, stdout=nothing, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)


# A study.


def start(directory: str, python: str) -> dict[str, Any]:
    """Start the command on stdin, with the files behind it; return whether one runs already."""
    job = _job(directory)
    target = Path(python).expanduser()
    job.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(job / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    for _ in range(6):
        # Whoever looks whether it runs holds it for an instant.
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        time.sleep(0.05)
    else:
        return {"was_running": True}
    asked = json.loads(sys.stdin.buffer.readline())
    _unpack(job.parent)
    for name in (OUT, ERR, END, PID):
        (job / name).unlink(missing_ok=True)
    (job / ERR).touch(0o600)
    keeper = os.fork()
    if keeper == 0:
        try:
            _keep(job, str(target), asked)
        finally:
            os._exit(0)
    try:
        _write(job / PID, {"pid": keeper, "python": str(target)})
    except OSError:
        # Without that file it cannot be asked to stop.
        os.kill(keeper, signal.SIGTERM)
        raise
    return {"was_running": False}


def _keep(job: Path, python: str, asked: dict[str, Any]) -> None:
    """Run a command to its end, in a session of its own, and note how it ended."""
    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    supervisor = Supervisor()
    code = 127
    # What ends a connection is no request.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_OTHERS)}
        path = f"{Path(python).parent}{os.pathsep}{kept.get('PATH', '')}"
        with open(job / OUT, "wb") as out, open(job / ERR, "ab") as err:
            try:
                code = supervisor.run(
                    # Never from what is in the directory.
                    [python, "-P", "-c", SWEEP] + asked["words"],
                    cwd=job.parent,
                    env={**asked["variables"], **kept, "SWEEP_HOME": ".", "PATH": path},
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                )
            except OSError as error:
                err.write(f"error: {error}\n".encode())
    finally:
        _write(job / END, {"exit": code})


def follow(directory: str, offset: str) -> None:
    """Print what the command says on stderr, from a byte on, until it has ended."""
    job = _job(directory)
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
                time.sleep(0.1)


def _runs(job: Path) -> bool:
    try:
        with open(job / LOCK, "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (BlockingIOError, FileNotFoundError) as error:
        return isinstance(error, BlockingIOError)
    return False


def ask(directory: str) -> dict[str, Any]:
    """Ask the command to stop, as Ctrl-C does."""
    job = _job(directory)
    # It may end at any moment.
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        if _runs(job):
            os.kill(json.loads((job / PID).read_text())["pid"], signal.SIGTERM)
    return {}


def end(directory: str) -> dict[str, Any]:
    """Return how the command ended, and what it printed; None for an exit that was not noted."""
    job = _job(directory)
    ended = json.loads(_read(job / END) or "{}")
    printed = b""
    with contextlib.suppress(FileNotFoundError), open(job / OUT, "rb") as file:
        printed = file.read(PRINTED_BYTES_MAX)
    return {"exit": ended.get("exit"), "stdout": printed.decode("utf-8", errors="replace")}


def fetch(directory: str, study: str, bytes_max: str) -> None:
    """Print an archive of a study's database, as of one moment, and of its files without the large
    ones, which are named.
    """
    runs = _job(directory).parent / "runs"
    # Of two names of one file the archive would hold a link.
    with tarfile.open(fileobj=sys.stdout.buffer, mode="w|", dereference=True) as archive:
        database = runs / "sweep.db"
        if database.exists():
            # Nothing is copied first: the disk may be full. Nothing writes to it while it is read.
            with contextlib.closing(sqlite3.connect(str(database), timeout=60)) as reader:
                reader.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
                reader.execute("BEGIN")
                reader.execute("SELECT count(*) FROM sqlite_master").fetchone()
                archive.add(str(database), "host.db")
        for file in sorted((runs / study).glob("*")):
            is_plain = file.name.isprintable() and not file.name.startswith(".")
            if is_plain and file.is_file() and not file.is_symlink():
                if file.stat().st_size <= int(bytes_max):
                    archive.add(str(file), f"files/{file.name}")
                else:
                    archive.addfile(tarfile.TarInfo(f"left/{file.name}"))


def _unpack(place: Path) -> None:
    """Unpack the archive on stdin."""
    with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as archive:
        # The first versions of Python 3.11 have no filter; it is this program's own archive.
        options: dict[str, Any] = {}
        if hasattr(tarfile, "data_filter"):
            options["filter"] = "data"
        archive.extractall(place, **options)


def say(text: str) -> None:
    """Write a line to stderr."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _job(directory: str) -> Path:
    return Path(directory, "job").expanduser()


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _write(path: Path, document: dict[str, Any]) -> None:
    half = path.with_suffix(".half")
    half.write_text(json.dumps(document))
    half.replace(path)


VERBS: tuple[Any, ...] = (look, installed, install, start, follow, ask, end, fetch)
if __name__ == "__main__":
    # What a login printed may end without a newline.
    print(f"\n{MARK}", flush=True)  # noqa: T201 - a program's own stdout
    verbs = {verb.__name__: verb for verb in VERBS}
    try:
        answer = verbs[sys.argv[1]](*sys.argv[2:])
    except (OSError, sqlite3.Error, tarfile.TarError) as error:
        raise SystemExit(str(error)) from error
    if answer is not None:
        print(json.dumps(answer))  # noqa: T201
