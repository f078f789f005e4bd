"""Hashes that are the same on every machine."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from lightning_tfm.system.memory import in_parts


def stable_hash(text: str) -> int:
    """Return a 64-bit hash of a text, which is the same on every machine, unlike `hash`."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def hash_lines(lines: Iterable[str]) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of lines."""
    total = hashlib.sha256()
    for part in in_parts(lines):
        total.update("\n".join([*part, ""]).encode())
    return total.hexdigest()[:16]
