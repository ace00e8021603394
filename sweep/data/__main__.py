"""The texts' child: it prepares what it is asked for, and is gone.

Run as ``python -P -m sweep.data PARENT``. torch takes seconds to import and is not needed, so it is
not there for anybody.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from sweep.subprocess_jobs import Say, serve_subprocess

_ABSENT = ("torch", "scipy", "sklearn", "torchvision", "PIL")
_TELLING_SECONDS = 0.2


def _prepare(request: Mapping[str, Any], say: Say) -> Mapping[str, Any]:
    """Return the directory that holds the prepared texts."""
    # transformers says that models need torch; two processors are there to tokenize with.
    os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "true"}
    os.environ |= {"HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    from sweep.data.request import Question

    with _without(*_ABSENT):
        from sweep.data.preparing import prepare
    return {"prepared": str(prepare(Question(**request), on_progress=_teller(say)))}


@contextlib.contextmanager
def _without(*absent: str) -> Iterator[None]:
    """Import inside the ``with``; ``absent`` packages then look as if they were not installed.

    Afterwards they can be imported by whoever needs them: datasets takes a mark that is left behind
    for the package itself.
    """
    for name in absent:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in absent:
            if sys.modules[name] is None:
                del sys.modules[name]


def _teller(say: Say) -> Any:
    """Return what tells the parent how far it is, a few times a second."""
    told_seconds = 0.0

    def tell(what: str, done: int, of: int) -> None:
        nonlocal told_seconds
        if time.monotonic() - told_seconds >= _TELLING_SECONDS:
            told_seconds = time.monotonic()
            say({"what": what, "done": done, "of": of})

    return tell


if __name__ == "__main__":
    serve_subprocess(_prepare)
