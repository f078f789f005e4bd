"""Classification of texts from archives, folders, tables and files: 'an engrossing story of survival' -> pos."""

from __future__ import annotations

import os
import tarfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Set
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, Literal, cast

from lightning_tfm.data import (
    Download,
    LabeledDataModule,
    Pair,
    TableReader,
    expand_path,
    is_hidden,
    list_files,
    read_text,
    resolve_path,
    skip_blank,
    split_lines,
)
from lightning_tfm.data.hashing import stable_hash
from lightning_tfm.data.text_files import decode_text
from lightning_tfm.errors import UserError, rank_zero_print
from lightning_tfm.tokenization import Tokenizer, normalize_text, train_tokenizer, train_word_tokenizer

CNN_SENTENCE = "https://raw.githubusercontent.com/yoonkim/CNN_sentence/23e0e1f7355705bb083043fda05c031b15acb38c/"

FILES = {
    "aclImdb_v1.tar.gz": Download(
        "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",
        "c40f74a18d3b61f90feba1e17730e0d38e8b97c05fde7008942e91923d1658fe",
    ),
    "polarity/rt-polarity.neg": Download(
        CNN_SENTENCE + "rt-polarity.neg", "4ace77d558c3714723843f1d65b60c01e3417b208180f0728808d76ad0eeeaca"
    ),
    "polarity/rt-polarity.pos": Download(
        CNN_SENTENCE + "rt-polarity.pos", "2da124ec187a9d5a29c9f04e91c540e02baed5af8868f550a26bd6fd4dbf8bf0"
    ),
}
"""Downloadable files: 50,000 reviews of the Internet Movie Database (Maas et al. 2011), and 10,662 sentences of film
reviews (Pang & Lee 2005), in Latin-1."""

SPLITS = ("train", "val", "test")


class Sentiment(LabeledDataModule):
    """Data module for text classification, by sentiment or any other label.

    The data are one of

    - a folder, or a .tar.gz, .tgz or .tar archive of one, that contains one folder per label with one text per file.
      All label folders are in the same folder, or in folders train/, val/ or test/. In the latter, unsup/ holds texts
      without a label, as in IMDB. The numbers of excluded files are logged, except for hidden files,
    - a table: a label, a tab and a text in each line, or a .csv file; a header may name further columns,
    - several files named NAME.LABEL, with one text per line; blank lines are skipped, and counted in a message.

    A validation or test split that is not given is a fraction of the training data, drawn by a hash of each text: equal
    texts are in the same split, and the splits do not depend on the seed. The hash maps a text to a number u in [0, 1).
    The text is in the test split if u < test_fraction, in the validation split if test_fraction <= u < test_fraction +
    val_fraction, and in the training split otherwise. Fractions are thus relative to all texts.

    Args:
        train: the training data: a single name, or several files named by label.
        val: separate validation data; by default, a fraction of the training data.
        test: separate test data; by default, a fraction of the training data.
        val_fraction: fraction of all texts for validation, in [0, 0.5); 0 keeps all texts for training, and requires
            separate data.
        test_fraction: fraction of all texts for the test, as for val_fraction.
        encoding: encoding of the texts, by Python's name.
        tokenizer: lower-case words and punctuation marks, or byte-level subwords.
        vocab_size: maximum size of the vocabulary, which keeps the most frequent tokens of the training split.
        num_ngrams: number of ids shared by the character n-grams of words, which represent words unseen in training; 0
            disables n-grams.
        header: whether the first line of a table names its columns; inferred by default from known names, such as label
            and text, or from names unlike the fields below; a message says so.
        label: column of the labels in a table, by number from 1, or by name in the first line; by default, the one
            whose name in the first line says so, such as rating, or else the first column.
        text: column of the texts in a table, as for label; by default, a name such as comment, or else the second
            column.
        settings: further arguments of LabeledDataModule.

    Note:
        The fraction is held out of training even if `val` or `test` names separate data, so the trained model can still
        be tested on it. No fraction is drawn for a split that the archive or folder itself contains.
    """

    def __init__(
        self,
        train: list[str] | str,
        val: list[str] | str | None = None,
        test: list[str] | str | None = None,
        val_fraction: float = 0.1,
        test_fraction: float = 0.1,
        encoding: str = "utf-8",
        tokenizer: Literal["word", "subword"] = "word",
        vocab_size: int = 20_000,
        num_ngrams: int = 0,
        header: bool | None = None,
        label: int | str | None = None,
        text: int | str | None = None,
        **settings: Any,
    ) -> None:
        for name, share in (("val_fraction", val_fraction), ("test_fraction", test_fraction)):
            if not 0 <= share < 0.5:
                raise UserError(f"{name} must be at least 0 and below 0.5, but is {share}; try 0.1")
        if num_ngrams and (num_ngrams < 0 or tokenizer == "subword"):
            rule = "0 with subwords, which are parts of words themselves" if tokenizer == "subword" else "at least 0"
            raise UserError(f"num_ngrams must be {rule}, but is {num_ngrams}; try 0")
        table = TableReader(
            {"label": label, "text": text}, encoding, header, "set label and text to their numbers or names"
        )
        splits = read_labeled(train, table, "train")
        if len({pair.target for pair in splits["train"]}) > max(2, len(splits["train"]) / 2):
            raise UserError(
                "labels must repeat, but most texts of train have a unique label, such as "
                f"{splits['train'][0].target[:40]!r}; in a table, column 1 is the label by default; set label and text"
            )
        shares = {"test": test_fraction, "val": val_fraction}
        drawn = {split for split in shares if shares[split] and split not in splits}
        splits |= split_by_hash(splits["train"], drawn, val_fraction, test_fraction)
        for split, names in (("test", test), ("val", val)):
            if names is not None:
                if split in drawn:
                    rank_zero_print(
                        f"{len(splits[split])} texts of train are held out by {split}_fraction; set it to 0 to train "
                        "on them"
                    )
                elif split in splits:
                    rank_zero_print(
                        f"{len(splits[split])} texts in {split}/ of train are left out because {split} names other data"
                    )
                splits |= read_labeled(names, table, split)
            if split not in splits:
                raise UserError(f"{split}_fraction must be above 0 if {split} is not set, but is 0; try 0.1")
        labels = sorted({pair.target for pair in splits["train"]})
        for split in ("val", "test"):
            for pair in splits[split]:
                if pair.target not in labels:
                    raise UserError(
                        f"each label must occur in the training split ({', '.join(labels)}), but that of "
                        f"{pair.source[:40]!r} in {split} is {pair.target!r}; delete it, or add such training texts"
                    )
        texts = (pair.source for pair in splits["train"])
        if tokenizer == "word":
            trained: Tokenizer = train_word_tokenizer(texts, vocab_size, num_ngrams)
        else:
            trained = train_tokenizer(texts, tokenizer, vocab_size)
        self.splits = splits
        super().__init__(trained, labels, **settings)

    def pairs(self, split: str) -> list[Pair]:
        return self.splits[split]


def split_by_hash(
    texts: list[Pair], drawn: Set[str], val_fraction: float, test_fraction: float
) -> dict[str, list[Pair]]:
    """Split texts by hash into "train" and the drawn ones of "val" and "test", see `Sentiment`; none may be empty."""
    splits: dict[str, list[Pair]] = {split: [] for split in ("train", *drawn)}
    for text in texts:
        u = stable_hash(f"test {text.source}") / 2**64
        split = "test" if u < test_fraction else "val" if u < test_fraction + val_fraction else "train"
        splits[split if split in drawn else "train"].append(text)
    for split in sorted(drawn):
        if not splits[split] or not splits["train"]:
            raise UserError(
                f"{split}_fraction must leave texts on both sides, but of {len(texts)} it takes {len(splits[split])}; "
                f"try another fraction, or set {split} to other data and the fraction to 0"
            )
    return splits


def read_labeled(names: list[str] | str, table: TableReader, split: str) -> dict[str, list[Pair]]:
    """Return the labeled texts of an archive, a folder, a table or files: all splits for "train", else only one.

    The reader of tables also names the encoding.

    Raises:
        UserError: if the data cannot be read, or have no labels.
    """
    names = [names] if isinstance(names, str) else names
    if not names:
        raise UserError(f"{split} must name data, but is empty; try [FILE]")
    if len(names) == 1 and (folder := expand_path(names[0], split)).is_dir():
        return by_split(_of_folder(folder, table.encoding), str(folder), split)
    paths = [resolve_path(name, FILES, split) for name in names]
    if len(paths) == 1 and paths[0].name.lower().endswith((".tar.gz", ".tgz", ".tar")):
        return by_split(_of_archive(paths[0], table.encoding), names[0], split)
    if len(paths) == 1:
        parts = table.read(paths[0])
        return {
            split: [Pair(text, label) for labels, texts in parts for label, text in zip(labels, texts, strict=True)]
        }
    labels = [normalize_text(path.name.removesuffix(".gz").rpartition(".")[2]) for path in paths]
    if len(set(labels)) < len(labels) or not all("." in path.name for path in paths):
        raise UserError(f"several files must end with their labels, NAME.LABEL, but are {', '.join(names)}")
    texts = []
    for path, label in zip(paths, labels, strict=True):
        rows = enumerate(([line] for line in split_lines(read_text(path, table.encoding))), start=1)
        texts += [Pair(line.strip(), label) for _, (line,) in skip_blank(rows, f"blank lines of {path}")]
    return {split: texts}


def by_split(files: dict[PurePosixPath, Callable[[], str] | None], name: str, split: str) -> dict[str, list[Pair]]:
    """Return the texts of each split, labeled by folder, and log the number of excluded files by reason.

    The files are given by functions that read them; None for links, which are not followed. For `split`, see
    `read_labeled`.

    Raises:
        UserError: if the folders are not named by labels, or the split is missing.
    """
    left_out: dict[str, list[PurePosixPath]] = defaultdict(list)
    own_name = os.path.basename(os.path.abspath(name))  # a split's folder, such as train/
    texts = {}
    for path, read in files.items():
        if read is None:
            left_out["links are not followed"].append(path)
        elif path.parent.name == "unsup" and (path.parent.parent.name or own_name) in SPLITS:
            left_out["they have no label"].append(path)  # as in IMDB
        else:
            texts[path] = read
    split_of = label_folders({path.parent for path in texts}, name, split)
    if split not in split_of.values():  # such as val data in train/
        split_of = {folder: split if other == "train" else other for folder, other in split_of.items()}
    if split not in split_of.values():
        present = ", ".join(sorted({*split_of.values()}))
        raise UserError(f"{name!r} must have a folder {split}, but has {present} alone; rename it, or name other data")
    splits: dict[str, list[Pair]] = defaultdict(list)
    for path, read in texts.items():
        own_split = split_of.get(path.parent)
        if own_split is None:
            left_out["they are not in a label's folder"].append(path)
        elif split not in ("train", own_split):
            left_out[f"they are not for {split}"].append(path)
        else:
            splits[own_split].append(Pair(read().strip(), normalize_text(path.parent.name)))
    for reason, paths in left_out.items():
        rank_zero_print(f"{len(paths)} files of {name!r} are left out because {reason}, such as {str(paths[0])!r}")
    return dict(splits)


def label_folders(folders: Set[PurePosixPath], name: str, split: str) -> dict[PurePosixPath, str]:
    """Return the split of each label folder: SPLIT for SPLIT/LABEL, or `split` if the data have no such folders.

    Of the folders that contain files, one that contains another is not a label.

    Raises:
        UserError: if there are no label folders, or they are not all in the same place.
    """
    above = {outer for folder in folders for outer in folder.parents}
    labels = sorted(folders - above - {PurePosixPath()}, key=lambda folder: (folder.parent, folder))
    elsewhere = [folder for folder in labels if folder.parent.name not in SPLITS]
    if len(elsewhere) < len(labels):
        if elsewhere:
            raise UserError(
                f"{name!r} must have its texts in folders of labels inside {', '.join(SPLITS)}, but has some in "
                f"{str(elsewhere[0])!r}; rename or remove it"
            )
        return {folder: folder.parent.name for folder in labels}
    if all(folder.name in SPLITS for folder in labels):
        raise UserError(
            f"{name!r} must hold folders named by their labels, such as pos/ and neg/, with a text in each file, but "
            f"has {' and '.join(repr(str(folder)) for folder in labels) or 'none'}"
        )
    if labels[0].parent != labels[-1].parent:
        raise UserError(
            f"{name!r} must have the folders of its labels side by side, but has {str(labels[0])!r} and "
            f"{str(labels[-1])!r}; move or remove one"
        )
    return dict.fromkeys(labels, split)


def _of_folder(folder: Path, encoding: str) -> dict[PurePosixPath, Callable[[], str] | None]:
    """Return functions that read the files of a folder, except hidden ones; None for links not to a file."""
    files = {PurePosixPath(path.relative_to(folder).as_posix()): path for path in list_files(folder)}
    return {inside: partial(read_text, path, encoding) if path.is_file() else None for inside, path in files.items()}


def _of_archive(archive: Path, encoding: str) -> dict[PurePosixPath, Callable[[], str] | None]:
    """Return functions that decode the files of an archive, except hidden ones; None for links.

    Files are read without extracting them to disk, so paths in the archive cannot write outside it.
    """
    try:
        with tarfile.open(archive) as tar:
            files = {
                member.name: cast(IO[bytes], tar.extractfile(member)).read() if member.isreg() else None
                for member in tar
                if (member.isreg() or member.issym() or member.islnk()) and not is_hidden(PurePosixPath(member.name))
            }
            # tarfile mistakes a damaged header for the end of the archive.
            tar.fileobj.seek(tar.offset)
            while rest := tar.fileobj.read(1 << 20):
                if rest.strip(b"\0"):
                    raise tarfile.ReadError("it is damaged")
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        reason = str(error).partition(":")[0]
        raise UserError(f"{str(archive)!r} must be an archive of texts, but cannot be read as one: {reason}") from None
    return {
        PurePosixPath(name): data if data is None else partial(decode_text, data, f"{archive}:{name}", encoding)
        for name, data in sorted(files.items())
    }
