"""Classes allowed in a configuration: those listed here, and all classes of packages in `--trust-package`.

Users exchange configurations as data, but the classes named in them are imported and instantiated. The listed classes
suffice for experiments, and none of them starts a program or calls a function named by a setting.
"""

from __future__ import annotations

import difflib
import inspect
import os
import re
import sys
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

from lightning_tfm.errors import UserError

EXPORTED = ("lightning_tfm.tasks", "lightning_tfm.networks", "lightning_tfm.callbacks", "datamodules")
"""Packages whose exported classes are trusted."""

CLASSES = {
    "lightning_tfm.networks.ensemble": "Ensemble",
    "lightning_tfm.loggers": "TensorBoardLogger WandbLogger",
    "lightning_tfm.optimizers": "AdamW LRSchedule Muon",
    "lightning_tfm.distributed.strategies": "Elastic ModelParallel",
    "torch.optim": "ASGD Adadelta Adafactor Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD",
    "lightning.pytorch.accelerators": "CPUAccelerator CUDAAccelerator MPSAccelerator",
    "lightning.pytorch.callbacks": "DeviceStatsMonitor EarlyStopping LearningRateMonitor ModelCheckpoint ModelSummary "
    "OnExceptionCheckpoint RichModelSummary RichProgressBar TQDMProgressBar Timer",
    "lightning.pytorch.loggers": "CSVLogger",
    "lightning.pytorch.plugins": "DoublePrecision FSDPPrecision HalfPrecision MixedPrecision Precision "
    "TorchSyncBatchNorm",
    "lightning.pytorch.plugins.environments": "LightningEnvironment SLURMEnvironment TorchElasticEnvironment",
    "lightning.pytorch.profilers": "AdvancedProfiler PyTorchProfiler SimpleProfiler",
    "lightning.pytorch.strategies": "DDPStrategy FSDPStrategy SingleDeviceStrategy",
}
"""Names of the trusted classes, by the package that exports them."""

REPLACEMENTS = {
    "BatchSizeFinder": "lightning-tfm plan, which estimates the memory for data.batch_size",
    "GradientAccumulationScheduler": "trainer.accumulate_grad_batches",
    "LearningRateFinder": "lightning-tfm sweep, which can search model.optimizer.lr",
    "StochasticWeightAveraging": "lightning_tfm.callbacks.WeightAveraging",
    "TensorBoardLogger": "lightning_tfm.loggers.TensorBoardLogger",
    "WandbLogger": "lightning_tfm.loggers.WandbLogger",
}
"""Replacements of classes of Lightning that are not trusted, by name."""

ADDRESS = re.compile(r"[\w+.-]+(://|::)")
"""Start of an address, from which Lightning would read, or to which it would write, over the network."""

TRUST_HELP = "additional packages to trust, installed or in the current folder; on the command line only"


@cache
def trusted() -> dict[str, type]:
    """Return the trusted classes by each of their import paths."""
    classes = {}
    exported = {package: import_module(package).__all__ for package in EXPORTED}
    for package, names in (exported | {package: names.split() for package, names in CLASSES.items()}).items():
        for name in names:
            cls: type = getattr(import_module(package), name)
            parts = cls.__module__.split(".")
            for module in (package, *(".".join(parts[:length]) for length in range(1, len(parts) + 1))):
                if getattr(sys.modules[module], name, None) is cls:
                    classes[f"{module}.{name}"] = cls
    return classes


def untrusted(path: str, owner: str) -> str:
    """Return the message for the dotted name of a class or function that is not trusted.

    The owner is the setting or the checkpoint that contains the name; empty if it is not known.
    """
    module, _, name = path.rpartition(".")
    owner = owner or "a configuration"
    if name in REPLACEMENTS:
        return f"{owner} must not name {path!r}; try {REPLACEMENTS[name]}"
    if owner == "data" and os.path.isfile(path):
        return f"data must be a class, but is the file {path!r}; name it in a setting, such as --data.train {path}"
    members = vars(sys.modules[module]) if module in sys.modules else {}
    close = difflib.get_close_matches(name, [other for other in members if inspect.isclass(members[other])], n=1)
    if close and name not in members:
        return f"{owner} must name a class of {module}, which has no {name!r}; did you mean {close[0]!r}?"
    return (
        f"{owner} must name only classes listed in lightning_tfm/config/trust.py, but names {path!r}, which is not "
        f"imported; if you trust its code: --trust-package {module or path}"
    )


def import_policy(trust_packages: Sequence[str]) -> dict[str, Any]:
    """Return the jsonargparse settings that restrict a configuration to trusted classes and packages.

    An entry in the lists of jsonargparse also matches all names that it prefixes, so the attributes of a class are
    denied by name.
    """
    classes = trusted()
    attributes = [f"{path}.{name}" for path, cls in classes.items() for name in {*dir(cls), *dir(type(cls))}]
    return {"import_path_denylist": ["*", *attributes], "import_path_allowlist": [*classes, *trust_packages]}


def check_classes(settings: Any, trust_packages: Sequence[str], key: str = "", callables: bool = False) -> None:
    """Check that a parsed configuration only names classes that are allowed at their place, and local files.

    The parser rejects untrusted classes that it would import. This function also checks values that the parser does
    not, such as arguments of any type, and rejects a network or a task as the value of a setting that takes a function,
    unless `callables` is set.

    Raises:
        UserError: if a class is not allowed, a text is an address, or an integer is beyond 64 bits.
    """
    if isinstance(settings, str) and ADDRESS.match(settings) and not key.endswith(".notes"):
        raise UserError(
            f"{key} must not begin with an address, but is {settings!r}; download it, and name the local file"
        )
    if isinstance(settings, int) and abs(settings) >= 2**63:
        raise UserError(f"{key} must be between -2**63 and 2**63, but is not; try a smaller number")
    if isinstance(settings, list | tuple):
        for value in settings:
            check_classes(value, trust_packages, key, callables)
    elif isinstance(settings, dict):
        if "class_path" in settings:
            path = str(settings["class_path"])
            if is_trusted(path, trust_packages):
                callables = True  # the package decides how its settings are used
            elif path not in trusted():
                raise UserError(untrusted(path, key))
            elif issubclass(trusted()[path], Callable) and not callables:  # type: ignore[arg-type]  # an ABC
                raise UserError(
                    f"{key} must not be a callable class, but is {path!r}; "
                    "use a function of a package that --trust-package names"
                )
        for name, value in settings.items():
            check_classes(value, trust_packages, f"{key}.{name}".lstrip("."), callables or f"{key}.{name}" == ".model")


def is_trusted(path: str, trust_packages: Sequence[str]) -> bool:
    """Return whether a dotted path is in a package or module in `--trust-package`."""
    return any(f"{path}.".startswith(f"{name}.") for name in trust_packages)


def import_trusted(path: str, trust_packages: Sequence[str], owner: str) -> Any:
    """Import the object with a dotted path, which the owner contains, from installed packages or the current folder.

    Raises:
        UserError: if the object is not in a trusted package, or cannot be imported.
    """
    if not is_trusted(path, trust_packages):
        raise UserError(untrusted(path, owner))
    search_current_folder(trust_packages)
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except (AttributeError, ImportError, ValueError) as error:
        raise UserError(f"{owner} names {path!r}, which cannot be imported: {error}") from None


@dataclass(frozen=True)
class CurrentFolder:
    """Finder of the trusted packages in a folder, and of no other module there, for `sys.meta_path`."""

    path: str
    names: frozenset[str]

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        """Return the specification of a package in the folder if it is trusted, and None otherwise."""
        return PathFinder.find_spec(name, [self.path]) if name in self.names else None


def search_current_folder(trust_packages: Sequence[str]) -> None:
    """Import trusted packages from the current folder unless they are installed."""
    finder = CurrentFolder(os.getcwd(), frozenset(name.split(".")[0] for name in trust_packages))
    if finder not in sys.meta_path:
        sys.meta_path.append(finder)


def trusted_packages() -> list[str]:
    """Return the packages named by `--trust-package`, which must be known before a configuration is parsed."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--trust-package", "--trust_package", type=package_names, default=[])
    options, _ = parser.parse_known_args(sys.argv[1:])
    return options.trust_package


def package_names(text: str) -> list[str]:
    """Parse the names of packages and modules, separated by commas, as an argument type for argparse."""
    names = [name for name in text.split(",") if name]
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")) or name.split(".")[0] == "jsonargparse":
            raise ArgumentTypeError(f"must be names of packages, separated by commas, but has {name!r}; try my_package")
    return names
