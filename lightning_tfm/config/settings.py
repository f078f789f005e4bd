"""Reading of YAML and JSON files, and flattening of configurations; error messages name the file."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import yaml

from lightning_tfm.errors import DamagedError, UserError

T = TypeVar("T")

IGNORED = (
    *("ckpt_path", "config", "dry_run", "heartbeat", "name", "skip_test", "trust_package"),
    *("trainer.enable_model_summary", "trainer.enable_progress_bar", "trainer.logger", "trainer.profiler"),
)
"""Settings that do not change the weights of a run."""

SEEDS = ("seed_everything", "data.init_args.seed")
"""Settings that are the seed of a run."""

MAX_NODES, MAX_DEPTH, MAX_INTEGER = 10_000, 100, 2**63 - 1
"""Limits of a YAML document: its values, with aliases replaced, the levels of nesting, and the size of an integer."""


class BoundedLoader:
    """Mixin for loaders of PyYAML that rejects a document beyond the limits before it is composed.

    Without them, a short document with nested aliases takes all memory, and deep nesting ends the process.
    """

    def __init__(self, stream: str) -> None:
        _check_size(stream, type(self).__bases__[1])
        super().__init__(stream)  # type: ignore[call-arg]  # of a loader

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Return the value of a node, with an error that has its line for an invalid value."""
        try:
            value = super().construct_object(node, deep)  # type: ignore[misc]  # of a loader
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:  # of a tag, such as !!int
            raise yaml.MarkedYAMLError(problem=str(error), problem_mark=node.start_mark) from None
        if isinstance(value, int) and abs(value) > MAX_INTEGER:
            problem = f"an integer must be at most {MAX_INTEGER}"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return value


class _Loader(BoundedLoader, yaml.SafeLoader):
    """Loader that rejects duplicate keys in a mapping, of which PyYAML would keep the last value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in lines:
                problem = f"duplicate key {key.value!r} (first in line {lines[key.value]}); keep one of them"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            lines[key.value] = key.start_mark.line + 1
        return super().construct_mapping(node, deep)


# Keep timestamps as strings, as the command line does.
_Loader.add_constructor("tag:yaml.org,2002:timestamp", _Loader.construct_yaml_str)  # type: ignore[type-var]  # unbound


def read_yaml(path: Path, setting: str) -> dict[str, Any]:
    """Read a YAML file that contains a mapping; error messages name the setting that names the file.

    Raises:
        UserError: if the file cannot be read, is not UTF-8 or valid YAML, or does not contain a mapping.
    """
    return parse_yaml(read_yaml_text(path, setting), path, setting)


def read_yaml_text(path: Path, setting: str) -> str:
    """Read the text of a YAML file, see `read_yaml`."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        names = [str(other) for other in path.parent.glob("*.y*ml")]
        close = difflib.get_close_matches(str(path), names, n=1) if isinstance(error, FileNotFoundError) else []
        hint = "".join(f"; did you mean {other!r}?" for other in close)
        raise UserError(
            f"{setting} must name a readable YAML file, but {str(path)!r} is not: {error.strerror}{hint}"
        ) from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{setting} must name a YAML file in UTF-8, but line {line} of {str(path)!r} is not; save it in UTF-8"
        ) from None


def parse_yaml(text: str, path: Path, setting: str) -> dict[str, Any]:
    """Parse the text of a YAML file, see `read_yaml`."""
    try:
        values = yaml.load(text, _Loader)
    except (OverflowError, ValueError):  # of chr in PyYAML
        raise UserError(
            f"{setting} must name a valid YAML file, but {str(path)!r} has an escape above \\U0010ffff; delete it"
        ) from None
    except yaml.YAMLError as error:
        line, problem = _locate(error, text)
        raise UserError(
            f"{setting} must name a valid YAML file, but line {line} of {str(path)!r} is not: {problem}"
        ) from None
    if not isinstance(values, dict):
        content = "is empty" if values is None else f"holds {values!r:.50}"
        raise UserError(f"{setting} must name a YAML file of settings, NAME: VALUE, but {str(path)!r} {content}")
    return values


def read_json(path: Path, kind: type[T], content: bytes | None = None) -> T:
    """Read a JSON file, or parse `content`, as a type.

    Raises:
        DamagedError: if the content does not match the type.
        UserError: if the file cannot be read.
    """
    from pydantic import TypeAdapter, ValidationError  # slow to import

    try:
        return TypeAdapter(kind).validate_json(path.read_bytes() if content is None else content, strict=True)
    except OSError as error:
        raise UserError(f"{str(path)!r} must be a file that can be read, but is not: {error.strerror}") from None
    except ValidationError as error:
        first, *_ = error.errors()
        problem = ": ".join(filter(None, [".".join(map(str, first["loc"])), first["msg"]]))
        raise DamagedError(
            f"{str(path)!r} must be an intact file, but is damaged: {problem}; restore a copy, or delete it"
        ) from None


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten a nested configuration to values by dotted names; mappings in a list are named by index."""
    if isinstance(value, list) and any(isinstance(inner, dict) for inner in value):
        value = dict(enumerate(value))
    if isinstance(value, dict) and value:
        return {k: v for name, inner in value.items() for k, v in flatten(inner, f"{prefix}.{name}".strip(".")).items()}
    return {prefix: value}


def is_below(name: str, groups: Iterable[str]) -> bool:
    """Return whether a setting, by its dotted name, is one of some settings, or belongs to one."""
    return any(name == group or name.startswith(f"{group}.") for group in groups)


def settings_of_weights(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a configuration, by dotted name, except for IGNORED."""
    return {name: value for name, value in flatten(config).items() if not is_below(name, IGNORED)}


def without_seed(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings except for the seed, which the runs of an experiment with several seeds have in common."""
    return {name: value for name, value in settings.items() if name not in SEEDS}


def _check_size(text: str, loader: Any) -> None:
    """Check the number of values in a YAML document, with aliases replaced, and the levels of their nesting.

    A scalar counts as one value per 100 characters. The parsers of PyYAML and libyaml accept different documents.

    Raises:
        yaml.YAMLError: if the text exceeds a limit, contains itself or is not valid.
    """
    if len(text) <= MAX_DEPTH and "*" not in text:
        return
    total, sizes, open_nodes = 0, dict[str | None, int](), list[tuple[str | None, int]]()
    for event in yaml.parse(text, loader):
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_nodes.pop()
            sizes[anchor] = total - before
        elif isinstance(event, yaml.AliasEvent):
            contains_itself = any(anchor == event.anchor for anchor, _ in open_nodes)
            total += MAX_NODES if contains_itself else sizes.get(event.anchor, 1)
        elif isinstance(event, yaml.ScalarEvent):
            sizes[event.anchor] = 1 + len(event.value) // 100
            total += sizes[event.anchor]
        elif isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append((event.anchor, total))
            total += 1
        if total > MAX_NODES or len(open_nodes) > MAX_DEPTH:
            break
    else:
        return
    limits = f"at most {MAX_NODES:,} values, with aliases replaced, and at most {MAX_DEPTH} levels of nesting"
    raise yaml.MarkedYAMLError(problem=f"it must have {limits}", problem_mark=event.start_mark)  # type: ignore[arg-type]  # of libyaml


def _locate(error: yaml.YAMLError, text: str) -> tuple[int, str]:
    """Return the line of an error, counted from 1, and a description of the problem."""
    if isinstance(error, yaml.reader.ReaderError):
        return text.count("\n", 0, error.position) + 1, f"it contains the character {chr(error.character)!r}; delete it"
    assert isinstance(error, yaml.MarkedYAMLError)  # PyYAML raises no others
    assert error.problem_mark is not None
    assert error.problem is not None
    line, problem = error.problem_mark.line, error.problem
    if error.context is not None:
        context_line = error.context_mark.line if error.context_mark else line
        problem = f"{error.context}{f' from line {context_line + 1}' if context_line != line else ''}, {problem}"
    return line + 1, f"{problem}; indent with spaces" if "'\\t'" in problem else problem
