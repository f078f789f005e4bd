"""Small generated data of all kinds."""

from __future__ import annotations

from datamodules import Copy, Date, DateWorld, ToyTranslation

DATA = {
    "copy": lambda **settings: Copy(
        **{"train_size": 300, "val_size": 40, "test_size": 60, "longer_size": 20} | settings
    ),
    "date": lambda **settings: Date(**{"train_size": 300, "val_size": 40, "test_size": 60} | settings),
    "date_world": lambda **settings: DateWorld(
        **{"train_size": 300, "val_size": 40, "test_size": 60, "unseen_size": 20} | settings
    ),
    "toy_translation": lambda **settings: ToyTranslation(
        **{"train_size": 300, "val_size": 40, "test_size": 60} | settings
    ),
}
