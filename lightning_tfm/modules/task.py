"""What every task shares: the mathematics of a training step, and that it is the same again."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor

from lightning_tfm.data import Examples, Pair, TaskDataModule, stable_hash
from lightning_tfm.errors import UserError, say
from lightning_tfm.modules.optimization import Optimization
from lightning_tfm.networks import Network

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Evaluation = dict[str, Tensor]
"""What callbacks get of a batch that is evaluated, each of B rows."""


def test_prefix(test_set: str) -> str:
    """What the names of a test set's metrics begin with: "test" for the first, "test/longer" for "longer"."""
    return test_set if test_set == "test" else f"test/{test_set}"


def check_label_smoothing(value: float) -> None:
    """Raises UserError unless it is a share that targets can give up."""
    if not 0 <= value < 1:
        raise UserError(f"label_smoothing must be at least 0 and below 1, but is {value}; try 0.1")


def check_strategy(strategy: Strategy) -> None:
    """Raise UserError unless each process holds whole gradients, whose norm a training step takes."""
    if type(strategy) not in (SingleDeviceStrategy, DDPStrategy):  # DeepSpeed's and XLA's derive from these
        raise UserError(
            "trainer.strategy must be one whose processes hold the whole model, so that the norm that is logged and "
            f"clipped is that of the whole gradient, but is {type(strategy).__name__}; try ddp"
        )


def line_of(pair: Pair, answer: str, nll: float) -> dict[str, Any]:
    """What was answered to a pair's source, as `TaskModule.answered` tells it."""
    return {
        "source": pair.source,
        "target": pair.target,
        "answer": answer,
        "right": answer == pair.target,
        "nll": round(nll, 4),
        "kind": pair.kind,
        "alignment": pair.alignment,
    }


class TaskModule(LightningModule, ABC):
    """Trains a network by the mean loss of a step's tokens.

    A token weighs the same whatever the number of processes and of accumulated batches. A subclass sums the loss of
    a batch in `training_step` and hands it to `summed`.

    Attributes:
        task: the name of the task.
        fits: the data modules whose data it can be trained on.
        because: why its network must be of its kind.

    Args:
        network: what is trained.
        optimization: optimizer and schedule.
        hyper_parameters: the subclass's own arguments, as plain values, for the checkpoint.
    """

    task: str
    fits: type[TaskDataModule]
    because: str

    def __init__(self, network: Network, optimization: Optimization, **hyper_parameters: Any) -> None:
        super().__init__()
        self.network = network
        self.optimization = optimization
        # What DDP would send round before each step: tables and counts, which no step changes.
        self._ddp_params_and_buffers_to_ignore = [f"network.{name}" for name, _ in network.named_buffers()]
        self.step_sums: Tensor | int = 0  # loss and tokens of the step so far
        self.unchecked: list[Tensor] = []  # of each step: its loss, and the norm of each gradient
        self.skipped_steps = 0  # by the gradient scaler of float16
        self.save_hyperparameters(
            {
                "task": self.task,
                "network": {
                    "class_path": f"{type(network).__module__}.{type(network).__qualname__}",
                    "init_args": network.hyper_parameters,
                },
                "optimization": asdict(optimization),
                **hyper_parameters,
            },
            logger=False,  # the command logs the whole configuration
        )

    @abstractmethod
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss of a batch, as `summed` does."""

    def begin(self) -> None:
        """Takes the weights that a new run begins with, where they are not drawn; `lightning-tfm fit` calls it."""

    def setup(self, stage: str) -> None:
        """Convert the module to float64 if that is the precision.

        Note:
            Lightning converts it after it has restored a checkpoint, whose float64 weights would be rounded.
        """
        if self.trainer.precision == "64-true":
            self.double()

    def configure_optimizers(self) -> dict[str, Any]:
        fused = "mixed" not in self.trainer.precision  # under mixed precision Lightning cannot clip for a fused one
        return self.optimization.configure(self.network, self.trainer.max_steps, fused)

    def on_fit_start(self) -> None:
        check_strategy(self.trainer.strategy)
        if self.scales_gradients:  # torch warns if the scaler skips the first step, after which the rate still changes
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
        self.seed = torch.initial_seed()
        self.weights = list(self.network.parameters())  # to walk through the modules anew takes as long as to clip

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Seed dropout from the run's seed, the number of the batch and the rank, whatever was drawn before."""
        number = self.trainer.fit_loop.total_batch_idx
        seed = stable_hash(f"{self.seed} {number} {self.global_rank}") >> 1
        torch.default_generator.manual_seed(seed)  # torch.manual_seed asks every kind of device, each time
        if self.device.type != "cpu":
            torch.get_device_module(self.device).manual_seed(seed)

    def answered(
        self, examples: Examples, rows: list[int], outputs: Evaluation | None, places: Tensor | slice
    ) -> list[dict[str, Any]]:
        """What was answered to these rows of the data, which lie at these places of the batch; nothing, at first.

        Of each: `source`, `target`, `answer`, `right`, `nll` of the target in nats, and `kind` and `alignment` of the
        pair, or None.
        """
        return []

    def pictures(self, lines: list[dict[str, Any]]) -> dict[str, Figure]:
        """What is to be seen of all answers of the test, by name; nothing, at first."""
        return {}

    def summed(self, loss: Tensor, tokens: Tensor) -> Tensor:
        """The loss to back-propagate: the sum, for what it is divided by is known at the end of the step."""
        self.step_sums = self.step_sums + torch.stack((loss.detach(), tokens.to(loss.dtype)))
        return loss

    def _gradients(self) -> list[Tensor]:
        return [weight.grad for weight in self.weights if weight.grad is not None]

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Takes the loss of the whole step, over micro-batches and processes, and the norms of its gradients.

        What is divided by the step's tokens has been summed; but Lightning has divided by the number of micro-batches
        and the strategy by that of processes, which is taken back.
        """
        if self.trainer.world_size > 1:
            torch.distributed.all_reduce(self.step_sums)  # Lightning's would wait at a barrier before
        loss, tokens = self.step_sums
        self.step_sums = 0
        loss = loss / tokens
        self.factor = self.trainer.accumulate_grad_batches * self.trainer.world_size / tokens
        gradients = self._gradients()
        # A norm in half precision would be coarse, and overflow.
        wide = torch.promote_types(gradients[0].dtype, torch.float32)
        # Read later, all at once, since reading synchronises with the device.
        norms = torch.stack(torch._foreach_norm(gradients, 2, wide)) * self.factor
        if (self.global_step + 1) % (self.trainer.log_every_n_steps or 1) == 0:  # to hand it over takes time
            self.log("train/loss", loss)
            self.log("train/learning_rate", optimizer.param_groups[0]["lr"])
            self.log("train/gradient_norm", norms.norm())
        self.unchecked.append(torch.cat((loss.view(1), norms.to(loss.dtype))))

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Divides the gradients by the step's tokens, and clips them: by their norm in the same product."""
        factor = self.factor
        by_value = gradient_clip_algorithm == "value"
        if gradient_clip_val and not by_value:
            norm = self.unchecked[-1][1:].norm()
            factor = factor * (gradient_clip_val / (norm + 1e-6)).clamp(max=1)  # as torch.nn.utils has it
        torch._foreach_mul_(self._gradients(), factor)
        if by_value:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    @property
    def scales_gradients(self) -> bool:
        """True if a scaler keeps the gradients of float16 in range, as in 16-mixed precision."""
        return getattr(self.trainer.precision_plugin, "scaler", None) is not None

    def step_settings(self, trainer: Trainer) -> dict[str, Any]:
        """Return what changes the mathematics of a step, beside network and optimizer, by the settings' names."""
        clips, algorithm = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
        averaging = [callback for callback in trainer.callbacks if isinstance(callback, WeightAveraging)]
        return {
            "trainer.precision": trainer.precision,
            "trainer.accumulate_grad_batches": trainer.accumulate_grad_batches,
            "trainer.gradient_clip_val": clips or None,
            "trainer.gradient_clip_algorithm": (algorithm.value if algorithm else "norm") if clips else None,
            "model.init_args.label_smoothing": self.hparams.get("label_smoothing"),
            "decay of WeightAveraging": getattr(averaging[0], "decay", None) if averaging else None,
            **({"trainer.max_steps": trainer.max_steps} if self.optimization.plans_to_the_end else {}),
        }

    def check_finite(self) -> None:
        """Raises UserError, naming the first step and the parameters, if a step since the last look went to NaN."""
        if not self.unchecked:
            return
        first = self.global_step - len(self.unchecked) + 1  # steps are counted from 1
        steps, self.unchecked = torch.stack(self.unchecked), []
        if self.scales_gradients:  # the scaler finds its scale by gradients that overflow, and skips their steps
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
        told = [
            f"{len(members)} of group {group!r} (first {members[0]})" for group, members in by_group.items() if members
        ]
        kept = self.trainer.checkpoint_callback
        raise UserError(
            f"loss and gradients must be finite, but at step {first + row} the loss is {steps[row, 0].item():g}"
            + (f" and gradients are not finite: {' and '.join(told)}" if told else "")
            + f"; lower model.init_args.optimization.learning_rate ({self.optimization.learning_rate:g}) or set "
            f"trainer.gradient_clip_val ({self.trainer.gradient_clip_val})"
            + (f"; the checkpoints of earlier steps are kept in {kept.dirpath}" if kept else "")
        )

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_step % (self.trainer.log_every_n_steps or 1) == 0:
            self.check_finite()
            if self.scales_gradients:
                self.log("train/skipped_steps", float(self.skipped_steps))

    def on_validation_start(self) -> None:
        self.check_finite()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.check_finite()  # so that no good checkpoint gives way to a broken one
        checkpoint["step_settings"] = self.step_settings(self.trainer)
        checkpoint["skipped_steps"] = self.skipped_steps

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.skipped_steps = checkpoint.get("skipped_steps", 0)

    def on_train_end(self) -> None:
        self.check_finite()
        if self.skipped_steps:
            say(f"{self.skipped_steps} of {self.global_step} steps were skipped: their gradients overflowed float16")
