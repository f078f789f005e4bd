"""How the process keeps its memory."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # malloc.h's names for them begin with M_


def keep_freed_memory() -> None:
    """Keeps what is freed for the next allocation, where the C library is glibc.

    It would give large blocks back to the system at once. A training step frees and allocates the same blocks as the
    one before, so it would page all of them in anew: a fifth of a small model's step on a CPU.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "gnu_get_libc_version"):
        # Older ones refuse more than half of a heap, and fall back to far less than their default.
        if libc.mallopt(MMAP_THRESHOLD, 2**30) or libc.mallopt(MMAP_THRESHOLD, 2**25):
            libc.mallopt(TRIM_THRESHOLD, 2**31 - 1)


@contextmanager
def uncollected() -> Iterator[None]:
    """For work that makes many objects which stay, as imports and data sets do: no garbage is looked for among them.

    Python would look at all of them again and again, which takes a fifth of such work.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
