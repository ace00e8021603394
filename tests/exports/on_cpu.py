"""What a trainer's script does with its arguments: prints a JSON object a line.

Runs in the trainer's own environment, and imports nothing of this project.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any


def main(*, keys: Callable[[], Any], train: Callable[[str], dict[str, Any]]) -> None:
    """Print the keys that a trainer knows, or what two steps of each file come to, or the error."""
    if sys.argv[1:] == ["--keys"]:
        print(json.dumps(keys()))
        return
    for name in sys.argv[1:]:
        try:
            found = train(name)
        except (Exception, SystemExit):  # noqa: BLE001
            found = {"error": traceback.format_exc()[-3000:]}
        print("\n" + json.dumps({"file": name, **found}), flush=True)
