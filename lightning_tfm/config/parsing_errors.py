"""One-line messages for errors in the parsing of a configuration."""

from __future__ import annotations

import ast
import difflib
import inspect
import re
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import pairwise, takewhile
from typing import Any

from lightning_tfm.config.arguments import SETTINGS
from lightning_tfm.config.trust import REPLACEMENTS, trusted, untrusted
from lightning_tfm.errors import UserError, nearest, synonyms

LIGHTNING_ERRORS = {
    "No supported gpu backend found": "trainer.accelerator must be available on this machine, but is gpu; try auto",
    r"`(\w+?)Accelerator` can not run": "trainer.accelerator must be available on this machine, but is {}; try auto",
    "Requirement 'torch_xla": "trainer.accelerator must be available on this machine, but is tpu; try auto",
    r"invalid accelerator name: `accelerator='(.*?)'`": "trainer.accelerator must be auto, cpu, gpu, cuda, mps or tpu, "
    "but is {}; try auto",
    r"invalid strategy name: `strategy='(.*?)'`": "trainer.strategy must be auto, ddp or fsdp, or be set by an overlay "
    "such as --config elastic, but is {}; try auto",
    "`devices` selected with": "trainer.devices must be a number of devices, but is not; try 1",
    r"`Timer\(duration='(.*?)'\)` is not": "trainer.max_time must be DD:HH:MM:SS, but is {}; try 00:01:00:00, an hour",
    r"`max_steps` must be a non-negative.* You passed in (-\d+)": "trainer.max_steps must be at least 1, but is {}; "
    "try 3000",
    r"Key must be a string, got: (.+)\.": "a setting must have a name, but one has the number {}; write decimals with "
    "a point",
    r"invalid value (\S+) for (limit_\w+)": "trainer.{1} must be a number of batches or a share from 0.0 to 1.0, but "
    "is {0}; leave it out",
}
"""Messages by regular expressions of Lightning's errors about settings of the Trainer."""

PACKAGES = {"data": "datamodules", "model": "lightning_tfm.tasks", "model.network": "lightning_tfm.networks"}
"""Packages with the classes of a setting, by setting."""

NOT_BASE = r"(?!lightning\.Callback')"
"""Regular expression that excludes the base class of callbacks, which the parser tries if a callback is rejected."""

TREE = re.compile(r"Does not validate|Subtypes:|Errors:|.*<class 'NoneType'>|Given value|Problem with given")
"""Lines of a parser error that locate the error instead of describing it."""

RULES = {
    r"Expected an? <class 'bool'>()": "true or false",
    r"Expected an? <class '(?:[\w.]+\.)?(?!bool')(\w+)'>": "of type {}",
    r"Expected a typing\.Literal\[(.*?)\]": "one of {}",
    r"()(?:subclass of|import path|unhashable|is not iterable|attribute 'keys')": "a class, such as "
    "{{class_path: PACKAGE.CLASS, init_args: {{NAME: VALUE}}}}",
    r"()Unable to load config|Unexpected config": "a mapping of settings, NAME: VALUE",
}
"""Regular expressions of parser errors, mapped to the requirement that the value violates."""


def format_error(error: BaseException, options: Iterable[str] = ()) -> str:
    """Format an error in the parsing of a configuration, given the names of the command's options, in one line.

    If the error or one of its causes is a UserError, its message is returned. Otherwise, the nested error of the parser
    is reduced to the setting, the rule of the innermost setting, and its value, with the closest name.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, UserError):
            return str(cause)
        cause = cause.__cause__ or cause.__context__
    text = re.sub(r"argument (--[\w-]+)/--\w+:", r"argument \1:", str(error))  # the option without its other spelling
    keys = list(dict.fromkeys(re.findall(r'Parser key "([^"]+)":', text)))
    setting, classes = ".".join(keys), re.findall(rf"Problem with given class_path '{NOT_BASE}([^']+)':", text)
    if denied := re.search(rf"Importing '{NOT_BASE}([\w.]+)' is not allowed", text):
        return untrusted(denied[1], setting)
    if unknown := re.search(r"(?:Group '(\w+)' does not accept o|does not accept o|O)ption '([^']+)'", text):
        name, colon, value = unknown[2].partition(":")
        if colon:
            return f"a setting must have a space after its colon, but is {unknown[2]!r}; try {name}: {value}"
        if classes:
            return _unknown(unknown[2], *_arguments(classes[-1], unknown[1]), setting)
        return _unknown(unknown[2], options)
    if setting == "trainer.callbacks" and "'lightning.Callback' is not allowed" in text:
        return f"{setting} must name a callback before its settings, but names none; try --{setting}+=EarlyStopping"
    if unknown := re.search(r"unrecognized arguments: (--)?([^\s=+]+)", text):
        if not unknown[1]:
            option = "config " if unknown[2].endswith((".yaml", ".yml")) else ""
            hint = f"; try --{option}{unknown[2]}" if option or unknown[2] in options else ""
            return f"an argument must be --SETTING VALUE, such as --config YAML, but is {unknown[2]!r}{hint}"
        return _unknown(unknown[2], options)
    if without_value := re.search(r"argument (?:\S+/)?(--\S+): expected one argument", text):
        name = without_value[1]
        for option, value in pairwise([*sys.argv, "--"]):  # the parser names only the first part, such as --data
            if option.startswith(f"{name}.") and "=" not in option and value.startswith("--"):
                name = option
        return f"{name} must have a value, but has none; add it, after = if it begins with -"
    if missing := re.search(r"arguments are required: (.+)", text):
        place = f"the init_args of {classes[-1]}" if classes else "a YAML file, and pass that with --config"
        return f"{re.sub(r'(fit|validate|test)[.]', '', missing[1])} must be set, but is missing; add it to {place}"
    if (memory := out_of_memory(text)) is not None:
        return memory
    for pattern, message in LIGHTNING_ERRORS.items():
        if match := re.search(pattern, text):
            return message.format(*match.groups())
    if kind := re.search(r"argument after \*\* must be a mapping, not (\w+)", text):  # the parser does not check this
        return f"settings such as model.lr_schedule must be {{NAME: VALUE}}, but are of type {kind[1]}"
    block = _innermost(text)
    reasons = [line for line in (line.strip(" -") for line in block.splitlines()) if line and not TREE.match(line)]
    rules = [
        rule.format(detail)
        for reason in reasons
        for pattern, rule in RULES.items()
        for detail in re.findall(pattern, reason)
    ]
    if not (keys and rules):  # of the constructor of a class, which may be an alternative to a string
        reasons = [reason for reason in reasons if not reason.startswith("Expected a <class 'str'>")] or reasons
        return ": ".join(filter(None, [setting, " ".join(reasons)]))
    value, hint = str(_value(block, text, keys[1:])), ""
    if value in REPLACEMENTS:
        hint = f"; try {REPLACEMENTS[value]}"
    elif value in ("True", "False") and "of type str" in rules:
        hint = "; in YAML, quote words such as no, yes, on and off"
    elif any("class_path" in rule for rule in rules):
        hint = _classes(setting, value, re.search(r"subclass of (\w+)", block), classes)
    elif "of type int" in rules and re.fullmatch(r"\d+\.0|\d+(,\d{3})+", value):  # such as 1e3, or 10,000
        hint = f"; try {value.removesuffix('.0').replace(',', '')}"
    elif value in ("inf", "-inf", "nan") and "of type float" in rules:
        rules = ["a finite number"]
    elif close := difflib.get_close_matches(value, re.findall(r"'([\w-]+)'", " ".join(rules)), 1):
        hint = f"; did you mean {close[0]!r}?"
    elif "of type float" in rules and re.fullmatch(r"\d+,\d+(e-?\d+)?", value):
        hint = f"; try {value.replace(',', '.')}"
    return f"{setting} must be {' or '.join(dict.fromkeys(rules))}, but is {value or 'empty'}{hint}"


def _classes(setting: str, value: str, base: re.Match[str] | None, owners: Sequence[str]) -> str:
    """Return the end of a message about a value that is not a class, or not one of a base class: those that are.

    Args:
        setting: the setting.
        value: its value.
        base: the match of the name of the base class; None if the parser does not name it.
        owners: the paths of the classes that have the setting, the innermost last.
    """
    classes = {path.rpartition(".")[2]: cls for path, cls in trusted().items() if not inspect.isabstract(cls)}
    if base is None:
        by_setting = {
            other: {name.lower(): name for name, cls in classes.items() if cls.__module__.startswith(package)}
            for other, package in PACKAGES.items()
        }
        of_setting = by_setting.get(setting) or {name.lower(): name for name in classes}
        if owners and of_setting.get(value.lower()) == value:  # a network that does not fit the model
            parameter = inspect.signature(trusted()[owners[-1]], eval_str=True).parameters[setting.rpartition(".")[2]]
            fitting = [name for name in of_setting.values() if issubclass(classes[name], parameter.annotation)]
            return f"; available: {', '.join(fitting)}"
        if close := difflib.get_close_matches(value.lower(), of_setting, 1, 0.5):
            return f"; did you mean {of_setting[close[0]]!r}?"
        if other := next((other for other, names in by_setting.items() if value.lower() in names), None):
            return f"; try --{other} {by_setting[other][value.lower()]}"
        return f"; available: {', '.join(sorted(of_setting.values()))}" if setting in PACKAGES else ""
    names = [name for name, cls in classes.items() if base[1] in (parent.__name__ for parent in cls.__mro__)]
    return f"; available: {', '.join(names)}"


def _innermost(text: str) -> str:
    """Return the part of a parser error that describes the innermost setting: the lines indented below it."""
    before, key, after = text.rpartition('Parser key "')
    if not key:
        return text
    line = before.rpartition("\n")[2]
    depth = len(line) - len(line.lstrip())
    first, *lines = after.partition('":')[2].split("\n")
    return "\n".join([first, *takewhile(lambda line: not line or len(line) - len(line.lstrip()) > depth, lines)])


def _value(block: str, text: str, names: Sequence[str]) -> Any:
    """Return the rejected value of the innermost setting, which may be part of the value of an outer setting."""
    pattern = re.compile(
        r"(?:(?:Got|Given) value:|path string:|load config) (?:NestedArg\(.*?, val=(.*)\)$|(.*?)(?:\. Got value:.*)?$)",
        re.M,
    )
    match = pattern.search(block) or pattern.search(text)
    shown = (match[1] or match[2]) if match else ""
    value: Any = shown
    with suppress(KeyError, SyntaxError, TypeError, ValueError):
        value = ast.literal_eval(shown)
        for name in names:
            value = value["init_args"][name]
    return shown if isinstance(value, tuple) else value  # a tuple is a number with a comma


def out_of_memory(message: str) -> str | None:
    """Return the message for a failed memory allocation in torch; None for any other error."""
    match = re.search(r"ried to allocate (\d+ bytes|[\d.]+ \w+)", message)
    return match and (
        f"the model and its batches must fit into memory, but {match[1]} for one tensor do not; lower the sizes of "
        "model.network, such as d_model, or data.batch_size"
    )


def _arguments(class_path: str, group: str | None) -> tuple[list[str], str]:
    """Return the arguments of a class that the parser has imported, or of the class of a group, and where they are."""
    module, _, name = class_path.rpartition(".")
    cls = getattr(sys.modules.get(module), name, object)
    if group:
        cls, class_path = type(inspect.signature(cls).parameters[group].default), f"{group} of {class_path}"
    return _names(cls), f" of {class_path}"


def _names(cls: type) -> list[str]:
    """Return the names of a constructor's arguments, with those of its base class if it passes `**settings` on."""
    names = list(inspect.signature(cls).parameters)
    return [*names, *_names(cls.__mro__[1])] if "settings" in names else names


def _unknown(name: str, names: Iterable[str], owner: str = "", setting: str = "") -> str:
    """Return the message for an unknown setting, with the closest name of a setting, or of a group of settings.

    Args:
        name: the name.
        names: the names of the settings that exist.
        owner: the end of a phrase with the class that has no such setting.
        setting: the setting whose value is of this class.
    """
    names = list(names)
    inside = [other for other in names if setting and synonyms(name, [f"{setting}.{other}"])]
    elsewhere = [other for other in synonyms(name, SETTINGS) if other != f"{setting}.{name}"]
    if inside or elsewhere:
        return f"there is no setting {name!r}{owner}; did you mean {[*inside, *elsewhere][0]!r}?"
    groups = {other.split(".")[0] for other in names}
    if (first := name.split(".")[0]) not in groups:
        settings = {} if owner else {other.rpartition(".")[2]: other for other in (*SETTINGS, *names, *groups)}
        if close := difflib.get_close_matches(name.replace("-", "_"), settings, n=1, cutoff=0.7):
            return f"there is no setting {name!r}{owner}; did you mean {settings[close[0]]!r}?"
        name, names = first, sorted(groups)
    return f"there is no setting {name!r}{owner}{nearest(name, names)}"
