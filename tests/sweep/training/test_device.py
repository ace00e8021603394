from __future__ import annotations

import resource

import pytest

from search_spaces.errors import EnvironmentFault
from tests.lazy import lazily

devices = lazily("sweep.training.device")


def test_a_limit_of_the_process_below_the_budget_is_not_taken_for_the_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = {resource.RLIMIT_AS: (2**20 * 1024, resource.RLIM_INFINITY)}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    with pytest.raises(EnvironmentFault, match="ulimit -v 1048576"):
        devices.CpuDevice().cap(2**30)
    limits[resource.RLIMIT_AS] = (2**50, resource.RLIM_INFINITY)
    devices.CpuDevice().cap(2**30)


def test_a_hard_limit_of_private_memory_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    hard, infinity, put = 2**50, resource.RLIM_INFINITY, list[tuple[int, int]]()
    limits = {resource.RLIMIT_AS: (infinity, infinity), resource.RLIMIT_DATA: (infinity, hard)}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: put.append(pair))
    device = devices.CpuDevice()
    device.cap(2**30)
    device.reset_peak()
    with device.observed():
        pass
    assert put
    # Whoever is not root may not raise it.
    assert {limit for _, limit in put} == {hard}
    assert all(0 < soft <= hard for soft, _ in put)
