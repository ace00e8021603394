"""What `make` does where several people, or one in a hurry, start it at once."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NEEDED = pytest.mark.skipif(
    shutil.which("make") is None or shutil.which("flock") is None, reason="needs make and flock"
)
FAKE_PYTHON = """#!/bin/sh
# Stands for python: makes an environment whose programs take a while, and say when and whether
# they may keep what they compiled.
[ "$1" = -m ] || exit 0
mkdir -p "$3/bin"
for name in pip python; do
    said="begins $name \\$PYTHONDONTWRITEBYTECODE"
    printf '#!/bin/sh\\necho %s >> log\\nsleep 1\\necho ends %s >> log\\n' "$said" $name \\
        > "$3/bin/$name"
done
chmod +x "$3"/bin/*
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A fresh clone, as far as make looks at it."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    python = tmp_path / "fake-python"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    return tmp_path


def demo(clone: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["make", "demo", "PYTHON=./fake-python"],
        cwd=clone,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@NEEDED
def test_two_demos_at_once_in_a_fresh_clone_wait_for_each_other(clone: Path) -> None:
    both = [demo(clone), demo(clone)]
    said = [one.communicate(timeout=60)[0] for one in both]
    assert [one.returncode for one in both] == [0, 0], said
    log = (clone / "log").read_text().splitlines()
    # The environment is made once, and the second study begins when the first has ended. Bytecode
    # is kept, whatever is said outside: nothing is compiled when it is installed.
    assert log == ["begins pip", "ends pip", *["begins python", "ends python"] * 2]
    assert "waiting for it" in "".join(said)


def test_help_lists_every_target_that_a_person_types() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    (phony,) = [line for line in text.splitlines() if line.startswith(".PHONY:")]
    done = subprocess.run(
        ["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    listed = {line.split(":")[0] for line in done.stdout.splitlines()}
    assert set(phony.split()[1:]) <= listed
