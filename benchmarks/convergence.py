"""Seconds of training until a model is right."""

from __future__ import annotations

import csv
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer, seed_everything

from benchmarks import peers
from benchmarks.framework import EXPERIMENTS
from benchmarks.measure import (
    ROUNDS,
    THREADS,
    Block,
    Built,
    Row,
    Side,
    absolute_row,
    quiet,
    seconds_row,
    started,
    timed,
)
from benchmarks.steps import date_step, parameters_of, tutorial_dates
from datamodules import Date

RECORDED = Path(__file__).parent / "recorded"
"""Whole runs of peers that take too long to be repeated: one JSON object a line."""

COPY_STEPS = 1000
"""As the experiment has it."""

DATE_STEPS = {"tutorial": 300, "yoyodyne": 400}
"""Against each peer: the fewest hundreds with which the validation data of seeds 1 to 3 reach the goal."""

MOST_PASSES = 20
"""Over the data, as the tutorial makes them: a peer that has not reached its goal by then is taken as it is."""

SEEDS = range(11, 11 + ROUNDS)
"""Not those that settings were chosen with, 1 to 3."""


def run(experiment: str, seed: int, steps: int, split: str, goal: float) -> tuple[float, float]:
    """A run of the command: its seconds of training, and the exact match on the split at its end.

    The seconds are the run's own, with the one validation; infinitely many, where it misses the goal.
    """
    command = [sys.executable, "-m", "lightning_tfm", "fit", "--config", str(EXPERIMENTS / f"{experiment}.yaml")]
    command += [f"--seed_everything={seed}", f"--trainer.max_steps={steps}", f"--trainer.val_check_interval={steps}"]
    environment = os.environ | {
        "OMP_NUM_THREADS": str(THREADS),
        "PYTHONPATH": str(EXPERIMENTS.parent),
        "WANDB_MODE": "offline",
    }
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
        summary = json.loads(next(Path(folder).glob("runs/*/*/summary.json")).read_text())
        with next(Path(folder).glob("runs/*/*/metrics.csv")).open() as file:
            val = [float(row["val/exact_match"]) for row in csv.DictReader(file) if row["val/exact_match"]]
    exact_match = summary["test"]["exact_match"] if split == "test" else val[-1]
    return summary["train_seconds"] if exact_match >= goal else math.inf, exact_match


def train_tutorial(goal: float, passes: int, seed: int) -> Iterator[dict[str, float]]:
    """The date tutorial's whole training, on our dates: after each pass, its seconds so far and its exact match."""
    torch.manual_seed(seed)
    data = Date(seed=seed)
    data.setup("fit")
    network = peers.TutorialDateLSTM()
    step, pairs, seconds = date_step(network), data.datasets["train"].pairs, 0.0

    def pass_over() -> float:
        for batch in tutorial_dates(pairs):
            step(batch)
        return len(pairs)

    for number in range(1, passes + 1):
        network.train()
        block = timed(pass_over)
        seconds += block.seconds
        network.eval()
        with torch.no_grad():
            matches = [
                (network(source).argmax(-1) == target).all(1)
                for source, target in tutorial_dates(data.datasets["test"].pairs)
            ]
        exact_match = torch.cat(matches).double().mean().item()
        line = {"pass": number, "seconds": seconds, "samples_per_second": number * len(pairs) / seconds}
        yield line | {"exact_match": exact_match}
        if exact_match >= goal:
            return


def build_tutorial() -> Built:
    """A short run of the date tutorial, for its speed now."""
    torch.manual_seed(0)
    data = Date(train_size=5_000, val_size=1, test_size=1)
    data.setup("fit")
    network = peers.TutorialDateLSTM()
    step, pairs = date_step(network), data.datasets["train"].pairs[:3200]

    def some() -> float:
        for batch in tutorial_dates(pairs):
            step(batch)
        return len(pairs)

    return Built({"parameters": parameters_of(network)}, lambda: timed(some))


class Watch(Callback):
    """Of a run of yoyodyne: its seconds and samples while training, and what it reaches at each validation."""

    def __init__(self, goal: float) -> None:
        self.goal = goal
        self.begun = self.seconds = self.samples = 0.0
        self.lines: list[dict[str, float]] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.begun = self.begun or time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.samples += len(batch)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.stop()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.stop()

    def stop(self) -> None:
        """Stands still, until the next batch."""
        self.seconds, self.begun = self.seconds + (time.perf_counter() - self.begun if self.begun else 0.0), 0.0

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        exact_match = trainer.callback_metrics["val_accuracy"].item()
        line = {"step": trainer.global_step, "seconds": self.seconds, "exact_match": exact_match}
        self.lines.append(line | {"samples_per_second": self.samples / self.seconds})
        trainer.should_stop = exact_match >= self.goal


def run_yoyodyne(folder: str, steps: int, seed: int, watch: Watch) -> None:
    """yoyodyne's LSTM with soft attention on our dates: 64 wide, batch 128, Adam 5e-3, the rest as it comes."""
    from yoyodyne import data, models
    from yoyodyne.models import modules

    seed_everything(seed)
    dates = Date(seed=seed)
    files = {}
    for split in ("train", "val"):
        path = Path(folder) / f"{split}.tsv"
        path.write_text("".join(f"{pair.source}\t{pair.target}\n" for pair in dates.pairs(split)))
        files[split] = str(path)
    module = data.DataModule(model_dir=folder, batch_size=128, **files)
    model = models.SoftAttentionLSTMModel(
        source_encoder=modules.LSTMEncoder(embedding_size=64, hidden_size=64),
        embedding_size=64,
        decoder_hidden_size=64,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=5e-3),
        max_target_length=module.max_target_length,
        target_vocab_size=module.target_vocab_size,
        vocab_size=module.vocab_size,
    )
    without = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    Trainer(
        accelerator="cpu",
        max_steps=steps,
        max_epochs=-1,
        num_sanity_val_steps=0,
        callbacks=[watch],
        **dict.fromkeys(without, False),
    ).fit(model, module)


def build_yoyodyne() -> Built:
    """A short run of yoyodyne, for its speed now."""

    def work() -> Block:
        watch = Watch(goal=2.0)
        with tempfile.TemporaryDirectory() as folder, quiet():
            run_yoyodyne(folder, 60, 0, watch)
        return Block(watch.samples, watch.seconds)

    return Built({}, work)


def train_yoyodyne(goal: float, passes: int, seed: int) -> Iterator[dict[str, float]]:
    """A whole training of yoyodyne: after each pass over the data, its seconds so far and its exact match."""
    watch = Watch(goal)
    with tempfile.TemporaryDirectory() as folder, quiet():
        run_yoyodyne(folder, passes * 391, seed, watch)
    yield from watch.lines


def recorded(name: str, goal: float) -> dict[str, float]:
    """Of the recorded runs, the one that took the median of samples: its line at the goal, or its last."""
    runs: dict[int, list[dict[str, float]]] = defaultdict(list)
    for line in map(json.loads, (RECORDED / f"date_{name}.jsonl").read_text().splitlines()):
        runs[line["seed"]].append(line)
    ends = [next((line for line in lines if line["exact_match"] >= goal), lines[-1]) for lines in runs.values()]
    ends.sort(key=lambda line: line["seconds"] * line["samples_per_second"])
    return ends[len(ends) // 2]


def _against(
    name: str,
    target: str,
    goal: float,
    split: str,
    short_run: Callable[[], Built],
    whole_run: Callable[[float, int, int], Iterator[dict[str, float]]],
    full: bool,
) -> Row:
    """Our seconds until a goal against a peer's: a recorded run's, at the speed that a short one has now."""
    whole, steps = recorded(name, goal), DATE_STEPS[name]
    rounds, reached = [], []
    with started(Side(short_run)) as (_, short):
        for seed in SEEDS:
            before = short()
            ours, exact_match = run("date_attention_lstm", seed, steps, split, goal)
            after = short()
            now = (before.amount + after.amount) / (before.seconds + after.seconds)
            theirs = whole["seconds"] * whole["samples_per_second"] / now
            if full:
                *_, last = whole_run(goal, MOST_PASSES, seed)
                theirs = last["seconds"]
            rounds.append((ours, theirs))
            reached.append(exact_match)
    note = f"{steps} steps, {_told(reached, goal)}; the peer's recorded run has {whole['exact_match']:.4f} after "
    note += f"{whole['seconds']:.0f} s"
    return seconds_row(f"dates until {goal} on {split} / {name}", target, rounds, note)


def dates_against_tutorial(full: bool) -> Iterator[Row]:
    """Dates: seconds until 0.976, against the tutorial's whole training, after which its author has that."""
    yield _against("tutorial", "≥ 40 x", 0.976, "test", build_tutorial, train_tutorial, full)


def dates_against_yoyodyne(full: bool) -> Iterator[Row]:
    """Dates: seconds until all of 2,000 validation dates are right."""
    yield _against("yoyodyne", "≥ 5 x", 1.0, "val", build_yoyodyne, train_yoyodyne, full)


def copying(full: bool) -> Iterator[Row]:
    """Copying: seconds until 0.999, where the tutorial is at 0.41 after its whole training."""
    runs = [run("copy_transformer", seed, COPY_STEPS, "test", 0.999) for seed in SEEDS]
    note = f"{COPY_STEPS} steps of 4 sequences; {_told([exact_match for _, exact_match in runs], 0.999)}"
    yield absolute_row("copying until 0.999", "s", "≤ 12 s", [seconds for seconds, _ in runs], note)


def _told(reached: list[float], goal: float) -> str:
    """How many runs have reached the goal."""
    count, others = sum(r >= goal for r in reached), [f"{r:.4f}" for r in sorted(reached) if r < goal]
    return f"{count} of {len(reached)} seeds reach it" + (f", not {', '.join(others)}: never" if others else "")


def record() -> None:
    """`python -m benchmarks.convergence`: runs the peers whole, and writes what the other rows lean on."""
    torch.set_num_threads(THREADS)
    RECORDED.mkdir(exist_ok=True)
    for name, goal, whole_run, seeds in (
        ("yoyodyne", 1.0, train_yoyodyne, (1, 2, 3, 4)),
        ("tutorial", 0.976, train_tutorial, (1,)),  # never before its last pass
    ):
        with (RECORDED / f"date_{name}.jsonl").open("w") as file:
            for seed in seeds:
                for line in whole_run(goal, MOST_PASSES, seed):
                    rounded = {key: round(value, 4) for key, value in line.items()}
                    print(json.dumps({"seed": seed} | rounded), file=file, flush=True)


if __name__ == "__main__":
    record()
