"""Owns replaying many steps: equal ones once, and on all processors where there are enough of them.

Knows nothing of what replays are for.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import as_completed
from concurrent.futures.process import BrokenProcessPool

from sweep.pools import process_pool, unheard_by_new_processes
from sweep.predict.memory.profile_store import OnProgress, tell_nobody
from sweep.predict.memory.replay import Uncapped, replay_uncapped
from sweep.predict.memory.step import Step

WORTH_PROCESSES = 300
"""Steps whose replays take longer than starting processes for them: one or two seconds."""
_AT_ONCE = 50
"""Steps that a process is given at a time: so few that all processes end together."""


def replay_all(steps: Sequence[Step], *, on_progress: OnProgress = tell_nobody) -> list[Uncapped]:
    """Return what each step comes to without a limit.

    Args:
        steps: of any structures, and of any sizes.
        on_progress: told how many different ones have been replayed, of how many.
    """
    distinct = {_alike(step): step for step in steps}
    # Neighbours are of one structure, so that a process is sent few profiles at a time.
    keys = sorted(distinct, key=lambda key: key[0])
    known: dict[Hashable, Uncapped] = {}
    on_progress(0, len(keys))
    for numbers, results in _replayed([distinct[key] for key in keys]):
        known.update(zip(keys[numbers], results, strict=True))
        on_progress(len(known), len(keys))
    return [known[_alike(step)] for step in steps]


def _alike(step: Step) -> tuple[tuple[int, ...], Hashable]:
    """Return what decides over a replay."""
    config = step.config
    sizes = tuple(step.values.items()), step.flags, step.workspace_bytes, step.held_gradients
    cards = config.is_sharded and config.data_parallel
    states = config.adapter_dtype, config.optimizer, cards
    return tuple(map(id, step.profiles.values())), (*sizes, *states)


def _replayed(steps: Sequence[Step]) -> Iterator[tuple[slice, list[Uncapped]]]:
    """Yield replays and whose they are, in any order."""
    chunks = [slice(start, start + _AT_ONCE) for start in range(0, len(steps), _AT_ONCE)]
    processors = _processors()
    if len(steps) >= WORTH_PROCESSES and processors > 1:
        try:
            for chunk, results in _in_processes(steps, chunks, processors):
                chunks.remove(chunk)
                yield chunk, results
        except BrokenProcessPool:
            # What a process that died has left is done here.
            pass
    for chunk in chunks:
        yield chunk, _replay(steps[chunk])


def _in_processes(
    steps: Sequence[Step], chunks: Sequence[slice], processors: int
) -> Iterator[tuple[slice, list[Uncapped]]]:
    # Replays leave no garbage, and it would be looked for all the time.
    with process_pool(processors, settle_in=gc.disable) as pool:
        with unheard_by_new_processes():
            running = {pool.submit(_replay, steps[chunk]): chunk for chunk in chunks}
        for done in as_completed(running):
            yield running[done], done.result()


def _replay(steps: Sequence[Step]) -> list[Uncapped]:
    return [replay_uncapped(step) for step in steps]


def _processors() -> int:
    """Return how many processors this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1
