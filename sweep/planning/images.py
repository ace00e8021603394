"""What images of other sizes would take of a GPU, beside the text that rows have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.vision import SeenImage, VisionKind, vision_kind, whole_config
from qlora_sweep.sweep.planning.survey import fitting
from qlora_sweep.sweep.predict.forecast import Forecast, Progress, silent

SIDES = frozenset((256, 512, 768, 1024, 1280, 1536, 2048))
"""Pixels of the images that are looked at."""
_SIDE_MAX = 4096


@dataclass(frozen=True)
class ImagePlan:
    """A configuration with images of several sizes; its rows keep as many tokens of text."""

    seen: SeenImage
    """What the images that are asked about become."""
    is_fixed: bool
    """Whether images of every size become that."""
    by_side: Mapping[int, Forecast]
    """By pixels; none where they make no difference."""
    largest: tuple[int, int] | None = None
    """The most pixels that fit surely, and perhaps; 0 for none. None where it was not asked."""


def plan_images(
    shown: Forecast, *, is_exact: bool, progress: Progress = silent
) -> ImagePlan | None:
    """Return what images of other sizes would take; None where rows are text alone.

    Args:
        shown: the configuration.
        is_exact: whether the largest image that fits is looked for, which takes some seconds.
        progress: reports what is done.

    Raises:
        EnvironmentFault: the tracing process does not answer.
    """
    config = shown.config
    model = shown.forecaster.model
    kind = vision_kind(model)
    if config.image_size is None or kind is None or shown.violation is not None:
        return None
    whole = whole_config(model)
    seen = kind.seen(whole, config.image_size)
    if kind.is_fixed:
        return ImagePlan(seen, True, {})
    sized = _Sized(config, kind, whole, config.seq_len - seen.tokens, model.max_positions)
    asked: dict[int, TrialConfig] = {}
    for side in sorted(SIDES | {seen.side}):
        changed = sized.of(side)
        if changed is not None:
            asked[side] = changed
    # Together, as each size is traced for itself, by as many children as there may be.
    found = shown.forecaster.forecast(list(asked.values()), progress=progress)
    by_side = dict(zip(asked, found, strict=True))
    largest = None
    if is_exact:
        sides = sized.all_sides()
        sure, possible = fitting(
            sides, lambda side: shown.forecaster.forecast([sized.known(side)])[0].fit
        )
        # Of none it is 0.
        sides.insert(0, 0)
        largest = sides[sure], sides[possible]
    return ImagePlan(seen, False, by_side, largest)


@dataclass(frozen=True)
class _Sized:
    """A configuration's rows with images of other sizes."""

    config: TrialConfig
    kind: VisionKind
    whole: Mapping[str, object]
    beside: int
    """Tokens of each row that are not its image's."""
    longest: int | None
    """Tokens of a row, at most; None without a limit."""

    def of(self, side: int) -> TrialConfig | None:
        """Return the configuration with images of so many pixels; None where its rows would be too
        long."""
        length = self.beside + self.kind.seen(self.whole, side).tokens
        if self.longest is not None and length > self.longest:
            return None
        return self.config.changed(image_size=side, seq_len=length)

    def known(self, side: int) -> TrialConfig:
        """Return it of a size that goes into a row."""
        config = self.of(side)
        assert config is not None
        return config

    def all_sides(self) -> list[int]:
        """Return the sizes that images are resized to, as far as they go into a row."""
        sides = {self.kind.seen(self.whole, side).side for side in range(1, _SIDE_MAX + 1)}
        return sorted(side for side in sides if self.of(side) is not None)
