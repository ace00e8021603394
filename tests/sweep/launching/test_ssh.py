"""`sweep run --on ssh:`, against a real sshd on loopback."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from qlora_sweep.search_spaces.errors import EnvironmentFault, InputError
from qlora_sweep.search_spaces.presets import preset_texts
from qlora_sweep.storage.reading import read_study
from qlora_sweep.sweep.cli import main
from qlora_sweep.sweep.launching.remote import (
    ConnectionLostError,
    RemoteStudy,
    SshConnection,
    checked_address,
)
from qlora_sweep.sweep.launching.there import STAMP
from tests.sweep.launching.ssh_server import (
    Server,
    environment,
    pretending_environment,
    skip_without_ssh,
)

ROOT = Path(__file__).parents[3]
PROGRAM = """
import os, signal, sys, time
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
def main():
    print("words", *sys.argv[1:], file=sys.stderr, flush=True)
    seconds, patience = map(float, open("inputs/seconds").read().split())
    until, beats = time.monotonic() + seconds, 0
    while time.monotonic() < until and len(asked) < abs(patience) and not os.path.exists("end"):
        time.sleep(0.05)
        beats += 1
        print("beat", beats, file=sys.stderr, flush=True)
    print("asked", len(asked), file=sys.stderr, flush=True)
    if patience < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    print("%s %s" % (os.environ["SWEEP_HOME"], os.environ.get("HF_TOKEN")))
    return 130 if asked else 0
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    skip_without_ssh()
    server = Server(tmp_path_factory.mktemp("server"))
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Server) -> Path:
    home = tmp_path / "here"
    home.mkdir()
    monkeypatch.setenv("SWEEP_HOME", str(home))
    monkeypatch.delenv("SWEEP_STORAGE", raising=False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("SWEEP_SSH", server.ssh())
    return home


def environment_with(directory: Path, *, sweep: str, program: str = PROGRAM) -> Path:
    """Return the Python of an environment whose `sweep`, of some version, says what it is asked."""
    return pretending_environment(directory, program, sweep=sweep)


@pytest.fixture(scope="module")
def pretending(server: Server) -> Path:
    return environment_with(server.directory / "pretending", sweep=version("qlora-sweep"))


@pytest.fixture
def connection(server: Server) -> Iterator[SshConnection]:
    with SshConnection(server.address) as connection:
        yield connection


class Study(RemoteStudy):
    """Its `sweep` runs until it was asked often enough."""

    def __init__(self, connection: SshConnection, python: Path, scratch: Path, home: Path) -> None:
        name = f"study-{scratch.name}"
        super().__init__(connection, name, python=str(python))
        self.place, self._scratch = home / "qlora-sweep" / name, scratch
        self.heard: list[str] = []
        self.said: list[str] = []

    def run(self, *words: str, seconds: float = 60, patience: int = 1, **variables: str) -> bool:
        (self._scratch / "seconds").write_text(f"{seconds} {patience}")
        files = {"inputs/seconds": self._scratch / "seconds"}
        return self.start(["run", *words], files, variables)

    def watch(
        self,
        at_beat_5: Callable[[], object] = lambda: None,
        requests: Callable[[], int] = lambda: 0,
        pauses: tuple[float, ...] = (0.1, 1, 2, 4),
    ) -> tuple[int | None, str]:
        """Follow it, and let it end at the tenth beat."""

        def hear(line: str) -> None:
            self.heard.append(line)
            if line == "beat 5":
                at_beat_5()
            if line == "beat 10" and not requests():
                (self.place / "end").touch()

        end = self.follow(hear=hear, requests=requests, say=self.said.append, pauses=pauses)
        return end.exit, end.stdout

    def has_heard_all(self) -> bool:
        return self.heard[1:-1] == [f"beat {n}" for n in range(1, len(self.heard) - 1)]


@pytest.fixture
def study(connection: SshConnection, pretending: Path, server: Server, tmp_path: Path) -> Study:
    return Study(connection, pretending, tmp_path, server.home)


@pytest.mark.parametrize("typed", ["box", "me@box:2222", "me@[::1]:22"])
def test_an_address_is_one_of_sshs(typed: str) -> None:
    assert checked_address(typed) == typed


@pytest.mark.parametrize(
    "typed",
    ["", "-oProxyCommand=x", "me@-x", "me@", "a b", "box:99999", "box:ssh", "a@b@"],
)
def test_what_is_no_address_is_refused_before_ssh_sees_it(typed: str) -> None:
    with pytest.raises(InputError, match="--on ssh"):
        checked_address(typed)


def refused(address: str, python: str | None = None) -> str:
    def prepare() -> None:
        with SshConnection(address) as connection:
            study = RemoteStudy(connection, "any", python=python)
            study.prepare(study.look().target, say=lambda _: None)

    with pytest.raises(EnvironmentFault) as caught:
        prepare()
    return str(caught.value)


@pytest.mark.parametrize("more", ["", "StrictHostKeyChecking accept-new"])
def test_a_host_whose_key_is_unknown_is_refused_whatever_is_configured(
    more: str, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWEEP_SSH", server.ssh(knows=False, more=more))
    assert "run `ssh ssh://" in refused(server.address)
    assert not (server.directory / "none_known").exists()


def test_what_keeps_one_out_is_said_with_what_to_do(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "nothing listens there" in refused("me@127.0.0.1:1")
    assert "no such host is known" in refused("me@no.such.host.invalid")
    monkeypatch.setenv("SWEEP_SSH", server.ssh(key="stranger"))
    assert "no key of yours is accepted there: run ssh-copy-id" in refused(server.address)
    monkeypatch.setenv("SWEEP_SSH", server.ssh())
    known, own = server.directory / "known_hosts", server.directory / "stranger.pub"
    known.write_text(f"[127.0.0.1]:{server.port} {' '.join(own.read_text().split()[:2])}\n")
    assert "another than the one that is known here" in refused(server.address)
    monkeypatch.setenv("SWEEP_SSH", "no-such-ssh")
    assert "no-such-ssh is not here" in refused(server.address)


def test_a_python_there_that_is_none_or_has_another_sweep_is_refused(server: Server) -> None:
    for python in ("/bin/false", "; touch pwned", "~/; touch pwned"):
        assert "is no Python 3.11 or newer" in refused(server.address, python)
    assert not (server.home / "pwned").exists()
    other = environment_with(server.directory / "other", sweep="0.0.1")
    assert "has sweep 0.0.1" in refused(server.address, str(other))


def test_a_study_is_followed_to_its_end_in_its_own_directory(study: Study) -> None:
    assert study.run("a space", "--x=1", HF_TOKEN="hf_made_up") is False
    kept = [path.read_bytes() for path in study.place.rglob("*") if path.is_file()]
    assert study.watch() == (0, ". hf_made_up\n")
    assert study.heard[0] == "words run a space --x=1"
    assert study.has_heard_all()
    # The token is in no file there.
    assert not [content for content in kept if b"hf_made_up" in content]


def test_who_asks_to_stop_here_is_heard_there_as_often_as_that(study: Study) -> None:
    study.run(patience=2)
    # The second time only once the first was heard.
    code, _ = study.watch(requests=lambda: min(2, len(study.heard) // 10))
    assert (code, study.heard[-1]) == (130, "asked 2")


@pytest.mark.parametrize("what", ["connection", "follower"])
def test_a_study_outlives_what_follows_it_and_is_followed_again(
    study: Study, server: Server, what: str
) -> None:
    def lose() -> None:
        if what == "connection":
            server.stop()
            server.start()
            return
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (process / "cmdline").read_bytes().decode().split("\0")
                if "follow" in words and study.directory in words:
                    os.kill(int(process.name), signal.SIGKILL)

    study.run()
    assert study.watch(lose)[0] == 0
    assert len(study.said) == 1
    assert "the study goes on there" in study.said[0]
    assert study.has_heard_all()


def test_a_machine_that_stays_away_is_told_of(study: Study, server: Server) -> None:
    study.run(seconds=2)
    try:
        with pytest.raises(ConnectionLostError, match="nothing listens there"):
            study.watch(server.stop, pauses=(0.1, 0.1))
    finally:
        server.start()


def test_a_study_that_runs_already_is_followed_and_what_it_reads_stays(study: Study) -> None:
    assert not study.look().runs
    assert study.run("first") is False
    assert study.run("second", seconds=1) is True
    assert study.look().runs
    assert (study.place / "inputs" / "seconds").read_text() == "60 1"
    study.watch()
    assert study.heard[0] == "words run first"
    assert not study.look().runs


@contextlib.contextmanager
def stamped(python: Path) -> Iterator[Path]:
    """Let an environment be one that another checkout was installed into."""
    stamp = python.parents[1] / STAMP
    stamp.write_text("of another checkout")
    yield stamp
    stamp.unlink()


def test_nothing_is_installed_beneath_a_study_that_runs(study: Study, pretending: Path) -> None:
    with stamped(pretending):
        study.run()
        with pytest.raises(EnvironmentFault, match=r"study study-.* would be installed beneath it"):
            study.prepare(study.look().target, say=study.said.append)
        study.watch()


def test_whoever_follows_a_study_leaves_everything_there_as_it_is(
    study: Study, pretending: Path, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    study.run("first", seconds=3)
    with stamped(pretending) as stamp:
        words = ["--study", study.place.name, "--with", f"python={pretending}"]
        # It leaves no results.
        assert main(["run", "cpu-demo", "--on", f"ssh:{server.address}", *words]) == 3
        assert stamp.exists()
    said = " ".join(capsys.readouterr().err.split())
    assert "runs on" in said
    assert "words run first" in said
    assert "Installing" not in said


def test_a_study_that_was_killed_there_is_said_and_is_a_fault(
    study: Study, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    study.run(seconds=3, patience=-1)
    place = ["--study", study.place.name, "--on", f"ssh:{server.address}"]
    assert main(["run", "cpu-demo", *place]) == 3
    assert "with exit code 137; the same command resumes it" in capsys.readouterr().err


def test_a_study_that_nobody_could_follow_is_not_left_running(study: Study) -> None:
    # As on a full disk: nothing can be noted.
    for name in ("pid.half", "end.half"):
        (study.place / "job" / name).mkdir(parents=True)
    with pytest.raises(EnvironmentFault, match="Is a directory"):
        study.run()
    assert not study.look().runs


def test_an_installation_that_cannot_be_imported_fails_and_says_why(
    connection: SshConnection, server: Server, tmp_path: Path
) -> None:
    python = environment_with(
        server.directory / "broken", sweep=version("qlora-sweep"), program="import no_such_module"
    )
    study = Study(connection, python, tmp_path, server.home)
    study.run()
    assert study.watch()[0] == 3
    assert study.heard[-1].endswith("ModuleNotFoundError: No module named 'no_such_module'")


def test_a_file_that_is_too_large_is_named_and_the_database_is_always_fetched(
    study: Study, tmp_path: Path
) -> None:
    runs = study.place / "runs"
    (runs / study.place.name).mkdir(parents=True)
    for file, size in (("spool.jsonl", 10), ("worker.log", 100)):
        (runs / study.place.name / file).write_bytes(b"x" * size)
    with contextlib.closing(sqlite3.connect(runs / "sweep.db")) as database:
        database.execute("CREATE TABLE mine (id)")
    copy, files, left_out = study.fetch(tmp_path, bytes_max=50)
    assert {name: path.read_bytes() for name, path in files.items()} == {"spool.jsonl": b"x" * 10}
    assert left_out == ["worker.log"]
    with contextlib.closing(sqlite3.connect(copy)) as database:
        assert database.execute("SELECT * FROM mine").fetchall() == []


@pytest.mark.integration
def test_a_study_is_installed_run_stopped_and_fetched(
    server: Server, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = environment(server.directory / "fresh")
    command = [
        sys.executable,
        "-c",
        "import sys; from qlora_sweep.sweep.cli import main; sys.exit(main())",
    ]
    words = ["run", "space.yaml", "--trials=40", "--sampler=random", "--no-confirm", "--json"]
    there = ["--study", "fetched", "--on", f"ssh:{server.address}", "--with", f"python={python}"]
    (home / "space.yaml").write_text(preset_texts()["cpu-demo"])
    with subprocess.Popen(
        [*command, *words, *there],
        cwd=home,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as run:
        assert run.stdout is not None
        assert run.stderr is not None
        said = []
        is_asked = False
        for line in run.stderr:
            said.append(line)
            # Shown where the test runs out of time.
            print(line, end="")
            if "of 40): fits" in line and not is_asked:
                run.send_signal(signal.SIGINT)
                is_asked = True
        document = json.loads(run.stdout.read())
    assert run.returncode == 130, said
    assert 1 <= document["trials"]["fits"] < 40
    assert any("Installing sweep" in line for line in said)
    url = f"sqlite:///{home}/runs/sweep.db"
    study = read_study("fetched", url=url, home=home / "runs")
    assert sum(not r.is_interrupted for r in study.records) == document["trials"]["fits"]
    assert (study.holder, study.warnings) == (None, ())
    assert (home / "runs" / "fetched" / "report.html").read_text().startswith("<!")
    capsys.readouterr()
    assert main(["best", "fetched", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["best"] == document["best"]


def test_bad_input_is_refused_before_anybody_is_called(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["cpu-demo", "--storage", "mysql://u:secret@host/db"]
    assert main(["run", "--on", "ssh:me@no.such.host.invalid", *words]) == 2
    err = capsys.readouterr().err
    assert "known are sqlite" in err
    assert "secret" not in err
    assert list(home.iterdir()) == []
