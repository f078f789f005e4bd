"""Help of `fit`, `validate` and `test` on one screen, with the most common settings, and help of classes by name."""

from __future__ import annotations

import ast
import textwrap
from importlib.util import find_spec
from pathlib import Path
from typing import get_type_hints

from lightning_tfm.config.parsing_errors import PACKAGES
from lightning_tfm.errors import UserError, nearest
from lightning_tfm.fit import LIGHTNING_COMMANDS

BASE_CLASSES = ("CausalNetwork", "Network", "Seq2SeqNetwork", "TaskModule")
"""Exported base classes, which cannot be chosen by a setting."""

SETTINGS = """\
  -c, --config YAML          read a YAML file; later files override earlier ones
  --ckpt_path CHECKPOINT     {ckpt_path}
  --seed_everything N        {seed}
  --dry-run                  check all settings, run a batch, write nothing
  --print_config             print all settings as YAML
  --name NAME                write to runs/NAME; --trainer.logger false: nowhere
  --trainer.precision P      32-true, bf16-mixed, 16-mixed, 64-true
  --trainer.devices N        with .accelerator cpu or gpu, .strategy ddp
  --data CLASS               {data}
"""

TRAINING = """\
  --model CLASS              {model}
  --model.network CLASS      {network}
  --trainer.max_steps N      training steps; .val_check_interval N
  --trainer.callbacks+=CLASS WeightAveraging, EarlyStopping, Compile, ...
  --checkpoint.monitor NAME  metric that selects the best checkpoint
"""
"""Settings of `fit` only; of a run that is evaluated, the checkpoint has them."""

FURTHER = """\

  --help-all                 all settings, also those of Lightning's Trainer
  --data.help Date           settings of a class; also --model.network.help GPT
"""


def help_text(command: str) -> str:
    """Return the help of `fit`, `validate` or `test` for `--help`."""
    is_fit = command == "fit"
    settings = (SETTINGS + (TRAINING if is_fit else "") + FURTHER).format(
        seed="seed; for several: --seeds 1..6, --jobs N at a time" if is_fit else "seed of the data",
        ckpt_path="resume: last, a run, a file; or --fork RUN@STEP"
        if is_fit
        else "with --config: a checkpoint, or last",
        data=_column(f"{', '.join(_classes('data'))}; .batch_size N"),
        model=_column(f"{', '.join(_classes('model'))}; .optimizer.lr X"),
        network=_column(", ".join(_classes("model.network"))),
    )
    usage = f"lightning-tfm {command} {'EXPERIMENT' if is_fit else 'RUN'} [--SETTING VALUE ...]"
    return f"usage: {usage}\n{purpose(command)}\n\n{settings}"


def purpose(command: str) -> str:
    """Return the summary of `fit`, `validate` or `test` as a sentence."""
    return f"{LIGHTNING_COMMANDS[command].capitalize()}."


def with_class_names(arguments: list[str]) -> list[str]:
    """Replace the name of a class, in any case, after the `.help` of a setting in PACKAGES by the path of the class.

    The parser knows the networks of a task only, so a task that the network fits is added. Later arguments are
    omitted, since the help ends the command.

    Raises:
        UserError: if the setting has no class of this name.
    """
    for place, argument in enumerate(arguments):
        option, equals, name = argument.partition("=")
        setting = option.removeprefix("--").removesuffix(".help").replace(".init_args", "")
        if not option.endswith(".help") or setting not in PACKAGES:
            continue
        if not equals and arguments[place + 1 :] and not arguments[place + 1].startswith("-"):
            name = arguments[place + 1]
        if "." in name or (not name and setting != "model.network"):  # a path, or the base class
            break
        name = _class_name(setting, name)
        task = ["--model", _task_of(name)] if setting == "model.network" else []
        return [*arguments[:place], *task, f"--{setting}.help", f"{PACKAGES[setting]}.{name}"]
    return arguments


def _task_of(network: str) -> str:
    """Return the name of the first task that a network fits."""
    from lightning_tfm import networks, tasks

    bases = {name: get_type_hints(getattr(tasks, name).__init__)["network"] for name in tasks.__all__}
    return next(name for name, base in bases.items() if issubclass(getattr(networks, network), base))


def _class_name(setting: str, name: str) -> str:
    """Return the name of a class of a setting in its correct case."""
    by_setting = {other: {cls.lower(): cls for cls in _classes(other)} for other in PACKAGES}
    if cls := by_setting[setting].get(name.lower()):
        return cls
    other = next((other for other, classes in by_setting.items() if name.lower() in classes), None)
    hint = f"; try --{other}.help {by_setting[other][name.lower()]}" if other else nearest(name, _classes(setting))
    raise UserError(f"--{setting}.help must name a class of {PACKAGES[setting]}, but is {name!r}{hint}")


def _classes(setting: str) -> list[str]:
    """Return the names of the classes of a setting, parsed from their package, since importing it is slow."""
    package = PACKAGES[setting]
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [name for name in ast.literal_eval(node.value) if name not in BASE_CLASSES]
    raise AssertionError(f"{package} has no __all__")


def _column(text: str) -> str:
    """Wrap a text in the right column of the settings."""
    return textwrap.fill(text, 80 - 29, break_long_words=False).replace("\n", "\n" + 29 * " ")
