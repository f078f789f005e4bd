"""The loss over tokens."""

from __future__ import annotations

import torch

from lightning_tfm.layers.losses import token_nll
from lightning_tfm.tokenization import PAD


def test_the_loss_applies_label_smoothing_and_ignores_padding():
    logits, target = torch.randn(2, 3, 5), torch.tensor([[3, 4, 2], [2, PAD, PAD]])
    log_probs = logits.log_softmax(-1)
    expected = sum(-log_probs[b, t, target[b, t]] for b, t in [(0, 0), (0, 1), (0, 2), (1, 0)])
    torch.testing.assert_close(token_nll(logits, target), expected)
    uniform = sum(-log_probs[b, t].mean() for b, t in [(0, 0), (0, 1), (0, 2), (1, 0)])
    torch.testing.assert_close(token_nll(logits, target, 0.1), 0.9 * expected + 0.1 * uniform)
