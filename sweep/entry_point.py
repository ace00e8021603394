"""Owns where the command ``sweep`` starts: at a name that nobody else will take.

A wheel carries this file as ``qlora_sweep.py`` beside the packages, an editable install far from
them. A foreign ``sweep`` may stand before ours on Python's path, so that `sweep.namesakes`, which
tells of it, is loaded by its place and not by its name.
"""

from __future__ import annotations

import os
import sys
from importlib.util import module_from_spec, spec_from_file_location

_NAMESAKES = os.path.join("sweep", "namesakes.py")


def main() -> int:
    """Run the command that was typed and return the exit code."""
    _refuse_namesakes()
    from sweep.cli import main as run

    return run()


def _refuse_namesakes() -> None:
    candidates = (os.path.abspath(os.path.join(entry, _NAMESAKES)) for entry in sys.path)
    path = next(filter(os.path.exists, candidates), None)
    spec = path and spec_from_file_location("qlora_sweep_namesakes", path)
    if not spec or spec.loader is None:
        sys.stderr.write(
            f"error: qlora-sweep is incomplete: {_NAMESAKES} is nowhere on Python's path\n"
            "  -> pip install --force-reinstall --no-deps qlora-sweep\n"
        )
        raise SystemExit(3)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    module.refuse_namesakes()


if __name__ == "__main__":
    sys.exit(main())
