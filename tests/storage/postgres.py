"""A throw-away PostgreSQL cluster on the loopback interface, for tests that need a real server."""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import pytest
import sqlalchemy

PASSWORD = "p@ss/w:rd%1"
_PLACES = (Path("/usr/lib/postgresql/15/bin"), Path("/usr/lib/postgresql/16/bin"))
_names = itertools.count()


@dataclass(frozen=True)
class Cluster:
    directory: Path
    port: int

    def url(self, database: str, *, password: str = PASSWORD) -> str:
        return f"postgresql://sweep:{quote(password, safe='')}@127.0.0.1:{self.port}/{database}"

    def new_database(self) -> str:
        """Create an empty database and return its URL."""
        name = f"sweep{next(_names)}"
        self.execute(f"CREATE DATABASE {name}")
        return self.url(name)

    def through(self, port: int, url: str) -> str:
        """Return the URL of a database as it is reached through a pooler."""
        return url.replace(f":{self.port}/", f":{port}/")

    def execute(self, statement: str, *, database: str = "postgres") -> None:
        with connected(self.url(database)) as connection:
            connection.exec_driver_sql(statement)

    def start(self) -> None:
        options = f"-p {self.port} -c listen_addresses=127.0.0.1 -c fsync=off -k {self.directory}"
        log = self.directory / "log"
        _run("pg_ctl", "start", "-w", "-D", str(self.directory), "-l", str(log), "-o", options)

    def stop(self) -> None:
        _run("pg_ctl", "stop", "-m", "immediate", "-D", str(self.directory))

    def restart(self) -> None:
        """Stop it as a crash would, and start it again."""
        self.stop()
        self.start()

    @contextmanager
    def stopped_in_its_tracks(self) -> Iterator[None]:
        """SIGSTOP the server and its backends inside the ``with``: the kernel goes on for them.

        Connections are taken and what is sent is acknowledged, but nobody answers.
        """
        self._signal_all(signal.SIGSTOP)
        try:
            yield
        finally:
            self._signal_all(signal.SIGCONT)

    def _signal_all(self, number: signal.Signals) -> None:
        server = int((self.directory / "postmaster.pid").read_text().split()[0])
        children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
        for process in (server, *map(int, children)):
            with suppress(ProcessLookupError):
                os.kill(process, number)


def _new_cluster() -> Cluster:
    # In memory where there is some: a database is seven megabytes of files.
    memory = os.environ.get("PYTEST_DEBUG_TEMPROOT")
    directory = Path(tempfile.mkdtemp(prefix="sweep-postgres-", dir=memory))
    secret = directory.with_suffix(".secret")
    secret.write_text(PASSWORD)
    user = _user() if is_root() else None
    if user is not None:
        for path in (directory, secret):
            os.chown(path, user.pw_uid, user.pw_gid)
    arguments = ("--auth=scram-sha-256", "-U", "sweep", f"--pwfile={secret}", "--no-sync")
    _run("initdb", "-D", str(directory), *arguments, "-E", "UTF8", "--locale=C")
    secret.unlink()
    return Cluster(directory, free_port())


@contextmanager
def running_cluster() -> Iterator[Cluster]:
    """Start a cluster, and remove it afterwards; skip the test where none can be started."""
    reason = _missing()
    if reason is not None:
        pytest.skip(reason)
    cluster = _new_cluster()
    cluster.start()
    try:
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(cluster.directory)


def _missing() -> str | None:
    """Why no cluster can be started here; None where one can."""
    if _binary("initdb") is None or _binary("postgres") is None:
        return "no PostgreSQL server binaries on this machine"
    if is_root() and (_user() is None or shutil.which("setpriv") is None):
        return "PostgreSQL does not run as root, and there is no user 'postgres' to become"
    return None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _binary(name: str) -> str | None:
    return shutil.which(name) or next(
        (str(place / name) for place in _PLACES if (place / name).exists()), None
    )


def _user() -> pwd.struct_passwd | None:
    return next((entry for entry in pwd.getpwall() if entry.pw_name == "postgres"), None)


def is_root() -> bool:
    return os.geteuid() == 0


def who_is_not_root() -> tuple[str, ...]:
    """Return what a command begins with to run as the user 'postgres', where this is root."""
    user = _user()
    if not is_root() or user is None:
        return ()
    return ("setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups")


def _run(name: str, *arguments: str) -> None:
    command = [*who_is_not_root(), _binary(name) or name, *arguments]
    # The server inherits no pipe: it would keep the reader waiting for as long as it runs.
    with tempfile.TemporaryFile("w+") as output:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd="/", check=False
        )
        output.seek(0)
        assert done.returncode == 0, output.read()


@contextmanager
def connected(url: str) -> Iterator[sqlalchemy.Connection]:
    """Connect past everything of ours, without transactions."""
    engine = sqlalchemy.create_engine(
        url.replace("postgresql", "postgresql+psycopg", 1),
        poolclass=sqlalchemy.pool.NullPool,
        isolation_level="AUTOCOMMIT",
    )
    with engine.connect() as connection:
        yield connection
