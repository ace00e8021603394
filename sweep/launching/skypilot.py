"""How a rental is written for SkyPilot: a task's YAML, for RunPod, Lambda, AWS and GCP.

Written for SkyPilot 0.14.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shlex
import socket
from collections.abc import Mapping, Sequence
from getpass import getuser
from pathlib import Path
from typing import Any

import yaml

from search_spaces.errors import InputError, did_you_mean, listed, quote
from search_spaces.prices import TYPED_PROVIDER, Offer
from storage.files import WRITTEN_BY
from sweep.launching.rental import BUCKETS, RESULTS, Machine, Rental, card_name, short_name

CLOUDS: Mapping[str, str] = {"aws": "AWS", "gcp": "GCP", "lambda": "Lambda", "runpod": "Runpod"}
"""What price lists call the clouds, by SkyPilot's own names."""
CARDS: Mapping[str, str] = {
    "t4": "T4",
    "v100-16gb": "V100",
    "v100-32gb": "V100-32GB",
    "l4": "L4",
    "a10": "A10",
    "a10g": "A10G",
    "rtx-3090": "RTX3090",
    "rtx-4090": "RTX4090",
    "rtx-5090": "RTX5090",
    "a6000": "A6000",
    "rtx-6000-ada": "RTX6000-Ada",
    "l40s": "L40S",
    "a100-40gb": "A100",
    "a100-80gb": "A100-80GB",
    "h100-80gb": "H100",
    "rtx-pro-6000": "RTXPRO6000",
    "h200": "H200",
    "b200": "B200",
}
"""SkyPilot's names by the catalogue's: those of its catalogues, version 0.14.1."""
CARDS_OF: Mapping[str, Mapping[str, str]] = {
    "aws": {
        name: CARDS[name]
        for name in (
            "t4", "v100-16gb", "v100-32gb", "l4", "a10g", "l40s", "a100-40gb", "a100-80gb",
            "h100-80gb", "rtx-pro-6000", "h200", "b200",
        )
    },
    "gcp": {
        name: CARDS[name]
        for name in (
            "t4", "v100-16gb", "l4", "a100-40gb", "a100-80gb", "h100-80gb", "rtx-pro-6000",
            "h200", "b200",
        )
    },
    "lambda": {
        **{name: CARDS[name] for name in ("a10", "a6000", "a100-40gb", "a100-80gb", "b200")},
        # Both kinds of it are called the same there.
        "h100-80gb": "H100",
        "h100-pcie": "H100",
    },
    "runpod": {
        **{
            name: CARDS[name]
            for name in ("l4", "rtx-3090", "rtx-4090", "rtx-5090", "rtx-6000-ada", "l40s", "b200")
        },
        "v100-16gb": "V100-SXM2",
        "a6000": "RTXA6000",
        "a100-80gb": "A100-80GB-SXM",
        "a100-80gb-pcie": "A100-80GB",
        "h100-80gb": "H100-SXM",
        "h100-pcie": "H100",
        "h100-nvl": "H100-NVL",
        "rtx-pro-6000": "RTXPRO6000",
        "h200": "H200-SXM",
    },
}  # fmt: skip
NO_SPOT = ("lambda",)
DEARER = 1.25
"""Over the listed price, what a machine may cost: lists age, and regions differ."""
IDLE_MINUTES = 5
MACHINE_NAME_MAX = 40
DISK_GB = 100
HOME_INPUTS, HOME_VOLUME, SINCE = "sweep-inputs", "sweep-volume", ".sweep-rented-since"
ENVIRONMENT, REQUIREMENTS = "sweep-venv", "sweep-requirements.txt"
RUNPOD_VOLUME = "/sweep-volume"
"""A pod's volumes are mounted at absolute paths."""


class SkyPilot:
    """SkyPilot, which finds the machine in a cloud of the person's."""

    name, title, tool, package = "skypilot", "SkyPilot", "sky", "skypilot"
    idle_seconds = 60.0 * IDLE_MINUTES
    file_name = "skypilot.yaml"

    def check(self, machine: Machine) -> None:
        """Raise an `InputError` where no such machine is known."""
        cloud = machine.cloud
        if cloud is not None and cloud not in CLOUDS:
            raise InputError(f"--with cloud: unknown cloud '{cloud}'{did_you_mean(cloud, CLOUDS)}")
        names = CARDS if cloud is None else CARDS_OF[cloud]
        card_name(machine, names, where=self.title if cloud is None else CLOUDS[cloud])
        if machine.is_spot and cloud in NO_SPOT:
            raise InputError(f"--with spot: {CLOUDS[cloud]} has no spot machines: leave it out")
        if machine.is_spot and cloud == "runpod":
            raise InputError(
                "--with spot: what a pod of RunPod's leaves can be fetched from that pod alone, "
                "and nobody can log in to a spot machine's: leave it out, or name another cloud"
            )

    def offers(self, machine: Machine, offers: Sequence[Offer]) -> list[Offer]:
        """Return the offers of the cloud, or of all of them; spot or not, as is asked."""
        clouds = CLOUDS.values() if machine.cloud is None else [CLOUDS[machine.cloud]]
        return [
            one
            for one in offers
            if one.provider == TYPED_PROVIDER
            or (one.provider in clouds and one.is_spot is machine.is_spot)
        ]

    def dearest(self, machine: Machine, usd_per_hour: float) -> float:
        """Return the price above which no machine is taken."""
        return math.ceil(usd_per_hour * DEARER * 100) / 100

    def volume(self, machine: Machine, typed: str | None = None) -> str:
        """Return the name of this person's bucket, the same at every call: others' names are taken.

        Each study has a directory in it.

        Raises:
            InputError: RunPod's machines mount no bucket, and a volume is made in one region; or
                neither a bucket nor a volume can be called so.
        """
        if typed is not None:
            return _checked(typed, machine)
        if machine.cloud == "runpod":
            raise InputError(
                "--with volume: RunPod mounts no bucket, so name a network volume of yours; "
                "sky volumes apply makes one"
            )
        owner = hashlib.sha256(f"{getuser()}@{socket.gethostname()}".encode()).hexdigest()[:8]
        return f"qlora-sweep-{owner}"

    def text(self, rental: Rental) -> str:
        """Return the task."""
        start = shlex.join(self.start(rental, Path("THIS_FILE")))
        header = (
            f"# {WRITTEN_BY}: study {rental.study} on SkyPilot. "
            f"Costs ${rental.cost.usd_max:.2f} at most.\n"
            f"# Start it, and resume it, with: {start}\n"
        )
        return header + yaml.dump(
            task(rental), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10_000
        )

    def start(self, rental: Rental, file: Path) -> list[str]:
        """Return the command that starts it; jobs on spot machines are SkyPilot's to recover."""
        name = _machine_name(rental)
        secrets = [word for one in rental.secrets for word in ("--secret", one)]
        if rental.machine.is_spot:
            return [self.tool, "jobs", "launch", "--yes", *secrets, "--name", name, str(file)]
        return [self.tool, "launch", "--yes", *secrets, "--cluster", name, str(file)]

    def stop(self, rental: Rental) -> str:
        """Return the command that ends the job and its machine."""
        if rental.machine.is_spot:
            return f"sky jobs cancel --name {_machine_name(rental)}"
        return f"sky down {_machine_name(rental)}"

    def results(self, rental: Rental) -> str:
        """Return the command that fetches report and database from where they are kept."""
        study, there = shlex.quote(rental.study), shlex.quote(f"{RESULTS}/{rental.study}")
        if rental.machine.cloud == "runpod":
            return (
                f"rsync -a {_machine_name(rental)}:{RUNPOD_VOLUME}/{study} {RESULTS}/"
                f"  # until the pod is gone, {IDLE_MINUTES} minutes after the end"
            )
        bucket = _bucket(rental)
        address = bucket.get("source") or f"{_SCHEMES[bucket['store']]}://{bucket['name']}"
        if address.startswith("gs://"):
            return f"mkdir -p {there} && gcloud storage rsync --recursive {address}/{study} {there}"
        return f"aws s3 sync {address}/{study} {there}"

    def login(self, machine: Machine) -> list[str]:
        """Return the command that asks which clouds there is an account for."""
        return [self.tool, "check", *([machine.cloud] if machine.cloud else []), "-o", "json"]

    def is_logged_in(self, machine: Machine, code: int, said: str) -> bool:
        """Whether a cloud is enabled: the one that is asked for, where one is."""
        return code == 0 and enabled(said, machine.cloud)

    def how_to_log_in(self, machine: Machine) -> str:
        """Return the command that says what is missing."""
        return f"sky check {machine.cloud or ''}".strip()


_SCHEMES = {"s3": "s3", "gcs": "gs"}
_BUCKET = r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]"
"""What S3 and Google's storage take both, or one of them."""
_FOLDERS = r"(/(?!\.\.?(/|$))[\w.-]+)*/?"
_NETWORK_VOLUME = r"[a-zA-Z0-9][a-zA-Z0-9_-]{0,62}"


def _checked(typed: str, machine: Machine) -> str:
    """Return the name of a bucket, its address, or a network volume's name.

    Raises:
        InputError: it is none of those that the machine can have.
    """
    if machine.cloud == "runpod":
        pattern, what = (
            _NETWORK_VOLUME,
            "RunPod mounts no bucket, so name a network volume of yours",
        )
    elif "://" in typed:
        schemes = "|".join(map(re.escape, BUCKETS))
        pattern, what = f"({schemes}){_BUCKET}{_FOLDERS}", f"an address is {listed(BUCKETS)}BUCKET"
    else:
        pattern, what = _BUCKET, "a bucket is named by 3 to 63 of a-z, 0-9, '.', '_' and '-'"
    if not re.fullmatch(pattern, typed, re.ASCII):
        raise InputError(f"--with volume: {what}, got {quote(typed)}")
    return typed


def task(rental: Rental) -> dict[str, Any]:
    """Return the task, by the keys of SkyPilot's YAML."""
    machine = rental.machine
    names = CARDS if machine.cloud is None else CARDS_OF[machine.cloud]
    resources: dict[str, Any] = {} if machine.cloud is None else {"infra": machine.cloud}
    resources |= {
        "accelerators": {card_name(machine, names, where="SkyPilot"): machine.cards},
        "disk_size": DISK_GB,
        "max_hourly_cost": rental.cost.usd_per_hour_most,
        "autostop": {"idle_minutes": IDLE_MINUTES, "down": True},
    }
    if machine.is_spot:
        resources["use_spot"] = True
    whole: dict[str, Any] = {"name": _machine_name(rental), "resources": resources}
    mounts: dict[str, Any] = {
        f"~/{HOME_INPUTS}/{one.name}": str(one.local) for one in rental.parcel.inputs
    }
    wheel = rental.parcel.package
    mounts[f"~/{HOME_INPUTS}/{wheel.name}"] = str(wheel)
    if machine.cloud == "runpod":
        # Its pods can mount no bucket.
        whole["volumes"] = {RUNPOD_VOLUME: rental.volume}
        volume = RUNPOD_VOLUME
    else:
        mounts[f"~/{HOME_VOLUME}"] = _bucket(rental)
        volume = f"$HOME/{HOME_VOLUME}"
    whole["file_mounts"] = mounts
    if rental.secrets:
        whole["secrets"] = dict.fromkeys(rental.secrets)
    return {**whole, "setup": _setup(rental), "run": _run(rental, volume)}


def _bucket(rental: Rental) -> dict[str, str]:
    """Return the bucket: one that is there, by its address, or one that SkyPilot makes."""
    if rental.volume.startswith(BUCKETS):
        return {"source": rental.volume.rstrip("/"), "mode": "MOUNT"}
    store = "gcs" if rental.machine.cloud == "gcp" else "s3"
    return {"name": rental.volume, "store": store, "mode": "MOUNT"}


def _setup(rental: Rental) -> str:
    """Return what makes an environment on the machine; where it is there already it stays."""
    parcel = rental.parcel
    wheel = f"$HOME/{HOME_INPUTS}/{parcel.package.name}"
    python = f'"$HOME/{ENVIRONMENT}/bin/python"'
    install = f"uv pip install --quiet --python {python}"
    needed = "\n".join(parcel.requirements)
    return (
        "set -euo pipefail\n"
        f'date +%s >"$HOME/{SINCE}"\n'
        # uv brings the Python that is asked for, with the headers that Triton compiles against.
        "python3 -m pip install --quiet --user uv || python3 -m pip install --quiet uv\n"
        'export PATH="$HOME/.local/bin:$PATH"\n'
        f'uv venv --quiet --allow-existing --python {parcel.python} "$HOME/{ENVIRONMENT}"\n'
        f"cat >\"$HOME/{REQUIREMENTS}\" <<'REQUIREMENTS'\n{needed}\nREQUIREMENTS\n"
        f'{install} --requirement "$HOME/{REQUIREMENTS}"\n'
        f"{install} --no-deps {_quoted(wheel)}\n"
    )


def _run(rental: Rental, volume: str) -> str:
    cost = rental.cost
    return (
        "set -euo pipefail\n"
        f"cd {_quoted('$HOME')}\n"
        # What ends it where nothing else did.
        f"exec timeout --kill-after=60 {cost.limit_seconds} "
        f'"$HOME/{ENVIRONMENT}/bin/python" -P -m sweep.launching.keeping '
        f"--volume {_quoted(f'{volume}/{rental.study}')} "
        f'--since "$HOME/{SINCE}" '
        f"--limit-seconds {cost.limit_seconds} --overhead-seconds {cost.machine.boot_seconds:g} "
        f"-- {shlex.join(rental.words(HOME_INPUTS))}\n"
    )


def _quoted(path: str) -> str:
    """Return a path for the shell, which fills in the home directory that it may begin with."""
    home, is_below, rest = path.partition("$HOME")
    if home or not is_below:
        return shlex.quote(path)
    return f'"$HOME"{shlex.quote(rest)}' if rest else '"$HOME"'


def enabled(said: str, cloud: str | None) -> bool:
    """Whether what ``sky check -o json`` prints holds a cloud that computes: this one, if any.

    By workspace: the clouds, each with what it is enabled for. Lines stand before it where
    SkyPilot's server had to be started.
    """
    try:
        workspaces = json.loads(said[said.index("{") :])
        clouds = {
            name.lower()
            for workspace in workspaces.values()
            for name, capabilities in workspace.items()
            if "compute" in capabilities
        }
    except (ValueError, AttributeError, TypeError):
        return False
    return bool(clouds) if cloud is None else cloud in clouds


def _machine_name(rental: Rental) -> str:
    whole = f"sweep-{rental.study}"
    return short_name(_slug(whole), of=whole, most=MACHINE_NAME_MAX)


def _slug(text: str) -> str:
    """Return a name of lower-case letters, digits and hyphens that begins with a letter."""
    slug = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return slug if slug[:1].isalpha() else f"s-{slug}".strip("-")


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as such, to be read."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)
