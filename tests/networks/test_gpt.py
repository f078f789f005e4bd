"""GPT: weights of Hugging Face, pairs and texts without a source."""

from __future__ import annotations

import math

import pytest
import torch
import transformers
from torch import nn

from lightning_tfm.errors import UserError
from lightning_tfm.inference.decoding import continue_text
from lightning_tfm.networks import GPT
from lightning_tfm.networks.gpt2 import from_huggingface
from lightning_tfm.tokenization import PAD
from support.networks import randomize


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-12)])
def test_gpt_equals_hugging_face(dtype, tolerance):
    config = transformers.GPT2Config(
        vocab_size=50, n_embd=32, n_layer=3, n_head=4, n_positions=24, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0
    )
    theirs = transformers.GPT2LMHeadModel(config).to(dtype).eval()
    randomize(theirs, 0.2)
    ours = from_huggingface(theirs).eval()
    tokens = torch.randint(0, 50, (3, 24))
    with torch.no_grad():
        expected = theirs(tokens).logits
        torch.testing.assert_close(ours(tokens[:, :0], tokens), expected, atol=tolerance, rtol=tolerance)
    assert sum(p.numel() for p in ours.parameters()) == theirs.num_parameters()


@pytest.mark.parametrize(
    "change",
    [
        {"activation_function": "relu"},
        {"n_inner": 40},
        {"scale_attn_by_inverse_layer_idx": True},
        {"layer_norm_epsilon": 1e-6},
        {"tie_word_embeddings": False},
    ],
)
def test_unsupported_gpt2_configurations_are_refused(change):
    config = transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=1, n_head=4, n_positions=24, **change)
    with pytest.raises(UserError, match=f"{next(iter(change))} must be"):
        from_huggingface(transformers.GPT2LMHeadModel(config))


def test_gpt_reads_a_pair_as_one_sequence(batch):
    """The unpadded text `source EOS BOS target` has the same logits as the pair."""
    source, target_in = batch
    gpt = GPT(11, 16, 4, 2, max_length=20).eval()
    nn.init.normal_(gpt.positions.weight)
    pairs = gpt(source, target_in)
    for row in range(len(source)):
        S, T = int((source[row] != PAD).sum()), int((target_in[row] != PAD).sum())
        text = torch.cat((source[row, :S], target_in[row, :T]))[None]
        as_text = gpt(text[:, :0], text)
        torch.testing.assert_close(pairs[row, :T], as_text[0, S:], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("network", ["GPT", "GPT no_bias", "GPT rotary"], indirect=True)
def test_continuing_a_text_reads_the_context_that_fits(network):
    """Greedy decoding equals recomputation; at the last position, the second half of the context is read again."""
    network = type(network)(**network.hyper_parameters | {"max_length": 8}).eval()
    tokens = torch.tensor([[3, 4, 5]])
    more = continue_text(network.encode, network.decode_step, tokens, 20, 8)
    text = tokens
    while text.size(1) < 23:
        # the first nine tokens are read in full, then the last four and the next five, and so on
        begin = 5 * ((text.size(1) - 9) // 5 + 1) if text.size(1) > 8 else 0
        seen = text[:, begin:]
        with torch.no_grad():
            logits = network(seen[:, :0], seen)[:, -1].clone()
        logits[:, :3] = -math.inf
        text = torch.cat((text, logits.argmax(-1, keepdim=True)), dim=1)
    assert more.equal(text[:, 3:])
