"""What must be so before the first test imports torch."""

from __future__ import annotations

import os

# As the supervisor does for a worker on the CPU; torch reads it when it is imported.
os.environ["TORCHDYNAMO_DISABLE"] = "1"
