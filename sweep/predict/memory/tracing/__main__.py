"""Owns the tracing child's first lines: bound to its parent's life before anything takes time.

Run as ``python -P -m sweep.predict.memory.tracing PARENT``, where PARENT is the number of the
process that started it. Knows nothing of tracing.
"""

from __future__ import annotations

import sys

from sweep.processes import bind_to_parent


def main() -> None:
    """Import what tracing takes and answer questions."""
    bind_to_parent(int(sys.argv[1]))
    from sweep.predict.memory.tracing.conversation import serve

    serve()


if __name__ == "__main__":
    main()
