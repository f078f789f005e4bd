"""Base class of tasks."""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from inspect import getattr_static, isabstract
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, get_type_hints

import torch
from lightning import Trainer
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor
from torch.optim import Optimizer

from lightning_tfm import networks
from lightning_tfm.checkpoint import FORMAT, check_fits
from lightning_tfm.checkpoint.plugin import VerifiedCheckpointIO
from lightning_tfm.data import BatchDivision, ResumableDataLoader, TaskDataModule
from lightning_tfm.distributed.parallel import broadcast_weights, is_parallel, parallelize
from lightning_tfm.distributed.strategies import Elastic, ModelParallel
from lightning_tfm.distributed.tensors import mesh_of
from lightning_tfm.errors import UserError, rank_zero_print
from lightning_tfm.inference import Prediction, Predictor
from lightning_tfm.networks import Network
from lightning_tfm.networks.network import complete
from lightning_tfm.optimizers import AdamW, LRSchedule, class_path, describe_optimizer, parameter_groups, unfuse
from lightning_tfm.system.private import has_trainer, is_within_step, keep_sampler, skip_buffers_in_broadcast
from lightning_tfm.tasks.checks import check_ranks, check_trainer
from lightning_tfm.tasks.evaluation import EvaluationModule
from lightning_tfm.tasks.run_settings import shared_settings, step_settings
from lightning_tfm.tasks.step import TrainingStep, seed_dropout
from lightning_tfm.tokenization import Tokenizer

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class TaskModule(Predictor, EvaluationModule):
    """Base class of tasks, which train a network with the mean loss per token of a step.

    A task defines `datamodule_class`, `loss`, `new_metrics`, `evaluate` and the methods of its predictor. Each token
    has the same weight for any number of processes and accumulated batches, see `TrainingStep`.

    Args:
        network: the network.
        tokenizer: the tokenizer of the data.
        optimizer: a function from parameter groups to an optimizer, such as an optimizer class.
        lr_schedule: the schedule of the learning rate.
        hyper_parameters: further arguments of the subclass, as plain values for the checkpoint; those in
            `predictor_arguments` are passed to the predictor.

    Attributes:
        datamodule_class: the base class of the data modules on which the task can be trained.
        step_arguments: the arguments of the constructor that change the loss of a step.
        step: the training step.
        resumed_step: the step to resume from, set by `check`; None otherwise.
        is_fork: whether training starts from a checkpoint with other settings, which replace those in its states.
    """

    datamodule_class: ClassVar[type[TaskDataModule]]
    step_arguments: ClassVar[tuple[str, ...]] = ("label_smoothing",)

    def __init__(
        self,
        network: Network,
        tokenizer: Tokenizer,
        optimizer: OptimizerCallable = AdamW,
        lr_schedule: LRSchedule = LRSchedule(),
        **hyper_parameters: Any,
    ) -> None:
        super().__init__(network, tokenizer, **{name: hyper_parameters[name] for name in self.predictor_arguments})
        self.make_optimizer = optimizer
        self.lr_schedule = lr_schedule
        # DDP need not broadcast buffers, which are lookup tables and scores that are the same on all processes.
        skip_buffers_in_broadcast(self, [f"network.{name}" for name, _ in network.named_buffers()])
        self.step = TrainingStep({})
        self.skipped_steps = 0  # by the gradient scaler of float16
        self.resumed_step: int | None = None
        self.is_fork = False
        self.is_checked = False  # before the run starts
        self.save_hyperparameters(
            {
                "class_path": class_path(type(self)),
                "predictor": class_path(self.predictor_class()),
                "network": {"class_path": class_path(type(network)), "init_args": network.hyper_parameters},
                "tokenizer": tokenizer.to_dict(),
                "optimizer": describe_optimizer(optimizer),
                "lr_schedule": asdict(lr_schedule),
                **hyper_parameters,
            },
            logger=False,  # the command logs the whole configuration
        )

    @classmethod
    def predictor_class(cls) -> type[Predictor]:
        """Return the class that a checkpoint is loaded as: the predictor, or the task if it overrides its members."""
        predictors = (base for base in cls.__mro__ if issubclass(base, Predictor) and not issubclass(base, TaskModule))
        predictor = next(predictors)
        bases = [base for base in predictor.__mro__ if issubclass(base, Predictor)]
        members = {name for base in bases for name in vars(base) if not name.startswith(("__", "_abc_"))}
        inherits = all(getattr_static(cls, name) is getattr_static(predictor, name) for name in members)
        return predictor if inherits else cls

    @classmethod
    def data_settings(cls, data: Any) -> dict[str, Any]:
        """Return the arguments of the constructor that depend on a data module of `datamodule_class`."""
        return {"tokenizer": data.tokenizer}

    @classmethod
    def from_data(cls, data: TaskDataModule, network: Network, **settings: Any) -> Self:
        """Construct a module that fits a data module.

        Args:
            data: the data module.
            network: the network.
            settings: arguments of the constructor; `data_settings` replaces those that are missing or None.
        """
        check_pair(cls, type(data))
        return cls(network, **complete(settings, cls.data_settings(data)))

    @abstractmethod
    def loss(self, batch: Any) -> tuple[Tensor, Tensor | int]:
        """Return the training loss of a batch, summed over tokens, and the number of tokens."""

    def load_pretrained(self) -> None:
        """Load pretrained weights, if any, into the network; called when a new run starts."""

    def figures(self, predictions: list[Prediction]) -> dict[str, Figure]:
        """Return figures of the test predictions, by name."""
        return {}

    def category_metrics(self, predictions: Sequence[Prediction]) -> dict[str, float]:
        """Return metrics of PER_CATEGORY of the test predictions of a category, at least one, by name."""
        number = len(predictions)
        return {
            "exact_match": sum(line["correct"] for line in predictions) / number,
            "nll": sum(line["nll"] for line in predictions) / number,
        }

    def setup(self, stage: str) -> None:
        """Set up checkpoints with checksums, convert the module to float64 if required, and check the settings.

        Note:
            Lightning converts the module only after it restores a checkpoint, which would round float64 weights.
        """
        if type(self.trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            self.trainer.strategy.checkpoint_io = VerifiedCheckpointIO()
        if self.trainer.precision == "64-true":
            self.double()
        if not self.is_checked:
            self.check(self.trainer, self.trainer.datamodule, stage)
        self.is_checked = False
        if self.trainer.datamodule is not None:
            # The data module divides batches among processes, so Lightning must not do it again.
            keep_sampler(self.trainer)
        if stage == "fit":
            settings = {"step to resume": self.resumed_step, "tokenizer": self.tokenizer.fingerprint}
            arguments = {name: value for name, value in self.hparams.items() if name != "tokenizer"}
            check_ranks(settings | self.step_settings(self.trainer) | shared_settings(self.trainer, arguments))
        super().setup(stage)

    def check_data(self, data: TaskDataModule, trainer: Trainer) -> None:
        """Raise UserError unless the network can be trained on a data module with the strategy of a trainer."""
        vocab_size = self.network.hyper_parameters["vocab_size"]
        if vocab_size != data.vocab_size:
            raise UserError(f"vocab_size must match the data, but is {vocab_size}; set it to {data.vocab_size}")
        self.network.check_lengths(data.max_source_length, data.max_target_length)
        data.check_micro_batches(BatchDivision.of(trainer.strategy).num_micro_batches)
        if isinstance(trainer.strategy, ModelParallel):
            trainer.strategy.check_network(self.network)

    def check(
        self,
        trainer: Trainer,
        data: TaskDataModule | None,
        stage: str,
        settings: Any = None,
        checkpoint: Mapping[str, Any] | None = None,
        path: str = "",
    ) -> None:
        """Check a run before it starts: the command calls this before it writes anything, otherwise `setup` does.

        Args:
            trainer: the trainer.
            data: the data module; None if the user passes loaders instead.
            stage: "fit", "validate" or "test".
            settings: the settings of the trainer, of which a dry run has replaced some, see `check_trainer`.
            checkpoint: the content of the checkpoint to resume or to evaluate; None if there is none, or if it is
                checked when it is loaded.
            path: the path of the checkpoint.
        """
        check_trainer(trainer, stage, settings)
        if data is not None:
            self.check_data(data, trainer)
        if checkpoint is not None:
            self.check_checkpoint(dict(checkpoint), path, trainer, resuming=stage == "fit")
            self.resumed_step = checkpoint["global_step"] if stage == "fit" else None
        self.is_checked = True

    def configure_model(self) -> None:
        """Divide the network among the processes, if the strategy does."""
        strategy = self.trainer.strategy
        if isinstance(strategy, ModelParallel) and not is_parallel(self.network):
            if self.trainer.state.fn == TrainerFn.FITTING:
                self.load_pretrained()  # which a divided network cannot; a checkpoint overwrites the weights
            broadcast_weights(self, strategy.root_device)  # as DDP does
            parallelize(self.network, strategy.device_mesh, strategy.activation_checkpointing)

    def new_optimizer(self, precision: str) -> Optimizer:
        """Return a new optimizer of the weights for a setting `trainer.precision`."""
        optimizer = self.make_optimizer(parameter_groups(self.network, self.network.head))
        if "mixed" in precision or len(set(map(mesh_of, self.network.parameters()))) > 1:
            unfuse(optimizer)
        return optimizer

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        optimizer = self.new_optimizer(self.trainer.precision)
        steps = self.trainer.estimated_stepping_batches
        if steps == math.inf:
            self.lr_schedule.check_max_steps(self.trainer.max_steps)
        scheduler = self.lr_schedule.scheduler(optimizer, int(steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_fit_start(self) -> None:
        if self.trainer.ckpt_path is None and not is_parallel(self.network):
            self.load_pretrained()
        if self.scales_gradients:  # torch warns if the scaler skips the first step, after which the rate still changes
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
        self.seed = torch.initial_seed()
        if self.trainer.datamodule is not None:
            self.longest_source = self.trainer.datamodule.longest_source
            self.shortest_source = self.trainer.datamodule.shortest_source
        weights, division = dict(self.named_parameters()), BatchDivision.of(self.trainer.strategy)
        self.step = TrainingStep(weights, division, self.trainer.world_size)

    def on_train_epoch_start(self) -> None:
        self.step.begin()  # Lightning has dropped the gradients of an unfinished step

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the summed loss of a batch, or of a micro-batch of it."""
        seed_dropout(self.seed, self.trainer.fit_loop.total_batch_idx, self.step.micro_batch, self.device)
        loss, tokens = self.loss(batch)
        self.step.add(loss, tokens)
        if not is_within_step(self.trainer):
            self.step.gather()
        return loss

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        averaged = 1 if isinstance(self.trainer.strategy, Elastic) else self.step.division.world_size
        self.step.reduce(self.trainer.accumulate_grad_batches * averaged)
        if (self.global_step + 1) % (self.trainer.log_every_n_steps or 1) == 0:  # logging takes time
            self.log("train/loss", self.step.loss)
            self.log("trainer/learning_rate", optimizer.param_groups[0]["lr"])
            self.log("trainer/gradient_norm", self.step.norms.norm())
            loader = self.trainer.train_dataloader
            if isinstance(loader, ResumableDataLoader):
                self.log_dict({f"train/{name}": value for name, value in loader.progress.items()})

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        self.step.divide_and_clip(gradient_clip_val, gradient_clip_algorithm == "value")

    @property
    def scales_gradients(self) -> bool:
        """Return whether a gradient scaler is used, as in 16-mixed precision."""
        return getattr(self.trainer.precision_plugin, "scaler", None) is not None

    def step_settings(self, trainer: Trainer) -> dict[str, Any]:
        """Return the settings, by name, that a resumed run must keep, except those of the network and the optimizer."""
        arguments = {f"model.init_args.{name}": self.hparams.get(name) for name in self.step_arguments}
        return arguments | step_settings(trainer, self.lr_schedule)

    def check_finite(self) -> None:
        """Check that all losses and gradients since the last check are finite.

        Raises:
            UserError: if one is not; the message names the first such step and the parameters.
        """
        try:
            self.skipped_steps += self.step.check_finite(self.global_step, self.scales_gradients)
        except UserError as error:
            folder = getattr(self.trainer.checkpoint_callback, "dirpath", None)
            has_saved = folder is not None and any(Path(folder).glob("*.ckpt"))
            raise UserError(
                f"{error}; lower the learning rate (model.init_args.optimizer.init_args.lr) or set "
                f"trainer.gradient_clip_val ({self.trainer.gradient_clip_val})"
                + (f"; the checkpoints of earlier steps are kept in {folder}" if has_saved else "")
            ) from None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_step % (self.trainer.log_every_n_steps or 1) == 0:
            self.check_finite()
            if self.scales_gradients:
                self.log("train/skipped_steps", float(self.skipped_steps))

    def on_validation_start(self) -> None:
        self.check_finite()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.check_finite()  # before a good checkpoint is replaced
        checkpoint["format_version"] = FORMAT
        checkpoint["step_settings"] = self.step_settings(self.trainer)
        checkpoint["skipped_steps"] = self.skipped_steps
        checkpoint |= {name: getattr(self, name) for name in ("longest_source", "shortest_source", "alignment_head")}
        if self.trainer.datamodule is not None:
            checkpoint["data_fingerprint"] = self.trainer.datamodule.fingerprint

    def check_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, trainer: Trainer, resuming: bool) -> None:
        """Check that a checkpoint fits the model and, if training is resumed, the run.

        Raises:
            UserError: if it does not fit; the message names its path.
        """
        shapes = {name: weight.shape for name, weight in self.state_dict().items()}
        averages = any(isinstance(callback, WeightAveraging) for callback in trainer.callbacks)
        settings = self.step_settings(trainer)
        check_fits(checkpoint, path, dict(self.hparams_initial), shapes, resuming, averages, settings, self.is_fork)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if has_trainer(self) and self.trainer.state.fn == TrainerFn.FITTING:
            if self.resumed_step is None:
                self.check_checkpoint(checkpoint, self.trainer.ckpt_path or "", self.trainer, resuming=True)
            if self.is_fork:
                self._change_settings(checkpoint)
        else:
            checkpoint.pop("loops", None)  # the progress of the training, which Lightning would restore
        self.skipped_steps = checkpoint.get("skipped_steps", 0)
        self.alignment_head = checkpoint.get("alignment_head")

    def _change_settings(self, checkpoint: dict[str, Any]) -> None:
        """Replace the settings in the states of a checkpoint; moments and the position in the stream are kept."""
        optimizer = self.new_optimizer(self.trainer.precision)
        scheduler = self.lr_schedule.scheduler(optimizer, self.trainer.max_steps)
        (states,), (schedule,) = checkpoint["optimizer_states"], checkpoint["lr_schedulers"]
        scale = scheduler.lr_lambdas[0](schedule["last_epoch"])
        for saved, group in zip(states["param_groups"], optimizer.param_groups, strict=True):
            saved |= {name: value for name, value in group.items() if name != "params"}
            saved["lr"] = group["initial_lr"] * scale  # closed form, as in LambdaLR
        schedule["base_lrs"] = scheduler.base_lrs
        schedule["_last_lr"] = [saved["lr"] for saved in states["param_groups"]]
        loop = checkpoint["loops"]["fit_loop"]["state_dict"]
        loop["combined_loader"] = [{"position": state["position"]} for state in loop["combined_loader"]]
        if checkpoint["step_settings"]["trainer.precision"] != self.trainer.precision:
            checkpoint.pop("MixedPrecision", None)  # the state of the gradient scaler of 16-mixed

    def teardown(self, stage: str) -> None:
        self.resumed_step = None

    def on_train_end(self) -> None:
        self.check_finite()
        if self.skipped_steps:
            rank_zero_print(
                f"{self.skipped_steps} of {self.global_step} steps were skipped: their gradients overflowed float16"
            )


def check_pair(module_class: type[TaskModule], data_class: type[TaskDataModule]) -> None:
    """Check that a module can be trained on the data.

    Raises:
        UserError: if it cannot; the message names the modules that can.
    """
    if issubclass(data_class, module_class.datamodule_class):
        return
    fitting = []
    tasks: list[Any] = TaskModule.__subclasses__()
    for other in tasks:
        if other.__module__.startswith("lightning_tfm.") and issubclass(data_class, other.datamodule_class):
            base = get_type_hints(other.__init__)["network"]
            classes = {name: getattr(networks, name) for name in networks.__all__}
            names = [name for name, cls in classes.items() if issubclass(cls, base) and not isabstract(cls)]
            fitting.append(f"lightning_tfm.tasks.{other.__name__}, whose network is {' or '.join(names)}")
    raise UserError(
        f"the module must learn from {data_class.holds}, the data of {data_class.__name__}, but "
        f"{module_class.__name__} learns from {module_class.datamodule_class.holds}"
        + (f"; try {'; or '.join(fitting)}" if fitting else "")
    )
