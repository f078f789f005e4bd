"""Loading of a trained model from a checkpoint."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from lightning_tfm import modules, networks
from lightning_tfm.checkpoint import read
from lightning_tfm.errors import UserError
from lightning_tfm.modules import TaskModule
from lightning_tfm.networks import Network
from lightning_tfm.tokenization import tokenizer_from_dict
from lightning_tfm.trust import import_trusted

Class = TypeVar("Class")


def load(path: str | Path, trust_packages: Sequence[str] = ()) -> TaskModule:
    """Load the trained model of a checkpoint, in evaluation mode on the CPU.

    Args:
        path: the path of the checkpoint.
        trust_packages: trusted packages, installed or in the current folder, from which the classes of the network and
            the module may be imported.

    Raises:
        UserError: if the file is damaged or not a checkpoint of lightning_tfm, or if a class of the model belongs
            neither to lightning_tfm nor to a trusted package.
    """
    checkpoint = read(path)
    saved = dict(checkpoint["hyper_parameters"])
    network_class = _import_class(saved["network"]["class_path"], networks, Network, path, trust_packages)
    module_class = _import_class(saved.pop("class_path"), modules, TaskModule, path, trust_packages)
    try:
        network = network_class(**saved.pop("network")["init_args"])
        tokenizer = tokenizer_from_dict(saved.pop("tokenizer"))
        del saved["optimizer"], saved["lr_schedule"]
        module = module_class(network, tokenizer, **saved)
        module.load_state_dict(checkpoint["state_dict"])
        module.longest_source = checkpoint.get("longest_source")
        module.alignment_head = checkpoint.get("alignment_head")
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
        raise UserError(
            f"the weights of {str(path)!r} must fit its own hyper-parameters, but do not; "
            "it is damaged, or from another version of lightning_tfm"
        ) from None
    return module.eval()


def _import_class(
    name: Any, package: ModuleType, base: type[Class], path: str | Path, trust_packages: Sequence[str]
) -> type[Class]:
    """Import a class named in a checkpoint.

    Args:
        name: the dotted path of the class.
        package: the package whose exported classes are always trusted.
        base: the required base class.
        path: the path of the checkpoint, for error messages.
        trust_packages: the trusted packages.

    Raises:
        UserError: if the class is not trusted, abstract or not derived from `base`.
    """
    name = str(name)
    known = {f"{cls.__module__}.{cls.__qualname__}": cls for cls in map(vars(package).__getitem__, package.__all__)}
    cls = known.get(name) or import_trusted(name, trust_packages, f"the checkpoint {str(path)!r}")
    if not (inspect.isclass(cls) and issubclass(cls, base)) or inspect.isabstract(cls):
        raise UserError(f"{str(path)!r} must name a class that derives from {base.__name__}, but names {name!r}")
    return cls
