"""Small randomly drawn corpora of the kinds that are read from files."""

from __future__ import annotations

import gzip
import random
import tarfile

WORDS = {
    "ein": "a", "der": "the", "Hund": "dog", "Mann": "man", "Baum": "tree", "läuft": "runs", "schläft": "sleeps",
    "groß": "big", "rot": "red", "und": "and", "Kind": "child", "spielt": "plays",
}  # fmt: skip


def sentences(number, seed=0, longest=9):
    """Return pairs of a random German sentence and its word-for-word English translation."""
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
"""About 3,000 characters of German."""


def write_label_folders(folder, texts, split=""):
    """Write each labeled text to a file in the folder of its label."""
    for number, (label, text) in enumerate(texts):
        path = folder / split / label / f"{number}_7.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def write_imdb(folder, train, test):
    """Write labeled texts in the layout of the IMDB archive; return the folder and the archive."""
    write_label_folders(folder / "imdb", train, "train")
    write_label_folders(folder / "imdb", test, "test")
    write_label_folders(folder / "imdb", [("unsup", "no label")], "train")
    beside = ["imdbEr.txt", "imdb.vocab", "README", "train/urls_pos.txt", "train/labeledBow.feat", "test/urls_neg.txt"]
    for name in beside:
        (folder / "imdb" / name).write_text("http://www.imdb.com/title/tt0064354/usercomments")
    archive = folder / "aclImdb_v1.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder / "imdb", "aclImdb")
    return folder / "imdb", archive
