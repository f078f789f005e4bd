"""Benchmarks of training on tables of words against yoyodyne: inflection and pronunciation."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from benchmarks.convergence import TrainingClock, train
from benchmarks.measure import Block, Built, Row, Side, in_turn, ratio_row, until_row
from benchmarks.peers import BARE, yoyodyne_model
from benchmarks.steps import parameters_of
from lightning_tfm.data import Download, resolve_path

SEEDS = range(41, 46)
"""Seeds of the reported runs; settings were chosen on the validation tables with seed 1."""

SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class Table:
    """A table of words, with the settings of both sides.

    Attributes:
        columns: arguments of yoyodyne's data module that describe the columns.
        settings: settings of our command.
        peer: the class of yoyodyne's model.
        width: the width of yoyodyne's embeddings and hidden states, with which both sides have the same size.
    """

    name: str
    files: dict[str, Download]
    columns: dict[str, Any]
    settings: tuple[str, ...]
    peer: str
    width: int


BATCH_SIZE, EPOCHS, LEARNING_RATE = 32, 20, 3e-3
"""Batch size, passes over the training table and learning rate of both sides."""


def network(attention: str, **settings: Any) -> tuple[str, ...]:
    """Return the settings of an attention LSTM of width 96, with further arguments of the network."""
    arguments = {"d_model": 96, "dropout": 0.2, "attention": attention, **settings}
    value = json.dumps({"class_path": "AttentionLSTM", "init_args": arguments})
    return (
        f"--model.init_args.network={value}",
        f"--model.init_args.optimizer.init_args.lr={LEARNING_RATE}",
        "--model.init_args.lr_schedule.warmup_steps=100",
    )


def downloads(folder: str, *files: tuple[str, str]) -> dict[str, Download]:
    """Return the files of the splits of a folder on the web: their paths in it and SHA-256 checksums."""
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
)
"""French pronunciation of SIGMORPHON 2020, task 1 (Gorman et al. 2020): 3,600, 450 and 450 words."""


def write_table(table: Table, folder: Path) -> None:
    """Write the splits of a table into a folder.

    Raises:
        UserError: if a file cannot be downloaded.
    """
    for split, file in table.files.items():
        name = f"sigmorphon2020/{Path(file.address).name}"
        (folder / f"{split}.tsv").write_bytes(resolve_path(name, {name: file}).read_bytes())


class Validations(TrainingClock):
    """Callback that records the training seconds so far and the exact match of each validation."""

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
    """Train our model, and return its exact match on the test table and its training seconds."""
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
    steps = EPOCHS * steps_per_pass
    return train("tsv_transformer", seed, "test/exact_match", *settings, steps=steps, threads=1)


def run_yoyodyne(table: Table, folder: Path, seed: int) -> Block:
    """Train yoyodyne's model, and return its exact match on the test table and its training seconds; see `run_ours`."""
    seed_everything(seed)
    files, record = {split: f"{folder}/{split}.tsv" for split in SPLITS}, folder / f"peer_{seed}.jsonl"
    with tempfile.TemporaryDirectory() as checkpoints:
        module, model = yoyodyne_model(
            table.peer, files, checkpoints, table.width, LEARNING_RATE, BATCH_SIZE, **table.columns
        )
        best = ModelCheckpoint(checkpoints, monitor="val_accuracy", mode="max")
        settings = BARE | {"enable_checkpointing": True, "max_epochs": EPOCHS, "num_sanity_val_steps": 0}
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
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        write_table(table, folder)
        peer = Side(build_yoyodyne, table, folder, threads=1)
        _, ours, theirs = in_turn(lambda seed: run_ours(table, folder, seed), peer, SEEDS)
        records = [[folder / f"{side}_{seed}.jsonl" for side in ("ours", "peer")] for seed in SEEDS]
        goals = [max(record["exact_match"] for record in read_record(record)) for _, record in records]
        times = [[until(side, goal) for side in sides] for sides, goal in zip(records, goals, strict=True)]
        sizes = [read_record(side)[0]["parameters"] for side in records[0]]
    checked = f"the same table, {sizes[0]:,} and {sizes[1]:,} parameters"
    assert abs(sizes[0] / sizes[1] - 1) <= 0.01, checked
    note = f"{EPOCHS} passes, one thread; {table.peer} of yoyodyne"
    rounds = [(100 * our.amount, 100 * their.amount) for our, their in zip(ours, theirs, strict=True)]
    name = f"{table.name}, exact match / yoyodyne"
    yield ratio_row(name, "%", "≥ 1 x", rounds, checked=checked, note=f"on the test table; {note}")
    yield until_row(
        f"{table.name} until yoyodyne's exact match / yoyodyne",
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
