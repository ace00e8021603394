"""Owns pools of processes that share work out: bound to this one, and gone at once where it is
asked to stop.

Knows nothing of the work.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager

from sweep.processes import STOP_SIGNALS, bind_to_parent


@contextmanager
def process_pool(
    count: int, *, settle_in: Callable[[], None] | None = None
) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool; what it still does where the ``with`` is left by an exception is given up.

    Args:
        count: of processes. They are not forked: this one may have threads, of which a child would
            have the locks alone.
        settle_in: called in each before it works; a function of a module.
    """
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(
        count,
        multiprocessing.get_context("spawn"),
        initializer=_settle_in,
        initargs=(os.getpid(), settle_in),
    )
    is_cut_short = True
    try:
        yield pool
        is_cut_short = False
    finally:
        if is_cut_short:
            for process in set(multiprocessing.active_children()) - others:
                process.kill()
        pool.shutdown(wait=not is_cut_short, cancel_futures=True)


@contextmanager
def unheard_by_new_processes() -> Iterator[None]:
    """Have processes that are started inside the ``with`` hear no signal until they ignore them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _settle_in(parent: int, further: Callable[[], None] | None) -> None:
    bind_to_parent(parent)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    if further is not None:
        further()
