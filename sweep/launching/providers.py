"""Which providers there are, and asking a provider's own tool whether it can start anything."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Sequence

from search_spaces.errors import EnvironmentFault
from sweep.launching.modal import Modal
from sweep.launching.rental import Machine, Provider
from sweep.launching.skypilot import SkyPilot

PROVIDERS: dict[str, Provider] = {one.name: one for one in (Modal(), SkyPilot())}
LOGIN_SECONDS = 300.0
"""SkyPilot starts a server of its own at the first question, which took a minute here."""

Find = Callable[[str], str | None]
"""Returns where a program is; None where it is not."""
Ask = Callable[[Sequence[str]], tuple[int, str]]
"""Runs a command; returns its exit code and what it printed."""


def asked(command: Sequence[str]) -> tuple[int, str]:
    """Run a command to its end; return its exit code and what it printed on stdout."""
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=LOGIN_SECONDS,
    )
    return done.returncode, done.stdout


def require(
    provider: Provider, machine: Machine, *, find: Find = shutil.which, ask: Ask = asked
) -> None:
    """Check that a provider's tool is installed and knows an account.

    Raises:
        EnvironmentFault: it is not, or does not; the message says what to type.
    """
    alone = "or write the file alone, with --dry-run"
    if find(provider.tool) is None:
        raise EnvironmentFault(
            f"{provider.title}'s command {provider.tool} is not installed: "
            f"pip install {provider.package} (in an environment of its own), {alone}"
        )
    try:
        code, said = ask(provider.login(machine))
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentFault(f"{provider.tool} does not answer: {error}") from error
    if not provider.is_logged_in(machine, code, said):
        where = "" if machine.cloud is None else f" for {machine.cloud}"
        raise EnvironmentFault(
            f"{provider.title} knows no account{where}: {provider.how_to_log_in(machine)}, {alone}"
        )
