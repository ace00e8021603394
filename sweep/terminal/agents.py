"""`sweep mcp`: the commands as tools of an MCP server, for an agent that starts it."""

from __future__ import annotations

from importlib.util import find_spec

from qlora_sweep.search_spaces.errors import EnvironmentFault, install_extra


def serve() -> None:
    """Answer on standard input and output until that is closed.

    Raises:
        EnvironmentFault: the package `mcp` is not installed.
    """
    if find_spec("mcp") is None:
        advice = install_extra("mcp")
        raise EnvironmentFault(f"what the MCP server needs is not installed: {advice}")
    from qlora_sweep.sweep.agents.server import server

    server().run()
