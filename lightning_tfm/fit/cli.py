"""Command-line interface of fit, validate and test."""

from __future__ import annotations

import errno
import gc
import inspect
import logging
import math
import os
import re
import sys
import warnings
from argparse import SUPPRESS, ArgumentError
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, cast

import yaml
from jsonargparse import ActionConfigFile, Namespace, _loaders_dumpers, _optionals, set_parsing_settings
from lightning import Trainer
from lightning.pytorch.callbacks import ProgressBar as AnyProgressBar
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.distributed.constants import default_pg_timeout

from lightning_tfm import networks, tasks
from lightning_tfm.callbacks import Checkpoints, Heartbeat, ProgressBar, Provenance
from lightning_tfm.callbacks.checkpoints import check_interval
from lightning_tfm.callbacks.heartbeat import is_of_communication
from lightning_tfm.callbacks.provenance import head_commit
from lightning_tfm.callbacks.save_config import SaveConfig
from lightning_tfm.checkpoint import bounded_by, read_index
from lightning_tfm.config.experiments import find_experiment
from lightning_tfm.config.parsing_errors import format_error
from lightning_tfm.config.settings import BoundedLoader, parse_yaml, read_yaml_text
from lightning_tfm.config.trust import TRUST_HELP, check_classes, import_policy, search_current_folder, trusted_packages
from lightning_tfm.data import BatchDivision, TaskDataModule
from lightning_tfm.distributed.launch import check_processes, launched_settings, meet_processes
from lightning_tfm.distributed.strategies import TIMEOUT
from lightning_tfm.errors import (
    Interrupted,
    UserError,
    escape_controls,
    handle_signals,
    interrupt,
    rank_zero_print,
    shell_quote,
)
from lightning_tfm.fit.arguments import with_options
from lightning_tfm.fit.console import print_next_commands, print_results, print_upload_command
from lightning_tfm.fit.folder import RunFolder, check_empty
from lightning_tfm.fit.resuming import (
    Resumption,
    changed_settings,
    check_changes,
    check_data,
    find_run,
    newest_checkpoint,
    open_run,
)
from lightning_tfm.fit.trainer_settings import (
    HIDDEN,
    as_list,
    check_evaluations,
    check_settings,
    continue_run,
    defaults,
    loggers_of_run,
)
from lightning_tfm.loggers import describe_run, discard_tensorboard, resume_loggers, run_folder, wandb_loggers
from lightning_tfm.optimizers import LRSchedule
from lightning_tfm.system.files import relative
from lightning_tfm.system.memory import gc_disabled, keep_freed_memory
from lightning_tfm.tasks import TaskModule
from lightning_tfm.tasks.checks import check_callbacks, check_epochs, check_limits, check_pair, check_strategy

CKPT_PATH_HELP = {
    "fit": "checkpoint to start from: a file, the folder of a run to resume, or `last` for the newest unfinished run "
    "of the experiment or, if there is none, the newest finished run, if it can be extended",
    "validate": "checkpoint to evaluate: a file, or `last` for the newest one of the experiment",
    "test": "checkpoint to evaluate: a file, or `last` for the newest one of the experiment",
}
"""Help of `--ckpt_path`, by command."""

HELP = {
    "trainer.max_steps": "number of optimizer steps of the run",
    "trainer.max_epochs": "number of passes over the training data, which `fit` converts to max_steps, rounded up",
    "trainer.val_check_interval": "number of training batches between validations",
    "trainer.check_val_every_n_epoch": "number of passes over the training data between validations, which `fit` "
    "converts to val_check_interval",
    "print_config": "print all settings after applying the other arguments, and exit",
    "seed_everything": "the seed of the weights, the generated data, the order of the batches and dropout",
}
"""Help of options of Lightning and jsonargparse whose own help does not apply here."""

FULL_DISK = (errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", None))
"""Errors of writing to a full disk, a file of the maximum size, and beyond a quota, which Windows lacks."""


class ConfigFile(ActionConfigFile):
    """Action of the `--config` option, which accepts experiment names and reports YAML errors with file and line."""

    def __call__(self, parser: Any, cfg: Any, values: Any, option_string: str | None = None) -> None:
        if values and not os.path.exists(values) and "/" not in values and not values.endswith((".yaml", ".yml")):
            values = str(find_experiment(values))
        text = read_yaml_text(Path(values), "--config")
        parse_yaml(text, Path(values), "--config")
        # The text, since the parser reads no files; the comment, since it takes a lone `NAME:` for a string.
        super().__call__(parser, cfg, f"#\n{text}", option_string)
        cfg[self.dest][-1] = values
        for name in ("trainer", "checkpoint", "heartbeat"):  # the parser checks classes only
            if not isinstance(cfg[name], Namespace):
                raise UserError(f"{name} must be a mapping of settings, NAME: VALUE, but is {cfg[name]} in {values!r}")


class ParserLoader(BoundedLoader, _loaders_dumpers.get_yaml_default_loader()):  # type: ignore[misc]  # untyped
    """Loader of the parser, for YAML files and for values of settings."""


class TfmCLI(LightningCLI):
    """LightningCLI that sets arguments of the model from the data, such as the size of the vocabulary.

    Args:
        arguments: positional arguments of LightningCLI.
        command: the command to run: fit, validate or test. Only its parser is built; each other one would take 0.1 s.
        settings: further arguments of LightningCLI.

    Attributes:
        resumed: the run that `fit` resumes; None for a new run.
        changed: the settings that differ from the checkpoint from which training starts, as (old, new).
        checkpoint: the content of the checkpoint from which training starts or that is evaluated, until it is checked.
        folder: the folder of the run or the test.
    """

    def __init__(self, *arguments: Any, command: str, **settings: Any) -> None:
        self.command = command
        self.resumed: Resumption | None = None
        self.changed: dict[str, tuple[Any, Any]] = {}
        self.checkpoint: dict[str, Any] = {}
        self.folder = RunFolder()
        try:
            super().__init__(*arguments, **settings)
        except BaseException as error:
            if isinstance(error, Interrupted) and (run := self.folder.resumable):
                error.ckpt_path = relative(run)
            if self.folder.discard_if_empty():
                discard_tensorboard(self.trainer.loggers)
            if isinstance(error, OSError) and error.errno in FULL_DISK and self.folder.holds(error.filename):
                run = self.folder.resumable
                again = f"resume with --ckpt_path {shell_quote(relative(run))}" if run else "repeat the command"
                raise UserError(
                    f"{str(error.filename)!r} cannot be written: {error.strerror}; free disk space, then {again}"
                ) from error
            raise

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]  # an instance method
        """Return the command with the arguments to skip."""
        skipped = {"weights_only"} if self.command == "fit" else {"weights_only", "verbose"}
        return {self.command: LightningCLI.subcommands()[self.command] | skipped}

    def init_parser(self, **settings: Any) -> LightningArgumentParser:
        parser = LightningArgumentParser(**settings)
        parser.add_argument("-c", "--config", action=ConfigFile, help="a YAML file; later files override earlier ones")
        return parser

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--seed_everything",
            type=int,
            default=self.seed_everything_default,
            help="seed of the data, the weights and dropout; at least 0",
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        # Arguments without a default are taken from the data module once it is constructed.
        for name in _required_arguments(networks):
            parser.link_arguments(f"data.{name}", f"model.init_args.network.init_args.{name}", apply_on="instantiate")
        for name in _required_arguments(tasks, except_for="network"):
            parser.link_arguments(f"data.{name}", f"model.init_args.{name}", apply_on="instantiate")
        parser.link_arguments("seed_everything", "data.init_args.seed")
        parser.add_lightning_class_args(Checkpoints, "checkpoint")
        parser.add_lightning_class_args(Heartbeat, "heartbeat")
        parser.add_argument(
            "--dry-run",
            action="store_true",
            help="check all settings and run one batch, but write nothing",
        )
        parser.add_argument(
            "--trust-package",
            default="",
            metavar="NAME[,NAME]",
            help=TRUST_HELP,
        )

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **settings: Any) -> LightningArgumentParser:
        """Hide arguments, and remove reStructuredText from help texts, which Lightning takes from docstrings."""
        parser = super()._prepare_subcommand_parser(klass, subcommand, **settings)
        if subcommand == "fit":
            parser.epilog = "--seeds 1..5 trains once per seed; with --jobs N, N runs at a time."
        for action in parser._actions:
            if action.dest.removeprefix("trainer.") in HIDDEN:
                action.help = SUPPRESS
            elif replaced := (HELP | {"ckpt_path": CKPT_PATH_HELP[subcommand]}).get(action.dest):
                action.help = replaced
            elif action.help:  # a role with `~` shows the last part of its target
                text = re.sub(r":\w+:`~(?:\w+\.)*(\w+)`", r"\1", action.help)
                action.help = re.sub(r":\w+:`(?:.*? <)?([^`>]+)>?`|``(.*?)``", r"\1\2", text)
        # The configuration of a run has this setting, so that the other commands must accept it.
        skipping = "evaluate the best checkpoint on the validation data instead of the test data"
        parser.add_argument("--skip-test", action="store_true", help=skipping if subcommand == "fit" else SUPPRESS)
        return parser

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        try:
            super().parse_arguments(parser, args)
        except (ArgumentError, TypeError, ValueError) as error:
            accepted = self._subcommand_parsers[self.command].get_defaults().keys()
            raise UserError(format_error(error, accepted)) from None
        config = self.config[self.config.subcommand]
        if config.trust_package and not trusted_packages():
            raise UserError("--trust-package must be given on the command line, but is in a YAML file")
        check_classes(config.as_dict(), trusted_packages())
        check_settings(config)
        given = [argument.partition("=")[0] for argument in cast(list[str], args)]
        for name, converted in (("max_epochs", "max_steps"), ("check_val_every_n_epoch", "val_check_interval")):
            epochs, steps = config.trainer[name], config.trainer[converted]
            if epochs not in (None, -1) and f"--trainer.{converted}" in given:
                if f"--trainer.{name}" in given:
                    raise UserError(
                        f"trainer.{name} ({epochs}) and trainer.{converted} ({steps}) are mutually exclusive; leave "
                        "one out"
                    )
                config.trainer[name] = None  # of a YAML file

    def _parse_ckpt_path(self) -> None:
        """Ignore the checkpoint's hyper-parameters: the YAML file defines the model, and `check_fits` compares them."""

    def before_instantiate_classes(self) -> None:
        """Resolve `--ckpt_path` to a checkpoint, and find the run that `fit` resumes."""
        subcommand = self.config.subcommand
        config = self.config[subcommand]
        check_pair(_class(config.model.class_path), _class(config.data.class_path))
        if subcommand == "fit":
            _convert_epochs(config)
        has_loggers = config.trainer.logger is not False
        if has_loggers:
            names = [Path(str(path)).stem for path in config.config or []]
            config.trainer.logger = loggers_of_run(config.trainer.logger, names[0] if names else "unnamed")
        self.original_config, self.config = self.config, self.config.clone()
        config = self.config[subcommand]
        config.trainer.fast_dev_run = config.trainer.fast_dev_run or config.dry_run
        path = config.ckpt_path
        if path is not None and Path(path).is_file():
            self.changed = self._changed_settings(Path(path))
        elif path is not None and not has_loggers:
            raise UserError(
                f"--ckpt_path must be a file if trainer.logger is false, but is {path!r}; name a checkpoint"
            )
        elif path is not None:
            self._find_checkpoint(config)

    def _find_checkpoint(self, config: Namespace) -> None:
        """Find the checkpoint of the run to resume or, except for `fit`, the newest checkpoint of the experiment."""
        logger = config.trainer.logger[0].init_args
        folder = Path(logger.save_dir, str(logger.name))
        if self.config.subcommand != "fit":
            if config.ckpt_path == "last":
                config.ckpt_path = str(newest_checkpoint(folder))
                self.changed = self._changed_settings(Path(config.ckpt_path))
            return
        schedule = config.model.init_args.get("lr_schedule")  # a module of the user may have none
        scheduled = schedule is not None and LRSchedule(**schedule.as_dict()).needs_max_steps
        self.resumed = find_run(config.ckpt_path, folder, None if scheduled else config.trainer.max_steps)
        if self.resumed is None:
            config.ckpt_path = None if config.ckpt_path == "last" else config.ckpt_path
            return
        config.ckpt_path = str(self.resumed.checkpoint)
        self.changed = self._changed_settings(self.resumed.checkpoint)
        check_changes(self.resumed.run, self.changed, scheduled)
        path = self.resumed.checkpoint
        rank_zero_print(
            f"extending the run of {path} in a new folder" if self.resumed.extends else f"resuming from {path}"
        )
        if not self.resumed.extends:
            continue_run(config.trainer.logger, self.resumed.run)

    def _changed_settings(self, path: Path) -> dict[str, tuple[Any, Any]]:
        """Read a checkpoint, and return the settings that differ from its settings."""
        self.checkpoint = read_index(path)
        return changed_settings(self.checkpoint, path, self.settings())

    def settings(self) -> dict[str, Any]:
        """Return the settings of the command as in config.yaml."""
        original = self.original_config[self.config.subcommand]
        settings = self._parser(self.config.subcommand).dump(original, skip_unset=False)
        return cast(dict[str, Any], yaml.safe_load(settings))

    def instantiate_classes(self) -> None:
        """Construct the data module first, which provides the values of network settings that are null."""
        config = self.config[self.config.subcommand]
        try:
            with gc_disabled():
                config.data = _new_data(config)
            network = config.model.init_args.network
            for name, value in _class(network.class_path).data_settings(config.data).items():
                if network.init_args.get(name) is None:
                    network.init_args[name] = value
            with bounded_by(self.checkpoint["state_dict"], network.init_args) if self.checkpoint else nullcontext():
                self.instantiate_model_and_trainer()
        except (ArgumentError, MisconfigurationException, OverflowError, TypeError, ValueError) as error:
            raise UserError(format_error(error)) from error

    def instantiate_model_and_trainer(self) -> None:
        """Construct the model and the Trainer, after the data module."""
        super().instantiate_classes()

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Construct the Trainer, with a progress bar in a terminal, and with a validation at the end of short runs."""
        config = self._get(self.config_init, "trainer")
        interval, batches = config.val_check_interval, config.max_steps * config.accumulate_grad_batches
        if type(interval) is int and config.check_val_every_n_epoch is None and 0 < batches < interval:
            kwargs["val_check_interval"] = batches
        callbacks = as_list(config.callbacks)
        bars = [callback for callback in callbacks if isinstance(callback, AnyProgressBar)]
        if config.enable_progress_bar is None:  # depends on the terminal, so it is not saved in config.yaml
            kwargs["enable_progress_bar"] = sys.stdout.isatty()
            if bars and not sys.stdout.isatty():
                kwargs["callbacks"] = [callback for callback in callbacks if callback not in bars]
        shown = kwargs.get("enable_progress_bar", config.enable_progress_bar)
        if shown and not bars:
            kwargs["callbacks"] = [*callbacks, ProgressBar()]
        kwargs |= launched_settings(config)
        effective, self.config = self.config, self.original_config  # saved as config.yaml
        try:
            return super().instantiate_trainer(**kwargs)
        finally:
            self.config = effective

    def after_instantiate_classes(self) -> None:
        strategy = self.trainer.strategy
        if isinstance(strategy, DDPStrategy) and strategy._timeout == default_pg_timeout:
            strategy._timeout = TIMEOUT
        check_strategy(strategy)
        check_processes(self.trainer)
        if self.trainer.profiler is not None:  # it logs its table, see `run`
            logging.getLogger("lightning.pytorch.profilers").setLevel(logging.INFO)
        check_callbacks(self.trainer)
        for callback in self.trainer.callbacks:
            if isinstance(callback, Provenance):
                callback.changed = self.changed
                callback.begins_with = None if self.resumed else self._get(self.config, "ckpt_path")
            elif isinstance(callback, Checkpoints):
                callback.enabled = bool(self.trainer.loggers)
                callback.extended = self.resumed.run if self.resumed and self.resumed.extends else None
        if self.subcommand == "fit" and self._get(self.config, "skip_test"):
            self.datamodule.skip_test()
        self.datamodule.trainer = self.trainer  # as Lightning does when it starts, later than the checks
        self.model.check_data(self.datamodule, self.trainer)
        settings = self.config[self.subcommand].trainer  # a dry run replaces those of the trainer
        check_limits(strategy, settings)
        if self.subcommand == "fit":
            check_epochs(self.trainer)
            self.model.lr_schedule.check_max_steps(settings.max_steps)
            if settings.limit_val_batches != 0 and isinstance(settings.val_check_interval, int):
                check_interval(settings.val_check_interval, self.trainer.accumulate_grad_batches)
        path = self._get(self.config, "ckpt_path")
        if path is not None:
            checkpoint, self.checkpoint = self.checkpoint or read_index(path), {}
            self.model.check_checkpoint(checkpoint, path, self.trainer, resuming=self.subcommand == "fit")
            self.step, self.fingerprint = checkpoint["global_step"], checkpoint.get("data_fingerprint", {})
            # A resumed run may lack only its test.
            if self.subcommand == "fit" and settings.max_steps < self.step + (self.resumed is None):
                raise UserError(
                    f"trainer.max_steps must be {'at least' if self.resumed else 'above'} the step of the checkpoint "
                    f"{path!r} ({self.step}), but is {settings.max_steps}; raise it"
                )
        elif self.subcommand != "fit":
            raise UserError(f"--ckpt_path must name the checkpoint to {self.subcommand}, but is missing")

    def _run_subcommand(self, subcommand: str) -> None:
        try:
            super()._run_subcommand(subcommand)
        except MisconfigurationException as error:
            raise UserError(format_error(error)) from error
        except RuntimeError as error:
            if "Early stopping conditioned on metric" in str(error):
                raise UserError(f"trainer.callbacks: {error}") from error
            if self.trainer.world_size > 1 and is_of_communication(error):
                reason = re.sub(r"^\[.*?\]\s*", "", str(error).splitlines()[0]).partition(" This is typically")[0]
                raise UserError(
                    f"the processes of a run must reach each other, but {reason.rstrip('.')!r}; the output of the "
                    "others may show why"
                ) from error
            raise

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        ours: dict[str, Any] = {"weights_only": True} | ({} if subcommand == "fit" else {"verbose": False})
        if subcommand == "fit" and self.trainer.fast_dev_run:
            ours["ckpt_path"] = None  # the checkpoint has been checked, and its step may be the last
        # last, since it waits for other processes, which may fail in the checks before
        self.store = meet_processes(self.trainer)
        return super()._prepare_subcommand_kwargs(subcommand) | ours

    def before_fit(self) -> None:
        """Create or reopen the folder of the run; a resumed run keeps the metrics up to its checkpoint."""
        path = self._get(self.config, "ckpt_path")
        for logger in wandb_loggers(self.trainer):
            logger.connect()  # while the data are set up
        # Set up the data first, since invalid data or weights must not leave a folder behind.
        self.datamodule.setup("fit")
        self.datamodule.training_batches(self.datamodule.division)
        check_evaluations(self.config[self.subcommand].trainer, self.datamodule)
        if path is None:
            self.model.load_pretrained()
        if self.resumed is not None:
            data = self.datamodule
            check_data(self.resumed.run, self.fingerprint, data.fingerprint, data.skips_test)
        if not self.trainer.loggers:
            rank_zero_print("trainer.logger is false: no checkpoint is saved, and the last weights are tested")
        if self._enter("version"):
            self.lock = open_run(self.trainer.logger, self.resumed, None if path is None else self.step)
            if self.resumed is not None:
                resume_loggers(self.trainer.loggers, self.step)

    def before_validate(self) -> None:
        """Create the folder of the validation."""
        self._enter("validate")

    def before_test(self) -> None:
        """Create the folder of the test."""
        self._enter("test")

    def _enter(self, prefix: str) -> bool:
        """Create the folder of the run or the test unless a logger names it, and log a description of the run.

        Args:
            prefix: the prefix of the folder name.

        Returns:
            Whether this process writes to the folder.
        """
        logger = self.trainer.logger
        if not isinstance(logger, CSVLogger) or rank_zero_only.rank:  # type: ignore[attr-defined]  # set by Lightning
            return False
        self.folder.enter(logger, prefix)
        if self.subcommand != "fit":
            check_empty(Path(logger.log_dir))
        parts = (self.model, self.model.network, self.datamodule)
        describe_run(self.trainer.loggers, [type(part).__name__ for part in parts], head_commit(Path.cwd()))
        return True

    def after_validate(self) -> None:
        """Print the metrics, as after a test, and the folder of the results."""
        folder = run_folder(self.trainer)
        if self.trainer.is_global_zero and self.trainer.fast_dev_run:
            print("dry run passed: evaluated one batch; nothing was written")
        elif self.trainer.is_global_zero:
            print_results(self.trainer)
            for name, signature in self.model.signatures.items():
                print(f"{name}: {signature}")
            if folder is not None:
                print(f"\nThe results are saved in {escape_controls(relative(folder))}.")
            print_upload_command(self.trainer)

    after_test = after_validate

    def after_fit(self) -> None:
        """Test the best checkpoint."""
        if self.trainer.fast_dev_run:
            if self.trainer.is_global_zero:
                print("dry run passed: trained and validated on one batch; nothing was written")
            return
        # The user may add other checkpoint callbacks.
        checkpoints = next(other for other in self.trainer.checkpoint_callbacks if isinstance(other, Checkpoints))
        path = checkpoints.best_model_path or checkpoints.last_model_path  # without validation, there is no best one
        self.trainer.test(
            self.model, datamodule=self.datamodule, ckpt_path=path or None, weights_only=True, verbose=False
        )
        if self.trainer.is_global_zero:
            for logger in wandb_loggers(self.trainer):
                logger.log_checkpoint(path)
            print_results(self.trainer)
            if path:
                print_next_commands(self.trainer, relative(path), ",".join(trusted_packages()))


def run(arguments: list[str], cli: type[TfmCLI] = TfmCLI) -> TfmCLI:
    """Run fit, validate or test.

    Args:
        arguments: the command and its arguments.
        cli: the class that parses and runs the command.

    Returns:
        The instance of the class, after the command.
    """
    keep_freed_memory()
    gc.freeze()  # exclude imported objects, which stay alive, from garbage collection
    handle_signals(interrupt)  # during training, Checkpoints replaces this handler to save first
    trust_packages = trusted_packages()
    if trust_packages:
        search_current_folder(trust_packages)
    # This logger discards all records; without a level, one would be created for each denied name, which takes 0.1 s.
    logging.getLogger("jsonargparse_null_logger").setLevel(logging.CRITICAL)
    set_parsing_settings(**import_policy(trust_packages), instantiate_subclass_spec_in_any=False)
    _loaders_dumpers.yaml_default_loader = ParserLoader  # type: ignore[assignment]  # None before its first use
    # No path matches this mode (a file and not a file), so that jsonargparse reads no setting from a file or address.
    _optionals._config_read_mode = "fF"
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)  # errors are a single line
    # Lightning 2.6 calls a function that torch 2.13 has deprecated
    warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated")
    # torch 2.13 has deprecated what FSDP2 calls; its successor does not exist in torch 2.9
    warnings.filterwarnings("ignore", ".*all_gather_into_tensor. is deprecated")
    # Lightning constructs DDP on a side stream; autograd synchronizes it with the stream of the backward pass
    warnings.filterwarnings("ignore", "The AccumulateGrad node's stream does not match")
    # Data are in memory, so workers do not help; runs may be short.
    warnings.filterwarnings("ignore", ".*does not have many workers")
    warnings.filterwarnings("ignore", "The number of training batches .* is smaller than the logging interval")
    # The arguments are taken from the command line, with positional arguments replaced by options.
    warnings.filterwarnings("ignore", ".*args parameter is intended to run from within Python")
    strict = {"exit_on_error": False, "allow_abbrev": False}
    command = arguments[0]
    with TemporaryDirectory() as folder:
        return cli(
            TaskModule,
            TaskDataModule,
            save_config_callback=SaveConfig,
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,  # the modules do
            load_from_checkpoint_support=False,  # see lightning_tfm.inference.loading
            seed_everything_default=0,
            trainer_defaults=defaults(),
            parser_kwargs=strict | {command: dict(strict)},
            command=command,
            args=with_options(arguments, Path(folder)),
        )


def _required_arguments(package: ModuleType, except_for: str = "") -> list[str]:
    """Return the names of arguments without a default value of all concrete classes that a package exports."""
    classes = [cls for name in package.__all__ if not inspect.isabstract(cls := getattr(package, name))]
    return sorted(
        {
            argument.name
            for cls in classes
            for argument in inspect.signature(cls).parameters.values()
            if argument.default is argument.empty and argument.name != except_for
        }
    )


def _new_data(config: Namespace) -> TaskDataModule:
    """Construct the data module of the settings of a command."""
    return cast(TaskDataModule, _class(config.data.class_path)(**config.data.init_args.as_dict()))


def _convert_epochs(config: Namespace) -> None:
    """Replace passes over the training data with steps and batches, since a run is a single epoch of Lightning.

    `trainer.max_epochs` becomes `trainer.max_steps`, and `trainer.check_val_every_n_epoch` becomes
    `trainer.val_check_interval`, both rounded up to complete steps.

    Args:
        config: the settings of `fit`.
    """
    settings = config.trainer
    max_epochs, between = settings.max_epochs, settings.check_val_every_n_epoch
    if max_epochs in (None, -1) and between is None:
        return
    try:
        data = _new_data(config)
    except (TypeError, ValueError) as error:
        raise UserError(format_error(error)) from error
    data.datasets = {"train": data.examples("train")}
    batches = len(data.training_batches(BatchDivision()).batches(0))  # of all processes, the same in each epoch
    accumulated = settings.accumulate_grad_batches
    if max_epochs not in (None, -1):
        settings.max_epochs, settings.max_steps = None, math.ceil(max_epochs * batches / accumulated)
        rank_zero_print(
            f"trainer.max_epochs {max_epochs} ({batches:,} batches per epoch) corresponds to trainer.max_steps "
            f"{settings.max_steps:,}"
        )
    if between is not None:
        settings.check_val_every_n_epoch = None
        settings.val_check_interval = math.ceil(between * batches / accumulated) * accumulated
        rank_zero_print(
            f"trainer.check_val_every_n_epoch {between} ({batches:,} batches per epoch) corresponds to "
            f"trainer.val_check_interval {settings.val_check_interval:,}"
        )


def _class(path: str) -> Any:
    """Return the class of a path, whose module the parser has imported."""
    module, _, name = path.rpartition(".")
    return getattr(sys.modules[module], name)
