"""`sweep launch`, from what is typed to what is written, said and started."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from search_spaces.errors import EnvironmentFault, InputError, NothingFits
from search_spaces.knobs import KNOBS
from search_spaces.loading import preset_texts
from sweep import cli
from sweep.launching.rental import Machine, Provider
from sweep.launching.request import LaunchRequest
from sweep.terminal import launching
from sweep.terminal.knob_options import add_knobs
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


def launch(*words: str, started: Started | None = None, **changes: Any) -> Started:
    """Launch with an imagined memory; what follows goes to `sweep run`."""
    add_knobs(cli.run, KNOBS)
    started = started or Started()
    request = {"space": "a10", "on": "modal", "as_json": True, **changes}
    launching.launch(
        LaunchRequest(**request, words=words),
        command=cli._command_of("run"),
        predictor=lambda *_: ImaginedPredictor(),
        ready=started.ready,
        start=started.start,
        # The wheel is the same at every launch, and takes two seconds to build.
        pack=lambda directory: directory / "sweep.whl",
    )
    return started


def job(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text())
    return found


def words_of(path: Path) -> list[str]:
    """Return what `sweep` is given in a task."""
    words = shlex.split(job(path)["run"])
    return words[words.index("--") + 1 :]


def test_where_nobody_is_asked_the_file_is_written_and_nothing_started(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started = launch(max_dollars=2.0)
    found = json.loads(capsys.readouterr().out)
    file = home / "runs" / "a10" / "launch" / "modal_app.py"
    assert file.exists()
    assert (found["provider"], found["started"]) == ("modal", False)
    assert found["file"] == str(file)
    assert found["command"] == f"modal run --detach {file}"
    assert found["gpu"] == {"name": "a10", "cards": 1}
    cost = found["cost"]
    assert 0 < cost["usd_range"][0] <= cost["usd"] <= cost["usd_max"]
    assert cost["usd_max"] == pytest.approx(2.0, abs=0.01)
    assert cost["hours"] > 0
    assert not started.asked
    assert not started.commands


def test_it_is_started_once_somebody_says_so(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    started = launch(max_dollars=2.0)
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
    assert not launch(started=Missing(), output=str(home / "job.py")).commands
    assert (home / "job.py").exists()


@pytest.mark.usefixtures("home")
def test_a_provider_that_did_not_start_it_is_a_fault_of_the_environment() -> None:
    with pytest.raises(EnvironmentFault, match="ended with exit code 7"):
        launch(is_sure=True, started=Started(code=7))


def test_options_of_run_go_along_as_they_were_typed(home: Path) -> None:
    launch(
        *("--rank", "64", "--trials", "9", "--no-confirm"),
        on="skypilot",
        output=str(home / "t.yaml"),
        max_dollars=3.0,
        cards=4,
        gpu="a100-80gb",
        cloud="gcp",
        typed_prices=("a100-80gb=2",),
    )
    assert words_of(home / "t.yaml") == [
        *("run", "a10", "--gpu", "a100-80gb"),
        *("--study", "a10-a100-80gb-4d0958"),
        *("--max-dollars", "3", "--cards", "all"),
        *("--lora-rank=64", "--trials=9", "--no-confirm"),
    ]
    assert job(home / "t.yaml")["resources"]["accelerators"] == {"A100-80GB": 4}
    assert job(home / "t.yaml")["resources"]["max_hourly_cost"] == 10.0


def test_what_is_typed_as_off_or_as_nothing_goes_along(home: Path) -> None:
    launch("--no-compile", "--seed", "0", output=str(home / "t.yaml"), on="skypilot")
    assert words_of(home / "t.yaml")[-2:] == ["--no-compile", "--seed=0"]


def test_a_soak_is_paid_for(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def hours(*words: str) -> float:
        launch(*words, "--trials", "2", output=str(home / "job.py"))
        found: float = json.loads(capsys.readouterr().out)["cost"]["hours"]
        return found

    assert hours("--soak", "6h") > hours() + 5.9 > hours("--no-confirm") + 5.9


def test_files_that_a_space_names_go_along(home: Path) -> None:
    model = home / "my model"
    model.mkdir()
    shipped = Path(cli.__file__).parents[1] / "search_spaces" / "architectures"
    (model / "config.json").write_text((shipped / "demo.json").read_text())
    (model / "model.safetensors").touch()
    text = preset_texts()["a10"].replace("model: mistral-7b-v0.3", "model: my model")
    (home / "mine.yaml").write_text(text.replace("name: a10\n", ""))
    launch("--seed=3", space="mine.yaml", on="skypilot", output=str(home / "t.yaml"))
    files = job(home / "t.yaml")["file_mounts"]
    assert files["~/sweep-inputs/space/mine.yaml"] == str(home / "mine.yaml")
    assert files["~/sweep-inputs/model/my model/config.json"] == str(model / "config.json")
    assert not [name for name in files if name.endswith("safetensors")]
    words = words_of(home / "t.yaml")
    assert words[:2] == ["run", "sweep-inputs/space/mine.yaml"]
    assert words[-3:] == ["--seed=3", "--model", "sweep-inputs/model/my model"]


@pytest.mark.parametrize(
    ("words", "changes", "message"),
    [
        ((), {"on": "runpod"}, "--on: unknown provider 'runpod'"),
        ((), {"space": "cpu-demo"}, "is for gpu cpu: name the card to rent with --gpu"),
        ((), {"gpu": "a11"}, "unknown GPU 'a11'"),
        ((), {"gpu": "rtx-4090"}, "Modal has no rtx-4090"),
        ((), {"gpu": "b200"}, "no price is known of b200 on Modal: .* --price b200=0.75"),
        ((), {"on": "skypilot", "is_spot": True}, "no price is known of a10 spot on SkyPilot"),
        ((), {"max_dollars": 0.01}, "--max-dollars 0.01 pays for"),
        ((), {"max_dollars": -1.0}, "--max-dollars must be more than 0"),
        ((), {"cards": 0}, "--cards must be at least 1"),
        ((), {"study": "a/b"}, "study name must be .* got 'a/b'"),
        ((), {"volume": "gs://mine"}, "--volume: a volume of Modal's .* got 'gs://mine'"),
        ((), {"volume": "my volume"}, "--volume: a volume of Modal's .* got 'my volume'"),
        ((), {"volume": "../x"}, "--volume: a volume of Modal's"),
        ((), {"volume": "v" * 58}, "at most 57 letters"),
        ((), {"on": "skypilot", "volume": "r2://mine"}, "--volume: an address is s3:// or gs://"),
        ((), {"on": "skypilot", "volume": "s3://mine/../x"}, "--volume: an address is"),
        ((), {"on": "skypilot", "volume": "../x"}, "--volume: a bucket is named by"),
        ((), {"on": "skypilot", "volume": "My Bucket"}, "--volume: a bucket is named by"),
        (
            (),
            {"on": "skypilot", "cloud": "runpod", "gpu": "l4", "volume": "s3://mine"},
            "--volume: RunPod mounts no bucket, .* got 's3://mine'",
        ),
        (
            (),
            {"on": "skypilot", "cloud": "runpod", "gpu": "l4", "is_spot": True, "volume": "v"},
            "--spot: what a pod of RunPod's leaves",
        ),
        ((), {"gpu": "cpu"}, "--gpu cpu is no card to rent: name one"),
        ((), {"gpu": "auto"}, "--gpu auto is no card to rent: name one"),
        ((), {"on": "skypilot", "cloud": "runpod", "gpu": "l4"}, "--volume: RunPod mounts no"),
        ((), {"study": "sweep.db"}, "is that of a file of sweep's"),
        (("--sampler", "nosuch"), {}, "sampler"),
        (("--soak", "nonsense"), {}, "--soak: "),
        (("--soak", "1m", "--no-confirm"), {}, "--no-confirm and --soak are both given"),
        (("--trials", "0"), {}, "trials"),
        ((), {"max_dollars": float("inf")}, "--max-dollars must be more than 0, and a number"),
        ((), {"max_dollars": float("nan")}, "--max-dollars must be more than 0, and a number"),
        (("--gpu", "l4"), {}, "--gpu is an option of launch: write it before the --"),
        (("--max-dollars", "3"), {}, "--max-dollars is an option of launch"),
        (("--storage", "sqlite:///x.db"), {}, "--storage names what a rented machine cannot see"),
        (("--ray", "auto"), {}, "--ray names what a rented machine cannot see"),
        (("--host", "me@box"), {}, "--host: where this runs is another's choice"),
        (
            ("--model", "demo", "--model", "tinyllama-1.1b"),
            {},
            "--model: several models are for this",
        ),
        (("--from", "other"), {}, "--from names what a rented machine cannot see"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_written(
    words: tuple[str, ...], changes: dict[str, Any], message: str, home: Path
) -> None:
    with pytest.raises(InputError, match=message):
        launch(*words, **changes)
    assert not (home / "runs").exists()


@pytest.mark.usefixtures("home")
def test_an_option_that_run_has_not_is_refused_as_run_refuses_it() -> None:
    with pytest.raises(typer.TyperException, match="--trails"):
        launch("--trails", "3")


@pytest.mark.usefixtures("home")
def test_no_card_is_rented_for_what_does_not_fit_it() -> None:
    with pytest.raises(NothingFits, match="nothing of it is predicted to fit t4"):
        launch("--batch-size", "16", "--seq-len", "2048", gpu="t4")


@pytest.mark.usefixtures("home")
def test_a_token_of_the_hub_is_in_no_file(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_made_up")
    launch(output=str(home / "job.py"))
    assert "hf_made_up" not in (home / "job.py").read_text()


def test_the_command_line_reaches_it(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["launch", "a10", "--on", "modal", "--max-dollars", "0"]
    assert cli.main([*words, "--", "--trials", "3"]) == 2
    assert "--max-dollars must be more than 0" in capsys.readouterr().err
    assert cli.main(["launch", "a10", "--on", "modal", "--", "--trails", "3"]) == 2
    assert "--trails" in capsys.readouterr().err


def test_a_job_has_a_wheel_beside_it_so_it_cannot_be_printed(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["launch", "a10", "--on", "modal", "-o", "-"]) == 2
    assert "--output: the job needs the package's wheel beside it" in capsys.readouterr().err
    assert not (home / "-").exists()


def test_a_price_that_was_typed_is_the_provider_s_price(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launch(typed_prices=("a10=0.3",), output=str(home / "job.py"))
    out, err = capsys.readouterr()
    assert "at $0.30 an hour, the price that you gave, on Modal" in " ".join(err.split())
    cost = json.loads(out)["cost"]
    assert (cost["provider"], cost["source"], cost["usd_per_hour"]) == ("Modal", "--price", 0.3)
