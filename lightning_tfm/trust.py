"""Classes that a configuration may name: those listed here and those of packages named by `--allow`.

Users exchange configurations as data, but the classes that they name are imported and instantiated. The listed classes
do what an experiment needs: none starts a program or calls a function that a setting names.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any

from lightning_tfm.errors import UserError, untrusted

EXPORTED = ("lightning_tfm.modules", "lightning_tfm.networks", "lightning_tfm.callbacks", "datamodules")
"""Packages whose exported classes are trusted."""

CLASSES = {
    "lightning_tfm.loggers": ("TensorBoardLogger", "WandbLogger"),
    "lightning.pytorch.accelerators": ("CPUAccelerator", "CUDAAccelerator", "MPSAccelerator"),
    "lightning.pytorch.callbacks": (
        "DeviceStatsMonitor",
        "EarlyStopping",
        "LearningRateMonitor",
        "ModelCheckpoint",
        "ModelSummary",
        "OnExceptionCheckpoint",
        "RichModelSummary",
        "RichProgressBar",
        "TQDMProgressBar",
        "Timer",
    ),
    "lightning.pytorch.loggers": ("CSVLogger", "TensorBoardLogger"),
    "lightning.pytorch.plugins": (
        "DoublePrecision",
        "FSDPPrecision",
        "HalfPrecision",
        "MixedPrecision",
        "Precision",
        "TorchSyncBatchNorm",
    ),
    "lightning.pytorch.plugins.environments": ("LightningEnvironment", "SLURMEnvironment", "TorchElasticEnvironment"),
    "lightning.pytorch.profilers": ("AdvancedProfiler", "PyTorchProfiler", "SimpleProfiler"),
    "lightning.pytorch.strategies": ("DDPStrategy", "FSDPStrategy", "SingleDeviceStrategy"),
}
"""Trusted classes, by the package that exports them."""

ALLOW_HELP = "packages, installed or in the current folder, whose code is trusted too; on the command line only"


@cache
def trusted() -> dict[str, type]:
    """Return the trusted classes by every dotted path that imports them."""
    classes = {}
    for package, names in {**{name: import_module(name).__all__ for name in EXPORTED}, **CLASSES}.items():
        for name in names:
            cls = getattr(import_module(package), name)
            parts = cls.__module__.split(".")
            for module in (package, *(".".join(parts[:length]) for length in range(1, len(parts) + 1))):
                if getattr(sys.modules[module], name, None) is cls:
                    classes[f"{module}.{name}"] = cls
    return classes


def import_policy(allowed: Sequence[str]) -> dict[str, list[str]]:
    """Return jsonargparse's settings that let a configuration name the trusted classes and the allowed packages only.

    An entry of jsonargparse's lists holds for what it prefixes, so the attributes of a class are denied by name.
    """
    classes = trusted()
    attributes = [f"{path}.{name}" for path, cls in classes.items() for name in {*dir(cls), *dir(type(cls))}]
    return {"import_path_denylist": ["*", *attributes], "import_path_allowlist": [*classes, *allowed]}


def check_classes(settings: Any, allowed: Sequence[str], key: str = "", callables: bool = False) -> None:
    """Raise UserError if a parsed configuration holds a class that it may not name there.

    The parser refuses what it would import. This also checks values that the parser does not, such as arguments of any
    type, and refuses a network or a module as the value of a setting that takes a function.

    Args:
        settings: the configuration, or a part of it.
        allowed: the packages behind `--allow`.
        key: the name of the part.
        callables: whether the classes of the part may be callable, as networks and modules are.
    """
    if isinstance(settings, list | tuple):
        for value in settings:
            check_classes(value, allowed, key, callables)
    elif isinstance(settings, dict):
        if "class_path" in settings:
            path = str(settings["class_path"])
            if is_allowed(path, allowed):
                callables = True  # the package's own code says what its settings are for
            elif path not in trusted():
                raise UserError(untrusted(path, key))
            elif issubclass(trusted()[path], Callable) and not callables:
                raise UserError(
                    f"{key} must not be a callable class, but is {path!r}; "
                    "use a function of a package that --allow names"
                )
        for name, value in settings.items():
            check_classes(value, allowed, f"{key}.{name}".lstrip("."), callables or f"{key}.{name}" == ".model")


def is_allowed(path: str, allowed: Sequence[str]) -> bool:
    """Return whether a dotted path is of a package or module that `--allow` names."""
    return any(f"{path}.".startswith(f"{name}.") for name in allowed)


def import_allowed(path: str, allowed: Sequence[str], owner: str) -> Any:
    """Import what a dotted path names, from installed packages or the current folder.

    Args:
        path: the dotted path.
        allowed: the packages behind `--allow`.
        owner: what names the path, for the message.

    Raises:
        UserError: if it is not of an allowed package, or cannot be imported.
    """
    if not is_allowed(path, allowed):
        raise UserError(untrusted(path, owner))
    search_current_folder()
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except (AttributeError, ImportError, ValueError) as error:
        raise UserError(f"{owner} names {path!r}, which cannot be imported: {error}") from None


def search_current_folder() -> None:
    """Let Python import the packages of the current folder, after all others."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def allowed_packages(text: str) -> list[str]:
    """Return the packages and modules that a value of `--allow` names, as an argument's type of argparse.

    Raises:
        ArgumentTypeError: if one is not a dotted name.
    """
    names = [name for name in text.split(",") if name]
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")) or name.split(".")[0] == "jsonargparse":
            raise ArgumentTypeError(f"must be names of packages, separated by commas, but has {name!r}; try my_package")
    return names
