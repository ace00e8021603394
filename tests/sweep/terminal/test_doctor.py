"""The check-up of a machine: what is found, how bad that is, and what to do."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qlora_sweep.search_spaces.gpus import GIB, find_gpu
from qlora_sweep.sweep.running.device_info import GpuInfo, GpuProcess
from qlora_sweep.sweep.terminal.doctor import (
    InspectedMachine,
    check,
    examine,
    findings_text,
    is_healthy,
    probe_libraries,
    runs_on,
)

A10 = find_gpu("a10")
GPU = GpuInfo(
    A10.product, A10.memory_bytes, A10.memory_bytes, A10.compute_capability, "570.1", "12.8"
)
WORKING = {"torch": "2.13.0", "cuda": "12.8", "has_cuda": True, "errors": {}}
ON_CPU = {"torch": "2.13.0+cpu", "cuda": None, "has_cuda": False, "errors": {}}
BROKEN_BNB = WORKING | {"errors": {"bitsandbytes": "RuntimeError: no kernel image"}}
BROKEN_TORCH = WORKING | {"torch": None, "errors": {"torch": "ImportError: libcudart.so"}}
VERSIONS = {
    "bitsandbytes": "0.50.2",
    "optuna": "5.0.0",
    "liger-kernel": "0.8.5",
    "flash-linear-attention": "0.6.0",
    "triton": "3.6.0",
}
HOPPER = replace(GPU, compute_capability=(9, 0))
LINEAR = "flash-linear-attention"
MACHINE = InspectedMachine(
    gpu=GPU,
    libraries=WORKING,
    versions=VERSIONS,
    python="3.11.7",
    runs=Path("runs"),
    is_writable=True,
    free_disk_bytes=100 * GIB,
)
BUSY = replace(GPU, processes=(GpuProcess(42, GIB),))
WITHOUT_KERNELS = BROKEN_TORCH | {"architectures": ["sm_75", "sm_80", "sm_90", "sm_120"]}
UNTOLD = replace(GPU, free_bytes=None, driver=None, cuda=None, compute_capability=None)
SMALL = replace(GPU, memory_bytes=12 * GIB, free_bytes=12 * GIB)
CHANGED = tuple(f"storage/{name}.py" for name in ("study", "records", "lease", "urls"))


@pytest.mark.parametrize(
    ("changes", "state", "what", "detail"),
    [
        ({}, "ok", "GPU", "NVIDIA A10"),
        ({"libraries": BROKEN_TORCH}, "fail", "torch", "libcudart"),
        ({"libraries": BROKEN_BNB}, "fail", "bitsandbytes", "no kernel image"),
        ({"libraries": ON_CPU}, "fail", "GPU", "torch cannot use it"),
        ({"is_writable": False}, "fail", "disk", "cannot be written"),
        ({"free_disk_bytes": 1000}, "fail", "disk", "nearly full"),
        (
            {"changed_files": CHANGED},
            "fail",
            "installation",
            "lease.py and 1 more: not what was installed",
        ),
        ({"gpu": None, "libraries": ON_CPU}, "note", "GPU", "no NVIDIA GPU"),
        ({"gpu": replace(GPU, product="NVIDIA Z1")}, "note", "catalogue", "NVIDIA Z1"),
        ({"gpu": BUSY}, "note", "GPU memory", "process 42 (1"),
        ({"gpu": replace(GPU, free_bytes=GIB)}, "note", "GPU memory", "not shown here"),
        ({"gpu": UNTOLD}, "note", "GPU memory", "does not tell how much is free"),
        ({"gpu": SMALL}, "note", "small GPU", "Unsloth"),
        ({"gpu": replace(GPU, memory_bytes=48 * GIB)}, "note", "catalogue", "with 48.0"),
        ({"gpu": replace(GPU, compute_capability=(7, 0))}, "note", "old GPU", "CUDA 12.6"),
        ({"versions": {"bitsandbytes": "0.50.2"}}, "note", "liger-kernel", "not installed"),
        ({"versions": {"bitsandbytes": "0.50.2"}}, "note", LINEAR, "not installed"),
        ({"gpu": HOPPER}, "note", LINEAR, "refused with Triton 3.6.0 on Hopper"),
        ({"gpu": HOPPER, "versions": {**VERSIONS, "triton": "3.7.1"}}, "ok", LINEAR, "0.6.0"),
    ],
)
def test_what_is_not_right_says_what_to_do(
    changes: dict[str, Any], state: str, what: str, detail: str
) -> None:
    findings = check(replace(MACHINE, **changes))
    finding = next(finding for finding in findings if finding.what == what)
    assert (finding.state, detail in finding.detail) == (state, True)
    assert bool(finding.advice) == (state != "ok")
    assert finding.advice in findings_text(findings)
    assert is_healthy(findings) == (state != "fail")
    assert changes or {finding.state for finding in findings} == {"ok"}


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import sys; sys.stderr.write('boom'); sys.exit(1)", "exit status 1: boom"),
        ("import os; os.abort()", "exit status -6"),
        ("print('no json')", "exit status 0"),
        (f"print('a warning'); print({json.dumps(json.dumps(WORKING))})", None),
    ],
)
def test_libraries_that_take_their_process_down_are_an_answer(
    program: str, reason: str | None
) -> None:
    answer = probe_libraries((sys.executable, "-c", program))
    assert answer == WORKING if reason is None else reason in answer["errors"]["torch"]


def test_examining_creates_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path / "not" / "there"))
    assert examine(lambda: ON_CPU).is_writable
    assert not (tmp_path / "not").exists()


@pytest.mark.parametrize(
    ("capability", "architectures", "has_kernels"),
    [
        ((6, 0), ("sm_75", "sm_80", "compute_120"), False),
        ((12, 0), ("sm_80", "sm_90"), False),
        ((12, 0), ("sm_80", "compute_90"), True),
        ((12, 1), ("sm_120a",), False),
        ((10, 3), ("sm_100f",), True),
    ],
)
def test_a_build_of_torch_has_kernels_for_a_gpu_or_not(
    capability: tuple[int, int], architectures: tuple[str, ...], has_kernels: bool
) -> None:
    assert runs_on(capability, architectures) is has_kernels


def test_a_torch_without_kernels_for_the_gpu_says_which_one_has_them() -> None:
    for capability, advice in (((6, 0), "CUDA 12.6"), ((13, 0), "newer CUDA")):
        gpu = replace(GPU, compute_capability=capability)
        findings = check(replace(MACHINE, gpu=gpu, libraries=WITHOUT_KERNELS))
        finding = next(f for f in findings if f.what == "torch" and f.state == "fail")
        assert advice in finding.advice
