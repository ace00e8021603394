"""Owns under which keys a database keeps what is known of a study and of its trials."""

from __future__ import annotations

DEFINITION, RUNS, WALL_SECONDS, IDENTITY = "definition", "runs", "wall_seconds", "identity"
ENDED = "ended"
QUALITY_TOKENS = "quality_tokens"
STUDY_KEYS = (DEFINITION, RUNS, WALL_SECONDS, IDENTITY, ENDED)
"""Of a study's user attributes."""

CONFIG, STARTED_AT, RECORD, VERDICT = "config", "started_at", "record", "verdict"
PURPOSE, ATTEMPT = "purpose", "attempt"
"""Of a trial's user attributes, less what is there for people who look into the database."""
BEGUN_KEYS = (STARTED_AT, PURPOSE, ATTEMPT)
"""Those that are read of a trial that has not ended, beside its configuration."""
