"""Sphinx extension that writes parts of pages at build time, such as the command reference and the table of results.

A line `<!-- NAME -->` of a page is replaced by the Markdown that `GENERATORS[NAME]` returns.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import signal
from argparse import SUPPRESS, Action, ArgumentParser
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from importlib import import_module
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints
from unittest.mock import patch

from layers import layers, members
from lightning_tfm.__main__ import COMMANDS
from lightning_tfm.commands.reproduce import tolerance
from lightning_tfm.commands.seeds import make_parser as seeds_parser
from lightning_tfm.comparison.statistics import COVERAGE, student_reach
from lightning_tfm.config.experiments import Claim, list_experiments
from lightning_tfm.fit import LIGHTNING_COMMANDS, cli
from lightning_tfm.runs import record
from lightning_tfm.runs.attention_history import AttentionHistory, ExampleHistory, LayerHistory
from lightning_tfm.system.terminal import format_value
from lightning_tfm.system.versions import Git, Hardware

ROOT = Path(__file__).parents[2]
"""The checkout."""

TRAINER_SETTINGS = (
    "max_steps",
    "max_epochs",
    "val_check_interval",
    "check_val_every_n_epoch",
    "precision",
    "accelerator",
    "devices",
    "strategy",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "deterministic",
    "callbacks",
    "logger",
    "log_every_n_steps",
    "limit_val_batches",
    "limit_test_batches",
    "fast_dev_run",
    "profiler",
)
"""Settings of the Trainer that the reference shows."""


class _ParserFoundError(Exception):
    """Exception that carries a parser out of LightningCLI, which builds it only to parse arguments."""

    def __init__(self, parser: ArgumentParser) -> None:
        self.parser = parser


def command_parser(command: str) -> ArgumentParser:
    """Return the parser of a command.

    Args:
        command: the name of the command.
    """
    if command not in LIGHTNING_COMMANDS:
        return import_module(f"lightning_tfm.commands.{command}").make_parser()

    def stop(cli: cli.TfmCLI, parser: ArgumentParser, *arguments: object) -> None:
        raise _ParserFoundError(cli._subcommand_parsers[command])

    with patch.object(cli.TfmCLI, "parse_arguments", stop), patch.object(signal, "signal"):
        try:
            cli.run([command, "--help"])
        except _ParserFoundError as error:
            return error.parser
    raise AssertionError(f"{command} has parsed no arguments")


def mark_options(text: str) -> str:
    """Return a text with the options outside of code marked as code, as Sphinx would change their hyphens to dashes."""
    return re.sub(r"`[^`]*`|(--[a-z]+(?:[.-][a-z]+)*)", lambda found: f"`{found[1]}`" if found[1] else found[0], text)


def sentence(text: str) -> str:
    """Return a text with a capital letter and a full stop."""
    text = mark_options(text)
    return f"{text[0].upper()}{text[1:]}".rstrip(".") + "."


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def compact(text: str) -> str:
    """Return a table in Markdown whose cells do not wrap."""
    return f"::::{{container}} compact\n{text}::::\n"


def _name(action: Action) -> str:
    """Return how an argument is written on the command line."""
    if "." in action.dest:  # a setting of LightningCLI; only lists of classes are extended in practice
        name = action.dest
        plus = f", `--{name}+=CLASS`" if name in ("trainer.callbacks", "trainer.logger") else ""
        return f"`--{name} VALUE`{plus}"
    metavar = action.metavar or ("{" + ",".join(map(str, action.choices)) + "}" if action.choices else None)
    if not action.option_strings:
        return f"`{metavar or action.dest}{' ...' if action.nargs in ('*', '+') else ''}`"
    value = "" if action.nargs == 0 else f" {metavar or 'VALUE'}".replace(" \b", "")  # jsonargparse moves left by \b
    return ", ".join(f"`{option}{value}`" for option in action.option_strings)


def _help(action: Action) -> str:
    """Return the help of an argument, with its default unless the help names it."""
    text = mark_options(" ".join((action.help or "").split()).replace("``", "`").replace("<", "&lt;"))
    if action.dest.startswith("trainer."):  # Lightning's help has several sentences, and the defaults of Lightning
        text = re.sub(r":class:(?=`)", "", re.sub(r"\s*Default: .*", "", text))
        first, *rest = re.split(r"(?<=\.) (?=[A-Z])", text)
        text = " ".join([first, *(part for part in rest[:1] if len(first) + len(part) < 160)])
    default = action.default
    if type(default) in (int, float, str) and default not in ("", -1, SUPPRESS) and "default" not in text.lower():
        text = f"{text.rstrip('.')} (default: `{default}`)"
    return text


def _usage(parser: ArgumentParser) -> str:
    with patch.dict(os.environ, {"COLUMNS": "88", "NO_COLOR": "1"}):
        lines = parser.format_usage().rstrip().splitlines()
    margin = len("usage: ")
    return "```{code-block} text\n" + "\n".join(line[margin:] for line in lines) + "\n```\n"


def _own_options(parser: ArgumentParser) -> str:
    """Return the table of the arguments of a parser."""
    arguments = [action for action in parser._actions if "--help" not in action.option_strings]
    rows = [(_name(action), _help(action)) for action in arguments]
    return table(("argument", "meaning"), rows) if rows else "It has no arguments.\n"


def _own_command(command: str) -> str:
    parser = command_parser(command)
    return f"{sentence(parser.description or '')}\n\n{_usage(parser)}\n{_own_options(parser)}"


def _fit() -> str:
    parser = command_parser("fit")
    actions = {action.dest: action for action in parser._actions if action.option_strings}
    names = ("config", "seed_everything", "ckpt_path", "dry_run", "trust_package", "print_config")
    general = [actions[name] for name in names]
    checkpoint = [action for name, action in actions.items() if name.startswith("checkpoint.")]
    trainer = [actions[f"trainer.{name}"] for name in TRAINER_SETTINGS]
    parts = [
        "Each setting of an experiment is an option, named by its path in the YAML file.\n"
        "Options that follow `--config` override it.",
        "`lightning-tfm fit date_gpt --print_config` prints all settings with their values,\n"
        "`lightning-tfm fit --help-all` lists all options of the Trainer, and\n"
        "`lightning-tfm fit --model.help Seq2SeqModule` and `--data.help Date` list those of a class.",
        table(("option", "meaning"), [(_name(action), _help(action)) for action in general]),
        "### Several seeds",
        _own_options(seeds_parser()),
        "### Checkpoints",
        table(("option", "meaning"), [(_name(action), _help(action)) for action in checkpoint]),
        "### Trainer",
        "The most used settings of Lightning's `Trainer`; it accepts all others too.\n"
        "A run is one stream of batches until `trainer.max_steps`. If `trainer.max_epochs` is set, `fit` computes\n"
        "`max_steps` from it, overriding that of a YAML file, and `val_check_interval` from\n"
        "`trainer.check_val_every_n_epoch`. `trainer.limit_train_batches` and `trainer.min_steps` must not be set.",
        table(("option", "meaning"), [(_name(action), _help(action)) for action in trainer]),
        "### Model and data",
        "| option | meaning |\n|---|---|\n"
        "| `--model CLASS` | the task, such as `Seq2SeqModule` |\n"
        "| `--model.network CLASS` | the network, such as `Transformer` |\n"
        "| `--model.network.NAME VALUE` | an argument of the network |\n"
        "| `--model.optimizer CLASS` | the optimizer, of `lightning_tfm.optimizers` or `torch.optim` |\n"
        "| `--model.optimizer.NAME VALUE` | an argument of the optimizer |\n"
        "| `--model.lr_schedule.NAME VALUE` | an argument of `LRSchedule` |\n"
        "| `--model.NAME VALUE` | another argument of the task |\n"
        "| `--data CLASS` | the data module, such as `Date` |\n"
        "| `--data.NAME VALUE` | an argument of the data module |\n",
        "The [Python reference](python.md) describes the classes and their arguments.",
    ]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def commands() -> str:
    """Return the reference of all commands."""
    rows = [(f"[`{command}`](#{command})", summary) for command, summary in COMMANDS.items()]
    parts = [table(("command", "purpose"), rows)]
    for command, summary in COMMANDS.items():
        parts.append(f"## {command}\n")
        if command == "fit":
            parts.append(f"{sentence(summary)}\n\n{_fit()}")
        elif command in LIGHTNING_COMMANDS:
            parts.append(
                f"{sentence(summary)} `lightning-tfm {command} RUN` is enough, since a checkpoint contains\n"
                "the settings of its experiment; options of [fit](#fit) override its settings.\n"
            )
        else:
            parts.append(_own_command(command))
    return "\n".join(parts)


def _interval(claim: Claim) -> str:
    """Return the 95% confidence interval of the mean."""
    reach = student_reach([*claim.by_seed.values()], COVERAGE)
    return f"{format_value(claim.value - reach)} to {format_value(claim.value + reach)}"


def results() -> str:
    """Return the tables of claimed results and of their values by seed."""
    experiments = [experiment for experiment in list_experiments(ROOT / "experiments") if experiment.claims]
    means, by_seed = [], []
    for experiment in experiments:
        for number, claim in enumerate(experiment.claims):
            name = f"`{experiment.name}`" if number == 0 else ""
            seconds = f"{experiment.seconds:,.0f} s" if number == 0 and experiment.seconds else ""
            metric = f"`{claim.metric.removeprefix('test/')}`"
            means.append((name, metric, format_value(claim.value), _interval(claim), seconds))
            seeds = list(claim.by_seed)
            is_range = seeds == list(range(seeds[0], seeds[-1] + 1))
            seed_range = f"{seeds[0]} to {seeds[-1]}" if is_range and len(seeds) > 1 else ", ".join(map(str, seeds))
            values = ", ".join(format_value(value) for value in claim.by_seed.values())
            by_seed.append((name, metric, seed_range, values, f"± {tolerance(claim, 3):.2g}"))
    machines: dict[str, list[str]] = {}
    for experiment in experiments:
        machines.setdefault(experiment.machine, []).append(f"`{experiment.name}`")
    if len(machines) == 1:
        where = f"Training times are from {next(iter(machines))}."
    else:
        where = (
            "Training times are from " + "; ".join(f"{m} ({', '.join(names)})" for m, names in machines.items()) + "."
        )
    return (
        compact(table(("experiment", "test metric", "mean", "95% interval", "training"), means))
        + f"\n{where} They include validation.\n\n## Values by seed\n\n"
        + "The last column is the half-width of the 99% prediction interval for the mean of three other seeds.\n\n"
        + compact(table(("experiment", "test metric", "seeds", "values", "interval"), by_seed))
    )


def benchmarks() -> str:
    """Return the rows of benchmarks/RESULTS.md that have a target, without the columns that need much space."""
    text = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    text = text.replace("lightning-tfm --help", "`lightning-tfm --help`")
    header, _, *lines = [line for line in text.splitlines() if line.startswith("|")]
    names = [cell.strip() for cell in header.strip("|").split("|")]
    kept = ("benchmark", "ours", "peer", "unit", "ratio", "90% interval", "target", "met")
    rows = [dict(zip(names, (cell.strip() for cell in line.strip()[1:-1].split("|")), strict=True)) for line in lines]
    by_machine: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        if row["target"] and row["met"] in ("yes", "no"):
            by_machine.setdefault(row["machine"], []).append(row)
    parts = []
    for machine, measured in by_machine.items():
        parts.append(f"### {machine}\n\n" + compact(table(kept, [[row[name] for name in kept] for row in measured])))
    return "\n".join(parts)


def architecture() -> str:
    """Return the table of the layers of the package, from the top down, with the purpose of each subpackage."""
    rows = []
    for number, names in reversed([*enumerate(layers(), start=1)]):
        for name in names:
            path = members()[name]
            purpose = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]
            rows.append((str(number), f"`{name}{'/' if path.stem == '__init__' else '.py'}`", purpose))
    return table(("layer", "subpackage", "purpose"), rows)


def run_records() -> str:
    """Return the tables of the keys of a run's JSON files, with their types, and an example of each."""
    parts = []
    histories = AttentionHistory, ExampleHistory, LayerHistory
    for kind in (record.Summary, record.Start, record.Lineage, Git, Hardware, record.Prediction, *histories):
        head, _, attributes = (inspect.getdoc(kind) or "").partition("Attributes:\n")
        meanings = re.findall(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", attributes, re.MULTILINE)
        rows = [
            (f"`{name}`", _json_type(get_type_hints(kind)[name]), " ".join(meaning.split()))
            for name, meaning in meanings
        ]
        assert [name for name, _ in meanings] == [*get_type_hints(kind)], kind
        parts.append(f"## {kind.__name__}\n\n{head.strip()}\n\n{table(('key', 'type', 'meaning'), rows)}")
    return "\n".join(parts)


def _json_type(kind: Any) -> str:
    """Return the name of a type in JSON."""
    names = {
        float: "number",
        int: "integer",
        str: "text",
        datetime: "text",
        bool: "true or false",
        type(None): "null",
        Any: "any",
    }
    arguments, origin = get_args(kind), get_origin(kind)
    if origin is UnionType:
        return " or ".join(map(_json_type, arguments))
    if origin in (list, Sequence):
        return f"list of {_json_type(arguments[0])}"
    if origin in (dict, Mapping):
        return f"object of {_json_type(arguments[1])}"
    return names.get(kind) or f"[{kind.__name__}](#{kind.__name__.lower()})"


GENERATORS: dict[str, Callable[[], str]] = {
    "commands": commands,
    "results": results,
    "benchmarks": benchmarks,
    "layers": architecture,
    "run_format": lambda: str(record.FORMAT),
    "run_records": run_records,
}
"""Functions that return the Markdown of a part, by its name."""

PAGES = {"reference/architecture", "reference/commands", "reference/run_folder", "results", "performance"}
"""Pages with such parts, which are read at every build."""


def fill(app: object, docname: str, source: list[str]) -> None:
    """Replace the marks of a page."""
    if docname in PAGES:
        for name, generate in GENERATORS.items():
            mark = f"<!-- {name} -->"
            if mark in source[0]:
                source[0] = source[0].replace(mark, generate())


def setup(app: object) -> dict[str, bool]:
    """Register the extension."""
    app.connect("source-read", fill)  # type: ignore[attr-defined]
    app.connect("env-get-outdated", lambda *arguments: sorted(PAGES))  # type: ignore[attr-defined]
    return {"parallel_read_safe": True}
