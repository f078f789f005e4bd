"""Compatibility of a module with the data and the settings of the Trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_type_hints

from lightning import Callback
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy

from lightning_tfm.errors import UserError
from lightning_tfm.metrics import all_gather_list
from lightning_tfm.parsing_errors import concrete
from lightning_tfm.strategies import Elastic, ModelParallel

if TYPE_CHECKING:
    from lightning_tfm.data import TaskDataModule
    from lightning_tfm.modules.task import TaskModule


def check_pair(module_class: type[TaskModule], data_class: type[TaskDataModule]) -> None:
    """Check that a module can be trained on the data.

    Raises:
        UserError: if it cannot; the message names the modules that can.
    """
    if issubclass(data_class, module_class.datamodule_class):
        return
    from lightning_tfm import modules  # imports this module

    fitting = []
    for name in modules.__all__:
        other = getattr(modules, name)
        if issubclass(data_class, getattr(other, "datamodule_class", ())):
            networks = concrete(get_type_hints(other.__init__)["network"])
            fitting.append(f"lightning_tfm.modules.{name}, whose network is {' or '.join(networks)}")
    raise UserError(
        f"the module must learn from {data_class.holds}, the data of {data_class.__name__}, but "
        f"{module_class.__name__} learns from {module_class.datamodule_class.holds}"
        + (f"; try {'; or '.join(fitting)}" if fitting else "")
    )


def check_strategy(strategy: Strategy) -> None:
    """Check that a strategy is supported.

    Raises:
        UserError: if the strategy is not supported, cannot divide its work among the processes, or starts processes as
            copies of this one.
    """
    if isinstance(strategy, Elastic | ModelParallel):
        strategy.check_processes(strategy.num_nodes * strategy.num_processes)
    elif type(strategy) not in (SingleDeviceStrategy, DDPStrategy):  # DeepSpeed's and XLA's derive from these
        raise UserError(
            "trainer.strategy must be ddp, lightning_tfm.strategies.Elastic or lightning_tfm.strategies.ModelParallel "
            f"(FSDP2 and tensor parallelism), but is {type(strategy).__name__}"
        )
    if isinstance(strategy, DDPStrategy) and strategy._start_method != "popen":
        raise UserError(
            "trainer.strategy must start each process with the command, but "
            f"ddp_{strategy._start_method} copies this process; try ddp"
        )


def check_ranks(facts: Mapping[str, Any]) -> None:
    """Check that all processes of a run agree, before they train.

    Args:
        facts: the values that must be equal, by name.

    Raises:
        UserError: on all processes, if a value differs.
    """
    first, *others = all_gather_list([dict(facts)])
    for rank, theirs in enumerate(others, start=1):
        for name, value in first.items():
            if theirs.get(name) != value:
                raise UserError(
                    f"all processes of a run must have the same {name}, but rank 0 has {value} and rank {rank} has "
                    f"{theirs.get(name)}; start them with the same command and packages in a folder that they share"
                )


def check_callbacks(callbacks: Sequence[Callback]) -> None:
    """Check that all callbacks are supported.

    Raises:
        UserError: if one is not.
    """
    if any(isinstance(callback, StochasticWeightAveraging) for callback in callbacks):
        raise UserError(
            "trainer.callbacks must not contain StochasticWeightAveraging, which changes the learning rate by "
            "epochs; try lightning_tfm.callbacks.WeightAveraging"
        )
