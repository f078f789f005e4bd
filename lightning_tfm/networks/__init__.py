"""The networks, in plain PyTorch."""

from lightning_tfm.networks.attention_lstm import AttentionLSTM
from lightning_tfm.networks.gpt import GPT
from lightning_tfm.networks.network import Network
from lightning_tfm.networks.transformer import Transformer

__all__ = ["GPT", "AttentionLSTM", "Network", "Transformer"]
