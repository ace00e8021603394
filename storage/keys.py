"""Owns under which keys a database keeps what is known of a study and of its trials."""

from __future__ import annotations

DEFINITION, RUNS, WALL_SECONDS, IDENTITY = "definition", "runs", "wall_seconds", "identity"
CARD_SECONDS = "card_seconds"
"""Missing where it is the wall seconds: a study of one card at a time."""
ENDED = "ended"
QUALITY_TOKENS = "quality_tokens"
FORMAT = "format"
STUDY_KEYS = (DEFINITION, RUNS, WALL_SECONDS, IDENTITY, ENDED, FORMAT)
"""Of a study's user attributes."""
FORMAT_WRITTEN = 1
"""How this version stores a study. It goes up with whatever an earlier version would overlook or
undo: one that knows a lower number alone reads the study, and does not write to it."""

CONFIG, STARTED_AT, RECORD, VERDICT = "config", "started_at", "record", "verdict"
PURPOSE, ATTEMPT = "purpose", "attempt"
"""Of a trial's user attributes, less what is there for people who look into the database."""
BEGUN_KEYS = (STARTED_AT, PURPOSE, ATTEMPT)
"""Those that are read of a trial that has not ended, beside its configuration."""
