"""Devices that fail, spill, shrink or take their time where a test says so."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace

from qlora_sweep.sweep.training.device import CpuDevice, Mark, Memory

AFTER_FIRST_MICRO_STEP = 2


class Failing(CpuDevice):
    """A device that fails at a chosen mark, and of which others take more from look to look."""

    def __init__(
        self,
        error: Exception | None = None,
        *,
        at: int = AFTER_FIRST_MICRO_STEP,
        rooms: Iterable[int] = (),
    ) -> None:
        super().__init__()
        self._error, self._left, self._rooms = error, at, list(rooms)

    def mark(self) -> Mark:
        self._left -= 1
        if self._left == 0 and self._error is not None:
            raise self._error
        return super().mark()

    def room_bytes(self) -> int | None:
        if not self._rooms:
            return super().room_bytes()
        return self._rooms.pop(0) if len(self._rooms) > 1 else self._rooms[0]


class Breaking(CpuDevice):
    """A device that breaks when a trial is taken off it."""

    def release(self) -> None:
        raise RuntimeError("CUDA error: the launch failed")


class Spilling(CpuDevice):
    """A device whose driver put a part of the trial into the host's memory."""

    def memory(self) -> Memory:
        return replace(super().memory(), spilled_bytes=3 * 2**30)


class Full(CpuDevice):
    """A device on which whatever says that there is not enough means its memory."""

    def ran_out(self, error: BaseException) -> bool:
        return "enough" in str(error)


class Behind(CpuDevice):
    """A device that is never done before it is waited for.

    Args:
        seconds: that it takes for each step; by default, what this machine takes.
    """

    def __init__(self, *seconds: float) -> None:
        super().__init__()
        self.log: list[str] = []
        self.marks = 0
        ends = itertools.accumulate(seconds, initial=0.0)
        # Of each step: where it begins, where its only micro-step ends, and behind its loss.
        self._times = [at for begun, end in itertools.pairwise(ends) for at in (begun, end, end)]

    def mark(self) -> Mark:
        step, part = divmod(self.marks, 3)
        if part == 0:
            self.log.append(f"queue {step}")
        mark = _LateMark(self.log, step)
        if self._times:
            mark._seconds = self._times[self.marks]
        self.marks += 1
        return mark


class _LateMark(Mark):
    """A mark that is passed when somebody has waited for it, as a busy GPU's."""

    def __init__(self, log: list[str], step: int) -> None:
        super().__init__()
        self._log, self._step, self._is_passed = log, step, False

    def is_passed(self) -> bool:
        return self._is_passed

    def wait(self) -> None:
        if not self._is_passed:
            self._log.append(f"wait {self._step}")
        self._is_passed = True

    def seconds_since(self, earlier: Mark) -> float:
        assert self._is_passed
        return super().seconds_since(earlier)
