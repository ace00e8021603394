"""`sweep run --on modal|skypilot`, from what is asked to what is written, said and started."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml

from search_spaces.errors import EnvironmentFault, InputError, NothingFits
from search_spaces.presets import preset_texts
from sweep import cli
from sweep.launching.rental import Machine, Provider
from sweep.request import REQUEST, RunRequest, Where
from sweep.terminal import elsewhere
from tests.sweep.imagined_memory import ImaginedPredictor

Launch = Callable[..., dict[str, Any]]


class Terminal(StringIO):
    """A person who answers."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What was foreseen of a space is foreseen once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def home(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", StringIO())
    return tmp_path


class Started:
    """Notes what would be asked and started."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.asked: list[str] = []
        self.commands: list[list[str]] = []

    def ready(self, provider: Provider, _machine: Machine) -> None:
        self.asked.append(provider.name)

    def start(self, command: Sequence[str]) -> int:
        self.commands.append(list(command))
        return self.code


def launch(
    *,
    on: str = "modal",
    started: Started | None = None,
    is_sure: bool = False,
    is_dry: bool = False,
    settings: dict[str, str] | None = None,
    **changes: Any,
) -> Started:
    """Launch with an imagined memory."""
    started = started or Started()
    elsewhere.on_rented(
        RunRequest(**{"space": "a10", "as_json": True, **changes}),
        Where(on, settings=settings or {}),
        is_sure=is_sure,
        is_dry=is_dry,
        predictor=lambda *_: ImaginedPredictor(),
        ready=started.ready,
        start=started.start,
        # The wheel is the same at every launch, and takes two seconds to build.
        pack=lambda directory: directory / "sweep.whl",
    )
    return started


def spends(dollars: float) -> dict[str, Any]:
    return {"overrides": {"max_dollars": dollars}}


def job(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text())
    return found


def sent(home: Path, study: str = "a10") -> RunRequest:
    """Return the request that goes along."""
    path = home / "runs" / study / "launch" / REQUEST
    return RunRequest.model_validate_json(path.read_text())


def test_where_nobody_is_asked_the_file_is_written_and_nothing_started(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started = launch(**spends(2.0))
    found = json.loads(capsys.readouterr().out)
    file = home / "runs" / "a10" / "launch" / "modal_app.py"
    assert file.exists()
    assert (found["provider"], found["started"]) == ("modal", False)
    assert found["file"] == str(file)
    assert found["command"] == f"modal run --detach {file}"
    assert found["gpu"] == {"name": "a10", "count": 1}
    cost = found["cost"]
    assert 0 < cost["usd_range"][0] <= cost["usd"] <= cost["usd_max"]
    assert cost["usd_max"] == pytest.approx(2.0, abs=0.01)
    assert cost["hours"] > 0
    assert not started.asked
    assert not started.commands


def test_it_is_started_once_somebody_says_so(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    started = launch(**spends(2.0))
    assert started.asked == ["modal"]
    assert started.commands == [
        ["modal", "run", "--detach", str(home / "runs" / "a10" / "launch" / "modal_app.py")]
    ]


@pytest.mark.usefixtures("home")
def test_whoever_says_no_starts_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal("\n"))
    assert not launch(as_json=False).commands
    out, err = capsys.readouterr()
    assert "nothing was started" in out
    assert "about $" in err
    assert "Start it on Modal now?" in err


@pytest.mark.usefixtures("home")
def test_yes_starts_without_a_question(capsys: pytest.CaptureFixture[str]) -> None:
    started = launch(is_sure=True, as_json=False, on="skypilot")
    assert started.commands[0][:3] == ["sky", "launch", "--yes"]
    out, err = capsys.readouterr()
    assert "[y/N]" not in err
    assert out.splitlines()[-1].startswith("  aws s3 sync s3://qlora-sweep-")


def test_a_provider_without_tool_or_login_leaves_nothing_behind(home: Path) -> None:
    class Missing(Started):
        def ready(self, provider: Provider, _machine: Machine) -> None:
            raise EnvironmentFault(f"{provider.title} knows no account")

    with pytest.raises(EnvironmentFault, match="knows no account"):
        launch(is_sure=True, started=Missing())
    assert not (home / "runs").exists()
    assert not launch(started=Missing(), is_dry=True).commands
    assert (home / "runs" / "a10" / "launch" / "modal_app.py").exists()


@pytest.mark.usefixtures("home")
def test_a_provider_that_did_not_start_it_is_a_fault_of_the_environment() -> None:
    with pytest.raises(EnvironmentFault, match="ended with exit code 7"):
        launch(is_sure=True, started=Started(code=7))


def test_what_was_typed_goes_along(home: Path) -> None:
    overrides = {"trials": 9, "confirm": False, "max_dollars": 3.0, "gpu": "a100-80gb"}
    launch(
        on="skypilot",
        overrides=overrides,
        held={"lora_rank": 64, "compile": False},
        devices="4",
        settings={"cloud": "gcp", "price": "2"},
        is_dry=True,
    )
    (study,) = (path.name for path in (home / "runs").iterdir())
    assert study.startswith("a10-a100-80gb-")
    assert sent(home, study) == RunRequest(
        space="a10",
        overrides=overrides,
        held={"lora_rank": 64, "compile": False},
        study=study,
        devices="all",
        as_json=True,
    )
    file = home / "runs" / study / "launch" / "skypilot.yaml"
    assert shlex.split(job(file)["run"])[-2:] == ["run", f"sweep-inputs/{REQUEST}"]
    assert job(file)["resources"]["accelerators"] == {"A100-80GB": 4}
    assert job(file)["resources"]["max_hourly_cost"] == 10.0


def test_a_soak_is_paid_for(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def hours(**overrides: Any) -> float:
        launch(overrides={"trials": 2, **overrides}, is_dry=True)
        found: float = json.loads(capsys.readouterr().out)["cost"]["hours"]
        return found

    soak = {"soak_seconds": 6 * 3600.0, "soak_steps": 1_000_000}
    assert hours(confirm=soak) > hours() + 5.9 > hours(confirm=False) + 5.9


def test_files_that_a_space_names_go_along(home: Path) -> None:
    model = home / "my model"
    model.mkdir()
    shipped = Path(cli.__file__).parents[1] / "search_spaces" / "architectures"
    (model / "config.json").write_text((shipped / "demo.json").read_text())
    (model / "model.safetensors").touch()
    text = preset_texts()["a10"].replace("model: mistral-7b-v0.3", "model: my model")
    (home / "mine.yaml").write_text(text.replace("name: a10\n", ""))
    launch(space="mine.yaml", on="skypilot", is_dry=True)
    files = job(home / "runs" / "mine" / "launch" / "skypilot.yaml")["file_mounts"]
    assert files["~/sweep-inputs/space/mine.yaml"] == str(home / "mine.yaml")
    assert files["~/sweep-inputs/model/my model/config.json"] == str(model / "config.json")
    assert not [name for name in files if name.endswith("safetensors")]
    request = sent(home, "mine")
    assert (request.space, request.overrides["model"]) == (
        "./beside/space/mine.yaml",
        "./beside/model/my model",
    )


SKYPILOT: dict[str, Any] = {"on": "skypilot", "overrides": {"gpu": "l4"}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"space": "cpu-demo"}, "is for gpu cpu: name the GPU to rent with --gpu"),
        ({"overrides": {"gpu": "a11"}}, "unknown GPU 'a11'"),
        ({"overrides": {"gpu": "rtx-4090"}}, "Modal has no rtx-4090"),
        ({"overrides": {"gpu": "b200"}}, "no price is known of b200 on Modal: .* price=0.75"),
        ({"on": "skypilot", "settings": {"spot": "true"}}, "no price is known of a10 spot on"),
        ({"on": "skypilot", "settings": {"spot": "yes"}}, "spot must be true or false, got yes"),
        (spends(0.01), "--max-dollars 0.01 pays for"),
        ({"devices": "0"}, "--devices must be how many GPUs to rent"),
        ({"devices": "all"}, "--devices must be how many GPUs to rent"),
        ({"study": "a/b"}, "study name must be .* got 'a/b'"),
        ({"settings": {"volume": "gs://mine"}}, "volume: a volume of Modal's .* got 'gs://mine'"),
        ({"settings": {"volume": "my volume"}}, "volume: a volume of Modal's .* got 'my volume'"),
        ({"settings": {"volume": "../x"}}, "--with volume: a volume of Modal's"),
        ({"settings": {"volume": "v" * 58}}, "at most 57 letters"),
        ({**SKYPILOT, "settings": {"volume": "r2://mine"}}, "volume: an address is s3:// or gs"),
        ({**SKYPILOT, "settings": {"volume": "s3://mine/../x"}}, "volume: an address is"),
        ({**SKYPILOT, "settings": {"volume": "../x"}}, "volume: a bucket is named by"),
        ({**SKYPILOT, "settings": {"volume": "My Bucket"}}, "volume: a bucket is named by"),
        (
            {**SKYPILOT, "settings": {"cloud": "runpod", "volume": "s3://mine"}},
            "--with volume: RunPod mounts no bucket, .* got 's3://mine'",
        ),
        (
            {**SKYPILOT, "settings": {"cloud": "runpod", "spot": "true", "volume": "v"}},
            "--with spot: what a pod of RunPod's leaves",
        ),
        ({"overrides": {"gpu": "cpu"}}, "--gpu cpu is no GPU to rent: name one"),
        ({"overrides": {"gpu": "auto"}}, "--gpu auto is no GPU to rent: name one"),
        ({**SKYPILOT, "settings": {"cloud": "runpod"}}, "volume: RunPod mounts no"),
        ({"study": "sweep.db"}, "is that of a file of sweep's"),
        ({"storage": "sqlite:///x.db"}, "--storage names what a rented machine cannot see"),
        ({"carried": "other"}, "--from names what a rented machine cannot see"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_written(
    changes: dict[str, Any], message: str, home: Path
) -> None:
    with pytest.raises(InputError, match=message):
        launch(**changes)
    assert not (home / "runs").exists()


@pytest.mark.usefixtures("home")
def test_no_card_is_rented_for_what_does_not_fit_it() -> None:
    with pytest.raises(NothingFits, match="nothing of it is predicted to fit t4"):
        launch(overrides={"gpu": "t4"}, held={"micro_batch_size": 16, "seq_len": 2048})


@pytest.mark.usefixtures("home")
def test_a_token_of_the_hub_is_in_no_file(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_made_up")
    launch(is_dry=True)
    for file in (home / "runs" / "a10" / "launch").iterdir():
        assert "hf_made_up" not in file.read_text()


def test_the_command_line_reaches_it(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "a10", "--on", "modal"]
    for more, said in (
        (["--max-dollars", "0"], "--max-dollars must be greater than 0"),
        (["--trails", "3"], "--trails"),
        (["--model", "demo", "--model", "tinyllama-1.1b"], "several models are for this"),
        (["--storage", "sqlite:///x.db"], "--storage names what a rented machine cannot see"),
    ):
        assert cli.main([*words, *more]) == 2
        assert said in capsys.readouterr().err
    assert not (home / "runs").exists()


def test_a_price_that_was_typed_is_the_provider_s_price(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launch(settings={"price": "0.3"}, is_dry=True)
    out, err = capsys.readouterr()
    assert "at $0.30 an hour, the price that you gave, on Modal" in " ".join(err.split())
    cost = json.loads(out)["cost"]
    assert (cost["provider"], cost["source"], cost["usd_per_hour"]) == ("Modal", "--price", 0.3)
