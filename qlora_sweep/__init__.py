"""Name a GPU, get the fastest QLoRA configuration that fits it, and proof.

All that is installed lies in this package. In the repository its four parts stand at the top, and
this folder has links to them.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qlora_sweep.sweep.api import (
        EnvironmentFault,
        InputError,
        NothingFits,
        Plan,
        Study,
        SweepError,
        Winner,
        best,
        plan,
        tune,
    )

__all__ = [
    "EnvironmentFault",
    "InputError",
    "NothingFits",
    "Plan",
    "Study",
    "SweepError",
    "Winner",
    "best",
    "plan",
    "tune",
]

if not os.path.isdir(os.path.join(__path__[0], "sweep")):
    # A copy of the repository without its links, as some archives are unpacked.
    __path__.append(os.path.dirname(__path__[0]))


def __getattr__(name: str) -> Any:
    """Return what this package offers, imported when it is asked for: that takes a moment."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from qlora_sweep.sweep import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted(globals().keys() | set(__all__))
