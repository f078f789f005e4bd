"""GPT, a decoder-only Transformer (Radford et al. 2019)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from lightning_tfm.errors import UserError, rank_zero_print
from lightning_tfm.layers import (
    Dropout,
    FreqsCis,
    Linear,
    PositionScheme,
    TransformerLayer,
    causal_mask,
    check_num_heads,
    position_scheme,
)
from lightning_tfm.networks.network import CausalNetwork, State, check_max_length
from lightning_tfm.tokenization import NUM_SPECIAL, PAD

LOWEST = torch.finfo(torch.bfloat16).min / 2
"""Logit bias of ids with probability 0, far below all logits but finite in float32 and bfloat16."""


class GPT(CausalNetwork):
    """Decoder-only Transformer, which reads a pair as one sequence `source EOS BOS target`, or a text without a source.

    Args:
        vocab_size: number of ids.
        d_model: width; the hidden layer of the feed-forward network is 4 times as wide.
        num_heads: number of attention heads; must divide d_model.
        num_layers: number of layers.
        dropout: dropout on embeddings and on the output of each sub-layer.
        max_length: maximum length of a sequence in tokens, source and target together, or of each of them with coupled
            positions; if null, `fit` infers it from the data.
        bias: whether linear layers and norms have a bias.
        activation: "gelu" (Hendrycks & Gimpel 2016), or "gelu_tanh", its tanh approximation of GPT-2, which is twice as
            slow on a CPU.
        text_only: whether PAD, BOS and EOS have probability 0, as required by the weights of GPT-2, which has none.
        positions: the position scheme, "learned" in GPT-2; see `position_scheme`.
    """

    special_bias: Tensor | None

    def __init__(
        self,
        vocab_size: int,
        d_model: int = 128,
        num_heads: int = 4,
        num_layers: int = 4,
        dropout: float = 0.0,
        max_length: int | None = None,
        bias: bool = True,
        activation: Literal["gelu", "gelu_tanh"] = "gelu",
        text_only: bool = False,
        positions: PositionScheme = "learned",
    ) -> None:
        super().__init__()
        check_num_heads(d_model, num_heads)
        self.max_length = check_max_length(max_length)
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.positions = position_scheme(positions, self.max_length, d_model, num_heads)
        # Coupled positions do not tell source from target, so these have segment embeddings (Devlin et al. 2019).
        self.segments = nn.Embedding(2, d_model) if self.positions.couples else None
        self.dropout = Dropout(dropout)
        gelu = nn.GELU(approximate={"gelu": "none", "gelu_tanh": "tanh"}[activation])
        self.layers = nn.ModuleList(
            TransformerLayer(d_model, num_heads, 4 * d_model, dropout, "pre", gelu, bias) for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(d_model, bias=bias)
        self.head = Linear(d_model, vocab_size, bias=False)
        self.head.weight = self.embedding.weight  # tied (Press & Wolf 2017)
        special_bias = torch.zeros(vocab_size).index_fill(0, torch.arange(NUM_SPECIAL), LOWEST) if text_only else None
        self.register_buffer("special_bias", special_bias, persistent=False)
        self.apply(self._initialize)
        # Scaled to keep the variance of the residual sum of 2 x num_layers sub-layers (GPT-2, 2.3).
        for layer in cast(Iterable[TransformerLayer], self.layers):
            for last in (layer.self_attention.out_proj, cast(Linear, layer.feed_forward[2])):
                nn.init.normal_(last.weight, std=0.02 / math.sqrt(2 * num_layers))

    @staticmethod
    def _initialize(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    # The model is not annotated with its class, since jsonargparse would import transformers to resolve it.
    @classmethod
    def from_huggingface(cls, model: nn.Module, num_special: int = 0) -> GPT:
        """Return a GPT with the weights of a Hugging Face GPT-2 and the same distribution over its ids.

        Args:
            model: the GPT-2, a `GPT2LMHeadModel` of transformers.
            num_special: 0, or NUM_SPECIAL to insert PAD, BOS and EOS before the ids of the model; they have probability
                0, since the model was not trained on them.

        Raises:
            UserError: if the model has an option that this network does not implement.
        """
        assert num_special in (0, NUM_SPECIAL)
        config = cast(Any, model.config)
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
            if theirs != value and not (name == "n_inner" and theirs is None):  # None means 4 x the width
                raise UserError(f"{name} must be {value} to load the weights of GPT-2, but is {theirs}")
        gpt = cls(
            num_special + config.vocab_size,
            config.n_embd,
            config.n_head,
            config.n_layer,
            max_length=config.n_positions,
            activation="gelu_tanh",
            text_only=num_special > 0,
        ).to(torch.promote_types(cast(torch.dtype, model.dtype), torch.float32))  # weights are never rounded
        theirs = cast(Any, model.transformer)

        def copy(ours: Any, their: Any, transposed: bool = False) -> None:
            ours.weight.copy_(their.weight.T if transposed else their.weight)
            if getattr(ours, "bias", None) is not None:
                ours.bias.copy_(their.bias)

        with torch.no_grad():
            gpt.embedding.weight[num_special:] = theirs.wte.weight
            copy(gpt.positions, theirs.wpe)
            copy(gpt.norm, theirs.ln_f)
            for layer, block in zip(cast(Iterable[TransformerLayer], gpt.layers), theirs.h, strict=True):
                copy(layer.add_self.norm, block.ln_1)
                copy(layer.add_feed_forward.norm, block.ln_2)
                # Conv1D in Hugging Face, with weights (in, out)
                copy(layer.self_attention.qkv_proj, block.attn.c_attn, transposed=True)
                copy(layer.self_attention.out_proj, block.attn.c_proj, transposed=True)
                copy(layer.feed_forward[0], block.mlp.c_fc, transposed=True)
                copy(layer.feed_forward[2], block.mlp.c_proj, transposed=True)
        return gpt

    def check_lengths(self, source_length: int, target_length: int) -> None:
        if self.positions.couples:  # source and target share their positions
            source_length, target_length = max(source_length, target_length), 0
        super().check_lengths(source_length, target_length)

    def max_source_length(self, target_length: int) -> int | None:
        return self.max_length if self.positions.couples else super().max_source_length(target_length)

    def _logits(self, x: Tensor) -> Tensor:
        """Return the logits (..., V) of hidden states (..., D)."""
        logits = self.head(self.norm(x))
        return logits if self.special_bias is None else logits + self.special_bias

    def _target_index(self, real: Tensor) -> Tensor:
        """Return the index (B, 1) of the first token of the target, after a source with the mask (B, S)."""
        length = real.sum(1, keepdim=True)
        return torch.zeros_like(length) if self.positions.couples else length

    def _embed(self, tokens: Tensor, positions: Tensor, source_length: int) -> tuple[Tensor, FreqsCis | None]:
        """Return the embeddings and the rotations, if any.

        Args:
            tokens: the tokens (B, T).
            positions: the positions (T) or (B, T).
            source_length: the number of columns of the source; the others belong to the target.

        Returns:
            The embeddings (B, T, D), and the rotations of queries and keys.
        """
        x = self.positions.embed(self.embedding(tokens), positions)
        if self.segments is not None:
            x = x + self.segments((torch.arange(tokens.size(1), device=tokens.device) >= source_length).long())
        return self.dropout(x), self.positions.rotations(positions)

    def forward(self, source: Tensor, target_in: Tensor) -> Tensor:
        S, T = source.size(1), target_in.size(1)
        self.check_lengths(S, T)
        tokens = torch.cat((source, target_in), dim=1)
        steps = torch.arange(S + T, device=tokens.device)
        if S == 0:  # padding is only on the right, so the causal mask of the kernel suffices
            mask, indices = None, steps
        else:  # padding between source and target is masked and has no index
            real = source != PAD
            mask = causal_mask(S + T, S + T, tokens.device) & nn.functional.pad(real, (0, T), value=True)[:, None, None]
            indices = torch.where(steps < S, steps, steps - S + self._target_index(real))  # (B, S + T)
        count = max(S, T) if self.training and self.positions.couples else S + T
        positions = self.positions.number(indices, tokens.size(0), count)
        x, freqs_cis = self._embed(tokens, positions, S)  # (B, S + T, D)
        mask = self.positions.mask(positions, positions, mask)
        for layer in self.layers:
            x, *_ = layer(x, mask, is_causal=mask is None, freqs_cis=freqs_cis)
        return self._logits(x[:, S:])  # (B, T, V)

    def encode(self, source: Tensor) -> State:
        S = source.size(1)
        self.check_lengths(S, 0)
        real = source != PAD
        positions = torch.arange(S, device=source.device)
        x, freqs_cis = self._embed(source, positions, S)
        mask = self.positions.mask(positions, positions, None)  # causal, so it hides padding, which is on the right
        pasts = []
        for layer in self.layers:
            x, past, _ = layer(x, mask, is_causal=mask is None and S > 0, freqs_cis=freqs_cis)
            pasts.append(past)
        return tuple(pasts), real, self._target_index(real).squeeze(1)

    def decode_step(self, token: Tensor, state: State) -> tuple[Tensor, State]:
        pasts, real, position = state
        if not self.positions.couples:  # whose number of target tokens is not known here
            self.check_lengths(real.size(1), 1)
        real = nn.functional.pad(real, (0, 1), value=True)  # (B, keys so far)
        x, freqs_cis = self._embed(token.unsqueeze(1), position.unsqueeze(1), 0)  # (B, 1, D)
        mask = self.positions.mask(position.unsqueeze(1), real.cumsum(1) - 1, real[:, None, None])
        extended = []
        for layer, past in zip(self.layers, pasts, strict=True):
            x, past, _ = layer(x, mask, past=past, freqs_cis=freqs_cis)
            extended.append(past)
        return self._logits(x).squeeze(1), (tuple(extended), real, position + 1)

    def load_pretrained(self, folder: str) -> None:
        if not Path(folder, "config.json").is_file():
            raise UserError(
                f"pretrained must be a folder with a Hugging Face GPT-2, but there is no {folder}/config.json"
            )
        try:
            from safetensors import SafetensorError
            from transformers import GPT2LMHeadModel
        except ImportError:
            raise UserError("pretrained needs the package transformers; pip install transformers") from None
        try:
            model_type = json.loads(Path(folder, "config.json").read_text(encoding="utf-8")).get("model_type")
            if model_type != "gpt2":
                raise ValueError(f"it holds a model of type {model_type}")
            model, loaded = cast(
                tuple[GPT2LMHeadModel, dict[str, Any]],
                GPT2LMHeadModel.from_pretrained(folder, local_files_only=True, output_loading_info=True),
            )
            if loaded["missing_keys"]:  # transformers would initialize them randomly
                raise ValueError(f"it lacks {sorted(loaded['missing_keys'])[0]}")
        except (OSError, ValueError, RuntimeError, AttributeError, SafetensorError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(
                f"pretrained must be a folder with a Hugging Face GPT-2, but {folder!r} is not: {reason}"
            ) from None
        pretrained = GPT.from_huggingface(model, NUM_SPECIAL)
        theirs = pretrained.hyper_parameters | {"dropout": self.hyper_parameters["dropout"]}  # dropout has no weights
        if theirs["vocab_size"] != self.hyper_parameters["vocab_size"]:
            raise UserError(
                f"data.init_args.tokenizer_file must be the tokenizer.json of {folder!r}, which has "
                f"{theirs['vocab_size']} ids, but the data have {self.hyper_parameters['vocab_size']}"
            )
        for name, value in self.hyper_parameters.items():
            if theirs[name] != value:
                raise UserError(f"{name} must match {folder!r}, but is {value}; set it to {theirs[name]}")
        their_dtype, our_dtype = model.dtype, self.embedding.weight.dtype
        if torch.promote_types(their_dtype, our_dtype) != our_dtype:
            rank_zero_print(f"the weights of {folder!r}, of {their_dtype}, are rounded to {our_dtype}")
        self.load_state_dict(pretrained.state_dict())
