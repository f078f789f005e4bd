"""Networks in plain PyTorch."""

from lightning_tfm.networks.attention_lstm import AttentionLSTM
from lightning_tfm.networks.encoder_classifier import EncoderClassifier
from lightning_tfm.networks.ensemble import Ensemble as Ensemble  # not in __all__, which lists networks to train
from lightning_tfm.networks.gpt import GPT
from lightning_tfm.networks.linear_transformer import LinearTransformer
from lightning_tfm.networks.masked_encoder import MaskedEncoder
from lightning_tfm.networks.network import CausalNetwork, Network, Seq2SeqNetwork
from lightning_tfm.networks.transformer import Transformer

__all__ = [
    "GPT",
    "AttentionLSTM",
    "CausalNetwork",
    "EncoderClassifier",
    "LinearTransformer",
    "MaskedEncoder",
    "Network",
    "Seq2SeqNetwork",
    "Transformer",
]
