"""Owns the tracing child's conversation: one question a line in, one answer a line out.

Structures of several models may be asked for, one after another. torch, transformers and PEFT are
imported here, and bitsandbytes is stood in for. Knows nothing of predictions.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from sweep.training.lean_imports import OPTIONAL, lean_imports

with lean_imports(*OPTIONAL, "pandas", "datasets"):
    from sweep.predict.memory.tracing import fourbit

    fourbit.install()

    from search_spaces.errors import InputError
    from search_spaces.models import ModelSpec
    from sweep.predict.memory.profiles import Structure, Untraceable
    from sweep.predict.memory.tracing.profile import trace


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Return the profile that was asked for, or why there is none."""
    model = ModelSpec.from_json(question["model"])
    structure = Structure.from_json(question["structure"])
    try:
        return {"profile": trace(model, structure)}
    except Untraceable as error:
        return {"untraceable": str(error)}
    except InputError as error:
        return {"input": str(error)}


def serve() -> None:
    """Answer until the input ends. Whatever else is printed goes to standard error."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)
        for line in sys.stdin:
            out.write(json.dumps(answer(json.loads(line))) + "\n")
            out.flush()
