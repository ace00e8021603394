"""Trials on a Ray cluster of several nodes, and what becomes of them when one of those is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from qlora_sweep.search_spaces.errors import EnvironmentFault, GpuLost
from qlora_sweep.search_spaces.space import StepBudget
from qlora_sweep.storage.definition import Target
from qlora_sweep.storage.directory import (
    Left,
    StudyFile,
    keep_outcomes,
    left_outcomes,
    note_identity,
)
from qlora_sweep.storage.records import Attempt, Crashed, Measured, Outcome
from qlora_sweep.sweep.running.device_info import GpuInfo
from qlora_sweep.sweep.running.ray_nodes import Cluster, Node, joined
from qlora_sweep.sweep.running.ray_runner import RayRunner
from qlora_sweep.sweep.running.runner import Lane, Runner
from qlora_sweep.sweep.running.wire import Progress, TrialRequest
from tests.storage.builders import a_definition
from tests.sweep.running.driver_on_ray import LONG, SMALL, new_runner, processes_of
from tests.sweep.running.ray_cluster import PATH, ROOT, LocalCluster
from tests.sweep.test_processes import is_running

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed"),
]

STEPS = StepBudget(warmup_max=3, measured_min=6, measured_max=8, seconds_max=5)
STEADY, DOOMED, DOOMED_IN_A_STUDY = range(3)
"""The nodes, in the order in which they begin; the head runs nothing."""


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    home = tmp_path_factory.mktemp("ray")
    with LocalCluster({"num_cpus": 3, "num_gpus": 2}, *2 * [{"num_cpus": 1}], home=home) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def ray(local: LocalCluster) -> Iterator[Any]:
    with joined(local.address) as ray:
        yield ray


@pytest.fixture(scope="module")
def cluster(ray: Any) -> Cluster:
    return Cluster(ray)


@pytest.fixture(scope="module")
def nodes(local: LocalCluster, cluster: Cluster) -> list[Node]:
    return [next(node for node in cluster.nodes if node.id == one) for one in local.ids]


def on(ray: Any, node: Node, study: str, **options: Any) -> RayRunner:
    return RayRunner(
        ray,
        new_runner(),
        home=f"{study}/0",
        device="cpu",
        node_id=node.id,
        address=node.address,
        **options,
    )


def places(cluster: Cluster, study: str, **options: Any) -> tuple[Lane, ...]:
    given = {"device": "cpu", "gpu": "cpu", "keep": list, "warn": no_warning, **options}
    return cluster.places(new_runner(), study=study, **given)


def an_attempt(study: str) -> Attempt:
    return Attempt(id="1", study=study, number=0, started_at="2026-01-01T00:00:00+00:00")


def until(is_so: Callable[[], bool], *, seconds: float = 90) -> bool:
    deadline = time.monotonic() + seconds
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.02)
    return is_so()


def is_gone(pid: int) -> bool:
    return not is_running(pid)


def disturbed(runner: Runner, study: str, by: Callable[[dict[str, int]], None]) -> Outcome:
    """Return what becomes of a long trial that is disturbed while it is measured."""
    begun = threading.Event()

    def watch(progress: Progress) -> bool:
        if progress.phase == "measure" and not begun.is_set():
            begun.set()
            by(processes_of(study))
        return False

    return runner.run(TrialRequest(config=SMALL, steps=LONG), observe=watch)


def kill(name: str) -> Callable[[dict[str, int]], None]:
    return lambda found: os.kill(found[name], signal.SIGKILL)


def test_each_node_tells_of_itself(cluster: Cluster, nodes: list[Node]) -> None:
    assert len({node.address for node in cluster.nodes}) == 4
    assert len({frozenset(node.versions.items()) for node in cluster.nodes}) == 1
    assert [node.num_gpus for node in nodes] == [2, 0, 0]
    assert [node.processors for node in nodes] == [3, 1, 1]
    assert cluster.gpu_info("cpu") is None


def test_texts_that_are_not_on_the_nodes_are_refused_before_anything_begins(
    cluster: Cluster, tmp_path: Path
) -> None:
    places(cluster, "here", paths=[str(tmp_path)])
    with pytest.raises(EnvironmentFault, match=r"/nowhere is not on .*, .*: each node reads it"):
        places(cluster, "nowhere", paths=["/nowhere", str(tmp_path)])
    assert processes_of("nowhere") == {}


def test_a_killed_worker_or_actor_is_a_crash_and_the_next_trial_has_another(
    ray: Any, nodes: list[Node]
) -> None:
    study, node, brief = "killed", nodes[STEADY], TrialRequest(config=SMALL, steps=STEPS)
    with on(ray, node, study) as runner:
        outcome = disturbed(runner, study, kill("worker"))
        assert isinstance(outcome, Crashed), outcome
        assert "SIGKILL" in outcome.detail
        outcome = disturbed(runner, study, kill("actor"))
        assert isinstance(outcome, Crashed), outcome
        assert outcome.phase == "measure", outcome
        assert f"actor's process on node {node.address} ended" in outcome.detail
        assert isinstance(runner.run(brief), Measured)
        # It is killed while it has nothing to do: that is nobody's crash.
        found = processes_of(study)
        os.kill(found["actor"], signal.SIGKILL)
        assert until(lambda: is_gone(found["worker"]))
        assert isinstance(runner.run(brief), Measured)
        last = processes_of(study)
    assert len(last) == 2
    assert until(lambda: all(map(is_gone, last.values())))


def test_what_an_actor_measured_before_it_was_killed_is_not_measured_again(
    ray: Any, nodes: list[Node], local: LocalCluster
) -> None:
    study = "measured"
    brief = TrialRequest(config=SMALL, steps=STEPS, attempt=an_attempt(study))
    left = local.home / "qlora-sweep" / "ray" / study / "0" / "outcome.json"

    def stop_it_until_it_is_measured(progress: Progress) -> bool:
        if progress.phase == "measure" and not left.exists():
            actor = processes_of(study)["actor"]
            # It hears nothing of its worker, which goes on.
            os.kill(actor, signal.SIGSTOP)
            assert until(left.exists)
            os.kill(actor, signal.SIGKILL)
        return False

    with on(ray, nodes[STEADY], study) as runner:
        outcome = runner.run(brief, observe=stop_it_until_it_is_measured)
        assert isinstance(outcome, Measured), outcome
        assert outcome == Left.model_validate_json(left.read_bytes()).outcome
        # Another attempt has an outcome of its own.
        second = an_attempt(study).model_copy(update={"id": "2"})
        assert runner.run(brief.model_copy(update={"attempt": second})) != outcome


def test_an_observer_that_fails_ends_its_trial_and_an_actor_that_says_nothing_is_given_up(
    ray: Any, nodes: list[Node]
) -> None:
    found: dict[str, int] = {}

    def watch(_: Progress) -> bool:
        found.update(processes_of("failing"))
        raise ZeroDivisionError

    node = nodes[STEADY]
    with on(ray, node, "failing", quiet_seconds=3) as runner:
        with pytest.raises(ZeroDivisionError):
            runner.run(TrialRequest(config=SMALL, steps=LONG), observe=watch)
        assert until(lambda: all(map(is_gone, found.values())))
        assert len(found) == 2
        with pytest.raises(GpuLost, match=f"node {node.address} .* nothing was heard"):
            disturbed(runner, "failing", lambda now: os.kill(now["actor"], signal.SIGSTOP))


def test_the_end_of_the_driver_ends_its_actors_and_their_workers(local: LocalCluster) -> None:
    driver = subprocess.Popen(
        [sys.executable, "-m", "tests.sweep.running.driver_on_ray", local.address, "driven"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": PATH},
        text=True,
    )
    assert driver.stdout is not None
    try:
        told = next(line for line in driver.stdout if line.startswith("pids "))
        pids = [int(word) for word in told.split()[1:]]
        assert not any(map(is_gone, pids))
    finally:
        driver.kill()
        driver.wait()
        driver.stdout.close()
    assert until(lambda: all(map(is_gone, pids)))


def test_a_node_that_is_lost_takes_its_own_place_alone_and_what_others_measured_is_kept(
    local: LocalCluster,
    cluster: Cluster,
    nodes: list[Node],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    ours = StudyFile(
        identity="mine", name="left", database="", definition=a_definition(), environment={}
    )
    note_identity(tmp_path, ours)
    request = TrialRequest(config=SMALL, steps=STEPS, attempt=an_attempt("mine"))
    with closing_all(places(cluster, "lost")) as found:
        assert len(found) == 3
        lost = named(found, nodes[DOOMED].address)
        with pytest.raises(GpuLost, match=f"node {lost.name} of the Ray cluster is lost"):
            disturbed(lost.runner, "lost", lambda _: local.kill_node(DOOMED))
        with pytest.raises(GpuLost):
            lost.runner.run(request)
        steady = named(found, nodes[STEADY].address)
        assert isinstance(steady.runner.run(request), Measured)
    # As if that driver had been killed: the next one finds what was not told.
    with closing_all(places(cluster, "lost", keep=partial(keep_outcomes, tmp_path))):
        (left,) = left_outcomes(tmp_path, study="mine")
    assert (left.attempt.study, left.config) == ("mine", SMALL)
    assert isinstance(left.outcome, Measured)
    assert capfd.readouterr() == ("", "")


@contextmanager
def closing_all(places: Sequence[Lane]) -> Iterator[Sequence[Lane]]:
    try:
        yield places
    finally:
        for place in places:
            place.runner.close()


def named(places: Sequence[Lane], name: str) -> Lane:
    return next(place for place in places if place.name == name)


def no_warning(words: str) -> None:
    raise AssertionError(words)


def test_a_study_goes_on_without_a_node_that_is_lost(
    local: LocalCluster, nodes: list[Node], tmp_path: Path
) -> None:
    run = "import sys; from qlora_sweep.sweep.cli import main; sys.exit(main())"
    options = ["--trials", "4", "--no-confirm", "--json", "--on", f"ray:{local.address}"]
    study = subprocess.Popen(
        [sys.executable, "-c", run, "run", "cpu-demo", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": PATH, "SWEEP_HOME": str(tmp_path)},
        text=True,
    )
    doomed = nodes[DOOMED_IN_A_STUDY]
    place = f"{doomed.address.replace('/', '-')}-{doomed.id[:8]}-0"
    try:
        # The first trials begin on every place at once, as soon as their workers have.
        assert until(lambda: "worker" in processes_of(place) or study.poll() is not None)
        local.kill_node(DOOMED_IN_A_STUDY)
        document, said = study.communicate(timeout=150)
    finally:
        study.kill()
        study.wait()
    assert study.returncode == 0, said
    trials = json.loads(document)["trials"]
    assert (trials["total"] - trials["lost"], trials["crashed"]) == (4, 0)
    assert trials["lost"] <= 1
    assert f"{doomed.address} is lost: " in said
    assert "Traceback" not in said


def test_a_place_is_on_each_gpu_and_those_that_others_hold_are_left_to_them(
    ray: Any, nodes: list[Node]
) -> None:
    gpu = GpuInfo("NVIDIA H200", 2**37, 2**37, (9, 0), "580.1", "13.0")
    node = nodes[STEADY]
    pretended = replace(node, gpus=(gpu, gpu))
    cluster = Cluster(ray)
    cluster.nodes = (pretended,)
    target = Target(gpu="h200", device="cuda", budget_bytes=2**30)
    wanted: dict[str, Any] = {"study": "gpus", "device": "cuda", "gpu": "h200", "keep": list}
    # What an earlier test held is given back a while after its runner was closed.
    assert until(lambda: ray.available_resources().get("GPU", 0) == 2)
    begun = cluster.places(new_runner(target), **wanted, warn=no_warning)
    assert sorted(place.name for place in begun) == [
        f"{node.address} GPU 0",
        f"{node.address} GPU 1",
    ]
    begun[0].runner.close()
    warnings: list[str] = []
    assert until(lambda: ray.available_resources().get("GPU", 0) == 1)
    (place,) = cluster.places(new_runner(target), **wanted, warn=warnings.append)
    assert place.name == begun[0].name
    assert len(warnings) == 1
    assert warnings[0].startswith("1 of 2 places of the Ray cluster are held by other jobs")
    place.runner.close()
    begun[1].runner.close()


def without_our_package(_: int) -> dict[str, Any]:
    """Stands in this module, which no node has."""
    return {}


def test_a_node_without_our_package_is_named_with_what_to_install(ray: Any) -> None:
    with pytest.raises(EnvironmentFault) as refused:
        Cluster(ray, look=without_our_package)
    assert "pip install 'qlora-sweep[ray]" in str(refused.value)
    assert "No module named" in str(refused.value)
