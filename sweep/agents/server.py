"""The MCP server: the tools, on standard input and output."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import getdoc
from typing import Any

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations

from qlora_sweep.search_spaces.errors import SweepError
from qlora_sweep.sweep.agents import tools

INSTRUCTIONS = (
    "qlora-sweep finds the fastest QLoRA configuration that fits a GPU, and proves it. Begin with "
    "`plan`, which predicts and needs no GPU. On a machine with the GPU `run` measures; follow it "
    "by `status`, and read `best`. `train` makes an adapter with the winner's settings, `verify` "
    "runs it beside what was measured. What is started goes on by itself: ask `job` how it went. "
    "Numbers are bytes, seconds, tokens a second and US dollars; null is unknown."
)
Tool = Callable[..., tools.Document]


def server() -> MCPServer[Any]:
    """Return a server with all tools."""
    made: MCPServer[Any] = MCPServer("qlora-sweep", instructions=INSTRUCTIONS)
    started = tools.Started()
    reads = ToolAnnotations(read_only_hint=True)
    keeps = ToolAnnotations(read_only_hint=False, destructive_hint=False)
    every: dict[Tool, ToolAnnotations] = {
        tools.plan: reads,
        tools.gpus: reads,
        tools.models: reads,
        tools.data: reads,
        started.run: keeps,
        tools.status: reads,
        tools.best: reads,
        tools.report: keeps,
        started.verify: keeps,
        started.train: keeps,
        started.job: reads,
        started.stop: keeps,
    }
    for tool, hints in every.items():
        made.tool(description=getdoc(tool), annotations=hints)(_told(tool))
    return made


def _told(tool: Tool) -> Tool:
    """Have what a tool refuses told to who called it, in the tool's own words."""

    @wraps(tool)
    def call(*args: Any, **options: Any) -> tools.Document:
        try:
            return tool(*args, **options)
        except SweepError as error:
            raise ToolError(str(error)) from error

    return call
