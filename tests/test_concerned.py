"""A change is tested where it is, where it is imported, and by the contracts."""

from __future__ import annotations

import pytest

pytest.importorskip("grimp", reason="import-linter brings it: `make test` installs it")

from tests.concerned import CONTRACTS, ROOT, changed_files, concerned


@pytest.mark.parametrize(
    ("changed", "within", "without"),
    [
        # A room, those that import what changed, and tests of another room that import it.
        (
            "sweep/launching/ssh.py",
            ["tests/sweep/launching"],
            ["tests/storage", "tests/sweep/predict"],
        ),
        ("storage/lease.py", ["tests/storage", "tests/faults"], ["tests/sweep/training"]),
        (
            "search_spaces/prices.yaml",
            ["tests/search_spaces", "tests/reports"],
            ["tests/sweep/training"],
        ),
        ("search_spaces/config.py", ["tests/sweep/export", "tests/sweep/test_api.py"], []),
        ("sweep/cli.py", ["tests/docs", "tests/test_wheel.py"], ["tests/sweep/predict"]),
        ("sweep/data/encoding.py", ["tests/sweep/export"], ["tests/reports"]),
        ("docs/tutorial.md", ["tests/docs"], ["tests/storage"]),
        # What is no code of the package.
        ("tests/search_spaces/small.py", ["tests/search_spaces"], ["tests/storage"]),
        ("tests/storage/test_codec.py", ["tests/storage/test_codec.py"], ["tests/reports"]),
        ("tests/sweep/conftest.py", ["tests/sweep"], ["tests/reports"]),
        ("tests/golden/answers/plan_cpu-demo.json.gz", ["tests/golden"], ["tests/storage"]),
        ("CHANGELOG.md", [], ["tests/docs"]),
    ],
)
def test_a_change_concerns_its_room_and_those_that_import_it(
    changed: str, within: list[str], without: list[str]
) -> None:
    found = concerned([changed])
    assert set(CONTRACTS) <= set(found)
    assert all((ROOT / path).exists() for path in found)
    assert not [path for path in within if not _covers(found, path)]
    assert not [path for path in without if path in found]


def _covers(found: list[str], path: str) -> bool:
    """Whether a folder, or something in it, is among what was found."""
    return any(path.startswith(each) or each.startswith(f"{path}/") for each in found)


@pytest.mark.parametrize(
    "changed", ["pyproject.toml", "tests/conftest.py", "tests/data/edges_h200.jsonl", "Makefile"]
)
def test_what_concerns_all_is_the_whole_suite(changed: str) -> None:
    assert concerned([changed, "storage/lease.py"]) == ["tests"]


def test_a_file_that_is_gone_concerns_its_room() -> None:
    assert "tests/storage" in concerned(["storage/gone.py"])
    assert "tests/storage/test_gone.py" not in concerned(["tests/storage/test_gone.py"])


def test_a_commit_that_is_not_here_is_no_answer() -> None:
    assert changed_files("no-such-commit") is None
