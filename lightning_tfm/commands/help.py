"""Help of `fit`, `validate` and `test` on one screen, with the most common settings."""

from __future__ import annotations

import ast
import textwrap
from importlib.util import find_spec
from pathlib import Path

BASE_CLASSES = ("CausalNetwork", "Network", "Seq2SeqNetwork", "TaskModule")
"""Exported base classes, which cannot be chosen by a setting."""

SETTINGS = """\
  -c, --config YAML          read a YAML file; later files override earlier ones
  --ckpt_path CHECKPOINT     {ckpt_path}
  --seed_everything N        seed of the data, the weights and dropout
  --dry-run                  check all settings, run a batch, write nothing
  --print_config             print all settings as YAML
  --data CLASS               {data}
  --model CLASS              {model}
  --model.network CLASS      {network}
  --trainer.max_steps N      training steps; .val_check_interval N
  --trainer.precision P      32-true, bf16-mixed, 16-mixed, 64-true
  --trainer.devices N        with .accelerator cpu or gpu, .strategy ddp
  --trainer.callbacks+=CLASS WeightAveraging, EarlyStopping, Compile, ...
  --trainer.logger false     write no run folder
  --checkpoint.monitor NAME  metric that selects the best checkpoint

  --help-all                 all settings, also those of Lightning's Trainer
  --data.help Date           settings of a class; also --model.network.help GPT
"""

USAGE = {
    "fit": (
        "lightning-tfm fit EXPERIMENT [--SETTING VALUE ...]",
        "Train the model of an experiment, then test its best checkpoint.",
        "resume: last, the folder of a run, or a file",
    ),
    "validate": (
        "lightning-tfm validate CHECKPOINT [--SETTING VALUE ...]",
        "Evaluate a checkpoint on the validation data of its experiment.",
        "with --config: the checkpoint, or last",
    ),
    "test": (
        "lightning-tfm test CHECKPOINT [--SETTING VALUE ...]",
        "Evaluate a checkpoint on the test data of its experiment.",
        "with --config: the checkpoint, or last",
    ),
}
"""Usage, purpose and help of `--ckpt_path` for each command."""


def help_text(command: str) -> str:
    """Return the help of `fit`, `validate` or `test` for `--help`."""
    usage, purpose, ckpt_path = USAGE[command]
    settings = SETTINGS.format(
        ckpt_path=ckpt_path,
        data=_column(f"{_classes('datamodules')}; .batch_size N"),
        model=_column(f"{_classes('lightning_tfm.modules')}; .optimizer.lr X"),
        network=_column(f"{_classes('lightning_tfm.networks')}; .d_model N"),
    )
    return f"usage: {usage}\n{purpose}\n\n{settings}"


def _classes(package: str) -> str:
    """Return the names of the classes that a package exports, parsed from its source, since importing it is slow."""
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ", ".join(name for name in ast.literal_eval(node.value) if name not in BASE_CLASSES)
    raise AssertionError(f"{package} has no __all__")


def _column(text: str) -> str:
    """Wrap a text in the right column of the settings."""
    return textwrap.fill(text, 80 - 29, break_long_words=False).replace("\n", "\n" + 29 * " ")
