"""From a YAML to a run: the settings a user can make, and the links between data and model."""

from __future__ import annotations

import csv
import gc
import logging
import os
import shlex
import shutil
import signal
import sys
import warnings
from argparse import ArgumentError, ArgumentParser
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from filelock import FileLock, Timeout
from jsonargparse import ActionConfigFile, Namespace, set_parsing_settings
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar as AnyProgressBar
from lightning.pytorch.callbacks import WeightAveraging as AnyAveraging
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from rich import box
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from lightning_tfm import modules
from lightning_tfm.callbacks import Attention, Checkpoints, Predictions, ProgressBar, Provenance, Summary, Telemetry
from lightning_tfm.callbacks.checkpoints import SAVED
from lightning_tfm.callbacks.predictions import is_of_a_kind
from lightning_tfm.callbacks.provenance import wandb_run
from lightning_tfm.callbacks.summary import signatures
from lightning_tfm.checkpoint import WholeCheckpointIO, check_fits, newest, read
from lightning_tfm.configuration import read_yaml
from lightning_tfm.data import TaskDataModule
from lightning_tfm.errors import UserError, concrete, explain, interrupt, say, shell_quote
from lightning_tfm.files import relative
from lightning_tfm.loggers import wandb_loggers
from lightning_tfm.memory import keep_freed_memory
from lightning_tfm.modules import TaskModule
from lightning_tfm.modules.task import check_strategy
from lightning_tfm.trust import ALLOW_HELP, allowed_packages, check_classes, import_policy, search_current_folder

LONG = 100
"""Characters of a source that are shown then."""

ANSWERS = 3
"""Right ones, and wrong ones, that the end of a run shows."""


class ConfigFile(ActionConfigFile):
    """The `--config` option: a YAML file, whose mistakes are reported by file and line."""

    def __call__(self, parser: LightningArgumentParser, cfg: Namespace, values: str, option_string: str | None = None):
        if os.path.isfile(values):  # a pipe could not be read twice
            read_yaml(Path(values), "--config")
        super().__call__(parser, cfg, values, option_string)
        for name in ("trainer", "checkpoint"):  # which the parser does not check, as it does classes
            if not isinstance(cfg[name], Namespace):
                raise UserError(f"{name} must be a mapping of settings, NAME: VALUE, but is {cfg[name]} in {values!r}")


class TfmCLI(LightningCLI):
    """Lightning's command line, where any model of a YAML fits any data of it."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Without `predict`, for `lightning-tfm generate` answers input; and with no choice how to read checkpoints."""
        commands = LightningCLI.subcommands()
        return {name: commands[name] | {"weights_only"} for name in ("fit", "validate", "test")}

    def init_parser(self, **settings: Any) -> LightningArgumentParser:
        parser = LightningArgumentParser(**settings)
        parser.add_argument("-c", "--config", action=ConfigFile, help="a YAML file; a later one overrides an earlier")
        return parser

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--seed_everything", type=int, default=self.seed_everything_default, help="from 0 on")

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        # What the model must know of the data, it gets from the data. The links are applied once the data module
        # is constructed, which makes its vocabulary but no data yet.
        for name in ("vocab_size", "num_classes", "text_length"):
            parser.link_arguments(f"data.{name}", f"model.init_args.network.init_args.{name}", apply_on="instantiate")
        for name in ("tokenizer", "max_target_length", "labels"):
            parser.link_arguments(f"data.{name}", f"model.init_args.{name}", apply_on="instantiate")
        parser.link_arguments("seed_everything", "data.init_args.seed")
        parser.add_lightning_class_args(Checkpoints, "checkpoint")
        parser.add_argument(
            "--allow",
            default="",
            metavar="NAME[,NAME]",
            help=ALLOW_HELP,
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: object) -> None:
        try:
            super().parse_arguments(parser, args)
        except (ArgumentError, TypeError, ValueError) as error:
            accepted = self._subcommand_parsers["fit"].get_defaults().keys()
            raise UserError(explain(error, accepted)) from None
        config = self.config[self.config.subcommand]
        if config.allow and not _allowed():
            raise UserError("--allow must stand on the command line, but stands in a YAML, which cannot trust itself")
        check_classes(config.as_dict(), _allowed())
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
        """The YAML says what the model is; a checkpoint that differs is refused, see after_instantiate_classes."""

    def before_instantiate_classes(self) -> None:
        """`--ckpt_path last` is the newest whole checkpoint of the experiment; to fit is to go on in its folder."""
        self.asked = self.config
        self.config = self.config.clone()
        config = self.config[self.config.subcommand]
        _check_pair(config.model.class_path, config.data.class_path)
        if self.config.subcommand == "fit" and config.trainer.logger is not False:
            names = [Path(str(path)).stem for path in config.config or []]
            config.trainer.logger = _with_csv(config.trainer.logger, names[-1] if names else "unnamed")
        if config.ckpt_path != "last":
            return
        loggers = _as_list(config.trainer.logger)
        if not loggers or getattr(loggers[0], "class_path", "").rpartition(".")[2] != "CSVLogger":
            raise UserError(
                "--ckpt_path last needs lightning.pytorch.loggers.CSVLogger as first of trainer.logger, which says "
                "where the experiment's runs lie, but there is none; name a checkpoint instead"
            )
        logger = loggers[0].init_args
        folder = Path(logger.save_dir) / str(logger.name)
        path, damaged = newest(path for path in folder.glob("*/checkpoints/*") if SAVED.fullmatch(path.name))
        for other in damaged:
            say(f"{other} is damaged, its checksum is wrong; it is left out")
        if path is None:
            if damaged or self.config.subcommand != "fit":
                raise UserError(f"--ckpt_path last needs a whole checkpoint below {str(folder)!r}, but there is none")
            say(f"no checkpoint below {folder} yet; the run begins anew")
            config.ckpt_path = None
            return
        say(f"goes on from {path}")
        config.ckpt_path = str(path)
        if self.config.subcommand == "fit":
            logger.version = path.parents[1].name
            for other in loggers:
                if other.class_path == "lightning_tfm.loggers.WandbLogger" and (id := wandb_run(path.parents[1])):
                    other.init_args.id = id

    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except (ArgumentError, MisconfigurationException, TypeError, ValueError) as error:
            raise UserError(explain(error)) from error

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """A run shorter than its interval of validation is validated at its end, so that it has a best checkpoint."""
        config = self._get(self.config_init, "trainer")
        interval, batches = config.val_check_interval, config.max_steps * config.accumulate_grad_batches
        if type(interval) is int and config.check_val_every_n_epoch is None and 0 < batches < interval:
            kwargs["val_check_interval"] = batches
        callbacks = _as_list(config.callbacks)
        if config.enable_progress_bar is None:  # here, for config.yaml is for other terminals, too
            kwargs["enable_progress_bar"] = sys.stdout.isatty()
        shown = kwargs.get("enable_progress_bar", config.enable_progress_bar)
        if shown and not any(isinstance(callback, AnyProgressBar) for callback in callbacks):
            kwargs["callbacks"] = [*callbacks, ProgressBar()]
        kwargs["plugins"] = [*_as_list(config.plugins), WholeCheckpointIO()]
        goes_on, self.config = self.config, self.asked  # config.yaml holds what was asked for
        try:
            return super().instantiate_trainer(**kwargs)
        finally:
            self.config = goes_on

    def after_instantiate_classes(self) -> None:
        check_strategy(self.trainer.strategy)
        self.model.network.check_lengths(self.datamodule.max_source_length, self.datamodule.max_target_length)
        self.datamodule.check_processes(self.trainer.world_size)
        if self.subcommand == "fit" and not self.trainer.fast_dev_run:
            self.model.optimization.check_steps(self.trainer.max_steps)
        path = self._get(self.config, "ckpt_path")
        if path is not None:
            shapes = {name: weight.shape for name, weight in self.model.state_dict().items()}
            averages = any(isinstance(callback, AnyAveraging) for callback in self.trainer.callbacks)
            goes_on = self.subcommand == "fit"
            settings = self.model.step_settings(self.trainer)
            check_fits(path, self.model.hparams_initial, shapes, goes_on, averages, settings)
        elif self.subcommand != "fit":
            raise UserError(f"--ckpt_path must name the checkpoint to {self.subcommand}, but is missing")

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        return super()._prepare_subcommand_kwargs(subcommand) | {"weights_only": True}

    def before_fit(self) -> None:
        """A run has its folder for itself, and keeps what was logged there when it goes on."""
        logger, path = self.trainer.logger, self._get(self.config, "ckpt_path")
        # Now: where the data or the weights cannot be used, no folder is left behind.
        self.datamodule.setup("fit")
        self.datamodule.training_batches(0, self.trainer.world_size)
        if path is None:
            self.model.begin()
        if not isinstance(logger, CSVLogger) or rank_zero_only.rank:
            return
        folder = Path(logger.log_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self.lock = lock_run(folder)  # held until the command ends
        metrics, kept = folder / "metrics.csv", folder / "metrics.csv.before"
        if path is not None and metrics.exists() and not kept.exists():  # a start that was killed just here has left it
            metrics.replace(kept)
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            _ = logger.experiment  # begins its file anew, and would warn that the folder is not empty
        if not kept.exists():
            return
        steps = read(path)["global_step"]
        *lines, _ = kept.read_text(encoding="utf-8").split("\n")  # a killed process may have written a part of a line
        for row in csv.DictReader(lines):
            step = int(row.pop("step"))
            if step < steps:
                logger.log_metrics({name: value for name, value in row.items() if value}, step)
        logger.save()
        kept.unlink()

    def after_validate(self) -> None:
        if self.trainer.is_global_zero:
            for name, signature in signatures(self.model).items():
                print(f"{name}: {signature}")
            _tell_upload(self.trainer)

    after_test = after_validate

    def after_fit(self) -> None:
        if self.trainer.fast_dev_run:
            return
        # A user's own callback may keep others beside them.
        checkpoints = next(other for other in self.trainer.checkpoint_callbacks if isinstance(other, Checkpoints))
        path = checkpoints.best_model_path or checkpoints.last_model_path  # without validation none is the best
        self.trainer.test(self.model, datamodule=self.datamodule, ckpt_path=path, weights_only=True, verbose=False)
        if self.trainer.is_global_zero:
            for logger in wandb_loggers(self.trainer):
                logger.log_checkpoint(path)
            _tell(self.trainer, relative(path), ",".join(_allowed()))


def lock_run(folder: Path) -> FileLock:
    """Return a lock on the folder of a run, which is freed with this object or process, even by SIGKILL.

    Note:
        A file system without locks leaves the folder unlocked.

    Raises:
        UserError: if another process holds the lock.
    """
    lock = FileLock(folder / ".lock", blocking=False, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        raise UserError(f"the run {str(folder)!r} is locked by another process; stop that process first") from None
    except PermissionError:
        raise  # the folder belongs to another user
    except OSError:
        pass  # the file system has no locks
    return lock


def _tell(trainer: Trainer, checkpoint: str, allow: str) -> None:
    """Print the test metrics, some of the answers, and the commands that use the run."""
    console = Console(highlight=False, soft_wrap=True)
    table = Table("test", Column("", justify="right"), box=box.SIMPLE_HEAD)
    for name, value in trainer.callback_metrics.items():
        if name.startswith("test/") and not is_of_a_kind(name):  # which are in the report
            table.add_row(name.removeprefix("test/"), f"{value:.4f}")
    console.print(table)
    lines = next((other.lines for other in trainer.callbacks if isinstance(other, Predictions)), [])
    lines = [line for name, _, line in lines if name == "test"]
    wrong = sorted((line for line in lines if not line["right"]), key=lambda line: -line["nll"])
    for line in [line for line in lines if line["right"]][:ANSWERS]:
        console.print(Text.assemble("right  ", _short(line["source"]), " → ", (line["answer"], "green")))
    for line in wrong[:ANSWERS]:
        answer = (line["answer"], "red")
        console.print(Text.assemble("wrong  ", _short(line["source"]), " → ", answer, f", but it is {line['target']}"))
    folder = relative(Path(checkpoint).parents[1])
    sources = (line["source"] for line in lines if not line["source"].startswith("-"))  # which would be an option
    asked = next((shell_quote(_short(source)) for source in sources), "TEXT")
    print(f"\nThe run lies in {folder}. Ask it, look at it:\n")
    allowing = f" --allow {shlex.quote(allow)}" if allow else ""
    print(f"  {_typed('lightning-tfm')} generate {shlex.quote(checkpoint)} {asked}{allowing}")
    if Path(folder, "config.yaml").is_file():
        print(f"  {_typed('lightning-tfm')} report {shlex.quote(folder)}{allowing}")
    _tell_upload(trainer)


def _tell_upload(trainer: Trainer) -> None:
    """How a run that W&B has offline is uploaded."""
    for logger in wandb_loggers(trainer):
        if pattern := logger.offline_pattern:
            print(f"  {_typed('wandb')} sync {pattern}")


def _short(text: str) -> str:
    """The beginning of a long text."""
    return text if len(text) <= LONG else text[:LONG].rpartition(" ")[0] or text[:LONG]


def _typed(command: str) -> str:
    """What one types for a command of this environment, activated or not."""
    return command if shutil.which(command) else shlex.quote(relative(Path(sys.executable).with_name(command)))


class SaveConfig(SaveConfigCallback):
    """Saves config.yaml in the folder of a training run, and never in the folder that a user works in."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and trainer.loggers:
            self.overwrite = True  # where a run goes on
            super().setup(trainer, pl_module, stage)

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Shows the loggers all settings, as they are nested in the file."""
        settings = yaml.safe_load(self.parser.dump(self.config, skip_unset=False))
        for logger in trainer.loggers:
            logger.log_hyperparams(settings)


def run() -> None:
    """Runs fit, validate or test as the command line says."""
    keep_freed_memory()
    gc.freeze()  # what is imported stays: no garbage is looked for in it again
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, interrupt)  # during training, Checkpoints waits for a better place
    allowed = _allowed()
    if allowed:
        search_current_folder()
    set_parsing_settings(**import_policy(allowed), instantiate_subclass_spec_in_any=False)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)  # an error is one line, with no chatter before it
    # Lightning 2.6 calls what torch 2.13 has deprecated, which no user can mend
    warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated")
    # Batches are taken from data in memory, which no workers make faster; and runs may be short.
    warnings.filterwarnings("ignore", ".*does not have many workers")
    warnings.filterwarnings("ignore", "The number of training batches .* is smaller than the logging interval")
    strict = {"exit_on_error": False, "allow_abbrev": False}
    TfmCLI(
        TaskModule,
        TaskDataModule,
        save_config_callback=SaveConfig,
        subclass_mode_model=True,
        subclass_mode_data=True,
        auto_configure_optimizers=False,  # the modules do, by the step
        load_from_checkpoint_support=False,  # the modules save plain values, see lightning_tfm.checkpoint
        seed_everything_default=0,
        trainer_defaults={
            "callbacks": [Summary(), Provenance(), Telemetry(), Predictions(), Attention()],
            "enable_model_summary": False,  # Summary says in a line what there is to know
            "enable_progress_bar": None,
            "use_distributed_sampler": False,  # the data modules share batches out, see TrainingBatches
        },
        parser_kwargs={**strict, **{command: dict(strict) for command in TfmCLI.subcommands()}},
    )


def _allowed() -> list[str]:
    """What `--allow` names on the command line. It must be known before a configuration is read."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--allow", type=allowed_packages, default=[])
    options, _ = parser.parse_known_args(sys.argv[1:])
    return options.allow


def _check_pair(model: str, data: str) -> None:
    """Raises UserError, with the models that fit, if a model cannot learn from data."""
    paths = (path.rpartition(".") for path in (model, data))
    model_class, data_class = (getattr(sys.modules[module], name) for module, _, name in paths)  # imported to be parsed
    if issubclass(data_class, model_class.fits):
        return
    fitting = []
    for name in modules.__all__:
        other = getattr(modules, name)
        if issubclass(data_class, getattr(other, "fits", ())):
            networks = concrete(get_type_hints(other.__init__)["network"])
            fitting.append(f"lightning_tfm.modules.{name}, whose network is {' or '.join(networks)}")
    raise UserError(
        f"model.class_path must be a module that learns from {data_class.holds}, which {data_class.__name__} holds, "
        f"but {model_class.__name__} learns from {model_class.fits.holds}; try {'; or '.join(fitting)}"
    )


def _with_csv(logger: Any, name: str) -> list[Namespace]:
    """The loggers, the first of which writes a run's folder, `runs/NAME` where none is named."""
    loggers = [] if logger is True else _as_list(logger)
    writes_csv = [other.class_path.rpartition(".")[2] == "CSVLogger" for other in loggers]
    if any(writes_csv):
        first = loggers.pop(writes_csv.index(True))
    else:
        settings = Namespace(save_dir="runs", name=name, version=None, prefix="", flush_logs_every_n_steps=100)
        first = Namespace(class_path="lightning.pytorch.loggers.CSVLogger", init_args=settings)
    return [first, *loggers]


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]
