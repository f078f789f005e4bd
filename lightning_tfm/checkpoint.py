"""Reading a checkpoint: as data, never as code, and with a clear word where it does not fit."""

from __future__ import annotations

from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from lightning_tfm import networks
from lightning_tfm.errors import UserError
from lightning_tfm.networks import Network
from lightning_tfm.tokenizer import Tokenizer

PREFIX = "network."
"""What the names of a network's weights begin with in a LightningModule's checkpoint."""


def read(path: str | Path) -> dict[str, Any]:
    """A checkpoint's content, on the CPU: plain values and tensors only.

    Raises:
        UserError: if there is no such file, or it is no checkpoint of lightning_tfm.
    """
    path = Path(path)
    if path.is_dir():
        raise UserError(
            f"the checkpoint must be a file, but {str(path)!r} is a folder; try {str(path / 'best.ckpt')!r}"
        )
    if not path.is_file():
        raise UserError(f"there is no checkpoint {str(path)!r}; train one with: lightning-tfm fit --config YAML")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        checkpoint["state_dict"], checkpoint["hyper_parameters"]["network"]["class_path"]
    except (UnpicklingError, RuntimeError, EOFError, OSError, AttributeError, LookupError, TypeError, ValueError):
        raise UserError(f"{str(path)!r} must be a checkpoint of lightning_tfm, but cannot be read as one") from None
    return checkpoint


def load(path: str | Path) -> tuple[Network, Tokenizer, int]:
    """The trained network in evaluation mode, its tokenizer, and where its answers end at the latest, in tokens.

    Raises:
        UserError: as `read`, and if the network is none of lightning_tfm.networks.
    """
    checkpoint = read(path)
    saved = checkpoint["hyper_parameters"]
    known = {f"{cls.__module__}.{cls.__qualname__}": cls for cls in map(vars(networks).get, networks.__all__)}
    cls = known.get(saved["network"]["class_path"])
    if cls is None or cls is Network:
        raise UserError(
            f"the network of {str(path)!r} must be one of {', '.join(networks.__all__)}, but is "
            f"{saved['network']['class_path']!r}; export yours from lightning_tfm/networks/__init__.py"
        )
    weights = checkpoint["state_dict"].items()
    try:
        network = cls(**saved["network"]["init_args"])
        network.load_state_dict({key.removeprefix(PREFIX): value for key, value in weights if key.startswith(PREFIX)})
        return network.eval(), Tokenizer(**saved["tokenizer"]), saved["max_target_length"]
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
        raise UserError(
            f"the weights of {str(path)!r} must fit its own hyper-parameters, but do not; "
            "it is damaged, or of another version of lightning_tfm"
        ) from None


def check_fits(path: str | Path, hyper_parameters: dict[str, Any]) -> None:
    """Raises UserError, naming the first difference, unless a checkpoint is of this network and vocabulary."""
    saved = read(path)["hyper_parameters"]
    pairs = [("class_path", saved["network"]["class_path"], hyper_parameters["network"]["class_path"])]
    ours, theirs = hyper_parameters["network"]["init_args"], saved["network"]["init_args"]
    pairs += [(name, theirs.get(name), ours.get(name)) for name in {**theirs, **ours} if name != "vocab_size"]
    for name, their, our in pairs:
        if their != our:
            raise UserError(
                f"{name} must be that of the checkpoint {str(path)!r} ({their}), but is {our}; use its config.yaml"
            )
    their_symbols, our_symbols = (h["tokenizer"]["symbols"] for h in (saved, hyper_parameters))
    if saved["tokenizer"] != hyper_parameters["tokenizer"]:
        raise UserError(
            f"the vocabulary must be that of the checkpoint {str(path)!r} ({len(their_symbols)} symbols), but the "
            f"data's has {len(our_symbols)} symbols and is another one; use the data it was trained on"
        )
