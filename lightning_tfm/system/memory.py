"""Memory size, allocation, garbage collection, and processing in parts."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TypeVar

PART = 10_000
"""Maximum number of items, such as texts, that are processed at a time."""

Item = TypeVar("Item")

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # with the prefix M_ in malloc.h


def keep_freed_memory() -> None:
    """Keep freed memory for later allocations, if the C library is glibc.

    Note:
        By default, glibc immediately returns large blocks to the system. Since every training step allocates and frees
        the same blocks, it would page them in again, which takes a fifth of the step of a small model on a CPU.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "gnu_get_libc_version"):
        # Older versions reject a threshold above half of a heap and then use far less than their default.
        if libc.mallopt(MMAP_THRESHOLD, 2**30) or libc.mallopt(MMAP_THRESHOLD, 2**25):
            libc.mallopt(TRIM_THRESHOLD, 2**31 - 1)


def total_memory() -> int | None:
    """Return the memory of the machine in bytes; None if unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # on Windows, for example
        return None


def in_parts(items: Iterable[Item]) -> Iterator[list[Item]]:
    """Yield items in lists of at most PART, which limits the memory of intermediate results."""
    items = iter(items)
    while part := [*islice(items, PART)]:
        yield part


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Disable garbage collection for code that creates many long-lived objects, such as imports and data loading.

    Note:
        Otherwise, Python scans these objects repeatedly, which takes a fifth of the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
