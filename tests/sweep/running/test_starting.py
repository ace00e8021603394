"""A worker's process that was begun before it had settings serves as one that is started then."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.space import StepBudget
from qlora_sweep.storage.records import Measured
from qlora_sweep.sweep.running.starting import begin, take, worker_environment
from qlora_sweep.sweep.running.supervisor import SupervisedRunner
from qlora_sweep.sweep.running.wire import TrialRequest
from tests.sweep.running.teams import a_cpu_runner
from tests.sweep.test_processes import ends_soon, is_running

STEPS = StepBudget(warmup_min=1, warmup_max=1, measured_min=2, measured_max=2, seconds_max=0.1)
TRIAL = TrialRequest(config=TrialConfig(micro_batch_size=1, seq_len=16), steps=STEPS)
pytestmark = pytest.mark.usefixtures("our_own_code")


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[SupervisedRunner]:
    with a_cpu_runner(tmp_path / "worker.log") as runner:
        yield runner


def begun(environment: dict[str, str]) -> int:
    """Begin a process and return its number."""
    before = children()
    begin(environment)
    (number,) = children() - before
    return number


def children() -> set[int]:
    listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return set(map(int, listed))


def test_it_trains_and_prints_into_the_log(runner: SupervisedRunner, tmp_path: Path) -> None:
    number = begun(worker_environment("cpu"))
    begin(worker_environment("cpu"))
    assert isinstance(runner.run(TRIAL), Measured)
    assert number in children()
    assert {os.readlink(f"/proc/{number}/fd/{i}") for i in (1, 2)} == {str(tmp_path / "worker.log")}
    runner.close()
    assert ends_soon(number)


@pytest.mark.parametrize("is_writable", [True, False])
def test_libraries_are_compiled_by_the_standard_library_where_that_is_kept(
    tmp_path: Path, is_writable: bool
) -> None:
    if not is_writable and os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    (library := tmp_path / "libraries" / "torch").mkdir(parents=True)
    (library / "__init__.py").touch()
    library.chmod(0o700 if is_writable else 0o500)
    # The user's own, in the directory where the command runs.
    (tmp_path / "compileall.py").write_text("open('shadowed', 'w').close()")
    wait = "os.wait()" if is_writable else ""
    starting = "from qlora_sweep.sweep.running.starting import compile_libraries"
    code = f"import os; {starting}; compile_libraries(); {wait}"
    paths = f"{library.parent}:{Path(__file__).parents[3]}"
    environment = os.environ | {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    # With site-packages all that is there would be compiled too.
    subprocess.run(
        [sys.executable, "-P", "-S", "-c", code], cwd=tmp_path, env=environment, check=True
    )
    assert (library / "__pycache__").exists() is is_writable
    assert not (tmp_path / "shadowed").exists()


def test_one_that_is_not_as_it_is_needed_ends() -> None:
    environment = worker_environment("cpu")
    number = begun(environment | {"SOMETHING": "else"})
    assert take(environment) is None
    assert not is_running(number)


def test_bytecode_is_written_wherever_an_image_forbids_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    assert "PYTHONDONTWRITEBYTECODE" not in worker_environment("cuda")
