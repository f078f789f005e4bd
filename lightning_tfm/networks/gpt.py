"""GPT: a Transformer decoder alone (Radford et al. 2019)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from lightning_tfm.decoding import State
from lightning_tfm.errors import UserError
from lightning_tfm.layers import (
    Dropout,
    Linear,
    RotaryPositions,
    Rotation,
    TransformerLayer,
    causal_mask,
    check_heads,
)
from lightning_tfm.networks.network import Seq2SeqNetwork
from lightning_tfm.tokenizer import NUM_SPECIAL, PAD

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel


LOWEST = torch.finfo(torch.bfloat16).min / 2
"""Added to the logits of ids with probability 0: far below every logit, and finite in float32 and bfloat16."""


class GPT(Seq2SeqNetwork):
    """Reads a pair as one sequence, `source EOS BOS target`, and a text, where the source is empty, as it is.

    Args:
        vocab_size: number of ids.
        d_model: width; the feed-forward is 4 times as wide.
        num_heads: attention heads; must divide d_model.
        num_layers: layers.
        dropout: on embeddings and on each sub-layer's output.
        max_length: longest sequence in tokens, source and target together.
        bias: whether linear layers and norms have a bias.
        gelu: the activation (Hendrycks & Gimpel 2016) as defined, or by tanh, as GPT-2 has it: on a CPU twice as slow.
        text_only: whether PAD, BOS and EOS get probability 0, as the weights of GPT-2 need, which lack these ids.
        positions: "learned", a vector each, as GPT-2 has them, or "rotary" (Su et al. 2021), which tell distances.
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int = 128,
        num_heads: int = 4,
        num_layers: int = 4,
        dropout: float = 0.0,
        max_length: int = 64,
        bias: bool = True,
        gelu: Literal["exact", "tanh"] = "exact",
        text_only: bool = False,
        positions: Literal["learned", "rotary"] = "learned",
    ) -> None:
        super().__init__(
            vocab_size=vocab_size,
            d_model=d_model,
            num_heads=num_heads,
            num_layers=num_layers,
            dropout=dropout,
            max_length=max_length,
            bias=bias,
            gelu=gelu,
            text_only=text_only,
            positions=positions,
        )
        check_heads(d_model, num_heads)
        self.max_length = max_length
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.is_rotary = positions == "rotary"
        if self.is_rotary:
            self.rotary = RotaryPositions(max_length, d_model // num_heads)
        else:
            self.positions = nn.Embedding(max_length, d_model)
        self.dropout = Dropout(dropout)
        activation = nn.GELU(approximate={"exact": "none", "tanh": "tanh"}[gelu])
        self.layers = nn.ModuleList(
            TransformerLayer(d_model, num_heads, 4 * d_model, dropout, "pre", activation, bias)
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(d_model, bias=bias)
        self.head = Linear(d_model, vocab_size, bias=False)
        self.head.weight = self.embedding.weight  # tied (Press & Wolf 2017)
        bias = torch.zeros(vocab_size).index_fill(0, torch.arange(NUM_SPECIAL), LOWEST) if text_only else None
        self.register_buffer("special_bias", bias, persistent=False)
        self.apply(self._initialise)
        # 2 x num_layers sub-layers are summed: scaled so that the sum keeps its variance (GPT-2, 2.3)
        for layer in self.layers:
            for last in (layer.self_attention.output, layer.feed_forward[2]):
                nn.init.normal_(last.weight, std=0.02 / math.sqrt(2 * num_layers))

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    @classmethod
    def from_huggingface(cls, model: GPT2LMHeadModel, num_special: int = 0) -> GPT:
        """Return a GPT with the weights of a Hugging Face GPT-2, which gives the same distribution over its ids.

        Args:
            model: the GPT-2.
            num_special: 0, or NUM_SPECIAL to put PAD, BOS and EOS before the model's ids; it has not learned them, so
                they get no probability.

        Raises:
            UserError: if the model computes something that this network does not.
        """
        assert num_special in (0, NUM_SPECIAL)
        config = model.config
        ours = {
            "activation_function": "gelu_new",
            "n_inner": 4 * config.n_embd,
            "layer_norm_epsilon": 1e-5,
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "tie_word_embeddings": True,
            "add_cross_attention": False,
        }
        for name, value in ours.items():
            theirs = getattr(config, name)
            if theirs != value and not (name == "n_inner" and theirs is None):  # None stands for 4 x the width
                raise UserError(f"{name} must be {value} for GPT-2 weights to mean the same here, but is {theirs}")
        gpt = cls(
            num_special + config.vocab_size,
            config.n_embd,
            config.n_head,
            config.n_layer,
            max_length=config.n_positions,
            gelu="tanh",
            text_only=num_special > 0,
        )
        theirs = model.transformer

        def copy(ours: nn.Module, their: nn.Module, transposed: bool = False) -> None:
            ours.weight.copy_(their.weight.T if transposed else their.weight)
            if getattr(ours, "bias", None) is not None:
                ours.bias.copy_(their.bias)

        with torch.no_grad():
            gpt.embedding.weight[num_special:] = theirs.wte.weight
            copy(gpt.positions, theirs.wpe)
            copy(gpt.norm, theirs.ln_f)
            for layer, block in zip(gpt.layers, theirs.h, strict=True):
                copy(layer.add_self.norm, block.ln_1)
                copy(layer.add_feed_forward.norm, block.ln_2)
                # Hugging Face keeps these as Conv1D, whose weight is (in, out)
                copy(layer.self_attention.query_key_value, block.attn.c_attn, transposed=True)
                copy(layer.self_attention.output, block.attn.c_proj, transposed=True)
                copy(layer.feed_forward[0], block.mlp.c_fc, transposed=True)
                copy(layer.feed_forward[2], block.mlp.c_proj, transposed=True)
        return gpt

    def check_lengths(self, source_length: int, target_length: int) -> None:
        length = source_length + target_length
        if length > self.max_length:
            read = (
                f"source and target have {source_length} + {target_length}" if target_length else f"input has {length}"
            )
            raise UserError(
                f"the longest {read} tokens, but the model's positions end at max_length {self.max_length}; "
                f"try max_length {length}"
            )

    def _logits(self, x: Tensor) -> Tensor:
        """Return the logits (..., V) of hidden states (..., D)."""
        logits = self.head(self.norm(x))
        return logits if self.special_bias is None else logits + self.special_bias

    def _embed(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Rotation | None]:
        """(B, T) at positions (T) or (B, T) -> (B, T, D), and how far the layers turn queries and keys, if they do."""
        x = self.embedding(tokens)
        if self.is_rotary:
            return self.dropout(x), self.rotary(positions)
        return self.dropout(x + self.positions(positions)), None

    def forward(self, source: Tensor, target_in: Tensor) -> Tensor:
        S, T = source.size(1), target_in.size(1)
        self.check_lengths(S, T)
        tokens = torch.cat((source, target_in), dim=1)
        steps = torch.arange(S + T, device=tokens.device)
        if S == 0:  # a text has padding on the right at most: the kernel's own causal mask is enough
            mask, positions = None, steps
        else:  # between source and target lies padding: not attended to, and not counted as a position
            real = source != PAD
            mask = causal_mask(S + T, S + T, tokens.device) & nn.functional.pad(real, (0, T), value=True)[:, None, None]
            positions = torch.where(steps < S, steps, steps - S + real.sum(1, keepdim=True))  # (B, S + T)
        x, rotation = self._embed(tokens, positions)  # (B, S + T, D)
        for layer in self.layers:
            x, _ = layer(x, mask, is_causal=mask is None, rotation=rotation)
        return self._logits(x[:, S:])  # (B, T, V)

    def over_source(self, maps: dict[str, Tensor], source: Tensor) -> dict[str, Tensor]:
        """The part of the weights that lies on the source, made whole."""
        S = source.size(1)
        parts = {name: weights[:, :, S:, :S] for name, weights in maps.items()}
        return {name: part / part.sum(-1, keepdim=True).clamp(min=1e-9) for name, part in parts.items()}

    def encode(self, source: Tensor) -> State:
        S = source.size(1)
        self.check_lengths(S, 0)
        real = source != PAD
        x, rotation = self._embed(source, torch.arange(S, device=source.device))
        pasts = []
        for layer in self.layers:  # padding is on the right of the source, so causality hides it here
            x, past = layer(x, is_causal=S > 0, rotation=rotation)
            pasts.append(past)
        return tuple(pasts), real, real.sum(1)

    def decode_step(self, token: Tensor, state: State) -> tuple[Tensor, State]:
        pasts, real, position = state
        self.check_lengths(real.size(1), 1)
        real = nn.functional.pad(real, (0, 1), value=True)  # (B, keys so far)
        x, rotation = self._embed(token.unsqueeze(1), position.unsqueeze(1))  # (B, 1, D)
        extended = []
        for layer, past in zip(self.layers, pasts, strict=True):
            x, past = layer(x, real[:, None, None], past=past, rotation=rotation)
            extended.append(past)
        return self._logits(x).squeeze(1), (tuple(extended), real, position + 1)
