"""The choice of a kernel for INT8 products, and the kernels without a GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.lazy import lazily

torch = lazily("torch")
MODULE = "qlora_sweep.sweep.training.int8_products"
products = lazily(MODULE)
eight_bit = lazily("qlora_sweep.sweep.training.eight_bit")

ROOT = Path(__file__).parents[3]
HOPPER = (9, 0)
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="Triton is not installed: torch was built for CPUs alone",
)


def kernels_process(tmp_path: Path, *arguments: str, **environment: str) -> str:
    """Return what `int8_kernels` prints."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    told = os.environ | environment | {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.sweep.training.int8_kernels", *arguments]
    done = subprocess.run(command, env=told, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_the_fastest_is_chosen_and_of_ties_the_first() -> None:
    # Milliseconds of (4096, 14336) and of (4096, 4096) at 5,120 rows of an H200.
    first, wide, tall, deep = products.HOPPER_TILES
    assert products.fastest({first: 0.555, wide: 0.548, tall: 0.5415, None: 0.66}) == tall
    assert products.fastest({first: 0.151, wide: 0.163, tall: 0.164, None: 0.2}) == first
    assert products.fastest({None: 0.2, first: 0.199, deep: 0.21}) is None
    assert products.fastest({None: 0.2}) is None


@pytest.mark.parametrize(("m", "of"), [(1, 100), (150, 100), (199, 100), (250, 400), (9000, 400)])
def test_rows_that_were_not_timed_take_the_choice_of_the_nearest(m: int, of: int) -> None:
    first, wide, *_ = products.HOPPER_TILES
    timed = {100: first, 400: wide}
    assert products.nearest(timed, m) is timed[of]


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6), (8, 9), HOPPER, (10, 0), (12, 0)])
def test_each_gpu_has_the_kernels_that_it_has_the_memory_for(capability: tuple[int, int]) -> None:
    most = {(8, 0): 163, HOPPER: 227, (10, 0): 227}.get(capability, 99)
    kernels = products.candidates(capability)
    assert None in kernels
    tiles = [kernel for kernel in kernels if kernel is not None]
    assert all(kernel.shared_bytes <= most * 1024 for kernel in tiles)
    assert bool(tiles) is (capability >= (8, 0))
    # Torch's own where Triton was never measured.
    assert (kernels[0] is None) is (capability != HOPPER)


@pytest.mark.parametrize(("m", "n"), [(1, 16), (17, 4096), (5120, 14336), (5121, 4096), (9, 2**26)])
def test_sums_of_torchs_kernel_take_little_memory_at_a_time(m: int, n: int) -> None:
    rows = products.rows_at_once(m, n)
    assert 1 <= rows <= m
    assert rows <= 17 or 4 * rows * n <= 64 * 2**20
    if rows < m:
        assert rows >= min(17, m) / 2


def test_choices_are_on_the_disk_for_the_next_process(tmp_path: Path) -> None:
    path = tmp_path / "choices.json"
    assert products._read(path) == {}
    gpu = products.Gpu("NVIDIA H200", HOPPER)
    first, wide, *_ = products.HOPPER_TILES
    case = products.Case(gpu, 4096, 1024, "torch.bfloat16")
    other = products.Case(gpu, 1024, 4096, "torch.float16")
    products._write(path, {case: {5120: first, 512: None}})
    # What another process wrote in the meantime stays.
    products._write(path, {case: {5120: wide}, other: {64: None}})
    assert products._read(path) == {case: {5120: wide, 512: None}, other: {64: None}}
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("text", ["", "[{]", "3", '[{"gpu": "x"}]', "[null]", "\x00"])
def test_a_file_of_choices_that_cannot_be_read_is_ignored(tmp_path: Path, text: str) -> None:
    path = tmp_path / "choices.json"
    path.write_text(text)
    assert products._read(path) == {}
    case = products.Case(products.Gpu("x", (8, 0)), 16, 16, "torch.bfloat16")
    products._write(path, {case: {32: None}})
    assert products._read(path) == {case: {32: None}}


def test_tiles_that_are_tried_no_more_are_not_taken_from_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "choices.json"
    case = products.Case(products.Gpu("NVIDIA A10", (8, 6)), 16, 16, "torch.bfloat16")
    products._write(path, {case: {32: None, 64: products.OTHER_TILES[0]}})
    rows = json.loads(path.read_text())
    rows[1]["tiles"][0] = 512
    path.write_text(json.dumps(rows))
    assert products._read(path) == {case: {32: None}}


def test_a_directory_that_takes_no_file_is_no_failure(tmp_path: Path) -> None:
    case = products.Case(products.Gpu("x", (8, 0)), 16, 16, "torch.bfloat16")
    products._write(tmp_path / "missing" / "choices.json", {case: {32: None}})


def test_a_graph_has_the_choice_of_its_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = products.Gpu("NVIDIA H200", HOPPER)
    first, wide, *_ = products.HOPPER_TILES
    case = products.Case(gpu, 32, 16, "torch.bfloat16")
    monkeypatch.setattr(f"{MODULE}._this_gpu", lambda: gpu)
    monkeypatch.setattr(f"{MODULE}._choices", {case: {8: wide, 64: None}})

    def tiles(left: Any, right: Any) -> Any:
        m, k = left.shape
        found = products._chosen(m, len(right), k, torch.bfloat16)
        return left.sum() + (found[1] if found else -1)

    run = torch.compile(tiles, backend="eager", fullgraph=True, dynamic=False)
    for rows, columns, of in ((8, 32, wide.columns), (80, 32, -1), (8, 48, first.columns)):
        assert int(run(torch.zeros(rows, 16), torch.zeros(columns, 16))) == of


def test_on_a_cpu_there_is_nothing_to_choose() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(32, 64, bias=False, dtype=torch.bfloat16))
    eight_bit.to_8_bits(model, "int8")
    eight_bit.compute_in_8_bits(model, "int8")
    assert not eight_bit.tune_products(model, rows=8)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_what_is_timed_is_forward_and_backward_of_each_integer_layer(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = [torch.nn.Linear(32, 64, bias=False), torch.nn.Linear(64, 64, bias=False)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(64, 8, bias=False)).to(torch.bfloat16)
    eight_bit.to_8_bits(model, kind)
    eight_bit.compute_in_8_bits(model, kind)
    asked: list[Any] = []
    monkeypatch.setattr(f"{MODULE}.tune", lambda shapes, **_: asked.extend(sorted(shapes)))
    eight_bit.tune_products(model, rows=8)
    of_integers = [(8, 32, 64), (8, 64, 32), (8, 64, 64)]
    assert asked == (of_integers if kind == "int8" else [])


@needs_triton
def test_the_kernels_multiply_as_the_reference(tmp_path: Path) -> None:
    if tuple(map(int, metadata.version("triton").split(".")[:2])) < (3, 7):
        pytest.skip("before 3.7 Triton's interpreter takes no NumPy from 2.4 on")
    kernels_process(tmp_path, "interpreted", TRITON_INTERPRET="1")


@needs_triton
@pytest.mark.parametrize(
    ("capability", "instruction"),
    [
        ((8, 0), "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32"),
        ((8, 6), "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32"),
        ((8, 9), "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32"),
        (HOPPER, "wgmma.mma_async.sync.aligned.m64n"),
    ],
)
def test_the_kernel_of_each_gpu_has_its_instructions_for_integers(
    tmp_path: Path, capability: tuple[int, int], instruction: str
) -> None:
    most = {(8, 0): 163, HOPPER: 227}.get(capability, 99) * 1024
    printed = kernels_process(tmp_path, "compiled", *map(str, capability), TRITON_INTERPRET="0")
    lines = printed.splitlines()
    assert len(lines) == 2 * (len(products.candidates(capability)) - 1)
    for line in lines:
        shared, *instructions = line.split()
        assert 0 < int(shared) <= most
        assert instructions
        assert all(each.startswith(instruction) for each in instructions)
