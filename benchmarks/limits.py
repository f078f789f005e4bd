"""Benchmarks that explain missed targets: lower bounds on the work, and the speed of compiled steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import steps
from benchmarks.measure import Built, Facts, Row, Side, compared
from lightning_tfm.data import Batch
from lightning_tfm.networks import GPT, AttentionLSTM, Network, Transformer
from lightning_tfm.networks.huggingface import from_huggingface
from lightning_tfm.system.memory import keep_freed_memory


def products_of(network: Network, batch: Batch) -> Callable[[Any], None]:
    """Return a step of only the matrix products of a training step: one forward and two backward per linear layer."""
    operands: list[tuple[nn.Linear, Tensor, Tensor]] = []

    def remember(layer: nn.Linear, args: tuple[Tensor], output: Tensor) -> None:
        x, y = args[0].detach().flatten(0, -2), output.detach().flatten(0, -2)
        operands.append((layer, torch.randn_like(x), torch.randn_like(y)))

    handles = [m.register_forward_hook(remember) for m in network.modules() if isinstance(m, nn.Linear)]
    network(*batch.inputs)
    for handle in handles:
        handle.remove()

    @torch.no_grad()
    def step(_: Any) -> None:
        for layer, x, gradient in operands:
            layer(x)
            gradient @ layer.weight
            gradient.T @ x

    return step


NARROW = 8
"""Width at which arithmetic takes almost no time compared with the call overhead of the operations."""


def build_limit(model: str, side: str, batch_size: int = 12) -> Built:
    """Build a part of a model's training step, or the step compiled by torch.compile.

    Args:
        model: "GPT", "GPT as huggingface", or the position of the norms in a Transformer, "pre" or "post".
        side: "products" for the matrix products alone, "calls" for all operations at width NARROW, or "compiled".
        batch_size: the number of rows.
    """
    keep_freed_memory()
    torch.manual_seed(0)
    narrow = {"d_model": NARROW} if side == "calls" else {}
    if model == "GPT as huggingface":
        network: Network = from_huggingface(steps.huggingface_gpt2(steps.GPT_SIZE | narrow))
    elif model == "GPT":
        network = GPT(**steps.GPT_SIZE | narrow, bias=False)
    else:
        width = narrow.get("d_model", steps.COPY["d_model"])
        network = Transformer(**steps.COPY | narrow, d_ff=4 * width, norm=model)
    if model.startswith("GPT"):
        batches, count, clip = steps.windows(batch_size, steps.GPT_SIZE["max_length"]), steps.GPT_STEPS, 1.0
    else:
        batches, count, clip = steps.copy_batches(batch_size, like_lengths=False), steps.steps_of(batch_size), None
    if side == "compiled":
        network.compile()
    step = products_of(network, batches[0]) if side == "products" else steps.our_step(network, clip)
    return Built({"parameters": steps.parameters_of(network)}, steps.repeated(step, batches, count))


class WithoutAttention(AttentionLSTM):
    """AttentionLSTM without attention, whose decoder computes all steps in one fused kernel instead of a loop."""

    def __init__(self, vocab_size: int, d_model: int, dropout: float) -> None:
        super().__init__(vocab_size, d_model, dropout)
        self.decoder = nn.LSTM(d_model, d_model, batch_first=True)

    def forward(self, source: Tensor, target_in: Tensor) -> Tensor:
        _, _, (_, memory, _) = self.encode(source)  # (B, S, 2D)
        hiddens, _ = self.decoder(self.dropout(self.target_embedding(target_in)))  # (B, T, D)
        return self._logits(hiddens, memory[:, :1].expand(-1, hiddens.size(1), -1))


def build_lstm_limit(side: str) -> Built:
    """Build training of the attention LSTM on dates.

    Args:
        side: "without attention", or "compiled" by torch.compile.
    """
    torch.manual_seed(0)
    network = WithoutAttention(**steps.DATES) if side == "without attention" else AttentionLSTM(**steps.DATES)
    if side == "compiled":
        network.compile()
    built = steps.our_dates(network)
    for _ in range(10):  # a new source length can trigger a compilation
        built.work()
    return built


def unchecked(ours: Facts, peer: Facts) -> str:
    """Check nothing, since the sides do different work."""
    return ""


def limits(full: bool) -> Iterator[Row]:
    """Measure products alone, calls alone and compiled steps against the peers."""

    def copying(peer: str, batch_size: int) -> Side:
        return Side(steps.build_copy, peer, batch_size, like_lengths=False, allocator=False)

    nano, huggingface = Side(steps.build_gpt, "nano", False, False), Side(steps.build_gpt, "huggingface", True, False)
    for name, model, batch_size, peer in (
        ("Transformer step, batch 2 / tutorial", "post", 2, copying("tutorial", 2)),
        ("Transformer step, batch 64 / tutorial", "post", 64, copying("tutorial", 64)),
        ("Transformer step, batch 64 / nn.Transformer", "pre", 64, copying("torch", 64)),
        (
            "Transformer step, batch 64 / nn.Transformer, same tensors and dropouts",
            "pre",
            64,
            copying("torch with our dropouts", 64),
        ),
        ("GPT step / nanoGPT's formulation", "GPT", 12, nano),
        ("GPT step / Hugging Face GPT-2", "GPT as huggingface", 12, huggingface),
    ):
        products = "of the linear layers alone, one after the other, on the same padded tensors"
        for side, same, note in (
            ("products", steps.same_parameters, products),
            ("calls", unchecked, "the same operations at width 8: mostly call overhead"),
            ("compiled", steps.same_parameters, "the same tensors; excluding about 40 s of compilation"),
        ):
            ours = Side(build_limit, model, side, batch_size)
            yield compared(f"limit: {name}, {side}", "tokens/s", "", ours, peer, same, note=note)


def lstm_limits(full: bool) -> Iterator[Row]:
    """Measure the attention LSTM without attention, and compiled, against the tutorial."""
    for side, same, note in (
        ("without attention", unchecked, "no attention and no loop: a lower bound on the work"),
        ("compiled", steps.like_parameters, "excluding about a minute of compilation"),
    ):
        name, ours = f"limit: attention LSTM training / tutorial, {side}", Side(build_lstm_limit, side)
        yield compared(name, "samples/s", "", ours, steps.TUTORIAL_DATES, same, note=note)
