"""Runs the command: ``python -m sweep`` is ``sweep``."""

import sys

from qlora_sweep import main  # type: ignore[import-untyped]

if __name__ == "__main__":
    sys.exit(main())
