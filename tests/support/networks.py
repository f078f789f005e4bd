"""Small networks of all kinds."""

from __future__ import annotations

from lightning_tfm.networks import GPT, AttentionLSTM, LinearTransformer, Transformer

VOCAB_SIZE = 11

NETWORKS = {
    "transformer": lambda: Transformer(VOCAB_SIZE, 16, 4, 2, 32, dropout=0.1, max_length=12),
    "transformer_post_learned_tied": lambda: Transformer(
        VOCAB_SIZE, 16, 4, 2, 32, dropout=0.1, max_length=12, norm="post", positions="learned", tie_embeddings=True
    ),
    "gpt": lambda: GPT(VOCAB_SIZE, 16, 4, 2, dropout=0.1, max_length=20),
    "gpt_no_bias": lambda: GPT(VOCAB_SIZE, 16, 4, 2, dropout=0.1, max_length=20, bias=False),
    "gpt_rotary": lambda: GPT(VOCAB_SIZE, 16, 4, 2, dropout=0.1, max_length=20, positions="rotary"),
    **{
        f"transformer_{scheme}": lambda scheme=scheme: Transformer(
            VOCAB_SIZE, 16, 4, 2, 32, dropout=0.1, max_length=12, positions=scheme
        )
        for scheme in ("rotary", "alibi", "none", "randomized", "coupled")
    },
    **{
        f"gpt_{scheme}": lambda scheme=scheme: GPT(VOCAB_SIZE, 16, 4, 2, dropout=0.1, max_length=20, positions=scheme)
        for scheme in ("sinusoidal", "alibi", "none", "randomized", "coupled")
    },
    "linear_transformer_none": lambda: LinearTransformer(
        VOCAB_SIZE, 16, 4, 2, dropout=0.1, max_length=20, positions="none"
    ),
    "linear_transformer": lambda: LinearTransformer(VOCAB_SIZE, 16, 4, 2, dropout=0.1, max_length=20),
    **{
        f"{attention}_attention_lstm": lambda attention=attention: AttentionLSTM(
            VOCAB_SIZE, 16, dropout=0.1, attention=attention
        )
        for attention in ("location_aware", "monotonic", "hard_monotonic")
    },
    **{
        f"{attention}_attention_gru": lambda attention=attention: AttentionLSTM(
            VOCAB_SIZE, 16, dropout=0.1, attention=attention, cell="gru"
        )
        for attention in ("additive", "monotonic", "hard_monotonic")
    },
    "attention_lstm_pointer": lambda: AttentionLSTM(VOCAB_SIZE, 16, dropout=0.1, pointer_generator=True),
    "transformer_pointer": lambda: Transformer(
        VOCAB_SIZE, 16, 4, 2, 32, dropout=0.1, max_length=12, pointer_generator=True
    ),
    "transformer_monotonic": lambda: Transformer(
        VOCAB_SIZE, 16, 4, 2, 32, dropout=0.1, max_length=12, cross_attention="monotonic"
    ),
    "attention_lstm": lambda: AttentionLSTM(VOCAB_SIZE, 16, dropout=0.1),
}
