from __future__ import annotations

import json
import platform
from importlib import metadata

from storage.environment import PACKAGES, fingerprint


def test_a_fingerprint_is_plain_json_with_a_version_for_every_package() -> None:
    found = fingerprint(device="cpu")
    assert json.loads(json.dumps(found)) == found
    assert set(found["versions"]) == set(PACKAGES)
    assert found["versions"]["optuna"] == metadata.version("optuna")
    assert found["python"] == platform.python_version()
    assert found["cores"] >= 1
    assert found["cpu"]


def test_on_a_cpu_there_is_nothing_to_say_of_a_gpu() -> None:
    found = fingerprint(device="cpu")
    assert (found["gpu"], found["driver"], found["cuda_driver"]) == (None, None, None)


def test_what_is_known_of_the_card_is_told_and_the_rest_is_null() -> None:
    found = fingerprint(device="cuda", gpu="NVIDIA GB10", driver="580.1")
    assert (found["gpu"], found["driver"], found["cuda_driver"]) == ("NVIDIA GB10", "580.1", None)
