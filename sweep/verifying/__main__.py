"""The child that needs torch for a verification: random weights to load, or TRL's training.

Run as ``python -P -m sweep.verifying PARENT``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sweep.subprocess_jobs import Say, serve_subprocess


def _do(request: Mapping[str, Any], say: Say) -> Mapping[str, Any]:
    match request:
        case {"do": "weights"}:
            return _weights(request, say)
        case _:
            return _trl(request)


def _weights(request: Mapping[str, Any], say: Say) -> Mapping[str, Any]:
    from search_spaces.models import ModelSpec
    from sweep.training.libraries import OPTIONAL, lean_imports

    with lean_imports(*OPTIONAL):
        from sweep.verifying.random_weights import write_random_weights

    write_random_weights(
        ModelSpec.from_json(request["model"]),
        Path(request["directory"]),
        tokenizer=Path(request["tokenizer"]),
        on_progress=lambda done, of: say({"what": "shards written", "done": done, "of": of}),
    )
    return {}


def _trl(request: Mapping[str, Any]) -> Mapping[str, Any]:
    from sweep.verifying.trl_run import train_with_trl

    return train_with_trl(
        Path(request["file"]),
        model=Path(request["model"]),
        texts=Path(request["texts"]),
        output=Path(request["output"]),
        steps=request["steps"],
        tokens_per_step=request["tokens_per_step"],
    )


if __name__ == "__main__":
    serve_subprocess(_do)
