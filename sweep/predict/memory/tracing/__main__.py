"""Owns the tracing child's conversation: one question a line in, one answer a line out.

Run as ``python -P -m sweep.predict.memory.tracing``. Structures of several models may be asked for,
one after another. torch, transformers and PEFT are imported here, and bitsandbytes is stood in for.
Knows nothing of predictions.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from typing import Any

# Imports make millions of objects that stay; looking for garbage among them takes half a second.
gc.disable()
# Optional parts of transformers that no decoder needs take another half: they are declared absent.
for _absent in ("scipy", "sklearn", "pandas", "datasets", "torchvision", "PIL"):
    sys.modules[_absent] = None  # type: ignore[assignment]

from sweep.predict.memory.tracing import fourbit  # noqa: E402

fourbit.install()

from search_spaces.errors import InputError  # noqa: E402
from search_spaces.models import ModelSpec  # noqa: E402
from sweep.predict.memory.profiles import Structure, Untraceable  # noqa: E402
from sweep.predict.memory.tracing.profile import trace  # noqa: E402

gc.freeze()
gc.enable()


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


def main() -> None:
    """Answer until the input ends. Whatever else is printed goes to standard error."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)
        for line in sys.stdin:
            out.write(json.dumps(answer(json.loads(line))) + "\n")
            out.flush()


if __name__ == "__main__":
    main()
