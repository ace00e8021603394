"""Owns the first seconds of every process of a team but the first.

Run as ``python -P -m sweep.running.follower FD PARENT RANK``: FD is the pipe for what it says,
PARENT the number of the first process, RANK the index of the card that is its own. Knows nothing of
what it does then (`sweep.running.obeying`).
"""

from __future__ import annotations

import os
import sys

from sweep.processes import bind_to_parent
from sweep.running.printing import print_without_fail


def main() -> None:
    """Be bound to the first process's life, import what a training takes, and obey."""
    bind_to_parent(int(sys.argv[2]))
    print_without_fail()
    from sweep.training.lean_imports import OPTIONAL, compiling_later, lean_imports

    with lean_imports(*OPTIONAL):
        with compiling_later():
            import bitsandbytes  # noqa: F401
        from sweep.running import obeying
    obeying.main(os.fdopen(int(sys.argv[1]), "wb", buffering=0), rank=int(sys.argv[3]))


if __name__ == "__main__":
    main()
