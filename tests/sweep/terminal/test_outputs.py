"""What a command writes where a person names a file: never over what is theirs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from qlora_sweep.search_spaces.loading import parse_space
from tests.sweep.typed import Sweep

DATASET = '{"text": "mine"}\n'
WRITERS = {
    "script.py": ("export", "study", "--format", "script"),
    "winner.yml": ("export", "study", "--format", "yaml"),
    "adapter_config.json": ("export", "study", "--format", "peft"),
    "surface.jsonl": ("export", "study", "--format", "surface"),
    "report.html": ("report", "study"),
    "no_ending": ("export", "study", "--format", "json"),
}
"""A command for each kind of file, by a name for it."""


@pytest.fixture(autouse=True)
def here(study: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_that_sweep_wrote_or_that_is_empty_is_replaced_and_any_other_needs_force(
    name: str, here: Path, sweep: Sweep
) -> None:
    command, file = [*WRITERS[name], "-o", name], here / name
    file.touch()
    assert sweep(*command).code == 0
    assert sweep(*command).code == 0
    file.write_text(DATASET)
    refused = sweep(*command)
    assert (refused.code, refused.out) == (2, "")
    assert name in refused.err
    assert "--force" in refused.err
    assert file.read_text() == DATASET
    assert sweep(*command, "--force").code == 0
    assert file.read_text() != DATASET


def test_a_search_space_is_its_writers_from_the_start(here: Path, sweep: Sweep) -> None:
    command = ("init", "--gpu", "auto", "-o", "mine.yaml")
    assert sweep(*command).code == 0
    refused = sweep(*command)
    assert (refused.code, "mine.yaml is there already" in refused.err) == (2, True)
    assert sweep(*command, "--force").code == 0
    parse_space((here / "mine.yaml").read_text(), label="mine.yaml")


def test_what_is_no_file_is_written_to_or_refused(here: Path, sweep: Sweep) -> None:
    (here / "linked.py").write_text("mine = 1\n")
    (here / "link.py").symlink_to("linked.py")
    (here / "dangling.py").symlink_to("there.py")
    (here / "loop").symlink_to("loop")
    (here / "folder").mkdir()
    named = {"link.py": 2, "folder": 2, "new/": 2, "loop": 3, "/dev/null": 0, "dangling.py": 0}
    for name, code in named.items():
        assert sweep("export", "study", "-o", name).code == code, name
    assert (here / "linked.py").read_text() == "mine = 1\n"
    assert (here / "dangling.py").is_symlink()
    assert "Written by qlora-sweep" in (here / "there.py").read_text()


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is unreadable for root")
def test_what_cannot_be_looked_at_is_not_replaced(here: Path, sweep: Sweep) -> None:
    (here / "x.py").write_text(DATASET)
    (here / "x.py").chmod(0)
    refused = sweep("export", "study", "-o", "x.py")
    assert (refused.code, "x.py" in refused.err) == (3, True)
