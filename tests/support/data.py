"""Small generated data of all kinds."""

import inspect
from functools import partial

import datamodules
from lightning_tfm.data import GeneratedDataModule

SIZES = {"train_size": 300, "val_size": 40, "test_size": 60, "longer_size": 20, "unseen_size": 20}


def small(cls):
    """Return a constructor of a data module with few pairs in each split."""
    return partial(cls, **{name: size for name, size in SIZES.items() if name in inspect.signature(cls).parameters})


CLASSES = [getattr(datamodules, name) for name in datamodules.__all__]
DATA = {cls.__name__: small(cls) for cls in CLASSES if issubclass(cls, GeneratedDataModule)}


def set_up(data):
    """Prepare a data module for training, and return it."""
    data.setup("fit")
    return data


def split_texts(data, name="the text"):
    """Return each split of a text of a data module of characters."""
    return {split: data.tokenizer.decode(data.tokens.ids(split, name).tolist()) for split in data.tokens.splits}
