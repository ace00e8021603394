"""Owns under which keys a database keeps what is known of a study and of its trials."""

from __future__ import annotations

DEFINITION, RUNS, WALL_SECONDS, IDENTITY = "definition", "runs", "wall_seconds", "identity"
CARD_SECONDS = "card_seconds"
DRIVER = "driver"
"""What tells the process that drives a study from those that drove it before."""
ENDED = "ended"
QUALITY_TOKENS = "quality_tokens"
FORMAT = "format"
FORMAT_WRITTEN = 1
"""How this version stores a study. It goes up with whatever an earlier version would overlook or
undo: one that knows a lower number alone reads the study, and does not write to it."""

CONFIG, STARTED_AT, RECORD, VERDICT = "config", "started_at", "record", "verdict"
PURPOSE, ATTEMPT, NEVER_RAN = "purpose", "attempt", "never_ran"
"""Of a trial's user attributes, less what is there for people who look into the database."""
