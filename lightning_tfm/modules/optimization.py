"""How weights are updated: AdamW with decay groups, or Muon beside it, and a rate that changes with every step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lightning_tfm.errors import UserError
from lightning_tfm.networks import Network

BETAS = (0.9, 0.98)
"""Averaging of the gradient and of its square (Vaswani et al. 2017, 5.3)."""


@dataclass(frozen=True)
class Optimization:
    """The optimizer and its schedule.

    Args:
        optimizer: "adamw" (Loshchilov & Hutter 2019); or "muon" (Jordan et al. 2024), which makes the steps of matrices
            between the embeddings and the output orthogonal, with AdamW for the rest.
        learning_rate: the highest rate, reached after the warm-up.
        muon_learning_rate: the highest rate of Muon's matrices, where it is another.
        warmup_steps: steps in which the rate rises, linearly from 0 ("one_cycle": by a half cosine, from a 25th).
        schedule: what comes then, until `trainer.max_steps`: "linear" falls to 0 by equal steps (Bergsma et al. 2025),
            "cosine" and "one_cycle" (Smith & Topin 2018) fall to 0 by a half cosine, "inverse_sqrt" falls as
            1 / sqrt(step) (Vaswani et al. 2017, 5.3).
        weight_decay: of matrices; biases, norms and other vectors do not decay.
    """

    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = 1e-3
    muon_learning_rate: float | None = None
    warmup_steps: int = 0
    schedule: Literal["linear", "cosine", "inverse_sqrt", "one_cycle"] = "cosine"
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        for name, rate in (("learning_rate", self.learning_rate), ("muon_learning_rate", self.muon_learning_rate)):
            if rate is not None and not 0 < rate < math.inf:
                rule = "finite" if rate == math.inf else "above 0"
                raise UserError(f"{name} must be {rule}, but is {rate}; try 0.001")
        if self.muon_learning_rate is not None and self.optimizer != "muon":
            raise UserError(
                f"muon_learning_rate must not be given with optimizer {self.optimizer}, but is "
                f"{self.muon_learning_rate}; try optimizer muon"
            )
        for name in ("warmup_steps", "weight_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                rule = "finite" if getattr(self, name) == math.inf else "at least 0"
                raise UserError(f"{name} must be {rule}, but is {getattr(self, name)}; try 0")

    def check_steps(self, max_steps: int) -> None:
        """Raises UserError unless the run has an end that the learning rate can be planned for."""
        if max_steps < 1:
            raise UserError(
                "trainer.max_steps must be at least 1, for the learning rate is planned over it, "
                f"but is {max_steps}; try {max(1000, 10 * self.warmup_steps)}"
            )

    @property
    def plans_to_the_end(self) -> bool:
        """True if the rate of a step depends on the number of steps."""
        return self.schedule != "inverse_sqrt"

    def factor(self, step: int, max_steps: int) -> float:
        """The rate at a step, counted from 0, as a part of the highest."""
        if step < self.warmup_steps:
            risen = (step + 1) / self.warmup_steps
            return 1 - 0.96 * _half_cosine(risen) if self.schedule == "one_cycle" else risen
        if self.schedule == "inverse_sqrt":
            return math.sqrt(max(1, self.warmup_steps) / max(1, step))
        progress = min(1.0, (step - self.warmup_steps) / (max_steps - self.warmup_steps))
        return 1 - progress if self.schedule == "linear" else _half_cosine(progress)

    def configure(self, network: Network, max_steps: int, fused: bool) -> dict[str, Any]:
        """Optimizer and schedule of a network, as `configure_optimizers` returns them."""
        max_steps = max(max_steps, self.warmup_steps + 1)  # a trial run may end before its warm-up does
        parameters = [p for p in network.parameters() if p.requires_grad]
        matrices, decay = [p for p in parameters if p.dim() >= 2], {"weight_decay": self.weight_decay}
        vectors = {"name": "vectors", "params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0}
        settings = {"lr": self.learning_rate, "betas": BETAS, "fused": fused}
        if self.optimizer == "adamw":
            optimizer = AdamW([{"name": "matrices", "params": matrices} | decay, vectors], **settings)
        else:
            tables = nn.Embedding | nn.EmbeddingBag
            outer = {id(layer.weight) for layer in network.modules() if isinstance(layer, tables)}
            outer |= {id(p) for p in network.head.parameters()} | {id(p) for p in matrices if p.dim() > 2}
            inner = {"name": "inner matrices", "params": [p for p in matrices if id(p) not in outer]} | decay
            other = {"name": "outer matrices", "params": [p for p in matrices if id(p) in outer]} | decay
            # The rate is scaled so that its steps are as long as AdamW's (Liu et al. 2025, 2.2).
            rate = self.muon_learning_rate or self.learning_rate
            muon = Muon([inner], lr=rate, momentum=BETAS[0], adjust_lr_fn="match_rms_adamw")
            optimizer = Together(muon, AdamW([other, vectors], **settings))
        schedule = LambdaLR(optimizer, lambda step: self.factor(step, max_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _half_cosine(progress: float) -> float:
    """From 1 at 0 to 0 at 1."""
    return 0.5 * (1 + math.cos(math.pi * progress))


class Together(Optimizer):
    """Several optimizers, each of its own parameters, that step as one: Lightning steps one by itself."""

    def __init__(self, *parts: Optimizer) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})

    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:
        loss = None if closure is None else closure()
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [group for part in self.parts for group in part.param_groups]  # which are new
