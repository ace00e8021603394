from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from search_spaces.gpus import GIB, find_gpu
from sweep.running.device_info import Card, CardProcess
from sweep.terminal.doctor import (
    Finding,
    Machine,
    check,
    examine,
    findings_text,
    is_healthy,
    probe_libraries,
)

WORKING = {"torch": "2.13.0", "cuda": "12.8", "has_cuda": True, "errors": {}}
ON_CPU = {"torch": "2.13.0+cpu", "cuda": None, "has_cuda": False, "errors": {}}
A10 = find_gpu("a10")


def a_card(**changes: Any) -> Card:
    values: dict[str, Any] = {
        "product": A10.product,
        "memory_bytes": A10.memory_bytes,
        "free_bytes": A10.memory_bytes,
        "compute_capability": A10.compute_capability,
        "driver": "570.1",
        "cuda": "12.8",
    }
    return Card(**(values | changes))


def a_machine(**changes: Any) -> Machine:
    values: dict[str, Any] = {
        "card": a_card(),
        "libraries": WORKING,
        "versions": {"bitsandbytes": "0.50.2", "optuna": "5.0.0", "liger-kernel": "0.8.5"},
        "python": "3.11.7",
        "runs": Path("runs"),
        "is_writable": True,
        "free_disk_bytes": 100 * GIB,
    }
    return Machine(**(values | changes))


def found(machine: Machine, what: str) -> Finding:
    return next(finding for finding in check(machine) if finding.what == what)


def test_a_machine_with_everything_is_healthy_without_a_word_of_advice() -> None:
    findings = check(a_machine())
    assert is_healthy(findings)
    assert {finding.state for finding in findings} == {"ok"}
    assert "NVIDIA A10" in findings_text(findings)


@pytest.mark.parametrize(("gib", "is_small"), [(8, True), (12, True), (16, False), (24, False)])
def test_owners_of_small_cards_are_told_what_may_serve_them_better(
    gib: int, is_small: bool
) -> None:
    card = a_card(memory_bytes=gib * GIB, free_bytes=gib * GIB)
    findings = check(a_machine(card=card))
    assert any("Unsloth" in finding.detail for finding in findings) is is_small
    assert is_healthy(findings)


def test_a_machine_without_a_gpu_can_run_the_demo_and_is_told_so() -> None:
    findings = check(a_machine(card=None, libraries=ON_CPU))
    assert is_healthy(findings)
    assert "cpu-demo" in found(a_machine(card=None, libraries=ON_CPU), "GPU").advice


BROKEN_BNB = WORKING | {"errors": {"bitsandbytes": "RuntimeError: no kernel image"}}
BROKEN_TORCH = WORKING | {"torch": None, "errors": {"torch": "ImportError: libcudart.so"}}


@pytest.mark.parametrize(
    ("changes", "what", "detail"),
    [
        ({"libraries": BROKEN_TORCH}, "torch", "libcudart"),
        ({"libraries": BROKEN_BNB}, "bitsandbytes", "no kernel image"),
        ({"libraries": WORKING | {"has_cuda": False}}, "GPU", "torch cannot use it"),
        ({"libraries": ON_CPU}, "GPU", "torch cannot use it"),
        ({"is_writable": False}, "disk", "cannot be written"),
        ({"free_disk_bytes": 1000}, "disk", "nearly full"),
    ],
)
def test_what_fails_says_what_to_do(changes: dict[str, Any], what: str, detail: str) -> None:
    machine = a_machine(**changes)
    finding = found(machine, what)
    assert finding.state == "fail"
    assert detail in finding.detail
    assert finding.advice
    assert finding.advice in findings_text(check(machine))
    assert not is_healthy(check(machine))


@pytest.mark.parametrize(
    ("changes", "what", "detail"),
    [
        ({"card": a_card(product="NVIDIA Z1")}, "catalogue", "NVIDIA Z1"),
        (
            {"card": a_card(processes=(CardProcess(pid=42, used_bytes=GIB),))},
            "GPU memory",
            "process 42 (1.00 GiB)",
        ),
        ({"card": a_card(free_bytes=GIB)}, "GPU memory", "not shown here"),
        ({"versions": {"bitsandbytes": "0.50.2"}}, "liger-kernel", "not installed"),
    ],
)
def test_what_is_only_worth_a_note_does_not_make_a_machine_unfit(
    changes: dict[str, Any], what: str, detail: str
) -> None:
    machine = a_machine(**changes)
    finding = found(machine, what)
    assert finding.state == "note"
    assert detail in finding.detail
    assert finding.advice
    assert is_healthy(check(machine))


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import sys; sys.stderr.write('boom'); sys.exit(1)", "exit status 1: boom"),
        ("import os; os.abort()", "exit status -6"),
        ("print('no json')", "exit status 0"),
    ],
)
def test_libraries_that_take_their_process_down_are_an_answer(program: str, reason: str) -> None:
    answer = probe_libraries((sys.executable, "-c", program))
    assert reason in answer["errors"]["torch"]


def test_libraries_are_asked_in_a_child() -> None:
    program = f"print('a warning'); print({json.dumps(json.dumps(WORKING))})"
    assert probe_libraries((sys.executable, "-c", program)) == WORKING


def test_examining_creates_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path / "not" / "there"))
    machine = examine(lambda: ON_CPU)
    assert machine.is_writable
    assert not (tmp_path / "not").exists()


def test_a_card_of_which_little_is_told_is_described_all_the_same() -> None:
    card = a_card(
        free_bytes=None, driver=None, cuda=None, compute_capability=None, shares_host_memory=True
    )
    machine = a_machine(card=card)
    assert is_healthy(check(machine))
    assert "driver unknown (CUDA up to unknown)" in found(machine, "GPU").detail
    memory = found(machine, "GPU memory")
    assert "shared with the host" in memory.detail
    assert "does not tell how much is free" in memory.detail


def test_files_that_another_distribution_replaced_are_named_with_what_to_do() -> None:
    changed = tuple(f"storage/{name}.py" for name in ("study", "records", "lease", "urls"))
    machine = a_machine(changed_files=changed, sharers=("blobs 1.2",))
    finding = found(machine, "installation")
    assert finding.state == "fail"
    assert "storage/study.py" in finding.detail
    assert "and 1 more" in finding.detail
    assert "blobs 1.2" in finding.detail
    assert "python -m venv" in finding.advice


def test_a_distribution_that_shares_a_name_is_a_note_as_long_as_nothing_is_replaced() -> None:
    machine = a_machine(sharers=("blobs 1.2",))
    assert found(machine, "installation").state == "note"
    assert "blobs 1.2" in found(machine, "installation").detail
    assert is_healthy(check(machine))


def test_a_checkup_is_folded_under_what_it_found() -> None:
    finding = Finding("note", "GPU", "no NVIDIA GPU that the driver shows", "install " * 12)
    lines = findings_text((finding,), width=50).splitlines()
    assert lines[0] == "note  GPU  no NVIDIA GPU that the driver shows"
    assert lines[1].startswith(" " * 11 + "-> install")
    assert all(line.startswith(" " * 14 + "install") for line in lines[2:])
    assert max(map(len, lines)) <= 50
