"""Benchmarks that explain missed targets: lower bounds on the work, and the speed of alternative formulations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.convergence import POLARITY, missing
from benchmarks.framework import settings_of
from benchmarks.measure import ROUNDS, Built, Row, Side, absolute_row, compare, ratio_row, started
from benchmarks.steps import (
    COPY,
    DATES,
    GPT_SIZE,
    GPT_STEPS,
    build_copy,
    build_dates,
    build_gpt,
    copy_batches,
    huggingface_gpt2,
    like_parameters,
    our_dates,
    our_step,
    parameters_of,
    repeated,
    same_parameters,
    steps_of,
    tokens_of,
    windows,
)
from datamodules import Sentiment, sentiment
from lightning_tfm.data import Batch, LabeledBatch, LengthGroupedSampler
from lightning_tfm.networks import GPT, AttentionLSTM, EncoderClassifier, Network, Transformer
from lightning_tfm.networks.gpt2 import from_huggingface
from lightning_tfm.optimizers import AdamW
from lightning_tfm.system.memory import keep_freed_memory


def products_of(network: Network, batch: Batch | LabeledBatch) -> Callable[[Any], None]:
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
        network: Network = from_huggingface(huggingface_gpt2(GPT_SIZE | narrow))
    elif model == "GPT":
        network = GPT(**GPT_SIZE | narrow, bias=False)
    else:
        width = narrow.get("d_model", COPY["d_model"])
        network = Transformer(**COPY | narrow, d_ff=4 * width, norm=model)
    if model.startswith("GPT"):
        batches, steps, clip = windows(batch_size, GPT_SIZE["max_length"]), GPT_STEPS, 1.0
    else:
        batches, steps, clip = copy_batches(batch_size, like_lengths=False), steps_of(batch_size), None
    facts = {"parameters": parameters_of(network)}
    if side == "products":
        step: Callable[[Batch], None] = products_of(network, batches[0])
    else:
        if side == "compiled":
            network.compile()
        step = our_step(network, clip)
    return Built(facts, repeated(step, batches, [tokens_of(batch) for batch in batches], steps))


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
    network = WithoutAttention(**DATES) if side == "without attention" else AttentionLSTM(**DATES)
    if side == "compiled":
        network.compile()
    built = our_dates(network)
    for _ in range(10):  # a new source length can trigger a compilation
        built.work()
    return built


def nothing(ours: dict[str, Any], peer: dict[str, Any]) -> str:
    """Check nothing, since the sides do different work."""
    return ""


def limits(full: bool) -> Iterator[Row]:
    """Measure products alone, calls alone and compiled steps against the peers."""
    pairs: list[tuple[str, dict[str, Any], Side]] = []
    for norm, batch_size, side, name in (
        ("post", 2, "tutorial", "tutorial"),
        ("post", 64, "tutorial", "tutorial"),
        ("pre", 64, "torch", "nn.Transformer"),
        ("pre", 64, "torch with our dropouts", "nn.Transformer, same tensors and dropouts"),
    ):
        peer = Side(build_copy, {"side": side, "batch_size": batch_size, "like_lengths": False, "allocator": False})
        arguments = {"model": norm, "batch_size": batch_size}
        pairs.append((f"Transformer step, batch {batch_size} / {name}", arguments, peer))
    for model, side, bias, name in (
        ("GPT", "nano", False, "nanoGPT's formulation"),
        ("GPT as huggingface", "huggingface", True, "Hugging Face GPT-2"),
    ):
        peer = Side(build_gpt, {"side": side, "bias": bias, "allocator": False})
        pairs.append((f"GPT step / {name}", {"model": model}, peer))
    for name, arguments, peer in pairs:
        for side, note in (
            ("products", "of the linear layers alone, one after the other, on the same padded tensors"),
            ("calls", "the same operations at width 8: mostly call overhead"),
            ("compiled", "the same tensors; excluding about 40 s of compilation"),
        ):
            same = nothing if side == "calls" else same_parameters
            rounds, checked = compare(Side(build_limit, arguments | {"side": side}), peer, same)
            yield ratio_row(f"limit: {name}, {side}", "tokens/s", "", rounds, checked=checked, note=note)


def lstm_limits(full: bool) -> Iterator[Row]:
    """Measure the attention LSTM without attention, and compiled, against the tutorial."""
    for side, note in (
        ("without attention", "no attention and no loop: a lower bound on the work"),
        ("compiled", "excluding about a minute of compilation"),
    ):
        rounds, checked = compare(
            Side(build_lstm_limit, {"side": side}),
            Side(build_dates, {"side": "tutorial"}),
            like_parameters if side == "compiled" else nothing,
        )
        yield ratio_row(
            f"limit: attention LSTM training / tutorial, {side}", "samples/s", "", rounds, checked=checked, note=note
        )


POLARITY_BATCHES = 64
"""Number of batches in the limits of the classifier, enough for the mean length of the sentences."""


def embeddings_of(network: EncoderClassifier, batch: LabeledBatch, optimizer: AdamW) -> Callable[[Any], None]:
    """Return a step of only the embeddings of a training step: their sums, the gradients and the update."""
    inputs: list[Tensor] = []
    handle = network.embedding.register_forward_hook(lambda layer, args, _: inputs.append(args[0]))
    network(*batch.inputs)
    handle.remove()
    (ids,) = inputs  # (B * S, G), after word dropout

    def step(_: Any) -> None:
        summed = network.embedding(ids)  # (B * S, D)
        summed.backward(torch.ones_like(summed))
        optimizer.step()
        optimizer.zero_grad()

    return step


def build_polarity_limit(side: str) -> Built:
    """Build a part of the training steps of the experiment `polarity_classifier`.

    Args:
        side: "products" for the matrix products alone, or "embeddings" for the embeddings alone.
    """
    keep_freed_memory()
    torch.manual_seed(0)
    settings = settings_of("polarity_classifier")
    data = Sentiment(**settings["data"]["init_args"])
    data.setup("fit")
    network = EncoderClassifier.from_data(data, **settings["model"]["init_args"]["network"]["init_args"])
    dataset = data.datasets["train"]
    sampler = LengthGroupedSampler(dataset.lengths, data.batch_size, data.seed)
    batches = [dataset[rows] for rows in islice(sampler, POLARITY_BATCHES)]
    if side == "products":
        parts = [products_of(network, batch) for batch in batches]
    else:
        optimizer = AdamW([network.embedding.weight])
        parts = [embeddings_of(network, batch, optimizer) for batch in batches]
    work = repeated(lambda part: part(None), parts, [1.0] * len(parts), len(parts))
    return Built({"steps": settings["trainer"]["max_steps"]}, work)


def polarity_limits(full: bool) -> Iterator[Row]:
    """Measure the matrix products alone, and the embeddings alone, of a training of the polarity classifier."""
    absent = missing(sentiment.FILES, *POLARITY)
    for side, note in (
        ("products", "of the linear layers alone, one after the other"),
        ("embeddings", "summing, differentiating and updating the embeddings alone"),
    ):
        name = f"limit: polarity, {side}"
        if absent:
            yield Row(name, "s", "", note=absent)
            continue
        with started(Side(build_polarity_limit, {"side": side})) as (facts, work):
            blocks = [work() for _ in range(ROUNDS)]
        values = [facts["steps"] * block.seconds / block.amount for block in blocks]
        yield absolute_row(name, "s", "", values, f"{note}, in {facts['steps']} steps of 64 sentences")
