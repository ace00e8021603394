"""A process's device, and the base model that stays on it from one trial to the next."""

from __future__ import annotations

import gc
from dataclasses import replace

import torch

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.search_spaces.space import StepBudget
from qlora_sweep.storage.records import NEIGHBOUR, Ineffective, Invalid, Outcome
from qlora_sweep.sweep.nvml import device_at
from qlora_sweep.sweep.running.wire import WorkerSettings
from qlora_sweep.sweep.training.adapters import forget_compiled
from qlora_sweep.sweep.training.device import Device, open_device
from qlora_sweep.sweep.training.eight_bit import half_dtype
from qlora_sweep.sweep.training.meter import GpuReader, NeighbourWatch
from qlora_sweep.sweep.training.model import BaseModel, Unavailable, build_base
from qlora_sweep.sweep.training.step import out_of_memory
from qlora_sweep.sweep.training.trial import Trial, TrialDevice, TrialTask

DETAIL_LENGTH = 2000
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


class Resident:
    """The device, and the base that is on it."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._spec = ModelSpec.from_json(settings.model)
        self.base: BaseModel | None = None
        self._empty_bytes: int | None = None
        """What was allocated before there was a base."""
        self.device: Device = open_device(settings.device)
        bus_id = self.device.pci_bus_id()
        self.gpu = GpuReader(None if bus_id is None else device_at(bus_id))
        self.trial_device = TrialDevice(
            self.device,
            self.gpu,
            peak_flops=settings.peak_flops,
            budget_bytes=settings.budget_bytes,
            is_emulated=settings.is_emulated,
        )
        self._neighbours = NeighbourWatch(self.device, self.gpu, settings.budget_bytes)

    def prepare(self) -> None:
        """Take what libraries take once, then put the budget in force."""
        self.device.warm_up()
        self._rehearse()
        # Freed blocks stay in the allocator's cache, which the cap would count.
        self.device.release()
        # The libraries' million objects are here to stay; collecting around each trial need not
        # visit them.
        gc.freeze()
        # This process has its context by now, so a process that comes later is a neighbour.
        self.gpu.remember()
        self.device.cap(self._settings.budget_bytes)
        self._neighbours.start()

    def holds(self, config: TrialConfig) -> bool:
        """Whether this configuration's base is the one that is there; what is sharded serves one
        configuration alone."""
        is_alike = self.base is not None and self.base.config == config.base()
        return is_alike and not config.is_sharded

    def hold(self, config: TrialConfig) -> Outcome | None:
        """Make this configuration's base the resident one; return why it cannot be, or None."""
        if self.holds(config):
            return None
        self.drop()
        self._empty_bytes = self.device.allocated_bytes()
        self.device.expand_segments(config.expandable_segments)
        self.device.reset_peak()
        failed: Outcome | None = None
        try:
            self.base = build_base(
                config,
                spec=self._spec,
                weights=self._settings.weights,
                device=self.device.torch_device,
                seed=self._settings.seed,
            )
        except InputError as error:
            failed = Invalid(rule="model", detail=str(error)[:DETAIL_LENGTH])
        except Unavailable as error:
            failed = Ineffective(setting=error.setting, detail=str(error)[:DETAIL_LENGTH])
        except Exception as error:
            if not self.device.ran_out(error):
                raise
            flags: tuple[str, ...] = ()
            if self._neighbours.have_robbed():
                flags = (NEIGHBOUR,)
            failed = out_of_memory(error, self.device, None, stage="load", flags=flags)
        # Outside the except blocks: a caught exception keeps the frames, and so the weights, alive.
        self.device.release()
        return failed

    def drop(self) -> None:
        """Hold no base any more."""
        if self.base is not None:
            self.base.close()
            self.base = None
        # What is still cached would serve the next base from segments of the old kind.
        self.device.release()
        if self._bytes_left(self._empty_bytes):
            # Graphs serve the next base as long as they do not hold the last.
            forget_compiled()
            self.device.release()

    def leak(self, config: TrialConfig, before: int | None) -> str | None:
        """Return what a trial left behind for which this process is not fit for another; None for
        nothing.

        Args:
            config: that was trained.
            before: what was allocated before it.
        """
        if config.is_sharded:
            self.drop()
        if config.is_paged:
            return "bitsandbytes never frees paged buffers"
        if config.compile and self._bytes_left(before):
            # Graphs are kept for the next trial as long as they hold no memory of the last.
            forget_compiled()
            self.device.release()
        left = self._bytes_left(before)
        if not left:
            return None
        return f"memory did not come back: {left} bytes more than before the trial"

    def _bytes_left(self, before: int | None) -> int:
        """Return what a trial left allocated; 0 for what is no leak."""
        after = self.device.allocated_bytes()
        if before is None or after is None or after <= before + _BASELINE_SLACK_BYTES:
            return 0
        return after - before

    def _rehearse(self) -> None:
        """Run one tiny training: lazy imports, threads and workspaces are then no trial's."""
        compute_dtype = "fp16"
        if half_dtype() == torch.bfloat16:
            compute_dtype = "bf16"
        config = TrialConfig(
            micro_batch_size=1,
            seq_len=16,
            checkpoint_fraction=1.0,
            attention="sdpa",
            compute_dtype=compute_dtype,
        )
        self.base = build_base(
            config,
            spec=_REHEARSAL_MODEL,
            weights="random",
            device=self.device.torch_device,
            seed=0,
        )
        steps = StepBudget(warmup_min=1, warmup_max=2, measured_min=2, measured_max=2)
        trial_device = replace(self.trial_device, budget_bytes=None)
        Trial(self.base, trial_device, TrialTask(config, steps)).run()
        self.base.close()
        self.base = None
