"""The jobs as their providers would run them, with stand-ins for what only a provider has."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from search_spaces.errors import InputError
from search_spaces.gpus import find_gpu
from sweep.launching.modal import Modal
from sweep.launching.parcel import Input
from sweep.launching.rental import Machine
from sweep.launching.skypilot import SkyPilot, task
from sweep.request import REQUEST, RunRequest
from tests.sweep.launching.rentals import a_cost, a_rental

FAKE_MODAL = """
class Image:
    def __init__(self, *calls):
        self.calls = calls

    @classmethod
    def debian_slim(cls, **keys):
        return cls(("debian_slim", (), keys))

    def __getattr__(self, name):
        return lambda *values, **keys: Image(*self.calls, (name, values, keys))

class Volume:
    commits = reloads = 0

    @classmethod
    def from_name(cls, name, create_if_missing=False):
        found = cls()
        found.name = name
        return found

    def commit(self):
        Volume.commits += 1

    def reload(self):
        Volume.reloads += 1
        raise RuntimeError("there are open files preventing the operation")

class Secret:
    @staticmethod
    def from_local_environ(names):
        return names

class App:
    def __init__(self, name):
        self.name, self.keys = name, None

    def function(self, **keys):
        self.keys = keys
        return lambda function: function

    def local_entrypoint(self):
        return lambda function: function
"""


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Load an app with a stand-in for Modal that notes what it is asked for."""
    (tmp_path / "stand-ins").mkdir()
    (tmp_path / "stand-ins" / "modal.py").write_text(FAKE_MODAL, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path / "stand-ins")
    monkeypatch.delitem(sys.modules, "modal", raising=False)

    def loaded(text: str) -> ModuleType:
        # A name of its own: of one that is written twice in a second Python takes the first's
        # compiled form.
        path = tmp_path / f"modal_app_{len(list(tmp_path.glob('modal_app_*.py')))}.py"
        path.write_text(text, encoding="utf-8")
        spec = importlib.util.spec_from_file_location("a_rented_app", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    yield loaded
    sys.modules.pop("modal", None)


def calls(app: ModuleType) -> dict[str, list[tuple[Any, ...]]]:
    found: dict[str, list[tuple[Any, ...]]] = {}
    for name, values, keys in app.image.calls:
        found.setdefault(name, []).append((*values, keys))
    return found


def test_an_app_has_the_card_the_limit_and_nothing_that_stays(load: Any) -> None:
    machine = Machine(find_gpu("a100-80gb"), cards=4)
    app = load(Modal().text(a_rental(machine=machine, cost=a_cost(limit_seconds=1234))))
    keys = app.app.keys
    assert keys["gpu"] == "A100-80GB:4"
    assert keys["timeout"] == 1234
    assert (keys["max_containers"], keys["single_use_containers"]) == (1, True)
    assert "min_containers" not in keys
    assert "retries" not in keys
    assert keys["volumes"]["/volume"].name == "kept"
    assert "secrets" not in keys


def test_an_app_installs_the_versions_first_and_the_wheel_after(load: Any, tmp_path: Path) -> None:
    wheel = tmp_path / "qlora_sweep-0.1.0-py3-none-any.whl"
    found = calls(load(Modal().text(a_rental(wheel=wheel))))
    (versions, package) = found["uv_pip_install"]
    assert versions[:-1] == ("torch==2.13.0", "transformers==5.17.0")
    assert package == (f"/wheels/{wheel.name}", {"extra_options": "--no-deps"})
    assert found["add_local_file"][0][:2] == (str(wheel), f"/wheels/{wheel.name}")


def test_files_of_a_space_go_along_by_the_names_that_the_command_has(
    load: Any, tmp_path: Path
) -> None:
    texts, model = tmp_path / 'it\'s "mine".jsonl', tmp_path / "model"
    texts.touch()
    model.mkdir()
    rental = a_rental(inputs=(Input(texts, "data/texts.jsonl"), Input(model, "model/m")))
    app = load(Modal().text(rental))
    assert calls(app)["add_local_file"][-1][:2] == (str(texts), "/inputs/data/texts.jsonl")
    assert calls(app)["add_local_dir"] == [(str(model), "/inputs/model/m", {})]
    assert app.COMMAND[-2:] == ["run", f"/inputs/{REQUEST}"]


def test_a_token_is_handed_on_by_its_name(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    rental = a_rental(secrets=("HF_TOKEN",))
    assert load(Modal().text(rental)).app.keys["secrets"] == [["HF_TOKEN"]]
    assert "hf_secret" not in Modal().text(rental) + SkyPilot().text(rental)
    assert task(rental)["secrets"] == {"HF_TOKEN": None}
    command = SkyPilot().start(rental, Path("t.yaml"))
    assert command[3:5] == ["--secret", "HF_TOKEN"]


@pytest.mark.parametrize("study", ['a"b', "a\\b", "ein Späßchen 🎲", "3"])
def test_an_app_holds_whatever_a_study_is_called(study: str, load: Any) -> None:
    rental = a_rental(study=study)
    app = load(Modal().text(rental))
    assert f"/volume/{study}" in app.COMMAND
    assert yaml.safe_load(SkyPilot().text(rental))["name"].isascii()


def test_an_app_s_function_ends_as_its_command_does(load: Any) -> None:
    app = load(Modal().text(a_rental()))
    app.COMMAND = [sys.executable, "-c", ""]
    app.study()
    app.COMMAND = [sys.executable, "-c", "raise SystemExit(3)"]
    with pytest.raises(RuntimeError, match="exit code 3"):
        app.study()
    assert app.modal.Volume.commits == 2


def test_an_app_looks_at_what_other_containers_wrote_while_its_command_runs(load: Any) -> None:
    app = load(Modal().text(a_rental()))
    app.RELOAD_SECONDS = 0.05
    app.COMMAND = [sys.executable, "-c", "import time; time.sleep(0.5)"]
    # Refused each time, as it is while a file is open; the command goes on.
    app.study()
    assert app.modal.Volume.reloads
    assert app.modal.Volume.commits == 1


def test_a_preempted_function_stops_its_command_and_says_that_it_was_interrupted(
    load: Any, tmp_path: Path
) -> None:
    app = load(Modal().text(a_rental()))
    left = tmp_path / "left"
    code = (
        "import pathlib, signal, sys, os, time\n"
        f"left = pathlib.Path({str(left)!r})\n"
        "signal.signal(signal.SIGTERM, lambda *_: (left.touch(), sys.exit()))\n"
        "os.kill(os.getppid(), signal.SIGINT)\n"
        "time.sleep(30)\n"
    )
    app.COMMAND = [sys.executable, "-c", code]
    # Python in a container hears the signal as a KeyboardInterrupt, whoever ignores it here.
    heard = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            app.study()
    finally:
        signal.signal(signal.SIGINT, heard)
    assert left.exists()
    assert app.modal.Volume.commits == 1


def test_a_task_has_the_card_the_price_limit_and_goes_down_by_itself() -> None:
    machine = Machine(find_gpu("h100-80gb"), cards=2, cloud="runpod", is_spot=True)
    resources = task(a_rental(machine=machine, cost=a_cost(usd_per_hour_most=7.5)))["resources"]
    assert resources["infra"] == "runpod"
    assert resources["accelerators"] == {"H100-SXM": 2}
    assert resources["use_spot"] is True
    assert resources["max_hourly_cost"] == 7.5
    assert resources["autostop"] == {"idle_minutes": 5, "down": True}


@pytest.mark.parametrize(
    ("cloud", "volume", "mount", "fetched"),
    [
        ("aws", "kept", {"name": "kept", "store": "s3", "mode": "MOUNT"}, "aws s3 sync s3://kept/"),
        ("gcp", "kept", {"name": "kept", "store": "gcs", "mode": "MOUNT"}, "gs://kept/mine"),
        (None, "gs://mine", {"source": "gs://mine", "mode": "MOUNT"}, "gs://mine/mine"),
        ("lambda", "s3://mine/", {"source": "s3://mine", "mode": "MOUNT"}, "s3://mine/mine"),
    ],
)
def test_a_study_is_kept_in_a_bucket(
    cloud: str | None, volume: str, mount: dict[str, str], fetched: str
) -> None:
    card = find_gpu("l4" if cloud in ("aws", "gcp") else "a10")
    rental = a_rental(machine=Machine(card, cloud=cloud), volume=volume)
    assert task(rental)["file_mounts"]["~/sweep-volume"] == mount
    assert fetched in SkyPilot().results(rental)


def test_a_pod_of_runpod_has_a_volume_as_it_mounts_no_bucket() -> None:
    rental = a_rental(machine=Machine(find_gpu("l4"), cloud="runpod"))
    found = task(rental)
    assert found["volumes"] == {"/sweep-volume": "kept"}
    assert "~/sweep-volume" not in found["file_mounts"]
    assert "--volume /sweep-volume/mine" in found["run"]
    with pytest.raises(InputError, match="--with volume: RunPod mounts no bucket"):
        SkyPilot().volume(rental.machine)
    assert len(SkyPilot().volume(Machine(find_gpu("l4")))) <= 30


@pytest.mark.parametrize(
    ("one", "other"),
    [("a" * 60 + "-1", "a" * 60 + "-2"), ("Mine", "mine"), ("a.b", "a_b"), ("ä", "ö")],
)
def test_two_studies_have_two_machines_and_two_apps(one: str, other: str, load: Any) -> None:
    rentals = [a_rental(study=study) for study in (one, other)]
    clusters = [SkyPilot().start(rental, Path("t.yaml"))[-2] for rental in rentals]
    apps = [load(Modal().text(rental)).app.name for rental in rentals]
    assert clusters[0] != clusters[1]
    assert apps[0] != apps[1]
    assert max(map(len, clusters)) <= 40
    assert max(map(len, apps)) <= 63
    assert SkyPilot().start(a_rental(study="mine"), Path("t.yaml"))[-2] == "sweep-mine"


def test_what_a_pod_of_runpod_leaves_is_said_to_go_with_it() -> None:
    rental = a_rental(machine=Machine(find_gpu("l4"), cloud="runpod"))
    assert "until the pod is gone" in SkyPilot().results(rental)
    assert "--force" in Modal().results(a_rental())


def test_a_spot_machine_is_a_job_that_skypilot_recovers() -> None:
    spot = a_rental(machine=Machine(find_gpu("l4"), is_spot=True))
    assert SkyPilot().start(spot, Path("t.yaml"))[:3] == ["sky", "jobs", "launch"]
    assert SkyPilot().start(a_rental(), Path("t.yaml"))[:2] == ["sky", "launch"]


NOTES = """#!/bin/sh
echo "$(basename "$0") $*" >>"$HOME/notes"
"""


class Home:
    """A machine's home directory, with stand-ins for what would be fetched."""

    def __init__(self, path: Path) -> None:
        self.path = path
        for name in ("bin", "sweep-volume", "sweep-venv/bin", "sweep-inputs"):
            (path / name).mkdir(parents=True)
        for name in ("python3", "uv"):
            self._program(f"bin/{name}", NOTES)
        self._program("sweep-venv/bin/python", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')

    def _program(self, name: str, text: str) -> None:
        program = self.path / name
        program.write_text(text, encoding="utf-8")
        program.chmod(0o755)

    def start(self, script: str) -> subprocess.Popen[str]:
        environment = {
            **os.environ,
            "HOME": str(self.path),
            "PATH": f"{self.path / 'bin'}:{os.environ['PATH']}",
            "TMPDIR": str(self.path),
        }
        return subprocess.Popen(
            ["bash", "-c", script],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_setup_installs_the_versions_and_the_wheel_and_notes_the_time(tmp_path: Path) -> None:
    home = Home(tmp_path / "a home")
    wheel = tmp_path / "a wheel-0.1.0-py3-none-any.whl"
    process = home.start(task(a_rental(wheel=wheel))["setup"])
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 0, out
    notes = (home.path / "notes").read_text().splitlines()
    assert notes[0].startswith("python3 -m pip install")
    assert notes[-1].endswith(f"--no-deps {home.path}/sweep-inputs/{wheel.name}")
    needed = (home.path / "sweep-requirements.txt").read_text().splitlines()
    assert needed == ["torch==2.13.0", "transformers==5.17.0"]
    began = float((home.path / ".sweep-rented-since").read_text())
    assert abs(began - time.time()) < 60


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_run_keeps_the_study_on_the_volume_and_hands_on_what_stops_it(tmp_path: Path) -> None:
    home = Home(tmp_path / "a home")
    (home.path / ".sweep-rented-since").write_text(f"{int(time.time()) - 100}\n")
    script = task(a_rental(study="my study"))["run"]
    process = home.start(script.replace(f"run sweep-inputs/{REQUEST}", "presets"))
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, out
    assert "cpu-demo" in out
    paid = json.loads((home.path / "sweep-volume" / "my study" / "paid.json").read_text())
    assert next(iter(paid["seconds"].values())) >= 160


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_a_real_study_survives_a_preemption_and_a_machine_that_is_gone(tmp_path: Path) -> None:
    overrides = {"trials": 8, "confirm": False}
    request = RunRequest(space="cpu-demo", study="mine", overrides=overrides)
    script = task(a_rental())["run"]
    volume = tmp_path / "volume"
    volume.mkdir()
    told: list[list[tuple[int, str]]] = []
    for number, ended in enumerate((signal.SIGTERM, signal.SIGKILL, None)):
        home = Home(tmp_path / f"machine-{number}")
        (home.path / "sweep-volume").rmdir()
        (home.path / "sweep-volume").symlink_to(volume)
        (home.path / "sweep-inputs").mkdir(exist_ok=True)
        (home.path / "sweep-inputs" / REQUEST).write_text(request.model_dump_json())
        process = home.start(script)
        if ended is not None:
            until = time.monotonic() + 120
            while len(trials(volume)) < 2 * (number + 1) and time.monotonic() < until:
                time.sleep(0.2)
            process.send_signal(ended)
        out, _ = process.communicate(timeout=240)
        told.append(trials(volume))
        if number:
            assert told[-1][: len(told[-2])] == told[-2], out
    assert process.returncode == 0, out
    assert len(told[-1]) == 8
    assert (volume / "mine" / "runs" / "mine" / "report.html").exists()


def trials(volume: Path) -> list[tuple[int, str]]:
    """Trials that have ended, of the database on the volume."""
    import sqlite3

    path = volume / "mine" / "runs" / "sweep.db"
    if not path.exists():
        return []
    base = sqlite3.connect(path)
    try:
        query = "select number, state from trials where state in ('COMPLETE', 'PRUNED')"
        return base.execute(f"{query} order by number").fetchall()
    except sqlite3.OperationalError:
        return []
    finally:
        base.close()
