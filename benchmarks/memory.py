"""Memory of this process, on Linux; in a module with few imports, since `first_step` measures the time of imports."""

from __future__ import annotations

import ctypes
from pathlib import Path


def reset_peak() -> int:
    """Reset the peak memory of this process, and return its current memory in bytes."""
    ctypes.CDLL(None).malloc_trim(0)  # freed memory that is kept would hide new allocations
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # reset VmHWM
    return resident("VmRSS")


def resident(name: str) -> int:
    """Return the memory of this process in bytes: "VmRSS", the current one, or "VmHWM", the peak since the reset."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))
