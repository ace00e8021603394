"""The ranks that train one configuration together, each on a GPU of its own: their process group,
what rank 0 decides for all, and what each shows of itself.

A single process is in no group, and is rank 0 of one.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from storage.records import Stage

_DEFAULTS = {
    # All of them are on one host. Whoever says otherwise in the environment is not overruled.
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "MASTER_ADDR": "127.0.0.1",
    # Asked for by accelerate, and never used: they find each other by a file.
    "MASTER_PORT": "0",
}
_control: dist.ProcessGroup | None = None
"""Of the same ranks, for what they agree on: no device waits for it. None for a single process."""


@dataclass(frozen=True)
class Place:
    """A rank among those that train together."""

    rank: int = 0
    """Of the process, and the index of its GPU among those that can be seen."""
    size: int = 1
    """How many train together."""

    @property
    def is_alone(self) -> bool:
        """Whether there are no others."""
        return self.size == 1


ALONE = Place()


@dataclass(frozen=True)
class Look:
    """What one rank shows of itself and of its GPU."""

    rank: int
    size: int
    """Of the process group that it trains in."""
    adapters: str
    """Fingerprint of all that it trained; of what is sharded, of its own share."""
    tokens: str
    """Fingerprint of the newest micro-batch."""
    held_share: float
    """Of the weights of the decoder layers, how much is on its GPU."""
    peak_allocated_bytes: int
    peak_stage: Stage
    peak_reserved_bytes: int | None = None
    allocator_retries: int = 0
    spilled_bytes: int = 0
    loss: float | None = None
    """Of the newest step; None where it is not finite."""


def join(place: Place, *, meeting: Path, device: torch.device) -> None:
    """Become one of a process group, and wait for the others.

    Args:
        place: this process's.
        meeting: a file that the processes of this group alone have, and that nobody wrote before.
        device: what it trains on.
    """
    global _control
    leave()
    for name, value in _DEFAULTS.items():
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
    _control = dist.new_group(backend="gloo")


def leave() -> None:
    """Be a single process again, as at the start."""
    global _control
    if _control is not None:
        dist.destroy_process_group(_control)
        _control = None
    if dist.is_initialized() and dist.get_backend() == "nccl":
        # To destroy it is to wait for the others, who may be gone, or busy with something else.
        dist.distributed_c10d._abort_process_group()
    elif dist.is_initialized():
        dist.destroy_process_group()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)


def here() -> Place:
    """Return this process's place in the group that it is in."""
    return Place(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else ALONE


def group_size() -> int:
    """Return how many processes are in this one's group; one where it is in none."""
    return here().size


def agreed(value: bool) -> bool:
    """Return what rank 0 has for it: what clocks decide, one decides for all."""
    if _control is None:
        return value
    flag = torch.tensor([int(value)])
    dist.broadcast(flag, 0, group=_control)
    return bool(flag)


def gathered(look: Look) -> list[Look]:
    """Return what each rank shows, once all of them do."""
    looks = [look] * look.size
    if _control is not None:
        dist.all_gather_object(looks, look, group=_control)
    return looks


def fingerprint(tensors: Iterable[torch.Tensor]) -> str:
    """Return a hash of the tensors' bytes: another where any bit is."""
    found = hashlib.sha256()
    for tensor in tensors:
        # A copy: what numpy has seen is not to be resized any more, as FSDP does.
        flat = tensor.detach().flatten().to("cpu", copy=True)
        found.update(flat.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:32]
