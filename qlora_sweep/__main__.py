"""Runs the command: ``python -m qlora_sweep`` is ``sweep``."""

import sys

from qlora_sweep.sweep.entry_point import main

if __name__ == "__main__":
    sys.exit(main())
