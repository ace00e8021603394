"""Temporary directories, and what becomes of them where their process is killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from qlora_sweep.sweep.scratch import remove_left, scratch

HOLDING = """
import sys
from pathlib import Path
from qlora_sweep.sweep.scratch import scratch
with scratch("test", parent=Path(sys.argv[1])) as path:
    (path / "deep").mkdir()
    print(path, flush=True)
    sys.stdin.read()
"""


def test_what_a_killed_process_left_is_removed_by_the_next_and_what_is_used_stays(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", HOLDING, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as one:
        assert one.stdout is not None
        held = Path(one.stdout.readline().strip())
        with scratch("test", parent=tmp_path) as mine:
            assert (held.is_dir(), mine.is_dir()) == (True, True)
        assert not mine.exists()
        one.kill()
        one.wait()
        assert held.is_dir()
    remove_left(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_only_directories_of_this_kind_are_removed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / ".sweep-scratch-link").symlink_to(elsewhere)
    (tmp_path / ".sweep-scratch-file").write_text("mine")
    names = sorted(path.name for path in tmp_path.iterdir())
    remove_left(tmp_path)
    remove_left(tmp_path / "nowhere")
    assert sorted(path.name for path in tmp_path.iterdir()) == names
