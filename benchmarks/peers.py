"""Peers of the benchmarks: formulations of tutorials and well-known projects, and torch's `nn.Transformer`.

Each is reimplemented from a description of the architecture, in the style of the original.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_tfm.layers import SinusoidalPositions, TransformerLayer
from lightning_tfm.networks import Transformer
from lightning_tfm.tokenization import PAD


def copy_weights(module: nn.Module, weights: Iterable[Tensor]) -> None:
    """Copy weights into the parameters of a module, in order."""
    for parameter, weight in zip(module.parameters(), weights, strict=True):
        parameter.copy_(weight)


def layer_weights(layer: TransformerLayer) -> list[Tensor]:
    """Return the weights of one of our layers in the order of torch's layers: attentions, feed-forward, norms.

    As in torch, the query, key and value projections are concatenated.
    """
    own, norms = layer.self_attention, [layer.add_self.norm, layer.add_feed_forward.norm]
    weights = [*own.qkv_proj.parameters(), *own.out_proj.parameters()]
    if hasattr(layer, "cross_attention"):
        cross = layer.cross_attention
        norms.insert(1, layer.add_cross.norm)
        weights += [torch.cat((cross.q_proj.weight, cross.kv_proj.weight))]
        weights += [torch.cat((cross.q_proj.bias, cross.kv_proj.bias)), *cross.out_proj.parameters()]
    return [*weights, *layer.feed_forward.parameters(), *(p for norm in norms for p in norm.parameters())]


class EncoderDecoder(nn.Module):
    """Embeddings, positions, head and dropout that both Transformers of the peers have."""

    def __init__(self, vocab_size: int, d_model: int, max_length: int, dropout: float) -> None:
        super().__init__()
        self.source_embedding = nn.Embedding(vocab_size, d_model)
        self.target_embedding = nn.Embedding(vocab_size, d_model)
        self.register_buffer("positions", SinusoidalPositions(max_length, d_model)(torch.arange(max_length)))
        self.head = nn.Linear(d_model, vocab_size, bias=False)
        self.dropout = nn.Dropout(dropout)

    def embed(self, embedding: nn.Embedding, ids: Tensor) -> Tensor:
        """Return the embeddings (B, T, D) of ids (B, T), with positions."""
        return self.dropout(embedding(ids) + self.positions[: ids.size(1)])

    def take_outer_weights(self, ours: Transformer) -> None:
        """Copy our embeddings, multiplied by our scale, which the peers do not apply, and our head."""
        self.source_embedding.weight.copy_(ours.source_embedding.weight * ours.scale)
        self.target_embedding.weight.copy_(ours.target_embedding.weight * ours.scale)
        copy_weights(self.head, ours.head.parameters())


class TutorialAttention(nn.Module):
    """Multi-head attention as in tutorials: three projections, einsum, masked_fill, softmax, einsum."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads, self.d_head = num_heads, d_model // num_heads
        self.query, self.key, self.value, self.output = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, query: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        batch = query.size(0)
        q = self.query(query).reshape(batch, -1, self.num_heads, self.d_head)
        k = self.key(memory).reshape(batch, -1, self.num_heads, self.d_head)
        v = self.value(memory).reshape(batch, -1, self.num_heads, self.d_head)
        scores = torch.einsum("bthd,bshd->bhts", q, k)
        scores = scores.masked_fill(mask == 0, -1e20)
        weights = torch.softmax(scores / math.sqrt(self.d_head), dim=-1)
        context = torch.einsum("bhts,bshd->bthd", weights, v)
        return self.output(context.reshape(batch, -1, self.num_heads * self.d_head))


class TutorialLayer(nn.Module):
    """Post-norm layer of the copy tutorial, with dropout after each norm."""

    def __init__(self, d_model: int, num_heads: int, dropout: float, cross_attention: bool) -> None:
        super().__init__()
        self.attentions = nn.ModuleList(TutorialAttention(d_model, num_heads) for _ in range(1 + cross_attention))
        self.norms = nn.ModuleList(nn.LayerNorm(d_model) for _ in range(2 + cross_attention))
        self.feed_forward = nn.Sequential(nn.Linear(d_model, 4 * d_model), nn.ReLU(), nn.Linear(4 * d_model, d_model))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor, memory: Tensor | None = None, memory_mask: Tensor | None = None):
        x = self.dropout(self.norms[0](x + self.attentions[0](x, x, mask)))
        if memory is not None:
            x = self.dropout(self.norms[1](x + self.attentions[1](x, memory, memory_mask)))
        return self.dropout(self.norms[-1](x + self.feed_forward(x)))


class TutorialTransformer(EncoderDecoder):
    """Encoder-decoder of the copy tutorial, with the same parameters as our Transformer with post-norm."""

    def __init__(self, vocab_size: int, d_model: int, num_heads: int, num_layers: int, dropout: float, max_length: int):
        super().__init__(vocab_size, d_model, max_length, dropout)
        self.encoder = nn.ModuleList(TutorialLayer(d_model, num_heads, dropout, False) for _ in range(num_layers))
        self.decoder = nn.ModuleList(TutorialLayer(d_model, num_heads, dropout, True) for _ in range(num_layers))

    def forward(self, source: Tensor, target_in: Tensor) -> Tensor:
        T = target_in.size(1)
        source_mask = (source != PAD).unsqueeze(1).unsqueeze(2)
        target_mask = torch.tril(torch.ones(T, T)).expand(source.size(0), 1, T, T)
        memory = self.embed(self.source_embedding, source)
        for layer in self.encoder:
            memory = layer(memory, source_mask)
        x = self.embed(self.target_embedding, target_in)
        for layer in self.decoder:
            x = layer(x, target_mask, memory, source_mask)
        return self.head(x)

    @torch.no_grad()
    def take_weights_of(self, ours: Transformer) -> None:
        """Copy the weights of our Transformer with post-norm, so that both compute the same function."""
        self.take_outer_weights(ours)
        for theirs, layer in zip((*self.encoder, *self.decoder), (*ours.encoder, *ours.decoder), strict=True):
            weights = iter(layer_weights(layer))
            for attention in theirs.attentions:
                weight, bias, *output = islice(weights, 4)
                projections = attention.query, attention.key, attention.value
                for projection, *parts in zip(projections, weight.chunk(3), bias.chunk(3), strict=True):
                    copy_weights(projection, parts)
                copy_weights(attention.output, output)
            copy_weights(theirs.feed_forward, islice(weights, 4))
            copy_weights(theirs.norms, weights)


class TorchTransformer(EncoderDecoder):
    """torch's `nn.Transformer` with embeddings and a head, and the same parameters as our Transformer with pre-norm.

    With `fewer_dropouts`, it lacks those that ours does not have: on attention weights and inside the feed-forward.
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        num_heads: int,
        num_layers: int,
        dropout: float,
        max_length: int,
        fewer_dropouts: bool = False,
    ) -> None:
        super().__init__(vocab_size, d_model, max_length, dropout)
        sizes = d_model, num_heads, num_layers, num_layers, 4 * d_model, dropout
        self.transformer = nn.Transformer(*sizes, batch_first=True, norm_first=True)
        if fewer_dropouts:
            for module in self.transformer.modules():
                if isinstance(module, nn.MultiheadAttention):
                    module.dropout = 0.0
                elif isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
                    module.dropout.p = 0.0  # inside the feed-forward

    def forward(self, source: Tensor, target_in: Tensor) -> Tensor:
        padding = source == PAD
        x = self.transformer(
            self.embed(self.source_embedding, source),
            self.embed(self.target_embedding, target_in),
            tgt_mask=nn.Transformer.generate_square_subsequent_mask(target_in.size(1), dtype=torch.bool),
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
            tgt_is_causal=True,
        )
        return self.head(x)

    @torch.no_grad()
    def take_weights_of(self, ours: Transformer) -> None:
        """Copy the weights of our Transformer with pre-norm, so that both compute the same function."""
        self.take_outer_weights(ours)
        for theirs, layers, norm in (
            (self.transformer.encoder, ours.encoder, ours.encoder_norm),
            (self.transformer.decoder, ours.decoder, ours.decoder_norm),
        ):
            for their_layer, layer in zip(theirs.layers, layers, strict=True):
                copy_weights(their_layer, layer_weights(layer))
            copy_weights(theirs.norm, norm.parameters())


class NanoBlock(nn.Module):
    """Block of nanoGPT: a fused QKV projection, torch's attention kernel, an exact GELU."""

    def __init__(self, d_model: int, num_heads: int, bias: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1 = nn.LayerNorm(d_model, bias=bias)
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=bias)
        self.projection = nn.Linear(d_model, d_model, bias=bias)
        self.norm_2 = nn.LayerNorm(d_model, bias=bias)
        self.up = nn.Linear(d_model, 4 * d_model, bias=bias)
        self.gelu = nn.GELU()
        self.down = nn.Linear(4 * d_model, d_model, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        q, k, v = (
            part.view(B, T, self.num_heads, D // self.num_heads).transpose(1, 2)
            for part in self.qkv(self.norm_1(x)).split(D, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(y.transpose(1, 2).contiguous().view(B, T, D))
        return x + self.down(self.gelu(self.up(self.norm_2(x))))


class NanoGPT(nn.Module):
    """Language model of nanoGPT in its character-level CPU settings, without dropout."""

    def __init__(self, vocab_size: int, d_model: int, num_heads: int, num_layers: int, max_length: int, bias: bool):
        super().__init__()
        self.max_length = max_length
        self.tokens = nn.Embedding(vocab_size, d_model)
        self.positions = nn.Embedding(max_length, d_model)
        self.blocks = nn.ModuleList(NanoBlock(d_model, num_heads, bias) for _ in range(num_layers))
        self.norm = nn.LayerNorm(d_model, bias=bias)
        self.head = nn.Linear(d_model, vocab_size, bias=False)
        self.head.weight = self.tokens.weight
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                last = name.endswith(("projection.weight", "down.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * num_layers) if last else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(weight)

    def features(self, tokens: Tensor) -> Tensor:
        """Return the final hidden states (B, T, D) for tokens (B, T)."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.size(1), device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.features(tokens))

    def next_logits(self, tokens: Tensor) -> Tensor:
        """Return the logits (B, V) of the token after tokens (B, T), recomputed from all of them as in nanoGPT."""
        return self.head(self.features(tokens[:, -self.max_length :])[:, [-1]])[:, 0]

    @torch.no_grad()
    def take_weights_of(self, gpt: nn.Module) -> None:
        """Copy the weights of our GPT, so that both compute the same function."""
        self.tokens.weight.copy_(gpt.embedding.weight)
        self.positions.weight.copy_(gpt.positions.weight)
        pairs = [(self.norm, gpt.norm)]
        for block, layer in zip(self.blocks, gpt.layers, strict=True):
            pairs += [
                (block.norm_1, layer.add_self.norm),
                (block.qkv, layer.self_attention.qkv_proj),
                (block.projection, layer.self_attention.out_proj),
                (block.norm_2, layer.add_feed_forward.norm),
                (block.up, layer.feed_forward[0]),
                (block.down, layer.feed_forward[2]),
            ]
        for ours, theirs in pairs:
            ours.load_state_dict(theirs.state_dict())


def nano_characters(path: Path, folder: Path) -> list[str]:
    """Write the characters of a text as numbers to train.bin and val.bin as nanoGPT; return the characters in order.

    The whole text is in memory, and each character is looked up in a dictionary. The last tenth is val.bin.
    """
    text = path.read_text(encoding="utf-8")
    characters = sorted(set(text))
    numbers = {character: number for number, character in enumerate(characters)}
    end = int(0.9 * len(text))
    for split, part in (("train", text[:end]), ("val", text[end:])):
        np.array([numbers[character] for character in part], dtype=np.uint16).tofile(folder / f"{split}.bin")
    return characters


def nano_windows(path: Path, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets (B, T) at places (B) of a file of numbers as nanoGPT, which maps it for each batch."""
    tokens = np.memmap(path, dtype=np.uint16, mode="r")
    inputs, targets = (
        torch.stack([torch.from_numpy(tokens[start + shift :][:length].astype(np.int64)) for start in starts])
        for shift in (0, 1)
    )
    return inputs, targets


class TutorialDateLSTM(nn.Module):
    """Model of the date tutorial, an LSTM encoder-decoder with attention.

    At each of ten steps, a linear layer scores every encoder state concatenated with the previous decoder state. The
    decoder receives its own previous logits, also in training.
    """

    def __init__(self, vocab_size: int = 128, width: int = 32, dropout: float = 0.5) -> None:
        super().__init__()
        self.vocab_size, self.width = vocab_size, width
        self.embedding = nn.Embedding(vocab_size, width)
        self.dropout = nn.Dropout(dropout)
        self.encoder = nn.LSTM(width, width, batch_first=True, bidirectional=True)
        self.score = nn.Linear(3 * width, 1)
        self.decoder = nn.LSTM(vocab_size + 2 * width, width, batch_first=True)
        self.output = nn.Linear(width, vocab_size)

    def forward(self, source: Tensor, steps: int = 10) -> Tensor:
        """Return the logits (B, steps, V) for character codes (B, S)."""
        B, S = source.shape
        memory, _ = self.encoder(self.dropout(self.embedding(source)))
        hidden, last, state = memory.new_zeros(B, 1, self.width), memory.new_zeros(B, 1, self.vocab_size), None
        outputs = []
        for _ in range(steps):
            beside = torch.cat((hidden.repeat(1, S, 1), memory), dim=2)
            weights = torch.softmax(self.score(beside.reshape(B * S, -1)).reshape(B, S), dim=-1)
            context = torch.sum(memory * weights.unsqueeze(-1), dim=1, keepdim=True)
            hidden, state = self.decoder(torch.cat((last, context), dim=2), state)
            last = self.output(hidden)
            outputs.append(last)
        return torch.cat(outputs, dim=1)


BARE = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
"""Trainer arguments that disable everything but training."""


def yoyodyne_model(
    name: str, files: dict[str, str], model_dir: str, width: int, lr: float, batch_size: int, **columns: Any
) -> tuple[Any, Any]:
    """Return yoyodyne's data module for tables, and its model for them with Adam at a constant learning rate."""
    from yoyodyne import data, models
    from yoyodyne.models import modules

    module = data.DataModule(model_dir=model_dir, batch_size=batch_size, **files, **columns)
    features = modules.LinearEncoder(embedding_size=width, output_size=2 * width)
    model = getattr(models, name)(
        source_encoder=modules.LSTMEncoder(embedding_size=width, hidden_size=width),
        features_encoder=module.has_features and features,
        embedding_size=width,
        decoder_hidden_size=width,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=lr),
        max_target_length=module.max_target_length,
        target_vocab_size=module.target_vocab_size,
        vocab_size=module.vocab_size,
    )
    return module, model
