"""Parser of fit, validate and test."""

from __future__ import annotations

import logging
import re
from argparse import SUPPRESS
from pathlib import Path
from typing import Any

from jsonargparse import ActionConfigFile, Namespace, set_parsing_settings
from lightning.pytorch.cli import LightningArgumentParser

from lightning_tfm.callbacks import Checkpoints, Heartbeat
from lightning_tfm.config.arguments import experiment_path
from lightning_tfm.config.settings import BoundedLoader, parse_yaml, read_yaml_text
from lightning_tfm.config.trust import TRUST_HELP, import_policy
from lightning_tfm.errors import UserError
from lightning_tfm.fit.help import purpose
from lightning_tfm.fit.trainer_settings import HIDDEN
from lightning_tfm.networks import Network
from lightning_tfm.runs.names import HELP as RUN_HELP
from lightning_tfm.system.private import actions, read_no_files, replace_yaml_loader, yaml_loader
from lightning_tfm.tasks import TaskModule

EVALUATED = f"checkpoint to evaluate: {RUN_HELP}; or `last` for the newest checkpoint of the experiment"
RESUMED = (
    "checkpoint to start from: a file, the folder of a run to resume, or `last` for the newest unfinished run "
    "of the experiment or, if there is none, the newest finished run, if it can be extended"
)

HELP = {
    "trainer.max_steps": "number of optimizer steps of the run",
    "trainer.max_epochs": "number of passes over the training data, which `fit` converts to max_steps, rounded up",
    "trainer.val_check_interval": "number of training batches between validations",
    "trainer.check_val_every_n_epoch": "number of passes over the training data between validations, which `fit` "
    "converts to val_check_interval",
    "print_config": "print all settings after applying the other arguments, and exit",
}
"""Help of options whose own help, of Lightning and jsonargparse, does not apply here."""


class ConfigFile(ActionConfigFile):
    """Action of the `--config` option, which accepts experiment names and reports YAML errors with file and line."""

    def __call__(self, parser: Any, cfg: Any, values: Any, option_string: str | None = None) -> None:
        values = str(experiment_path(values))
        text = read_yaml_text(Path(values), "--config")
        parse_yaml(text, Path(values), "--config")
        # The text, since the parser reads no files; the comment, since it takes a lone `NAME:` for a string.
        super().__call__(parser, cfg, f"#\n{text}", option_string)
        cfg[self.dest][-1] = values
        for name in ("trainer", "checkpoint", "heartbeat"):  # the parser checks classes only
            if not isinstance(cfg[name], Namespace):
                raise UserError(f"{name} must be a mapping of settings, NAME: VALUE, but is {cfg[name]} in {values!r}")


class Parser(LightningArgumentParser):
    """LightningArgumentParser that does not require the arguments that a network or a task takes from the data."""

    def add_class_arguments(self, theclass: type, *arguments: Any, **settings: Any) -> list[str]:
        added = super().add_class_arguments(theclass, *arguments, **settings)
        if issubclass(theclass, Network | TaskModule):
            for action in actions(self):
                if action.required and action.dest != "network":
                    action.required, action.default = False, SUPPRESS
        return added


def add_options(parser: LightningArgumentParser, command: str) -> None:
    """Add the options of the framework to the parser of a command."""
    parser.link_arguments("seed_everything", "data.init_args.seed")
    parser.add_lightning_class_args(Checkpoints, "checkpoint")
    parser.add_lightning_class_args(Heartbeat, "heartbeat")
    parser.add_argument(
        "--dry-run", "--dry_run", action="store_true", help="check all settings and run one batch, but write nothing"
    )
    parser.add_argument(
        "--name", type=str | None, default=None, help="write to runs/NAME (default: the name of the experiment)"
    )
    parser.add_argument("--trust-package", "--trust_package", default="", metavar="NAME[,NAME]", help=TRUST_HELP)
    # The configuration of a run has this setting, so that the other commands must accept it.
    skipping = "evaluate the best checkpoint on the validation data instead of the test data"
    help = skipping if command == "fit" else SUPPRESS
    parser.add_argument("--skip-test", "--skip_test", action="store_true", help=help)
    if command == "fit":
        parser.epilog = (
            "--seeds 1..5 trains once per seed; with --jobs N, N runs at a time. --fork RUN@STEP begins as a run was "
            "at a step, by default with its settings."
        )


def correct_help(parser: LightningArgumentParser, command: str) -> None:
    """Correct what Lightning takes from docstrings: the description, titles of groups, and reStructuredText in help.

    Also hide the settings that `fit` refuses.
    """
    parser.description = purpose(command)
    titles = {"trainer": "Settings of Lightning's Trainer", command: "Checkpoint"}
    for name, group in (parser.groups or {}).items():
        group.title = titles.get(name, group.title)
    texts = HELP | {"ckpt_path": RESUMED if command == "fit" else EVALUATED}
    for action in actions(parser):
        if action.dest.removeprefix("trainer.") in HIDDEN:
            action.help = SUPPRESS
        elif action.dest in texts:
            action.help = texts[action.dest]
        elif action.help:  # a role with `~` shows the last part of its target
            text = re.sub(r":\w+:`~(?:\w+\.)*(\w+)`", r"\1", action.help)
            action.help = re.sub(r":\w+:`(?:.*? <)?([^`>]+)>?`|``(.*?)``", r"\1\2", text)


def configure_parsing(trust_packages: list[str]) -> None:
    """Restrict jsonargparse to trusted classes, to YAML of limited size, and to the files of `--config`."""
    # This logger discards all records; without a level, one would be created for each denied name, which takes 0.1 s.
    logging.getLogger("jsonargparse_null_logger").setLevel(logging.CRITICAL)
    set_parsing_settings(**import_policy(trust_packages), instantiate_subclass_spec_in_any=False)
    if not issubclass(base := yaml_loader(), BoundedLoader):

        class ParserLoader(BoundedLoader, base):  # type: ignore[valid-type, misc]  # a base class in a variable
            """Loader of files, and of single values."""

            def get_single_data(self) -> Any:
                """Return None also for the value "None", as jsonargparse passes null to the parser of a class."""
                return None if (value := super().get_single_data()) == "None" else value

        replace_yaml_loader(ParserLoader)
    read_no_files()
