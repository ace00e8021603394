"""A training's process: its first seconds are a worker's.

Run as ``python -P -m qlora_sweep.sweep.finetuning FD PARENT``, as the worker is.
"""

from __future__ import annotations

from qlora_sweep.sweep.running.__main__ import main

if __name__ == "__main__":
    main("qlora_sweep.sweep.finetuning.run")
