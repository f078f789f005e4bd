"""Mathematics of a training step: the mean loss over its tokens, the norms of its gradients, and clipping."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed import Work

from lightning_tfm.data import BatchDivision, stable_hash
from lightning_tfm.distributed.parallel import norms
from lightning_tfm.distributed.tensors import local
from lightning_tfm.errors import UserError
from lightning_tfm.system.private import multiply_in_place


class TrainingStep:
    """Mean loss over the tokens of a step, and its gradients.

    A step has A accumulated batches, each of which is divided into micro-batches over W processes. If L is the sum of
    the losses of the tokens of a micro-batch, and N the number of its tokens, then

        loss = (sum of all L) / (sum of all N),    gradient = (sum of all dL/dw) / (sum of all N).

    So each token has the same weight, for any number of batches, micro-batches and processes. `TaskModule` calls the
    methods: `training_step` calls `add` for each micro-batch, whose L is then backpropagated, and `gather` for the last
    one; `on_before_optimizer_step` calls `reduce`, and `configure_gradient_clipping` calls `divide_and_clip`.

    Args:
        weights: the weights by name.
        division: the micro-batches of a batch that this process computes.
        num_processes: the number of processes P, a multiple of W: consecutive processes may read the same data.

    Attributes:
        loss: the mean loss of the last step; None before the first.
        norms: the norm of the gradient of each weight in the last step, before clipping.
    """

    def __init__(
        self, weights: Mapping[str, nn.Parameter], division: BatchDivision = BatchDivision(), num_processes: int = 1
    ) -> None:
        self.weights = dict(weights)  # kept, since traversing the modules takes as long as clipping
        self.division, self.num_processes = division, num_processes
        self.loss: Tensor | None = None
        self.norms = self._scale = torch.empty(0)
        self._sums: list[Tensor] = []  # loss and number of tokens of each micro-batch so far
        self._gathering: tuple[list[Tensor], Work] | None = None
        self._unchecked: list[Tensor] = []  # loss and norms of each step since the last check

    def begin(self) -> None:
        """Discard the sums of an unfinished step."""
        self._sums = []

    @property
    def micro_batch(self) -> int:
        """Return the number of the micro-batch that is added next, among those of all processes."""
        return self.division.own[len(self._sums) % len(self.division.own)]

    def add(self, loss: Tensor, tokens: Tensor | int) -> None:
        """Add the loss of a micro-batch, summed over its tokens, and the number of these tokens."""
        self._sums.append(torch.stack((loss.detach(), torch.as_tensor(tokens, dtype=loss.dtype, device=loss.device))))

    def gather(self) -> None:
        """Start to gather the sums of all processes once all micro-batches have been added."""
        if self.num_processes > 1 and self.micro_batch == self.division.own[0]:
            values = torch.cat(self._sums)
            gathered = list(values.new_empty(self.num_processes, len(values)))
            self._gathering = gathered, torch.distributed.all_gather(gathered, values, async_op=True)

    def _totals(self) -> tuple[Tensor, Tensor]:
        """Return the loss and the number of tokens of the step, added in the order of batches and micro-batches."""
        sums, self._sums = torch.stack(self._sums), []  # (A n, 2) with n micro-batches of each batch on this process
        if self._gathering is not None:
            (gathered, work), self._gathering = self._gathering, None
            work.wait()
            processes = torch.stack(gathered[:: self.num_processes // self.division.world_size])  # (W, 2 A n)
            by_batch = processes.unflatten(1, (-1, len(self.division.own), 2)).transpose(0, 1)  # (A, W, n, 2)
            sums = by_batch.flatten(0, 2)
        first, *others = sums.unbind()
        loss, tokens = sum(others, start=first)
        return loss, tokens

    def reduce(self, divisor: int) -> None:
        """Compute the mean loss of the step, and the norms of its gradients.

        Args:
            divisor: the number by which the sums of the gradients have been divided, such as A W by Lightning and DDP.
        """
        loss, tokens = self._totals()
        self.loss, self._scale = loss / tokens, divisor / tokens
        gradients = self._gradients()
        # A norm in half precision would be inexact, and could overflow.
        wide = torch.promote_types(gradients[0].dtype, torch.float32)
        self.norms = norms(gradients, wide) * self._scale
        self._unchecked.append(torch.cat((self.loss.view(1), self.norms.to(self.loss.dtype))))

    def divide_and_clip(self, limit: float | None, by_value: bool = False) -> None:
        """Divide the gradients by the tokens of the step, and clip them.

        Args:
            limit: the maximum norm of all gradients together, or the maximum of each value; None or 0 for no limit.
            by_value: whether to clip values instead of the norm.
        """
        scale = self._scale
        if limit and not by_value:
            scale = scale * (limit / (self.norms.norm() + 1e-6)).clamp(max=1)  # as in torch.nn.utils
        gradients = [local(gradient) for gradient in self._gradients()]
        multiply_in_place(gradients, scale)
        if limit and by_value:
            for gradient in gradients:
                gradient.clamp_(-limit, limit)

    def check_finite(self, last_step: int, skips_overflows: bool = False) -> int:
        """Check that the loss and the gradients of all steps since the last check are finite.

        Args:
            last_step: the number of the last step.
            skips_overflows: whether a gradient scaler skips steps with gradients that are not finite.

        Returns:
            The number of skipped steps.

        Raises:
            UserError: if a value is not finite; the message names the first such step and the weights.

        Note:
            To read the values synchronizes with the device, so check many steps at once.
        """
        if not self._unchecked:
            return 0
        steps, self._unchecked = torch.stack(self._unchecked), []  # (steps, 1 + weights)
        finite = steps.isfinite()
        skipped = 0
        if skips_overflows:
            skipped = int((~finite[:, 1:].all(1)).sum())
            finite = finite[:, :1]
        if not finite.all():
            row = finite.all(1).tolist().index(False)
            trained = [name for name, weight in self.weights.items() if weight.grad is not None]
            names = [name for name, is_finite in zip(trained, finite[row, 1:].tolist(), strict=False) if not is_finite]
            raise UserError(
                f"loss and gradients must be finite, but at step {last_step - len(steps) + 1 + row} the loss is "
                f"{steps[row, 0].item():g}"
                + (f" and the gradients of {len(names)} weights are not finite (first {names[0]})" if names else "")
            )
        return skipped

    def _gradients(self) -> list[Tensor]:
        """Return the gradients of all weights, or the shards of this process."""
        return [weight.grad for weight in self.weights.values() if weight.grad is not None]


def seed_dropout(seed: int, batch: int, micro_batch: int, device: torch.device) -> None:
    """Seed the random numbers of a micro-batch, which do not depend on those before."""
    number = stable_hash(f"{seed} {batch} {micro_batch}") >> 1
    torch.default_generator.manual_seed(number)  # torch.manual_seed would query every type of device
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(number)
