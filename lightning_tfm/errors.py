"""A user's mistake, told in one line."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Iterable
from importlib import import_module


class UserError(ValueError):
    """What the user can mend. The message names the setting, the rule, the value and the mend, in one line."""


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

    lines = [line.strip(" -") for line in str(error).splitlines()]
    noise = ("Does not validate", "Subtypes:", "Errors:", "Expected a <class 'NoneType'>", "Given value")
    lines = [line for line in lines if line and not line.startswith(noise)]
    text = " ".join(lines)
    settings = re.findall(r'Parser key "([^"]+)":', text)
    classes = re.findall(r"Problem with given class_path '([^']+)':", text)
    reason = re.sub(r"Parser key \"[^\"]+\":|Problem with given class_path '[^']+':", "", text).strip()
    unknown = re.search(r"(?:does not accept option|[Oo]ption|[Kk]ey) '([\w.]+)'", reason)
    if unknown and ("not accept" in reason or "not expected" in reason or "not accepted" in reason):
        name = unknown.group(1)
        if classes:
            names = _arguments_of(classes[-1])
            where = f" of {classes[-1]}"
        else:
            names = list(accepted)
            where = ""
        reason = f"there is no setting {name!r}{where}{_nearest(name, names)}"
        settings = settings[:1] if classes else []
    elif missing := re.search(r"(?:module '([\w.]+)' has no attribute|No module named) '(\w+)'", reason):
        module, name = missing.groups()
        reason += _nearest(name, _classes_of(module)) if module else ""
    else:
        reason = re.sub(r"Expected an? <class '(\w+)'>\. Got value: (.*)", r"must be of type \1, but is \2", reason)
        reason = re.sub(r"Expected a typing\.Literal\[(.*?)\]\. Got value: (.*)", r"must be one of \1, but is \2", reason)
    return ": ".join([".".join(settings), reason] if settings else [reason])


def _nearest(name: str, names: list[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(names)}" if names else ""


def _arguments_of(class_path: str) -> list[str]:
    module, _, name = class_path.rpartition(".")
    return [name for name in inspect.signature(getattr(import_module(module), name)).parameters if name != "self"]


def _classes_of(module: str) -> list[str]:
    return [name for name, value in vars(import_module(module)).items() if inspect.isclass(value)]
