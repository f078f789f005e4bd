"""What a command tells its user: a line beside its output, a mistake that ends it, a signal that does."""

from __future__ import annotations

import difflib
import inspect
import os
import re
import shlex
import sys
from argparse import ArgumentError
from collections.abc import Iterable
from types import FrameType
from typing import Any, NoReturn, get_type_hints

CLOSE = 0.5
"""The least similarity of a name that an error message proposes, by difflib."""
CLASS = "{class_path: PACKAGE.CLASS, init_args: {NAME: VALUE}}"
"""Form of a class in a configuration."""

MISTAKES = {
    r"^File (does not exist|is not readable): ('.*')": r" must name a YAML file, but \2 \1; name another",
    r"^Path is not a file: ('.*')": r" must name a YAML file, but \1 is a folder; name a file in it",
    r"^Unexpected config:$": " must name a YAML, but is empty",
    r"Invalid content in sub-config file (\S+): (.*?) in \"<unicode string>\", (line \d+)": (
        r" must name a valid YAML, but \3 of '\1' is not: \2"
    ),
    r"^'utf-8' codec can't decode (byte \w+ in position \d+)": r" must name a file in UTF-8, but \1 is not; save it so",
    r"^(?:Unexpected config:|Unable to load config) (\S.*?)(?:  |$)": " must be settings, {NAME: VALUE}, but is \\1",
    r"unhashable type: '(\w+)'|argument of type '(\w+)' is not iterable": (
        f".class_path must be the name of a class, as {CLASS}, but is of type \\1\\2"
    ),
    r"'(\w+)' object has no attribute 'keys'": (
        f".init_args must be a mapping of settings, as {CLASS}, but is of type \\1"
    ),
}
"""Patterns of the messages of the parser, and the text that replaces each after the name of the setting."""


class UserError(ValueError):
    """What the user can mend. The message names the setting, the rule, the value and the mend, in one line."""


class Interrupted(BaseException):
    """A signal has ended the work.

    Args:
        signum: the signal.
        saved_step: the step that was saved, where the signal has waited for it.
        ckpt_path: what to give for --ckpt_path to go on from there.
    """

    def __init__(self, signum: int, saved_step: int | None = None, ckpt_path: str = "last") -> None:
        super().__init__(signum)
        self.signum, self.saved_step, self.ckpt_path = signum, saved_step, ckpt_path


def say(text: str) -> None:
    """A line on standard error, from one of all processes."""
    if os.environ.get("LOCAL_RANK", "0") == "0" and os.environ.get("RANK", "0") == "0":
        print(f"lightning-tfm: {text}", file=sys.stderr)


def shell_quote(text: str) -> str:
    """Quote an argument for bash, as `shlex.quote` does, and write characters that cannot be printed as escapes.

    A tab would be taken for a key press when the command is pasted, and a line feed would break the line in two.
    """
    if text.isprintable():
        return shlex.quote(text)
    escapes = {"\\": "\\\\", "'": "\\'", "\t": "\\t", "\n": "\\n"}

    def escaped(character: str) -> str:
        if character in escapes or character.isprintable():
            return escapes.get(character, character)
        return "".join(f"\\x{byte:02x}" for byte in os.fsencode(character))

    return f"$'{''.join(map(escaped, text))}'"


def interrupt(signum: int, frame: FrameType | None) -> NoReturn:
    """Handles a signal by raising Interrupted."""
    raise Interrupted(signum)


def explain(error: BaseException, accepted: Iterable[str] = ()) -> str:
    """One line for an error that came up while a configuration was read.

    A UserError anywhere behind it speaks for itself. Otherwise the parser's tree of what it tried is reduced to
    the setting, the class it belongs to, and the deepest reason, with the nearest accepted name for an unknown one.

    Args:
        accepted: the settings that the top level of a configuration accepts, by their full names.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, UserError):
            return str(cause)
        cause = cause.__cause__ or cause.__context__

    noise = ("Does not validate", "Subtypes:", "Errors:", "Expected a <class 'NoneType'>", "Given value")
    lines = (line.strip(" -") for line in str(error).splitlines())
    text = " ".join(line for line in lines if line and not line.startswith(noise))
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
            return _unknown(option[2], accepted)
        return f"an argument must be --SETTING VALUE, as --config YAML, but is {option[2]!r}; name its setting"
    if missing := re.search(r"arguments are required: (\w+(?:[.,] ?\w+)*)", reason):
        names = re.sub(r"\b(fit|validate|test)\.", "", missing[1])
        where = f"among the init_args of {classes[-1]}" if classes else "in a YAML, and name a YAML with --config"
        return f"{names} must be set, but {'are' if ',' in names else 'is'} missing; write it {where}"
    if isinstance(error, ArgumentError):
        for pattern, message in MISTAKES.items():
            if found := re.search(pattern, reason):
                return setting + found.expand(message)
    path = re.search(r"Import path ([\w.]+) does not correspond to a subclass|dot import path string: (\S+)", reason)
    if classes and settings and path:
        owner = _imported(classes[-1])
        base = _type_of(owner, settings[-1])
        if inspect.isclass(base) and base.__module__.startswith("lightning_tfm."):
            why = getattr(owner, "because", None)
            return (
                f"{setting} of {classes[-1]} must be {' or '.join(concrete(base))}"
                + (f", {why}" if why else "")
                + f", but is {(path[1] or path[2]).rpartition('.')[2]}"
            )
    if reason == "No supported gpu backend found!":
        return "trainer.accelerator must be one that this machine has, but is gpu; try auto"
    if kind := re.search(r"argument after \*\* must be a mapping, not (\w+)", reason):  # the parser lets it pass
        return (
            f"a group of settings, as model.init_args.optimization, must be {{NAME: VALUE}}, but is of type {kind[1]}"
        )
    missing = re.search(r"module '([\w.]+)' has no attribute '(\w+)'", reason)
    if missing and missing[1] in sys.modules:
        return _no_attribute(*missing.groups())
    return f"{setting}: {_mismatch(str(error)) or reason}" if settings else reason


def _mismatch(text: str) -> str | None:
    """Return what a value must be, and what it is, from the parser's list of the types that it was tried as."""
    tried = re.compile(
        r"Expected an? <class '(?:[\w.]+\.)?(?!NoneType)(\w+)'>|Expected a typing\.Literal\[(.*?)\]"
        r"|(subclass of \w|dot import path)"
    )
    kinds: dict[str, None] = {}
    depth = 0
    for line in text.splitlines():
        indentation = len(line) - len(line.lstrip(" -"))
        if "Parser key" in line:  # of a deeper setting: what was tried above it does not matter
            kinds, depth = {}, indentation
        for of_type, choices, of_class in tried.findall(line):
            kind = f"a class, as {CLASS}" if of_class else f"one of {choices}" if choices else f"of type {of_type}"
            kinds[kind] = None
        value = re.search(
            r"Got value: (.*)$|path string: (.*)$|Given value: NestedArg\(key='[\w.]+', val=(.*)\)$", line
        )
        if value is None and indentation >= depth:  # or it would be the value of the setting above
            value = re.search(r"Given value: (.*)$", line)
        if kinds and value:
            return f"must be {' or '.join(kinds)}, but is {value[value.lastindex] or 'empty'}"
    return None


def untrusted(path: str, owner: str) -> str:
    """Return the message for a class or function that may not be used without `--allow`.

    Args:
        path: its dotted name.
        owner: the setting or the checkpoint that names it.
    """
    module, _, name = path.rpartition(".")
    misspelt = module in sys.modules and name not in vars(sys.modules[module])
    if misspelt and difflib.get_close_matches(name, _classes_of(module), n=1, cutoff=CLOSE):
        return _no_attribute(module, name)
    return (
        f"{owner or 'a configuration'} must name only classes listed in lightning_tfm/trust.py, but names {path!r}, "
        f"which is not imported; if you trust its code: --allow {module or path}"
    )


def concrete(base: type) -> list[str]:
    """The names of the classes of a base's package that are one of its own, and not abstract."""
    package = sys.modules[base.__module__.rpartition(".")[0]]
    classes = {name: getattr(package, name) for name in package.__all__}
    return [name for name, cls in classes.items() if issubclass(cls, base) and not inspect.isabstract(cls)]


def _unknown(name: str, names: Iterable[str], owner: str = "") -> str:
    """A setting that does not exist, and the nearest that does."""
    names = list(names)
    first = name.split(".")[0]
    groups = {other.split(".")[0] for other in names}
    if first not in groups:  # the group is misspelled, and with it all that it holds
        name, names = first, sorted(groups)
    return f"there is no setting {name!r}{f' of {owner}' if owner else ''}{_nearest(name, names)}"


def _no_attribute(module: str, name: str) -> str:
    """Return the message for a name that an imported module lacks, with the nearest class that it has."""
    return f"module {module!r} has no attribute {name!r}{_nearest(name, _classes_of(module))}"


def _classes_of(module: str) -> list[str]:
    return [name for name, value in vars(sys.modules[module]).items() if inspect.isclass(value)]


def _nearest(name: str, names: list[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1, cutoff=CLOSE)
    return f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(names)}"


def _type_of(owner: type, argument: str) -> Any:
    """Return the type of a constructor's argument; None if there is none, or only type checkers can import it."""
    try:
        return get_type_hints(owner.__init__).get(argument)
    except NameError:
        return None


def _imported(class_path: str) -> type:
    """A class that is imported already: an error's text holds what the user wrote, and must import nothing."""
    module, _, name = class_path.rpartition(".")
    found = getattr(sys.modules.get(module), name, object)
    return found if inspect.isclass(found) else object


def _arguments_of(cls: type) -> list[str]:
    return list(inspect.signature(cls).parameters)
