"""What is planned: spaces on GPUs, and one configuration after another."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from qlora_sweep.search_spaces.config import SIZE_KEYS
from qlora_sweep.search_spaces.loading import load_space
from qlora_sweep.search_spaces.presets import preset_texts
from qlora_sweep.sweep.cli import main
from tests.golden.frozen import Frozen

pytestmark = pytest.mark.timeout(600)
GPUS = {
    "a10": ("a10", "l4", "rtx-4090", "a100-40gb", "h100-80gb", "b200"),
    "a100-40gb": ("a100-40gb",),
    "a100-80gb": ("a100-80gb",),
    "h100-80gb": ("h100-80gb",),
    "h200": ("h200", "l4", "a100-40gb", "b200"),
}
"""On which each preset's space is planned: the smallest on all of them, and the largest where it is
far too large. All on all would take two minutes, and say little else."""
ASKED = {
    # By its name a preset would be a GPU's, each of which has a space of its own.
    **{
        f"{preset}_on_{gpu}": (f"{preset}.yaml", "--gpu", gpu)
        for preset, gpus in GPUS.items()
        for gpu in gpus
    },
    "compared": ("a10", "--gpu", "a100-40gb"),
    "cpu-demo": ("cpu-demo",),
    "of_configurations": ("--gpu", "h100-80gb", "--from-file", "drawn.jsonl"),
}
SLOW = {"of_configurations", "h200_on_b200", "h200_on_l4", "a10_on_b200", "a10_on_rtx-4090"}
"""Tenths of seconds a line, or a space on a GPU between or far beyond others that are planned: with
the tests that take longer."""
LINES = 500
SHARDED = {"data_parallel": 2, "sharding": "fsdp"}
ODD: tuple[dict[str, Any], ...] = yaml.safe_load(
    """
- {compute_dtype: fp16}
- {compute_dtype: fp32, quantization: fp4}
- {compute_dtype: int8, quantization: int8, compile: true}
- {compute_dtype: fp8, quantization: int8}
- {compute_dtype: int8, micro_batch_size: 1, seq_len: 16}
- {packing: packed, attention: flash_attention_2}
- {packing: grouped, micro_batch_size: 4, effective_batch_size: 96}
- {data_parallel: 2, kernels: liger}
- {data_parallel: 2, sharding: fsdp, upcast_fp32: false, optimizer: adamw_torch_fused}
- {data_parallel: 2, sharding: fsdp}
- {data_parallel: 1, sharding: fsdp}
- {kernels: liger, compile: true}
- {adapter_dtype: bf16, lora_dropout: 0.1, lora_alpha: 24.5}
- {attention: eager, optimizer: paged_adamw_8bit}
- {quantized_fraction: 0.5, checkpoint_fraction: 0.3, expandable_segments: true}
"""
)
"""What no preset searches, and what rules forbid."""


def drawn() -> Iterator[dict[str, Any]]:
    """Yield configurations of a preset's space, and after every third an odd one, without end.

    Odd ones differ in size alone, so that each kind is one structure to trace; those of the space
    are traced for its plan.
    """
    draw, space, odd = random.Random(0), load_space("h200"), itertools.cycle(ODD)
    for number in itertools.count(1):
        values: dict[str, Any] = {}
        while not values or space.leaves_out(values):
            values = {key: draw.choice(of.values() or ()) for key, of in space.dimensions.items()}
        yield {**space.fixed, **values}
        if number % 3 == 0:
            yield {key: values[key] for key in SIZE_KEYS} | next(odd)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.integration] if name in SLOW else []) for name in ASKED],
)
@pytest.mark.usefixtures("shared_tracing")
def test_plans(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    frozen: Frozen,
) -> None:
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    Path("drawn.jsonl").write_text("\n".join(map(json.dumps, itertools.islice(drawn(), LINES))))
    for preset, text in preset_texts().items():
        Path(f"{preset}.yaml").write_text(text)
    code = main(["plan", *ASKED[name], "--json"])
    out, err = capsys.readouterr()
    lines = [json.loads(line) for line in out.splitlines()]
    # Beside what is wrong it says how far it is, which differs from machine to machine.
    frozen(f"plan_{name}", {"code": code, "out": lines, "err": err if code else None})
