"""Private names of other packages that no public name replaces, which an update may break.

Each stands in a function of its own, with a test in tests/system/test_private.py; the private names that a class of
this package overrides are listed there.
"""

from __future__ import annotations

import sys
from argparse import Action, ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:  # importing this module is fast
    import numpy as np
    import torch
    from lightning import LightningModule, Trainer
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, Timer, WeightAveraging
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
    from optuna import Study
    from optuna.storages import RDBStorage
    from optuna.trial import FrozenTrial, Trial
    from torch import Tensor, nn
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.optim import Optimizer
    from torch.optim.swa_utils import AveragedModel

# argparse and jsonargparse


def actions(parser: ArgumentParser) -> list[Action]:
    """Return the arguments of a parser."""
    return parser._actions


def read_no_files() -> None:
    """Keep jsonargparse from reading the value of a setting from a file or an address with that name."""
    from jsonargparse import _optionals

    _optionals._config_read_mode = "fF"  # a file that is not a file, which no path is


def yaml_loader() -> type[Any]:
    """Return the loader of YAML that jsonargparse uses for files and single values."""
    from jsonargparse import _loaders_dumpers

    return _loaders_dumpers.get_yaml_default_loader()


def replace_yaml_loader(loader: type[Any]) -> None:
    """Replace the loader of `yaml_loader`."""
    from jsonargparse import _loaders_dumpers

    _loaders_dumpers.yaml_default_loader = loader  # type: ignore[assignment]  # None before its first use


# Lightning's Trainer, strategies and callbacks


def keep_sampler(trainer: Trainer) -> None:
    """Keep the Trainer from dividing the batches of a loader among the processes."""
    trainer._accelerator_connector.use_distributed_sampler = False


def is_within_step(trainer: Trainer) -> bool:
    """Return whether gradients are still accumulated after this batch."""
    return trainer.fit_loop.epoch_loop._should_accumulate()


def is_before_validation(trainer: Trainer) -> bool:
    """Return whether a validation follows this batch."""
    return trainer.fit_loop.epoch_loop._should_check_val_fx(trainer.fit_loop._data_fetcher)


def disable_sigterm_broadcast(trainer: Trainer) -> None:
    """Keep the Trainer from exchanging SIGTERM among the processes in each batch."""
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None


def has_trainer(module: LightningModule) -> bool:
    """Return whether a module is attached to a Trainer."""
    return module._trainer is not None


def skip_buffers_in_broadcast(module: LightningModule, names: list[str]) -> None:
    """Keep DDP from broadcasting the buffers with some names."""
    module._ddp_params_and_buffers_to_ignore = names  # type: ignore[assignment]


def set_data_parallel_size(strategy: ModelParallelStrategy, size: int) -> None:
    """Set the number of processes that read different data, before the mesh exists."""
    strategy._data_parallel_size = size


def averaged_model(callback: WeightAveraging) -> AveragedModel:
    """Return the average of WeightAveraging."""
    return cast("AveragedModel", callback._average_model)


def set_averaged_model(callback: WeightAveraging, model: AveragedModel) -> None:
    """Set the average of WeightAveraging."""
    callback._average_model = model


def start_method(strategy: DDPStrategy) -> str:
    """Return the method that starts the other processes: "popen" or the name of a method of multiprocessing."""
    return strategy._start_method or "popen"


def replace_default_timeout(strategy: DDPStrategy, timeout: timedelta) -> None:
    """Set the time that a process waits for the others, unless the user has set another than torch's default."""
    from torch.distributed.constants import default_pg_timeout

    if strategy._timeout == default_pg_timeout:
        strategy._timeout = timeout


def stops_after_epochs(callback: EarlyStopping) -> bool:
    """Return whether EarlyStopping checks its metric at the end of an epoch rather than of a validation."""
    return bool(callback._check_on_train_epoch_end)


def saves_after_epochs(callback: ModelCheckpoint) -> bool:
    """Return whether ModelCheckpoint saves at the end of an epoch rather than of a validation."""
    return bool(callback._save_on_train_epoch_end)


def epochs_between_saves(callback: ModelCheckpoint) -> int:
    """Return the number of epochs between two saves of ModelCheckpoint."""
    return callback._every_n_epochs


def timer_interval(callback: Timer) -> str:
    """Return whether Timer checks the time after each "step" or "epoch"."""
    return str(callback._interval)


# Loggers


def logger_version(logger: CSVLogger | TensorBoardLogger) -> int | str | None:
    """Return the version that the user has set; unlike `version`, it does not choose one."""
    return logger._version


def set_version(logger: CSVLogger | TensorBoardLogger, version: str) -> None:
    """Set the version of a logger, the name of its folder."""
    logger._version = version


def set_writer(logger: CSVLogger | WandbLogger, writer: Any) -> None:
    """Set the writer of metrics.csv, or the run of W&B."""
    logger._experiment = writer


def writer_of(logger: Any) -> Any:
    """Return the writer of metrics.csv, or the run of W&B; unlike `experiment`, it does not start one."""
    return getattr(logger, "_experiment", None)


def hide_later_steps(logger: TensorBoardLogger, step: int) -> None:
    """Let TensorBoard hide what a killed process has logged from a step on."""
    logger._kwargs["purge_step"] = step


def add_hparams(logger: TensorBoardLogger, settings: dict[str, Any], metrics: Sequence[str]) -> None:
    """Show settings with the last values of some metrics in HPARAMS of TensorBoard.

    Note:
        `SummaryWriter.add_hparams` would write to another folder and log values of the metrics.
    """
    from torch.utils.tensorboard.summary import hparams

    writer = logger.experiment._get_file_writer()
    for summary in hparams(settings, dict.fromkeys(metrics, 0.0))[:2]:  # the third says that the run has ended
        writer.add_summary(summary)


def wandb_arguments(logger: WandbLogger) -> dict[str, Any]:
    """Return the arguments of `wandb.init`, which may be changed until the run starts."""
    return logger._wandb_init


def is_offline(logger: WandbLogger) -> bool:
    """Return whether the user has set `offline`."""
    return logger._offline


@contextmanager
def without_wandb_launch() -> Iterator[None]:
    """Keep `wandb.init` from importing `wandb.sdk.launch`, which takes a second and is only needed for launch jobs."""
    name = "wandb.sdk.launch"
    sys.modules.setdefault(name, cast(ModuleType, None))
    try:
        yield
    finally:
        if sys.modules[name] is None:
            del sys.modules[name]


# sacrebleu and Optuna


def corpus_statistics(metric: Any, outputs: Sequence[str], references: Sequence[str]) -> np.ndarray:
    """Return the statistics of each output, whose sum over a corpus gives its score by `corpus_score`."""
    import numpy as np

    return np.array(metric._extract_corpus_statistics(outputs, [references]))


def corpus_score(metric: Any, statistics: np.ndarray) -> float:
    """Return the score of a corpus from its statistics."""
    return float(metric._compute_score_from_stats(statistics.tolist()).score)


def running_trial(study: Study, frozen: FrozenTrial) -> Trial:
    """Return a trial that another process has begun."""
    from optuna.trial import Trial

    return Trial(study, frozen._trial_id)


def record_heartbeat(database: RDBStorage, trial: Trial) -> None:
    """Record a heartbeat of a trial."""
    database.record_heartbeat(trial._trial_id)


# torch


def default_store() -> Any:
    """Return the store of the default process group."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def fake_mode(**settings: Any) -> AbstractContextManager[Any]:
    """Return a context in which tensors have shapes but no memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(**settings)


def without_fake_mode() -> AbstractContextManager[Any]:
    """Return a context that leaves `fake_mode`."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def memory_tracker() -> MemTracker:
    """Return a MemTracker without statistics of each module, which take most of its time and allow only one call."""
    from torch.distributed._tools.mem_tracker import MemTracker

    class PeakTracker(MemTracker):
        _pre_fw_hook = _post_fw_hook = _pre_bw_hook = _post_bw_hook = cast(Any, lambda self, *_: None)

    return PeakTracker()


def observe_operators(observe: Callable[[Any, Sequence[Any], Any], None]) -> AbstractContextManager[Any]:
    """Return a context that passes each operator to a function, with its arguments and its result.

    Operators on distributed tensors are passed as those on local tensors.
    """
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode

    class Observer(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(issubclass(kind, DTensor) for kind in types):
                return NotImplemented
            result = func(*args, **(kwargs or {}))
            observe(func, args, result)
            return result

    return Observer()


def cpu_attention_flops() -> dict[Any, Callable[..., int]]:
    """Return formulas, those for GPUs, for the kernels of attention on a CPU, which FlopCounterMode does not know."""
    import torch
    from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

    aten = torch.ops.aten
    return {
        aten._scaled_dot_product_flash_attention_for_cpu: lambda *shapes, **_: sdpa_flop_count(*shapes[:3]),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda *shapes, **_: sdpa_backward_flop_count(
            *shapes[:4]
        ),
    }


def multiply_in_place(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply tensors by a factor, in place and in one call."""
    import torch

    torch._foreach_mul_(tensors, factor)


def add_in_place(tensors: list[Tensor], others: list[Tensor]) -> None:
    """Add others to tensors, in place and in one call."""
    import torch

    torch._foreach_add_(tensors, others)


def norms(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the norm of each tensor, computed in a type."""
    import torch

    return list(torch._foreach_norm(tensors, 2, dtype))


def unscale_before_step(optimizer: Optimizer) -> None:
    """Make a gradient scaler unscale the gradients before the step, as for an optimizer that is not fused."""
    optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]  # missing in the stubs


def softmax_backward(gradient: Tensor, output: Tensor, into: Tensor) -> None:
    """Compute the gradient of a softmax over the last dimension from that of its output."""
    import torch

    torch._softmax_backward_data(gradient, output, -1, output.dtype, grad_input=into)


def has_cpu_bfloat16() -> bool:
    """Return whether oneDNN computes in bfloat16 on this CPU."""
    import torch

    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def has_forward_hooks(module: nn.Module) -> bool:
    """Return whether a module has forward hooks."""
    return bool(module._forward_hooks)
