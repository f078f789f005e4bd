"""Short training in this process."""

import lightning

from datamodules import Copy
from lightning_tfm.networks import GPT, AttentionLSTM, Transformer
from lightning_tfm.tasks import Seq2SeqModule

MODELS = {
    "transformer": lambda vocab_size: Transformer(vocab_size, 16, 2, 1, 32, dropout=0.0, max_length=24),
    "gpt": lambda vocab_size: GPT(vocab_size, 16, 2, 1, max_length=48),
    "attention_lstm": lambda vocab_size: AttentionLSTM(vocab_size, 16),
}


def small_copy(**settings):
    return Copy(**{"train_size": 64, "val_size": 10, "test_size": 10, "longer_size": 10, "batch_size": 64} | settings)


def make_module(data, model="transformer", **settings):
    return Seq2SeqModule(MODELS[model](data.vocab_size), data.tokenizer, data.max_target_length, **settings)


def make_trainer(**settings):
    return lightning.Trainer(
        **{
            "accelerator": "cpu",
            "max_steps": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "limit_val_batches": 0,
        }
        | settings
    )
