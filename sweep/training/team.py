"""Owns what processes need that train one configuration together, each on a card of its own: their
places, their process group, and what each can show of itself.

Of one process nothing here is used. Knows nothing of how the others are started or told what to do
(`sweep.running.followers`), nor of trials.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from storage.records import Stage

_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}
"""All of them are on one host. Whoever says otherwise in the environment is not overruled."""
_PORT = {"MASTER_PORT": "0"}
"""Asked for by accelerate, and never used: they find each other by a file."""


@dataclass(frozen=True)
class Place:
    """A process among those that train together."""

    rank: int = 0
    """Of the process, and the index of its card among those that can be seen."""
    size: int = 1
    """How many train together."""

    @property
    def is_alone(self) -> bool:
        """Whether there are no others."""
        return self.size == 1


ALONE = Place()


@dataclass(frozen=True)
class Look:
    """What one process shows of itself and of its card."""

    rank: int
    size: int
    """Of the process group that it trains in."""
    adapters: str
    """Fingerprint of all bits of what it trained; of what is sharded, of its own share."""
    tokens: str
    """Fingerprint of the newest micro-batch."""
    held_share: float
    """Of the weights of the decoder layers, how much is on its card."""
    peak_allocated_bytes: int
    peak_stage: Stage
    peak_reserved_bytes: int | None = None
    allocator_retries: int = 0
    spilled_bytes: int = 0
    loss: float | None = None
    """Of the newest step; None where it is not finite."""


class Team(Protocol):
    """The others that train with the first process, told by it what to do. Real:
    `sweep.running.followers.Followers`.
    """

    @property
    def place(self) -> Place:
        """The first process's own."""
        ...

    def step(self) -> None:
        """Have each of the others queue one more optimizer step; to be followed by one's own."""
        ...

    def evaluate(self, *, batches: int) -> None:
        """Have each of the others evaluate as many micro-batches as one is about to."""
        ...

    def look(self) -> Sequence[Look]:
        """Return what each of the others shows once it is done with its steps so far."""
        ...

    def end(self) -> None:
        """Have the others take off what was put on the base for this configuration."""
        ...

    def abandon(self) -> None:
        """Note that they are in the middle of something which is not to be ended any more."""
        ...


def join(place: Place, *, meeting: Path, device: torch.device) -> None:
    """Become one of a process group, and wait for the others.

    Args:
        place: this process's.
        meeting: a file that the processes of this group alone have, and that nobody wrote before.
        device: what it trains on.
    """
    leave()
    for name, value in {**_LOOPBACK, **_PORT}.items():
        os.environ.setdefault(name, value)
    own = {"RANK": place.rank, "LOCAL_RANK": place.rank, "WORLD_SIZE": place.size}
    os.environ.update({name: str(value) for name, value in own.items()})
    os.environ["LOCAL_WORLD_SIZE"] = str(place.size)
    is_on_card = device.type == "cuda"
    dist.init_process_group(
        "nccl" if is_on_card else "gloo",
        store=dist.FileStore(  # type: ignore[attr-defined]
            str(meeting), place.size
        ),
        rank=place.rank,
        world_size=place.size,
        device_id=device if is_on_card else None,
    )


def leave() -> None:
    """Be alone again, as at the start."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        # To destroy it is to wait for the others, who may be gone, or busy with something else.
        dist.distributed_c10d._abort_process_group()
    elif dist.is_initialized():
        dist.destroy_process_group()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)


def group_size() -> int:
    """Return how many processes are in this one's group; one where it is in none."""
    return dist.get_world_size() if dist.is_initialized() else 1


def fingerprint(tensors: Iterable[torch.Tensor]) -> str:
    """Return a text that differs where any bit of the tensors does; read where they are.

    Each tensor is summed up, plainly and by place, so that next to nothing has to be fetched.
    """
    sums = [_sums(tensor) for tensor in tensors]
    values = torch.stack(sums).cpu().numpy().tobytes() if sums else b""
    return hashlib.sha256(values).hexdigest()[:16]


_AS_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _sums(tensor: torch.Tensor) -> torch.Tensor:
    # Whole numbers of 64 bits wrap around, and so lose no bit of a sum.
    bits = tensor.detach().contiguous().view(_AS_WHOLE[tensor.element_size()]).flatten()
    wide = bits.to(torch.int64)
    places = torch.arange(1, wide.numel() + 1, device=wide.device)
    return torch.stack([wide.sum(), (wide * places).sum()])
