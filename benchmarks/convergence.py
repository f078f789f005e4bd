"""Benchmarks of the training time until a model reaches a goal.

Ours is `lightning-tfm fit` in a process of its own, with a single validation at the end.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer, seed_everything
from torch.nn import functional as F

from benchmarks import peers
from benchmarks.framework import EXPERIMENTS, run_python, settings_of
from benchmarks.measure import ROUNDS, THREADS, Block, Built, Row, Side, in_turn, timed, until_row
from benchmarks.steps import GPT_SIZE, date_step, nano_step, tutorial_dates
from datamodules import Date, Text, parallel_text, sentiment, text
from lightning_tfm.data import TaskDataModule, resolve_path
from lightning_tfm.data.download import Download
from lightning_tfm.runs.record import Run
from lightning_tfm.tokenization import PAD

SEEDS = range(11, 11 + ROUNDS)
"""Default seeds, disjoint from those with which settings were chosen, as are the other seeds below."""

COPY_SEEDS, YOYODYNE_SEEDS, POLARITY_SEEDS = range(21, 21 + ROUNDS), range(31, 31 + ROUNDS), range(51, 51 + ROUNDS)

DATE_STEPS = {"tutorial": 300, "yoyodyne": 400}
"""Our training steps against each peer, chosen on validation data of seeds 1 to 5 (against yoyodyne: 1 to 10)."""

SMOOTHING = 0.2
"""Label smoothing against yoyodyne: after 400 steps, all 12,000 validation dates are correct for seeds 1 to 10."""

TUTORIAL_EPOCHS = 20
"""Maximum number of epochs of the tutorial; if it has not reached the goal by then, it counts as reaching it."""

NANO_STEPS = 2000
"""Training steps in nanoGPT's character-level CPU settings, each on 12 windows of 64 characters."""

LARGE_GOAL = 1.4646
"""Validation loss of the best replication of nanoGPT's GPU settings that we know; nanoGPT itself reports 1.4697."""

MULTI30K_STEPS = 2000
"""Training steps on Multi30k, chosen with seed 1; the experiment has 3,000."""

SAME_DATA = "the same data (fingerprint)"

SHAKESPEARE_FILES = text.FILES, "tinyshakespeare/input.txt"
POLARITY_FILES = sentiment.FILES, "polarity/rt-polarity.neg", "polarity/rt-polarity.pos"
MULTI30K_FILES = (
    parallel_text.FILES,
    *(f"multi30k/{split}.{language}.gz" for split in ("train", "val") for language in ("de", "en")),
)


def train(
    experiment: str,
    seed: int,
    metric: str,
    *settings: str,
    steps: int | None = None,
    data: TaskDataModule | None = None,
    threads: int = THREADS,
    accelerator: str = "cpu",
) -> Block:
    """Run `fit` on an experiment; return a metric at the end and the seconds of training and validating.

    Args:
        experiment: the name of the experiment.
        seed: the seed of the run.
        metric: the metric, such as "val/exact_match" or "test/accuracy".
        settings: further arguments of the command.
        steps: the number of training steps; defaults to `trainer.max_steps` of the experiment.
        data: the data module of the peer; None skips the check of the data.
        threads: the number of threads.
        accelerator: "cpu" or "gpu".

    Raises:
        AssertionError: if the run and the peer are trained on different data.
    """
    steps = steps or settings_of(experiment)["trainer"]["max_steps"]
    command = [f"--trainer.accelerator={accelerator}", f"--seed_everything={seed}"]
    command += [f"--trainer.max_steps={steps}", f"--trainer.val_check_interval={steps}"]
    with tempfile.TemporaryDirectory() as folder:
        run_fit(experiment, folder, *command, *settings, threads=threads)
        (run,) = Run.below(Path(folder))
        read = run.starts[-1]["data_fingerprint"]
        assert data is None or read == data.fingerprint, "the sides train on different data"
        last = {name: value for row in run.metrics() for name, value in row.items()} | run.summary.metrics
        return Block(last[metric], run.summary.train_seconds)


def run_fit(experiment: str, folder: str, *settings: str, threads: int = THREADS) -> None:
    """Run `fit` on an experiment."""
    config = "--config", str(EXPERIMENTS / f"{experiment}.yaml")
    run_python(Path(folder), "-m", "lightning_tfm", "fit", *config, f"--num_threads={threads}", *settings)


def goal_row(
    name: str, target: str, runs: list[Block], goal: float, note: str, is_loss: bool = False, **fields: Any
) -> Row:
    """Return an `until_row` of runs, whose note states where those that miss the goal end."""
    reached = [run.amount <= goal if is_loss else run.amount >= goal for run in runs]
    if missed := sorted(f"{run.amount:.4f}" for run, is_reached in zip(runs, reached, strict=True) if not is_reached):
        note += f" (those that miss it end at {', '.join(missed)})"
    return until_row(name, target, [run.seconds for run in runs], reached, note=note, **fields)


def require(downloads: dict[str, Download], *names: str) -> None:
    """Download files that a benchmark reads; raise UserError if one cannot be obtained."""
    for name in names:
        resolve_path(name, downloads)


def fastest_precision() -> str:
    """Return bf16-mixed if the CPU has bfloat16 instructions, without which it is slower, otherwise 32-true."""
    has_bfloat16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "bf16-mixed" if has_bfloat16 else "32-true"


def dates_of(seed: int) -> Date:
    """Return the dates generated from a seed, on which both sides are trained."""
    data = Date(seed=seed)
    data.setup("fit")
    return data


def build_tutorial(goal: float, epochs: int) -> Built:
    """Build training runs of the date tutorial on our dates; each block uses the next seed.

    Args:
        goal: the exact match on the test split that ends the training.
        epochs: the number of epochs that are run; the seconds are scaled to TUTORIAL_EPOCHS.
    """
    seeds = iter(SEEDS)

    def work() -> Block:
        torch.manual_seed(seed := next(seeds))
        pairs, test = (dates_of(seed).datasets[split].pairs for split in ("train", "test"))
        network, seconds = peers.TutorialDateLSTM(), 0.0
        step = date_step(network)

        def epoch() -> float:
            for batch in tutorial_dates(pairs):
                step(batch)
            return len(pairs)

        for _ in range(epochs):
            network.train()
            seconds += timed(epoch).seconds
            network.eval()
            with torch.no_grad():
                matches = [(network(source).argmax(-1) == target).all(1) for source, target in tutorial_dates(test)]
            exact_match = torch.cat(matches).double().mean().item()
            if exact_match >= goal:
                return Block(exact_match, seconds)
        return Block(exact_match, seconds * TUTORIAL_EPOCHS / epochs)

    return Built({}, work)


def dates_against_tutorial(full: bool) -> Iterator[Row]:
    """Measure the seconds until an exact match of 0.976 on dates, which the tutorial reports after 20 epochs."""
    goal, steps = 0.976, DATE_STEPS["tutorial"]

    def run(seed: int) -> Block:
        return train("date_attention_lstm", seed, "test/exact_match", steps=steps, data=dates_of(seed))

    _, ours, theirs = in_turn(run, Side(build_tutorial, goal, TUTORIAL_EPOCHS if full else 1), SEEDS)
    ends = [block.amount for block in theirs]
    yield goal_row(
        f"dates until {goal} on test / tutorial",
        "≥ 40 x",
        ours,
        goal,
        f"{steps} steps" + (f"; the peer's end at {min(ends):.2f} to {max(ends):.2f}" if full else ""),
        peer=[block.seconds for block in theirs],
        extrapolated="" if full else f"first of {TUTORIAL_EPOCHS} epochs, scaled",
        checked=SAME_DATA,
    )


class TrainingClock(Callback):
    """Callback that measures the seconds of training, without validations."""

    begun = seconds = 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.begun = self.begun or time.perf_counter()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.begun:
            self.seconds, self.begun = self.seconds + time.perf_counter() - self.begun, 0.0


class Watch(TrainingClock):
    """Callback that also records yoyodyne's last validation accuracy, and stops at an accuracy of 1."""

    exact_match = 0.0

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.exact_match = trainer.callback_metrics["val_accuracy"].item()
        trainer.should_stop = self.exact_match == 1.0


def build_yoyodyne() -> Built:
    """Build trainings of yoyodyne's LSTM with soft attention on our dates; each block uses the next seed.

    It has width 64, batches of 128 and Adam at 5e-3, and stops after 5 epochs or with all validation dates correct.
    """
    seeds = iter(YOYODYNE_SEEDS)

    def work() -> Block:
        seed_everything(seed := next(seeds))
        dates, files, watch = dates_of(seed), {}, Watch()
        with tempfile.TemporaryDirectory() as folder:
            for split in ("train", "val"):
                lines = (f"{pair.source}\t{pair.target}\n" for pair in dates.datasets[split].pairs)
                (path := Path(folder) / f"{split}.tsv").write_text("".join(lines), encoding="utf-8")
                files[split] = str(path)
            module, model = peers.yoyodyne_model("SoftAttentionLSTMModel", files, folder, 64, 5e-3, batch_size=128)
            settings = peers.BARE | {"max_epochs": 5, "num_sanity_val_steps": 0, "callbacks": [watch]}
            Trainer(accelerator="cpu", **settings).fit(model, module)
        return Block(watch.exact_match, watch.seconds)

    return Built({}, work)


def dates_against_yoyodyne(full: bool) -> Iterator[Row]:
    """Measure the seconds until all 2,000 validation dates are correct, against yoyodyne."""
    goal, steps, smoothing = 1.0, DATE_STEPS["yoyodyne"], f"--model.init_args.label_smoothing={SMOOTHING}"

    def run(seed: int) -> Block:
        return train("date_attention_lstm", seed, "val/exact_match", smoothing, steps=steps, data=dates_of(seed))

    _, ours, theirs = in_turn(run, Side(build_yoyodyne), YOYODYNE_SEEDS)
    count = sum(block.amount >= goal for block in theirs)
    yield goal_row(
        f"dates until {goal} on val / yoyodyne",
        "≥ 5 x",
        ours,
        goal,
        f"{steps} steps, label smoothing {SMOOTHING}; of the peer's trainings {count} of {len(theirs)} reach it, "
        "validated after each epoch (391 steps)",
        peer=[block.seconds for block in theirs],
        checked=SAME_DATA,
    )


def copying(full: bool) -> Iterator[Row]:
    """Measure the seconds until an exact match of 0.999 on copying, with the experiment unchanged."""
    goal = 0.999
    runs = [train("copy_transformer", seed, "test/exact_match") for seed in COPY_SEEDS]
    yield goal_row(f"copying until {goal}", "≤ 6 s", runs, goal, "400 steps of 4 sequences")


def polarity(full: bool) -> Iterator[Row]:
    """Measure the seconds until an accuracy of 0.80 on the test set of film reviews, with the experiment unchanged."""
    require(*POLARITY_FILES)
    runs = [train("polarity_classifier", seed, "test/accuracy") for seed in POLARITY_SEEDS]
    steps = settings_of("polarity_classifier")["trainer"]["max_steps"]
    yield goal_row("polarity until 0.80 on test", "≤ 10 s", runs, 0.80, f"{steps} steps of 64 sentences")


def multi30k(full: bool) -> Iterator[Row]:
    """Measure the seconds until a BLEU of 42.5 on the validation split of Multi30k, with five beams and one seed."""
    require(*MULTI30K_FILES)
    precision = fastest_precision()
    # Without a test set, the trained model is tested on the validation split.
    settings = "--data.init_args.test=null", f"--trainer.precision={precision}"
    run = train("multi30k_transformer", SEEDS[0], "val/bleu", *settings, steps=MULTI30K_STEPS)
    note = f"{MULTI30K_STEPS:,} steps in {precision}; {run.amount:.2f} BLEU with five beams"
    yield goal_row("Multi30k until 42.5 BLEU on val", "≤ 1560 s", [run], 42.5, note)


def shakespeare_data() -> Text:
    """Return the text with nanoGPT's splits: the first 90% for training and the last 10% for validation."""
    data = Text("tiny_shakespeare", max_length=GPT_SIZE["max_length"], test_fraction=0)
    data.setup("fit")
    return data


def nano_rate(number: int) -> float:
    """Return nanoGPT's learning rate at a step, counted from 0, in its character settings for a CPU."""
    if number < 100:
        return 1e-3 * (number + 1) / 101
    return 1e-4 + 0.5 * (1 + math.cos(math.pi * (number - 100) / (NANO_STEPS - 100))) * 9e-4


def build_nano(steps: int) -> Built:
    """Build training runs of nanoGPT on tiny Shakespeare; each block returns the final loss on the validation split.

    Args:
        steps: the number of steps; the seconds are scaled to NANO_STEPS steps.
    """
    data = shakespeare_data()
    train_split, val = data.datasets["train"], data.datasets["val"]
    _, inputs, targets, _ = val[torch.arange(len(val))]
    seeds = iter(SEEDS)

    def work() -> Block:
        torch.manual_seed(next(seeds))
        network = peers.NanoGPT(**GPT_SIZE | {"vocab_size": data.vocab_size}, bias=False)
        step = nano_step(network, nano_rate)

        def training() -> float:
            for _ in range(steps):
                step(train_split[torch.randint(len(train_split), (12,))])
            return steps

        seconds = timed(training).seconds * NANO_STEPS / steps
        with torch.no_grad():
            batches = zip(inputs.split(64), targets.split(64), strict=True)
            losses = [F.cross_entropy(network(x).mT, y, ignore_index=PAD, reduction="sum") for x, y in batches]
        return Block((sum(losses) / (targets != PAD).sum()).item(), seconds)

    return Built({"fingerprint": data.fingerprint}, work)


def train_shakespeare(experiment: str, seed: int, precision: str, **settings: Any) -> Block:
    """Run `fit` with nanoGPT's splits; return the loss on the whole validation split and the seconds; see `train`."""
    options = "--data.init_args.test_fraction=0", f"--trainer.precision={precision}"
    return train(experiment, seed, "val/loss", *options, **settings)


def shakespeare(full: bool) -> Iterator[Row]:
    """Measure the seconds until a loss of 1.60 on tiny Shakespeare, against nanoGPT's 2,000 steps.

    Note:
        Ours has two layers of width 96, nanoGPT four of width 128. nanoGPT's loss after these steps is far higher.
    """
    require(*SHAKESPEARE_FILES)
    data, precision = shakespeare_data(), fastest_precision()
    steps = NANO_STEPS if full else NANO_STEPS // 10

    def run(seed: int) -> Block:
        return train_shakespeare("shakespeare_gpt", seed, precision, data=data)

    facts, ours, theirs = in_turn(run, Side(build_nano, steps), SEEDS)
    assert facts["fingerprint"] == data.fingerprint, "the sides train on different data"
    losses, nano_losses = ([block.amount for block in side] for side in (ours, theirs))
    note = f"ours with 2 layers of 96 in {precision}, the peer with 4 of 128 in float32; "
    note += f"losses over the whole validation split {min(losses):.3f} to {max(losses):.3f}"
    note += f"; the peer's {min(nano_losses):.3f} to {max(nano_losses):.3f}" if full else ""
    yield goal_row(
        "tiny Shakespeare until 1.60 / nanoGPT's 2,000 steps",
        "≥ 1 x",
        ours,
        1.60,
        note,
        is_loss=True,
        peer=[block.seconds for block in theirs],
        extrapolated="" if full else f"first {steps} steps, scaled",
        checked=SAME_DATA,
    )


def large_shakespeare(full: bool) -> Iterator[Row]:
    """Measure the seconds until a loss of LARGE_GOAL on tiny Shakespeare, at the size of nanoGPT's GPU settings."""
    require(*SHAKESPEARE_FILES)
    run = train_shakespeare("shakespeare_gpt_gpu", SEEDS[0], precision := fastest_precision())
    note = f"in {precision}; loss over the whole validation split {run.amount:.4f}"
    name = f"tiny Shakespeare, 6 x 384, until {LARGE_GOAL} on a CPU"
    yield goal_row(name, "≤ 3600 s", [run], LARGE_GOAL, note, is_loss=True)
