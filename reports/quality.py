"""Owns how a held-out loss is put into words. Knows nothing of how trials are ordered."""

from __future__ import annotations

from reports import units
from storage.records import Measurement


def loss_words(measured: Measurement) -> str:
    """Return a held-out loss with its interval over seeds, where it has one."""
    quality = measured.quality
    if quality is None:
        return units.DASH
    ends = quality.eval_loss_ci95
    within = "" if ends is None else f" ({ends[0]:.4g}–{ends[1]:.4g})"
    return f"{quality.eval_loss:.4f}{within}"
