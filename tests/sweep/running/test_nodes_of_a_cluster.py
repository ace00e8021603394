"""Which nodes of a cluster a study runs on, and what is refused in one message."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Sequence

import pytest

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.errors import EnvironmentFault, GpuLost, InputError, install_extra
from qlora_sweep.search_spaces.space import StepBudget
from qlora_sweep.storage.records import Crashed, Invalid, Measured, Outcome, PrunedSlow
from qlora_sweep.sweep.running.device_info import GpuInfo
from qlora_sweep.sweep.running.ray_nodes import (
    Node,
    checked_address,
    chosen,
    joined,
    refuse_differences,
)
from qlora_sweep.sweep.running.ray_runner import Host
from qlora_sweep.sweep.running.replay import ReplayRunner
from qlora_sweep.sweep.running.wire import TrialRequest
from tests.sweep.simulated_device import a_record, train

A10, H200 = "NVIDIA A10", "NVIDIA H200"
MEMORY = {A10: 23 * 2**30, H200: 140 * 2**30}
HERE = {"qlora-sweep": "0.1.0", "torch": "2.13.0"}


def a_node(number: int, *products: str | None, processors: int = 4, **versions: str) -> Node:
    sizes = ((one, MEMORY[one]) for one in products if one)
    gpus = (GpuInfo(one, size, size, (9, 0), "580.1", "13.0") for one, size in sizes)
    return Node(
        id=str(number),
        address=f"10.0.0.{number}",
        processors=processors,
        versions=HERE | versions,
        num_gpus=len(products),
        gpus=tuple(gpus),
    )


HEAD, NO_GPU = a_node(0, processors=0), a_node(1)
ONE_A10, TWO_H200, ONE_H200 = a_node(1, A10), a_node(2, H200, H200), a_node(3, H200)
MIXED, UNTOLD = a_node(1, A10, H200), a_node(2, H200, None)


@pytest.mark.parametrize(
    ("nodes", "gpu", "taken"),
    [
        ([NO_GPU, TWO_H200, ONE_H200], "auto", [TWO_H200, ONE_H200]),
        ([ONE_A10, TWO_H200], "a10", [ONE_A10]),
        ([MIXED, TWO_H200], "h200", [TWO_H200]),
        ([HEAD, NO_GPU, TWO_H200], "cpu", [NO_GPU, TWO_H200]),
    ],
)
def test_nodes_of_one_product_are_taken_or_those_of_the_one_that_is_named(
    nodes: Sequence[Node], gpu: str, taken: list[Node]
) -> None:
    assert chosen(nodes, gpu=gpu) == tuple(taken)


@pytest.mark.parametrize(
    ("nodes", "gpu", "error", "words"),
    [
        ([HEAD], "cpu", EnvironmentFault, "no processor"),
        ([ONE_A10, TWO_H200], "auto", InputError, "--gpu a10 or --gpu h200"),
        ([ONE_A10, TWO_H200], "a100-40gb", InputError, f"1 x {A10} .* and 2 x {H200}"),
        ([MIXED], "h200", InputError, r"on 10\.0\.0\.1 .*CUDA_VISIBLE_DEVICES"),
        ([NO_GPU, HEAD], "a10", EnvironmentFault, "no GPU among its 2 nodes"),
        ([ONE_H200, UNTOLD], "auto", EnvironmentFault, r"node 10\.0\.0\.2: .* 2 GPUs"),
    ],
)
def test_where_no_nodes_can_be_chosen_the_reason_is_said(
    nodes: Sequence[Node], gpu: str, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        chosen(nodes, gpu=gpu)


@pytest.mark.parametrize("name", ["qlora-sweep", "torch"])
def test_nodes_with_another_version_are_refused_in_one_message(name: str) -> None:
    others = [a_node(number, H200, **{name: "9.9"}) for number in range(5, 14)]
    with pytest.raises(EnvironmentFault, match="; and 6 more") as refused:
        refuse_differences([ONE_H200, *others], here=HERE)
    assert f"10.0.0.5 has {name} 9.9" in str(refused.value)
    assert "10.0.0.3" not in str(refused.value)
    refuse_differences([ONE_H200], here=HERE)


# What an actor's host says of the trials that it runs, without a cluster.

REQUEST = TrialRequest(config=TrialConfig(), steps=StepBudget())


def hosting(runner: ReplayRunner) -> Host:
    return Host(lambda log_path, gpus: runner, home="study/0", device="cpu")


def test_a_trial_with_nothing_to_say_says_that_it_lives_and_a_stop_prunes_it_alone() -> None:
    may_go_on = threading.Event()
    host = hosting(ReplayRunner(otherwise=train, pause=lambda: may_go_on.wait(60) and None))
    stream = host.run(REQUEST)
    assert next(stream) == []
    host.stop()
    may_go_on.set()
    *_, outcome = stream
    assert isinstance(outcome, PrunedSlow)
    *_, outcome = host.run(REQUEST)
    assert isinstance(outcome, Measured)
    host.close()


def test_a_lost_gpu_goes_over_as_what_it_is() -> None:
    def answer(_: TrialConfig) -> Outcome:
        raise GpuLost("it fell off the bus")

    host = hosting(ReplayRunner(otherwise=answer))
    with pytest.raises(GpuLost, match="fell off the bus"):
        list(host.run(REQUEST))
    host.close()


def test_a_host_has_the_threads_that_its_node_has_and_not_those_that_ray_sets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    hosting(ReplayRunner()).close()
    # This process's parent stands in for the raylet.
    with open(f"/proc/{os.getppid()}/environ", "rb") as file:
        known = dict(entry.split(b"=", 1) for entry in file.read().split(b"\0") if b"=" in entry)
    expected = known.get(b"OMP_NUM_THREADS")
    assert os.environ.get("OMP_NUM_THREADS") == (expected and expected.decode())


def test_recorded_trials_of_a_configuration_end_in_turn_as_they_did() -> None:
    fits = train(REQUEST.config)
    crashed = Crashed(phase="build")
    runner = ReplayRunner([a_record(REQUEST.config, outcome) for outcome in (crashed, fits)])
    assert [runner.run(REQUEST) for _ in range(3)] == [crashed, fits, fits]


def test_what_was_not_recorded_is_said_to_be_so() -> None:
    outcome = ReplayRunner().run(REQUEST)
    assert isinstance(outcome, Invalid)
    assert outcome.rule == "not_recorded"


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("ray://10.0.0.1:10001", "Ray client's server"),
        ("10.0.0.1", "must be auto or HOST:PORT"),
        ("a b:6379", "must be auto or HOST:PORT"),
        ("10.0.0.1:70000", "must be auto or HOST:PORT"),
    ],
)
def test_what_is_no_address_of_a_cluster_is_bad_input(address: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        checked_address(address)


def test_what_auto_is_may_stand_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert checked_address("auto") == "10.0.0.1:6379"
    assert checked_address("10.0.0.2:6379") == "10.0.0.2:6379"
    monkeypatch.setenv("RAY_ADDRESS", "ray://10.0.0.1:10001")
    with pytest.raises(InputError, match="RAY_ADDRESS 'ray://"):
        checked_address("auto")


def test_an_address_where_nobody_or_no_ray_answers_is_given_up() -> None:
    pytest.importorskip("ray")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(EnvironmentFault, match=f"at {address}: nothing within 0.3 s"):
            joined(address, seconds=0.3).__enter__()


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(EnvironmentFault) as refused, joined("auto"):
        pass
    assert install_extra("ray") in str(refused.value)
