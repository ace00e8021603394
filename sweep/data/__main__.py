"""Owns the texts' child: bound to its parent's life, then one question in and one answer out.

Run as ``python -P -m sweep.data PARENT``, where PARENT is the number of the process that started
it. The question is a line of JSON on standard input; on standard output come lines of progress and
then the answer. torch takes seconds to import and is not needed, so it is not there for anybody.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import IO, Any

from sweep.processes import bind_to_parent

_ABSENT = ("torch", "scipy", "sklearn", "torchvision", "PIL")
_TELLING_SECONDS = 0.2


def main() -> None:
    """Prepare the texts that are asked for."""
    bind_to_parent(int(sys.argv[1]))
    # transformers says that models need torch; two processors are there to tokenize with.
    os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "true"}
    os.environ |= {"HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)
        _say(out, _answer(json.loads(sys.stdin.readline()), out))


def _answer(question: dict[str, Any], out: IO[str]) -> dict[str, Any]:
    """Return the directory that holds the prepared texts, or why there is none."""
    from search_spaces.errors import EnvironmentFault, InputError
    from sweep.data.request import Question

    with _without(*_ABSENT):
        from sweep.data.preparing import prepare
    try:
        directory = prepare(Question(**question), on_progress=_teller(out))
        return {"prepared": str(directory)}
    except InputError as error:
        return {"input": str(error)}
    except EnvironmentFault as error:
        return {"environment": str(error)}
    except OSError as error:
        return {"system": [error.errno, error.strerror or str(error), error.filename]}


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


def _teller(out: IO[str]) -> Any:
    """Return what tells the parent how far it is, a few times a second."""
    told_seconds = 0.0

    def tell(what: str, done: int, of: int) -> None:
        nonlocal told_seconds
        if time.monotonic() - told_seconds >= _TELLING_SECONDS:
            told_seconds = time.monotonic()
            _say(out, {"progress": [what, done, of]})

    return tell


def _say(out: IO[str], values: dict[str, Any]) -> None:
    out.write(json.dumps(values) + "\n")
    out.flush()


if __name__ == "__main__":
    main()
