"""`lightning-tfm plan`: compute the memory, FLOPs and traffic of a training step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

from lightning import Trainer
from lightning.pytorch.callbacks import WeightAveraging
from rich import box
from rich.table import Table
from torch import Tensor

from lightning_tfm.commands.parser import CommandParser
from lightning_tfm.commands.step_cost import (
    SAMPLE,
    StepCost,
    check_rows,
    ddp,
    divide,
    fake_processes,
    largest_batch,
    replicate,
    step_cost,
)
from lightning_tfm.data import TaskDataModule
from lightning_tfm.distributed.parallel import check_tensor_parallel
from lightning_tfm.distributed.strategies import Elastic, ModelParallel
from lightning_tfm.errors import UserError
from lightning_tfm.fit.cli import SettingsCLI, run
from lightning_tfm.system.private import fake_mode
from lightning_tfm.system.terminal import LiteralConsole
from lightning_tfm.tasks import TaskModule

BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
DECIMAL = ("", "k", "M", "G", "T", "P", "E")


class PlanCLI(SettingsCLI):
    """TfmCLI that parses the settings of `fit` and constructs the module on fake tensors, but runs nothing.

    Attributes:
        tensor_parallel_size: the number of devices that divide the Transformer layers where both FSDP2 and tensor
            parallelism are planned.
    """

    tensor_parallel_size = 2

    def instantiate_model_and_trainer(self) -> None:
        with fake_mode():
            super().instantiate_model_and_trainer()

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Construct the Trainer for one device; the plan divides the work among others by itself."""
        trainer = super().instantiate_trainer(**kwargs)
        if isinstance(trainer.strategy, ModelParallel):
            if trainer.strategy.tensor_parallel_size > 1:
                self.tensor_parallel_size = trainer.strategy.tensor_parallel_size
            trainer.strategy.tensor_parallel_size, trainer.strategy.save_distributed_checkpoint = 1, False
        return trainer

    def make_module(self) -> TaskModule:
        """Return a new module, with the settings of the command."""
        return cast(TaskModule, self.construct()[self.command].model)


def plan(arguments: list[str]) -> int:
    """Print a table of the costs of a step, by strategy and number of devices."""
    options, settings = make_parser().parse_known_args(arguments)
    if not settings:
        raise UserError("lightning-tfm plan needs the name of an experiment; `lightning-tfm list` shows them")
    for number in options.devices:
        if number < 1:
            raise UserError(f"--devices must be at least 1, but is {number}; try 1")
    cli = planned(settings)
    module, data = cast(TaskModule, cli.model), cast(TaskDataModule, cli.datamodule)
    for number in options.devices:
        check_rows(data, number)
    batch = largest_batch(data)
    parameters = sum(weight.numel() for weight in module.parameters())
    shapes = {name: value for name, value in batch._asdict().items() if isinstance(value, Tensor) and value.dim() > 1}
    sizes = ", ".join(f"{name} {' x '.join(map(str, value.shape))}" for name, value in shapes.items() if value.numel())
    console = LiteralConsole()
    console.print(f"{type(module.network).__name__} of {parameters:,} parameters, {cli.trainer.precision},")
    console.print(f"largest of the first {SAMPLE} batches:\n{sizes}")
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for name in ("strategy", "weights", "gradients", "optimizer", "activations", "peak", "FLOPs", "sent"):
        table.add_column(name, justify="left" if name == "strategy" else "right", no_wrap=True)
    for strategy, cost in costs(cli, options.devices):
        table.add_row(strategy, *_cells(cost))
    console.print(table)
    return 0


def make_parser() -> CommandParser:
    """Return the parser of the command."""
    parser = CommandParser(
        "lightning-tfm plan",
        description="Compute the memory, FLOPs and traffic of a training step on each device, without training. "
        "All other arguments are those of `fit`: an experiment and its settings.",
    )
    parser.usage = "lightning-tfm plan EXPERIMENT [--devices N ...] [--SETTING VALUE ...]"
    parser.add_argument(
        "--devices", type=int, nargs="+", default=[1], metavar="N", help="numbers of devices (default: 1)"
    )
    return parser


def planned(settings: list[str]) -> PlanCLI:
    """Return the command line interface of `fit` with its data set up, but without a run.

    Raises:
        UserError: if `fit` would refuse the settings or the data.
    """
    cli = cast(PlanCLI, run(["fit", *settings, *PLANNED], PlanCLI))
    cli.datamodule.setup("fit")
    return cli


PLANNED = ("--trainer.logger=false", "--trainer.accelerator=cpu", "--trainer.devices=1", "--ckpt_path=null")
"""Settings of `fit` that a plan replaces."""


def costs(cli: PlanCLI, devices: list[int]) -> Iterator[tuple[str, StepCost]]:
    """Yield the costs of a step for each strategy and number of devices, with the name of the strategy."""
    data, trainer, network = cast(TaskDataModule, cli.datamodule), cli.trainer, cast(TaskModule, cli.model).network
    cost = partial(
        step_cost,
        cli.make_module,
        precision=trainer.precision_plugin,
        accumulated=trainer.accumulate_grad_batches,
        averages=any(isinstance(callback, WeightAveraging) for callback in trainer.callbacks),
    )
    is_elastic = isinstance(trainer.strategy, Elastic)
    divided = divide
    if isinstance(trainer.strategy, ModelParallel):
        divided = partial(divide, activation_checkpointing=trainer.strategy.activation_checkpointing)
    for number in devices:
        with fake_processes(number) as mesh:
            batch = largest_batch(data, number)
            if number == 1:
                yield "one device", cost(batch, replicate, mesh)
            else:
                yield f"ddp x {number:,}", cost(batch, ddp, mesh)
            parts = trainer.strategy.num_micro_batches if is_elastic else max(Elastic().num_micro_batches, number)
            is_possible = is_elastic or (accepts(Elastic, parts) and accepts(check_rows, data, parts))
            if parts % number == 0 and is_possible:
                yield f"elastic x {number:,}", cost(largest_batch(data, number, parts), replicate, mesh)
            if number > 1:
                yield f"fsdp x {number:,}", cost(batch, divided, mesh)
        for size in sorted({number, cli.tensor_parallel_size}, reverse=True):
            if number > 1 and number % size == 0 and accepts(check_tensor_parallel, network, size):
                name = "tensor" if size == number else "fsdp+tp"
                with fake_processes(number, size) as mesh:
                    yield f"{name} x {number:,}", cost(largest_batch(data, number // size), divided, mesh)


def accepts(check: Callable[..., object], *arguments: Any) -> bool:
    """Return whether a check raises no UserError for its arguments."""
    try:
        check(*arguments)
    except UserError:
        return False
    return True


def _cells(cost: StepCost) -> Iterator[str]:
    """Yield the cells of a row of the table."""
    for size in (cost.weights, cost.gradients, cost.optimizer, cost.activations, cost.memory):
        yield _scaled(size, 1024, BINARY)
    yield _scaled(cost.flops, 1000, DECIMAL)
    yield _scaled(cost.sent, 1024, BINARY) if cost.sent else ""


def _scaled(value: float, base: int, units: tuple[str, ...]) -> str:
    """Return a value with three significant digits and its unit."""
    power = 0
    while value >= 999.5 and power < len(units) - 1:
        value, power = value / base, power + 1
    return f"{value:#.3g}".rstrip(".") + f" {units[power]}"
