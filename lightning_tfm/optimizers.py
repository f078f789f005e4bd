"""Optimizers with the default settings of this project, and learning rate schedules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lightning_tfm.distributed.tensors import full_tensor, shard
from lightning_tfm.errors import UserError
from lightning_tfm.system.private import unscale_before_step

HIDDEN_MATRICES = "hidden matrices"
"""Name of the group of parameters that Muon orthogonalizes."""

NEWTON_SCHULZ = 3.4445, -4.7750, 2.0315
"""Coefficients a, b and c of the polynomial of `orthogonalize` (Jordan et al. 2024)."""

MAX_STACKED = 2**22
"""Number of elements up to which Muon orthogonalizes matrices with equal shorter sides together; a larger one is alone.

Larger stacks need fewer calls, but more memory.
"""

BETAS = (0.9, 0.98)
"""Decay rates of the moments (Vaswani et al. 2017, 5.3)."""


def parameter_groups(network: nn.Module, head: nn.Module) -> list[dict[str, Any]]:
    """Return the parameter groups of a network: hidden matrices, embeddings and output, and vectors without decay.

    Note:
        Tensors of more than two dimensions are in the group of embeddings and output. Empty groups are omitted.
    """
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in parameters if parameter.dim() >= 2]
    tables = nn.Embedding | nn.EmbeddingBag
    outer = {id(layer.weight) for layer in network.modules() if isinstance(layer, tables)}
    outer |= {id(parameter) for parameter in head.parameters()}
    outer |= {id(matrix) for matrix in matrices if matrix.dim() > 2}
    groups: list[dict[str, Any]] = [
        {"name": HIDDEN_MATRICES, "params": [matrix for matrix in matrices if id(matrix) not in outer]},
        {"name": "embeddings and output", "params": [matrix for matrix in matrices if id(matrix) in outer]},
        {"name": "vectors", "params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


class AdamW(torch.optim.AdamW):
    """Fused AdamW (Loshchilov & Hutter 2019) with the decay rates of Vaswani et al. (2017).

    Args:
        params: the parameter groups.
        lr: the peak learning rate.
        betas: decay rates of the first and second moments.
        weight_decay: decoupled weight decay of matrices; biases and norms do not decay.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = BETAS, weight_decay: float = 0.01
    ) -> None:
        check_rates(lr, weight_decay)
        super().__init__(params, lr=lr, betas=betas, weight_decay=weight_decay, fused=True)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        with _keep_fused(self):
            super().load_state_dict(state_dict)


def orthogonalize(stacks: Sequence[Tensor]) -> list[Tensor]:
    """Return matrices with the same singular vectors whose singular values are close to 1 (Jordan et al. 2024).

    Five Newton-Schulz iterations X <- P X with P = aI + bG + cG^2 and G = X X^T map most singular values to between 0.7
    and 1.2. They operate on G, which is at most as large as X, by G <- P G P (Gram Newton-Schulz, Zhang et al. 2026).
    X is multiplied by the product of all P at the end.

    Args:
        stacks: matrices (K, M, N) or (K, N, M) with M <= N. M is the same for all stacks, but K and N can differ.

    Note:
        The iterations are computed in float32 or more. In bfloat16, which `torch.optim.Muon` uses, rounding would
        amplify the differences between runs on different devices, and a CPU without bfloat16 instructions is 20 times
        slower. Rounding errors of G grow up to 20,000 times, to 1% of the largest singular value in float32.
    """
    wide = []
    for stack in stacks:
        x = stack.to(torch.promote_types(stack.dtype, torch.float32))
        x = x.mT if x.size(1) > x.size(2) else x  # (K, M, N)
        wide.append(x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7))
    gram = torch.cat([x @ x.mT for x in wide])  # of all matrices, (., M, M)
    product = polynomial = _newton_schulz_polynomial(gram)
    for _ in range(4):
        gram = polynomial @ gram @ polynomial
        polynomial = _newton_schulz_polynomial(gram)
        product = polynomial @ product
    factors = product.split([len(stack) for stack in stacks])
    products = [factor @ x for factor, x in zip(factors, wide, strict=True)]
    return [x if x.shape == stack.shape else x.mT for x, stack in zip(products, stacks, strict=True)]


def _newton_schulz_polynomial(gram: Tensor) -> Tensor:
    """Return P = aI + bG + cG^2 of Gram matrices G (K, M, M)."""
    a, b, c = NEWTON_SCHULZ
    polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
    polynomial.diagonal(dim1=1, dim2=2).add_(a)
    return polynomial


def _batches(matrices: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield batches of matrices with equal shorter sides that are orthogonalized together, sorted by shape."""
    batch: list[Tensor] = []
    size = 0  # number of elements
    for matrix in sorted(matrices, key=lambda matrix: (min(matrix.shape), *matrix.shape)):
        if batch and (size + matrix.numel() > MAX_STACKED or min(matrix.shape) != min(batch[0].shape)):
            yield batch
            batch, size = [], 0
        batch.append(matrix)
        size += matrix.numel()
    if batch:
        yield batch


class _MatrixMuon(Optimizer):
    """Muon for matrices only, with Nesterov momentum; see `Muon`."""

    def __init__(self, params: Iterable[Any], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> None:  # type: ignore[override]  # two overloads
        for group in self.param_groups:
            for matrices in _batches(matrix for matrix in group["params"] if matrix.grad is not None):
                stacks = [
                    torch.stack([self._direction(matrix, group["momentum"]) for matrix in same])
                    for _, same in groupby(matrices, key=lambda matrix: matrix.shape)
                ]
                for matrix, update in zip(matrices, chain.from_iterable(orthogonalize(stacks)), strict=True):
                    matrix.mul_(1 - group["lr"] * group["weight_decay"])
                    matrix.add_(shard(update, matrix), alpha=-group["lr"] * 0.2 * math.sqrt(max(matrix.shape)))

    def _direction(self, matrix: Tensor, momentum: float) -> Tensor:
        """Update the momentum of a matrix, and return its gradient with Nesterov momentum, gathered if sharded."""
        assert matrix.grad is not None
        state = self.state[matrix]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(matrix)
        average = state["momentum_buffer"].lerp_(matrix.grad, 1 - momentum)
        return full_tensor(matrix.grad.lerp(average, momentum))


class Muon(Optimizer):
    """Muon (Jordan et al. 2024) for hidden matrices, and AdamW for all other parameters.

    Muon orthogonalizes the update of each matrix. Updates are scaled to the root mean square of AdamW updates, so both
    can share a learning rate (Liu et al. 2025, 2.2).

    Args:
        params: the parameter groups, see `parameter_groups`.
        lr: the peak learning rate.
        muon_lr: the peak learning rate of hidden matrices; None for `lr`.
        momentum: the momentum of Muon.
        betas: decay rates of the first and second moments of AdamW.
        weight_decay: decoupled weight decay of matrices; biases and norms do not decay.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        muon_lr: float | None = None,
        momentum: float = 0.9,
        betas: tuple[float, float] = BETAS,
        weight_decay: float = 0.01,
    ) -> None:
        check_rates(lr, weight_decay)
        check_rates(lr if muon_lr is None else muon_lr, weight_decay, "muon_lr")
        groups = list(params)
        hidden = [group for group in groups if group["name"] == HIDDEN_MATRICES]
        others = [group for group in groups if group["name"] != HIDDEN_MATRICES]
        self.parts: list[Optimizer] = []
        if hidden:
            self.parts.append(_MatrixMuon(hidden, lr if muon_lr is None else muon_lr, momentum, weight_decay))
        if others:
            self.parts.append(AdamW(others, lr, betas, weight_decay))
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        for part in self.parts:
            part.state = self.state  # one state, as in other optimizers
        # These are set last, since the base class would add them to each group.
        self.defaults = {"lr": lr, "muon_lr": muon_lr, "momentum": momentum}
        self.defaults |= {"betas": betas, "weight_decay": weight_decay}

    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:  # type: ignore[override]  # two overloads
        loss = None if closure is None else closure()
        for part in self.parts:
            part.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        with _keep_fused(self):
            super().load_state_dict(state_dict)
        groups = iter(self.param_groups)  # loading replaces the groups and the state
        for part in self.parts:
            part.param_groups = [next(groups) for _ in part.param_groups]
            part.state = self.state


def check_rates(lr: float, weight_decay: float, lr_name: str = "lr") -> None:
    """Raise UserError unless a learning rate is positive, a weight decay is not negative, and both are finite."""
    if not 0 < lr < math.inf:
        raise UserError(f"{lr_name} must be {'finite' if lr == math.inf else 'above 0'}, but is {lr}; try 0.001")
    if not 0 <= weight_decay < math.inf:
        rule = "finite" if weight_decay == math.inf else "at least 0"
        raise UserError(f"weight_decay must be {rule}, but is {weight_decay}; try 0")


@dataclass(frozen=True)
class LRSchedule:
    """Learning rate schedule: a warm-up, followed by a decay until `trainer.max_steps`.

    Args:
        warmup_steps: number of steps in which the learning rate increases linearly from 0 to its peak; with
            "one_cycle", by half a cosine from 1/25 of the peak.
        decay: "linear" to 0 (Bergsma et al. 2025), "cosine" and "one_cycle" (Smith & Topin 2018) to 0 by half a cosine,
            or "inverse_sqrt" as 1 / sqrt(step) (Vaswani et al. 2017, 5.3).

    Raises:
        UserError: if warmup_steps is negative.
    """

    warmup_steps: int = 0
    decay: Literal["linear", "cosine", "inverse_sqrt", "one_cycle"] = "cosine"

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise UserError(f"warmup_steps must be at least 0, but is {self.warmup_steps}; try 0")

    def check_max_steps(self, max_steps: int) -> None:
        """Raise UserError if max_steps is below 1, such as -1 for an unlimited run."""
        if max_steps < 1:
            raise UserError(
                "trainer.max_steps must be at least 1, since the learning rate is scheduled over it, "
                f"but is {max_steps}; try {max(1000, 10 * self.warmup_steps)}"
            )

    @property
    def needs_max_steps(self) -> bool:
        """Return whether the learning rate depends on the total number of steps."""
        return self.decay != "inverse_sqrt"

    def scale(self, step: int, max_steps: int) -> float:
        """Return the learning rate in a step, counted from 0, as a fraction of the peak."""
        if step < self.warmup_steps:
            risen = (step + 1) / self.warmup_steps
            return 1 - 0.96 * _half_cosine(risen) if self.decay == "one_cycle" else risen
        if self.decay == "inverse_sqrt":
            return math.sqrt(max(1, self.warmup_steps) / max(1, step))
        progress = min(1.0, (step - self.warmup_steps) / (max_steps - self.warmup_steps))
        return 1 - progress if self.decay == "linear" else _half_cosine(progress)

    def scheduler(self, optimizer: Optimizer, max_steps: int) -> LambdaLR:
        """Return the scheduler of an optimizer for a run of max_steps steps."""
        max_steps = max(max_steps, self.warmup_steps + 1)  # a trial run may end during the warm-up
        return LambdaLR(optimizer, lambda step: self.scale(step, max_steps))


def _half_cosine(progress: float) -> float:
    """Return half a cosine, which decreases from 1 at progress 0 to 0 at progress 1."""
    return 0.5 * (1 + math.cos(math.pi * progress))


def class_path(cls: type) -> str:
    """Return the import path of a class."""
    return f"{cls.__module__}.{cls.__qualname__}"


def describe_optimizer(make_optimizer: Callable[..., Optimizer]) -> dict[str, Any]:
    """Return the class and the settings of an optimizer as plain values; raise UserError if they are invalid."""
    network = nn.Sequential(nn.Embedding(1, 1), nn.Linear(1, 1), nn.Linear(1, 1))
    try:
        optimizer = make_optimizer(parameter_groups(network, network[2]))
    except UserError:
        raise
    except (TypeError, ValueError) as error:
        cls = make_optimizer.func if isinstance(make_optimizer, partial) else make_optimizer
        raise UserError(f"optimizer must have valid settings, but those of {cls.__name__} are not: {error}") from None
    settings = {name: list(value) if isinstance(value, tuple) else value for name, value in optimizer.defaults.items()}
    return {"class_path": class_path(type(optimizer)), "init_args": settings}


@contextmanager
def _keep_fused(optimizer: Optimizer) -> Iterator[None]:
    """Keep whether the steps of an optimizer are fused, which may differ in the run of a loaded state."""
    fused = [group.get("fused") for group in optimizer.param_groups]
    yield
    for group, value in zip(optimizer.param_groups, fused, strict=True):
        if "fused" in group:
            group["fused"] = value


def unfuse(optimizer: Optimizer) -> None:
    """Disable fused steps, for which Lightning cannot unscale gradients before clipping."""
    for part in getattr(optimizer, "parts", [optimizer]):
        for group in part.param_groups:
            if group.get("fused"):
                group["fused"] = False
                unscale_before_step(part)
