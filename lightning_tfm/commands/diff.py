"""`lightning-tfm diff`: say where two runs, configurations or checkpoints differ."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_tfm.commands.parser import CommandParser, trust_arguments
from lightning_tfm.commands.runs import without_nan
from lightning_tfm.comparison.differences import different_environments, different_settings, first_results, shown
from lightning_tfm.config.experiments import find_experiment
from lightning_tfm.config.settings import parse_yaml, settings_of_weights
from lightning_tfm.errors import UserError
from lightning_tfm.runs.names import named_run
from lightning_tfm.runs.record import Run
from lightning_tfm.system.terminal import LiteralConsole, print_table

if TYPE_CHECKING:
    from lightning_tfm.commands.step_trace import Trace


def diff(arguments: list[str]) -> int:
    """Print the differences.

    Returns:
        The exit status: 0 if there are none, 1 otherwise.
    """
    options = make_parser().parse_args(arguments)
    sides = [Side(name, options.trust_package) for name in options.names]
    runs = [side.run for side in sides if side.run is not None]
    checkpoints = [side.checkpoint for side in sides if side.checkpoint is not None]
    if options.trace and len(runs) < 2:
        raise UserError(f"--trace needs two runs, but is given for {' and '.join(map(repr, options.names))}; remove it")
    parts: dict[str, Sequence[Mapping[str, Any]]] = {"settings": different_settings(*(side.settings for side in sides))}
    if len(runs) == 2:
        parts["environment"] = different_environments(*runs)
        parts["results"] = first_results(*runs)
    if len(checkpoints) == 2:
        from lightning_tfm.comparison.tensors import different_states  # slow to import

        parts |= different_states(*checkpoints)
    traced = None
    if options.trace:
        from lightning_tfm.commands.step_trace import trace  # slow to import

        traced = trace(runs, options.trust_package)
    is_equal = not any(parts.values()) and not (traced and (traced["difference"] or traced["not_repeated"]))
    if options.json:
        content = {"equal": is_equal, "differences": parts} | ({} if traced is None else {"trace": traced})
        print(json.dumps(without_nan(content), indent=2, ensure_ascii=False))
    else:
        _print(parts)
        if traced is not None:
            console = LiteralConsole()
            console.print("\n".join(_sentences(traced)), soft_wrap=not console.is_terminal)
    return 0 if is_equal else 1


def make_parser() -> CommandParser:
    """Return the parser of the command."""
    parser = CommandParser(
        "lightning-tfm diff",
        description="Say where two runs differ: settings, versions, hardware, data, code, and the first logged metric "
        "and the first test prediction. Or compare the settings of two configurations, whose names end in .yaml, or "
        "the states of two checkpoints, whose names end in .ckpt, to the bit. The exit status is 0 if all are equal, "
        "and 1 otherwise.",
    )
    parser.add_argument(
        "names",
        metavar="RUN",
        nargs=2,
        help="the name of an experiment (its newest finished run), the folder of a run, a checkpoint, or a YAML file, "
        "such as copy_gpt.yaml for the settings of an experiment before a run",
    )
    parser.add_argument(
        "--trace",
        action="store_true",
        help="train both runs again from their last equal checkpoint, and say in which step they part, and in which "
        "batch, module, gradient, optimizer state or parameter",
    )
    parser.add_argument("--json", action="store_true", help="write a JSON object")
    parser.add_trust_package()
    return parser


class Side:
    """One of the two that are compared.

    Args:
        name: a file whose name ends in .yaml or .yml, which may also be that of an experiment; a checkpoint, whose name
            ends in .ckpt; or a run, see `named_run`.
        trust_packages: the trusted packages, see `--trust-package`.

    Attributes:
        run: the run; None for others.
        checkpoint: the content of the checkpoint; None for others.
        settings: the settings, by dotted name.
    """

    def __init__(self, name: str, trust_packages: Sequence[str]) -> None:
        self.run: Run | None = None
        self.checkpoint: dict[str, Any] | None = None
        path = Path(name)
        if path.suffix in (".yaml", ".yml"):
            self.settings = _complete_settings(path, trust_packages)
        elif path.suffix == ".ckpt":
            from lightning_tfm.checkpoint import read  # slow to import

            self.checkpoint = read(path)
            text = self.checkpoint.get("experiment", {"config": "{}"})["config"]
            self.settings = settings_of_weights(parse_yaml(text, path, "RUN"))
        else:
            self.run = named_run(name)
            self.settings = settings_of_weights(self.run.config)


def _complete_settings(path: Path, trust_packages: Sequence[str]) -> dict[str, Any]:
    """Return all settings of a YAML file, or of an experiment whose file it would be, as `fit` parses them."""
    from lightning_tfm.fit.cli import SettingsCLI, run  # slow to import

    class ParsingCLI(SettingsCLI):
        """SettingsCLI that constructs nothing."""

        def instantiate_classes(self) -> None:
            """Construct nothing."""

        after_instantiate_classes = instantiate_classes

    file = path if path.is_file() else find_experiment(str(path.with_suffix("")))
    cli = run(["fit", "--config", str(file), *trust_arguments(trust_packages)], ParsingCLI)
    return settings_of_weights(cli.settings())


def _print(parts: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Print a table of each part with differences, and which parts are equal."""
    console = LiteralConsole()
    for part, rows in parts.items():
        if any("elements" in row for row in rows):
            print_table([part, "differing", "of", "largest", "relative"], [*map(_cells, rows)], console)
        elif rows:
            print_table([part, "first", "second"], [[row["name"], *map(shown, row["values"])] for row in rows], console)
    if equal := [part for part, rows in parts.items() if not rows]:
        console.print(f"equal: {', '.join(equal)}")


def _cells(row: Mapping[str, Any]) -> list[str]:
    """Return the cells of a tensor that differs, or of another value, which is given for both."""
    if "elements" in row:
        return [row["name"], *(_number(row[key]) for key in ("differing", "elements", "absolute", "relative"))]
    return [row["name"], " or ".join(map(shown, row["values"])), "", "", ""]


def _sentences(traced: Trace) -> Iterator[str]:
    """Yield what the training of two runs again has shown."""
    first, steps, found = traced["first_step"], traced["equal_steps"], traced["difference"]
    if not traced["steps"]:
        yield f"not trained again: the last checkpoints, after {first:,} steps, are equal"
        return
    yield (
        f"trained again from {f'equal checkpoints after {first:,} steps' if first else 'the start'}: "
        f"{f'the next {steps:,} steps are' if steps else 'no further step is'} equal"
    )
    if traced["skipped"]:
        yield f"values of a step without rows or with different padding, which are not compared: {traced['skipped']:,}"
    for each in traced["not_repeated"]:
        yield "the run does not repeat: {} was {}, and is now {}".format(each["name"], *each["values"])
    if found is not None:
        step = "before the first step" if found["step"] is None else f"at step {found['step']}"
        where = f" in process {found['process']}" if "process" in found else ""
        where = f", all-reduced over {found['reduced']} processes" if "reduced" in found else where
        yield f"first difference, {step}: {found['name']}{where}"
        yield f"  equal before: {found['before'] or 'nothing'}"
        if "values" in found:
            yield f"  values: {', '.join(map(shown, found['values']))}"
        if "elements" in found:
            yield f"  index: {found['index']}, the first of {found['differing']:,} of {found['elements']:,} elements"
            yield f"  largest difference: {_number(found['absolute'])}, relative {_number(found['relative'])}"


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.2g}"
