"""Owns the first seconds of a training's process: bound to its parent's life, then its imports.

Run as ``python -P -m sweep.finetuning FD PARENT``, as the worker is.
"""

from __future__ import annotations

import sys

from sweep.running.__main__ import begin


def main() -> None:
    """Import what a training takes, and train."""
    begin(int(sys.argv[1]), parent=int(sys.argv[2]))
    from sweep.training.lean_imports import OPTIONAL, compiling_later, lean_imports

    with lean_imports(*OPTIONAL):
        with compiling_later():
            import bitsandbytes  # noqa: F401
        from sweep.finetuning import child
    child.main()


if __name__ == "__main__":
    main()
