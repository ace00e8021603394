"""Runs where both providers' packages are: prints what they read in the job that is named."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import sys
import warnings
from pathlib import Path
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
    return {
        "app": module.app.name,
        "entrypoints": entrypoints,
        "functions": functions,
        "gpu": found.gpus,
        "cpu": found.cpu,
        "memory": found.memory,
        "volumes": {str(path): volume.name for path, volume in found.volumes.items()},
        "secrets": len(found.secrets),
        "command": module.COMMAND,
        "timeout_is_known": "timeout" in inspect.signature(modal.App.function).parameters,
    }


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
        "autostop": {
            "idle_minutes": resources.autostop_config.idle_minutes,
            "down": resources.autostop_config.down,
        },
        "files": task.file_mounts,
        "buckets": {
            path: {"name": bucket.name, "mode": bucket.mode.value}
            for path, bucket in task.storage_mounts.items()
        },
        "volumes": task.volumes,
        "setup": task.setup,
        "run": task.run,
        "secrets": list(task.secrets),
    }


if __name__ == "__main__":
    home = Path(os.environ["HOME"])
    assert not (home / ".modal.toml").exists(), "the test's own home has no account"
    look = {".py": modal_app, ".yaml": skypilot_task}[Path(sys.argv[1]).suffix]
    print(json.dumps(look(sys.argv[1])))
