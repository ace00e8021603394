"""The process that trains: the job in, events out, an end in every case.

Commands come on stdin, which closes when whoever started this is gone.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback

import torch
from pydantic import BaseModel

from search_spaces.errors import EnvironmentFault, InputError, words_of
from sweep.finetuning.run import DETAIL_LENGTH, Run, Send, Standing
from sweep.finetuning.wire import End, Refused, TrainingJob, Unable
from sweep.running.wire import to_line
from sweep.training.adapters import attached, start_compiler_processes
from sweep.training.exceptions import knob_at_fault
from sweep.training.model import Unavailable, build_base


class Training(Standing):
    """One job on one device, from building the base to the last checkpoint."""

    def run(self) -> End:
        """Train, and return how it ended; nothing of it is in memory then."""
        end: End
        try:
            end = self._run()
        except InputError as error:
            end = Refused(reason=str(error))
        except Unavailable as error:
            end = Refused(reason=f"{error.knob}: {error}")
        except EnvironmentFault as error:
            end = Unable(reason=str(error), checkpoint_step=self.saved)
        except Exception as error:  # noqa: BLE001 - it is this training's end
            traceback.print_exc()
            end = self._end_of(error)
        return end

    def _end_of(self, error: Exception) -> End:
        """Return what an exception means, in strings and numbers alone."""
        words, knob = words_of(error)[:DETAIL_LENGTH], knob_at_fault(error, self.job.config)
        if self.device.ran_out(error):
            return self.ran_out(words)
        if knob is not None:
            return Refused(reason=f"{knob} does not run here: {words}")
        return Unable(reason=f"in {self.doing}: {words}", checkpoint_step=self.saved)

    def _run(self) -> End:
        job, device = self.job, self.device
        self.enter("preparing the device")
        device.warm_up()
        device.release()
        if job.budget_bytes is not None:
            device.cap(job.budget_bytes)
        device.expand_segments(job.config.expandable_segments)
        device.reset_peak()
        self.enter("building the base")
        base = build_base(
            job.config,
            spec=job.spec,
            weights=job.weights,
            device=device.torch_device,
            seed=job.seed,
        )
        device.release()
        device.reset_peak()
        # Adapters of a seed are the same whatever building the base drew.
        torch.manual_seed(job.seed)
        self.enter("attaching the adapters")
        with attached(base, job.config) as attachment:
            return Run(self, base, attachment, send=self._send).train()


def _listen(training: Training) -> None:
    """Stop when that is said; leave when whoever started this is gone."""
    for _ in sys.stdin.buffer:
        training.stop.set()
    os._exit(0)


def main() -> None:
    """Read the job, train, and say how it ended."""
    pipe = os.fdopen(int(sys.argv[1]), "wb", buffering=0)

    def send(message: BaseModel) -> None:
        line = to_line(message)
        while line:
            line = line[pipe.write(line) :]

    job = TrainingJob.model_validate_json(sys.stdin.buffer.readline())
    send(_trained(job, send))
    sys.stderr.flush()
    # Shutdown with a CUDA context and daemon threads can hang or abort; nothing is left to save.
    os._exit(0)


def _trained(job: TrainingJob, send: Send) -> End:
    try:
        if job.device == "cuda" and not torch.cuda.is_available():
            return Unable(reason="torch finds no CUDA device; `sweep doctor` says more")
        if job.device == "cuda" and job.config.compile:
            start_compiler_processes()
        training = Training(job, send=send)
        threading.Thread(target=_listen, args=(training,), daemon=True).start()
        return training.run()
    except Exception as error:  # noqa: BLE001 - whoever started this is told
        traceback.print_exc()
        return Unable(reason=words_of(error)[:DETAIL_LENGTH])
