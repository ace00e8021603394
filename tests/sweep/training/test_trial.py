"""One real training trial on the CPU."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from accelerate.state import PartialState

from search_spaces.config import TrialConfig
from search_spaces.gpus import GIB
from search_spaces.space import StepBudget
from storage.records import (
    RETRYABLE,
    Diverged,
    Ineffective,
    Invalid,
    Measured,
    OutOfMemory,
    PrunedSlow,
    Stage,
)
from sweep.training.adapters import Attached, attached
from sweep.training.device import CpuDevice, Mark, Memory, bytes_beyond
from sweep.training.messages import Progress
from sweep.training.meter import flops_per_token, mean_step_seconds
from sweep.training.model import BaseModel
from sweep.training.proof import StepEvidence, ineffective
from sweep.training.step import TrainingLoop
from tests.sweep.training.tiny import BRIEF, LAYERS, tiny_base, tiny_config, trial_on


def measured(config: TrialConfig) -> Measured:
    with tiny_base(config) as base:
        outcome = trial_on(base, config).run()
    assert isinstance(outcome, Measured)
    return outcome


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"checkpoint_fraction": 0.0},
        {"checkpoint_fraction": 0.5},
        {"upcast_fp32": False},
        {"quantization": "fp4", "double_quant": False},
        {"quantization": "none", "double_quant": False},
        {"quantized_fraction": 0.5},
        {"compute_dtype": "fp32"},
        {"attention": "eager"},
        {"optimizer": "adamw_torch_fused"},
        {"lora_dropout": 0.1, "target_modules": "all-linear"},
        {"effective_batch_size": 8},
    ],
    ids=lambda knobs: ",".join(f"{key}={value}" for key, value in knobs.items()) or "recipe",
)
def test_every_knob_the_cpu_has_is_trained_for_real(knobs: dict[str, object]) -> None:
    config = tiny_config(**knobs)
    measurement = measured(config).measurement
    rate = config.tokens_per_step / measurement.step_seconds
    assert measurement.tokens_per_second == pytest.approx(rate)
    assert measurement.steps_measured == 6
    assert measurement.peak_allocated_bytes > 0
    # Random tokens under a random head: the loss is near that of a uniform guess.
    assert measurement.final_loss == pytest.approx(6.24, abs=0.5)


def test_the_same_configuration_peaks_at_the_same_byte_every_time() -> None:
    config = tiny_config()
    with tiny_base(config) as base:
        peaks = {_peak(base, config), _peak(base, config)}
        larger = _peak(base, tiny_config(micro_batch_size=8))
        peaks.add(_peak(base, config))
    assert len(peaks) == 1
    assert larger > peaks.pop()


def _peak(base: BaseModel, config: TrialConfig) -> int:
    outcome = trial_on(base, config, steps=BRIEF).run()
    assert isinstance(outcome, Measured)
    return outcome.measurement.peak_allocated_bytes


def test_peak_memory_is_linear_in_the_micro_batch() -> None:
    config = tiny_config()
    with tiny_base(config) as base:
        sizes = [_peak(base, tiny_config(micro_batch_size=size)) for size in (8, 16, 24)]
    assert sizes[2] - sizes[1] == pytest.approx(sizes[1] - sizes[0], rel=0.01)


def test_checkpointing_trades_memory() -> None:
    fractions = (0.0, 0.5, 1.0)
    with tiny_base(tiny_config()) as base:
        peaks = [
            _peak(base, tiny_config(micro_batch_size=16, seq_len=64, checkpoint_fraction=f))
            for f in fractions
        ]
    assert peaks[0] > peaks[1] > peaks[2]


def test_a_trial_that_is_told_to_stop_keeps_what_it_measured() -> None:
    config = tiny_config()
    beats: list[Progress] = []

    def stop_at_third(beat: Progress) -> bool:
        beats.append(beat)
        return beat.phase == "measure" and beat.tokens_per_second is not None and beat.step == 3

    with tiny_base(config) as base:
        outcome = trial_on(base, config, report=stop_at_third).run()
    assert isinstance(outcome, PrunedSlow)
    assert outcome.measurement.steps_measured == 3
    phases = [beat.phase for beat in beats]
    assert list(dict.fromkeys(phases)) == ["attach", "warmup", "measure", "detach"]


def test_a_loss_that_is_not_finite_is_diverged_and_never_fast() -> None:
    config = tiny_config()
    with tiny_base(config) as base:
        base.model.model.norm.weight.data.fill_(float("nan"))
        outcome = trial_on(base, config).run()
    assert isinstance(outcome, Diverged)
    assert outcome.step == 0


def test_targets_the_architecture_lacks_are_invalid() -> None:
    config = tiny_config(target_modules=["c_attn"])
    with tiny_base(config) as base:
        outcome = trial_on(base, config).run()
    assert isinstance(outcome, Invalid)
    assert "c_attn" in outcome.detail


class _Failing(CpuDevice):
    """A device that fails at a chosen mark."""

    def __init__(self, error: Exception, *, at: int) -> None:
        super().__init__()
        self._error, self._left = error, at

    def mark(self) -> Mark:
        self._left -= 1
        if self._left == 0:
            raise self._error
        return super().mark()


AFTER_FIRST_MICRO_STEP = 2


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes"),
        RuntimeError("std::bad_alloc"),
        MemoryError(),
    ],
    ids=["allocator", "c++", "python"],
)
def test_every_way_of_running_out_of_memory_is_a_result(error: Exception) -> None:
    config = tiny_config()
    with tiny_base(config) as base:
        device = _Failing(error, at=AFTER_FIRST_MICRO_STEP)
        outcome = trial_on(base, config, device=device).run()
        again = trial_on(base, config, steps=BRIEF).run()
    assert isinstance(outcome, OutOfMemory)
    assert outcome.stage == "optimizer"
    assert outcome.requested_bytes in (None, 64)
    assert isinstance(again, Measured)


class OutOfResources(Exception):  # noqa: N818 - Triton's name
    """What Triton raises where a kernel wants more shared memory than a block may have."""


@pytest.mark.parametrize(("compiled", "knob"), [(True, "compile"), (False, "attention")])
def test_a_kernel_that_wants_too_much_shared_memory_is_no_out_of_memory(
    compiled: bool, knob: str
) -> None:
    error = OutOfResources("out of resource: shared memory, Required: 147456")
    config = tiny_config(compile=compiled)
    with tiny_base(config) as base:
        outcome = trial_on(base, config, device=_Failing(error, at=AFTER_FIRST_MICRO_STEP)).run()
    assert isinstance(outcome, Ineffective)
    assert outcome.knob == knob
    assert outcome.verdict not in RETRYABLE


def test_an_error_that_is_not_memory_is_not_called_memory() -> None:
    config = tiny_config()
    device = _Failing(RuntimeError("CUDA error: an illegal memory access"), at=3)
    with tiny_base(config) as base, pytest.raises(RuntimeError, match="illegal"):
        trial_on(base, config, device=device).run()


class _Breaking(CpuDevice):
    """A device that breaks in a phase of its own."""

    def __init__(self, call: str) -> None:
        super().__init__()
        self._call = call
        self._is_trained = False

    def release(self) -> None:
        self._break_at("detach")

    def enter(self, stage: Stage) -> None:
        self._break_at("warmup")

    def _break_at(self, phase: str) -> None:
        if phase == self._call:
            raise RuntimeError("CUDA error: the launch failed")


@pytest.mark.parametrize("phase", ["warmup", "detach"])
def test_a_trial_knows_in_which_phase_it_failed(phase: str) -> None:
    config = tiny_config()
    with tiny_base(config) as base:
        trial = trial_on(base, config, device=_Breaking(phase))
        with pytest.raises(RuntimeError, match="launch"):
            trial.run()
    assert trial.phase == phase


def test_a_trial_knows_that_measuring_failed() -> None:
    config = tiny_config()

    def fail_at_third(beat: Progress) -> bool:
        if beat.phase == "measure" and beat.step == 3:
            raise RuntimeError("CUDA error: the launch failed")
        return False

    with tiny_base(config) as base:
        trial = trial_on(base, config, report=fail_at_third)
        with pytest.raises(RuntimeError, match="launch"):
            trial.run()
    assert trial.phase == "measure"


def test_a_peak_above_the_budget_does_not_fit_and_one_at_the_budget_does() -> None:
    config = tiny_config()
    with tiny_base(config) as base:
        # The first trial of a process also pays for what libraries make once, as a rehearsal does.
        _peak(base, config)
        peak = _peak(base, config)
        at, above, least = (
            trial_on(base, config, budget_bytes=budget, steps=BRIEF).run()
            for budget in (peak, peak - 1, 1)
        )
    assert isinstance(at, Measured)
    assert isinstance(above, OutOfMemory)
    assert above.peak_allocated_bytes == peak
    assert above.stage in ("forward", "backward")
    assert f"{peak:,} bytes, over the budget of {peak - 1:,} bytes" in above.detail
    assert isinstance(least, OutOfMemory)
    assert least.stage == "load"


@pytest.mark.parametrize(
    ("knobs", "stage"),
    [
        ({"micro_batch_size": 8, "checkpoint_fraction": 0.0}, "backward"),
        ({"micro_batch_size": 1, "seq_len": 8, "lora_rank": 128}, "optimizer"),
    ],
)
def test_the_stage_of_the_peak_is_where_it_was(knobs: dict[str, object], stage: str) -> None:
    config = tiny_config(**knobs)
    device = CpuDevice()
    with tiny_base(config) as base:
        trial_on(base, config, device=device, steps=BRIEF).run()
    assert device.memory().peak_stage == stage


class _Spilling(CpuDevice):
    """A device whose driver put a part of the trial into the host's memory."""

    def memory(self) -> Memory:
        return replace(super().memory(), spilled_bytes=3 * 2**30)


def test_a_trial_that_spilled_into_the_hosts_memory_does_not_fit() -> None:
    config = tiny_config()
    with tiny_base(config) as base:
        outcome = trial_on(base, config, device=_Spilling()).run()
    assert isinstance(outcome, OutOfMemory)
    assert "host's memory" in outcome.detail


def test_what_was_reserved_beyond_the_cards_room_was_spilled() -> None:
    assert bytes_beyond(20 * GIB, 22 * GIB) == 0
    assert bytes_beyond(22 * GIB + 2**20, 22 * GIB) == 0
    assert bytes_beyond(25 * GIB, 22 * GIB) == 3 * GIB


class _Shrinking(CpuDevice):
    """A device of which others take more and more, from a chosen look on."""

    def __init__(self, *rooms: int) -> None:
        super().__init__()
        self._rooms = list(rooms)

    def room_bytes(self) -> int | None:
        return self._rooms.pop(0) if len(self._rooms) > 1 else self._rooms[0]


@pytest.mark.parametrize(
    ("rooms", "is_flagged"),
    [
        ((80 * GIB, 80 * GIB, 80 * GIB), False),
        ((80 * GIB, 80 * GIB, 79 * GIB), True),
        # The libraries' own kernels, loaded with the first steps.
        ((80 * GIB, 80 * GIB - GIB // 2, 80 * GIB - GIB // 2), False),
        ((80 * GIB, 70 * GIB, 70 * GIB), True),
        ((80 * GIB, 81 * GIB, 81 * GIB), False),
    ],
    ids=["quiet", "measuring", "kernels", "warming", "left"],
)
def test_memory_that_others_take_meanwhile_is_a_neighbours(
    rooms: tuple[int, ...], is_flagged: bool
) -> None:
    config = tiny_config()
    with tiny_base(config) as base:
        outcome = trial_on(base, config, device=_Shrinking(*rooms), steps=BRIEF).run()
    assert isinstance(outcome, Measured)
    assert ("neighbour" in outcome.measurement.flags) is is_flagged


@pytest.mark.parametrize(
    ("rooms", "flags"),
    [((80 * GIB, 10 * GIB), ("neighbour",)), ((80 * GIB, 60 * GIB), ()), ((10 * GIB,), ())],
    ids=["robbed", "enough left", "nobody came"],
)
def test_memory_that_ran_out_because_others_held_it_is_flagged(
    rooms: tuple[int, ...], flags: tuple[str, ...]
) -> None:
    class Full(_Shrinking, _Failing):
        def __init__(self) -> None:
            _Failing.__init__(self, MemoryError(), at=AFTER_FIRST_MICRO_STEP)
            self._rooms = list(rooms)

    config = tiny_config()
    with tiny_base(config) as base:
        outcome = trial_on(base, config, device=Full(), budget_bytes=20 * GIB).run()
    assert isinstance(outcome, OutOfMemory)
    assert outcome.flags == flags


ACCUMULATING = {"micro_batch_size": 2, "effective_batch_size": 16}


def test_two_micro_steps_have_the_peak_of_a_whole_accumulation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # This process's own seconds: other processes take as much of the clock's as they like.
    own = SimpleNamespace(perf_counter=time.process_time)
    monkeypatch.setattr("sweep.training.device.time", own)
    monkeypatch.setattr("sweep.training.trial.time", own)
    config = tiny_config(**ACCUMULATING)
    with tiny_base(config) as base:
        # Processors shared with others are slower now and then; a mistake shows always.
        for _ in range(3):
            derived, real = (trial_on(base, config, micro_steps_max=most).run() for most in (2, 8))
            assert isinstance(derived, Measured)
            assert isinstance(real, Measured)
            short, whole = derived.measurement, real.measurement
            if short.step_seconds == pytest.approx(whole.step_seconds, rel=0.5):
                break
    assert short.peak_allocated_bytes == whole.peak_allocated_bytes
    assert short.step_seconds == pytest.approx(whole.step_seconds, rel=0.5)
    assert "accumulation_extrapolated" in short.flags
    assert "accumulation_extrapolated" not in whole.flags
    assert short.tokens_per_second == pytest.approx(config.tokens_per_step / short.step_seconds)
    # Seconds spent are those of the micro-steps that were done.
    assert short.measured_seconds < 0.5 * short.step_seconds * short.steps_measured
    assert whole.measured_seconds == pytest.approx(
        whole.step_seconds * whole.steps_measured, rel=0.5
    )


@pytest.mark.parametrize(
    ("ended", "micro_steps", "seconds"),
    [
        ([1.0], 1, 1.0),
        ([1.0, 2.5], 2, 2.5),
        ([1.0, 2.5], 16, 15 * 1.0 + 1.5),
        ([1.0, 2.0, 3.5], 16, 15 * 1.0 + 1.5),
    ],
)
def test_the_micro_step_with_the_optimizer_is_counted_once(
    ended: list[float], micro_steps: int, seconds: float
) -> None:
    assert mean_step_seconds(ended, micro_steps=micro_steps) == pytest.approx(seconds)


def test_a_training_on_the_cpu_never_asks_whether_a_card_is_there() -> None:
    config = tiny_config()
    with tiny_base(config) as base, attached(base, config) as attachment:
        TrainingLoop(attachment, config, seed=0).step()
        assert PartialState().device.type == "cpu"
        assert PartialState()._cpu


@pytest.mark.parametrize(
    ("compiled", "expected"), [(True, Ineffective), (False, None)], ids=["compiled", "eager"]
)
def test_a_compiler_that_gives_up_is_not_a_crash(
    compiled: bool, expected: type[Ineffective] | None
) -> None:
    error = AssertionError("\n\nfrom user code:\n   File modeling.py, line 222")
    config = tiny_config(compile=compiled)
    with tiny_base(config) as base:
        trial = trial_on(base, config, device=_Failing(error, at=3))
        if expected is None:
            with pytest.raises(AssertionError):
                trial.run()
        else:
            assert isinstance(trial.run(), expected)


def test_measuring_stops_at_the_step_budget_and_says_that_it_is_noisy() -> None:
    config = tiny_config()
    steps = StepBudget(
        warmup_min=1, warmup_max=1, measured_min=6, measured_max=7, relative_interval=1e-9
    )
    with tiny_base(config) as base:
        outcome = trial_on(base, config, steps=steps).run()
    assert isinstance(outcome, Measured)
    assert outcome.measurement.steps_measured == 7
    assert "noisy" in outcome.measurement.flags


def test_few_steps_have_no_interval_and_are_noisy() -> None:
    config = tiny_config()
    steps = StepBudget(
        warmup_min=1, warmup_max=1, measured_min=2, measured_max=3, relative_interval=1e-9
    )
    with tiny_base(config) as base:
        outcome = trial_on(base, config, steps=steps).run()
    assert isinstance(outcome, Measured)
    assert outcome.measurement.steps_measured == 3
    assert outcome.measurement.step_seconds_ci95 is None
    assert "noisy" in outcome.measurement.flags


def test_a_knob_that_did_nothing_is_found_out() -> None:
    config = tiny_config(checkpoint_fraction=1.0)
    with tiny_base(config) as base, attached(base, config) as attachment:
        loop = TrainingLoop(attachment, config, seed=0)
        attachment.layers[0].gradient_checkpointing = False
        loop.step()
        fault = ineffective(config, StepEvidence(loop))
    assert isinstance(fault, Ineffective)
    assert fault.knob == "checkpoint_fraction"
    assert f"{LAYERS - 1} of {LAYERS} layers" in fault.detail


@pytest.mark.parametrize(
    ("ran", "asked", "knob"),
    [
        ({}, {"quantization": "fp4"}, "quantization"),
        ({}, {"double_quant": False}, "double_quant"),
        ({}, {"kernels": "liger"}, "kernels"),
        ({}, {"compile": True}, "compile"),
        ({"quantization": "none", "double_quant": False}, {}, "quantization"),
        ({"optimizer": "adamw_torch_fused", "lora_rank": 64}, {"lora_rank": 64}, "optimizer"),
    ],
)
def test_a_run_that_is_not_what_was_asked_is_ineffective(
    ran: dict[str, object], asked: dict[str, object], knob: str
) -> None:
    config = tiny_config(**ran)
    with tiny_base(config) as base, attached(base, config) as attachment:
        loop = TrainingLoop(attachment, config, seed=0)
        loop.step()
        fault = ineffective(tiny_config(**asked), StepEvidence(loop))
        honest = ineffective(config, StepEvidence(loop))
    assert isinstance(fault, Ineffective)
    assert fault.knob == knob
    assert honest is None


def test_model_flops_are_four_per_frozen_and_six_per_adapter_weight() -> None:
    config = tiny_config(lora_rank=8, target_modules=["q_proj"])
    with tiny_base(config) as base, attached(base, config) as attachment:
        assert isinstance(attachment, Attached)
        flops = flops_per_token(attachment, base.model.config, seq_len=32)
    matrices = LAYERS * (128 * 128 * 2 + 128 * 64 * 2 + 3 * 128 * 256) + 512 * 128
    adapters = LAYERS * 8 * 256
    assert flops == 4 * matrices + 6 * adapters + 6 * LAYERS * 32 * 128


class _LateMark(Mark):
    """A mark that is passed when somebody has waited for it, as a busy GPU's."""

    def __init__(self, log: list[str], name: str) -> None:
        super().__init__()
        self._log, self._name, self._is_passed = log, name, False

    def is_passed(self) -> bool:
        return self._is_passed

    def wait(self) -> None:
        if not self._is_passed:
            self._log.append(f"wait {self._name}")
        self._is_passed = True


class _Behind(CpuDevice):
    """A device that is never done before it is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []
        self._marks = 0

    def mark(self) -> Mark:
        # Of each step: where it begins, where its only micro-step ends, and behind its loss.
        step, part = divmod(self._marks, 3)
        self._marks += 1
        if part == 0:
            self.log.append(f"queue {step}")
        return _LateMark(self.log, str(step))


def test_a_step_is_waited_for_when_the_next_is_queued() -> None:
    device = _Behind()
    config = tiny_config()
    steps = StepBudget(warmup_min=4, warmup_max=4, measured_min=3, measured_max=3)
    with tiny_base(config) as base:
        outcome = trial_on(base, config, device=device, steps=steps).run()
    assert isinstance(outcome, Measured)
    assert (outcome.measurement.steps_warmup, outcome.measurement.steps_measured) == (4, 3)
    assert device.log == [
        # What is proved of the first steps needs them done.
        *("queue 0", "wait 0", "queue 1", "wait 1"),
        *("queue 2", "queue 3", "wait 2", "queue 4", "wait 3"),
        *("queue 5", "wait 4", "queue 6", "wait 5", "wait 6"),
    ]


def test_a_step_that_was_queued_when_measuring_ended_counts() -> None:
    device = _Behind()
    config = tiny_config()
    steps = StepBudget(
        warmup_min=2, warmup_max=2, measured_min=6, measured_max=30, relative_interval=100.0
    )
    with tiny_base(config) as base:
        outcome = trial_on(base, config, device=device, steps=steps).run()
    assert isinstance(outcome, Measured)
    assert outcome.measurement.steps_measured == 7
    assert device.log[-1] == "wait 8"


class _Timed(CpuDevice):
    """A device that takes so long for each step, and is done with it once it is waited for."""

    def __init__(self, *seconds: float) -> None:
        super().__init__()
        ends = itertools.accumulate(seconds, initial=0.0)
        # Of each step the three marks of `_Behind`.
        self._marks = [at for begun, end in itertools.pairwise(ends) for at in (begun, end, end)]
        self.marked = 0

    def mark(self) -> Mark:
        self.marked += 1
        return _TimedMark(self._marks[self.marked - 1])


class _TimedMark:
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._is_passed = False

    def is_passed(self) -> bool:
        return self._is_passed

    def wait(self) -> None:
        self._is_passed = True

    def seconds_since(self, earlier: _TimedMark) -> float:
        assert self._is_passed
        return self._seconds - earlier._seconds


@pytest.mark.parametrize(("silence", "signs"), [(0.0, 4), (60.0, 2)], ids=["long", "short"])
def test_a_micro_step_that_takes_long_is_a_sign_of_life_before_its_step_is_queued(
    silence: float, signs: int
) -> None:
    config = tiny_config(**ACCUMULATING)
    beats: list[Progress] = []

    def hear(beat: Progress) -> bool:
        beats.append(beat)
        return False

    with tiny_base(config) as base:
        trial_on(base, config, steps=BRIEF, report=hear, silence_seconds=silence).run()
    of_first = [b for b in beats if b.phase == "warmup" and b.step == 0]
    # One where the phase begins; then of two micro-steps that are queued, and that are done.
    assert len(of_first) == 1 + signs


def test_a_step_that_was_queued_has_its_own_seconds_and_is_counted_once() -> None:
    config = tiny_config()
    steps = StepBudget(warmup_min=1, warmup_max=9, measured_min=6, measured_max=6)
    warming, measuring = [9.0, 5.0, 1.0, 1.0], [2.0, 2.5, 3.0, 3.5, 4.0, 9.0]
    device = _Timed(*warming, *measuring)
    with tiny_base(config) as base:
        outcome = trial_on(base, config, device=device, steps=steps).run()
    assert isinstance(outcome, Measured)
    found = outcome.measurement
    assert (found.steps_warmup, found.steps_measured) == (4, 6)
    assert device.marked == 3 * 10
    assert found.step_seconds == pytest.approx(3.25)
    assert found.measured_seconds == pytest.approx(sum(measuring))
    assert found.training_seconds == pytest.approx(sum(warming) + sum(measuring))


def test_a_loss_that_stops_being_finite_is_found_one_step_later_at_most() -> None:
    config = tiny_config()
    device = _Behind()

    def spoil(beat: Progress) -> bool:
        if beat.phase == "measure" and beat.tokens_per_second is not None and beat.step == 2:
            norm = base.model.model.norm.weight
            norm.data.fill_(float("nan"))
            spoilt.append(len([line for line in device.log if line.startswith("queue")]))
        return False

    spoilt: list[int] = []
    with tiny_base(config) as base:
        outcome = trial_on(base, config, device=device, report=spoil).run()
    assert isinstance(outcome, Diverged)
    (first_spoilt,) = spoilt
    assert outcome.step == first_spoilt
    assert device.log[-1] == f"wait {first_spoilt}"
    assert f"queue {first_spoilt + 2}" not in device.log
