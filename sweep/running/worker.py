"""Owns the device of a child process: a configuration in, signs of life and an outcome out.

Keeps the base model resident between trials. Knows nothing of pipes (`serving`), studies, samplers
or storage.
"""

from __future__ import annotations

import gc
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from search_spaces.config import TrialConfig, canonical
from search_spaces.errors import EnvironmentFault, InputError, words_of
from search_spaces.models import ModelSpec
from search_spaces.space import StepBudget
from storage.records import (
    NEIGHBOUR,
    Diverged,
    Ineffective,
    Invalid,
    Measured,
    Outcome,
    OutOfMemory,
    Phase,
)
from sweep.data.opening import import_readers
from sweep.data.request import SUMMARY
from sweep.nvml import card_at
from sweep.running.wire import (
    Alive,
    Finished,
    QualityCommand,
    RunCommand,
    TextsSettings,
    WorkerMessage,
    WorkerSettings,
)
from sweep.training.compiling import forget_compiled
from sweep.training.device import Device, open_device
from sweep.training.exceptions import requested_bytes
from sweep.training.meter import CardReader, NeighbourWatch
from sweep.training.model import BaseModel, Unavailable, build_base
from sweep.training.quality import NoRoomToEvaluateError, Quality, Question
from sweep.training.texts import Texts
from sweep.training.trial import Beat, Trial

DETAIL_LENGTH = 2000
SPEED_REUSED = "speed_reused"
"""Flag of a speed that was measured at another learning rate, on which it does not depend."""
NO_ROOM_TO_EVALUATE = "no_room_to_evaluate"
"""Flag of what trained within the budget, and could not be asked what it learned."""
# What a base may leave behind without being called a leak: a library's late workspace.
_BASELINE_SLACK_BYTES = 64 * 2**20
_REHEARSAL_MODEL = ModelSpec(
    name="rehearsal",
    source="shipped",
    config={
        "model_type": "mistral",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 128,
        "max_position_embeddings": 64,
        "sliding_window": None,
    },
)


class Worker:
    """The device, the resident base, and the trials run on it."""

    def __init__(self, settings: WorkerSettings, *, send: Callable[[WorkerMessage], None]) -> None:
        self._settings = settings
        self._send = send
        self._spec = ModelSpec.from_json(settings.model)
        self._base: BaseModel | None = None
        self._speeds: dict[str, tuple[float, Measured]] = {}
        """What was measured on the way to a configuration's quality, with its learning rate."""
        self._stop = threading.Event()
        self._texts = None if settings.texts is None else _texts(settings.texts, settings.seed)
        self._device: Device = open_device(settings.device)
        self._card = CardReader(card_at(_pci_bus_id()) if settings.device == "cuda" else None)
        self._neighbours = NeighbourWatch(self._device, self._card, settings.budget_bytes)
        self.phase: Phase = "start"
        """Where the newest command is."""

    def prepare(self) -> None:
        """Take what libraries take once, then put the budget in force."""
        if self._texts is not None:
            import_readers()
        self._device.warm_up()
        self._rehearse()
        # Freed blocks stay in the allocator's cache, which the cap would count.
        self._device.release()
        # The libraries' million objects are here to stay; collecting around each trial need not
        # visit them.
        gc.freeze()
        # This process has its context by now, so whoever comes later is a neighbour.
        self._card.remember()
        self._device.cap(self._settings.budget_bytes)
        self._neighbours.start()

    def stop_trial(self) -> None:
        """Ask the running trial to stop as slow; it does at its next step."""
        self._stop.set()

    def run(self, command: RunCommand) -> Finished:
        """Run one trial on the right base and say whether this process can run another."""
        self._stop.clear()
        started = time.perf_counter()
        config = command.config
        failed = self._ensure_base(config)
        if failed is not None:
            return finished(command, failed)
        assert self._base is not None
        self.phase = "attach"
        before = self._device.allocated_bytes()
        outcome = self._known_speed(command) or self._measured(command, self._base, started)
        if command.quality is not None and isinstance(outcome, Measured):
            self._speeds[_speed_key(command)] = config.learning_rate, outcome
            outcome = self._with_quality(outcome, config, command.quality)
        return finished(command, outcome, retire=self._reason_to_retire(config, before))

    def _measured(self, command: RunCommand, base: BaseModel, started: float) -> Outcome:
        config = command.config
        trial = self._trial(
            base,
            config,
            command.steps,
            started=started,
            budget_bytes=self._settings.budget_bytes,
            texts=self._texts,
            is_soak=command.is_soak,
            report=lambda beat: self._report(beat, config),
        )
        return trial.run()

    def _known_speed(self, command: RunCommand) -> Measured | None:
        """Return what was measured of a configuration that has another learning rate, and nothing
        else: neither speed nor memory depends on it, and what it learns is asked all the same.
        """
        rate, known = self._speeds.get(_speed_key(command), (None, None))
        if command.quality is None or known is None or rate == command.config.learning_rate:
            return None
        flags = {*known.measurement.flags, SPEED_REUSED}
        changes = {"quality": None, "flags": tuple(sorted(flags))}
        return Measured(measurement=known.measurement.model_copy(update=changes))

    def _with_quality(
        self, outcome: Measured, config: TrialConfig, asked: QualityCommand
    ) -> Outcome:
        """Train a configuration that fits once more, for what it learns of the texts."""
        assert self._base is not None, "what was measured has a base"
        if self._texts is None:
            return outcome
        self._report(Beat(phase="quality", step=0), config)
        quality = Quality(
            self._base,
            config,
            self._texts,
            Question(asked.tokens, asked.seed, asked.eval_seq_len, asked.eval_tokens),
            self._device,
            beat=lambda step: self._report(Beat(phase="quality", step=step), config),
        )
        try:
            learned = quality.run()
        except InputError as error:
            return Invalid(rule="quality", detail=str(error)[:DETAIL_LENGTH])
        except NoRoomToEvaluateError:
            # It trains well, and what it learned is not known.
            learned = None
        if isinstance(learned, Diverged | OutOfMemory):
            return learned
        flags = outcome.measurement.flags + ((NO_ROOM_TO_EVALUATE,) if learned is None else ())
        changes = {"quality": learned, "flags": flags}
        return Measured(measurement=outcome.measurement.model_copy(update=changes))

    def _trial(
        self, base: BaseModel, config: TrialConfig, steps: StepBudget, **changes: Any
    ) -> Trial:
        return Trial(
            base=base,
            config=config,
            steps=steps,
            device=self._device,
            card=self._card,
            seed=self._settings.seed,
            peak_flops=self._settings.peak_flops.get(config.compute_dtype),
            is_emulated=self._settings.is_emulated,
            **changes,
        )

    def _report(self, beat: Beat, config: TrialConfig) -> bool:
        self.phase = beat.phase
        tokens = beat.tokens_per_step or config.tokens_per_step
        self._send(
            Alive(
                phase=beat.phase,
                step=beat.step,
                tokens_per_second=_rate(tokens, beat.median_seconds),
                tokens_per_second_high=_rate(tokens, beat.fastest_median_seconds),
                allocated_bytes=self._device.peak_allocated_bytes(),
            )
        )
        return self._stop.is_set()

    def _ensure_base(self, config: TrialConfig) -> Outcome | None:
        """Make this configuration's base the resident one; return why it cannot be, or None."""
        if self._base is not None and self._base.config == config.base():
            return None
        self.phase = "build"
        self._send(Alive(phase="build"))
        if self._base is not None:
            self._base.close()
            self._base = None
            # What was compiled for that base refers to it, and serves no other.
            forget_compiled()
        # What is still cached would serve the new base from segments of the old kind.
        self._device.release()
        self._device.expand_segments(config.expandable_segments)
        self._device.reset_peak()
        failed = self._build(config)
        # Not before `_build` returned: a caught exception keeps the frames, and so the weights,
        # alive.
        self._device.release()
        return failed

    def _build(self, config: TrialConfig) -> Outcome | None:
        try:
            self._base = build_base(
                config,
                spec=self._spec,
                weights=self._settings.weights,
                device=self._device.torch_device,
                seed=self._settings.seed,
            )
        except InputError as error:
            return Invalid(rule="model", detail=str(error)[:DETAIL_LENGTH])
        except Unavailable as error:
            return Ineffective(knob=error.knob, detail=str(error)[:DETAIL_LENGTH])
        except Exception as error:
            if not self._device.ran_out(error):
                raise
            return OutOfMemory(
                stage="load",
                requested_bytes=requested_bytes(error),
                peak_allocated_bytes=self._device.peak_allocated_bytes(),
                detail=words_of(error)[:DETAIL_LENGTH],
                flags=(NEIGHBOUR,) if self._neighbours.have_robbed() else (),
            )
        return None

    def _reason_to_retire(self, config: TrialConfig, before: int | None) -> str | None:
        """Return why this process is not fit for another trial; None where it is."""
        if config.is_paged:
            return "bitsandbytes never frees paged buffers"
        if config.compile and self._bytes_left(before):
            # Graphs are kept for the next trial as long as they hold no memory of the last.
            forget_compiled()
            self._device.release()
        left = self._bytes_left(before)
        return (
            f"memory did not come back: {left} bytes more than before the trial" if left else None
        )

    def _bytes_left(self, before: int | None) -> int:
        """Return what a trial left allocated; 0 for what is no leak."""
        after = self._device.allocated_bytes()
        if before is None or after is None or after <= before + _BASELINE_SLACK_BYTES:
            return 0
        return after - before

    def _rehearse(self) -> None:
        """Run one tiny training: lazy imports, threads and workspaces are then no trial's."""
        config = TrialConfig(
            micro_batch_size=1,
            seq_len=16,
            checkpoint_fraction=1.0,
            attention="sdpa",
            compute_dtype="bf16" if _has_bf16(self._settings.device) else "fp16",
        )
        base = build_base(
            config,
            spec=_REHEARSAL_MODEL,
            weights="random",
            device=self._device.torch_device,
            seed=0,
        )
        steps = StepBudget(warmup_min=1, warmup_max=2, measured_min=2, measured_max=2)
        self._trial(base, config, steps).run()
        base.close()


def finished(command: RunCommand, outcome: Outcome, *, retire: str | None = None) -> Finished:
    """Return what is said of a run; `retire` is why this process runs no other."""
    return Finished(run_id=command.run_id, config=command.config, outcome=outcome, retire=retire)


def _speed_key(command: RunCommand) -> str:
    """Return what a speed is the speed of."""
    config = canonical(command.config).model_copy(update={"learning_rate": 1.0})
    return f"{config.key()} {command.steps.model_dump_json()} {command.is_soak}"


def _texts(settings: TextsSettings, seed: int) -> Texts:
    """Return the texts to train on.

    Raises:
        EnvironmentFault: they are gone, or others are in their place.
    """
    directory = Path(settings.directory)
    try:
        found = json.loads((directory / SUMMARY).read_text(encoding="utf-8"))["fingerprint"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise EnvironmentFault(
            f"the prepared texts in {directory} cannot be read: {words_of(error)}"
        ) from error
    if found != settings.fingerprint:
        raise EnvironmentFault(f"the prepared texts in {directory} are others than the study's")
    return Texts(directory, settings.eval_fraction, seed)


def _rate(tokens: float, seconds: float | None) -> float | None:
    return None if not seconds else tokens / seconds


def _has_bf16(device: str) -> bool:
    return device == "cpu" or torch.cuda.is_bf16_supported(including_emulation=False)


def _pci_bus_id() -> str:
    card: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"{card.pci_domain_id:08x}:{card.pci_bus_id:02x}:{card.pci_device_id:02x}.0"
