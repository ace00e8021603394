"""What a child process imports before its first answer, and what it does without."""

from __future__ import annotations

import json
import subprocess
import sys

from qlora_sweep.sweep.training.libraries import OPTIONAL
from tests.lazy import lazily

torch = lazily("torch")

_IMPORTED = """
import json, sys
from qlora_sweep.sweep.training.libraries import OPTIONAL, compiling_later, lean_imports
with lean_imports(*OPTIONAL):
    with compiling_later():
        import bitsandbytes
    import qlora_sweep.sweep.running.worker
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
