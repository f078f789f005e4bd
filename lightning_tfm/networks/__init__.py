"""The networks, in plain PyTorch."""

from lightning_tfm.networks.attention_lstm import AttentionLSTM
from lightning_tfm.networks.encoder_classifier import EncoderClassifier
from lightning_tfm.networks.gpt import GPT
from lightning_tfm.networks.network import Network, Seq2SeqNetwork
from lightning_tfm.networks.transformer import Transformer

__all__ = ["GPT", "AttentionLSTM", "EncoderClassifier", "Network", "Seq2SeqNetwork", "Transformer"]
