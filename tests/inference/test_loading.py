"""Loading checkpoints from folders."""

from __future__ import annotations

import pytest

import lightning_tfm
from lightning_tfm import UserError


def test_a_folder_is_refused_with_the_checkpoint_in_it(reference):
    run = reference("gpt") / "runs/copy_gpt/version_0"
    for path in (run, run / "checkpoints"):
        with pytest.raises(UserError, match=rf"{path}' is a folder; try '{run}/checkpoints/best.ckpt'"):
            lightning_tfm.load(path)
