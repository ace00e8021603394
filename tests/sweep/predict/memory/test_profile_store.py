"""Where profiles come from when a whole space's are wanted: one process or several, or none."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.errors import EnvironmentFault
from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.sweep.predict.memory import profile_store
from qlora_sweep.sweep.predict.memory.predictor import TracingPredictor
from qlora_sweep.sweep.predict.memory.profile_store import Traced, TracingChildren
from qlora_sweep.sweep.predict.memory.profiles import Structure
from tests.sweep.predict.memory.imagined_profile import MODEL, ImaginedTracer
from tests.sweep.shared_tracing import trace
from tests.sweep.test_processes import ends_soon
from tests.tables import cases

SPACE = [
    TrialConfig(upcast_fp32=upcast, kernels=kernels, target_modules=targets, seq_len=length)
    for upcast in (True, False)
    for kernels in ("hf", "fused-loss", "liger")
    for targets in ("qv", "attention")
    for length in (256, 512)
]
STRUCTURES = 12


def test_a_whole_space_is_traced_ahead_and_then_predicted_without_tracing(tmp_path: Path) -> None:
    tracer, told = ImaginedTracer(), []
    predictor = TracingPredictor(MODEL, cache_dir=tmp_path, tracer=tracer)
    predictor.predict_all(SPACE, on_progress=lambda done, of: told.append((done, of)))
    assert told == [(done, STRUCTURES) for done in range(STRUCTURES + 1)]
    for config in SPACE:
        predictor.predict(config)
    assert len(tracer.asked) == STRUCTURES
    # What is kept is neither traced nor told of.
    again = TracingPredictor(MODEL, cache_dir=tmp_path, tracer=tracer)
    again.predict_all(SPACE, on_progress=lambda *counts: told.append(counts))
    assert (len(tracer.asked), len(told)) == (STRUCTURES, STRUCTURES + 1)


@pytest.mark.parametrize(
    ("setting", "values", "structures"),
    cases(
        """
        # Recomputed layers and others are of two kinds, and so are those of a mixed base.
        checkpoint_fraction | [1.0] | 1
        checkpoint_fraction | [0.0, 0.25, 1.0] | 2
        quantized_fraction | [1.0, 0.75, 0.5, 0.25] | 2
        """
    ),
)
def test_kinds_of_layers_are_traced_where_a_configuration_has_them(
    tmp_path: Path, setting: str, values: list[float], structures: int
) -> None:
    tracer = ImaginedTracer()
    predictor = TracingPredictor(MODEL, cache_dir=tmp_path, tracer=tracer)
    predictor.predict_all([TrialConfig(**{setting: value}) for value in values])
    assert len(tracer.asked) == structures


def test_masks_are_traced_ahead_for_the_lengths_that_need_them(tmp_path: Path) -> None:
    tracer = ImaginedTracer(window=400)
    predictor = TracingPredictor(MODEL, cache_dir=tmp_path, tracer=tracer)
    predictor.predict_all(SPACE)
    assert [structure.is_long for structure in tracer.asked] == [False] * 12 + [True] * 12
    for config in SPACE:
        predictor.predict(config)
    assert len(tracer.asked) == 2 * STRUCTURES


@pytest.mark.parametrize(("is_same", "traced"), [(True, ["bf16"]), (False, ["bf16", "fp16"])])
def test_fp16_is_traced_only_where_it_is_not_known_to_come_to_the_same(
    tmp_path: Path, is_same: bool, traced: list[str]
) -> None:
    tracer = ImaginedTracer(is_same_in_fp16=is_same)
    for _ in range(2):
        predictor = TracingPredictor(MODEL, cache_dir=tmp_path, tracer=tracer)
        predictor.predict(TrialConfig(compute_dtype="fp16"))
    assert [structure.config.compute_dtype for structure in tracer.asked] == traced


_ECHO = """
import json, os, sys, time
for line in sys.stdin:
    structure = json.loads(line)["structure"]["config"]
    if structure["kernels"] == sys.argv[1]:
        {misbehave}
    time.sleep({seconds})
    print(json.dumps({{"profile": {{"pid": os.getpid(), **structure}}}}), flush=True)
"""


def _children(
    count: int, misbehave: str = "pass", *, seconds: float = 0.0, outlive: bool = False
) -> TracingChildren:
    program = _ECHO.format(misbehave=misbehave, seconds=seconds)
    command = (sys.executable, "-c", program, "liger")
    return TracingChildren(count, command=command, outlive=outlive)


def _structures(count: int, **keys: Any) -> list[Structure]:
    targets = [TrialConfig(target_modules=(f"module_{number}",), **keys) for number in range(count)]
    return [Structure.of(config, is_checkpointed=True) for config in targets]


def _answers(children: TracingChildren, asked: list[Structure]) -> dict[Structure, Traced]:
    return dict(children.trace_all(MODEL, asked))


def test_several_children_share_the_structures_and_are_gone_afterwards() -> None:
    asked = _structures(48)
    children = _children(3, seconds=0.02)
    answers = _answers(children, asked)
    assert set(answers) == set(asked)
    for structure, answer in answers.items():
        assert isinstance(answer, dict)
        assert tuple(answer["target_modules"]) == structure.config.target_modules
    pids = {answer["pid"] for answer in answers.values()}
    assert len(pids) == 3
    assert all(map(ends_soon, pids))


def test_children_that_outlive_a_space_serve_the_next_one_until_they_are_closed() -> None:
    children = _children(1, outlive=True)
    pids = {a["pid"] for _ in range(2) for a in _answers(children, _structures(2)).values()}
    assert len(pids) == 1
    children.close()
    assert all(map(ends_soon, pids))


def test_a_few_structures_are_not_worth_a_further_child() -> None:
    answers = _answers(_children(3), _structures(5))
    assert len({answer["pid"] for answer in answers.values()}) == 1


def test_a_child_that_dies_is_replaced_and_the_others_go_on() -> None:
    fatal = _structures(1, kernels="liger")
    answers = _answers(_children(2, "sys.exit('out of luck')"), [*_structures(30), *fatal])
    faults = [s for s, answer in answers.items() if isinstance(answer, EnvironmentFault)]
    assert faults == fatal
    assert "out of luck" in str(answers[fatal[0]])
    assert len(answers) == 31


def test_children_end_where_nobody_waits_for_their_answers() -> None:
    children = _children(2, seconds=0.01)
    answers = children.trace_all(MODEL, _structures(30))
    _, first = next(answers)
    answers.close()
    assert isinstance(first, dict)
    assert ends_soon(first["pid"])


def test_a_profile_does_not_depend_on_what_was_traced_before(
    tracing_child: TracingChildren,
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 512}
    layers = {"num_hidden_layers": 3, "num_attention_heads": 4}
    model = ModelSpec("small", "directory", {"model_type": "llama", **sizes, **layers})
    configs = [
        TrialConfig(upcast_fp32=False, attention=attention, compute_dtype=dtype)
        for attention in ("sdpa", "eager")
        for dtype in ("bf16", "fp16")
    ]
    asked = [
        Structure.of(config, is_checkpointed=is_checkpointed)
        for config in configs
        for is_checkpointed in (True, False)
    ]
    answers = dict(tracing_child.trace_all(model, asked))
    assert dict(tracing_child.trace_all(model, asked[::-1])) == answers
    shared = [s for s in asked if (twin := s.in_bf16()) and answers[twin]["is_same_in_fp16"]]
    assert shared
    assert all(answers[s] == answers[s.in_bf16()] for s in shared)
    # A mask in fp32 widens the scores before the softmax; without it that sees a 16-bit type.
    eager = [s for s in asked if s.config.attention == "eager"]
    assert not any(answers[s]["is_same_in_fp16"] for s in eager)


# What becomes of a tracing child that does anything but answer: programs of a few lines

ROOT = Path(__file__).parents[4]
STRUCTURE = Structure.of(TrialConfig(), is_checkpointed=True)
ANSWER = "print(json.dumps({'profile': {'pid': os.getpid()}}), flush=True)"
Start = Callable[[str], TracingChildren]


@pytest.fixture
def child_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start children that do so with each question; a second is long enough for any of them."""
    monkeypatch.setattr(profile_store, "_DEADLINE_SECONDS", 1.0)
    started: list[TracingChildren] = []

    def start(program: str) -> TracingChildren:
        whole = (
            f"import json, os, signal, subprocess, sys, time\nfor line in sys.stdin:\n {program}"
        )
        started.append(TracingChildren(1, outlive=True, command=(sys.executable, "-c", whole)))
        return started[-1]

    yield start
    for child in started:
        child.close()


@pytest.mark.parametrize(
    ("program", "said"),
    cases(
        r"""
        os.kill(os.getpid(), signal.SIGSEGV) | it ended with signal SIGSEGV
        subprocess.Popen(['sleep', '600']); os._exit(7) | it ended with exit status 7
        print('no JSON', flush=True) | "is no answer: 'no JSON'"
        os.write(1, b'\xff\xfe\n') | is no answer
        os.kill(os.getpid(), signal.SIGSTOP) | it took too long
        os.close(1); time.sleep(60) | it closed its pipe
        "[os.write(1, b'x' * 65536) for _ in iter(int, 1)]" | is no answer
        """
    ),
)
def test_what_it_does_instead_of_answering_is_told_as_it_was(
    child_of: Start, monkeypatch: pytest.MonkeyPatch, program: str, said: str
) -> None:
    monkeypatch.setattr(profile_store, "_ANSWER_BYTES_MAX", 2**20)
    child, began = child_of(program), time.monotonic()
    with pytest.raises(EnvironmentFault) as told:
        trace(child, MODEL, STRUCTURE)
    assert said in str(told.value)
    assert time.monotonic() - began < 30


def test_what_it_prints_beside_its_answer_keeps_nobody_waiting(child_of: Start) -> None:
    child = child_of(f"[os.write(2, b'x' * 65535 + b'\\n') for _ in range(200)]; {ANSWER}")
    assert trace(child, MODEL, STRUCTURE)["pid"]


def test_a_question_that_nobody_reads_is_not_waited_for_any_longer(child_of: Start) -> None:
    long = Structure.of(TrialConfig(target_modules=("m" * 2**20,)), is_checkpointed=True)
    with pytest.raises(EnvironmentFault, match="took too long"):
        trace(child_of("time.sleep(60)"), MODEL, long)


def test_no_password_nor_gpu_reaches_it(child_of: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    child = child_of("print(json.dumps({'profile': dict(os.environ)}), flush=True)")
    answer = trace(child, MODEL, STRUCTURE)
    assert "PATH" in answer
    assert "hunter2" not in answer.values()
    assert answer["CUDA_VISIBLE_DEVICES"] == ""


def test_a_process_that_cannot_be_started_is_said() -> None:
    child = TracingChildren(1, outlive=True, command=("/no/such/program",))
    with pytest.raises(EnvironmentFault, match=r"cannot be started: .*[Nn]o such file"):
        trace(child, MODEL, STRUCTURE)


def test_the_real_child_ends_with_its_owner_while_it_still_imports() -> None:
    program = (
        "import os, signal\n"
        "from qlora_sweep.sweep.predict.memory.profile_store import TracingChildren\n"
        "from tests.sweep.predict.memory.test_profile_store import MODEL, STRUCTURE, trace\n"
        "children = TracingChildren(1)\n"
        "def end(*_):\n"
        "    print(open(f'/proc/self/task/{os.getpid()}/children').read(), flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
        "signal.signal(signal.SIGALRM, end)\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.5)\n"
        "trace(children, MODEL, STRUCTURE)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, timeout=60, check=False
    )
    assert ends_soon(int(done.stdout)), os.listdir("/proc")
