"""Benchmarks of training on tables of words against yoyodyne: inflection, pronunciation and e-mail addresses."""

from __future__ import annotations

import json
import random
import re
import tempfile
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from faker import Faker
from lightning import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from benchmarks.convergence import TrainingClock, train
from benchmarks.measure import Block, Built, Row, Side, in_turn, ratio_row, until_row
from benchmarks.peers import BARE, yoyodyne_model
from benchmarks.steps import parameters_of
from lightning_tfm.data import Download, resolve_path
from lightning_tfm.errors import UserError

SEEDS = range(41, 46)
"""Seeds of the reported runs; settings were chosen on the validation tables with seed 1."""

SPLITS = ("train", "val", "test")

LOCALES = ("cs_CZ", "da_DK", "de_DE", "en_GB", "es_ES", "fr_FR", "hu_HU", "it_IT", "nl_NL", "pl_PL", "pt_PT", "sv_SE")
"""Locales of the names, all of which have Latin letters."""

LETTERS = str.maketrans(
    {"ä": "ae", "ö": "oe", "ü": "ue", "ß": "ss", "å": "aa", "æ": "ae", "ø": "oe", "ł": "l", "đ": "d"}
)


@dataclass(frozen=True)
class Table:
    """A table of words, with the settings of both sides.

    Attributes:
        name: the name of the task in the rows.
        files: the file of each split; empty if the table is generated.
        columns: arguments of yoyodyne's data module that describe the columns.
        settings: settings of our command.
        peer: the class of yoyodyne's model.
        width: the width of yoyodyne's embeddings and hidden states, with which both sides have the same size.
        learning_rate: yoyodyne's learning rate.
        epochs: the number of passes over the training table, of both sides.
    """

    name: str
    files: dict[str, Download]
    columns: dict[str, Any]
    settings: tuple[str, ...]
    peer: str
    width: int
    learning_rate: float
    epochs: int


BATCH_SIZE = 32
"""Batch size of both sides, yoyodyne's default."""


def network(attention: str, **settings: Any) -> tuple[str, ...]:
    """Return the settings of an attention LSTM of width 96, with further arguments of the network."""
    arguments = {"d_model": 96, "dropout": 0.2, "attention": attention, **settings}
    value = json.dumps({"class_path": "AttentionLSTM", "init_args": arguments})
    return (
        f"--model.init_args.network={value}",
        "--model.init_args.optimizer.init_args.lr=3e-3",
        "--model.init_args.lr_schedule.warmup_steps=100",
    )


def downloads(folder: str, *files: tuple[str, str]) -> dict[str, Download]:
    """Return the files of the splits.

    Args:
        folder: the address of their folder.
        files: the path below the folder and the SHA-256 checksum of the training, validation and test table.
    """
    return {split: Download(f"{folder}/{path}", sha256) for split, (path, sha256) in zip(SPLITS, files, strict=True)}


INFLECTION = Table(
    name="Livonian inflection",
    files=downloads(
        "https://raw.githubusercontent.com/sigmorphon2020/task0-data/0d24b945ac96e08aa5a2f0080fa4de465f91b40a",
        ("DEVELOPMENT-LANGUAGES/uralic/liv.trn", "c49f56d86fb3769570fcec61f933afaf38a45f2f0f4e0b9c344696886eb4980c"),
        ("DEVELOPMENT-LANGUAGES/uralic/liv.dev", "9e8cdd487a5ce0f8b38654208823664d4020545f1cb961d8b2a58f9e831124cd"),
        ("GOLD-TEST/liv.tst", "4f1b56e3f73c20158c68a730dbe6f3d78ae74ef0a9836974880abe164321bb52"),
    ),
    columns={"features_col": 3},
    settings=("--data.init_args.features=3", *network("monotonic", pointer_generator=True)),
    peer="PointerGeneratorLSTMModel",
    width=82,
    learning_rate=3e-3,
    epochs=20,
)
"""Livonian inflection of SIGMORPHON 2020, task 0 (Vylomova et al. 2020): 2,787, 398 and 802 forms."""

PRONUNCIATION = Table(
    name="French pronunciation",
    files=downloads(
        "https://raw.githubusercontent.com/sigmorphon/2020/3d9bb3658b6a964ccd127e2a6781665262516bf6/task1/data",
        ("train/fre_train.tsv", "fcc1c1c19a19381105662b412e8de1a143802da40fb401dd3cc452bc935128a6"),
        ("dev/fre_dev.tsv", "eb2b3fb761b02591a93981c448c6c7972da0499fd0fb1d7a0b60142463f6b355"),
        ("test/fre_test.tsv", "cd75ca22c697f93e23d10898a87a86e1bc08d0d4eb318946f28e085cd1aca9a8"),
    ),
    columns={"target_sep": " "},
    settings=("--data.init_args.target_separator= ", *network("hard_monotonic")),
    peer="SoftAttentionLSTMModel",
    width=93,
    learning_rate=3e-3,
    epochs=20,
)
"""French pronunciation of SIGMORPHON 2020, task 1 (Gorman et al. 2020): 3,600, 450 and 450 words."""

ADDRESSES = Table(
    name="e-mail addresses",
    files={},
    columns={},
    settings=network("monotonic", pointer_generator=True),
    peer="PointerGeneratorLSTMModel",
    width=97,
    learning_rate=3e-3,
    epochs=12,
)
"""E-mail addresses of generated names: 3,000, 500 and 1,000 names."""


def email_address(name: str) -> str:
    """Return the address of a name: 'Jürgen Müller-Lüdenscheidt' -> 'juergen.mueller-luedenscheidt@example.org'."""
    spelled = unicodedata.normalize("NFD", unicodedata.normalize("NFC", name.lower()).translate(LETTERS))
    words = re.sub(r"[^a-z -]", "", spelled).split()
    return f"{words[0]}.{''.join(words[1:])}@example.org"


def write_addresses(folder: Path, sizes: tuple[int, ...] = (3_000, 500, 1_000)) -> None:
    """Write a table of names and their addresses for each split, without a name that stands in two of them."""
    names: dict[str, None] = {}
    fakers = {locale: Faker(locale) for locale in LOCALES}
    draw = random.Random(0)
    for fake in fakers.values():
        fake.seed_instance(0)
    while len(names) < sum(sizes):
        fake = fakers[draw.choice(LOCALES)]
        names[f"{fake.first_name()} {fake.last_name()}"] = None
    lines = (f"{name}\t{email_address(name)}\n" for name in names)
    for split, size in zip(SPLITS, sizes, strict=True):
        (folder / f"{split}.tsv").write_text("".join(islice(lines, size)), encoding="utf-8")


def write_table(table: Table, folder: Path) -> None:
    """Write the splits of a table into a folder.

    Raises:
        UserError: if a file cannot be downloaded.
    """
    if not table.files:
        write_addresses(folder)
    for split, file in table.files.items():
        name = f"sigmorphon2020/{Path(file.address).name}"
        (folder / f"{split}.tsv").write_bytes(resolve_path(name, {name: file}).read_bytes())


class Validations(TrainingClock):
    """Callback that records the training seconds so far and the exact match of each validation.

    Args:
        path: the file of the record, in the JSON Lines format.
        metric: the name of the exact match.
    """

    def __init__(self, path: str, metric: str = "val/exact_match") -> None:
        self.path, self.metric = Path(path), metric

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking:
            return
        exact_match = trainer.callback_metrics[self.metric].item()
        record = {"seconds": self.seconds, "exact_match": exact_match, "parameters": parameters_of(pl_module)}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def read_record(path: Path) -> list[dict[str, float]]:
    """Return what `Validations` has recorded in a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def until(path: Path, goal: float) -> tuple[float, bool]:
    """Return the seconds until a validation reaches a goal, or of the whole run, and whether one reaches it."""
    records = read_record(path)
    seconds = [record["seconds"] for record in records if record["exact_match"] >= goal]
    return (seconds[0], True) if seconds else (records[-1]["seconds"], False)


def run_ours(table: Table, folder: Path, seed: int) -> Block:
    """Train our model, and return its exact match on the test table and its training seconds.

    Args:
        table: the table.
        folder: the folder of its splits, in which `Validations` records the run.
        seed: the seed.
    """
    with (folder / "train.tsv").open(encoding="utf-8") as file:
        steps_per_pass = sum(1 for _ in file) // BATCH_SIZE
    settings = (
        *(f"--data.init_args.{split}={folder / split}.tsv" for split in SPLITS),
        f"--data.init_args.batch_size={BATCH_SIZE}",
        f"--trainer.val_check_interval={steps_per_pass}",
        *table.settings,
        "--trust-package=benchmarks",
        "--trainer.callbacks+=benchmarks.tables.Validations",
        f"--trainer.callbacks.path={folder / f'ours_{seed}.jsonl'}",
    )
    steps = table.epochs * steps_per_pass
    return train("tsv_transformer", seed, "test/exact_match", *settings, steps=steps, threads=1)


def run_yoyodyne(table: Table, folder: Path, seed: int) -> Block:
    """Train yoyodyne's model, and return its exact match on the test table and its training seconds; see `run_ours`."""
    seed_everything(seed)
    files, record = {split: f"{folder}/{split}.tsv" for split in SPLITS}, folder / f"peer_{seed}.jsonl"
    with tempfile.TemporaryDirectory() as checkpoints:
        module, model = yoyodyne_model(
            table.peer, files, checkpoints, table.width, table.learning_rate, BATCH_SIZE, **table.columns
        )
        best = ModelCheckpoint(checkpoints, monitor="val_accuracy", mode="max")
        settings = BARE | {"enable_checkpointing": True, "max_epochs": table.epochs, "num_sanity_val_steps": 0}
        trainer = Trainer(accelerator="cpu", callbacks=[Validations(str(record), "val_accuracy"), best], **settings)
        trainer.fit(model, module)
        model.load_state_dict(torch.load(best.best_model_path, weights_only=False)["state_dict"])
        (scores,) = trainer.test(model, module, verbose=False)
    return Block(scores["test_accuracy"], read_record(record)[-1]["seconds"])


def build_yoyodyne(table: Table, folder: Path) -> Built:
    """Build yoyodyne training runs on a table in a folder; each block uses the next seed."""
    seeds = iter(SEEDS)
    return Built({}, lambda: run_yoyodyne(table, folder, next(seeds)))


def against_yoyodyne(table: Table) -> Iterator[Row]:
    """Measure the exact match on a table, and the seconds until that of yoyodyne is reached, with one thread each."""
    name, until_name = f"{table.name}, exact match / yoyodyne", f"{table.name} until yoyodyne's exact match / yoyodyne"
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        try:
            write_table(table, folder)
        except UserError as error:
            yield Row(name, "%", "≥ 1 x", note=str(error))
            yield Row(until_name, "s", "≥ 1 x", note=str(error))
            return
        peer = Side(build_yoyodyne, table, folder, threads=1)
        _, ours, theirs = in_turn(lambda seed: run_ours(table, folder, seed), peer, SEEDS)
        records = [[folder / f"{side}_{seed}.jsonl" for side in ("ours", "peer")] for seed in SEEDS]
        goals = [max(record["exact_match"] for record in read_record(record)) for _, record in records]
        times = [[until(side, goal) for side in sides] for sides, goal in zip(records, goals, strict=True)]
        sizes = [read_record(side)[0]["parameters"] for side in records[0]]
    checked = f"the same table, {sizes[0]:,} and {sizes[1]:,} parameters"
    assert abs(sizes[0] / sizes[1] - 1) <= 0.01, checked
    note = f"{table.epochs} passes, one thread; {table.peer} of yoyodyne"
    rounds = [(100 * our.amount, 100 * their.amount) for our, their in zip(ours, theirs, strict=True)]
    yield ratio_row(name, "%", "≥ 1 x", rounds, checked=checked, note=f"on the test table; {note}")
    yield until_row(
        until_name,
        "≥ 1 x",
        [seconds for (seconds, _), _ in times],
        [is_reached for (_, is_reached), _ in times],
        peer=[seconds for _, (seconds, _) in times],
        checked=checked,
        note=f"goal: the peer's highest exact match on the validation table with the same seed; {note}",
    )


def inflection(full: bool) -> Iterator[Row]:
    """Measure learning the inflection of Livonian words, against yoyodyne."""
    yield from against_yoyodyne(INFLECTION)


def pronunciation(full: bool) -> Iterator[Row]:
    """Measure learning the pronunciation of French words, against yoyodyne."""
    yield from against_yoyodyne(PRONUNCIATION)


def addresses(full: bool) -> Iterator[Row]:
    """Measure learning e-mail addresses from names, against yoyodyne."""
    yield from against_yoyodyne(ADDRESSES)
