"""`sweep run --host`, against a real sshd on loopback."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from search_spaces.errors import EnvironmentFault, InputError
from search_spaces.presets import preset_texts
from storage.directory import StudyFile, note_identity
from storage.reading import read_study
from sweep.cli import main
from sweep.launching.box import Box, prepared, reached
from sweep.launching.package import version
from sweep.launching.remote_study import HOME, RemoteStudy
from sweep.launching.ssh import Address, Connection, ConnectionLostError
from sweep.launching.there import ALONE, STAMP
from tests.storage.builders import a_definition
from tests.sweep.launching.ssh_server import Server, environment, skip_without_ssh

ROOT = Path(__file__).parents[3]
PROGRAM = """
import os, signal, sys, time
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
def main():
    print("words", *sys.argv[1:], file=sys.stderr, flush=True)
    seconds = float(os.environ.get("SECONDS_LONG") or open("seconds").read())
    until, beats = time.monotonic() + seconds, 0
    while time.monotonic() < until and len(asked) < int(open("patience").read()):
        time.sleep(0.05)
        beats += 1
        print("beat", beats, file=sys.stderr, flush=True)
    print("asked", len(asked), file=sys.stderr, flush=True)
    print('{"home": "%s", "path": "%s"}' % (os.environ["SWEEP_HOME"], sys.path[0]))
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
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("SWEEP_SSH", server.ssh())
    return home


@pytest.fixture(scope="module")
def pretending(server: Server) -> Path:
    """Python of an environment whose `sweep` only says what it is asked."""
    python = environment(server.directory / "pretending")
    (packages,) = (python.parents[1] / "lib").glob("python*/site-packages")
    (packages / "dependencies.pth").unlink()
    (packages / "qlora_sweep.py").write_text(PROGRAM)
    info = packages / f"qlora_sweep-{version()}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: qlora-sweep\nVersion: {version()}\n")
    return python


@pytest.fixture
def connection(server: Server) -> Iterator[Connection]:
    with Connection(Address.parse(server.address)) as connection:
        yield connection


@pytest.fixture
def study(connection: Connection, pretending: Path, server: Server, tmp_path: Path) -> RemoteStudy:
    box = prepare(connection, str(pretending))
    study = RemoteStudy(box, f"study-{tmp_path.name}")
    set_up(study, tmp_path, seconds=0.3)
    return study


def prepare(connection: Connection, python: str | None) -> Box:
    found = reached(connection, python=python)
    return prepared(found, python=python, studies=HOME, say=lambda _: None)


def set_up(study: RemoteStudy, scratch: Path, *, seconds: float, patience: int = 1) -> None:
    for name, value in (("seconds", seconds), ("patience", patience)):
        (scratch / name).write_text(str(value))
    study.ship({name: scratch / name for name in ("seconds", "patience")})


def never() -> int:
    return 0


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("box", ["--", "box"]),
        ("me@box:2222", ["-p", "2222", "--", "me@box"]),
        ("me@[::1]:22", ["-p", "22", "--", "me@::1"]),
        ("10.0.0.7", ["--", "10.0.0.7"]),
    ],
)
def test_an_address_is_told_to_ssh(typed: str, words: list[str]) -> None:
    assert Address.parse(typed).words == words


@pytest.mark.parametrize(
    "typed",
    ["", "-oProxyCommand=x", "me@-x", "me@", "a b", "box:0", "box:99999", "box:ssh", "a@b@"],
)
def test_what_is_no_address_is_refused_before_ssh_sees_it(typed: str) -> None:
    with pytest.raises(InputError, match="--on ssh: an address is like"):
        Address.parse(typed)


def refused(address: str) -> str:
    with pytest.raises(EnvironmentFault) as caught, Connection(Address.parse(address)):
        pass
    return str(caught.value)


def test_a_host_whose_key_is_unknown_is_refused_and_no_key_is_kept(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWEEP_SSH", server.ssh(knows=False))
    said = refused(server.address)
    assert "host key is unknown here: run `ssh -p" in said
    assert not (server.directory / "none_known").exists()


def test_a_host_that_shows_another_key_is_refused(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = server.ssh()
    known = server.directory / "known_hosts"
    other = (server.directory / "stranger.pub").read_text().split()[:2]
    known.write_text(f"[127.0.0.1]:{server.port} {' '.join(other)}\n")
    monkeypatch.setenv("SWEEP_SSH", command)
    assert "another than the one that is known here" in refused(server.address)


def test_what_keeps_one_out_is_said_with_what_to_do(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "nobody listens there" in refused("me@127.0.0.1:1")
    assert "no such host is known" in refused("me@no.such.host.invalid")
    monkeypatch.setenv("SWEEP_SSH", server.ssh(key="stranger"))
    assert "no key of yours is accepted there: run ssh-copy-id" in refused(server.address)
    monkeypatch.setenv("SWEEP_SSH", "no-such-ssh")
    assert "no-such-ssh is not here" in refused(server.address)


def test_a_python_there_that_is_none_or_has_another_sweep_is_refused(
    connection: Connection, server: Server
) -> None:
    def refusal(python: str) -> str:
        with pytest.raises(EnvironmentFault) as caught:
            prepare(connection, python)
        return str(caught.value)

    assert "is no Python 3.11 or newer" in refusal("/bin/false")
    assert "is no Python 3.11 or newer" in refusal("; touch pwned")
    assert not (server.home / "pwned").exists()
    other = environment(server.directory / "other")
    (packages,) = (other.parents[1] / "lib").glob("python*/site-packages")
    info = packages / "qlora_sweep-0.0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: qlora-sweep\nVersion: 0.0.1\n")
    assert "has sweep 0.0.1" in refusal(str(other))


def test_a_study_is_followed_to_its_end_in_its_own_directory(
    study: RemoteStudy, server: Server
) -> None:
    heard: list[str] = []
    assert study.start(["run", "a space", "--x=1"]) is False
    ended = study.follow(hear=heard.append, requests=never, say=heard.append)
    assert heard[0] == "words run a space --x=1"
    assert heard[1:-1] == [f"beat {n}" for n in range(1, len(heard) - 1)]
    assert ended.code == 0
    assert json.loads(ended.stdout)["home"] == "."


def test_who_asks_to_stop_here_is_heard_there_as_often_as_that(
    study: RemoteStudy, tmp_path: Path
) -> None:
    set_up(study, tmp_path, seconds=60, patience=2)
    heard: list[str] = []
    study.start(["run"])
    asked = [0]

    def requests() -> int:
        # The second time only once the first was heard.
        asked[0] = min(2, len(heard) // 10)
        return asked[0]

    ended = study.follow(hear=heard.append, requests=requests, say=heard.append)
    assert (ended.code, heard[-1]) == (130, "asked 2")


def hearing(*, at_beat_5: Callable[[], None]) -> tuple[list[str], Callable[[str], None]]:
    """Return the lines that are heard, and what hears them and does something in their middle."""
    heard: list[str] = []

    def hear(line: str) -> None:
        heard.append(line)
        if line == "beat 5":
            at_beat_5()

    return heard, hear


def test_a_study_outlives_its_connection_and_is_followed_again(
    study: RemoteStudy, server: Server, tmp_path: Path
) -> None:
    set_up(study, tmp_path, seconds=4)
    said: list[str] = []
    study.start(["run"])

    def restart() -> None:
        server.stop()
        server.start()

    heard, hear = hearing(at_beat_5=restart)
    ended = study.follow(hear=hear, requests=never, say=said.append)
    assert ended.code == 0
    assert len(said) == 1
    assert "the study goes on there" in said[0]
    assert heard[1:-1] == [f"beat {n}" for n in range(1, len(heard) - 1)]


def test_a_study_that_runs_already_is_followed_and_not_started_twice(
    study: RemoteStudy, tmp_path: Path
) -> None:
    set_up(study, tmp_path, seconds=3)
    assert study.start(["run", "first"]) is False
    assert study.start(["run", "second"]) is True
    heard: list[str] = []
    study.follow(hear=heard.append, requests=never, say=heard.append)
    assert heard[0] == "words run first"


def test_what_a_running_study_reads_is_not_replaced(
    study: RemoteStudy, server: Server, tmp_path: Path
) -> None:
    set_up(study, tmp_path, seconds=3)
    assert not study.runs()
    study.start(["run"])
    assert study.runs()
    set_up(study, tmp_path, seconds=9)
    place = server.home / "qlora-sweep" / f"study-{tmp_path.name}"
    assert (place / "seconds").read_text() == "3"
    study.follow(hear=lambda _: None, requests=never, say=lambda _: None)
    assert not study.runs()


@pytest.mark.parametrize("was_installed_into", [False, True])
def test_nothing_is_installed_beneath_a_study_that_runs(
    study: RemoteStudy,
    connection: Connection,
    pretending: Path,
    tmp_path: Path,
    was_installed_into: bool,
) -> None:
    lock = pretending.parents[1] / ALONE
    lock.touch() if was_installed_into else lock.unlink(missing_ok=True)
    set_up(study, tmp_path, seconds=3)
    study.start(["run"])
    box = Box(connection, str(pretending))
    with pytest.raises(EnvironmentFault, match=r"study study-.* installed beneath it: wait until"):
        box.do("install", HOME, "x.whl", "digest", "0")
    study.follow(hear=lambda _: None, requests=never, say=lambda _: None)
    # And once it has ended, what is refused is this wheel.
    with pytest.raises(EnvironmentFault, match="pip install"):
        box.do("install", HOME, "x.whl", "digest", "0")


def test_whoever_follows_a_study_leaves_everything_there_as_it_is(
    study: RemoteStudy,
    pretending: Path,
    server: Server,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    set_up(study, tmp_path, seconds=4)
    stamp = pretending.parents[1] / STAMP
    stamp.write_text("of another checkout")
    study.start(["run", "first"])
    try:
        words = ["--study", f"study-{tmp_path.name}", "--with", f"python={pretending}"]
        assert main(["run", "cpu-demo", "--on", f"ssh:{server.address}", *words]) == 0
    finally:
        is_stamped = stamp.exists()
        stamp.unlink(missing_ok=True)
    assert "runs on" in (said := " ".join(capsys.readouterr().err.split()))
    assert "words run first" in said
    assert "Installing" not in said
    assert is_stamped


def test_an_environment_that_was_made_halfway_is_made_whole(
    connection: Connection, server: Server
) -> None:
    half = server.directory / "half"
    venv.create(half, symlinks=True, with_pip=False)
    box = reached(connection, python=None)
    made = box.do("make_environment", str(half), sys.executable, "no")
    assert made == {"python": str(half / "bin" / "python")}
    subprocess.run([made["python"], "-m", "pip", "--version"], check=True, capture_output=True)


def test_a_study_that_nobody_could_follow_is_not_left_running(
    study: RemoteStudy, server: Server, tmp_path: Path
) -> None:
    set_up(study, tmp_path, seconds=60)
    place = server.home / "qlora-sweep" / f"study-{tmp_path.name}"
    # As on a full disk: nothing can be noted.
    for name in ("pid.half", "end.half"):
        (place / "job" / name).mkdir(parents=True)
    with pytest.raises(EnvironmentFault, match="is its disk full"):
        study.start(["run"])
    assert not study.runs()
    assert at_work_in(place) == []


def at_work_in(directory: Path) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "cwd").readlink() == directory:
                found.append(process.name)
    return found


def test_a_file_that_is_too_large_is_named_and_the_database_is_always_fetched(
    study: RemoteStudy, connection: Connection, pretending: Path, server: Server, tmp_path: Path
) -> None:
    name = f"study-{tmp_path.name}"
    runs = server.home / "qlora-sweep" / name / "runs"
    (runs / name).mkdir(parents=True)
    for file, size in (("spool.jsonl", 10), ("worker.log", 100)):
        (runs / name / file).write_bytes(b"x" * size)
    with contextlib.closing(sqlite3.connect(runs / "sweep.db")) as database:
        database.execute("CREATE TABLE mine (id)")
    fetched = RemoteStudy(Box(connection, str(pretending)), name, bytes_max=50).fetch(tmp_path)
    assert {name: path.read_bytes() for name, path in fetched.files.items()} == {
        "spool.jsonl": b"x" * 10
    }
    assert fetched.left_out == ("worker.log",)
    with contextlib.closing(sqlite3.connect(fetched.database)) as database:
        assert database.execute("SELECT * FROM mine").fetchall() == []


def test_a_follower_that_dies_there_is_a_connection_that_is_lost(
    study: RemoteStudy, server: Server, tmp_path: Path
) -> None:
    set_up(study, tmp_path, seconds=3)
    said: list[str] = []
    study.start(["run"])

    def kill() -> None:
        for number in followers(f"study-{tmp_path.name}"):
            os.kill(number, signal.SIGKILL)

    heard, hear = hearing(at_beat_5=kill)
    ended = study.follow(hear=hear, requests=never, say=said.append, pauses=(0.1,))
    assert ended.code == 0
    assert len(said) == 1
    assert "the study goes on there" in said[0]
    assert heard[1:-1] == [f"beat {n}" for n in range(1, len(heard) - 1)]


def followers(study: str) -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (process / "cmdline").read_bytes().decode().split("\0")
            if "follow" in words and f"{HOME}/{study}" in words:
                found.append(int(process.name))
    return found


def test_a_follower_that_always_dies_is_given_up(study: RemoteStudy, server: Server) -> None:
    # Nothing was ever started there, so that there is nothing to follow.
    said: list[str] = []
    with pytest.raises(ConnectionLostError, match="No such file"):
        study.follow(hear=said.append, requests=never, say=said.append, pauses=(0.01, 0.01))
    assert len(said) == 2


def test_a_machine_that_stays_away_is_told_of(
    study: RemoteStudy, server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    set_up(study, tmp_path, seconds=2)
    study.start(["run"])
    try:
        with pytest.raises(ConnectionLostError, match="nobody listens there"):
            study.follow(
                hear=lambda _: server.stop(), requests=never, say=lambda _: None, pauses=(0.1, 0.1)
            )
    finally:
        server.start()


@pytest.mark.slow
def test_a_study_is_installed_run_stopped_and_fetched(
    server: Server, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    python = environment(server.directory / "fresh")
    command = [sys.executable, "-c", "import sys; from sweep.cli import main; sys.exit(main())"]
    words = ["run", "space.yaml", "--trials=2", "--sampler=random", "--no-confirm", "--json"]
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
        for line in run.stderr:
            said.append(line)
            if "trial 0 (1 of 2): fits" in line:
                run.send_signal(signal.SIGINT)
        document = json.loads(run.stdout.read())
    assert run.returncode == 130, said
    assert document["trials"]["fits"] == 1
    assert any("Installing sweep" in line for line in said)
    url = f"sqlite:///{home}/runs/sweep.db"
    study = read_study("fetched", url=url, home=home / "runs")
    assert [r.number for r in study.records if not r.is_interrupted] == [0]
    assert (study.holder, study.warnings) == (None, ())
    assert (home / "runs" / "fetched" / "report.html").read_text().startswith("<!")
    capsys.readouterr()
    assert main(["best", "fetched", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["best"] == document["best"]


def test_a_study_of_this_machine_is_never_replaced(
    server: Server, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    database = f"sqlite:///{home}/runs/gone.db"
    own = StudyFile(
        identity="1",
        name="cpu-demo",
        database=database,
        definition=a_definition(),
        environment={},
    )
    note_identity(home / "runs" / "cpu-demo", own)
    assert main(["run", "cpu-demo", "--on", f"ssh:{server.address}"]) == 2
    assert "choose another name" in capsys.readouterr().err
    assert not (server.home / "qlora-sweep" / "cpu-demo").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["cpu-dmo"], "did you mean 'cpu-demo'"),
        (["cpu-demo", "--data", "nope.jsonl"], "nope.jsonl"),
        (["cpu-demo", "--from", "nope"], "--from nope"),
        (["cpu-demo", "--storage", "mysql://u:secret@host/db"], "known are sqlite"),
    ],
)
def test_bad_input_is_refused_before_anybody_is_called(
    words: list[str], said: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--on", "ssh:me@no.such.host.invalid", *words]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert "secret" not in err
    assert list(home.iterdir()) == []
