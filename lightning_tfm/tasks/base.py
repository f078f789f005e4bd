"""Base class of tasks."""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from lightning import LightningModule, Trainer
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import EarlyStopping, WeightAveraging
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.distributed import Work
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_tfm.checkpoint import FORMAT, check_fits
from lightning_tfm.checkpoint.plugin import VerifiedCheckpointIO
from lightning_tfm.config.settings import flatten
from lightning_tfm.data import BatchDivision, TaskDataModule, stable_hash
from lightning_tfm.distributed.parallel import (
    broadcast_weights,
    check_activation_checkpointing,
    check_tensor_parallel,
    data_group,
    is_parallel,
    keep_weights,
    norms,
    parallelize,
)
from lightning_tfm.distributed.strategies import Elastic, ModelParallel
from lightning_tfm.distributed.tensors import local, mesh_of
from lightning_tfm.errors import UserError, rank_zero_print
from lightning_tfm.inference import AttentionExample, Prediction, Predictor, short_title, worst_first
from lightning_tfm.networks import Network
from lightning_tfm.networks.network import complete
from lightning_tfm.optimizers import LRSchedule, class_path, describe_optimizer, parameter_groups, unfuse
from lightning_tfm.tasks.checks import check_pair, check_ranks, check_run
from lightning_tfm.tokenization import Tokenizer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NUM_EXAMPLES = 2
"""Number of first test examples, and of test examples with the largest loss, whose attention is plotted."""


def test_prefix(test_set: str) -> str:
    """Return the prefix of the metrics that a test logs for a test set.

    It is "test" for "test", "test/longer" for "longer", and "val/final" for "val", the only test set of data without a
    test split: the metrics of this last evaluation are not another point of the curves under "val".
    """
    if test_set == "val":
        return "val/final"
    return test_set if test_set == "test" else f"test/{test_set}"


def check_label_smoothing(value: float) -> None:
    """Check that a label smoothing is at least 0 and below 1.

    Raises:
        UserError: if it is not.
    """
    if not 0 <= value < 1:
        raise UserError(f"label_smoothing must be at least 0 and below 1, but is {value}; try 0.1")


class TaskModule(Predictor, LightningModule):
    """Base class of tasks, which train a network with the mean loss per token of a step.

    Each token has the same weight for any number of processes and accumulated batches. Subclasses pass the summed loss
    of each batch to `accumulate_loss`.

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
        signum: the signal that this process has received; 0 if none. Set before each batch, by `Checkpoints`.
        higher_is_better: whether higher values of a metric are better, by logged name; of others, it is not known.
        token_metrics: the logged names of the metrics that are not comparable between tokenizers.
        signum_of_any: the largest `signum` of all processes, one step late, since it is copied from the device.
    """

    datamodule_class: ClassVar[type[TaskDataModule]]
    step_arguments: ClassVar[tuple[str, ...]] = ("label_smoothing",)

    def __init__(
        self,
        network: Network,
        tokenizer: Tokenizer,
        optimizer: OptimizerCallable,
        lr_schedule: LRSchedule,
        **hyper_parameters: Any,
    ) -> None:
        super().__init__(network, tokenizer, **{name: hyper_parameters[name] for name in self.predictor_arguments})
        self.make_optimizer = optimizer
        self.lr_schedule = lr_schedule
        # DDP need not broadcast buffers, which are lookup tables and scores that are the same on all processes.
        self._ddp_params_and_buffers_to_ignore = [f"network.{name}" for name, _ in network.named_buffers()]
        self.metrics = nn.ModuleDict()  # by prefix, see `setup`
        self.higher_is_better: dict[str, bool] = {}
        self.token_metrics: set[str] = set()
        self.step_sums: list[Tensor] = []  # loss and number of tokens of each micro-batch of the step so far
        self.gathering: tuple[list[Tensor], Work] | None = None  # of the sums and the signals of all processes
        self.signum = self.signum_of_any = 0
        self.arriving_signum: tuple[Tensor, torch.Event | None] | None = None  # of the last step
        self.resumed_step: int | None = None  # of the checkpoint from which the command resumes
        self.pending_finite_checks: list[Tensor] = []  # of each step: its loss, and the norm of each gradient
        self.last_loss: Tensor | None = None  # of the last step
        self.skipped_steps = 0  # by the gradient scaler of float16
        self.is_restored = False  # from a checkpoint
        self.is_checked = False  # by the command, before it starts the Trainer
        self.save_hyperparameters(
            {
                "class_path": class_path(type(self)),
                "network": {"class_path": class_path(type(network)), "init_args": network.hyper_parameters},
                "tokenizer": tokenizer.to_dict(),
                "optimizer": describe_optimizer(optimizer),
                "lr_schedule": asdict(lr_schedule),
                **hyper_parameters,
            },
            logger=False,  # the command logs the whole configuration
        )

    @classmethod
    def data_settings(cls, data: Any) -> dict[str, Any]:
        """Return the arguments of the constructor that depend on the data.

        Args:
            data: a data module of `datamodule_class`.
        """
        return {"tokenizer": data.tokenizer}

    @classmethod
    def from_data(cls, data: TaskDataModule, network: Network, **settings: Any) -> Self:
        """Construct a module that fits a data module.

        Args:
            data: the data module.
            network: the network.
            settings: arguments of the constructor; `data_settings` replaces those that are missing or None.

        Raises:
            UserError: if the module cannot be trained on the data.
        """
        check_pair(cls, type(data))
        return cls(network, **complete(settings, cls.data_settings(data)))

    @abstractmethod
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the summed loss of a batch, passed through `accumulate_loss`."""

    def load_pretrained(self) -> None:
        """Load pretrained weights, if any, into the network; called when a new run starts."""

    def aligned_attention(self, dataset: Any, batch: Any) -> tuple[dict[str, Tensor], Tensor] | None:
        """Return the attention over the source and the gold links, if all examples have a gold alignment.

        Args:
            dataset: the dataset of the batch.
            batch: the batch.

        Returns:
            The weights (B, H, T, S) by layer, and the gold links (B, T, S); None without a gold alignment.
        """
        return None

    def attention_examples(self, dataset: Any, predictions: Sequence[tuple[int, Prediction]]) -> list[AttentionExample]:
        """Return the test examples whose attention is plotted: the first, and those with the largest loss.

        Args:
            dataset: the test data.
            predictions: the rows and their predictions.
        """
        first = [row for row, _ in predictions[:NUM_EXAMPLES]]
        worst = sorted(predictions, key=lambda item: worst_first(item[1]))[:NUM_EXAMPLES]
        by_row = dict(predictions)
        examples = []
        for row in dict.fromkeys([*first, *(row for row, _ in worst)]):
            prediction = by_row[row]
            # Fonts have no tab.
            texts = (prediction["source"], prediction["target"], prediction["prediction"])
            source, target, output = (short_title(" ".join(text.split())) for text in texts)
            title = f"{source}\ntrue: {target}\npredicted: {output}"
            examples.append(AttentionExample(row, title, {**prediction}))
        return examples

    def figures(self, predictions: list[Prediction]) -> dict[str, Figure]:
        """Return figures of the test predictions, by name."""
        return {}

    def new_metrics(self) -> nn.ModuleDict:
        """Return new metrics of the task, by name, for one validation or test split."""
        return nn.ModuleDict()

    def log(
        self, name: str, value: Any, *arguments: Any, higher_is_better: bool | None = None, **settings: Any
    ) -> None:
        """Log a value, as LightningModule does.

        Args:
            name: the name.
            value: the value, or a metric of torchmetrics.
            *arguments: further arguments of `LightningModule.log`.
            higher_is_better: whether higher values are better, for comparisons and the best checkpoint; None for what
                the metric says.
            **settings: further arguments of `LightningModule.log`.
        """
        direction = getattr(value, "higher_is_better", None) if higher_is_better is None else higher_is_better
        if direction is not None:
            self.higher_is_better[name] = direction
        if getattr(value, "depends_on_tokenizer", False):
            self.token_metrics.add(name)
        super().log(name, value, *arguments, **settings)

    @property
    def signatures(self) -> dict[str, str]:
        """Return the signatures (settings) of sacrebleu's scores, by name; empty if the task has none."""
        return {}

    @property
    def test_prefixes(self) -> list[str]:
        """Return the prefix of the metrics of each test set."""
        data = self.trainer.datamodule
        return [test_prefix(name) for name in (data.test_sets if data else ("test",))]

    def setup(self, stage: str) -> None:
        """Set up checkpoints with checksums, convert the module to float64 if required, and create the metrics.

        Note:
            Lightning converts the module only after it restores a checkpoint, which would round float64 weights.
        """
        if type(self.trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            self.trainer.strategy.checkpoint_io = VerifiedCheckpointIO()
        if self.trainer.precision == "64-true":
            self.double()
        if not self.is_checked:
            check_run(self, self.trainer, self.trainer.datamodule, stage)
        if self.trainer.datamodule is not None:
            # The data module divides batches among processes, so Lightning must not do it again.
            self.trainer._accelerator_connector.use_distributed_sampler = False
        if stage == "fit":
            check_ranks(self._facts())
        for prefix in ["val"] if stage in ("fit", "validate") else self.test_prefixes:
            if prefix not in self.metrics:
                self.metrics[prefix] = self.new_metrics()
        for metric in self.metrics.modules():
            if isinstance(metric, Metric):
                metric.process_group = data_group(self.trainer.strategy)

    def _facts(self) -> dict[str, Any]:
        """Return the values that all processes of a run must share, by name."""
        data = self.trainer.datamodule
        settings = {name: value for name, value in self.hparams.items() if name != "tokenizer"}
        return {
            **{f"version of {name}": version(name) for name in ("lightning_tfm", "lightning", "torch")},
            "step to resume": self.resumed_step,
            **({"seed_everything": data.seed} if data else {}),
            **flatten(settings, "model.init_args"),
            **self.step_settings(self.trainer),
            **{
                f"trainer.{name}": getattr(self.trainer, name)
                for name in (
                    "max_steps",
                    "log_every_n_steps",
                    "val_check_interval",
                    "check_val_every_n_epoch",
                    "limit_train_batches",
                    "limit_val_batches",
                )
            },
            **{
                f"checkpoint.{name}": getattr(self.trainer.checkpoint_callback, name, None)
                for name in ("every_n_train_steps", "keep_last")
            },
            "trainer.callbacks": [
                callback.state_key for callback in self.trainer.callbacks if isinstance(callback, EarlyStopping)
            ],
            **(data.training_batches(data.division).settings if data else {}),
            "data.init_args.eval_batch_size": data.eval_batch_size if data else None,
            "tokenizer": self.tokenizer.fingerprint,
            **{f"{split} data": value for split, value in (data.fingerprint if data else {}).items()},
        }

    def check_data(self, data: TaskDataModule, trainer: Trainer) -> None:
        """Check that the network can be trained on a data module.

        Args:
            data: the data module.
            trainer: the trainer.

        Raises:
            UserError: if the vocabulary, the lengths or the batch size do not fit.
        """
        vocab_size = self.network.hyper_parameters["vocab_size"]
        if vocab_size != data.vocab_size:
            raise UserError(f"vocab_size must match the data, but is {vocab_size}; set it to {data.vocab_size}")
        self.network.check_lengths(data.max_source_length, data.max_target_length)
        data.check_micro_batches(BatchDivision.of(trainer.strategy).num_micro_batches)
        if isinstance(trainer.strategy, ModelParallel):
            check_tensor_parallel(self.network, trainer.strategy.tensor_parallel_size)
            if trainer.strategy.activation_checkpointing:
                check_activation_checkpointing(self.network)

    def check(
        self,
        trainer: Trainer,
        data: TaskDataModule,
        stage: str,
        settings: Any,
        checkpoint: Mapping[str, Any] | None,
        path: str,
    ) -> None:
        """Check the run of a command before it starts, see `check_run`; `setup` checks other runs.

        Args:
            trainer: the trainer.
            data: the data module.
            stage: "fit", "validate" or "test".
            settings: the settings of the trainer, of which a dry run has replaced some.
            checkpoint: the content of the checkpoint to resume or to evaluate; None if there is none.
            path: the path of the checkpoint.
        """
        check_run(self, trainer, data, stage, settings)
        if checkpoint is not None:
            self.check_checkpoint(dict(checkpoint), path, trainer, resuming=stage == "fit")
        self.is_checked = True

    @property
    def division(self) -> BatchDivision:
        """Return the micro-batches of a batch that this process computes."""
        return BatchDivision.of(self.trainer.strategy)

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
        if not self.is_restored and not is_parallel(self.network):
            self.load_pretrained()
        if self.scales_gradients:  # torch warns if the scaler skips the first step, after which the rate still changes
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
        self.signum_of_any, self.arriving_signum = 0, None
        self.seed = torch.initial_seed()
        if self.trainer.datamodule is not None:
            self.longest_source = self.trainer.datamodule.longest_source
        self.weights = list(self.network.parameters())  # kept, since traversing the modules takes as long as clipping

    def on_train_epoch_start(self) -> None:
        self.step_sums = []  # of an unfinished step, whose gradients Lightning drops

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seed_dropout(self.division.rank)

    def seed_dropout(self, micro_batch: int) -> None:
        """Seed dropout with the seed of the run, the number of the batch and the micro-batch.

        Args:
            micro_batch: the number of the micro-batch; without elastic determinism, the rank of the process among those
                that read different data.
        """
        number = self.trainer.fit_loop.total_batch_idx
        seed = stable_hash(f"{self.seed} {number} {micro_batch}") >> 1
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would query every type of device
        if self.device.type != "cpu":
            torch.get_device_module(self.device).manual_seed(seed)

    def accumulate_loss(self, loss: Tensor, tokens: Tensor) -> Tensor:
        """Add the summed loss of a batch to the loss of the step, and return it for backpropagation.

        Args:
            loss: the sum over the tokens of the batch.
            tokens: the number of tokens.

        Note:
            The gradients are divided by the number of tokens of the step in `configure_gradient_clipping`.
        """
        self.step_sums.append(torch.stack((loss.detach(), tokens.to(loss.dtype))))
        return loss

    def on_before_backward(self, loss: Tensor) -> None:
        """Gather the sums of the step from all processes during its last backward pass, which hides the latency."""
        is_last_part = len(self.step_sums) % len(self.division.own) == 0
        # An epoch ends with a step, which may have fewer batches.
        if self.trainer.world_size > 1 and is_last_part and not self.trainer.fit_loop.epoch_loop._should_accumulate():
            values = torch.cat((*self.step_sums, self.step_sums[0].new_tensor([self.signum])))
            gathered = list(values.new_empty(self.trainer.world_size, len(values)))
            self.gathering = gathered, torch.distributed.all_gather(gathered, values, async_op=True)

    def _total_loss(self) -> tuple[Tensor, Tensor]:
        """Return the loss and the number of tokens of the step, added in the order of batches and micro-batches."""
        sums = torch.stack(self.step_sums)  # (A n, 2) of A accumulated batches with n micro-batches on this process
        self.step_sums = []
        if self.gathering is not None:
            (parts, work), self.gathering = self.gathering, None
            work.wait()
            gathered = torch.stack(parts)  # (P, 2 A n + 1) of P processes
            self._read_signum(gathered[:, -1].max())
            # Processes that read the same data, with tensor parallelism, are consecutive and have the same sums.
            different = gathered[:: len(gathered) // self.division.world_size, :-1]  # (W, 2 A n)
            by_batch = different.unflatten(1, (-1, len(self.division.own), 2))  # (W, A, n, 2)
            sums = by_batch.transpose(0, 1).flatten(0, 2)
        first, *others = sums.unbind()
        loss, tokens = sum(others, start=first)
        return loss, tokens

    def _read_signum(self, signum: Tensor) -> None:
        """Set `signum_of_any` to the value of the step before, and start to copy the value of this step to the CPU.

        Note:
            To read the value of this step at once would synchronize with the device in each step.
        """
        if self.arriving_signum is not None:
            arrived, copied = self.arriving_signum
            if copied is not None:
                copied.synchronize()
            self.signum_of_any = int(arrived)
        copied = None if signum.device.type == "cpu" else torch.Event(signum.device)
        self.arriving_signum = signum.to("cpu", non_blocking=True), copied
        if copied is not None:
            copied.record()

    def _gradients(self) -> list[Tensor]:
        """Return the gradients of all weights, or the shards of this process."""
        return [weight.grad for weight in self.weights if weight.grad is not None]

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Reduce the loss of the step over accumulated batches and processes, and compute the gradient norms.

        Note:
            Gradients are sums over tokens, which Lightning has divided by the number of accumulated batches, and DDP by
            the number of processes. `grad_scale` reverts both, and divides by the tokens of the step.
        """
        loss, tokens = self._total_loss()
        self.last_loss = loss = loss / tokens
        averaged = 1 if isinstance(self.trainer.strategy, Elastic) else self.division.world_size
        self.grad_scale = self.trainer.accumulate_grad_batches * averaged / tokens
        gradients = self._gradients()
        # A norm in half precision would be inexact, and could overflow.
        wide = torch.promote_types(gradients[0].dtype, torch.float32)
        # The norms are read later, many at once, since reading synchronizes with the device.
        gradient_norms = norms(gradients, wide) * self.grad_scale
        if (self.global_step + 1) % (self.trainer.log_every_n_steps or 1) == 0:  # logging takes time
            self.log("train/loss", loss)
            self.log("train/learning_rate", optimizer.param_groups[0]["lr"])
            self.log("train/gradient_norm", gradient_norms.norm())
        self.pending_finite_checks.append(torch.cat((loss.view(1), gradient_norms.to(loss.dtype))))

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Divide the gradients by the tokens of the step, and clip them; clipping by norm uses the same product."""
        scale = self.grad_scale
        by_value = gradient_clip_algorithm == "value"
        if gradient_clip_val and not by_value:
            norm = self.pending_finite_checks[-1][1:].norm()
            scale = scale * (gradient_clip_val / (norm + 1e-6)).clamp(max=1)  # as in torch.nn.utils
        gradients = [local(gradient) for gradient in self._gradients()]
        torch._foreach_mul_(gradients, scale)
        if gradient_clip_val and by_value:
            torch._foreach_clamp_min_(gradients, -gradient_clip_val)
            torch._foreach_clamp_max_(gradients, gradient_clip_val)

    @property
    def scales_gradients(self) -> bool:
        """Return whether a gradient scaler is used, as in 16-mixed precision."""
        return getattr(self.trainer.precision_plugin, "scaler", None) is not None

    def step_settings(self, trainer: Trainer) -> dict[str, Any]:
        """Return the settings, by name, that a resumed run must keep, except those of the network and the optimizer."""
        clips, algorithm = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
        averaging = [callback for callback in trainer.callbacks if isinstance(callback, WeightAveraging)]
        scheduled = self.lr_schedule.needs_max_steps and not trainer.fast_dev_run
        num_micro_batches = trainer.strategy.num_micro_batches if isinstance(trainer.strategy, Elastic) else 1
        return {
            "trainer.precision": trainer.precision,
            "trainer.accumulate_grad_batches": trainer.accumulate_grad_batches,
            "trainer.gradient_clip_val": clips or None,
            "trainer.gradient_clip_algorithm": (algorithm.value if algorithm else "norm") if clips else None,
            **{f"model.init_args.{name}": self.hparams.get(name) for name in self.step_arguments},
            "trainer.strategy.init_args.num_micro_batches": num_micro_batches if num_micro_batches > 1 else None,
            "checkpoint.monitor": getattr(trainer.checkpoint_callback, "monitor", None),
            "checkpoint.mode": getattr(trainer.checkpoint_callback, "mode", None),
            "decay of WeightAveraging": getattr(averaging[0], "decay", None) if averaging else None,
            **({"trainer.max_steps": trainer.max_steps} if scheduled else {}),
        }

    def check_finite(self) -> None:
        """Check that all losses and gradients since the last check are finite.

        Raises:
            UserError: if one is not; the message names the first such step and the parameters.
        """
        if not self.pending_finite_checks:
            return
        first = self.global_step - len(self.pending_finite_checks) + 1  # steps are counted from 1
        steps, self.pending_finite_checks = torch.stack(self.pending_finite_checks), []
        if self.scales_gradients:  # the scaler skips steps whose gradients overflow
            self.skipped_steps += int(steps[:, 1:].isfinite().all(1).logical_not().sum())
            steps = steps[:, :1]
        finite = steps.isfinite()
        if finite.all():
            return
        row = int(finite.all(1).logical_not().nonzero()[0])
        names = [name for name, weight in self.named_parameters() if weight.grad is not None]
        names = [name for name, good in zip(names, finite[row, 1:].tolist(), strict=False) if not good]
        groups = {
            name: group["name"]
            for group in self.trainer.optimizers[0].param_groups
            for name, weight in self.named_parameters()
            if any(weight is other for other in group["params"])
        }
        by_group = {group: [name for name in names if groups[name] == group] for group in groups.values()}
        described = [
            f"{len(members)} of group {group!r} (first {members[0]})" for group, members in by_group.items() if members
        ]
        folder = getattr(self.trainer.checkpoint_callback, "dirpath", None)
        has_saved = folder is not None and any(Path(folder).glob("*.ckpt"))
        raise UserError(
            f"loss and gradients must be finite, but at step {first + row} the loss is {steps[row, 0].item():g}"
            + (f" and gradients are not finite: {' and '.join(described)}" if described else "")
            + "; lower the learning rate (model.init_args.optimizer.init_args.lr) or set "
            f"trainer.gradient_clip_val ({self.trainer.gradient_clip_val})"
            + (f"; the checkpoints of earlier steps are kept in {folder}" if has_saved else "")
        )

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_step % (self.trainer.log_every_n_steps or 1) == 0:
            self.check_finite()
            if self.scales_gradients:
                self.log("train/skipped_steps", float(self.skipped_steps))

    def on_validation_start(self) -> None:
        self.check_finite()
        keep_weights(self.network, whole=True)

    def on_validation_epoch_end(self) -> None:
        keep_weights(self.network, whole=False)

    def on_test_start(self) -> None:
        keep_weights(self.network, whole=True)

    def on_test_end(self) -> None:
        keep_weights(self.network, whole=False)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.check_finite()  # before a good checkpoint is replaced
        checkpoint["format_version"] = FORMAT
        checkpoint["step_settings"] = self.step_settings(self.trainer)
        checkpoint["skipped_steps"] = self.skipped_steps
        checkpoint["longest_source"], checkpoint["alignment_head"] = self.longest_source, self.alignment_head
        if self.trainer.datamodule is not None:
            checkpoint["data_fingerprint"] = self.trainer.datamodule.fingerprint

    def check_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, trainer: Trainer, resuming: bool) -> None:
        """Check that a checkpoint fits the model and, if training is resumed, the run.

        Args:
            checkpoint: the content of the checkpoint.
            path: the path of the checkpoint, for error messages.
            trainer: the trainer of the run.
            resuming: whether training is resumed.

        Raises:
            UserError: if it does not fit.
        """
        shapes = {name: weight.shape for name, weight in self.state_dict().items()}
        averages = any(isinstance(callback, WeightAveraging) for callback in trainer.callbacks)
        settings = self.step_settings(trainer)
        check_fits(checkpoint, path, dict(self.hparams_initial), shapes, resuming, averages, settings)
        self.resumed_step = checkpoint["global_step"] if resuming else None

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self._trainer is not None and self.trainer.state.fn == TrainerFn.FITTING:
            if not self.is_checked:
                self.check_checkpoint(checkpoint, self.trainer.ckpt_path or "", self.trainer, resuming=True)
        else:
            checkpoint.pop("loops", None)  # the progress of the training, which Lightning would restore
        self.skipped_steps = checkpoint.get("skipped_steps", 0)
        self.alignment_head = checkpoint.get("alignment_head")
        self.is_restored = True

    def teardown(self, stage: str) -> None:
        self.is_checked = False

    def on_train_end(self) -> None:
        self.arriving_signum = None  # an event cannot be copied with the module
        self.check_finite()
        if self.skipped_steps:
            rank_zero_print(
                f"{self.skipped_steps} of {self.global_step} steps were skipped: their gradients overflowed float16"
            )
