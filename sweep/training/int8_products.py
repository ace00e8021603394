"""Products of INT8 matrices on a GPU, scaled and rounded to 16 bits where they are summed.

Torch's own kernel (`torch._int_mm`) is CUTLASS's for Ampere, whose sums of 32 bits go through
memory to what scales them. The Triton kernel here keeps them in registers. Which is faster, and
with which tiles, depends on the GPU and the shape, so that both are timed (`tune`).

An exported script carries this file beside it: it needs torch alone, and Triton where that is.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # as where torch was built for CPUs alone
    triton = None

_SUMS_BYTES = 64 * 2**20
"""Most that sums of 32 bits take at a time where torch's kernel makes them: memory is predicted
without them, whichever kernel is chosen."""
_SUM_BYTES = 4
_LEAST_ROWS = 17
"""`torch._int_mm` takes no fewer."""
_SCALED_AT_ONCE = 1024
"""Sums of a row that a program scales."""
_ROWS_OF_TILES = 8
"""Rows of tiles whose programs run beside one another, so that they share columns in the cache."""
_FLUSHED_BYTES = 256 * 2**20
"""Written before each timed product, as Triton's own benchmarks do: no second-level cache holds
more, and the host queues the product meanwhile."""
_WARM_RUNS = 2
_TIMED_RUNS = 11
_TIE = 0.01
"""Times that are closer than this do not tell two kernels apart."""
_REMEMBERED = "qlora_sweep_int8_products"
"""Beginning of the name of the file of choices, in the compiler's cache."""
_HOPPER = (9, 0)
_BLACKWELL = (10, 0)
_AMPERE = (8, 0)
_KIB = 1024
_SHARED_BYTES = {
    (8, 0): 163 * _KIB,
    (8, 7): 163 * _KIB,
    _HOPPER: 227 * _KIB,
    _BLACKWELL: 227 * _KIB,
    (10, 3): 227 * _KIB,
}
"""Shared memory that a block may have, by compute capability."""
_LEAST_SHARED_BYTES = 99 * _KIB
"""Of every other compute capability from 8.0 on."""


@dataclass(frozen=True)
class Tiles:
    """How the Triton kernel divides a product (m, n) of depth k."""

    rows: int
    columns: int
    """Of a program's tile of the product."""
    depth: int
    """Of what is multiplied at once."""
    stages: int
    """Tiles of the operands that are in shared memory at a time."""
    warps: int
    """Of a program, 32 threads each."""

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a program's operands."""
        return self.stages * (self.rows + self.columns) * self.depth


Kernel = Tiles | None
"""What makes a product: the Triton kernel, or torch's in chunks of rows for None."""

HOPPER_TILES = (
    Tiles(128, 128, 64, stages=5, warps=4),
    Tiles(128, 256, 128, stages=4, warps=8),
    Tiles(256, 128, 128, stages=3, warps=8),
    Tiles(128, 128, 128, stages=4, warps=8),
)
"""The fastest of eleven on an H200 at 5,120 rows, by one shape or another; the first is within 3 %
of the best for each (docs/lab/speed.md)."""
OTHER_TILES = (
    Tiles(128, 128, 64, stages=4, warps=4),
    Tiles(128, 128, 64, stages=4, warps=8),
    Tiles(128, 256, 64, stages=3, warps=8),
    Tiles(256, 128, 64, stages=3, warps=8),
    Tiles(128, 128, 128, stages=3, warps=8),
    Tiles(64, 128, 64, stages=4, warps=4),
    Tiles(64, 64, 128, stages=4, warps=4),
)
"""What is usual on Ampere and Ada; none was timed there."""


class Shape(NamedTuple):
    """Of a product (m, n) of matrices (m, k) and (n, k)."""

    m: int
    n: int
    k: int


@dataclass(frozen=True)
class Gpu:
    """What the choice of a kernel depends on besides the product."""

    name: str
    capability: tuple[int, int]


@dataclass(frozen=True)
class Case:
    """A kind of products that differ in their number of rows alone."""

    gpu: Gpu
    n: int
    k: int
    dtype: str
    """Of the result."""


Choices = dict[Case, dict[int, Kernel]]
"""The fastest kernel by the number of rows that it was timed for."""

_choices: Choices = {}


def candidates(capability: tuple[int, int]) -> tuple[Kernel, ...]:
    """Return the kernels that a GPU may be fastest with, first the one that is taken where none was
    timed.

    Args:
        capability: of the GPU.
    """
    if capability < _AMPERE or torch.version.hip is not None:
        # Triton 3.7 compiles no product of integers for the first; the second has other tiles.
        return (None,)
    is_hopper = _HOPPER <= capability < _BLACKWELL
    tiles = HOPPER_TILES if is_hopper else OTHER_TILES
    most = _SHARED_BYTES.get(capability, _LEAST_SHARED_BYTES)
    kernels: list[Kernel] = [each for each in tiles if each.shared_bytes <= most]
    if is_hopper:
        kernels.append(None)
    else:
        kernels.insert(0, None)
    return tuple(kernels)


def fastest(times: Mapping[Kernel, float]) -> Kernel:
    """Return the kernel that is chosen by its time: the first of those that are as fast as the
    fastest, within 1 %.

    Args:
        times: seconds of a product by kernel; one at least.
    """
    limit = min(times.values()) * (1 + _TIE)
    return next(kernel for kernel, seconds in times.items() if seconds <= limit)


def nearest(timed: Mapping[int, Kernel], m: int) -> Kernel:
    """Return the kernel of the number of rows that is nearest, by ratio.

    Args:
        timed: kernels by number of rows; one at least.
        m: rows of a product.
    """

    def ratio(other: int) -> float:
        return max(other, m) / min(other, m)

    return timed[min(timed, key=ratio)]


@torch.compiler.assume_constant_result
def _chosen(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Return the tiles of a product on this process's GPU; none for torch's kernel. A graph has
    them as constants: another choice is another graph in the compiler's cache."""
    gpu = _this_gpu()
    timed = _choices.get(Case(gpu, n, k, str(dtype)))
    if timed:
        kernel = nearest(timed, m)
    else:
        kernel = candidates(gpu.capability)[0]
    return numbers(kernel)


def _this_gpu() -> Gpu:
    return Gpu(torch.cuda.get_device_name(), torch.cuda.get_device_capability())


def product(
    left: torch.Tensor,
    right: torch.Tensor,
    row_scales: torch.Tensor,
    column_scales: torch.Tensor,
    added: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return ``left`` times the transpose of ``right``, scaled (m, n), by the kernel that was
    chosen; on a GPU, with Triton.

    Args:
        left: INT8 (m, k).
        right: INT8 (n, k), row-major; n and k are multiples of 16.
        row_scales: fp32 (m, 1).
        column_scales: fp32 (n,).
        added: fp32 (n,), to each row once it is scaled; None for nothing.
        dtype: of the result.
    """
    m, k = left.shape
    n = len(right)
    if m == 0:
        return row_scales.new_empty(m, n, dtype=dtype)
    tiles = _chosen(m, n, k, dtype)
    return _made(tiles, left.contiguous(), right, row_scales, column_scales, added, dtype)


def _made(tiles: Sequence[int], *operands: Any) -> torch.Tensor:
    """Return what `product` does of its arguments, by a kernel's `numbers`."""
    result: torch.Tensor
    if tiles:
        result = _in_tiles(*operands, list(tiles))
    else:
        result = _in_chunks(*operands)
    return result


def numbers(kernel: Kernel) -> tuple[int, ...]:
    """Return the fields of tiles; none for torch's kernel."""
    return () if kernel is None else astuple(kernel)


def tune(
    shapes: Collection[Shape],
    *,
    dtype: torch.dtype,
    device: torch.device,
    on_timed: Callable[[], object] = lambda: None,
) -> bool:
    """Choose the kernels of products by timing them, those that were never timed on such a GPU
    under these versions of torch and Triton. Return whether any was timed.

    What that takes is the operands of a product and 256 MiB.

    Args:
        shapes: of the products.
        dtype: of their results.
        device: where they are made; on a CPU there is nothing to choose.
        on_timed: called after each kernel.
    """
    if triton is None or device.type != "cuda":
        return False
    gpu = _this_gpu()
    path = _path()
    for case, timed in _read(path).items():
        _choices.setdefault(case, {}).update(timed)
    missing = []
    for shape in sorted(set(shapes)):
        if shape.m not in _choices.get(Case(gpu, shape.n, shape.k, str(dtype)), {}):
            missing.append(shape)
    kernels = candidates(gpu.capability)
    if len(kernels) == 1 or not missing:
        return False
    try:
        for shape in missing:
            times = dict(_times(shape, kernels, dtype, device, on_timed))
            if times:
                case = Case(gpu, shape.n, shape.k, str(dtype))
                _choices.setdefault(case, {})[shape.m] = fastest(times)
    except torch.OutOfMemoryError:
        # What is not timed has the default.
        return True
    _write(path, _choices)
    return True


def _times(
    shape: Shape,
    kernels: Collection[Kernel],
    dtype: torch.dtype,
    device: torch.device,
    on_timed: Callable[[], object],
) -> Iterator[tuple[Kernel, float]]:
    """Yield kernels and the seconds of a product; not those that a GPU refuses, or whose result is
    another than torch's."""
    # Not the generator that dropout draws from.
    generator = torch.Generator(device).manual_seed(0)

    def integers(rows: int) -> torch.Tensor:
        size = (rows, shape.k)
        return torch.randint(-127, 128, size, dtype=torch.int8, device=device, generator=generator)

    left = integers(shape.m)
    right = integers(shape.n)
    row_scales = torch.rand(shape.m, 1, device=device, generator=generator) / shape.k
    column_scales = torch.rand(shape.n, device=device, generator=generator)
    flushed = torch.empty(_FLUSHED_BYTES, dtype=torch.int8, device=device)
    expected = _in_chunks(left, right, row_scales, column_scales, None, dtype)
    for kernel in kernels:
        tiles = numbers(kernel)

        def run(tiles: Sequence[int] = tiles) -> torch.Tensor:
            return _made(tiles, left, right, row_scales, column_scales, None, dtype)

        try:
            is_exact = torch.equal(run(), expected)
            seconds = _median_seconds(run, flushed)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # noqa: BLE001 - whatever it is, this kernel does not run here
            is_exact = False
        if is_exact:
            yield kernel, seconds
        on_timed()


def _median_seconds(run: Callable[[], object], flushed: torch.Tensor) -> float:
    """Return the seconds of what a GPU runs, with nothing in its second-level cache."""
    marks = []
    for _ in range(_WARM_RUNS + _TIMED_RUNS):
        flushed.zero_()
        begun: Any = torch.cuda.Event(enable_timing=True)
        ended: Any = torch.cuda.Event(enable_timing=True)
        begun.record()
        run()
        ended.record()
        marks.append((begun, ended))
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) / 1000 for a, b in marks[_WARM_RUNS:])


# What was chosen, on the disk


def _path() -> Path:
    """Return the file of choices of these versions, beside what torch's compiler keeps."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir()) / f"{_REMEMBERED}_{torch.__version__}_{triton.__version__}.json"


def _read(path: Path) -> Choices:
    """Return the choices of a file; none where it is not there or not as `_write` leaves it."""
    choices: Choices = {}
    try:
        for row in json.loads(path.read_text(encoding="utf-8")):
            major, minor = row["capability"]
            gpu = Gpu(str(row["gpu"]), (int(major), int(minor)))
            case = Case(gpu, int(row["n"]), int(row["k"]), str(row["dtype"]))
            kernel: Kernel = None
            if row["tiles"]:
                kernel = Tiles(*map(int, row["tiles"]))
            if kernel in candidates(gpu.capability) and int(row["m"]) > 0:
                choices.setdefault(case, {})[int(row["m"])] = kernel
    except (OSError, ValueError, TypeError, KeyError):
        return {}
    return choices


def _write(path: Path, choices: Choices) -> None:
    """Write choices, with those that other processes wrote meanwhile; nothing where the disk does
    not take them."""
    all_choices = _read(path)
    for case, timed in choices.items():
        all_choices.setdefault(case, {}).update(timed)
    rows = []
    for case, timed in all_choices.items():
        for m, kernel in sorted(timed.items()):
            row = {
                "gpu": case.gpu.name,
                "capability": case.gpu.capability,
                "m": m,
                "n": case.n,
                "k": case.k,
                "dtype": case.dtype,
                "tiles": numbers(kernel),
            }
            rows.append(row)
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, suffix=".tmp", delete=False
        ) as file:
            json.dump(rows, file)
        os.replace(file.name, path)
    except OSError:
        return


# The kernels


def _sums(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the product (m, n) of INT8 matrices (m, k) and (n, k) by torch's kernel, in INT32."""
    rows = len(left)
    if rows < _LEAST_ROWS:
        left = torch.nn.functional.pad(left, (0, 0, 0, _LEAST_ROWS - rows))
    return torch._int_mm(left, right.t())[:rows]


def rows_at_once(m: int, n: int) -> int:
    """Return the rows of a chunk of a product (m, n) whose sums are in 64 MiB; chunks are as equal
    as can be, as a small one leaves a GPU idle."""
    most = max(_LEAST_ROWS, _SUMS_BYTES // (_SUM_BYTES * n))
    chunks = max(1, -(-m // most))
    return max(1, -(-m // chunks))


if triton is not None:

    @triton.jit
    def _scaled(  # type: ignore[no-untyped-def]
        sums, rows, columns, row_scales, column_scales, added, m, n, has_added: tl.constexpr
    ):
        """Return sums (rows, columns) times their scales, with what is added, in fp32."""
        of_rows = tl.load(row_scales + rows, mask=rows < m, other=0.0)
        of_columns = tl.load(column_scales + columns, mask=columns < n, other=0.0)
        values = sums.to(tl.float32) * of_rows[:, None] * of_columns[None, :]
        if has_added:
            values += tl.load(added + columns, mask=columns < n, other=0.0)[None, :]
        return values

    @triton.jit
    def _int8_product(  # type: ignore[no-untyped-def]
        left, right, row_scales, column_scales, added, out, m, n, k,
        of_rows: tl.constexpr, of_columns: tl.constexpr, depth: tl.constexpr,
        stages: tl.constexpr, warps: tl.constexpr, group: tl.constexpr,
        is_even: tl.constexpr, has_added: tl.constexpr,
    ):  # fmt: skip
        # Programs of one group go down its rows of tiles before they go on to the next column.
        program = tl.program_id(0)
        tiles_down = tl.cdiv(m, of_rows)
        in_group = group * tl.cdiv(n, of_columns)
        first = program // in_group * group
        size = tl.minimum(tiles_down - first, group)
        tile_row = first + program % in_group % size
        tile_column = program % in_group // size
        rows = tile_row * of_rows + tl.arange(0, of_rows)
        columns = tile_column * of_columns + tl.arange(0, of_columns)
        inner = tl.arange(0, depth)
        # Beyond the edge any row will do, as nothing is stored of it.
        lefts = left + (rows % m).to(tl.int64)[:, None] * k + inner[None, :]
        rights = right + (columns % n).to(tl.int64)[None, :] * k + inner[:, None]
        sums = tl.zeros((of_rows, of_columns), dtype=tl.int32)
        for start in range(0, k, depth):
            if is_even:
                x = tl.load(lefts)
                y = tl.load(rights)
            else:
                x = tl.load(lefts, mask=inner[None, :] < k - start, other=0)
                y = tl.load(rights, mask=inner[:, None] < k - start, other=0)
            sums = tl.dot(x, y, sums, out_dtype=tl.int32)
            lefts += depth
            rights += depth
        values = _scaled(sums, rows, columns, row_scales, column_scales, added, m, n, has_added)
        is_in = (rows < m)[:, None] & (columns < n)[None, :]
        outs = out + rows.to(tl.int64)[:, None] * n + columns[None, :]
        tl.store(outs, values.to(out.dtype.element_ty), mask=is_in)

    @triton.jit
    def _scale_sums(  # type: ignore[no-untyped-def]
        sums, row_scales, column_scales, added, out, m, n,
        has_added: tl.constexpr, size: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0) + tl.arange(0, 1)
        columns = tl.program_id(1) * size + tl.arange(0, size)
        at = row.to(tl.int64)[:, None] * n + columns[None, :]
        is_in = (columns < n)[None, :]
        read = tl.load(sums + at, mask=is_in, other=0)
        values = _scaled(read, row, columns, row_scales, column_scales, added, m, n, has_added)
        tl.store(out + at, values.to(out.dtype.element_ty), mask=is_in)

    @torch.library.triton_op("sweep::int8_product", mutates_args=())
    def _in_tiles(
        left: torch.Tensor,
        right: torch.Tensor,
        row_scales: torch.Tensor,
        column_scales: torch.Tensor,
        added: torch.Tensor | None,
        dtype: torch.dtype,
        tiles: list[int],
    ) -> torch.Tensor:
        """Return what `product` does by the Triton kernel in tiles, the fields of `Tiles`."""
        m, k = left.shape
        n = len(right)
        out = left.new_empty(m, n, dtype=dtype)
        of_rows, of_columns, depth, stages, warps = tiles
        programs = triton.cdiv(m, of_rows) * triton.cdiv(n, of_columns)
        # Stages and warps are constants of the kernel too: by these alone torch 2.13's compiler
        # tells two kernels of a graph apart (`define_user_defined_triton_kernel`).
        torch.library.wrap_triton(_int8_product)[(programs,)](
            left, right, row_scales, column_scales,
            column_scales if added is None else added, out, m, n, k,
            of_rows=of_rows, of_columns=of_columns, depth=depth, stages=stages, warps=warps,
            group=_ROWS_OF_TILES, is_even=k % depth == 0, has_added=added is not None,
            num_stages=stages, num_warps=warps,
        )  # fmt: skip
        return out

    @torch.library.custom_op("sweep::int8_product_in_chunks", mutates_args=())
    def _in_chunks(
        left: torch.Tensor,
        right: torch.Tensor,
        row_scales: torch.Tensor,
        column_scales: torch.Tensor,
        added: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Return what `product` does by torch's kernel, in chunks of rows; the compiler, which
        might keep the sums of several, does not look into it."""
        m = len(left)
        n = len(right)
        out = left.new_empty(m, n, dtype=dtype)
        of_chunk = rows_at_once(m, n)
        for start in range(0, m, of_chunk):
            rows = slice(start, start + of_chunk)
            sums = _sums(left[rows], right)
            _scale_sums[(len(sums), triton.cdiv(n, _SCALED_AT_ONCE))](
                sums, row_scales[rows], column_scales,
                column_scales if added is None else added, out[rows], len(sums), n,
                has_added=added is not None, size=_SCALED_AT_ONCE,
            )  # fmt: skip
        return out

    @_in_chunks.register_fake
    def _like_chunks(left: torch.Tensor, right: torch.Tensor, *others: Any) -> torch.Tensor:
        *_, dtype = others
        return left.new_empty(len(left), len(right), dtype=dtype)
