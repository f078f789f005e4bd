"""Benchmarks of the framework: length-grouped batches, Trainer overhead, start-up time, processes, checkpoints."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import wandb
import yaml
from lightning import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor

from benchmarks.measure import (
    ROUNDS,
    THREADS,
    Block,
    Built,
    Facts,
    Row,
    Side,
    absolute_row,
    compare,
    compared,
    ratio_row,
    started,
)
from benchmarks.steps import COPY, mean_loss, our_step, parameters_of, repeated, same_parameters, tokens_of
from datamodules import Copy
from lightning_tfm.data import Batch, LengthGroupedSampler, MicroBatches
from lightning_tfm.data.download import MIRROR
from lightning_tfm.errors import UserError
from lightning_tfm.fit.cli import TfmCLI, run
from lightning_tfm.networks import Network, Transformer
from lightning_tfm.optimizers import parameter_groups
from lightning_tfm.system.memory import keep_freed_memory
from lightning_tfm.tasks import TaskModule
from lightning_tfm.tokenization import PAD

EXPERIMENTS = Path(__file__).resolve().parents[1] / "experiments"
SMALL = "--data.init_args.train_size=20_000"
"""Setting of short runs, which generate their data in each run."""

DDP = ("--trainer.strategy=ddp",)

ROWS = 128
"""Batch size per process in `processes`, as in its experiment."""

WARM, TIMED = 20, 200
"""Number of warm-up steps and of timed steps, which include one checkpoint."""

TIMED_TOGETHER = 50
"""Number of timed steps of runs on several processes."""

ELASTIC = dict.fromkeys(("date_transformer", "date_gpt", "copy_attention_lstm"), TIMED_TOGETHER) | dict.fromkeys(
    ("date_attention_lstm", "copy_gpt", "copy_transformer"), TIMED
)
"""Number of timed steps of each experiment whose elastic determinism is measured, from the largest batch down."""

WIDTHS = 32, 64, 128
"""Widths of the networks in `threads`."""

LOGGED = 50
"""Batch whose loss must be the same on both sides: the first logged step of runs that do not accumulate batches."""


class Clock(Callback):
    """Callback that measures the time from the start of batch WARM to the start of the last batch.

    Attributes:
        trainer: the trainer of the run.
        seconds: the measured seconds.
        amount: the number of target tokens in these batches.
        loss: the loss after batch LOGGED.
    """

    trainer: Trainer
    begun = seconds = amount = 0.0
    loss = float("nan")

    def __init__(self) -> None:
        self.seen: list[Batch | MicroBatches] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == WARM:
            Clock.begun = time.perf_counter()
        elif batch_idx == trainer.max_steps * trainer.accumulate_grad_batches - 1:
            Clock.seconds = time.perf_counter() - Clock.begun
            Clock.amount = float(sum(map(tokens_of, self.seen[WARM:])))
        self.seen.append(batch)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx + 1 == LOGGED:
            # Our module returns a sum but logs the mean; Lightning in barebones mode logs nothing.
            Clock.trainer = trainer
            Clock.loss = trainer.callback_metrics.get("train/loss", outputs["loss"]).item()


class FitCLI(TfmCLI):
    """TfmCLI that trains, but tests nothing and draws no pictures."""

    def after_fit(self) -> None:
        """Test nothing."""


def settings_of(experiment: str) -> dict[str, Any]:
    """Return the settings of an experiment."""
    return yaml.safe_load((EXPERIMENTS / f"{experiment}.yaml").read_text(encoding="utf-8"))


def run_python(folder: Path, *arguments: str, **variables: str) -> None:
    """Run Python in a folder, which may hold modules, with this project and environment variables."""
    variables |= {"OMP_NUM_THREADS": str(THREADS), "WANDB_MODE": "offline"}
    variables["PYTHONPATH"] = os.pathsep.join((str(folder), str(EXPERIMENTS.parent)))
    if (mirror := os.environ.get(MIRROR)) and Path(mirror).is_dir():  # Python runs in another folder
        variables[MIRROR] = os.path.abspath(mirror)
    command, environment = [sys.executable, *arguments], os.environ | variables
    child = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, encoding="utf-8")
    assert child.returncode == 0, child.stderr


def fit(experiment: str, *settings: str, folder: str | None = None, timed: int = TIMED) -> None:
    """Run `lightning-tfm fit` on an experiment in this process, without evaluations, timed by Clock."""
    command = ["lightning-tfm", "fit", "--config", str(EXPERIMENTS / f"{experiment}.yaml"), *settings]
    command += [f"--num_threads={torch.get_num_threads()}"]
    command += ["--trust-package", "benchmarks", "--trainer.callbacks+=benchmarks.framework.Clock"]
    command += [f"--trainer.max_steps={WARM + timed + 1}", "--trainer.limit_val_batches=0", "--trainer.accelerator=cpu"]
    command += [f"--data.init_args.{name}=8" for name in ("val_size", "test_size")]  # one for each micro-batch
    before, arguments = Path.cwd(), sys.argv
    with tempfile.TemporaryDirectory() as vanishing:
        os.chdir(folder or vanishing)
        sys.argv = command
        try:
            run(command[1:], FitCLI)
            wandb.finish()  # unlike after a command, this process continues
        finally:
            os.chdir(before)
            sys.argv = arguments


def build_lengths(pool: int) -> Built:
    """Build training on sequences of 1 to 60 symbols."""
    keep_freed_memory()  # on both sides
    torch.manual_seed(0)
    data = Copy(max_length=60, longer_max_length=61, train_size=20_000, val_size=1, test_size=1, longer_size=1)
    data.setup("fit")
    dataset = data.datasets["train"]
    stream = LengthGroupedSampler(dataset.source_lengths, 64, seed=0)
    stream.POOL = pool
    batches = [dataset[rows] for rows in islice(stream, 256)]
    network = Transformer(**COPY | {"dropout": 0.0, "max_length": 64})
    lengths = torch.cat([(batch.target_out != PAD).sum(1) for batch in batches]).double()
    facts = {"parameters": parameters_of(network), "variation": (lengths.std() / lengths.mean()).item()}
    return Built(facts, repeated(our_step(network), batches, 16))


def vary(ours: Facts, peer: Facts) -> str:
    """Check for equal numbers of parameters, and for lengths with a coefficient of variation of at least 0.5."""
    checked = same_parameters(ours, peer)
    variation = min(ours["variation"], peer["variation"])
    assert variation >= 0.5, f"lengths vary too little: {variation}"
    return f"{checked}, lengths of a coefficient of variation of {variation:.2f}"


def length_buckets(full: bool) -> Iterator[Row]:
    """Measure batches of rows of similar length against batches of random rows."""
    sides = (Side(build_lengths, pool) for pool in (LengthGroupedSampler.POOL, 1))
    note = "copying 1 to 60 symbols, batch 64, Transformer of width 128"
    yield compared("rows of similar length / random rows", "tokens/s", "≥ 1.4 x", *sides, vary, note=note)


def build_fit(
    experiment: str, *settings: str, timed: int = TIMED, folder: str | None = None, counts: str = "tokens"
) -> Built:
    """Build runs of an experiment by the `fit` command, whose work is counted in "tokens" or "steps"."""
    if folder and "--trainer.devices=1" in settings:  # each process has a run of its own
        (own := Path(folder, os.environ.pop("LOCAL_RANK", "0"))).mkdir(exist_ok=True)
        folder = str(own)

    def work() -> Block:
        fit(experiment, *settings, folder=folder, timed=timed)
        return Block(Clock.amount if counts == "tokens" else timed, Clock.seconds)

    work()
    trainer = Clock.trainer
    rows = trainer.accumulate_grad_batches * trainer.datamodule.batch_size // trainer.world_size
    return Built({"loss": Clock.loss, "parameters": parameters_of(trainer.lightning_module), "rows": rows}, work)


def build_bare(experiment: str, *settings: str) -> Built:
    """Build the same steps as `build_fit`, from the same initial weights, in a bare training loop."""
    fit(experiment, *settings)  # builds the module and the data, and sets up the process as the command does
    module, data = Clock.trainer.lightning_module, Clock.trainer.datamodule
    seed = data.seed

    def loop() -> tuple[float, float]:
        seed_everything(seed)
        network = type(module.network)(**module.network.hyper_parameters)
        optimizer = module.make_optimizer(parameter_groups(network, network.head))
        schedule = module.lr_schedule.scheduler(optimizer, WARM + TIMED + 1)
        dataset = data.datasets["train"]
        stream = islice(LengthGroupedSampler(dataset.source_lengths, data.batch_size, seed), WARM + TIMED + 1)
        for number, rows in enumerate(stream):
            if number == WARM:
                begun = time.perf_counter()
            elif number == WARM + TIMED:
                seconds = time.perf_counter() - begun
            loss = mean_loss(network, dataset[rows])
            if number + 1 == LOGGED:
                logged = loss.item()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), Clock.trainer.gradient_clip_val)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        return logged, seconds

    return Built({"loss": loop()[0]}, lambda: Block(TIMED, loop()[1]))


class Plain(LightningModule):
    """Minimal LightningModule that performs the same training steps."""

    def __init__(self, network: Network, module: TaskModule) -> None:
        super().__init__()
        self.network, self.make_optimizer, self.lr_schedule = network, module.make_optimizer, module.lr_schedule

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return mean_loss(self.network, batch)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = self.make_optimizer(parameter_groups(self.network, self.network.head))
        scheduler = self.lr_schedule.scheduler(optimizer, WARM + TIMED + 1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def build_lightning(experiment: str) -> Built:
    """Build the same steps in Lightning's Trainer in barebones mode, with `Plain`."""
    fit(experiment)
    module, data, clip = Clock.trainer.lightning_module, Clock.trainer.datamodule, Clock.trainer.gradient_clip_val
    settings = {"accelerator": "cpu", "max_steps": WARM + TIMED + 1, "max_epochs": -1, "gradient_clip_val": clip}
    settings |= {"limit_val_batches": 0, "use_distributed_sampler": False, "barebones": True}

    def work() -> Block:
        seed_everything(data.seed)
        network = type(module.network)(**module.network.hyper_parameters)
        Trainer(**settings, callbacks=[Clock()]).fit(Plain(network, module), datamodule=data)
        return Block(TIMED, Clock.seconds)

    work()
    return Built({"loss": Clock.loss}, work)


def same_loss(ours: Facts, peer: Facts) -> str:
    """Check that both sides perform the same steps, by comparing the loss of step LOGGED."""
    torch.testing.assert_close(ours["loss"], peer["loss"], rtol=1e-3, atol=0)
    return f"the same loss in step {LOGGED}"


def threads(full: bool) -> Iterator[Row]:
    """Measure training with two threads against one, by the width of the network."""
    name = "date_transformer"
    for width in WIDTHS:
        sizes = f"--model.network.d_model={width}", f"--model.network.d_ff={4 * width}"
        sides = (Side(build_fit, name, SMALL, *sizes, timed=TIMED_TOGETHER, threads=n, counts="steps") for n in (2, 1))
        yield compared(f"two threads / one, {name} of width {width}", "steps/s", "", *sides, same_loss)


def trainer_overhead(full: bool) -> Iterator[Row]:
    """Measure the `fit` command, and Lightning alone, against a bare training loop on the same batches."""
    defaults = "with CSV and W&B (offline), checkpoints and checks for NaN, without a progress bar"
    name, batch = "date_attention_lstm", "--data.init_args.batch_size=64"
    sides = Side(build_fit, name, batch, counts="steps"), Side(build_bare, name, batch)
    rates, checked = compare(*sides, same_loss)
    times = [(1000 / ours, 1000 / bare) for ours, bare in rates]  # ms per step
    row = f"Trainer / bare loop, {name}, batch 64"
    yield ratio_row(row, "ms a step", "≤ 1.05 x", times, checked=checked, note=defaults)
    name, alone = "copy_transformer", "Lightning's Trainer in barebones mode on the same data module"
    # Use one thread, since the time that two threads wait for each other hides the overhead. Start new processes in
    # each round, since the speed of two identical processes often differs by as much as the overhead.
    for row, target, ours, note in (
        ("Trainer", "≤ 0.7 ms", Side(build_fit, name, threads=1, counts="steps"), defaults),
        ("limit: Lightning alone", "", Side(build_lightning, name, threads=1), alone),
    ):
        rounds = [compare(ours, Side(build_bare, name, threads=1), same_loss, rounds=1) for _ in range(ROUNDS)]
        more = [1000 / rate - 1000 / bare for rates, _ in rounds for rate, bare in rates]
        row, (_, checked) = f"{row} - bare loop, {name}", rounds[0]
        yield absolute_row(row, "ms a step", target, more, checked=checked, note=f"{note}; one thread")


WITHOUT_PEER = """
from importlib import metadata

def version(name, version=metadata.version):
    if name == "transformers":
        raise metadata.PackageNotFoundError(name)
    return version(name)

metadata.version = version
"""
"""Source of a sitecustomize.py that hides transformers, a peer that torchmetrics would import if it is installed."""


IMPORTS = "from lightning_tfm.__main__ import importing\nwith importing(): import {}"
"""Program that only imports packages, as the commands do: without garbage collection and scipy.signal."""


def run_start(folder: Path, *arguments: str) -> float:
    """Return the seconds of Python until its end or, with the callback `FirstStep`, the first step of a training."""
    first = folder / "first"
    (folder / "sitecustomize.py").write_text(WITHOUT_PEER, encoding="utf-8")
    begun = time.time()
    run_python(folder, *arguments, FIRST_STEP=str(first))
    return (float(first.read_text(encoding="utf-8")) if first.exists() else time.time()) - begun


def start_up(full: bool) -> Iterator[Row]:
    """Measure the seconds from the start of a command to its end or, when fitting, to its first step."""
    command = "-m", "lightning_tfm"
    config = str(EXPERIMENTS / "date_attention_lstm.yaml")
    experiment = *command, "fit", "--config", config, f"--num_threads={THREADS}", "--trainer.accelerator=cpu"
    first_step = "--trust-package=benchmarks", "--trainer.callbacks+=benchmarks.first_step.FirstStep"
    with tempfile.TemporaryDirectory() as trained:
        run_start(Path(trained), *experiment, "--trainer.max_steps=20")
        run = Path(trained, "runs/date_attention_lstm/version_0")
        one_line = "generate", str(run / "checkpoints/best.ckpt"), "May 3, 1979"
        packages = "lightning.pytorch, torch, torchmetrics, wandb"
        for name, target, arguments, note in (
            ("lightning-tfm --help", "≤ 4 s", (*command, "--help"), ""),
            ("lightning-tfm generate, one line", "≤ 2 s", (*command, *one_line), ""),
            (
                "lightning-tfm report, one run",
                "≤ 4 s",
                (*command, "report", str(run)),
                "with attention and errors of 10,000 test examples",
            ),
            (
                "lightning-tfm fit until its first step",
                "≤ 3 s",
                (*experiment, *first_step),
                "includes generating and encoding 50,000 dates",
            ),
            ("limit: imports", "", ("-c", IMPORTS.format(packages)), "torch, Lightning, torchmetrics and W&B alone"),
        ):
            values = []
            for _ in range(1 + ROUNDS):
                with tempfile.TemporaryDirectory() as folder:
                    values.append(run_start(Path(folder), *arguments))
            yield absolute_row(name, "s", target, values[1:], note=note)  # the first fills the disk cache


def same_rows(ours: Facts, peer: Facts) -> str:
    """Check that both sides have the same number of parameters and of rows per process."""
    for name in ("parameters", "rows"):
        assert ours[name] == peer[name], f"{name}: {ours[name]} and {peer[name]}"
    return f"{ours['parameters']:,} parameters and {ours['rows']} rows per process on both sides"


def processes(full: bool) -> Iterator[Row]:
    """Measure two processes against one, with one thread and the same number of rows each.

    The limit is two processes that train on their own, without exchanging gradients.
    """
    both, alone = f"--data.init_args.batch_size={2 * ROWS}", f"--data.init_args.batch_size={ROWS}"
    ddp = both, "--trainer.devices=2", *DDP
    one = alone, "--trainer.devices=1"
    for name, settings, target, note in (
        ("2 processes / 1, one thread each", ddp, "≥ 1.7 x", f"gloo, {ROWS} rows a process, date_transformer"),
        ("limit: 2 separate runs / 1, one thread each", one, "", f"{ROWS} rows a run, date_transformer"),
    ):
        with tempfile.TemporaryDirectory() as folder:
            ours, peer = (
                Side(
                    build_fit,
                    "date_transformer",
                    *way,
                    SMALL,
                    timed=TIMED_TOGETHER,
                    folder=folder,
                    threads=1,
                    processes=number,
                )
                for way, number in ((settings, 2), (one, 1))
            )
            yield compared(name, "tokens/s", target, ours, peer, same_rows, note=note)


def elastic(full: bool) -> Iterator[Row]:
    """Measure the cost of elastic determinism on two processes, by micro-batches, against DDP.

    The limit of four micro-batches is DDP with steps of two batches of half the size, one after the other. It is
    measured where they miss their target.
    """
    for parts in (2, 4):
        for experiment in ELASTIC:
            strategy = "--config", str(EXPERIMENTS / "elastic.yaml")
            settings = *strategy, f"--trainer.strategy.init_args.num_micro_batches={parts}"
            name = f"{experiment}, {parts} micro-batches on 2 processes / DDP"
            yield against_ddp(name, "≥ 0.77 x", experiment, *settings)
    for experiment in ("date_attention_lstm", "copy_transformer"):
        batch_size = settings_of(experiment)["data"]["init_args"]["batch_size"] // 2
        settings = *DDP, "--trainer.accumulate_grad_batches=2", f"--data.init_args.batch_size={batch_size}"
        name = f"limit: {experiment}, 2 accumulated batches on 2 processes / DDP"
        yield against_ddp(name, "", experiment, *settings)


def against_ddp(name: str, target: str, experiment: str, *settings: str) -> Row:
    """Compare a run of one of ELASTIC on two processes with DDP."""
    # No checkpoint is written in the timed steps, which differ in number.
    common = "--trainer.devices=2", SMALL, "--checkpoint.every_n_train_steps=1000"
    with tempfile.TemporaryDirectory() as folder:
        ours, ddp = (
            Side(build_fit, experiment, *common, *way, timed=ELASTIC[experiment], folder=folder, threads=1, processes=2)
            for way in (settings, DDP)
        )
        return compared(name, "tokens/s", target, ours, ddp, same_rows, note="gloo, one thread a process")


def reset_peak() -> int:
    """Reset the peak memory of this process, on Linux, and return its current memory in bytes."""
    ctypes.CDLL(None).malloc_trim(0)  # freed memory that is kept would hide new allocations
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # reset VmHWM
    return resident("VmRSS")


def resident(name: str) -> int:
    """Return the memory of this process in bytes: "VmRSS", the current one, or "VmHWM", the peak since the reset."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


def build_saving() -> Built:
    """Build checkpoint saves of a large model; the amount is the extra memory over the size of the training state."""
    size = "--model.init_args.network.init_args"
    sizes = f"{size}.d_model=768", f"{size}.d_ff=3072", f"{size}.num_layers=2"
    fit("copy_transformer", *sizes, "--checkpoint.every_n_train_steps=1000")
    trainer = Clock.trainer
    tensors = [*trainer.lightning_module.parameters()]
    tensors += [value for state in trainer.optimizers[0].state.values() for value in state.values()]
    state = sum(tensor.nbytes for tensor in tensors)

    def work() -> Block:
        with tempfile.TemporaryDirectory() as folder:
            before, begun = reset_peak(), time.perf_counter()
            trainer.save_checkpoint(Path(folder) / "saved.ckpt")
            return Block((resident("VmHWM") - before) / state, time.perf_counter() - begun)

    return Built({"state": state}, work)


def saving(full: bool) -> Iterator[Row]:
    """Measure the extra memory of saving a checkpoint, which only Linux reports exactly."""
    if sys.platform != "linux":
        raise UserError("the peak memory can be reset on Linux only")
    with started(Side(build_saving)) as (facts, work):
        blocks = [work() for _ in range(ROUNDS)]
    note = f"weights and optimizer of {facts['state'] / 2**20:.0f} MB, saved in {blocks[0].seconds:.1f} s"
    values = [block.amount for block in blocks]
    name = "extra peak memory while saving / size of the state"
    yield absolute_row(name, "of the state", "≤ 0.2", values, note=note)
