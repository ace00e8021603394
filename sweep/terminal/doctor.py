"""Owns the check-up of a machine: what a study needs, whether it is there, and what to do if not.

The checks are pure; `examine` gathers what they look at. torch and bitsandbytes are asked in a
child process: importing them takes seconds, and a broken one would take this process down.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from reports import units
from search_spaces.errors import install_extra
from search_spaces.gpus import GIB, match_product
from storage.environment import PACKAGES, fingerprint
from sweep import namesakes
from sweep.child_environment import child_environment
from sweep.paths import runs_directory
from sweep.running.device_info import Card, read_card
from sweep.terminal.console import folded

PROBE = (sys.executable, "-P", "-m", "sweep.training.libraries")
_PROBE_SECONDS = 180.0
"""A cold disk takes most of a minute to import torch."""
_FREE_DISK_BYTES = GIB
_BUSY_SHARE = 0.05
"""More of a GPU's memory than this in use before a study starts is worth a word."""
_DEMO = "`sweep run cpu-demo` runs on the CPU"


@dataclass(frozen=True)
class Finding:
    """One line of the check-up."""

    state: Literal["ok", "note", "fail"]
    what: str
    detail: str
    advice: str = ""
    """What to do; there for everything that fails."""


_SMALL_CARD_BYTES = 12.5 * GIB
_SMALL_CARD = Finding(
    "note",
    "small GPU",
    "Unsloth keeps checkpoints in the host's memory: a 7B model in 4.95 GiB at 12,352 tokens/s, "
    "which takes 5.65 GiB at 11,400 here (8 x 512 on an H200)",
    "with 8 GB, or long rows in 12, it may be the better choice: docs/unsloth.md has the figures",
)


@dataclass(frozen=True)
class Machine:
    """What the checks look at."""

    card: Card | None
    libraries: Mapping[str, Any]
    """What `sweep.training.libraries` answered."""
    versions: Mapping[str, str | None]
    """By package; None where it is not installed."""
    python: str
    runs: Path
    is_writable: bool
    free_disk_bytes: int
    changed_files: tuple[str, ...] = ()
    """Files of our packages that are gone, or not what was installed."""
    sharers: tuple[str, ...] = ()
    """Other distributions that installed something under our packages' names."""


def examine(ask_libraries: Callable[[], Mapping[str, Any]] | None = None) -> Machine:
    """Look at this machine; takes as long as importing torch in a child does."""
    runs = runs_directory()
    nearest = _nearest_existing(runs)
    environment = fingerprint(device="cpu")
    return Machine(
        card=read_card(),
        libraries=(ask_libraries or probe_libraries)(),
        versions=environment["versions"],
        python=environment["python"],
        runs=runs,
        is_writable=os.access(nearest, os.W_OK | os.X_OK),
        free_disk_bytes=shutil.disk_usage(nearest).free,
        changed_files=tuple(namesakes.changed_files()),
        sharers=tuple(namesakes.sharers()),
    )


def probe_libraries(command: tuple[str, ...] = PROBE) -> Mapping[str, Any]:
    """Return what the child says of torch and bitsandbytes; its death is an answer too."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
            check=False,
            # A worker's, so that what is found here is what a study finds.
            env=child_environment(),
        )
    except subprocess.TimeoutExpired:
        return _broken(f"importing it took more than {_PROBE_SECONDS:g} s")
    try:
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, ValueError):
        words = done.stderr.strip().splitlines()
        return _broken(f"exit status {done.returncode}: {words[-1] if words else 'no message'}")


def _broken(reason: str) -> dict[str, Any]:
    return {"torch": None, "cuda": None, "has_cuda": False, "errors": {"torch": reason}}


def _nearest_existing(path: Path) -> Path:
    absolute = path.absolute()
    return next(parent for parent in (absolute, *absolute.parents) if _is_seen(parent))


def _is_seen(path: Path) -> bool:
    """Whether something is there that may be looked at."""
    try:
        return path.exists()
    except OSError:
        return False


def check(machine: Machine) -> tuple[Finding, ...]:
    """Return every finding, what fails included."""
    return (
        Finding("ok", "python", machine.python),
        _installation(machine),
        *_libraries(machine),
        *_packages(machine),
        *_card(machine),
        _disk(machine),
    )


def is_healthy(findings: tuple[Finding, ...]) -> bool:
    """Whether a study can run here, be it only the demo on the CPU."""
    return all(finding.state != "fail" for finding in findings)


def _installation(machine: Machine) -> Finding:
    """Return whether our packages are ours; had one been replaced, nothing would have started."""
    others = " and ".join(machine.sharers)
    if machine.changed_files:
        shown = ", ".join(machine.changed_files[:3])
        more = f" and {len(machine.changed_files) - 3} more" if machine.changed_files[3:] else ""
        return Finding(
            "fail",
            "installation",
            f"{shown}{more}: not what was installed; replaced by {others or 'something else'}",
            namesakes.APART,
        )
    if machine.sharers:
        return Finding(
            "note",
            "installation",
            f"{others} installed files under {', '.join(namesakes.NAMES)} too: "
            "removing or updating it takes files of sweep away",
            namesakes.APART,
        )
    return Finding("ok", "installation", f"its own packages, in {namesakes.ROOT}")


def _libraries(machine: Machine) -> Iterator[Finding]:
    errors = machine.libraries["errors"]
    if "torch" in errors:
        yield Finding(
            "fail",
            "torch",
            errors["torch"],
            "install it again: pip install --force-reinstall torch",
        )
        return
    build = machine.libraries["cuda"]
    kind = f"built for CUDA {build}" if build else "built for the CPU"
    yield Finding("ok", "torch", f"{machine.libraries['torch']}, {kind}")
    if "bitsandbytes" in errors:
        yield Finding(
            "fail",
            "bitsandbytes",
            errors["bitsandbytes"],
            "4-bit training cannot work: pip install --upgrade --force-reinstall bitsandbytes",
        )
    else:
        version = machine.versions.get("bitsandbytes")
        yield Finding("ok", "bitsandbytes", f"{version}, takes a tensor to NF4 and back")


def _packages(machine: Machine) -> Iterator[Finding]:
    known = [p for p in PACKAGES if machine.versions.get(p) and p not in ("torch", "bitsandbytes")]
    yield Finding("ok", "versions", ", ".join(f"{p} {machine.versions[p]}" for p in known))
    if machine.card is not None and machine.versions.get("liger-kernel") is None:
        yield Finding(
            "note",
            "liger-kernel",
            "not installed, so kernels fused-loss and liger cannot run",
            install_extra("gpu"),
        )


def _card(machine: Machine) -> Iterator[Finding]:
    card = machine.card
    if card is None:
        yield _no_card(machine)
        return
    if not machine.libraries["has_cuda"]:
        yield Finding("fail", "GPU", f"{card.product}, and torch cannot use it", _cure(machine))
    else:
        yield Finding(
            "ok",
            "GPU",
            f"{card.product}, {units.gib(card.memory_bytes)}, driver {card.driver or 'unknown'} "
            f"(CUDA up to {card.cuda or 'unknown'})",
        )
    yield _catalogue(card)
    yield _memory(card)
    if card.memory_bytes <= _SMALL_CARD_BYTES:
        yield _SMALL_CARD


def _no_card(machine: Machine) -> Finding:
    if machine.libraries["cuda"] is None:
        advice = f"{_DEMO}; for a GPU, its driver and a CUDA build of torch are needed"
    else:
        advice = f"{_DEMO}; for a GPU, see that `nvidia-smi` finds it and CUDA_VISIBLE_DEVICES"
    return Finding("note", "GPU", "no NVIDIA GPU that the driver shows", advice)


def _cure(machine: Machine) -> str:
    if machine.libraries["cuda"] is None:
        return "this torch is built for the CPU: install a CUDA build from pytorch.org"
    return (
        f"torch is built for CUDA {machine.libraries['cuda']}: update the driver, or install a "
        "torch that is built for an older CUDA"
    )


def _catalogue(card: Card) -> Finding:
    spec = match_product(card.product)
    if spec is None:
        return Finding(
            "note",
            "catalogue",
            f"'{card.product}' is not in it: budget and speed are then less well known",
            "`sweep gpus` lists the GPUs that are",
        )
    return Finding(
        "ok", "catalogue", f"{spec.name}, trainings may take {units.gib(spec.budget_bytes)}"
    )


def _memory(card: Card) -> Finding:
    if card.free_bytes is None:
        shared = ", shared with the host" if card.shares_host_memory else ""
        return Finding(
            "note",
            "GPU memory",
            f"{units.gib(card.memory_bytes)}{shared}; the driver does not tell how much is free",
            "end what else uses it: it takes memory and speed from the trials",
        )
    used = card.memory_bytes - card.free_bytes
    others = ", ".join(
        f"process {process.pid} ({units.gib(process.used_bytes)})" for process in card.processes
    )
    detail = f"{units.gib(card.free_bytes)} of {units.gib(card.memory_bytes)} free"
    if card.processes or used > _BUSY_SHARE * card.memory_bytes:
        return Finding(
            "note",
            "GPU memory",
            f"{detail}; in use by {others or 'processes that are not shown here'}",
            "end them first: they take memory and speed from the trials",
        )
    return Finding("ok", "GPU memory", f"{detail}, no other process")


def _disk(machine: Machine) -> Finding:
    where = f"{machine.runs} ({units.gib(machine.free_disk_bytes)} free)"
    if not machine.is_writable:
        return Finding(
            "fail", "disk", f"{where} cannot be written", "set SWEEP_HOME to a directory that can"
        )
    if machine.free_disk_bytes < _FREE_DISK_BYTES:
        return Finding(
            "fail", "disk", f"{where} is nearly full", "free a gibibyte, or set SWEEP_HOME"
        )
    return Finding("ok", "disk", f"{where} can be written")


def findings_text(findings: tuple[Finding, ...], *, width: int | None = None) -> str:
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
