"""A Ray cluster of several nodes on this machine, in a process of its own that ends with its tests.

The tests' own process only joins it, as a driver does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).parents[3]
PATH = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
"""Where every process of these tests finds our packages, on whatever else it has."""
SECONDS = 120
_STORE_BYTES = 80 * 2**20
_SOON = {
    # A node that is killed is missed within a second, not within fifteen.
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 200,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 3,
}


class LocalCluster:
    """A head that runs no trials, and nodes that do.

    Args:
        nodes: what each of them has, beside a processor.
        home: of their caches; their logs are below.
    """

    def __init__(self, *nodes: dict[str, Any], home: Path) -> None:
        self.home = home
        environment = {
            **os.environ,
            "PYTHONPATH": PATH,
            "XDG_CACHE_HOME": str(home),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(nodes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            text=True,
        )
        begun = self._read()
        self.address: str = begun["address"]
        self.ids: list[str] = begun["ids"]
        """Of the nodes, in the order in which they begin; the head is none of them."""

    def kill_node(self, number: int) -> None:
        """Kill every process of a node, without a word to anybody."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()
        self._read()

    def close(self) -> None:
        """End all of it."""
        if self._process.stdin is not None and self._process.stdout is not None:
            self._process.stdin.close()
            self._process.wait(SECONDS)
            self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith('{"'):
                return dict(json.loads(line))
        raise AssertionError("the cluster ended")


def _serve() -> None:
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 0,
            "num_gpus": 0,
            "object_store_memory": _STORE_BYTES,
            "include_dashboard": False,
            "_system_config": _SOON,
        },
    )

    def begin(has: dict[str, Any]) -> Any:
        given = {"num_cpus": 1, "num_gpus": 0, **has}
        return cluster.add_node(object_store_memory=_STORE_BYTES, **given)

    nodes = [begin(has) for has in json.loads(sys.argv[1])]
    ids = [node.node_id for node in nodes]
    print(json.dumps({"address": cluster.address, "ids": ids}), flush=True)
    for line in sys.stdin:
        cluster.remove_node(nodes[json.loads(line)], allow_graceful=False)
        print(json.dumps({"done": True}), flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    # What stands beside this file is no package of anybody's.
    sys.path[0] = str(ROOT)
    _serve()
