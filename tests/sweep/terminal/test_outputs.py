"""What a command writes where a person names a file: never over what is theirs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from search_spaces.loading import parse_space
from sweep.cli import main
from sweep.predict.forecast import Forecaster
from sweep.running.replay import ReplayRunner
from sweep.study.driver import Driver
from sweep.study.tuner import tune
from tests.sweep.simulated_device import BUDGET, MODEL, a_study, train

DATASET = '{"text": "mine"}\n'
WRITERS = {
    "script.py": ("export", "study", "--format", "script"),
    "trl.yaml": ("export", "study", "--format", "trl"),
    "axolotl.yml": ("export", "study", "--format", "axolotl"),
    "llama.yaml": ("export", "study", "--format", "llama-factory"),
    "adapter_config.json": ("export", "study", "--format", "peft"),
    "winner.json": ("export", "study", "--format", "json"),
    "winner.yaml": ("export", "study", "--format", "yaml"),
    "surface.jsonl": ("export", "study", "--format", "surface"),
    "report.html": ("report", "study"),
    "no_ending": ("export", "study", "--format", "json"),
}
"""A command for each format, by a name for its file."""


@pytest.fixture(scope="module")
def studied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("studied")
    forecaster = Forecaster(model=MODEL, budget_bytes=BUDGET, violation=lambda _: None)
    with a_study(home / "runs", trials=3) as study:
        tune(Driver(study, runner=ReplayRunner(otherwise=train), forecaster=forecaster))
    return home


@pytest.fixture(autouse=True)
def here(tmp_path: Path, studied: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SWEEP_HOME", str(studied))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_that_sweep_wrote_is_replaced_and_any_other_needs_force(
    name: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command, file = [*WRITERS[name], "-o", name], here / name
    file.write_text(DATASET)
    assert main(command) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert name in said.err
    assert "--force" in said.err
    assert file.read_text() == DATASET
    assert main([*command, "--force"]) == 0
    written = file.read_text()
    assert written != DATASET
    assert main(command) == 0
    assert main([*WRITERS[name], "-o", f"other_{name}"]) == 0


@pytest.mark.parametrize("name", WRITERS)
def test_an_empty_file_is_nobodys_loss(name: str, here: Path) -> None:
    (here / name).touch()
    assert main([*WRITERS[name], "-o", name]) == 0


def test_a_search_space_is_its_writers_from_the_start(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, code in (([], 0), ([], 2), (["--force"], 0)):
        assert main(["init", "--gpu", "auto", "-o", "mine.yaml", *arguments]) == code
    assert "mine.yaml is there already" in capsys.readouterr().err
    parse_space((here / "mine.yaml").read_text(), label="mine.yaml")


def test_what_is_no_file_is_written_to_or_refused(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "linked.py").write_text("mine = 1\n")
    (here / "link.py").symlink_to("linked.py")
    (here / "dangling.py").symlink_to("there.py")
    (here / "loop").symlink_to("loop")
    (here / "folder").mkdir()
    for name, code in (
        ("link.py", 2),
        ("folder", 2),
        ("new/", 2),
        ("loop", 3),
        ("/dev/null", 0),
        ("dangling.py", 0),
    ):
        assert main(["export", "study", "-o", name]) == code, capsys.readouterr().err
    assert (here / "linked.py").read_text() == "mine = 1\n"
    assert (here / "dangling.py").is_symlink()
    assert "Written by qlora-sweep" in (here / "there.py").read_text()


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is unreadable for root")
def test_what_cannot_be_looked_at_is_not_replaced(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "x.py").write_text(DATASET)
    (here / "x.py").chmod(0)
    assert main(["export", "study", "-o", "x.py"]) == 3
    assert "x.py" in capsys.readouterr().err
