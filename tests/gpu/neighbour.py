"""Another process on the GPU: takes all but so many bytes of what is free, says so, and holds it.

Run as ``python -m tests.gpu.neighbour BYTES_LEFT``; it ends when its standard input does.
"""

from __future__ import annotations

import sys

import torch

CHUNK_BYTES = 2**28


def main() -> None:
    """Take memory in chunks, as plain allocations, until no more than that is left."""
    left, held = int(sys.argv[1]), []
    while torch.cuda.mem_get_info()[0] > left + CHUNK_BYTES:
        held.append(torch.empty(CHUNK_BYTES, dtype=torch.uint8, device="cuda"))
    torch.cuda.synchronize()
    sys.stdout.write(f"taken {len(held) * CHUNK_BYTES}\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main()
