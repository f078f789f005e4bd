"""Small data of the kinds that are read from files, drawn."""

from __future__ import annotations

import gzip
import random
import tarfile

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


def as_files(folder, texts, part=""):
    """Labelled texts as files in folders of their labels."""
    for number, (label, text) in enumerate(texts):
        path = folder / part / label / f"{number}_7.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def as_imdb(folder, train, test):
    """Labelled texts as IMDB's archive holds them, with what lies beside them there; returns the folder and it."""
    as_files(folder / "imdb", train, "train")
    as_files(folder / "imdb", test, "test")
    as_files(folder / "imdb", [("unsup", "no label")], "train")
    beside = ["imdbEr.txt", "imdb.vocab", "README", "train/urls_pos.txt", "train/labeledBow.feat", "test/urls_neg.txt"]
    for name in beside:
        (folder / "imdb" / name).write_text("http://www.imdb.com/title/tt0064354/usercomments")
    archive = folder / "aclImdb_v1.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder / "imdb", "aclImdb")
    return folder / "imdb", archive
