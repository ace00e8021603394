"""Options, markers and the surroundings shared by every test."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from qlora_sweep.sweep.predict.memory.profile_store import TracingChildren
    from tests.storage.postgres import Cluster

# How fast examples come depends on what else the machine does.
settings.register_profile(
    "any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any-machine")

_SHARING = (
    "tests/contract/test_runners.py",
    "tests/contract/test_storages.py",
    "tests/docs/test_pages.py::test_the_commands",
    "tests/golden/",
    "tests/search_spaces/test_real_architectures.py",
    "tests/reports/test_page_used.py",
    "tests/storage/test_postgres.py",
    "tests/sweep/predict/",
    "tests/sweep/running/test_on_ray.py",
    "tests/sweep/running/test_training_teams.py",
    "tests/sweep/running/test_worker.py",
    "tests/sweep/terminal/test_data_command.py",
    "tests/sweep/test_pretrained_model.py",
    "tests/sweep/verifying/test_verifying.py",
    "tests/test_wheel.py",
    "tests/sweep/test_examples.py",
)
"""Tests under one of these share what takes seconds to make: one worker runs them all."""


def _memory_directory() -> str | None:
    """Return a directory in memory with a gibibyte left, of which programs can be run."""
    directory = "/dev/shm"
    if not os.access(directory, os.W_OK):
        return None
    system = os.statvfs(directory)
    is_roomy = system.f_bavail * system.f_frsize > 2**30
    return directory if is_roomy and not system.f_flag & os.ST_NOEXEC else None


# Models are tiny: further threads only wait for one another, and in a worker of many for its core.
# torch reads it when it is imported, children inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# SQLite waits for a disk at every commit, and tests need nothing of it tomorrow.
if (memory := _memory_directory()) is not None:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", memory)


@pytest.fixture(scope="session", autouse=True)
def nobodys_cache(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> None:
    """Start from a cache that the workers of one run share: empty, but for traced profiles, which
    are kept by the code that traced them and outlive a run.
    """
    run = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        run = run.parent
    os.environ["XDG_CACHE_HOME"] = str(run / "cache")
    ours = run / "cache" / "qlora-sweep"
    ours.mkdir(parents=True, exist_ok=True)
    if (cache := getattr(pytestconfig, "cache", None)) is not None:
        with suppress(FileExistsError):
            (ours / "memory").symlink_to(cache.mkdir("profiles"))
    if "datasets" in sys.modules:
        # It has read where its cache is with the first test module that imports it.
        sys.modules["datasets"].config.HF_DATASETS_CACHE = (
            run / "cache" / "huggingface" / "datasets"
        )
    # Nor in anybody's database.
    os.environ.pop("SWEEP_STORAGE", None)
    # Nor as wide or as colourful as somebody's terminal.
    for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
        os.environ.pop(name, None)


@pytest.fixture(scope="session", autouse=True)
def _no_module_twice() -> Iterator[None]:
    """The root of the repository is on Python's path: a part of the package that is imported by its
    folder's name would be another copy of it."""
    yield
    assert not {"search_spaces", "storage", "reports", "sweep"} & sys.modules.keys()


@pytest.fixture(scope="session", autouse=True)
def _schema_known() -> Iterator[None]:
    """Read the history of Optuna's tables once a process: at each opening it is half of the time.

    What tests open is made by one and the same Optuna.
    """
    import alembic.script.base
    import alembic.util

    known = cache(alembic.util.load_python_file)
    with patch.object(alembic.script.base.util, "load_python_file", known):
        yield


@pytest.fixture(scope="session")
def tracing_child() -> Iterator[TracingChildren]:
    """Traces real models, started once for all tests, with the first that asks."""
    # Imported here: most of the suite traces nothing.
    from qlora_sweep.sweep.predict.memory.profile_store import TracingChildren

    child = TracingChildren(1, outlive=True)
    yield child
    child.close()


@pytest.fixture
def shared_tracing(tracing_child: TracingChildren) -> Iterator[None]:
    """Have what a test runs in this process ask that child, where it would start its own."""
    from tests.sweep.shared_tracing import asked_of

    with asked_of(tracing_child):
        yield


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A PostgreSQL server for all tests of a process; each makes a database of its own."""
    # Imported here: most of the suite never needs a database's driver.
    from tests.storage.postgres import running_cluster

    with running_cluster() as cluster:
        yield cluster


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-gpu", action="store_true", help="fail instead of skipping where there is no GPU"
    )
    parser.addoption(
        "--regenerate",
        action="store_true",
        help="make what golden tests find the answer that is committed, and print what changes",
    )


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    # Bytes make names that nobody can read, and a time in them differs from worker to worker.
    return argname if isinstance(val, bytes) else None


def pytest_collection_finish() -> None:
    # Tests and libraries are a million objects that stay: with them each search for garbage takes
    # half a second, and a training on the CPU makes five.
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    # Imported here: without it the suite runs as well, in one process.
    from xdist.scheduler import LoadScopeScheduling

    class SharingScheduling(LoadScopeScheduling):
        """Hands out tests one by one, those that share what they need together and first."""

        def _split_scope(self, nodeid: str) -> str:
            return next((path for path in _SHARING if nodeid.startswith(path)), nodeid)

    return SharingScheduling(config, log)


def _has_gpu() -> bool:
    # Imported here: most of the suite never needs torch.
    import torch

    return torch.cuda.is_available()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        # One that begins last is waited for by the other workers.
        items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    wanted = [item for item in items if item.get_closest_marker("gpu")]
    if not wanted or "not gpu" in config.getoption("markexpr", "") or _has_gpu():
        return
    if config.getoption("--require-gpu"):
        raise pytest.UsageError("--require-gpu: torch finds no CUDA device")
    for item in wanted:
        item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
