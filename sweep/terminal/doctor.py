"""The check-up of a machine: what a study needs, whether it is there, and what to do if not.

The checks are pure; `examine` gathers what they look at. torch and bitsandbytes are asked in a
child process: importing them takes seconds, and a broken one would take this process down.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from qlora_sweep.reports import format as units
from qlora_sweep.search_spaces.errors import install_extra
from qlora_sweep.search_spaces.gpus import GIB
from qlora_sweep.search_spaces.recurrent import (
    EXTRA,
    FLASH_LINEAR_ATTENTION,
    LEAST_TRITON_ON_HOPPER,
    SLOWER,
    refused_triton,
)
from qlora_sweep.search_spaces.rules import torch_for
from qlora_sweep.storage.environment import PACKAGES, fingerprint
from qlora_sweep.sweep import installation
from qlora_sweep.sweep.child_environment import child_environment
from qlora_sweep.sweep.paths import runs_directory
from qlora_sweep.sweep.running.device_info import GpuInfo, read_gpu
from qlora_sweep.sweep.terminal.console import folded

PROBE = (sys.executable, "-P", "-m", "qlora_sweep.sweep.training.libraries")
_PROBE_SECONDS = 180.0
"""A cold disk takes most of a minute to import torch."""
_FREE_DISK_BYTES = GIB
_BUSY_SHARE = 0.05
"""More of a GPU's memory than this in use before a study starts is worth a word."""
_SMALL_GPU_BYTES = 12.5 * GIB


@dataclass(frozen=True)
class Finding:
    """One line of the check-up."""

    state: Literal["ok", "note", "fail"]
    what: str
    detail: str
    advice: str = ""
    """What to do; there for everything that fails."""


@dataclass(frozen=True)
class InspectedMachine:
    """What the checks look at."""

    gpu: GpuInfo | None
    libraries: Mapping[str, Any]
    """What `sweep.training.libraries` answered."""
    versions: Mapping[str, str | None]
    """By package; None where it is not installed."""
    python: str
    runs: Path
    is_writable: bool
    free_disk_bytes: int
    changed_files: Sequence[str] = ()
    """Files of sweep that are gone, or not what was installed."""


def examine(ask_libraries: Callable[[], Mapping[str, Any]] | None = None) -> InspectedMachine:
    """Look at this machine; takes as long as importing torch in a child does."""
    runs = runs_directory()
    environment = fingerprint(device="cpu")
    nearest = runs.absolute()
    while not os.path.exists(nearest):
        nearest = nearest.parent
    return InspectedMachine(
        gpu=read_gpu(),
        libraries=(ask_libraries or probe_libraries)(),
        versions=environment["versions"],
        python=environment["python"],
        runs=runs,
        is_writable=os.access(nearest, os.W_OK | os.X_OK),
        free_disk_bytes=shutil.disk_usage(nearest).free,
        changed_files=installation.changed_files(),
    )


def probe_libraries(command: Sequence[str] = PROBE) -> Mapping[str, Any]:
    """Return what the child says of torch and bitsandbytes; its death is an answer too."""
    try:
        # With a worker's variables, so that what is found here is what a study finds.
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
            check=False,
            env=child_environment(),
        )
        with suppress(IndexError, ValueError):
            return dict(json.loads(done.stdout.splitlines()[-1]))
        words = done.stderr.strip().splitlines() or ["no message"]
        reason = f"exit status {done.returncode}: {words[-1]}"
    except subprocess.TimeoutExpired:
        reason = f"importing it took more than {_PROBE_SECONDS:g} s"
    return {"torch": None, "cuda": None, "has_cuda": False, "errors": {"torch": reason}}


def check(machine: InspectedMachine) -> tuple[Finding, ...]:
    """Return every finding, what fails included."""
    findings = [Finding("ok", "python", machine.python), _installation(machine)]
    findings += _libraries(machine)
    findings += _gpu(machine)
    findings.append(_disk(machine))
    return tuple(findings)


def is_healthy(findings: Sequence[Finding]) -> bool:
    """Whether a study can run here, be it only the demo on the CPU."""
    return all(finding.state != "fail" for finding in findings)


def _installation(machine: InspectedMachine) -> Finding:
    """Return whether sweep's own files are what was installed."""
    changed = machine.changed_files
    if not changed:
        return Finding("ok", "installation", f"in {installation.DIRECTORY}")
    files = ", ".join(changed[:3])
    if len(changed) > 3:
        files += f" and {len(changed) - 3} more"
    detail = f"{files}: not what was installed"
    return Finding("fail", "installation", detail, installation.REINSTALL)


def _libraries(machine: InspectedMachine) -> Iterator[Finding]:
    found = machine.libraries
    versions = machine.versions
    errors = found["errors"]
    if "torch" in errors:
        advice = _other_torch(machine) or "install it again: pip install --force-reinstall torch"
        yield Finding("fail", "torch", errors["torch"], advice)
    else:
        kind = f"built for CUDA {found['cuda']}" if found["cuda"] else "built for the CPU"
        yield Finding("ok", "torch", f"{found['torch']}, {kind}")
        if "bitsandbytes" in errors:
            again = "pip install --upgrade --force-reinstall bitsandbytes"
            advice = f"4-bit training cannot work: {again}"
            yield Finding("fail", "bitsandbytes", errors["bitsandbytes"], advice)
        else:
            works = f"{versions.get('bitsandbytes')}, takes a tensor to NF4 and back"
            yield Finding("ok", "bitsandbytes", works)
    known = [p for p in PACKAGES if versions.get(p) and p not in ("torch", "bitsandbytes")]
    yield Finding("ok", "versions", ", ".join(f"{p} {versions[p]}" for p in known))
    if machine.gpu is not None and versions.get("liger-kernel") is None:
        detail = "not installed, so kernels fused-loss and liger cannot run"
        yield Finding("note", "liger-kernel", detail, install_extra("gpu"))
    if machine.gpu is not None:
        yield _linear_attention(machine, machine.gpu)


def _linear_attention(machine: InspectedMachine, gpu: GpuInfo) -> Finding:
    """Return whether hybrid models (Qwen3.5, Qwen3-Next, OLMo Hybrid) find their kernels."""
    has = machine.versions.get(FLASH_LINEAR_ATTENTION)
    if has is None:
        detail = f"not installed: linear attention (Qwen3.5, Qwen3-Next) is then {SLOWER}"
        return Finding("note", FLASH_LINEAR_ATTENTION, detail, install_extra(EXTRA))
    refused = refused_triton(machine.versions.get("triton"), gpu.compute_capability)
    if refused is not None:
        advice = f"pip install --upgrade 'triton>={LEAST_TRITON_ON_HOPPER}'"
        return Finding("note", FLASH_LINEAR_ATTENTION, f"{has}: {refused}", advice)
    return Finding("ok", FLASH_LINEAR_ATTENTION, has)


def _other_torch(machine: InspectedMachine) -> str | None:
    """Return which torch to install where the one that is here has no kernels for the GPU."""
    gpu = machine.gpu
    built = machine.libraries.get("architectures")
    if gpu is None or gpu.compute_capability is None or not built:
        return None
    if runs_on(gpu.compute_capability, built):
        return None
    needed = torch_for(gpu.compute_capability)
    has = f"torch has kernels for {', '.join(built)} alone"
    return f"{has}: {needed or 'install one that is built for a newer CUDA, from pytorch.org'}"


def runs_on(capability: tuple[int, int], architectures: Sequence[str]) -> bool:
    """Whether a build of torch has kernels for a GPU.

    Those of one architecture run on later ones of its major version, what is still to be compiled
    (``compute_90``) on all later ones, and an ``a`` behind the number means that GPU alone.

    Args:
        capability: of the GPU.
        architectures: as `torch.cuda.get_arch_list` has them: ``sm_86``, ``compute_120``.
    """
    for name in architectures:
        kind, _, number = name.partition("_")
        digits = number.rstrip("af")
        built = (int(digits[:-1]), int(digits[-1]))
        is_later = built <= capability and (kind == "compute" or built[0] == capability[0])
        if built == capability or (is_later and not number.endswith("a")):
            return True
    return False


def _gpu(machine: InspectedMachine) -> Iterator[Finding]:
    gpu = machine.gpu
    cuda = machine.libraries["cuda"]
    if gpu is None:
        needed = "see that `nvidia-smi` finds it and CUDA_VISIBLE_DEVICES"
        if cuda is None:
            needed = "its driver and a CUDA build of torch are needed"
        advice = f"`sweep run cpu-demo` runs on the CPU; for a GPU, {needed}"
        yield Finding("note", "GPU", "no NVIDIA GPU that the driver shows", advice)
        return
    if not machine.libraries["has_cuda"]:
        advice = "this torch is built for the CPU: install a CUDA build from pytorch.org"
        if cuda is not None:
            older = "install a torch that is built for an older CUDA"
            advice = f"torch is built for CUDA {cuda}: update the driver, or {older}"
        yield Finding("fail", "GPU", f"{gpu.product}, and torch cannot use it", advice)
    else:
        driver = f"driver {gpu.driver or 'unknown'} (CUDA up to {gpu.cuda or 'unknown'})"
        detail = f"{gpu.product}, {units.gib(gpu.memory_bytes)}, {driver}"
        yield Finding("ok", "GPU", detail)
    if (spec := gpu.known) is None:
        detail = f"{gpu.size_and_product} is not in it: budget and speed are then less well known"
        yield Finding("note", "catalogue", detail, "`sweep gpus` lists the GPUs that are")
    else:
        budget = units.gib(spec.budget_bytes)
        yield Finding("ok", "catalogue", f"{spec.name}, trainings may take {budget}")
    if builds := torch_for(gpu.compute_capability):
        yield Finding("note", "old GPU", builds, "stay with such a build when you update torch")
    yield _gpu_memory(gpu)
    if gpu.memory_bytes <= _SMALL_GPU_BYTES:
        detail = "in 12 GB or less Unsloth, which keeps checkpoints in the host's memory, fits more"
        yield Finding("note", "small GPU", detail, "docs/unsloth.md has the figures")


def _gpu_memory(gpu: GpuInfo) -> Finding:
    whole = units.gib(gpu.memory_bytes)
    advice = "stop what else uses it: it takes memory and speed from the trials"
    if gpu.free_bytes is None:
        if gpu.shares_host_memory:
            whole += ", shared with the host"
        detail = f"{whole}; the driver does not tell how much is free"
        return Finding("note", "GPU memory", detail, advice)
    free = f"{units.gib(gpu.free_bytes)} of {whole} free"
    if gpu.processes or gpu.memory_bytes - gpu.free_bytes > _BUSY_SHARE * gpu.memory_bytes:
        others = (f"process {one.pid} ({units.gib(one.used_bytes)})" for one in gpu.processes)
        detail = f"{free}; in use by {', '.join(others) or 'processes that are not shown here'}"
        return Finding("note", "GPU memory", detail, advice)
    return Finding("ok", "GPU memory", f"{free}, no other process")


def _disk(machine: InspectedMachine) -> Finding:
    where = f"{machine.runs} ({units.gib(machine.free_disk_bytes)} free)"
    if not machine.is_writable:
        advice = "set SWEEP_HOME to a directory that can"
        return Finding("fail", "disk", f"{where} cannot be written", advice)
    if machine.free_disk_bytes < _FREE_DISK_BYTES:
        advice = "free a gibibyte, or set SWEEP_HOME"
        return Finding("fail", "disk", f"{where} is nearly full", advice)
    return Finding("ok", "disk", f"{where} can be written")


def findings_text(findings: Sequence[Finding], *, width: int | None = None) -> str:
    """Return the check-up, a line per finding and the advice under it, within so many columns."""
    named = max(len(finding.what) for finding in findings)
    start = len("note") + 2 + named + 2
    lines = []
    for finding in findings:
        line = f"{finding.state:<4}  {finding.what:<{named}}  {finding.detail}"
        lines.append(folded(line, width, indent=start))
        if finding.advice:
            lines.append(folded(f"{'':<{start}}-> {finding.advice}", width, indent=len("-> ")))
    return "\n".join(lines)
