"""Runs where both providers' packages are: prints what they read in the job that is named."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any


def modal_app(path: str) -> dict[str, Any]:
    import modal

    spec = importlib.util.spec_from_file_location("rented", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # What `modal run` looks for in a file is the same: its app, and one entry point.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        entrypoints = list(module.app.registered_entrypoints)
        functions = list(module.app.registered_functions)
    found = module.study._spec_
    assert isinstance(module.volume, modal.Volume)
    return {
        "app": module.app.name,
        "entrypoints": entrypoints,
        "functions": functions,
        "gpu": found.gpus,
        "volumes": {str(path): volume.name for path, volume in found.volumes.items()},
        "secrets": len(found.secrets),
        "command": module.COMMAND,
        "ends": [ending(module, code) for code in ("0", "3", INTERRUPTED)],
    }


INTERRUPTED = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit())
os.kill(os.getppid(), signal.SIGINT)
time.sleep(30)
"""


def ending(module: ModuleType, code: str) -> list[Any]:
    """Run the function's body here; return how it ended, and how often it kept the volume."""

    class Volume:
        commits = 0

        def commit(self) -> None:
            Volume.commits += 1

        def reload(self) -> None:
            raise RuntimeError("there are open files preventing the operation")

    module.volume, module.RELOAD_SECONDS = Volume(), 0.05
    program = (
        code if code is INTERRUPTED else f"import time; time.sleep(0.2); raise SystemExit({code})"
    )
    module.COMMAND = [sys.executable, "-c", program]
    # Python in a container hears the signal as a KeyboardInterrupt, whoever ignores it here.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        module.study.local()
    except (RuntimeError, KeyboardInterrupt) as error:
        return [type(error).__name__, Volume.commits]
    return ["", Volume.commits]


def skypilot_task(path: str) -> dict[str, Any]:
    import sky
    import yaml

    # `sky launch task.yaml --secret NAME` reads it like that.
    config = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    given = [(name, os.environ[name]) for name in config.get("secrets", ())]
    task = sky.Task.from_yaml_config(config, secrets_overrides=given)
    assert sky.Task.from_yaml(path).name == task.name
    (resources,) = task.resources
    return {
        "name": task.name,
        "cloud": None if resources.cloud is None else str(resources.cloud).lower(),
        "accelerators": resources.accelerators,
        "spot": resources.use_spot,
        "max_hourly_cost": resources.max_hourly_cost,
        "idle_minutes": resources.autostop_config.idle_minutes,
        "down": resources.autostop_config.down,
        "files": task.file_mounts,
        "buckets": {name: bucket.name for name, bucket in task.storage_mounts.items()},
        "volumes": task.volumes,
        "secrets": list(task.secrets),
    }


if __name__ == "__main__":
    look = {".py": modal_app, ".yaml": skypilot_task}[Path(sys.argv[1]).suffix]
    print(json.dumps([look(path) for path in sys.argv[1:]]))
