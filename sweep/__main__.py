"""Runs the command: ``python -m sweep`` is ``sweep``."""

import sys

from sweep.cli import main

if __name__ == "__main__":
    sys.exit(main())
