"""Small randomly drawn corpora of the kinds that are read from files."""

import gzip
import hashlib
import io
import random
import tarfile

from datamodules import Sentiment, inflection, pronunciation
from lightning_tfm.data import TableReader
from lightning_tfm.data.download import MIRROR, Download

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


def write_table(path, rows):
    return write_lines(path, map("\t".join, rows))


def pronounced(number, seed=0):
    """Return distinct words of a made-up language, and their pronunciations."""
    draw = random.Random(seed)
    words = sorted({"".join(draw.choices("abcdë", k=draw.randint(2, 7))) for _ in range(2 * number)})
    phonemes = {"c": "k", "ë": "eh"}
    return [(word, " ".join(phonemes.get(letter, letter) for letter in word)) for word in draw.sample(words, number)]


def inflected(number, seed=0):
    """Return distinct lemmas of a made-up language, inflected forms and features."""
    draw = random.Random(seed)
    endings = {"N;SG": "", "N;PL": "i", "V;PRS": "a", "V;PST": "ta"}
    rows = [(lemma, draw.choice([*endings])) for lemma, _ in pronounced(number, seed)]
    return [(lemma, lemma + endings[features], features) for lemma, features in rows]


def write_mirror(folder, monkeypatch, files, rows):
    """Write a mirror of tables, of a few rows of a made-up language each, and use it."""
    monkeypatch.setenv(MIRROR, str(folder))
    for seed, (name, file) in enumerate(files.items()):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_table(path, rows(12 if "train" in name else 3, seed))
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        monkeypatch.setitem(files, name, Download(file.address, sha256))


def write_pronunciations(folder, monkeypatch):
    """Write a mirror of `Pronunciation`, and use it."""
    write_mirror(folder, monkeypatch, pronunciation.FILES, pronounced)


def write_inflections(folder, monkeypatch):
    """Write a mirror of `Inflection`, and use it."""
    write_mirror(folder, monkeypatch, inflection.FILES, inflected)


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


def text_file(tmp_path, content=TEXT, name="text.txt"):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    return str(path)


def write_archive(path, texts, split="", others=()):
    with tarfile.open(path, "w:gz") as tar:
        for number, (label, text) in enumerate(texts):
            content = text.encode()
            member = tarfile.TarInfo(f"aclImdb/{split}/{label}/{number}_7.txt")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        for member in others:
            tar.addfile(member, io.BytesIO(b"bad") if member.isreg() else None)
    return str(path)


def sentiment(train, **settings):
    return Sentiment(**{"train": train, "val_fraction": 0.2, "test_fraction": 0.2, "batch_size": 8} | settings)


def texts_in(data, splits=("train", "val", "test")):
    return sorted((pair.target, pair.source) for split in splits for pair in data.pairs(split))


SCRIPTS = {
    "French": "Caf\u00e9 na\u00efve \u00e9l\u00e8ve",
    "marks without a composed form": "x\u030c Q\u0303 e\u0301\u0323",
    "Vietnamese": "Ti\u1ebfng Vi\u1ec7t \u0111\u01b0\u1ee3c",
    "Korean": "\ud55c\uad6d\uc5b4 \ubb38\uc7a5",
    "Hindi": "\u0939\u093f\u0928\u094d\u0926\u0940 \u092d\u093e\u0937\u093e \u0958",
    "Malayalam": "\u0d05\u0d35\u0d28\u0d4d\u200d \u0d35\u0d28\u0d4d\u0d28\u0d41 \u0d15\u0d4a",
    "Persian": "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645 \u0622\u0628",
    "Arabic": "\u0644\u064f\u063a\u064e\u0629\u064c \u0645\u064f\u062d\u064e\u0645\u0651\u064e\u062f",
    "Hebrew": "\u05e9\u05c1\u05b8\u05dc\u05d5\u05b9\u05dd \u05e2\u05b2\u05dc",
    "Thai": "\u0e20\u0e32\u0e29\u0e32\u0e44\u0e17\u0e22 \u0e01\u0e33\u0e25\u0e31\u0e07 \u0e17\u0e35\u0e48",
    "emoji": "\U0001f469\U0001f3fd\u200d\U0001f4bb \U0001f468\u200d\U0001f469\u200d\U0001f467 1\ufe0f\u20e3",
}
"""Words of several scripts, separated by spaces."""

UNICODE = [word for text in SCRIPTS.values() for word in text.split()]


def pair_files(tmp_path, left, right):
    return [write_lines(tmp_path / "left", left), write_lines(tmp_path / "right", right)]


LABEL_AND_TEXT = TableReader({"label": None, "text": None})

PARALLEL = TableReader({"source": None, "target": None})

TEXTS = ["May", "", "größe\n\t", "日本", "\N{GRINNING FACE}a", "", "x" * 50]
