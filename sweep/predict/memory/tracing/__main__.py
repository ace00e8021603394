"""The tracing child: one question a line in, one answer a line out.

Run as ``python -P -m qlora_sweep.sweep.predict.memory.tracing PARENT``, where PARENT is the number
of the process that started it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.sweep.json_child import answers_to_parent
from qlora_sweep.sweep.predict.memory.profiles import Structure, Untraceable
from qlora_sweep.sweep.training.libraries import OPTIONAL, lean_imports


def main() -> None:
    """Answer until the input ends."""
    with answers_to_parent() as (say, _):
        for line in sys.stdin:
            say(answer(json.loads(line)))


def answer(question: Mapping[str, Any]) -> dict[str, Any]:
    """Return the profile that was asked for, or the model's layers; or why there is none."""
    trace, trace_layers = _imported()
    model = ModelSpec.from_json(question["model"])
    try:
        if "structure" not in question:
            return {"layers": trace_layers(model, attention=question["attention"])}
        return {"profile": trace(model, Structure.from_json(question["structure"]))}
    except Untraceable as error:
        return {"untraceable": str(error)}
    except InputError as error:
        return {"input": str(error)}


@cache
def _imported() -> tuple[
    Callable[[ModelSpec, Structure], dict[str, Any]], Callable[..., list[dict[str, Any]]]
]:
    """Import torch, transformers and PEFT, with bitsandbytes stood in for."""
    with lean_imports(*OPTIONAL, "pandas", "datasets"):
        from qlora_sweep.sweep.predict.memory.tracing import stand_ins

        stand_ins.install()
        from qlora_sweep.sweep.predict.memory.tracing.layers import trace_layers
        from qlora_sweep.sweep.predict.memory.tracing.profile import trace
    return trace, trace_layers


if __name__ == "__main__":
    main()
