"""`sweep mcp`: the commands as tools of an MCP server, for an agent that starts it."""

from __future__ import annotations

from qlora_sweep.search_spaces.errors import EnvironmentFault, install_extra


def serve() -> None:
    """Answer on standard input and output until that is closed.

    Raises:
        EnvironmentFault: the package `mcp` is not installed.
    """
    try:
        from qlora_sweep.sweep.agents.server import server
    except ImportError as error:
        advice = install_extra("mcp")
        raise EnvironmentFault(f"the MCP server is not installed: {advice}") from error
    server().run()
