"""The command line of fit, validate and test: parses settings, and links the model to the data."""

from __future__ import annotations

import gc
import inspect
import logging
import os
import signal
import sys
import warnings
from argparse import ArgumentError, ArgumentParser
from pathlib import Path
from types import ModuleType
from typing import Any

from jsonargparse import ActionConfigFile, Namespace, set_parsing_settings
from lightning import Trainer
from lightning.pytorch.callbacks import ProgressBar as AnyProgressBar
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_tfm import modules, networks
from lightning_tfm.callbacks import (
    AttentionLogger,
    Checkpoints,
    Predictions,
    ProgressBar,
    Provenance,
    Summary,
    Telemetry,
)
from lightning_tfm.callbacks.provenance import wandb_run
from lightning_tfm.callbacks.save_config import SaveConfig
from lightning_tfm.callbacks.summary import signatures
from lightning_tfm.catalog import find_experiment
from lightning_tfm.checkpoint import read
from lightning_tfm.configuration import read_yaml
from lightning_tfm.console import print_results, print_upload_command
from lightning_tfm.data import TaskDataModule
from lightning_tfm.errors import UserError, interrupt
from lightning_tfm.files import relative
from lightning_tfm.loggers import wandb_loggers
from lightning_tfm.memory import keep_freed_memory
from lightning_tfm.modules import TaskModule
from lightning_tfm.modules.pairing import check_pair
from lightning_tfm.modules.task import check_strategy
from lightning_tfm.parsing_errors import format_error
from lightning_tfm.resuming import lock_run, reopen_metrics, resumable_checkpoint
from lightning_tfm.trust import TRUST_HELP, check_classes, import_policy, package_names, search_current_folder

CSV, WANDB = "lightning.pytorch.loggers.CSVLogger", "lightning_tfm.loggers.WandbLogger"
"""The default loggers."""


class ConfigFile(ActionConfigFile):
    """The `--config` option: reports mistakes in a YAML file by file and line."""

    def __call__(self, parser: Any, cfg: Any, values: Any, option_string: str | None = None) -> None:
        if values and not os.path.exists(values) and "/" not in values and not values.endswith((".yaml", ".yml")):
            values = str(find_experiment(values))
        if os.path.isfile(values):  # a pipe could not be read twice
            read_yaml(Path(values), "--config")
        super().__call__(parser, cfg, values, option_string)
        for name in ("trainer", "checkpoint"):  # the parser checks classes only
            if not isinstance(cfg[name], Namespace):
                raise UserError(f"{name} must be a mapping of settings, NAME: VALUE, but is {cfg[name]} in {values!r}")


class TfmCLI(LightningCLI):
    """LightningCLI that takes the vocabulary and the lengths of the model from the data."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return the subcommands; `lightning-tfm generate` replaces `predict`, and checkpoints are read as data."""
        commands = LightningCLI.subcommands()
        return {name: commands[name] | {"weights_only"} for name in ("fit", "validate", "test")}

    def init_parser(self, **settings: Any) -> LightningArgumentParser:
        parser = LightningArgumentParser(**settings)
        parser.add_argument("-c", "--config", action=ConfigFile, help="a YAML file; a later one overrides an earlier")
        return parser

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--seed_everything", type=int, default=self.seed_everything_default, help="from 0 on")

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        # Arguments without a default are taken from the data module once it is constructed.
        for name in _required_arguments(networks):
            parser.link_arguments(f"data.{name}", f"model.init_args.network.init_args.{name}", apply_on="instantiate")
        for name in _required_arguments(modules, except_for="network"):
            parser.link_arguments(f"data.{name}", f"model.init_args.{name}", apply_on="instantiate")
        parser.link_arguments("seed_everything", "data.init_args.seed")
        parser.add_lightning_class_args(Checkpoints, "checkpoint")
        parser.add_argument(
            "--trust-package",
            default="",
            metavar="NAME[,NAME]",
            help=TRUST_HELP,
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        try:
            super().parse_arguments(parser, args)
        except (ArgumentError, TypeError, ValueError) as error:
            accepted = self._subcommand_parsers["fit"].get_defaults().keys()
            raise UserError(format_error(error, accepted)) from None
        config = self.config[self.config.subcommand]
        if config.trust_package and not _trust_packages():
            raise UserError("--trust-package must be given on the command line, but is in a YAML file")
        check_classes(config.as_dict(), _trust_packages())
        if not 0 <= config.seed_everything < 2**32:
            raise UserError(f"seed_everything must be from 0 to {2**32 - 1}, but is {config.seed_everything}; try 1")
        if config.trainer.overfit_batches:
            raise UserError(
                f"trainer.overfit_batches must be 0, but is {config.trainer.overfit_batches}; "
                "to learn few pairs by heart, lower data.init_args.train_size"
            )
        for name in ("val_check_interval", "check_val_every_n_epoch", "accumulate_grad_batches"):
            if isinstance(config.trainer[name], int | float) and config.trainer[name] <= 0:
                raise UserError(f"trainer.{name} must be above 0, but is {config.trainer[name]}; try 1")
        for name, unset in (("max_epochs", (None, -1)), ("limit_train_batches", (None, 1.0))):
            if config.trainer[name] not in unset:
                raise UserError(
                    f"trainer.{name} must not be set, for a run is one stream of batches until trainer.max_steps, "
                    f"but is {config.trainer[name]}; set trainer.max_steps"
                )

    def _parse_ckpt_path(self) -> None:
        """Ignore the hyper-parameters of the checkpoint: the YAML defines the model, and `check_fits` compares them."""

    def before_instantiate_classes(self) -> None:
        """Resolve `--ckpt_path last` to the newest undamaged checkpoint of the experiment, whose run `fit` resumes."""
        self.original_config = self.config
        self.config = self.config.clone()
        config = self.config[self.config.subcommand]
        check_pair(_class(config.model.class_path), _class(config.data.class_path))
        if config.trainer.logger is not False:
            names = [Path(str(path)).stem for path in config.config or []]
            config.trainer.logger = _with_csv(config.trainer.logger, names[0] if names else "unnamed")
        if config.ckpt_path != "last":
            return
        loggers = _as_list(config.trainer.logger)
        if not loggers or getattr(loggers[0], "class_path", "").rpartition(".")[2] != "CSVLogger":
            raise UserError(
                "--ckpt_path last needs lightning.pytorch.loggers.CSVLogger as first of trainer.logger, which says "
                "where the experiment's runs lie, but there is none; name a checkpoint instead"
            )
        logger = loggers[0].init_args
        path = resumable_checkpoint(Path(logger.save_dir) / str(logger.name), required=self.config.subcommand != "fit")
        config.ckpt_path = None if path is None else str(path)
        if path is not None and self.config.subcommand == "fit":
            logger.version = path.parents[1].name
            for other in loggers:
                if other.class_path == WANDB and (id := wandb_run(path.parents[1])):
                    other.init_args.id = id

    def instantiate_classes(self) -> None:
        """Construct the data first: settings of the network that are null are taken from it."""
        config = self.config[self.config.subcommand]
        try:
            config.data = _class(config.data.class_path)(**config.data.init_args.as_dict())
            network = config.model.init_args.network
            for name, value in _class(network.class_path).data_settings(config.data).items():
                if network.init_args.get(name) is None:
                    network.init_args[name] = value
            super().instantiate_classes()
        except (ArgumentError, MisconfigurationException, TypeError, ValueError) as error:
            raise UserError(format_error(error)) from error

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Validate a run that is shorter than its validation interval at its end, so that it has a best checkpoint."""
        config = self._get(self.config_init, "trainer")
        interval, batches = config.val_check_interval, config.max_steps * config.accumulate_grad_batches
        if type(interval) is int and config.check_val_every_n_epoch is None and 0 < batches < interval:
            kwargs["val_check_interval"] = batches
        callbacks = _as_list(config.callbacks)
        if config.enable_progress_bar is None:  # not in config.yaml, which is for other terminals too
            kwargs["enable_progress_bar"] = sys.stdout.isatty()
        shown = kwargs.get("enable_progress_bar", config.enable_progress_bar)
        if shown and not any(isinstance(callback, AnyProgressBar) for callback in callbacks):
            kwargs["callbacks"] = [*callbacks, ProgressBar()]
        resuming, self.config = self.config, self.original_config  # saved as config.yaml
        try:
            return super().instantiate_trainer(**kwargs)
        finally:
            self.config = resuming

    def after_instantiate_classes(self) -> None:
        check_strategy(self.trainer.strategy)
        self.model.check_data(self.datamodule, self.trainer.world_size)
        if self.subcommand == "fit" and not self.trainer.fast_dev_run:
            self.model.lr_schedule.check_max_steps(self.trainer.max_steps)
        path = self._get(self.config, "ckpt_path")
        if path is not None:
            self.model.check_checkpoint(read(path), path, self.trainer, resuming=self.subcommand == "fit")
        elif self.subcommand != "fit":
            raise UserError(f"--ckpt_path must name the checkpoint to {self.subcommand}, but is missing")

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        return super()._prepare_subcommand_kwargs(subcommand) | {"weights_only": True}

    def before_fit(self) -> None:
        """Lock the folder of the run, and keep the metrics of the steps before the checkpoint."""
        logger, path = self.trainer.logger, self._get(self.config, "ckpt_path")
        # First, so that unusable data or weights leave no folder behind.
        self.datamodule.setup("fit")
        self.datamodule.training_batches(0, self.trainer.world_size)
        if path is None:
            self.model.load_pretrained()
        if not isinstance(logger, CSVLogger) or rank_zero_only.rank:  # type: ignore[attr-defined]  # set by Lightning
            return
        self.lock = lock_run(Path(logger.log_dir))  # held until the command ends
        reopen_metrics(logger, None if path is None else read(path)["global_step"])

    def after_validate(self) -> None:
        if self.trainer.is_global_zero:
            for name, signature in signatures(self.model).items():
                print(f"{name}: {signature}")
            print_upload_command(self.trainer)

    after_test = after_validate

    def after_fit(self) -> None:
        if self.trainer.fast_dev_run:
            return
        # The user may add other checkpoint callbacks.
        checkpoints = next(other for other in self.trainer.checkpoint_callbacks if isinstance(other, Checkpoints))
        path = checkpoints.best_model_path or checkpoints.last_model_path  # there is no best one without validation
        self.trainer.test(self.model, datamodule=self.datamodule, ckpt_path=path, weights_only=True, verbose=False)
        if self.trainer.is_global_zero:
            for logger in wandb_loggers(self.trainer):
                logger.log_checkpoint(path)
            print_results(self.trainer, relative(path), ",".join(_trust_packages()))


def run() -> None:
    """Run fit, validate or test with the settings of the command line."""
    keep_freed_memory()
    gc.freeze()  # imported objects stay: keep them out of garbage collection
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, interrupt)  # while training, Checkpoints saves first
    trust_packages = _trust_packages()
    if trust_packages:
        search_current_folder()
    set_parsing_settings(**import_policy(trust_packages), instantiate_subclass_spec_in_any=False)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)  # so that an error is a single line
    # Lightning 2.6 calls a function that torch 2.13 has deprecated
    warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated")
    # Data are in memory, so workers do not help; runs may be short.
    warnings.filterwarnings("ignore", ".*does not have many workers")
    warnings.filterwarnings("ignore", "The number of training batches .* is smaller than the logging interval")
    strict = {"exit_on_error": False, "allow_abbrev": False}
    TfmCLI(
        TaskModule,
        TaskDataModule,
        save_config_callback=SaveConfig,
        subclass_mode_model=True,
        subclass_mode_data=True,
        auto_configure_optimizers=False,  # the modules do
        load_from_checkpoint_support=False,  # see lightning_tfm.loading
        seed_everything_default=0,
        trainer_defaults={
            "devices": 1,
            "check_val_every_n_epoch": None,  # val_check_interval counts batches of the whole run
            "logger": [
                {"class_path": CSV, "init_args": {"save_dir": "runs", "name": None}},
                {"class_path": WANDB, "init_args": {"save_dir": "runs", "project": "lightning_tfm"}},
            ],
            "callbacks": [Summary(), Provenance(), Telemetry(), Predictions(), AttentionLogger()],
            "enable_model_summary": False,  # Summary prints a line instead
            "enable_progress_bar": None,
            "use_distributed_sampler": False,  # the samplers of the data modules do
        },
        parser_kwargs={**strict, **{command: dict(strict) for command in TfmCLI.subcommands()}},
    )


def _required_arguments(package: ModuleType, except_for: str = "") -> list[str]:
    """Return the names of the arguments without a default of all concrete classes that a package exports."""
    classes = [cls for name in package.__all__ if not inspect.isabstract(cls := getattr(package, name))]
    return sorted(
        {
            argument.name
            for cls in classes
            for argument in inspect.signature(cls).parameters.values()
            if argument.default is argument.empty and argument.name != except_for
        }
    )


def _trust_packages() -> list[str]:
    """Return the packages named by `--trust-package`, which must be known before a configuration is parsed."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--trust-package", type=package_names, default=[])
    options, _ = parser.parse_known_args(sys.argv[1:])
    return options.trust_package


def _class(path: str) -> Any:
    """Return a class that the parser has imported."""
    module, _, name = path.rpartition(".")
    return getattr(sys.modules[module], name)


def _with_csv(logger: Any, name: str) -> list[Namespace]:
    """Return the loggers, a CSVLogger first, which creates the folder of the run.

    Args:
        logger: the setting `trainer.logger`.
        name: the name of the experiment, whose runs are saved in `runs/NAME` unless a logger has a name.
    """
    loggers = [] if logger is True else _as_list(logger)
    indices = [index for index, other in enumerate(loggers) if other.class_path.rpartition(".")[2] == "CSVLogger"]
    if indices:
        first = loggers.pop(indices[0])
    else:
        settings = Namespace(save_dir="runs", name=None, version=None, prefix="", flush_logs_every_n_steps=100)
        first = Namespace(class_path=CSV, init_args=settings)
    first.init_args.name = first.init_args.name or name
    for other in loggers:
        if other.class_path == WANDB and other.init_args.get("group") is None:
            other.init_args.group = name
    return [first, *loggers]


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]
