"""Networks whose circuits are known, since their weights are set by hand.

The residual stream has a dimension for each token, for each position, and for each token that a head writes.
"""

from __future__ import annotations

import torch

from lightning_tfm.networks import GPT, Transformer
from support.networks import VOCAB_SIZE

LENGTH = 16
WIDTH = 128  # of the residual stream, with 4 heads of width 32
TOKEN, POSITION, READ = slice(0, VOCAB_SIZE), slice(16, 16 + LENGTH), slice(40, 40 + VOCAB_SIZE)


@torch.no_grad()
def empty(cls, num_layers, **settings):
    """Return a network that only embeds tokens and positions, as unit vectors."""
    network = cls(VOCAB_SIZE, d_model=WIDTH, num_heads=4, num_layers=num_layers, max_length=LENGTH, **settings).eval()
    for name, parameter in network.named_parameters():
        parameter.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
    network.head.weight[:, TOKEN] = torch.eye(VOCAB_SIZE)
    for name, module in network.named_modules():
        if name.endswith("embedding"):
            module.weight[:, TOKEN] = torch.eye(VOCAB_SIZE) / getattr(network, "scale", 1.0)
        elif name.endswith("positions") and hasattr(module, "weight"):
            module.weight[:, POSITION] = torch.eye(LENGTH)
    return network


def pick(part, start=0, matrix=None):
    """Return a projection (32, WIDTH) from a part of the residual stream to dimensions of a head."""
    weight = torch.zeros(32, WIDTH)
    matrix = torch.eye(part.stop - part.start) if matrix is None else matrix
    weight[start : start + len(matrix), part] = matrix
    return weight


PREVIOUS = torch.eye(LENGTH).roll(1, 1)
"""Matrix from a position to the one before."""


@torch.no_grad()
def set_head(attention, head, query, key, output=None, value=TOKEN, scale=1.0):
    """Let a head attend by the products of queries and keys (32, WIDTH), and add the values to a part of the stream."""
    rows = slice(32 * head, 32 * head + 32)
    if hasattr(attention, "qkv_proj"):
        projections = attention.qkv_proj.weight.chunk(3)
    else:
        projections = (attention.q_proj.weight, *attention.kv_proj.weight.chunk(2))
    for projection, weight in zip(projections, (query, key, pick(value)), strict=True):
        projection[rows] = weight
    if output is not None:
        size = output.stop - output.start
        attention.out_proj.weight[output, 32 * head : 32 * head + size] = scale * torch.eye(size)


@torch.no_grad()
def randomize_head(attention, head, std=0.02):
    """Draw the projections of a head."""
    for name, rows in (("qkv_proj", 3), ("q_proj", 1), ("kv_proj", 2)):
        if hasattr(attention, name):
            for part in getattr(attention, name).weight.chunk(rows):
                torch.nn.init.normal_(part[32 * head : 32 * head + 32], std=0.1)
    torch.nn.init.normal_(attention.out_proj.weight[:, 32 * head : 32 * head + 32], std=std)


def induction_network():
    """Return a GPT that continues repeated texts, with a head of each kind, of which one writes nothing.

    In layer 0, head 0 attends to the previous token and copies it, and head 1 to equal tokens. In layer 1, head 2
    attends to the token that followed, and predicts it.
    """
    network = empty(GPT, 2)
    first, second = (layer.self_attention for layer in network.layers)
    set_head(first, 0, pick(POSITION, 0, PREVIOUS), pick(POSITION), READ, scale=1 / 8)
    others = pick(POSITION, VOCAB_SIZE, -torch.eye(LENGTH))
    set_head(first, 1, pick(TOKEN) + others, pick(TOKEN) + pick(POSITION, VOCAB_SIZE))
    set_head(second, 2, pick(TOKEN), pick(READ), TOKEN, scale=8.0)
    return network


@torch.no_grad()
def duplicate_network():
    """Return a GPT that outputs the next id of a token that has occurred before, by a head that attends to it."""
    network = empty(GPT, 1)
    attention = network.layers[0].self_attention
    for head in range(4):
        randomize_head(attention, head)
    others = pick(POSITION, VOCAB_SIZE, -torch.eye(LENGTH))
    set_head(attention, 1, pick(TOKEN) + others, pick(TOKEN) + pick(POSITION, VOCAB_SIZE), TOKEN)
    attention.out_proj.weight[:, 32:64] = 0
    attention.out_proj.weight[TOKEN, 32 : 32 + VOCAB_SIZE] = 4 * torch.eye(VOCAB_SIZE).roll(1, 0)
    return network


def copying_network(matrix, heads):
    """Return a Transformer whose target are the source tokens at the positions of a matrix, by some of its heads."""
    network = empty(Transformer, 1, positions="learned")
    attention = network.decoder[0].cross_attention
    for head in range(4):
        randomize_head(attention, head)
    for head in heads:
        set_head(attention, head, pick(POSITION, 0, matrix), pick(POSITION), TOKEN)
    return network
