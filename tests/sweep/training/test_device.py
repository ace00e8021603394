from __future__ import annotations

import resource

import pytest

from search_spaces.errors import EnvironmentFault
from sweep.training.device import CpuDevice


def test_a_limit_of_the_process_below_the_budget_is_not_taken_for_the_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = {resource.RLIMIT_AS: (2**20 * 1024, resource.RLIM_INFINITY)}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    with pytest.raises(EnvironmentFault, match="ulimit -v 1048576"):
        CpuDevice().cap(2**30)
    limits[resource.RLIMIT_AS] = (2**50, resource.RLIM_INFINITY)
    CpuDevice().cap(2**30)
