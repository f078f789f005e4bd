"""Seconds of training until a model is right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks import peers
from benchmarks.framework import EXPERIMENTS
from benchmarks.measure import ROUNDS, THREADS, Built, Row, Side, absolute_row, seconds_row, started, timed
from benchmarks.steps import date_step, parameters_of, tutorial_dates
from datamodules import Date

RECORDED = Path(__file__).parent / "recorded"
"""Whole runs of peers that take too long to be repeated: one JSON object a line."""

DATE_STEPS, COPY_STEPS = 300, 1000
"""Steps of a run that reaches its goal; chosen on the validation data of seeds 1 to 3."""

SEEDS = range(11, 11 + ROUNDS)
"""Not those that settings were chosen with, 1 to 3."""


def run(experiment: str, seed: int, *settings: str) -> tuple[float, float]:
    """A run of the command, without validation: its seconds of training, and the exact match on the test data."""
    command = [sys.executable, "-m", "lightning_tfm", "fit", "--config", str(EXPERIMENTS / f"{experiment}.yaml")]
    command += [f"--seed_everything={seed}", "--trainer.limit_val_batches=0", *settings]
    environment = os.environ | {
        "OMP_NUM_THREADS": str(THREADS),
        "PYTHONPATH": str(EXPERIMENTS.parent),
        "WANDB_MODE": "disabled",
    }
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
        summary = json.loads(next(Path(folder).glob("runs/*/*/summary.json")).read_text())
    return summary["train_seconds"], summary["test"]["exact_match"]


def train_tutorial(goal: float, epochs: int, seed: int) -> Iterator[dict[str, float]]:
    """The date tutorial's whole training, on our dates: after each epoch, its seconds so far and its exact match."""
    torch.manual_seed(seed)
    data = Date(seed=seed)
    data.setup("fit")
    network = peers.TutorialDateLSTM()
    step, pairs, seconds = date_step(network), data.datasets["train"].pairs, 0.0

    def pass_over() -> float:
        for batch in tutorial_dates(pairs):
            step(batch)
        return len(pairs)

    for epoch in range(1, epochs + 1):
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
        rate = block.amount / block.seconds
        yield {"epoch": epoch, "seconds": seconds, "samples_per_second": rate, "exact_match": exact_match}
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


def recorded(name: str, goal: float) -> dict[str, float]:
    """The line of a recorded run at which it has reached its goal, or its last."""
    lines = [json.loads(line) for line in (RECORDED / f"{name}.jsonl").read_text().splitlines()]
    return next((line for line in lines if line["exact_match"] >= goal), lines[-1])


def dates_against_tutorial(full: bool) -> Iterator[Row]:
    """Dates: seconds until 0.976, which the tutorial's author reaches in twenty epochs."""
    goal = 0.976
    whole = recorded("date_tutorial", goal)
    rounds, reached = [], []
    with started(Side(build_tutorial)) as (_, short):
        for seed in SEEDS:
            before = short()
            ours, exact_match = run("date_attention_lstm", seed, f"--trainer.max_steps={DATE_STEPS}")
            after = short()
            now = (before.amount + after.amount) / (before.seconds + after.seconds)
            theirs = whole["seconds"] * whole["samples_per_second"] / now
            if full:
                *_, last = train_tutorial(goal, epochs=40, seed=seed)
                theirs = last["seconds"]
            rounds.append((ours, theirs))
            reached.append(exact_match)
    note = f"{DATE_STEPS} steps; {_told(reached, goal)}; "
    note += f"the tutorial's has {whole['exact_match']:.4f} after epoch {whole['epoch']}"
    yield seconds_row(f"dates until {goal} / tutorial", "≥ 40 x", rounds, note + ("" if full else ", recorded"))


def copying(full: bool) -> Iterator[Row]:
    """Copying: seconds until 0.999, where the tutorial is at 0.41 after its whole training."""
    runs = [run("copy_transformer", seed, f"--trainer.max_steps={COPY_STEPS}") for seed in SEEDS]
    note = f"{COPY_STEPS} steps of 4 sequences; {_told([exact_match for _, exact_match in runs], 0.999)}"
    yield absolute_row("copying until 0.999", "s", "≤ 12 s", [seconds for seconds, _ in runs], note)


def _told(reached: list[float], goal: float) -> str:
    """How many runs have reached the goal."""
    return f"{sum(r >= goal for r in reached)} of {len(reached)} seeds reach it, the last of them {min(reached):.4f}"
