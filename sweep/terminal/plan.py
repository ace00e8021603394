"""`sweep plan`: what was asked is answered, and printed as JSON or as one screen."""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Any, assert_never

from rich.console import RenderableType

from qlora_sweep.search_spaces.errors import NothingFits
from qlora_sweep.search_spaces.redaction import redacted
from qlora_sweep.sweep.planning.answers import (
    Answer,
    CalibrationTrials,
    GpuPlans,
    HostPlans,
    LongestSequences,
    PlannedFile,
    answer,
)
from qlora_sweep.sweep.planning.backwards import Cheapest
from qlora_sweep.sweep.planning.documents import documents_of
from qlora_sweep.sweep.planning.question import PlanRequest
from qlora_sweep.sweep.terminal import plan_screen
from qlora_sweep.sweep.terminal.console import note, say_as_is, width_of, working
from qlora_sweep.sweep.terminal.dataset import prepared
from qlora_sweep.sweep.terminal.drawing import PLAIN_WIDTH, rendered
from qlora_sweep.sweep.terminal.plan_details import configurations


def plan(request: PlanRequest, **seams: Any) -> int:
    """Answer and print; return 0, or 1 where nothing fits. Takes and raises what `answer` does."""
    with working("predicting") as progress:
        read_dataset = partial(prepared, progress=progress)
        found = answer(request, read_dataset=read_dataset, progress=progress, tell=note, **seams)
        if request.as_json:
            printed = _json_lines(found)
        else:
            printed = _screen_text(found, request)
    say_as_is(printed)
    return 0 if found.fits else NothingFits.exit_code


def _json_lines(found: Answer) -> str:
    documents = map(redacted, documents_of(found))
    return "\n".join(json.dumps(document, allow_nan=False) for document in documents)


def _screen_text(found: Answer, request: PlanRequest) -> str:
    screen = _screen(found, is_detailed=request.is_detailed)
    width = width_of(sys.stdout)
    return rendered(screen, is_terminal=width is not None, width=width or PLAIN_WIDTH)


def _screen(found: Answer, *, is_detailed: bool) -> RenderableType:
    """Return what a person sees of an answer."""
    match found:
        case HostPlans():
            return plan_screen.ways(found, is_detailed=is_detailed)
        case GpuPlans(plans=(plan,)):
            return plan_screen.one_gpu(plan, is_detailed=is_detailed)
        case GpuPlans():
            return plan_screen.several_gpus(found, is_detailed=is_detailed)
        case CalibrationTrials():
            return plan_screen.calibrating(found.of_gpus)
        case LongestSequences():
            return plan_screen.longest(found.of_gpus, is_detailed=is_detailed)
        case Cheapest():
            return plan_screen.cheapest(found, is_detailed=is_detailed)
        case PlannedFile():
            return configurations(found)
        case _:
            assert_never(found)
