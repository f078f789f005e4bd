"""Answers per second: what a cache and a batch are worth."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks import peers
from benchmarks.measure import Built, Row, Side, compare, ratio_row, timed
from benchmarks.steps import our_step
from datamodules import Date
from lightning_tfm.data import TrainingBatches
from lightning_tfm.decoding import decode, go_on
from lightning_tfm.memory import keep_freed_memory
from lightning_tfm.networks import GPT, AttentionLSTM
from lightning_tfm.tokenizer import BOS, EOS, PAD

SAMPLED = 256
"""Tokens that are sampled."""


def build_sampler(side: str, max_length: int, whole: bool) -> Built:
    """Greedy sampling of a GPT of 6 layers x 384 until its context is full, after a prompt.

    The peer takes every 16th of those tokens only, unless `whole`: each is computed anew over all before it, so it
    can be taken from the sequence that ours gives, and the others cost what those between them cost. What it chooses
    is looked at for all of them.
    """
    keep_freed_memory()  # on both sides
    torch.manual_seed(0)
    network = GPT(65, d_model=384, num_heads=6, num_layers=6, max_length=max_length, bias=False).eval()
    with torch.no_grad():  # untrained weights this small repeat one token for ever; larger ones wander
        for weight in network.parameters():
            if weight.dim() == 2:
                weight.mul_(8)
    text = torch.randint(3, 65, (1, max_length - SAMPLED))

    @torch.inference_mode()
    def ours() -> Tensor:
        return go_on(network.encode, network.decode_step, text, SAMPLED, max_length)

    sampled = ours()
    if side == "ours":
        return Built({"tokens": sampled}, lambda: timed(lambda: ours().size(1)))
    theirs = peers.NanoGPT(65, 384, 6, 6, max_length, bias=False).eval()
    theirs.take_weights_of(network)
    sequence = torch.cat((text, sampled), dim=1)
    steps = range(0, SAMPLED, 1 if whole else 16)

    def chosen(logits: Tensor) -> Tensor:
        logits[..., [PAD, BOS, EOS]] = -math.inf  # which are no text
        return logits.argmax(-1)

    @torch.inference_mode()
    def recomputed() -> float:
        for step in steps:
            chosen(theirs.next_logits(sequence[:, : text.size(1) + step]))
        return len(steps)

    with torch.no_grad():  # all that it chooses, in one go
        answers = chosen(theirs(sequence[:, :-1])[:, -SAMPLED:])
    return Built({"tokens": answers}, lambda: timed(recomputed))


def same_tokens(ours: dict[str, Any], peer: dict[str, Any]) -> str:
    """Check that both sides choose the same tokens."""
    assert ours["tokens"].equal(peer["tokens"]), "the sides chose other tokens"
    assert ours["tokens"].unique().numel() > 10, "the sequence says nothing: it repeats few tokens"
    return f"the same {SAMPLED} tokens"


def key_value_cache(full: bool) -> Iterator[Row]:
    """GPT, 6 layers x 384: 256 tokens with the cache, against recomputing every step."""
    for max_length, target in ((SAMPLED + 2, "≥ 5 x"), (1024, "≥ 12 x")):
        arguments = {"max_length": max_length, "whole": full}
        rounds, checked = compare(
            Side(build_sampler, {"side": "ours", **arguments}),
            Side(build_sampler, {"side": "recomputed", **arguments}),
            same_tokens,
        )
        yield ratio_row(
            f"GPT 6 x 384, {SAMPLED} tokens after {max_length - SAMPLED}, cache / recomputing",
            "tokens/s",
            target,
            rounds,
            extrapolated="" if full else "each 16th token",
            checked=checked,
        )


def build_date_answers(side: str, dates: int) -> Built:
    """Answers to dates by a model that has been trained for half a minute."""
    keep_freed_memory()  # on both sides
    torch.manual_seed(0)
    data = Date(train_size=50_000, val_size=1, test_size=10_000, seed=0)
    data.setup("fit")
    network = AttentionLSTM(data.vocab_size, d_model=64)
    step, train, test = our_step(network, clip=1.0, learning_rate=5e-3), data.datasets["train"], data.datasets["test"]
    for rows, _ in zip(TrainingBatches(train.source_lengths, 128, seed=0), range(300), strict=False):
        step(train[rows])
    network.eval()
    length = data.max_target_length
    order = test.source_lengths.argsort(stable=True)
    asked = order[torch.linspace(0, len(order) - 1, dates).long()]  # dates of all lengths

    @torch.inference_mode()
    def answers(batches: tuple[Tensor, ...]) -> Tensor:
        parts = []
        for rows in batches:
            part = decode(network.decode_step, network.encode(test[rows].source), length)
            parts.append(torch.nn.functional.pad(part, (0, length - part.size(1)), value=PAD))
        return torch.cat(parts)

    batches = order.split(500) if side == "ours" else asked.split(1)
    given = answers(batches)
    if side == "ours":
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
        given = given[place[asked]]
    right = (given == test[asked].target_out).all(1).float().mean().item()
    return Built(
        {"answers": given, "right": right},
        lambda: timed(lambda: len(answers(batches))),
    )


def same_answers(ours: dict[str, Any], peer: dict[str, Any]) -> str:
    """Check that both sides give the same answers, most of which are right."""
    assert ours["answers"].equal(peer["answers"]), "the sides gave other answers"
    assert ours["right"] > 0.9, f"only {ours['right']} of the answers are right"
    return f"the same answers to {len(ours['answers']):,} dates"


def batched_dates(full: bool) -> Iterator[Row]:
    """Greedy answers to 10,000 dates, in batches of 500, against one by one."""
    dates = 10_000 if full else 500
    rounds, checked = compare(
        Side(build_date_answers, {"side": "ours", "dates": dates}),
        Side(build_date_answers, {"side": "one by one", "dates": dates}),
        same_answers,
    )
    name, sample = "10,000 dates, batches of 500 / one by one", "" if full else f"{dates} of 10,000"
    note = "" if full else "the dates that are answered one by one are of all lengths"
    yield ratio_row(name, "dates/s", "≥ 30 x", rounds, extrapolated=sample, checked=checked, note=note)
