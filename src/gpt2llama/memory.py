"""Memory in large pages: the processor looks fewer of them up, and so reads it faster."""

from __future__ import annotations

import ctypes
import mmap
import re
import sys
from collections.abc import Hashable, Mapping
from contextlib import suppress
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor, nn

OFTEN = 16 << 20  # bytes
LEAST = 4 << 20  # bytes; less than that stays in a cache anyway


def huge_pages(size: int) -> mmap.mmap:
    """`size` bytes of this process's own, in pages of 2 MiB where Linux has them."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return mmap.mmap(-1, size)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel may be built without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class LargePages:
    """Room for tensors of `sizes` bytes, one behind the other. Where there are no such pages, or
    where they would take more than half of the memory that is free, tensors stay where they are.
    """

    def __init__(self, sizes: Mapping[Hashable, int]) -> None:
        ends = list(accumulate(-(-size // 64) * 64 for size in sizes.values()))
        self._starts = dict(zip(sizes, [0, *ends], strict=False))
        pays = ends and LEAST <= ends[-1] <= _free() / 2 and hasattr(mmap, "MADV_HUGEPAGE")
        self._memory = huge_pages(ends[-1]) if pays else None
        self._since = 0  # bytes put here since the heap gave its free memory back

    def put(self, name: Hashable, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """A copy there, in that dtype. Each is a storage of its own."""
        if self._memory is None or name not in self._starts or not tensor.numel():
            return tensor.to(dtype)
        start, count = self._starts[name], tensor.numel()
        room = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=start)
        self._since += room.nbytes
        if self._since >= OFTEN:
            self._since = 0
            _give_back()
        return room.view(tensor.shape).copy_(tensor.detach())


def gather(model: nn.Module) -> None:
    """Moves a CPU model's tensors, one by one, into large pages, in their order."""
    held = {
        t.data_ptr(): t for t in (*model.parameters(), *model.buffers()) if t.device.type == "cpu"
    }
    pages = LargePages({place: tensor.nbytes for place, tensor in held.items()})
    for place, tensor in held.items():
        tensor.data = pages.put(place, tensor, tensor.dtype)


def _give_back() -> None:
    """What tensors took on their way: glibc keeps up to three large ones' memory."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another C library has no malloc_trim
            ctypes.CDLL(None).malloc_trim(0)


def _free() -> int:
    """Bytes that Linux would give without swapping; 0 elsewhere."""
    try:
        found = re.search(
            r"^MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text(encoding="utf-8"), re.M
        )
    except OSError:
        return 0
    return 1024 * int(found[1]) if found else 0
