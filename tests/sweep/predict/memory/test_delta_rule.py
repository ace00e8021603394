"""What stands in for the kernels of linear attention, held against their own package's code."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest


@pytest.mark.skipif(find_spec("fla") is None, reason="flash-linear-attention is not installed")
def test_delta_rules_allocate_what_their_package_does() -> None:
    command = (sys.executable, "-m", "tests.sweep.predict.memory.delta_rule_allocations")
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = json.loads(done.stdout.splitlines()[-1])
    assert len(rows) == 20
    for row in rows:
        assert row["stand_in"] == row["real"], row["case"]
        assert row["real"]["peak"] > row["real"]["kept_bytes"] > 0
