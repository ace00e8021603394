"""A tracer that traces nothing: a profile written by hand, whose memory adds up on paper."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any

from qlora_sweep.search_spaces.errors import EnvironmentFault, InputError
from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.sweep.predict.memory.allocator import MIB
from qlora_sweep.sweep.predict.memory.profiles import (
    ACTIVATIONS,
    GRADIENTS,
    LOSS,
    Change,
    Structure,
)

KIB = 1024
LAYERS = 4
WEIGHTS = 100 * MIB
UNSPLIT = 3 * MIB
"""Of the weights' blocks, what the allocator does not split off where segments do not expand."""
ADAPTER_ELEMENTS = 1024
"""Elements for each unit of rank, of the one trained tensor in a layer."""

MODEL = ModelSpec(
    "imagined",
    "directory",
    {
        "model_type": "imagined",
        "num_hidden_layers": LAYERS,
        "hidden_size": 64,
        "vocab_size": 256,
    },
)


class ImaginedTracer:
    """Answers at once; ``asked`` counts what would have been traced.

    A layer keeps 4 KiB a token (1 KiB where it is recomputed) and rises by 10 KiB a token on the
    way; the loss rises by ``loss_bytes`` a token and keeps half of that until it is done. From a
    length of ``window`` on, masks of length x length bytes are there throughout.
    """

    def __init__(
        self,
        *,
        loss_bytes: int = 64 * KIB,
        window: int | None = None,
        is_same_in_fp16: bool = True,
    ) -> None:
        self.asked: list[Structure] = []
        self._loss_bytes = loss_bytes
        self._window = window
        self._is_same_in_fp16 = is_same_in_fp16

    def trace_all(
        self, model: ModelSpec, structures: Iterable[Structure]
    ) -> Generator[tuple[Structure, dict[str, Any] | InputError | EnvironmentFault]]:
        for structure in structures:
            try:
                yield structure, self.trace(model, structure)
            except (InputError, EnvironmentFault) as error:
                yield structure, error

    def close(self) -> None:
        """It holds nothing."""

    def trace(self, model: ModelSpec, structure: Structure) -> dict[str, Any]:
        self.asked.append(structure)
        kept = (1 if structure.is_checkpointed else 4) * KIB
        forward = {
            "tape": [
                (Change.LEAVE, "forward>backward0#0", 0, ACTIVATIONS, 0),
                (Change.BIRTH, 0, 2, ACTIVATIONS, 0),
                (Change.DEATH, 0, 2, ACTIVATIONS, 0),
            ],
            "highest": [1],
        }
        backward = {
            "tape": [
                (Change.BIRTH, 0, 1, ACTIVATIONS, 0),
                (Change.FETCH, "forward>backward0#0", 0, ACTIVATIONS, 0),
                (Change.DEATH, 0, 1, ACTIVATIONS, 0),
                (Change.LEAVE, "backward>end#0", 4, GRADIENTS, 0),
            ],
            "highest": [0],
        }
        mask = [(Change.LEAVE, "embed>backward#0", 5, ACTIVATIONS, 0)]
        loss = self._loss_bytes
        return {
            "positions": [0, 1, 1, 2],
            "base": {
                "allocated_bytes": WEIGHTS,
                "requested_bytes": WEIGHTS - UNSPLIT,
                "reserved_bytes": WEIGHTS + MIB,
                "holes": [],
            },
            "adapters": [[ADAPTER_ELEMENTS]] * 3,
            "segments": {
                "embed": {"tape": mask if structure.is_long else [], "highest": []},
                **{f"forward {i}": forward for i in range(3)},
                "head": {
                    "tape": [
                        (Change.BIRTH, 0, 3, LOSS, 0),
                        (Change.LEAVE, "head>head_backward#0", 3, LOSS, 0),
                        (Change.DEATH, 0, 3, LOSS, 0),
                    ],
                    "highest": [1],
                },
                "head_backward": {
                    "tape": [(Change.FETCH_ALL, "head>head_backward#0", 3, LOSS, -1)],
                    "highest": [],
                },
                **{f"backward {i}": backward for i in range(3)},
            },
            "sizes": [
                {"bs": kept},
                {"bs": 10 * KIB},
                {"bs": 10 * KIB - kept},
                {"bs": loss // 2},
                {"r": 4 * ADAPTER_ELEMENTS},
                {"bss": 1},
            ],
            "window": self._window,
            "is_same_in_fp16": self._is_same_in_fp16,
        }
