"""A throw-away PgBouncer before a throw-away PostgreSQL cluster, on the loopback interface."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.storage.postgres import PASSWORD, Cluster, free_port, is_root, who_is_not_root

_PLACES = (Path("/usr/sbin/pgbouncer"), Path("/opt/homebrew/bin/pgbouncer"))
_SETTINGS = """
[databases]
* = host=127.0.0.1 port={server}

[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = plain
auth_file = {directory}/users.txt
pool_mode = {mode}
default_pool_size = {pool_size}
max_client_conn = 200
query_wait_timeout = 20
logfile = {directory}/log
pidfile =
"""


@contextmanager
def running_pooler(cluster: Cluster, mode: str, *, pool_size: int = 20) -> Iterator[int]:
    """Run a pooler before a cluster and yield its port; skip the test where there is none.

    Args:
        cluster: what it passes statements on to.
        mode: session, transaction or statement.
        pool_size: connections to the server, of each database.
    """
    binary = shutil.which("pgbouncer") or next((str(p) for p in _PLACES if p.exists()), None)
    if binary is None:
        pytest.skip("no pgbouncer on this machine")
    directory, port = Path(tempfile.mkdtemp(prefix="sweep-pgbouncer-")), free_port()
    known = {"server": cluster.port, "port": port, "directory": directory}
    settings = _SETTINGS.format(**known, mode=mode, pool_size=pool_size)
    (directory / "settings.ini").write_text(settings)
    (directory / "users.txt").write_text(f'"sweep" "{PASSWORD}"\n')
    if is_root():
        for path in (directory, *directory.iterdir()):
            shutil.chown(path, "postgres", "postgres")
    command = [*who_is_not_root(), binary, str(directory / "settings.ini")]
    with (directory / "output").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd="/")
    try:
        _wait_for(port, process, directory)
        yield port
    finally:
        process.terminate()
        process.wait()
        shutil.rmtree(directory)


def _wait_for(port: int, process: subprocess.Popen[bytes], directory: Path) -> None:
    deadline = time.monotonic() + 10.0
    while True:
        with suppress(OSError):
            return socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
        assert process.poll() is None, (directory / "output").read_text()
        assert time.monotonic() < deadline, "pgbouncer does not listen"
        time.sleep(0.02)
