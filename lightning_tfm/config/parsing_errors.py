"""One-line messages for errors in the parsing of a configuration."""

from __future__ import annotations

import difflib
import inspect
import re
import sys
from argparse import ArgumentError
from collections.abc import Iterable
from importlib import import_module
from typing import Any, get_type_hints

from lightning_tfm.errors import UserError

CLOSE = 0.5
"""Cutoff of `difflib.get_close_matches` for suggested names."""
CLASS = "{class_path: PACKAGE.CLASS, init_args: {NAME: VALUE}}"
"""Syntax of a class in a configuration."""

DASHED = ("dry_run", "skip_test", "trust_package")
"""Settings whose options are written with a dash."""

INSTEAD = {
    "BatchSizeFinder": "lightning-tfm plan, which estimates the memory for data.batch_size",
    "GradientAccumulationScheduler": "trainer.accumulate_grad_batches",
    "LearningRateFinder": "lightning-tfm sweep, which can search model.optimizer.lr",
    "StochasticWeightAveraging": "lightning_tfm.callbacks.WeightAveraging",
    "TensorBoardLogger": "lightning_tfm.loggers.TensorBoardLogger",
    "WandbLogger": "lightning_tfm.loggers.WandbLogger",
}
"""Replacements of classes of Lightning, by name."""

MISTAKES = {
    r"^Expected a path but (.*) either not accessible or invalid Unexpected import path format": (
        f" must be the name of a class, such as {CLASS}, but is \\1"
    ),
    r"^(?:Unexpected config:|Unable to load config) (\S.*?)(?:  |$)": " must be settings, {NAME: VALUE}, but is \\1",
    r"unhashable type: '(\w+)'|argument of type '(\w+)' is not iterable": (
        f".class_path must be the name of a class, such as {CLASS}, but is of type \\1\\2"
    ),
    r"'(\w+)' object has no attribute 'keys'": (
        f".init_args must be a mapping of settings, such as {CLASS}, but is of type \\1"
    ),
}
"""Replacements for messages of the parser, by pattern; they follow the name of the setting."""


def format_error(error: BaseException, accepted: Iterable[str] = ()) -> str:
    """Format an error in the parsing of a configuration as a message of one line.

    If the error or one of its causes is a UserError, its message is returned. Otherwise, the nested error of the
    parser is reduced to the setting, its class and the innermost reason, with the closest accepted name for an unknown
    name.

    Args:
        error: the error.
        accepted: the full names of the settings accepted at the top level of a configuration.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, UserError):
            return str(cause)
        cause = cause.__cause__ or cause.__context__

    noise = ("Does not validate", "Subtypes:", "Errors:", "Expected a <class 'NoneType'>", "Given value")
    lines = (line.strip(" -") for line in str(error).splitlines())
    reasons = [line for line in lines if line and not line.startswith(noise)]
    # The parser also tries whether a class is a name, such as a strategy.
    text = " ".join([line for line in reasons if not line.startswith("Expected a <class 'str'>")] or reasons)
    settings = list(dict.fromkeys(re.findall(r'Parser key "([^"]+)":', text)))
    classes = re.findall(r"Problem with given class_path '([^']+)':", text)
    reason = re.sub(r"Parser key \"[^\"]+\":|Problem with given class_path '[^']+':", "", text).strip()
    reason = reason.replace("NoneType", "null")
    setting = "--config" if settings in ([], ["config"]) else ".".join(settings)

    if denied := re.search(r"Importing '([\w.]+)' is not allowed", reason):
        return untrusted(denied[1], ".".join(settings))
    if classes and (group := re.search(r"Group '(\w+)' does not accept option '(\w+)'", reason)):
        owner = _type_of(_imported(classes[-1]), group[1]) or object
        return _unknown(group[2], _arguments_of(owner), f"{owner.__module__}.{owner.__qualname__}")
    if option := re.search(r"does not accept option '([\w.]+)'|Option '([\w.]+)' is not accepted", reason):
        name = option[1] or option[2]
        return (
            _unknown(name, _arguments_of(_imported(classes[-1])), classes[-1]) if classes else _unknown(name, accepted)
        )
    if option := re.search(r"unrecognized arguments: (--)?(\S+)", reason):
        if option[1]:
            options = [name.replace("_", "-") if name in DASHED else name for name in accepted]
            return _unknown(option[2].partition("=")[0].removesuffix("+"), options)
        return f"an argument must be --SETTING VALUE, such as --config YAML, but is {option[2]!r}; name its setting"
    if missing := re.search(r"arguments are required: (\w+(?:[.,] ?\w+)*)", reason):
        names = re.sub(r"\b(fit|validate|test)\.", "", missing[1])
        where = f"the init_args of {classes[-1]}" if classes else "a YAML file, and pass that with --config"
        return f"{names} must be set, but {'are' if ',' in names else 'is'} missing; add it to {where}"
    if isinstance(error, ArgumentError):
        for pattern, message in MISTAKES.items():
            if found := re.search(pattern, reason):
                return setting + found.expand(message)
    path = re.search(r"Import path ([\w.]+) does not correspond to a subclass|dot import path string: (\S+)", reason)
    if classes and settings and path:
        owner = _imported(classes[-1])
        base = _type_of(owner, settings[-1])
        if inspect.isclass(base) and base.__module__.startswith("lightning_tfm."):
            return (
                f"{setting} of {classes[-1]} must be {' or '.join(concrete(base))}, "
                f"but is {(path[1] or path[2]).rpartition('.')[2]}"
            )
    if (failed := out_of_memory(reason)) is not None:
        return failed
    if reason == "No supported gpu backend found!":
        return "trainer.accelerator must be available on this machine, but is gpu; try auto"
    if kind := re.search(r"argument after \*\* must be a mapping, not (\w+)", reason):  # the parser does not check this
        return f"settings such as model.init_args.lr_schedule must be {{NAME: VALUE}}, but are of type {kind[1]}"
    missing = re.search(r"module '([\w.]+)' has no attribute '(\w+)'", reason)
    if missing and missing[1] in sys.modules:
        return _no_attribute(*missing.groups())
    if setting == "trainer.logger" and (name := next((name for name in INSTEAD if name in str(error)), None)):
        return f"trainer.logger must name a class by its import path; try {INSTEAD[name]}"
    return f"{setting}: {_mismatch(str(error)) or reason}" if settings else reason


def out_of_memory(message: str) -> str | None:
    """Return the message for a failed memory allocation in torch; None for any other error."""
    if found := re.search(r"you tried to allocate (\d+) bytes", message):
        needed = f"{int(found[1]) / 1e9:,.1f} GB"
    elif found := re.search(r"out of memory\. Tried to allocate ([\d.]+ \w+)", message):
        needed = found[1]
    else:
        return None
    return (
        f"the model and its batches must fit into memory, but {needed} for one tensor do not; "
        "lower the sizes of model.network, such as d_model, or data.batch_size"
    )


def _mismatch(text: str) -> str | None:
    """Return the message for a value of a wrong type, with the types that the parser tried; None if there is none."""
    tried = re.compile(
        r"Expected an? <class '(?:[\w.]+\.)?(?!NoneType)(\w+)'>|Expected a typing\.Literal\[(.*?)\]"
        r"|(subclass of \w|dot import path)"
    )
    kinds: dict[str, None] = {}
    depth = 0
    for line in text.splitlines():
        indentation = len(line) - len(line.lstrip(" -"))
        if "Parser key" in line:  # a nested setting: the types tried for the outer settings are irrelevant
            kinds, depth = {}, indentation
        for of_type, choices, of_class in tried.findall(line):
            kind = f"a class, such as {CLASS}" if of_class else f"one of {choices}" if choices else f"of type {of_type}"
            kinds[kind] = None
        value = re.search(
            r"Got value: (.*)$|path string: (.*)$|Given value: NestedArg\(key='[\w.]+', val=(.*)\)$", line
        )
        if value is None and indentation >= depth:  # otherwise, the value of an outer setting
            value = re.search(r"Given value: (.*)$", line)
        if kinds and value and value.lastindex:
            given = value[value.lastindex]
            is_class = any(kind.startswith("a class") for kind in kinds)
            meant = difflib.get_close_matches(given, _trusted_classes(), n=1, cutoff=CLOSE) if is_class else []
            suggestion = f"; did you mean {meant[0]!r}?" if meant else ""
            if "of type str" in kinds and given in ("True", "False"):
                suggestion = "; in YAML, quote words such as no, yes, on and off"
            return f"must be {' or '.join(kinds)}, but is {given or 'empty'}{suggestion}"
    return None


def _trusted_classes() -> list[str]:
    """Return the names of the classes of data modules, tasks and networks."""
    packages = [import_module(name) for name in ("datamodules", "lightning_tfm.tasks", "lightning_tfm.networks")]
    return [name for package in packages for name in package.__all__]


def untrusted(path: str, owner: str) -> str:
    """Return the message for a class or function that is not allowed without `--trust-package`.

    Args:
        path: the dotted name.
        owner: the setting or the checkpoint that contains the name.
    """
    module, _, name = path.rpartition(".")
    if name in INSTEAD:
        return f"{owner or 'a configuration'} must not name {path!r}; try {INSTEAD[name]}"
    misspelt = module in sys.modules and name not in vars(sys.modules[module])
    if misspelt and difflib.get_close_matches(name, _classes_of(module), n=1, cutoff=CLOSE):
        return _no_attribute(module, name)
    return (
        f"{owner or 'a configuration'} must name only classes listed in lightning_tfm/config/trust.py, but names "
        f"{path!r}, which is not imported; if you trust its code: --trust-package {module or path}"
    )


def concrete(base: type) -> list[str]:
    """Return the names of the concrete subclasses of a class that its package exports."""
    package = sys.modules[base.__module__.rpartition(".")[0]]
    classes = {name: getattr(package, name) for name in package.__all__}
    return [name for name, cls in classes.items() if issubclass(cls, base) and not inspect.isabstract(cls)]


def _unknown(name: str, names: Iterable[str], owner: str = "") -> str:
    """Return the message for an unknown setting, with the closest known name."""
    names = list(names)
    first = name.split(".")[0]
    groups = {other.split(".")[0] for other in names}
    if first not in groups:  # the group is misspelled: propose a group
        name, names = first, sorted(groups)
    return f"there is no setting {name!r}{f' of {owner}' if owner else ''}{nearest(name, names)}"


def _no_attribute(module: str, name: str) -> str:
    """Return the message for a missing attribute of an imported module, with the closest class."""
    return f"module {module!r} has no attribute {name!r}{nearest(name, _classes_of(module))}"


def _classes_of(module: str) -> list[str]:
    return [name for name, value in vars(sys.modules[module]).items() if inspect.isclass(value)]


def nearest(name: str, names: list[str]) -> str:
    """Return the end of a message about an unknown name: the closest known name, or all of them."""
    close = difflib.get_close_matches(name, names, n=1, cutoff=CLOSE)
    return f"; did you mean {close[0]!r}?" if close else f"; available: {', '.join(names)}"


def _type_of(owner: type, argument: str) -> Any:
    """Return the type of a constructor's argument; None if it has no annotation, or one only for type checkers."""
    try:
        return get_type_hints(owner.__init__).get(argument)  # type: ignore[misc]  # only its annotations are read
    except NameError:
        return None


def _imported(class_path: str) -> type:
    """Return a class without importing its module, since its name is user input; `object` if it is not imported."""
    module, _, name = class_path.rpartition(".")
    found = getattr(sys.modules.get(module), name, object)
    return found if inspect.isclass(found) else object


def _arguments_of(cls: type) -> list[str]:
    """Return the names of a constructor's arguments, with those of its base class if it passes `**settings` on."""
    names = list(inspect.signature(cls).parameters)
    return [*names, *_arguments_of(cls.__mro__[1])] if "settings" in names else names
