"""Runs the command: ``python -m sweep`` is ``sweep``."""

import sys

from sweep import stop_signals


def _run() -> int:
    """Run the command that was typed; what asks it to stop is heard while it is imported, too."""
    try:
        with stop_signals.heard():
            from sweep.cli import main
        return main()
    except KeyboardInterrupt:
        return stop_signals.INTERRUPTED


if __name__ == "__main__":
    sys.exit(_run())
