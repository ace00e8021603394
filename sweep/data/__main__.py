"""The dataset's child: it prepares what it is asked for, and is gone.

Run as ``python -P -m qlora_sweep.sweep.data PARENT``. torch takes seconds to import and is not
needed, so no package finds it here.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from qlora_sweep.sweep.data.kinds import ReadingOptions
from qlora_sweep.sweep.data.prepared_dataset import PreparationRequest
from qlora_sweep.sweep.json_child import Say
from qlora_sweep.sweep.subprocess_jobs import serve_subprocess

_ABSENT = ("torch", "scipy", "sklearn", "torchvision", "PIL")
_TELLING_SECONDS = 0.2


def _prepare(request: Mapping[str, Any], say: Say) -> Mapping[str, Any]:
    """Return the directory that holds the prepared dataset."""
    # transformers says that models need torch; two processors are there to tokenize with.
    os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "true"}
    os.environ |= {"HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    marked = [name for name in _ABSENT if name not in sys.modules]
    # These packages look as if they were not installed while others are imported.
    sys.modules.update(dict.fromkeys(marked))  # type: ignore[arg-type]
    from qlora_sweep.sweep.data.preparing import prepare

    # datasets takes a mark that is left behind for the package itself.
    for name in marked:
        del sys.modules[name]
    reported_seconds = 0.0

    def tell(what: str, done: int, of: int) -> None:
        nonlocal reported_seconds
        if time.monotonic() - reported_seconds >= _TELLING_SECONDS:
            reported_seconds = time.monotonic()
            say({"what": what, "done": done, "of": of})

    question = PreparationRequest(**{**request, "asked": ReadingOptions(**request["asked"])})
    return {"prepared": str(prepare(question, on_progress=tell))}


if __name__ == "__main__":
    serve_subprocess(_prepare)
