"""`sweep run --on modal|skypilot`: what is rented, what it costs, and what is written and started.

The providers' own packages read the jobs in `tests/rented`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
import venv
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import constants

from qlora_sweep.search_spaces.errors import EnvironmentFault, InputError, NothingFits
from qlora_sweep.search_spaces.gpus import gpu_catalogue
from qlora_sweep.search_spaces.models import load_model_spec
from qlora_sweep.search_spaces.presets import preset_texts
from qlora_sweep.search_spaces.prices import TYPED_PROVIDER, load_prices
from qlora_sweep.sweep import cli
from qlora_sweep.sweep.launching.parcel import hub_variables
from qlora_sweep.sweep.launching.rented import (
    HOURS_MAX,
    Cost,
    StudyForecast,
    cost_of,
    job_directory,
    providers,
    remove_jobs,
)
from qlora_sweep.sweep.request import REQUEST, RunRequest, Where
from qlora_sweep.sweep.terminal import elsewhere
from tests.sweep.imagined_memory import ImaginedPredictor
from tests.sweep.launching.rentals import a_machine, a_parcel, a_program, a_rental, an_offer

TOOL = """echo "$(basename "$0") $*" >>"$NOTES"
case "$*" in
    "token info") exit "$LOGIN" ;;
    check*) echo 'starting a server'; echo "$CLOUDS"; exit "$LOGIN" ;;
esac
exit "$STARTED"
"""
"""Stands in for a provider's command."""


@pytest.fixture
def home(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Path:
    tools, home = tmp_path / "tools", tmp_path / "home"
    home.mkdir()
    tools.mkdir()
    for name in ("modal", "sky"):
        a_program(tools / name, TOOL)
    variables = {
        "SWEEP_HOME": str(home),
        # What was predicted of a space is predicted once.
        "XDG_CACHE_HOME": str(tmp_path_factory.getbasetemp() / "rented-cache"),
        "PATH": f"{tools}:{os.environ['PATH']}",
        "NOTES": str(tmp_path / "notes"),
        "LOGIN": "0",
        "STARTED": "0",
        "CLOUDS": '{"default": {"AWS": ["compute", "storage"], "GCP": ["storage"]}}',
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(home)
    monkeypatch.setattr(sys, "stdin", StringIO())
    return home


def launch(
    on: str = "modal", *, settings: dict[str, str] | None = None, sure: bool = False, **typed: Any
) -> list[str]:
    """Launch with an imagined memory; return the commands that the provider's tool was given."""
    request = RunRequest(**{"space": "a10", "as_json": True, **typed})
    where, imagined = Where(on, settings=settings or {}), ImaginedPredictor()
    elsewhere.on_rented(request, where, is_sure=sure, is_dry=False, predictor=lambda *_: imagined)
    notes = Path(os.environ["NOTES"])
    return notes.read_text().splitlines() if notes.exists() else []


def job(home: Path, study: str) -> dict[str, Any]:
    """Return SkyPilot's task, and the request beside it."""
    directory = home / "runs" / study / "launch"
    found: dict[str, Any] = yaml.safe_load((directory / "skypilot.yaml").read_text())
    return {**found, "request": RunRequest.model_validate_json((directory / REQUEST).read_text())}


def test_where_nobody_is_asked_the_file_is_written_and_nothing_started(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(overrides={"max_dollars": 2.0}) == []
    found = json.loads(capsys.readouterr().out)
    file = home / "runs" / "a10" / "launch" / "modal_app.py"
    assert file.exists()
    assert found["file"] == str(file)
    assert found["command"] == f"modal run --detach {file}"
    assert (found["provider"], found["started"]) == ("modal", False)
    assert (found["gpu"], found["volume"]) == ({"name": "a10", "count": 1}, "qlora-sweep")
    assert "modal volume get" in found["results"]
    cost = found["cost"]
    assert 0 < cost["usd_range"][0] <= cost["usd"] <= cost["usd_max"]
    assert cost["usd_max"] == pytest.approx(2.0, abs=0.01)


@pytest.mark.parametrize(("answer", "is_started"), [("y\n", True), ("\n", False), ("", True)])
def test_it_is_started_once_somebody_says_so(
    answer: str,
    is_started: bool,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    terminal = StringIO(answer)
    terminal.isatty = lambda: bool(answer)  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdin", terminal)
    asked, *started = launch(as_json=False, sure=not answer)
    assert asked == "modal token info"
    assert started == [f"modal run --detach {home}/runs/a10/launch/modal_app.py"] * is_started
    out, err = capfd.readouterr()
    assert ("nothing was started" in out) is not is_started
    assert "about $" in err
    monkeypatch.setenv("STARTED", "7")
    with pytest.raises(EnvironmentFault, match="ended with exit code 7"):
        launch(sure=True)


@pytest.mark.parametrize(
    ("on", "settings", "variables", "says"),
    [
        ("modal", {}, {"PATH": "/bin"}, "pip install modal"),
        ("modal", {}, {"LOGIN": "1"}, "modal token new"),
        ("skypilot", {"cloud": "gcp"}, {}, "sky check gcp"),
        ("skypilot", {}, {"CLOUDS": '{"default": {"AWS": ["storage"]}}'}, "knows no account"),
        ("skypilot", {}, {"CLOUDS": ""}, "knows no account"),
    ],
)
def test_a_provider_without_tool_or_login_leaves_nothing_behind(
    on: str,
    settings: dict[str, str],
    variables: dict[str, str],
    says: str,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(EnvironmentFault, match=says):
        launch(on, sure=True, settings={"price": "1", **settings}, overrides={"gpu": "l4"})
    assert not (home / "runs").exists()


def test_what_was_typed_goes_along(home: Path) -> None:
    overrides = {"trials": 9, "confirm": False, "max_dollars": 3.0, "gpu": "a100-80gb"}
    held = {"lora_rank": 64, "compile": False}
    settings = {"cloud": "gcp", "price": "2"}
    launch("skypilot", overrides=overrides, fixed_settings=held, devices="4", settings=settings)
    (study,) = (path.name for path in (home / "runs").iterdir())
    assert study.startswith("a10-a100-80gb-")
    found = job(home, study)
    assert found["request"] == RunRequest(
        space="a10",
        overrides=overrides,
        fixed_settings=held,
        study=study,
        devices="all",
        as_json=True,
    )
    assert found["resources"]["accelerators"] == {"A100-80GB": 4}
    assert found["resources"]["max_hourly_cost"] == 10.0


def test_files_that_a_space_names_go_along(home: Path) -> None:
    model = home / "my model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(load_model_spec("demo").config))
    text = preset_texts()["a10"].replace("model: mistral-7b-v0.3", "model: my model")
    (home / "mine.yaml").write_text(text.replace("name: a10\n", ""))
    launch("skypilot", space="mine.yaml")
    found = job(home, "mine")
    files = found["file_mounts"]
    assert files["~/sweep-inputs/space/mine.yaml"] == str(home / "mine.yaml")
    assert files["~/sweep-inputs/model/my model/config.json"] == str(model / "config.json")
    assert found["request"].space == "./beside/space/mine.yaml"


def test_a_soak_and_a_typed_price_are_what_it_costs(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def cost(confirm: Any) -> dict[str, Any]:
        launch(overrides={"trials": 2, "confirm": confirm}, settings={"price": "0.3"})
        return dict(json.loads(capsys.readouterr().out)["cost"])

    plain = cost(confirm=False)
    soaked = cost(confirm={"soak_seconds": 6 * 3600.0, "soak_steps": 1_000_000})
    assert soaked["hours"] > plain["hours"] + 5.9
    assert (plain["provider"], plain["source"], plain["usd_per_hour"]) == ("Modal", "--price", 0.3)


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("cpu-demo --on modal", "is for gpu cpu: name the GPU to rent with --gpu"),
        ("a10 --on modal --gpu rtx-4090", "Modal has no rtx-4090; it has t4, l4, a10"),
        ("a10 --on modal --gpu b200", "no price is known of 1 x b200 on Modal"),
        ("a10 --on modal --gpu auto", "--gpu auto is no GPU to rent: name one"),
        ("a10 --on modal --devices 5", "--devices: Modal rents at most 4 a10, got 5"),
        ("a10 --on modal --set data_parallel=2 --devices 1", "data_parallel 2 trains on 2 GPUs"),
        ("a10 --on modal --max-dollars 0.01", "--max-dollars 0.01 pays for"),
        ("a10 --on modal --storage sqlite:///x.db", "--storage names what a rented machine"),
        ("a10 --on modal --with volume=gs://mine", "a volume of Modal's is named by"),
        (f"a10 --on modal --with volume={'v' * 58}", "at most 57 letters"),
        ("a10 --on skypilot --with volume=r2://mine", "--with volume: a bucket is named by"),
        ("a10 --on skypilot --with volume=s3://mine/../x", "--with volume: a bucket is named by"),
        ("a10 --on skypilot --with spot=true", "no price is known of 1 x a10 spot on"),
        ("a10 --on skypilot --with cloud=azur", "unknown cloud 'azur'"),
        ("a10 --on skypilot --with cloud=aws", "AWS has no a10; it has t4, v100"),
        ("a10 --on skypilot --with cloud=lambda --with spot=true", "Lambda has no spot machines"),
        ("a10 --gpu l4 --on skypilot --with cloud=runpod", "volume: RunPod mounts no bucket"),
        (
            "a10 --gpu l4 --on skypilot --with cloud=runpod --with spot=true --with volume=v",
            "--with spot: what a pod of RunPod's leaves",
        ),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_written(
    typed: str, message: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", *typed.split()]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (home / "runs").exists()


@pytest.mark.usefixtures("home")
def test_no_gpu_is_rented_for_what_does_not_fit_it() -> None:
    with pytest.raises(NothingFits, match="is predicted to fit t4"):
        launch(overrides={"gpu": "t4"}, fixed_settings={"micro_batch_size": 16, "seq_len": 2048})


def test_as_many_gpus_are_rented_as_a_trial_takes_and_lanes_of_them_share_the_study(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def rented(devices: str | None) -> tuple[int, float]:
        """Return the number of GPUs, and the most hours that pairs of them take."""
        held = {"data_parallel": 2, "lora_rank": 16}
        overrides = {"trials": 8, "confirm": False, "gpu": "a100-80gb"}
        settings = {"price": "1"}
        launch(
            "skypilot", fixed_settings=held, devices=devices, settings=settings, overrides=overrides
        )
        found = json.loads(capsys.readouterr().out)
        shutil.rmtree(home / "runs")
        return found["gpu"]["count"], found["cost"]["usd_range"][1] / found["cost"]["usd_per_hour"]

    count, hours = rented(None)
    assert count == 2
    # A second pair halves what the trials take, and nothing else.
    four, fewer = rented("4")
    assert four == 4
    assert hours / 2 < fewer < hours
    # Three GPUs are one pair.
    assert rented("3")[1] == pytest.approx(hours)


@pytest.mark.parametrize(
    ("dataset", "tokenizer", "goes"),
    [
        ("org/gated", "tokens", True),
        ("mine.jsonl", "org/gated", True),
        ("mine.jsonl", "tokens", False),
    ],
)
def test_a_token_of_the_hub_goes_along_where_it_is_needed_and_is_in_no_file(
    dataset: str, tokenizer: str, goes: bool, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As a login leaves it.
    (home / "token").write_text("hf_made_up")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    (home / "mine.jsonl").write_text('{"text": "a"}\n')
    (home / "tokens").mkdir()
    request = RunRequest(
        space="a10", overrides={"data": {"texts": dataset, "tokenizer": tokenizer}}
    )
    assert hub_variables(request) == ({"HF_TOKEN": "hf_made_up"} if goes else {})
    for provider in providers():
        rental = a_rental(provider, secrets=("HF_TOKEN",))
        assert "HF_TOKEN" in rental.text()
        assert "hf_made_up" not in rental.text() + rental.command("start", "job")


# What it costs.


def cost(
    seconds: tuple[float, float] | None = (540.0, 1140.0),
    *,
    max_dollars: float | None = None,
    download_bytes: float = 0.0,
    **offer: Any,
) -> Cost:
    course = StudyForecast(seconds, least_seconds=10.0, download_bytes=download_bytes)
    provider = providers()["modal"].model_copy(update={"usd_beside": 0.3})
    return cost_of(course, an_offer(**offer), provider, max_dollars)


def test_the_bill_is_of_the_study_the_start_and_the_download() -> None:
    assert cost().usd == pytest.approx((0.20, 0.40))
    loaded = cost(download_bytes=6e10, download_bytes_per_second=1e8)
    assert loaded.hours == pytest.approx((1200 / 3600, 1800 / 3600))


@pytest.mark.parametrize(
    ("seconds", "max_dollars", "hours"),
    [
        ((540.0, 1140.0), 3.0, 2.0),
        ((540.0, 7140.0), None, 4.0),
        (None, None, HOURS_MAX),
        (None, 1000.0, HOURS_MAX),
    ],
)
def test_time_is_limited_by_dollars_at_the_dearest_price_or_by_the_longest_prediction(
    seconds: tuple[float, float] | None, max_dollars: float | None, hours: float
) -> None:
    assert cost(seconds, max_dollars=max_dollars).limit_seconds == hours * 3600


def test_dollars_that_do_not_pay_for_the_start_are_refused_with_what_would() -> None:
    with pytest.raises(InputError, match=r"pays for 48 s .* at least 0.05"):
        cost(max_dollars=0.02)
    cost(max_dollars=0.05)


def test_the_cheapest_whole_machine_is_rented_by_its_own_provider() -> None:
    modal, sky = providers()["modal"], providers()["skypilot"]
    offers = [an_offer(gpus=8, usd_per_hour=1.0), an_offer(usd_per_hour=3.0)]
    prices = [modal.offer(a_machine(gpus=n), offers).usd_per_hour for n in (1, 4, 8)]
    assert prices == [3.0, 12.0, 8.0]
    with pytest.raises(InputError, match="no price is known of 1 x a10 on Modal"):
        modal.offer(a_machine(), offers[:1])
    spot, aws = an_offer(provider="AWS", is_spot=True), an_offer(provider="AWS")
    assert sky.offer(a_machine(), [spot, aws, offers[1]]).provider == "AWS"
    assert sky.offer(a_machine(is_spot=True), [spot, aws]).is_spot
    # Until it is gone it is paid for.
    assert sky.offer(a_machine(), [aws]).boot_seconds == 360
    typed = an_offer(provider=TYPED_PROVIDER)
    assert sky.of(a_machine("l4", 1, "gcp")).offer(a_machine(), [aws, typed]).provider == "SkyPilot"
    course = StudyForecast(None, 0, 0)
    assert cost_of(course, an_offer(), modal, None).usd_per_hour_most == 1.65
    assert cost_of(course, an_offer(usd_per_hour=1.29), sky, None).usd_per_hour_most == 1.62


def test_gpus_and_clouds_are_those_of_the_catalogue_and_the_price_list() -> None:
    modal, sky = providers()["modal"], providers()["skypilot"]
    clouds = sky.clouds.values()
    gpus = {*modal.gpus, *sky.gpus, *(name for cloud in clouds for name in cloud["gpus"])}
    assert gpus <= set(gpu_catalogue())
    sellers = {offer.provider for offers in load_prices().values() for offer in offers}
    assert {modal.title, *(cloud["sold_by"] for cloud in clouds)} <= sellers


# The jobs.


def test_a_job_holds_whatever_a_study_is_called_and_has_a_name_of_its_own() -> None:
    studies = ["a" * 60 + "-1", "a" * 60 + "-2", "Mine", "mine", "a.b", "a_b", "ä 🎲", 'a"b']
    rentals = [a_rental("skypilot", study=study) for study in studies]
    assert len({rental.name for rental in rentals}) == len(studies)
    for rental in rentals:
        task = yaml.safe_load(rental.text())
        assert task["name"] == rental.name
        assert len(rental.name) <= 40
        assert f"/{shlex.quote(rental.study)} " in task["run"]
        app = compile(a_rental("modal", study=rental.study).text(), "app", "exec")
        assert f"/volume/{rental.study}" in str(app.co_consts)


@pytest.mark.parametrize(
    ("cloud", "volume", "mount", "fetched"),
    [
        ("aws", "kept", {"name": "kept", "store": "s3"}, "s3://kept/mine"),
        ("gcp", "kept", {"name": "kept", "store": "gcs"}, "gs://kept/mine"),
        (None, "s3://mine/", {"source": "s3://mine"}, "s3://mine/mine"),
    ],
)
def test_a_study_is_kept_in_a_bucket(
    cloud: str | None, volume: str, mount: dict[str, str], fetched: str
) -> None:
    rental = a_rental("skypilot", a_machine("l4", cloud=cloud), volume=volume)
    task = yaml.safe_load(rental.text())
    assert task["file_mounts"]["~/sweep-volume"] == {**mount, "mode": "MOUNT"}
    assert "volumes" not in task
    assert fetched in rental.command("results")


def test_a_pod_keeps_a_study_on_a_network_volume() -> None:
    rental = a_rental("skypilot", a_machine("l4", cloud="runpod"), volume="kept")
    task = yaml.safe_load(rental.text())
    assert "~/sweep-volume" not in task["file_mounts"]
    assert task["volumes"] == {"/sweep-volume": "kept"}
    assert ":/sweep-volume/mine" in rental.command("results")


def test_a_spot_machine_is_a_job_that_skypilot_recovers() -> None:
    spot = a_rental("skypilot", a_machine("l4", is_spot=True))
    assert spot.command("start", "job").startswith("sky jobs launch")
    assert spot.command("stop") == "sky jobs cancel --name sweep-mine"
    own = a_rental("skypilot")
    assert own.command("start", "job").startswith("sky launch")
    assert own.command("stop") == "sky down sweep-mine"


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not here")
@pytest.mark.parametrize("part", ["setup", "run"])
def test_a_task_has_no_fault_that_shellcheck_knows(part: str, tmp_path: Path) -> None:
    script = yaml.safe_load(a_rental("skypilot", study="my study").text())[part]
    (tmp_path / "script").write_text(f"#!/bin/bash\n{script}")
    command = ["shellcheck", "--severity=style", str(tmp_path / "script")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def a_home(path: Path, volume: Path) -> Path:
    """Make a machine's home directory, as it is once SkyPilot has mounted the volume."""
    for name in ("bin", "sweep-venv/bin", "sweep-inputs"):
        (path / name).mkdir(parents=True)
    volume.mkdir(exist_ok=True)
    (path / "sweep-volume").symlink_to(volume)
    (path / ".sweep-rented-since").write_text(f"{int(time.time()) - 100}\n")
    a_program(path / "sweep-venv/bin/python", f'exec "{sys.executable}" "$@"')
    return path


def start(script: str, home: Path) -> subprocess.Popen[str]:
    variables = {"HOME": str(home), "TMPDIR": str(home)}
    return subprocess.Popen(
        ["bash", "-c", script],
        env={**os.environ, **variables, "PATH": f"{home}/bin:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def test_setup_installs_the_wheel_once_and_run_keeps_the_study_on_the_volume(
    tmp_path: Path,
) -> None:
    home = a_home(tmp_path / "a home", tmp_path / "volume")
    python = home / "sweep-venv" / "bin" / "python"
    python.unlink()
    # An environment that was made halfway is made whole.
    venv.create(home / "sweep-venv", symlinks=True, with_pip=False)
    # uv is not fetched; the rest is done.
    a_program(home / "bin" / "python3", f'[ "$2" = pip ] || exec "{sys.executable}" "$@"')
    wheel = a_parcel(home / "sweep-inputs")
    task = yaml.safe_load(a_rental("skypilot", study="my study", wheel=wheel).text())
    ended(start(task["setup"], home))
    subprocess.run([python, "-I", "-c", "import qlora_sweep"], check=True)
    wheel.with_name("constraints.txt").unlink()
    ended(start(task["setup"], home))
    # This very sweep in the place of the wheel's.
    python.unlink()
    a_program(python, f'exec "{sys.executable}" "$@"')
    run = task["run"].replace(f"run sweep-inputs/{REQUEST}", "presets")
    assert "cpu-demo" in ended(start(run, home))
    paid = json.loads((tmp_path / "volume" / "my study" / "paid.json").read_text())
    assert 60 <= next(iter(paid["seconds"].values())) < 200


def ended(process: subprocess.Popen[str]) -> str:
    """Return what a script printed, once it has ended as it should."""
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
    return out


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_a_real_study_survives_a_preemption_and_a_machine_that_is_gone(tmp_path: Path) -> None:
    request = RunRequest(space="cpu-demo", study="mine", overrides={"trials": 12, "confirm": False})
    script, volume = yaml.safe_load(a_rental("skypilot").text())["run"], tmp_path / "volume"
    told: list[list[int]] = [[]]
    for number, ended in enumerate((signal.SIGTERM, signal.SIGKILL, None)):
        home = a_home(tmp_path / f"machine-{number}", volume)
        (home / "sweep-inputs" / REQUEST).write_text(request.model_dump_json())
        process, until = start(script, home), time.monotonic() + 120
        while ended and len(trials(volume)) < 2 * (number + 1) and time.monotonic() < until:
            time.sleep(0.2)
        if ended:
            process.send_signal(ended)
        out, _ = process.communicate(timeout=240)
        told.append(trials(volume))
        assert told[-1][: len(told[-2])] == told[-2], out
    assert process.returncode == 0, out
    assert len(told[-1]) >= 4
    assert (volume / "mine" / "runs" / "mine" / "report.html").exists()


def trials(volume: Path) -> list[int]:
    """Trials that have ended, of the database on the volume."""
    path = volume / "mine" / "runs" / "sweep.db"
    query = "select number from trials where state in ('COMPLETE', 'PRUNED') order by number"
    if not path.exists():
        return []
    with contextlib.closing(sqlite3.connect(path)) as base:
        return [number for (number,) in base.execute(query)]


def test_jobs_go_with_their_study_and_nothing_else_does(tmp_path: Path) -> None:
    directory = job_directory(tmp_path / "mine")
    directory.mkdir(parents=True)
    (directory / "modal_app.py").touch()
    (directory / "notes.txt").touch()
    assert remove_jobs(tmp_path / "mine") == (directory / "modal_app.py",)
    assert [path.name for path in directory.iterdir()] == ["notes.txt"]
    # Nor is a link followed.
    (directory / "modal_app.py").touch()
    directory.rename(tmp_path / "elsewhere")
    directory.symlink_to(tmp_path / "elsewhere")
    assert remove_jobs(tmp_path / "mine") == ()
