"""What a child process imports before its first answer, and what it does without."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from sweep.training.libraries import OPTIONAL, compiling_later
from tests.lazy import lazily

torch = lazily("torch")

_IMPORTED = """
import json, sys
from sweep.training.libraries import OPTIONAL, compiling_later, lean_imports
with lean_imports(*OPTIONAL):
    with compiling_later():
        import bitsandbytes
    import sweep.running.worker
print(json.dumps([name for name, module in sys.modules.items() if module is not None]))
"""


def test_the_worker_is_ready_without_a_compiler_or_what_no_decoder_needs() -> None:
    done = subprocess.run(
        (sys.executable, "-P", "-c", _IMPORTED), capture_output=True, text=True, check=True
    )
    imported = set(json.loads(done.stdout.splitlines()[-1]))
    assert {"torch", "transformers", "peft", "bitsandbytes"} <= imported
    assert imported.isdisjoint({"torch._inductor.compile_fx", *OPTIONAL})
    # They read texts, and a study may have none.
    assert imported.isdisjoint({"datasets", "pandas", "pyarrow", "trl"})


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was really compiled, with its options; compiling is to answer twice as much."""
    seen: list[Any] = []

    def compile_now(function: Any, **options: Any) -> Any:
        seen.append((function.__name__, options))
        return lambda value: 2 * function(value)

    monkeypatch.setattr("torch.compile", compile_now)
    return seen


def test_a_decorated_function_is_compiled_once_and_when_it_is_called(compiled: list[Any]) -> None:
    with compiling_later():

        @torch.compile
        def plain(value: int) -> int:
            """Add one."""
            return value + 1

        @torch.compile(dynamic=False)
        def static(value: int) -> int:
            return value

    assert compiled == []
    assert (plain(1), plain(2), static(3)) == (4, 6, 6)
    assert compiled == [("plain", {}), ("static", {"dynamic": False})]
    assert (plain.__name__, plain.__doc__) == ("plain", "Add one.")
    # And at once afterwards.
    torch.compile(len)
    assert compiled[2:] == [("len", {})]
