"""One real training trial on the CPU."""

from __future__ import annotations

import resource
from typing import Any

import pytest

from qlora_sweep.search_spaces.errors import EnvironmentFault
from qlora_sweep.search_spaces.gpus import GIB
from qlora_sweep.search_spaces.space import StepBudget
from qlora_sweep.storage.records import (
    RETRYABLE,
    Diverged,
    Ineffective,
    Invalid,
    Measured,
    OutOfMemory,
    PrunedSlow,
)
from tests.lazy import lazily
from tests.sweep.training.tiny import (
    BRIEF,
    TINY,
    UNIFORM_LOSS,
    measured,
    outcome_of,
    tiny_base,
    tiny_config,
    tiny_loop,
    trial_on,
)
from tests.tables import cases, column

devices = lazily("tests.sweep.training.devices")
torch = lazily("torch")
cpu_devices = lazily("qlora_sweep.sweep.training.device")
CONFIG = tiny_config()


@pytest.mark.parametrize(
    "settings",
    column(
        """
        {checkpoint_fraction: 0.5, quantized_fraction: 0.5}
        {checkpoint_fraction: 0.0, upcast_fp32: false, optimizer: adamw_torch_fused}
        {quantization: fp4, double_quant: false, effective_batch_size: 8}
        {quantization: none, double_quant: false, compute_dtype: fp32}
        {attention: eager, lora_dropout: 0.1, target_modules: all-linear}
        """
    ),
    ids=str,
)
def test_every_setting_the_cpu_has_is_trained_for_real(settings: dict[str, object]) -> None:
    config = tiny_config(**settings)
    found = measured(outcome_of(config, steps=BRIEF))
    assert found.tokens_per_second == pytest.approx(config.tokens_per_step / found.step_seconds)
    assert found.steps_measured == 2
    assert found.peak_allocated_bytes > 0
    assert found.final_loss == pytest.approx(UNIFORM_LOSS, abs=0.5)


def peak(base: Any, **settings: Any) -> int:
    return measured(trial_on(base, tiny_config(**settings), steps=BRIEF).run()).peak_allocated_bytes


def test_peaks_repeat_to_the_byte_and_follow_micro_batch_and_checkpointing() -> None:
    with tiny_base(CONFIG) as base:
        first = peak(base)
        eight = peak(base, micro_batch_size=8)
        sixteen = peak(base, micro_batch_size=16)
        twenty_four = peak(base, micro_batch_size=24)
        half = peak(base, micro_batch_size=16, checkpoint_fraction=0.5)
        none = peak(base, micro_batch_size=16, checkpoint_fraction=0.0)
        assert peak(base) == first < eight
    assert twenty_four - sixteen == pytest.approx(sixteen - eight, rel=0.01)
    assert sixteen < half < none


def test_a_trial_that_is_told_to_stop_keeps_what_it_measured() -> None:
    phases: list[str] = []

    def stop_at_third(beat: Any) -> bool:
        phases.append(beat.phase)
        return beat.phase == "measure" and beat.tokens_per_second is not None and beat.step == 3

    outcome = outcome_of(CONFIG, report=stop_at_third)
    assert isinstance(outcome, PrunedSlow)
    assert outcome.measurement.steps_measured == 3
    assert list(dict.fromkeys(phases)) == ["attach", "warmup", "measure", "detach"]


def test_targets_the_architecture_lacks_are_invalid() -> None:
    outcome = outcome_of(tiny_config(target_modules=["c_attn"]))
    assert isinstance(outcome, Invalid)
    assert "c_attn" in outcome.detail


class OutOfResources(Exception):  # noqa: N818 - Triton's name
    """What Triton raises where a kernel wants more shared memory than a block may have."""


NO_ROOM = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes"
NO_SHARED_MEMORY = "out of resource: shared memory, Required: 147456"


@pytest.mark.parametrize(
    ("error", "is_compiled", "setting"),
    [
        (OutOfResources(NO_SHARED_MEMORY), False, "attention"),
        (AssertionError("\n\nfrom user code:\n   File modeling.py, line 222"), True, "compile"),
        (AssertionError("\n\nfrom user code:\n   File modeling.py, line 222"), False, None),
        (RuntimeError("CUDA error: an illegal memory access"), False, None),
    ],
)
def test_a_kernel_that_cannot_be_made_is_its_settings_fault_and_other_errors_are_raised(
    error: Exception, is_compiled: bool, setting: str | None
) -> None:
    config = tiny_config(compile=is_compiled)
    with tiny_base(config) as base:
        trial = trial_on(base, config, device=devices.Failing(error))
        if setting is None:
            with pytest.raises(type(error)):
                trial.run()
            assert trial.phase == "warmup"
        else:
            outcome = trial.run()
            assert isinstance(outcome, Ineffective)
            assert outcome.setting == setting
            assert outcome.verdict not in RETRYABLE
        assert isinstance(trial_on(base, CONFIG, steps=BRIEF).run(), Measured)


def test_memory_that_runs_out_in_a_step_is_out_of_memory_and_the_next_trial_fits() -> None:
    with tiny_base(CONFIG) as base:
        outcome = trial_on(base, CONFIG, device=devices.Failing(RuntimeError(NO_ROOM))).run()
        assert isinstance(outcome, OutOfMemory)
        assert (outcome.stage, outcome.requested_bytes) == ("optimizer", 64)
        assert outcome.verdict not in RETRYABLE
        assert isinstance(trial_on(base, CONFIG, steps=BRIEF).run(), Measured)


def test_a_trial_that_fails_when_it_is_taken_off_says_so() -> None:
    with tiny_base(CONFIG) as base:
        trial = trial_on(base, CONFIG, device=devices.Breaking(), steps=BRIEF)
        with pytest.raises(RuntimeError, match="launch"):
            trial.run()
    assert trial.phase == "detach"


def test_a_peak_above_the_budget_does_not_fit_and_one_at_the_budget_does() -> None:
    with tiny_base(CONFIG) as base:
        # The first trial of a process also pays for what libraries make once, as a rehearsal does.
        peak(base)
        most = peak(base)
        at, above, least = (
            trial_on(base, CONFIG, budget_bytes=budget, steps=BRIEF).run()
            for budget in (most, most - 1, 1)
        )
    assert isinstance(at, Measured)
    assert isinstance(above, OutOfMemory)
    assert above.peak_allocated_bytes == most
    assert above.stage in ("forward", "backward")
    assert f"{most - 1:,}" in above.detail
    assert isinstance(least, OutOfMemory)
    assert least.stage == "load"


def test_the_peak_of_large_adapters_and_little_else_is_the_optimizers() -> None:
    device = cpu_devices.CpuDevice()
    config = tiny_config(micro_batch_size=1, seq_len=8, lora_rank=128)
    outcome_of(config, device=device, steps=BRIEF)
    assert device.memory().peak_stage == "optimizer"


def test_a_trial_that_spilled_into_the_hosts_memory_does_not_fit() -> None:
    outcome = outcome_of(CONFIG, device=devices.Spilling(), steps=BRIEF)
    assert isinstance(outcome, OutOfMemory)
    assert "host's memory" in outcome.detail
    assert cpu_devices.bytes_beyond(22 * GIB + 2**20, 22 * GIB) == 0
    assert cpu_devices.bytes_beyond(25 * GIB, 22 * GIB) == 3 * GIB


@pytest.mark.parametrize(
    ("rooms", "is_flagged"),
    cases(
        """
        [80, 80, 79] | true
        # The libraries' own kernels, loaded with the first steps.
        [80, 79.5, 79.5] | false
        [80, 70, 70] | true
        """
    ),
    ids=["measuring", "kernels", "warming"],
)
def test_memory_that_others_take_meanwhile_is_a_neighbours(
    rooms: tuple[float, ...], is_flagged: bool
) -> None:
    device = devices.Failing(rooms=[int(room * GIB) for room in rooms])
    found = measured(outcome_of(CONFIG, device=device, steps=BRIEF))
    assert ("neighbour" in found.flags) is is_flagged


@pytest.mark.parametrize(
    ("rooms", "flags"),
    [((80, 10), ("neighbour",)), ((80, 60), ()), ((10,), ())],
    ids=["robbed", "enough left", "nobody came"],
)
def test_memory_that_ran_out_because_others_held_it_is_flagged(
    rooms: tuple[int, ...], flags: tuple[str, ...]
) -> None:
    device = devices.Failing(MemoryError(), rooms=[room * GIB for room in rooms])
    outcome = outcome_of(CONFIG, device=device, budget_bytes=20 * GIB)
    assert isinstance(outcome, OutOfMemory)
    assert outcome.flags == flags


ACCUMULATING = tiny_config(effective_batch_size=16)


def test_two_micro_steps_stand_for_a_whole_accumulation() -> None:
    with tiny_base(ACCUMULATING) as base:
        trial_on(base, ACCUMULATING, micro_steps_max=8, steps=BRIEF).run()
        short, whole = (
            measured(trial_on(base, ACCUMULATING, micro_steps_max=most, steps=BRIEF).run())
            for most in (2, 8)
        )
    assert short.peak_allocated_bytes == whole.peak_allocated_bytes
    flag = "accumulation_extrapolated"
    assert (flag in short.flags, flag in whole.flags) == (True, False)
    tokens = short.tokens_per_second * short.step_seconds
    assert tokens == pytest.approx(ACCUMULATING.tokens_per_step)
    # Seconds spent are those of the micro-steps that were done.
    assert short.measured_seconds < 0.5 * short.step_seconds * short.steps_measured


@pytest.mark.parametrize(
    ("seconds", "measured_steps", "is_noisy"),
    [
        # The step that is queued by then counts, too.
        ([1.0] * 30, 6 + 1, False),
        # One that was held up does not make it uncertain; what stays uneven is not waited for.
        ([1.0] * 5 + [5.0] + [1.0] * 24, 10 + 1, False),
        ([1.0, 1.2] * 15, 10 + 1, True),
    ],
    ids=["even", "one held up", "uneven"],
)
def test_steps_are_measured_until_the_median_is_precise_or_never_will_be(
    seconds: list[float], measured_steps: int, is_noisy: bool
) -> None:
    device = devices.Behind(1.0, *seconds)
    steps = StepBudget(warmup_min=1, warmup_max=1, measured_min=6, measured_max=30)
    found = measured(outcome_of(CONFIG, device=device, steps=steps))
    assert found.steps_measured == measured_steps
    assert ("noisy" in found.flags) is is_noisy


def test_fewer_steps_than_an_interval_needs_have_none_and_are_noisy() -> None:
    found = measured(outcome_of(CONFIG, steps=BRIEF))
    assert found.step_seconds_ci95 is None
    assert "noisy" in found.flags


def test_a_step_that_was_queued_has_its_own_seconds_and_is_counted_once() -> None:
    warming, measuring = [9.0, 5.0, 1.0, 1.0], [2.0, 2.5, 3.0, 3.5, 4.0, 9.0]
    device = devices.Behind(*warming, *measuring)
    steps = StepBudget(warmup_min=1, warmup_max=9, measured_min=6, measured_max=6)
    found = measured(outcome_of(CONFIG, device=device, steps=steps))
    assert (found.steps_warmup, found.steps_measured, device.marks) == (4, 6, 3 * 10)
    assert found.step_seconds == pytest.approx(3.25)
    assert found.measured_seconds == pytest.approx(sum(measuring))
    assert found.training_seconds == pytest.approx(sum(warming) + sum(measuring))


@pytest.mark.parametrize(("silence", "signs"), [(0.0, 4), (60.0, 2)], ids=["long", "short"])
def test_a_micro_step_that_takes_long_is_a_sign_of_life_before_its_step_is_queued(
    silence: float, signs: int
) -> None:
    heard: list[tuple[str, int]] = []

    def hear(beat: Any) -> bool:
        heard.append((beat.phase, beat.step))
        return False

    outcome_of(ACCUMULATING, steps=BRIEF, report=hear, quiet_seconds=silence)
    # One where the phase begins; then of two micro-steps that are queued, and that are done.
    assert heard.count(("warmup", 0)) == 1 + signs


@pytest.mark.parametrize("phase", ["attach", "measure"])
def test_a_loss_that_stops_being_finite_is_found_one_step_later_at_most(phase: str) -> None:
    device = devices.Behind()
    queued: list[int] = []

    def spoil(beat: Any) -> bool:
        is_measured = beat.tokens_per_second is not None and beat.step == 2
        if not queued and beat.phase == phase and (phase == "attach" or is_measured):
            base.model.model.norm.weight.data.fill_(float("nan"))
            queued.append(sum(line.startswith("queue") for line in device.log))
        return False

    with tiny_base(CONFIG) as base:
        outcome = trial_on(base, CONFIG, device=device, report=spoil).run()
    assert isinstance(outcome, Diverged)
    (first_spoilt,) = queued
    assert outcome.step == first_spoilt
    assert f"queue {first_spoilt + 2}" not in device.log


# A soak trains on, evaluates and saves as a training does, on the CPU for real.

STEPS = StepBudget(warmup_min=1, warmup_max=2, measured_min=6, measured_max=24, seconds_max=60)


def test_a_soak_trains_on_however_steady_and_evaluates_and_saves_half_way() -> None:
    with tiny_base(CONFIG) as base:
        found = measured(trial_on(base, CONFIG, steps=STEPS, is_soak=True).run())
        assert not hasattr(base.model, "peft_config")
    soak = found.soak
    assert soak is not None
    assert found.steps_measured == 24
    assert soak.steps == 24 + found.steps_warmup
    assert soak.seconds >= found.measured_seconds + soak.evaluation_seconds
    assert soak.evaluation_loss == pytest.approx(UNIFORM_LOSS, abs=0.5)
    # An fp32 adapter and the optimizer's two moments.
    weights = found.trainable_parameters * 4
    assert 3 * weights < soak.checkpoint_bytes < 8 * weights


def test_the_time_of_a_soak_ends_it_as_well() -> None:
    steps = STEPS.model_copy(update={"measured_max": 100_000, "seconds_max": 0.5})
    found = measured(outcome_of(CONFIG, steps=steps, is_soak=True))
    assert found.soak is not None
    assert 0.5 <= found.soak.seconds < 20.0
    assert found.steps_measured < 100_000


def test_an_evaluation_makes_no_gradients_and_the_training_goes_on() -> None:
    modes: list[bool] = []

    def note(module: Any, *_: Any) -> None:
        modes.append(module.training or torch.is_grad_enabled())

    with tiny_loop(tiny_config(lora_dropout=0.1)) as loop:
        loop.step()
        loop.attached.layers[0].register_forward_hook(note)
        loop.evaluate(batches=2)
        loop.step()
    assert modes == [False, False, True]


def test_memory_of_the_evaluation_counts_towards_the_peak() -> None:
    device = cpu_devices.CpuDevice()
    with tiny_loop(CONFIG) as loop, tiny_base(CONFIG) as base:
        device.reset_peak()
        before = device.memory().peak_allocated_bytes
        trial_on(base, CONFIG, is_soak=True, device=device).evaluate_and_save(loop)
    logits = CONFIG.tokens_per_micro_batch * int(TINY.config["vocab_size"]) * 4
    assert device.memory().peak_allocated_bytes - before >= logits


def test_running_out_in_the_evaluation_is_out_of_memory_and_says_where(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object, **__: object) -> float:
        raise MemoryError("no room for the logits")

    monkeypatch.setattr("qlora_sweep.sweep.training.step.TrainingLoop.evaluate", full)
    outcome = outcome_of(CONFIG, steps=STEPS, is_soak=True)
    assert isinstance(outcome, OutOfMemory), outcome
    assert outcome.detail.startswith("in an evaluation pass: ")


def test_a_limit_of_the_process_below_the_budget_is_not_taken_for_the_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = {resource.RLIMIT_AS: (2**20 * 1024, resource.RLIM_INFINITY)}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    with pytest.raises(EnvironmentFault, match="ulimit -v 1048576"):
        cpu_devices.CpuDevice().cap(2**30)
    limits[resource.RLIMIT_AS] = (2**50, resource.RLIM_INFINITY)
    cpu_devices.CpuDevice().cap(2**30)


def test_a_hard_limit_of_private_memory_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    hard, infinity, put = 2**50, resource.RLIM_INFINITY, list[tuple[int, int]]()
    limits = {resource.RLIMIT_AS: (infinity, infinity), resource.RLIMIT_DATA: (infinity, hard)}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: put.append(pair))
    device = cpu_devices.CpuDevice()
    device.cap(2**30)
    device.reset_peak()
    with device.observed():
        pass
    assert put
    # Whoever is not root may not raise it.
    assert {limit for _, limit in put} == {hard}
    assert all(0 < soft <= hard for soft, _ in put)
