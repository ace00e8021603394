"""Whose an output directory is, what of it is whole, and whether there is room."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections import namedtuple
from pathlib import Path

import pytest

from qlora_sweep.search_spaces.errors import EnvironmentFault, InputError
from qlora_sweep.sweep.finetuning import checkpoints, output

RUN = {"config": {"lora_rank": 8}, "seed": 0, "texts": {"fingerprint": "abc"}}


def write(directory: Path, step: int) -> None:
    with checkpoints.being_written(directory, step=step) as checkpoint:
        (checkpoint / "adapter_model.safetensors").write_bytes(b"whole")


def begin(directory: Path) -> None:
    output.begin(directory, RUN, checkpoint_bytes=2**20)


def test_what_a_killed_writer_leaves_is_no_checkpoint_and_goes_with_the_next_run(
    tmp_path: Path,
) -> None:
    code = f"""
        import os, signal
        from pathlib import Path
        from qlora_sweep.sweep.finetuning import checkpoints
        with checkpoints.being_written(Path({str(tmp_path)!r}), step=7) as half:
            (half / "optimizer.pt").write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
    """
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=environment)
    assert done.returncode == -signal.SIGKILL
    assert checkpoints.newest(tmp_path) is None
    assert list(tmp_path.iterdir()), "it left something"
    # That is in the way of no training, and goes with its first checkpoint.
    output.refuse_taken(tmp_path)
    for step in (8, 9, 10):
        write(tmp_path, step)
        checkpoints.remove_old(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-9", "checkpoint-10"}
    assert checkpoints.newest(tmp_path) == tmp_path / "checkpoint-10"


def test_a_directory_that_holds_anything_is_refused_for_a_new_training(tmp_path: Path) -> None:
    output.refuse_taken(tmp_path / "missing")
    output.refuse_taken(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="is a file"):
        output.refuse_taken(tmp_path / "notes.txt")
    for prepare, words in (
        (lambda: None, "is not empty"),
        (lambda: (begin(tmp_path), write(tmp_path, 12)), r"begun \(step 12\): --resume"),
        (lambda: (tmp_path / output.TRAINING).write_text("{}"), "is done"),
    ):
        prepare()  # type: ignore[no-untyped-call]
        with pytest.raises(InputError, match=words):
            output.refuse_taken(tmp_path)


def test_a_damaged_checkpoint_is_left_out_for_the_one_before_it(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        write(tmp_path, step)
    told: list[str] = []
    (tmp_path / "checkpoint-6" / "adapter_model.safetensors").write_bytes(b"who")
    (tmp_path / "checkpoint-4" / "adapter_model.safetensors").unlink()
    assert checkpoints.newest(tmp_path, warn=told.append) == tmp_path / "checkpoint-2"
    assert ["step 6" in told[0], "step 4" in told[1], len(told)] == [True, True, 2]
    checkpoints.remove(tmp_path, keep=[2])
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]
    (tmp_path / "checkpoint-2" / checkpoints.DIGESTS).write_bytes(b"")
    with pytest.raises(EnvironmentFault, match="all checkpoints are damaged"):
        checkpoints.newest(tmp_path)


def test_what_is_no_training_is_not_resumed(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing to resume"):
        output.refuse_another(tmp_path / "missing", RUN)
    (tmp_path / output.RUN).write_text("{nonsense")
    with pytest.raises(InputError, match=r"run\.json"):
        output.refuse_another(tmp_path, RUN)


def test_two_trainings_do_not_write_one_directory(tmp_path: Path) -> None:
    with (
        output.held(tmp_path / "new"),
        pytest.raises(InputError, match="another training writes"),
        output.held(tmp_path / "new"),
    ):
        pass
    with output.held(tmp_path / "new"):
        pass


def test_room_is_asked_for_beforehand_and_kept_for_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(tmp_path)
    assert (tmp_path / checkpoints.RESERVED).stat().st_size > 2**20
    checkpoints.release(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [output.RUN]
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(output.shutil, "disk_usage", lambda _: usage(10, 10, 0))
    with pytest.raises(EnvironmentFault, match="free some space"):
        begin(tmp_path)
