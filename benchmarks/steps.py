"""Benchmarks of training steps: our models against the same models as formulated by peers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, count, cycle, islice, repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from benchmarks import peers
from benchmarks.measure import Block, Built, Facts, Row, Side, compared, timed
from datamodules import Copy, Date
from lightning_tfm.data import Batch, LengthGroupedSampler, MicroBatches, Pair
from lightning_tfm.layers.losses import token_nll
from lightning_tfm.networks import GPT, AttentionLSTM, Network, Transformer
from lightning_tfm.networks.huggingface import from_huggingface
from lightning_tfm.optimizers import AdamW, parameter_groups
from lightning_tfm.system.memory import keep_freed_memory
from lightning_tfm.tokenization import PAD

Step = Callable[[Batch], object]
"""Training step on a batch."""

COPY = {"vocab_size": 10, "d_model": 128, "num_heads": 8, "num_layers": 2, "dropout": 0.1, "max_length": 16}
DATES = {"vocab_size": 128, "d_model": 32, "dropout": 0.5}  # the tutorial's vocabulary is ASCII
GPT_SIZE = {"vocab_size": 65, "d_model": 128, "num_heads": 4, "num_layers": 4, "max_length": 64}
GPT_STEPS = 40
"""Number of steps in a block, which takes about a second."""

DATE_STEPS = 40
"""Number of steps of 32 dates in a block."""


def tokens_of(batch: Batch | MicroBatches) -> int:
    """Return the number of target tokens, without padding."""
    return int(batch.tokens)


def parameters_of(network: nn.Module) -> int:
    """Return the number of parameters of a network, counting tied parameters once."""
    return sum(parameter.numel() for parameter in network.parameters())


def repeated(
    step: Callable[[Any], object], batches: Iterable[Any], steps: int, amount: Callable[[Any], float] = tokens_of
) -> Callable[[], Block]:
    """Return a function that measures a block of steps and continues with the batch after the previous block.

    Args:
        step: the training step.
        batches: the batches, which are repeated; loading them is part of the measured time if they are an iterator.
        steps: the number of steps in a block.
        amount: a function from a batch to the amount of work in it.
    """
    measured = ((batch, amount(batch)) for batch in batches)
    queue = cycle([*measured]) if isinstance(batches, list) else measured

    def block() -> float:
        total = 0.0
        for batch, done in islice(queue, steps):
            step(batch)
            total += done
        return total

    return lambda: timed(block)


def steps_of(batch_size: int) -> int:
    """Return the number of steps in a block of the copy task: enough to take a second and to average over lengths."""
    return max(24, 512 // batch_size)


def mean_loss(network: Network, batch: Batch) -> Tensor:
    """Return the mean loss per target token of one of our networks."""
    return token_nll(network(batch.source, batch.target_in), batch.target_out) / (batch.target_out != PAD).sum()


def optimized(
    network: nn.Module, optimizer: Optimizer, loss: Callable[[Batch], Tensor], clip: float | None = None
) -> Step:
    """Return a training step that minimizes a loss, with gradients clipped to a norm."""

    def step(batch: Batch) -> None:
        loss(batch).backward()
        if clip:
            nn.utils.clip_grad_norm_(network.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()

    return step


def our_step(network: Network, clip: float | None = None, learning_rate: float = 3e-4) -> Step:
    """Return a training step of our networks in a bare training loop."""
    optimizer = AdamW(parameter_groups(network, network.head), learning_rate)
    return optimized(network, optimizer, partial(mean_loss, network), clip)


def tutorial_step(network: nn.Module) -> Step:
    """Return a training step as in tutorials: Adam that is not fused, and `loss.item()` at each step."""
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-4)
    criterion = nn.CrossEntropyLoss(ignore_index=PAD)

    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        logits = network(batch.source, batch.target_in)
        loss = criterion(logits.reshape(-1, logits.size(-1)), batch.target_out.reshape(-1))
        loss.backward()
        optimizer.step()
        loss.item()

    return step


def plain_step(network: nn.Module) -> Step:
    """Return a training step for a peer that prescribes no optimizer: fused Adam, without `loss.item()`."""

    def loss(batch: Batch) -> Tensor:
        logits = network(batch.source, batch.target_in)
        return F.cross_entropy(logits.flatten(0, 1), batch.target_out.flatten(), ignore_index=PAD)

    return optimized(network, torch.optim.Adam(network.parameters(), lr=3e-4, fused=True), loss)


def copy_batches(batch_size: int, like_lengths: bool) -> list[Batch]:
    """Return the batches of an epoch of the copy task.

    Args:
        batch_size: the number of rows.
        like_lengths: whether batches have rows of similar length, as in our loader; otherwise, rows are random and
            padded to the longest row of the data.
    """
    data = Copy(train_size=4_000, val_size=1, test_size=1, longer_size=1, batch_size=batch_size)
    data.setup("fit")
    dataset = data.datasets["train"]
    number = len(dataset) // batch_size
    if like_lengths:
        rows = iter(LengthGroupedSampler(dataset.source_lengths, batch_size, seed=0))
        return [dataset[next(rows)] for _ in range(number)]
    whole = dataset[torch.arange(len(dataset))]
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0))
    rows = order[: number * batch_size].view(number, batch_size)
    return [Batch(*(part[some] for part in whole)) for some in rows]


def build_copy(side: str, batch_size: int, like_lengths: bool, allocator: bool) -> Built:
    """Build one side of the copy task's training step; the facts contain its initial logits from the same weights.

    Args:
        side: "tutorial", "torch" or "torch with our dropouts"; for ours, the position of the norms, "pre" or "post".
        batch_size: the number of rows.
        like_lengths: whether batches have rows of similar length, see `copy_batches`.
        allocator: whether freed memory is kept, see `keep_freed_memory`.
    """
    if allocator:
        keep_freed_memory()
    torch.manual_seed(0)
    norms = {"tutorial": "post", "torch": "pre", "torch with our dropouts": "pre"}
    network: nn.Module = Transformer(**COPY, norm=norms.get(side, side))
    if side in norms:
        if side == "tutorial":
            theirs = peers.TutorialTransformer(**COPY)
        else:
            theirs = peers.TorchTransformer(**COPY, fewer_dropouts=side != "torch")
        theirs.take_weights_of(network)
        network = theirs
    padded = copy_batches(batch_size, like_lengths=False)[0]
    logits = network.eval()(padded.source, padded.target_in).detach()  # without dropout
    network.train()
    batches = copy_batches(batch_size, like_lengths)
    steps = {"tutorial": tutorial_step, "torch": plain_step, "torch with our dropouts": plain_step}
    step = steps.get(side, our_step)(network)
    work = repeated(step, batches, steps_of(batch_size))
    ids = torch.cat([part.flatten() for batch in batches for part in batch[:3]])
    return Built({"parameters": parameters_of(network), "logits": logits, "ids": ids}, work)


def same_parameters(ours: Facts, peer: Facts) -> str:
    """Check that both sides train the same number of parameters."""
    assert ours["parameters"] == peer["parameters"], f"parameters: {ours['parameters']} and {peer['parameters']}"
    return "the same number of parameters"


def same_logits(ours: Facts, peer: Facts) -> str:
    """Check that both sides compute the same function: the same weights give the same logits."""
    checked = same_parameters(ours, peer)
    torch.testing.assert_close(ours["logits"], peer["logits"], rtol=0, atol=1e-4)
    return f"{checked}, the same logits from the same weights"


def same_tensors(ours: Facts, peer: Facts) -> str:
    """Check that both sides train the same function on the same batches, including padding."""
    checked = same_logits(ours, peer)
    assert ours["ids"].equal(peer["ids"]), "the sides train on other batches"
    return f"{checked}, the same batches"


def transformer_steps(full: bool) -> Iterator[Row]:
    """Measure training steps of a Transformer of width 128, 2 + 2 layers and dropout 0.1 on the copy task.

    Each pair is measured as both sides train, ours with rows of similar length and with memory that is kept, and on the
    same padded tensors with the same memory settings.
    """

    def row(name: str, target: str, norm: str, as_we_train: bool, peer: str, batch_size: int, note: str) -> Row:
        ours = Side(build_copy, norm, batch_size, like_lengths=as_we_train, allocator=as_we_train)
        theirs = Side(build_copy, peer, batch_size, like_lengths=False, allocator=False)
        same = same_logits if as_we_train else same_tensors
        return compared(name, "tokens/s", target, ours, theirs, same, note=note)

    alone = "the same padded tensors and memory settings"
    whole = "each as it trains, in a bare loop: ours keeps freed memory and has rows of similar length in a batch"
    as_it_comes = "; the tutorial's optimizer is not fused, and it reads the loss at every step"
    for batch_size, target in ((2, "≥ 2.5 x"), (64, "≥ 1.5 x")):
        name = f"Transformer step, batch {batch_size} / tutorial"
        yield row(name, target, "post", True, "tutorial", batch_size, whole + as_it_comes)
        yield row(f"{name}, same tensors", target, "post", False, "tutorial", batch_size, alone + as_it_comes)
    name = "Transformer step, batch 64 / nn.Transformer"
    fused = "; both optimizers fused"
    yield row(name, "≥ 1.5 x", "pre", True, "torch", 64, whole + fused)
    yield row(f"{name}, same tensors", "≥ 1.5 x", "pre", False, "torch", 64, alone + fused)
    fewer = "as the line before, and nn.Transformer without the dropouts that ours lacks"
    yield row(f"{name}, same tensors and dropouts", "≥ 1.5 x", "pre", False, "torch with our dropouts", 64, fewer)


def windows(batch_size: int, length: int, number: int = 64) -> list[Batch]:
    """Return language modeling batches of random windows from a random text with ids below 65."""
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(3, 65, (100_000,), generator=generator)
    starts = torch.randint(len(text) - length - 1, (number, batch_size, 1), generator=generator)
    rows = text[starts + torch.arange(length + 1)]  # (number, B, T + 1)
    return [Batch(row.new_empty(batch_size, 0), row[:, :-1], row[:, 1:], torch.arange(batch_size)) for row in rows]


def decay_groups(network: nn.Module) -> list[dict[str, Any]]:
    """Return parameter groups with weight decay 0.1 for matrices and none for vectors."""
    parameters = list(network.parameters())
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def nano_loss(network: peers.NanoGPT, batch: Batch) -> Tensor:
    """Return the mean loss of nanoGPT, as its model computes it."""
    logits = network(batch.target_in)
    return F.cross_entropy(logits.view(-1, logits.size(-1)), batch.target_out.reshape(-1), ignore_index=-1)


def nano_step(network: peers.NanoGPT, rate: Callable[[int], float] = lambda number: 3e-4) -> Step:
    """Return a training step of nanoGPT on a CPU, where its AdamW is not fused."""
    optimizer, numbers = torch.optim.AdamW(decay_groups(network), betas=(0.9, 0.99)), count()

    def loss(batch: Batch) -> Tensor:
        learning_rate = rate(next(numbers))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        return nano_loss(network, batch)

    return optimized(network, optimizer, loss, clip=1.0)


def huggingface_step(network: nn.Module) -> Step:
    """Return a training step of Hugging Face's GPT-2 as in its Trainer: the model's own loss and the fused AdamW."""

    def loss(batch: Batch) -> Tensor:
        labels = batch.target_out.contiguous()
        return network(input_ids=batch.target_in, labels=labels, shift_labels=labels).loss  # already shifted

    return optimized(network, torch.optim.AdamW(decay_groups(network), lr=3e-4, fused=True), loss, clip=1.0)


def huggingface_gpt2(size: dict[str, int]) -> nn.Module:
    """Return Hugging Face's GPT-2 without dropout; the size is given as the arguments of our GPT."""
    from transformers import GPT2Config, GPT2LMHeadModel

    names = {"vocab_size": "vocab_size", "max_length": "n_positions", "d_model": "n_embd"}
    names |= {"num_layers": "n_layer", "num_heads": "n_head"}
    without_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(**{names[name]: value for name, value in size.items()}, **without_dropout, use_cache=False)
    return GPT2LMHeadModel(config)


def build_gpt(side: str, bias: bool, allocator: bool) -> Built:
    """Build one side of GPT's training step; the facts contain its initial logits from the same weights.

    Args:
        side: "ours", "nano", "ours as huggingface" or "huggingface".
        bias: whether the layers of "ours" and "nano" have biases.
        allocator: whether freed memory is kept, see `keep_freed_memory`.
    """
    if allocator:
        keep_freed_memory()
    torch.manual_seed(0)
    batches = windows(12, GPT_SIZE["max_length"])
    first = batches[0]
    if side == "huggingface":
        network = huggingface_gpt2(GPT_SIZE)
        logits, step = network(first.target_in).logits, huggingface_step(network)
    elif side == "nano":
        ours, network = GPT(**GPT_SIZE, bias=bias), peers.NanoGPT(**GPT_SIZE, bias=bias)
        network.take_weights_of(ours)
        logits, step = network(first.target_in), nano_step(network)
    else:
        as_huggingface = side == "ours as huggingface"
        network = from_huggingface(huggingface_gpt2(GPT_SIZE)) if as_huggingface else GPT(**GPT_SIZE, bias=bias)
        logits, step = network(first.source, first.target_in), our_step(network, clip=1.0)
    facts = {"parameters": parameters_of(network), "logits": logits.detach().clone()}
    return Built(facts, repeated(step, batches, GPT_STEPS))


def gpt_steps(full: bool) -> Iterator[Row]:
    """Measure training steps of a GPT of 4 layers, width 128 and context 64, with 12 windows in a batch."""
    for name, ours, peer, bias, target in (
        ("GPT step / nanoGPT's formulation", "ours", "nano", False, "≥ 1.15 x"),
        ("GPT step / Hugging Face GPT-2", "ours as huggingface", "huggingface", True, "≥ 1.3 x"),
    ):
        for allocator, kind, note in (
            (True, "", "each as it trains, in a bare loop: ours keeps freed memory"),
            (False, ", same memory settings", "the formulations and optimizers alone"),
        ):
            sides = Side(build_gpt, ours, bias, allocator), Side(build_gpt, peer, bias, allocator=False)
            yield compared(name + kind, "tokens/s", target, *sides, same_logits, note=note)


GPT_SETTINGS: dict[str, dict[str, Any]] = {
    "no bias": {"bias": False},
    "RMSNorm": {"norm_type": "rms"},
    "SwiGLU": {"activation": "swiglu"},
    "squared ReLU": {"activation": "relu_squared"},
    "2 key-value heads": {"num_kv_heads": 2},
    "QK-norm": {"qk_norm": True},
    "heads of width 64": {"d_head": 64},
    "rotary positions": {"positions": "rotary"},
    "window of 64": {"window": 64},
    "untied head": {"tie_embeddings": False},
    "capped logits": {"logit_cap": 30.0},
}
"""Settings of GPT by the names of their rows, each of which differs from the default in one of them."""

SETTING_STEPS = 4
"""Number of steps in a block of `gpt_settings`, which takes about a second."""


def both_sizes(ours: Facts, peer: Facts) -> str:
    """Return the numbers of parameters of both sides, whose networks differ."""
    return f"{ours['parameters']:,} and {peer['parameters']:,} parameters"


def build_gpt_with(settings: dict[str, Any]) -> Built:
    """Build the training step of a GPT with settings, on windows of 256 tokens."""
    torch.manual_seed(0)
    network = GPT(**GPT_SIZE | {"max_length": 256} | settings)
    work = repeated(our_step(network, clip=1.0), windows(8, 256, number=8), SETTING_STEPS)
    return Built({"parameters": parameters_of(network)}, work)


def gpt_settings(full: bool) -> Iterator[Row]:
    """Measure training steps of GPT with each setting against the default, with 8 windows of 256 tokens in a batch."""
    for name, settings in GPT_SETTINGS.items():
        sides = (Side(build_gpt_with, each, threads=1) for each in (settings, {}))
        yield compared(f"GPT with {name} / default", "tokens/s", "", *sides, both_sizes, note="one thread")


def date_data() -> Date:
    """Return a data module of dates, set up for training."""
    data = Date(train_size=20_000, val_size=1, test_size=1, batch_size=32, seed=0)
    data.setup("fit")
    return data


def our_dates(network: AttentionLSTM) -> Built:
    """Build training of our network on dates, with batches from our sampler and dataset."""
    keep_freed_memory()
    dataset = date_data().datasets["train"]
    batches = map(dataset.__getitem__, LengthGroupedSampler(dataset.source_lengths, 32, seed=0))
    work = repeated(our_step(network, clip=0.5), batches, DATE_STEPS, lambda batch: 32)
    return Built({"parameters": parameters_of(network)}, work)


def build_dates(side: str) -> Built:
    """Build one side of the date LSTM's training step at the tutorial's size, with its own batches of 32 dates."""
    torch.manual_seed(0)
    if side == "ours":
        return our_dates(AttentionLSTM(**DATES))
    network = peers.TutorialDateLSTM()
    batches = chain.from_iterable(repeat(tutorial_dates(date_data().datasets["train"].pairs)))
    work = repeated(date_step(network), batches, DATE_STEPS, lambda batch: 32)
    return Built({"parameters": parameters_of(network)}, work)


def tutorial_dates(pairs: Sequence[Pair]) -> DataLoader:
    """Return a data loader as in the tutorial: character codes, padded by a collate function, without shuffling."""

    def codes(text: str) -> Tensor:
        return torch.tensor([ord(character) for character in text])

    def collate(pairs: list[Pair]) -> tuple[Tensor, Tensor]:
        sources, targets = zip(*((codes(pair.source), codes(pair.target)) for pair in pairs), strict=True)
        return pad_sequence(sources, batch_first=True), pad_sequence(targets, batch_first=True)

    return DataLoader([*pairs], 32, collate_fn=collate)  # a list, whose items are found at once


def date_step(network: peers.TutorialDateLSTM) -> Callable[[tuple[Tensor, Tensor]], None]:
    """Return a training step as in the date tutorial."""
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()

    def step(batch: tuple[Tensor, Tensor]) -> None:
        source, target = batch
        logits = network(source)
        loss = criterion(logits.reshape(-1, logits.size(-1)), target.reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 0.5)
        optimizer.step()

    return step


def like_parameters(ours: Facts, peer: Facts) -> str:
    """Check that the numbers of parameters differ by less than 1%."""
    counts = f"{ours['parameters']:,} and {peer['parameters']:,} parameters"
    assert abs(ours["parameters"] / peer["parameters"] - 1) < 0.01, counts
    return counts


def lstm_steps(full: bool) -> Iterator[Row]:
    """Measure training of the attention LSTM of width 32 on dates, with 32 rows in a batch."""
    note = "each as it trains, in a bare loop, including data loading: ours keeps freed memory, has rows of similar "
    note += "length in a batch and the fused optimizer; ours writes EOS too"
    name, sides = "attention LSTM training, width 32, batch 32 / tutorial", (Side(build_dates, "ours"), TUTORIAL_DATES)
    yield compared(name, "samples/s", "≥ 3 x", *sides, like_parameters, note=note)


TUTORIAL_DATES = Side(build_dates, "tutorial")
