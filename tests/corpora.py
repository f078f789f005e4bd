"""Small data of the kinds that are read from files, drawn."""

from __future__ import annotations

import gzip
import random

WORDS = {
    "ein": "a", "der": "the", "Hund": "dog", "Mann": "man", "Baum": "tree", "läuft": "runs", "schläft": "sleeps",
    "groß": "big", "rot": "red", "und": "and", "Kind": "child", "spielt": "plays",
}  # fmt: skip


def sentences(number, seed=0, longest=9):
    """German and English, word for word."""
    draw = random.Random(seed)
    rows = [draw.choices(list(WORDS), k=draw.randint(1, longest)) for _ in range(number)]
    return [(" ".join(row), " ".join(WORDS[word] for word in row)) for row in rows]


def write_lines(path, lines, encoding="utf-8"):
    content = "".join(f"{line}\n" for line in lines).encode(encoding)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return str(path)


def reviews(number=120, seed=0):
    draw = random.Random(seed)
    texts = []
    for _ in range(number):
        label = draw.choice(["neg", "pos"])
        words = draw.choices(["the", "film", "plot", "actor"], k=draw.randint(3, 12))
        words.insert(draw.randrange(len(words)), {"neg": "Awful", "pos": "Great!"}[label])
        texts.append((label, " ".join(words)))
    return texts


TEXT = "\n".join(german for german, _ in sentences(160, seed=1))[:3001]
"""Some 3,000 characters."""
