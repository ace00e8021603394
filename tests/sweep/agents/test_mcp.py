"""The tools as an agent has them: by the protocol's own client, over a process's pipes."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from qlora_sweep.sweep.agents import tools
from qlora_sweep.sweep.stop_signals import INTERRUPTED

mcp = pytest.importorskip("mcp")
from mcp.client.stdio import StdioServerParameters  # noqa: E402

EXAMPLE = Path("docs/examples/dataset.jsonl").absolute()
TOOLS = {
    *("plan", "gpus", "models", "data", "run", "status", "best", "report"),
    *("verify", "train", "job", "stop"),
}
PATIENCE_SECONDS = 120.0

Ask = Callable[..., Awaitable[Any]]


def served(directory: Path, talk: Callable[[Any], Awaitable[None]]) -> None:
    """Let a client talk to a server that runs in a directory."""
    kept = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH")
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    parameters = StdioServerParameters(
        command=sys.executable,
        args=["-P", "-m", "qlora_sweep", "mcp"],
        env={**environment, "HOME": str(directory)},
        cwd=directory,
    )

    async def main() -> None:
        async with mcp.Client(parameters) as client:
            await talk(client)

    asyncio.run(main())


async def told(client: Any, tool: str, **arguments: Any) -> dict[str, Any]:
    """Return what a tool answers."""
    result = await client.call_tool(tool, arguments)
    assert not result.is_error, result.content[0].text
    assert json.loads(result.content[0].text) == result.structured_content
    return dict(result.structured_content)


async def refused(client: Any, tool: str, **arguments: Any) -> str:
    """Return why a tool refuses."""
    result = await client.call_tool(tool, arguments)
    assert result.is_error
    return str(result.content[0].text)


async def ended(client: Any, name: str) -> dict[str, Any]:
    """Return what is said of a job that has ended."""
    until = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < until:
        found = await told(client, "job", name=name)
        if not found["is_running"]:
            return found
        await asyncio.sleep(0.5)
    raise AssertionError(found)


def test_the_tools_are_listed_and_refuse_in_the_commands_words(tmp_path: Path) -> None:
    async def talk(client: Any) -> None:
        listed = (await client.list_tools()).tools
        assert {tool.name for tool in listed} == TOOLS
        assert all(tool.description and tool.input_schema for tool in listed)
        assert "did you mean 'a10'" in await refused(client, "plan", gpu="a11")
        # What begins like an option is none.
        assert "'--details' is no" in await refused(client, "plan", gpu="--details")
        assert (await told(client, "gpus", name="A10"))["memory_bytes"] > 20 * 2**30
        assert "no job '../sweep.db'" in await refused(client, "job", name="../sweep.db")

    served(tmp_path, talk)


@pytest.mark.integration
def test_an_agent_plans_without_a_gpu(tmp_path: Path) -> None:
    async def talk(client: Any) -> None:
        found = await told(client, "plan", gpu="a10", settings={"lora_rank": 32})
        assert found["recommended"]["config"]["lora_rank"] == 32
        assert found["recommended"]["fits"] is True
        assert "table" in found["left_out"]
        whole = await told(client, "plan", gpu="a10", settings={"lora_rank": 32}, parts=["table"])
        assert whole["table"]
        settings = {"micro_batch_size": 4, "target_modules": ["q_proj", "v_proj"]}
        exact = await told(client, "plan", gpu="a10", settings=settings, is_exact=True)
        assert exact["config"]["micro_batch_size"] == 4
        assert exact["config"]["target_modules"] == ["q_proj", "v_proj"]
        assert "lora_rank" in await refused(client, "plan", gpu="a10", settings={"lora_rnak": 8})
        assert len((await told(client, "gpus"))["gpus"]) > 30
        assert (await told(client, "models"))["models"]
        rows = await told(client, "data", dataset=str(EXAMPLE), model="demo")
        assert rows["rows"] > 0
        assert "warnings" not in rows
        tokenizer = {"data.tokenizer": "demo"}
        rough = await told(
            client, "data", dataset=str(EXAMPLE), model="llama-3.1-8b", settings=tokenizer
        )
        assert "it is not the model's" in rough["warnings"][0]

    served(tmp_path, talk)


@pytest.mark.integration
def test_an_agent_goes_from_a_study_to_an_adapter(tmp_path: Path) -> None:
    async def talk(client: Any) -> None:
        study = {"space": "cpu-demo", "study": "agents", "trials": 2}
        started = await told(client, "run", **study)
        assert started["study"] == "agents"
        assert (await ended(client, started["job"]))["exit_code"] == 0
        assert (await told(client, "status", study="agents"))["trials"]["total"] == 2
        best = await told(client, "best", study="agents")
        assert best["best"]["measurement"]["tokens_per_second"] > 0
        report = await told(client, "report", study="agents")
        assert Path(report["report"]).stat().st_size > 10_000
        output = tmp_path / "adapter"
        training = {"what": "demo", "data": str(EXAMPLE), "max_steps": 2, "is_cut": True}
        begun = await told(client, "train", output=str(output), **training)
        done = await ended(client, begun["job"])
        assert done["exit_code"] == 0, done["said"]
        assert done["document"]["steps"] == 2
        assert (output / "adapter_model.safetensors").exists()
        again = await refused(client, "train", output=str(output), **training)
        assert str(output) in again
        assert "no exports" in await refused(client, "verify", what=str(output))

    served(tmp_path, talk)


@pytest.mark.integration
def test_what_was_started_outlives_the_server(tmp_path: Path) -> None:
    names: list[str] = []

    async def start(client: Any) -> None:
        names.append((await told(client, "run", space="cpu-demo", study="long"))["job"])

    async def stop(client: Any) -> None:
        assert (await told(client, "job", name=names[0]))["is_running"]
        await told(client, "stop", name=names[0])
        found = await ended(client, names[0])
        assert "Interrupted" in "\n".join(found["said"])
        assert found["exit_code"] == INTERRUPTED

    served(tmp_path, start)
    served(tmp_path, stop)


def test_what_an_agent_says_is_typed_as_options() -> None:
    settings = {"lora_rank": 8, "compile": True, "target_modules": ["q_proj", "v_proj"]}
    words = tools.words_of(
        "run", "--help", trials=0, max_dollars=0.0, model=None, dry_run=True, settings=settings
    )
    assert words[:6] == ["run", "--trials", "0", "--max-dollars", "0.0", "--dry-run"]
    assert words[6:10] == ["--set", "lora_rank=8", "--set", "compile=true"]
    assert words[10:] == ["--set", 'target_modules=["q_proj", "v_proj"]', "--", "--help"]


def test_long_parts_are_left_out_and_named() -> None:
    document = {"short": 1, "long": "x" * 10_000}
    assert tools.shortened(document) == {"short": 1, "left_out": ["long"]}
    assert tools.shortened(document, ["long"]) == document
