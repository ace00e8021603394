"""A real sshd on loopback, as the current user, with a home of its own for whoever logs in."""

from __future__ import annotations

import contextlib
import getpass
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import venv
from pathlib import Path

import pytest

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
DEPENDENCIES = sorted({path for path in sys.path if Path(path).name == "site-packages"})


def skip_without_ssh() -> None:
    if not (shutil.which("ssh-keygen") and os.access(SSHD, os.X_OK)):
        pytest.skip("there is no sshd: install openssh-server and openssh-client")


class Server:
    """Its address, its home, and how ssh is told of it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.home = directory / "home"
        self.home.mkdir()
        # What a login prints, whoever logs in; its last line has no end.
        (self.home / ".bashrc").write_text("echo Welcome; printf 'to this machine'\n")
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            self.port = int(listener.getsockname()[1])
        for name in ("host", "user", "stranger"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(directory / name)]
            subprocess.run(command, check=True, timeout=30)
        shutil.copy(directory / "user.pub", directory / "authorized_keys")
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def address(self) -> str:
        return f"{getpass.getuser()}@127.0.0.1:{self.port}"

    def start(self) -> None:
        if os.geteuid() == 0:
            # Where it leaves its rights; a package's own start makes it.
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        config = self.directory / "sshd_config"
        config.write_text(
            f"Port {self.port}\nListenAddress 127.0.0.1\nHostKey {self.directory}/host\n"
            f"AuthorizedKeysFile {self.directory}/authorized_keys\nPidFile none\nUsePAM no\n"
            "StrictModes no\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n"
            "PermitRootLogin yes\nMaxStartups 100\n"
            f"SetEnv HOME={self.home} OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=\n"
        )
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [SSHD, "-D", "-e", "-f", str(config)], stdin=subprocess.DEVNULL, stderr=log
            )
        until = time.monotonic() + 20
        while time.monotonic() < until and self._process.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.02)
        raise AssertionError((self.directory / "log").read_text())

    def stop(self) -> None:
        """End it, and every connection to it, but nothing that was started through it."""
        assert self._process is not None
        # Or who was cut off might connect again before it ends, and be cut off once more.
        self._process.send_signal(signal.SIGSTOP)
        for number in _children(self._process.pid):
            for below in (*_children(number), number):
                with contextlib.suppress(OSError):
                    if Path(f"/proc/{below}/comm").read_text().startswith("sshd"):
                        os.kill(below, 9)
        self._process.kill()
        self._process.wait()

    def ssh(self, *, knows: bool = True, key: str = "user", more: str = "") -> str:
        """Return an ssh command of somebody who knows the host's key, and has a key.

        Args:
            knows: whether the host's key is known.
            key: file of their key.
            more: further lines of their configuration.
        """
        known = self.directory / ("known_hosts" if knows else "none_known")
        if knows:
            words = (self.directory / "host.pub").read_text().split()[:2]
            known.write_text(f"[127.0.0.1]:{self.port} {' '.join(words)}\n")
        config = self.directory / f"config-{knows}-{key}"
        config.write_text(
            f"Host *\n  IdentityFile {self.directory}/{key}\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {known}\n  GlobalKnownHostsFile /dev/null\n  {more}\n"
        )
        return shlex.join(["ssh", "-F", str(config)])


def environment(directory: Path) -> Path:
    """Make an environment that sees what the running one has installed; return its Python."""
    venv.create(directory, symlinks=True, with_pip=False)
    paths = sysconfig.get_paths(vars={"base": str(directory)})
    # Lines of a .pth file are directories: what other .pth files there name stays unseen.
    Path(paths["purelib"], "dependencies.pth").write_text("\n".join(DEPENDENCIES))
    return directory / "bin" / "python"


def pretending_environment(directory: Path, program: str, *, sweep: str) -> Path:
    """Return the Python of an environment in which a program's `main` is the command `sweep`, of
    some version."""
    python = environment(directory)
    (packages,) = (python.parents[1] / "lib").glob("python*/site-packages")
    (packages / "dependencies.pth").unlink()
    start = packages / "qlora_sweep" / "sweep" / "entry_point.py"
    start.parent.mkdir(parents=True)
    start.write_text(program)
    info = packages / f"qlora_sweep-{sweep}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: qlora-sweep\nVersion: {sweep}\n")
    return python


def _children(number: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(n) for n in Path(f"/proc/{number}/task/{number}/children").read_text().split()]
    return []
