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
from argparse import ArgumentError
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, cast

import torch
import yaml
from jsonargparse import Namespace
from lightning import Trainer
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import ProgressBar as AnyProgressBar
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_tfm.callbacks import Checkpoints, ProgressBar, Provenance
from lightning_tfm.callbacks.heartbeat import is_of_communication
from lightning_tfm.callbacks.save_config import SaveConfig
from lightning_tfm.callbacks.training_progress import ProgressLines
from lightning_tfm.checkpoint import bounded_by, is_whole, read_index
from lightning_tfm.checkpoint.plugin import VerifiedCheckpointIO
from lightning_tfm.config.parsing_errors import format_error
from lightning_tfm.config.trust import check_classes, search_current_folder, trusted_packages
from lightning_tfm.data import TaskDataModule
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
from lightning_tfm.fit.arguments import with_options, with_underscores
from lightning_tfm.fit.console import print_next_commands, print_results, print_state_of_wandb
from lightning_tfm.fit.forking import Fork, compare_replay, find_fork, fork_names, take_fork, write_settings
from lightning_tfm.fit.resuming import (
    Resumption,
    changed_settings,
    check_changes,
    check_data,
    check_empty,
    display,
    enter_folder,
    find_run,
    newest_checkpoint,
    no_checkpoint,
    open_run,
)
from lightning_tfm.fit.settings_parser import ConfigFile, Parser, add_options, configure_parsing, correct_help
from lightning_tfm.fit.trainer_settings import (
    as_list,
    check_evaluations,
    check_settings,
    continue_run,
    defaults,
    loggers_of_run,
)
from lightning_tfm.loggers import TensorBoardLogger, describe_run, resume_loggers, run_folder, wandb_loggers
from lightning_tfm.networks import Network
from lightning_tfm.networks.network import complete
from lightning_tfm.optimizers import LRSchedule
from lightning_tfm.runs.metrics_writer import MetricsWriter
from lightning_tfm.runs.names import named_checkpoint
from lightning_tfm.runs.record import Run
from lightning_tfm.system.files import delete_folder, relative
from lightning_tfm.system.memory import gc_disabled, keep_freed_memory
from lightning_tfm.system.portability import check_portable
from lightning_tfm.system.private import actions, replace_default_timeout, set_writer
from lightning_tfm.system.versions import head_commit
from lightning_tfm.tasks import TaskModule
from lightning_tfm.tasks.base import check_pair

FULL_DISK = (errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", None))
"""Errors of writing to a full disk, a file of the maximum size, and beyond a quota, which Windows lacks."""

SILENCED = {
    r"`isinstance\(treespec, LeafSpec\)` is deprecated": "Lightning 2.6 calls what torch 2.13 deprecates",
    ".*all_gather_into_tensor. is deprecated": "FSDP2 of torch 2.13 calls it, and torch 2.9 has no successor of it",
    "The AccumulateGrad node's stream does not match": "Lightning constructs DDP on a side stream; autograd waits",
    ".*does not have many workers": "data are in memory, so that workers do not help",
    "The number of training batches .* is smaller than the logging interval": "runs may be short",
    ".*args parameter is intended to run from within Python": "`with_options` has replaced positional arguments",
}
"""Warnings that do not concern a user, and why."""


class TfmCLI(LightningCLI):
    """LightningCLI that constructs the network and the task from the data, and that resumes runs.

    Args:
        command: the command to run: fit, validate or test. Only its parser is built; each other one would take 0.1 s.
        arguments: the command and its options.
        checkpoints: the reader of the checkpoint to resume or to evaluate.
        fork: where a fork begins; None for other runs.

    Attributes:
        ckpt_path: the checkpoint from which training starts or that is evaluated; None if there is none.
        changed: the settings that differ from those of this checkpoint, as (old, new).
        resumed: the run that `fit` resumes or forks; None for a new run.
        run: the run or the test whose folder this process writes; None before, and on other processes.
        is_new: whether this process has created the folder.
        held: what exists until the run ends: the lock of its folder, and the store in which its processes meet.
    """

    EXTENDING: ClassVar = "extending the run of {} in a new folder"

    def __init__(
        self, command: str, arguments: list[str], checkpoints: VerifiedCheckpointIO, fork: Fork | None = None
    ) -> None:
        self.command, self.checkpoints, self.fork = command, checkpoints, fork
        self.ckpt_path: str | None = None
        self.changed: dict[str, tuple[Any, Any]] = {}
        self.resumed: Resumption | None = None
        self.run: Run | None = None
        self.is_new = False
        self.held: list[Any] = []
        strict = {"exit_on_error": False, "allow_abbrev": False}
        try:
            super().__init__(
                model_class=TaskModule,
                datamodule_class=TaskDataModule,
                save_config_callback=SaveConfig,
                subclass_mode_model=True,
                subclass_mode_data=True,
                auto_configure_optimizers=False,  # the tasks do
                load_from_checkpoint_support=False,  # see lightning_tfm.inference.loading
                seed_everything_default=0,
                trainer_defaults=defaults(),
                parser_kwargs=strict | {command: dict(strict)},
                args=arguments,
            )
        except BaseException as error:
            self._clean_up(error)
            raise

    def _clean_up(self, error: BaseException) -> None:
        """Delete the folder of a run without results, and tell in an error how to resume one that has some.

        Raises:
            UserError: if the disk is full.
        """
        if (run := self.run) is None:
            return
        folder, has_checkpoints = relative(run.folder), any(run.checkpoint_folder.glob("*"))
        if isinstance(error, Interrupted) and has_checkpoints:
            error.ckpt_path = folder
        if self.is_new and run.is_empty:
            delete_folder(run.folder)
            for logger in self.trainer.loggers:
                if isinstance(logger, TensorBoardLogger):
                    logger.discard()
        if isinstance(error, OSError) and error.errno in FULL_DISK and run.folder in Path(str(error.filename)).parents:
            again = f"resume with --ckpt_path {shell_quote(folder)}" if has_checkpoints else "repeat the command"
            raise UserError(
                f"{str(error.filename)!r} cannot be written: {error.strerror}; free disk space, then {again}"
            ) from error

    # The parser

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]  # an instance method
        """Return the command with the arguments to skip."""
        skipped = {"weights_only"} if self.command == "fit" else {"weights_only", "verbose"}
        return {self.command: LightningCLI.subcommands()[self.command] | skipped}

    def init_parser(self, **settings: Any) -> LightningArgumentParser:
        parser = Parser(**settings)
        parser.add_argument("-c", "--config", action=ConfigFile, help="a YAML file; later files override earlier ones")
        return parser

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--seed_everything",
            type=int,
            default=self.seed_everything_default,
            help="the seed of the weights, the generated data, the order of the batches and dropout; at least 0",
        )
        parser.add_argument(
            "--num_threads",
            type=int,
            default=1,
            help="the number of threads of each process on a CPU, on which floating-point sums depend",
        )
        parser.add_argument(
            "--portable",
            type=bool,
            default=False,
            help="compute with kernels that are the same on all x86 processors with AVX2, on a CPU",
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        add_options(parser, self.command)

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **settings: Any) -> LightningArgumentParser:
        self.command_parser = super()._prepare_subcommand_parser(klass, subcommand, **settings)
        correct_help(self.command_parser, subcommand)
        return self.command_parser

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        try:
            super().parse_arguments(parser, args)
        except (ArgumentError, TypeError, ValueError) as error:
            names = [action.dest for action in actions(self.command_parser) if action.option_strings]
            raise UserError(format_error(error, names)) from None
        if self.options.trust_package and not trusted_packages():
            raise UserError("--trust-package must be given on the command line, but is in a YAML file")
        check_classes(self.options.as_dict(), trusted_packages())
        check_settings(self.options, [argument.partition("=")[0] for argument in cast(list[str], args)])

    def _parse_ckpt_path(self) -> None:
        """Ignore the checkpoint's hyper-parameters: the YAML file defines the model, and `check_fits` compares them."""

    @property
    def options(self) -> Namespace:
        """Return the settings of the command, which are saved as config.yaml."""
        return self.config[self.command]

    def settings(self) -> dict[str, Any]:
        """Return the settings of the command as in config.yaml."""
        return cast(dict[str, Any], yaml.safe_load(self.command_parser.dump(self.options, skip_unset=False)))

    # Construction

    def before_instantiate_classes(self) -> None:
        """Set the threads, convert epochs to steps, name the loggers, and find the checkpoint and the run to resume."""
        options = self.options
        if options.portable:
            check_portable()
        torch.set_num_threads(options.num_threads)
        os.environ["OMP_NUM_THREADS"] = str(options.num_threads)  # without which the launchers of Lightning set another
        check_pair(_class(options.model.class_path), _class(options.data.class_path))
        self.datamodule = None
        if self.command == "fit":
            self._convert_epochs()
        if options.trainer.logger is not False:
            names = [Path(str(path)).stem for path in options.config or []]
            options.trainer.logger = loggers_of_run(
                options.trainer.logger, names[0] if names else "unnamed", options.name
            )
        self._find_checkpoint()
        if self.fork is not None and self.ckpt_path is not None:
            if self.resumed is None:
                raise UserError(
                    f"--ckpt_path must be the folder of a fork to resume with --fork, but is {self.ckpt_path!r}; "
                    "leave one out"
                )
            self.fork = None  # which began before
        elif self.fork is not None:
            self._extend(self.fork.checkpoint)
        if self.ckpt_path is not None:
            content = self.checkpoints.peek(self.ckpt_path)
            self.changed = changed_settings(content, Path(self.ckpt_path), self.settings())
        if self.resumed is not None and self.fork is None:
            check_changes(self.resumed.run, self.changed, self._schedule_needs_max_steps())
            rank_zero_print((self.EXTENDING if self.resumed.extends else "resuming from {}").format(self.ckpt_path))

    def _find_checkpoint(self) -> None:
        """Resolve `--ckpt_path` to a file, and find the run that `fit` resumes."""
        options = self.options
        self.ckpt_path = path = options.ckpt_path
        if path is None:
            if self.command != "fit":
                raise UserError(f"--ckpt_path must name the checkpoint to {self.command}, but is missing")
            return
        if Path(path).is_file():
            return
        if options.trainer.logger is False:
            raise UserError(
                f"--ckpt_path must be a file if trainer.logger is false, but is {path!r}; name a checkpoint"
            )
        logger = options.trainer.logger[0].init_args
        folder = Path(logger.save_dir, str(logger.name))
        if self.command == "fit":
            max_steps = None if self._schedule_needs_max_steps() else options.trainer.max_steps
            self.resumed = find_run(path, folder, max_steps, self.checkpoints.peek)
            resumed = self.resumed and str(self.resumed.checkpoint)
            self.ckpt_path = resumed or (None if path == "last" else path)
        elif path != "last":
            self.ckpt_path = str(named_checkpoint(path))
        else:
            newest = newest_checkpoint(map(Run, folder.glob("*")), self.checkpoints.peek)
            if newest is None:
                raise no_checkpoint(folder)
            self.ckpt_path = str(newest)

    def _extend(self, checkpoint: Path) -> None:
        """Start from a checkpoint of a run, with its history, in a new folder."""
        self.ckpt_path = str(checkpoint)
        self.resumed = Resumption(checkpoint, checkpoint.stat().st_mtime_ns, extends=True)

    def _schedule_needs_max_steps(self) -> bool:
        schedule = self.options.model.init_args.get("lr_schedule")  # a task of the user may have none
        return schedule is not None and LRSchedule(**schedule.as_dict()).needs_max_steps

    def _new_data(self) -> TaskDataModule:
        data = self.options.data
        with constructing():
            return cast(TaskDataModule, _class(data.class_path)(**data.init_args.as_dict()))

    def _convert_epochs(self) -> None:
        """Replace passes over the training data with steps and batches, since a run is a single epoch of Lightning.

        `trainer.max_epochs` becomes `trainer.max_steps`, and `trainer.check_val_every_n_epoch` becomes
        `trainer.val_check_interval`, both rounded up to complete steps.
        """
        settings = self.options.trainer
        max_epochs, between = settings.max_epochs, settings.check_val_every_n_epoch
        if max_epochs in (None, -1) and between is None:
            return
        self.datamodule = self._new_data()
        batches, accumulated = self.datamodule.count_batches(), settings.accumulate_grad_batches
        message = "trainer.{} {} ({:,} batches per epoch) corresponds to trainer.{} {:,}"
        if max_epochs not in (None, -1):
            settings.max_epochs, settings.max_steps = None, math.ceil(max_epochs * batches / accumulated)
            rank_zero_print(message.format("max_epochs", max_epochs, batches, "max_steps", settings.max_steps))
        if between is not None:
            settings.check_val_every_n_epoch = None
            settings.val_check_interval = interval = math.ceil(between * batches / accumulated) * accumulated
            rank_zero_print(message.format("check_val_every_n_epoch", between, batches, "val_check_interval", interval))

    def instantiate_classes(self) -> None:
        """Construct the data module first, on which the network and the task depend."""
        self.datamodule = self.datamodule or self._new_data()
        with constructing():
            self.instantiate_model_and_trainer()

    def instantiate_model_and_trainer(self) -> None:
        """Construct the model and the Trainer, after the data module."""
        self.config_init = self.construct()
        self.model = self.config_init[self.command].model
        self.trainer = self.instantiate_trainer()

    def construct(self) -> Namespace:
        """Construct what the settings name; `from_data` constructs the network and the task."""
        config = self.config.clone()
        config[self.command].data = self.datamodule
        if self.resumed is not None and not self.resumed.extends:
            continue_run(config[self.command].trainer.logger, self.resumed.run)

        # A function, since the optimizer keeps it, and WeightAveraging would copy a method with its object.
        def from_data(cls: type, **settings: Any) -> Any:
            return self._from_data(cls, settings)

        instantiators = [(from_data, base, True) for base in (Network, TaskModule)]
        return self.parser.instantiate(config, instantiators=instantiators)

    def _from_data(self, cls: Any, settings: dict[str, Any]) -> Network | TaskModule:
        """Construct a network, at most as large as the weights of the checkpoint allow, or a task."""
        settings = complete(settings, cls.data_settings(self.datamodule))
        for name, parameter in inspect.signature(cls).parameters.items():
            if parameter.default is parameter.empty and settings.get(name) is None and "VAR" not in parameter.kind.name:
                raise UserError(f"{name} must be set, but is missing; add it to the init_args of {cls.__qualname__}")
        if not issubclass(cls, Network) or self.ckpt_path is None:
            return cls.from_data(self.datamodule, **settings)
        with bounded_by(self.checkpoints.peek(self.ckpt_path)["state_dict"], settings):
            return cls.from_data(self.datamodule, **settings)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Construct the Trainer, with its output of progress, and with a validation at the end of short runs."""
        config = self.config_init[self.command].trainer
        interval, batches = config.val_check_interval, config.max_steps * config.accumulate_grad_batches
        if type(interval) is int and config.check_val_every_n_epoch is None and 0 < batches < interval:
            kwargs["val_check_interval"] = batches
        has_bar = config.enable_progress_bar
        if has_bar is None:  # depends on the terminal, so it is not saved in config.yaml
            has_bar = sys.stdout.isatty()
        callbacks = as_list(config.callbacks)
        bars = [callback for callback in callbacks if isinstance(callback, AnyProgressBar)]
        callbacks = [callback for callback in callbacks if has_bar or callback not in bars]
        is_dry = config.fast_dev_run or self.options.dry_run
        if has_bar and not bars:
            callbacks.append(ProgressBar())
        elif config.enable_progress_bar is None and not has_bar and not is_dry:
            callbacks.append(ProgressLines())
        kwargs |= {"callbacks": callbacks, "enable_progress_bar": has_bar, "fast_dev_run": is_dry}
        return super().instantiate_trainer(**kwargs, **launched_settings(config))

    # Checks, before anything is written

    def after_instantiate_classes(self) -> None:
        strategy = self.trainer.strategy
        if isinstance(strategy, DDPStrategy):
            replace_default_timeout(strategy, TIMEOUT)
        if type(strategy.checkpoint_io) is TorchCheckpointIO:
            strategy.checkpoint_io = self.checkpoints
        if self.trainer.profiler is not None:  # it logs its table, see `run`
            logging.getLogger("lightning.pytorch.profilers").setLevel(logging.INFO)
        if self.command == "fit" and self.options.skip_test:
            self.datamodule.skip_test()
        self.datamodule.trainer = self.trainer  # as Lightning does when it starts, later than the checks
        self._configure_callbacks()
        check_processes(self.trainer)
        self._check_run()

    def _configure_callbacks(self) -> None:
        for callback in self.trainer.callbacks:
            if isinstance(callback, Provenance):
                callback.changed = self.changed
                callback.begins_with = None if self.resumed else self.ckpt_path
                callback.lineage = self.fork and self.fork.lineage
            elif isinstance(callback, Checkpoints):
                callback.enabled = bool(self.trainer.loggers)

    def _check_run(self) -> None:
        settings, path = self.options.trainer, self.ckpt_path or ""
        checkpoint = self.checkpoints.peek(path) if path else None
        self.model.is_fork = self.fork is not None
        self.model.check(self.trainer, self.datamodule, self.command, settings, checkpoint, path)
        if self.command != "fit":
            return
        self.model.lr_schedule.check_max_steps(settings.max_steps)
        step = self.fork.step if self.fork else checkpoint["global_step"] if checkpoint else 0
        lacks_steps = self.resumed is None or self.fork is not None  # a resumed run may lack only its test
        if checkpoint and settings.max_steps < step + lacks_steps:
            raise UserError(
                f"trainer.max_steps must be {'above' if lacks_steps else 'at least'} the step of the checkpoint "
                f"{path!r} ({step}), but is {settings.max_steps}; raise it"
            )

    # The run

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
        kwargs = super()._prepare_subcommand_kwargs(subcommand)
        kwargs |= {"ckpt_path": self.ckpt_path, "weights_only": True}
        if subcommand != "fit":
            kwargs["verbose"] = False
        elif self.trainer.fast_dev_run and self.ckpt_path is not None:
            kwargs["ckpt_path"] = None  # the checkpoint has been checked, and its step may be the last
            self.checkpoints.take(self.ckpt_path)
        # Last, since it waits for other processes, which may fail in the checks before.
        self.held.append(meet_processes(self.trainer))
        return kwargs

    def before_fit(self) -> None:
        """Create or reopen the folder of the run; a resumed run keeps the metrics up to its checkpoint."""
        for logger in wandb_loggers(self.trainer):
            logger.connect()  # while the data are set up
        # Set up the data first, since invalid data or weights must not leave a folder behind.
        data = self.datamodule
        data.setup("fit")
        data.training_batches(data.division)
        check_evaluations(self.options.trainer, data)
        if self.ckpt_path is None:
            rank = self.model.network.hyper_parameters.get("lora_rank")
            if rank is not None and getattr(self.model, "pretrained", None) is None:
                raise UserError(
                    "lora_rank must be null without model.init_args.pretrained, since it freezes the weights of the "
                    f"network, but is {rank}; set pretrained"
                )
            self.model.load_pretrained()
        checkpoint = {} if self.ckpt_path is None else self.checkpoints.peek(self.ckpt_path)
        step = checkpoint.get("global_step")
        if self.fork is not None:
            changes = [f"{name} {display(old)} -> {display(new)}" for name, (old, new) in self.changed.items()]
            origin = f"{relative(self.fork.run.folder)} at step {self.fork.step}"
            rank_zero_print(f"fork of {origin}: {', '.join(changes) or 'no setting has changed'}")
        elif self.resumed is not None:
            check_data(self.resumed.run, checkpoint.get("data_fingerprint", {}), data.fingerprint, data.skips_test)
        if self.resumed is not None and self.resumed.extends and self._has_best(checkpoint):
            for callback in self.trainer.checkpoint_callbacks:
                if isinstance(callback, Checkpoints):
                    callback.extended = self.resumed.run
        if not self.trainer.loggers:
            rank_zero_print("trainer.logger is false: no checkpoint is saved, and the last weights are tested")
        if self._enter("version"):
            self.held.append(open_run(cast(CSVLogger, self.trainer.logger), self.resumed, step))
            if self.resumed is not None and step is not None:
                resume_loggers(self.trainer.loggers, step)

    def _has_best(self, checkpoint: dict[str, Any]) -> bool:
        """Return whether the best checkpoint of a run is the best up to another checkpoint of it, on the same data."""
        best = Run.of(Path(cast(str, self.ckpt_path))).checkpoint(Run.BEST)
        is_other = {"checkpoint.monitor", "checkpoint.mode"} & self.changed.keys()
        before, now = checkpoint.get("data_fingerprint", {}), self.datamodule.fingerprint
        if best is None or is_other or before.get("val") != now.get("val"):
            return False
        return is_whole(best) and read_index(best)["global_step"] <= checkpoint["global_step"]

    def before_test(self) -> None:
        """Create the folder of the test or validation."""
        self._enter(self.command)

    before_validate = before_test

    def _enter(self, prefix: str) -> bool:
        """Create the folder `PREFIX_N`, unless a logger names it, and log a description of the run.

        Returns:
            Whether this process writes to the folder.
        """
        logger = self.trainer.logger
        if not isinstance(logger, CSVLogger) or rank_zero_only.rank:  # type: ignore[attr-defined]  # set by Lightning
            return False
        self.is_new = enter_folder(logger, prefix)
        self.run = Run(Path(logger.log_dir))
        set_writer(logger, MetricsWriter(logger.log_dir))
        if self.command != "fit":
            check_empty(self.run)
        parts = (self.model, self.model.network, self.datamodule)
        tags = [type(part).__name__ for part in parts]
        lineage = {"fork": self.fork.lineage | {"wandb": self.fork.run.wandb_id}} if self.fork else {}
        parents = fork_names(Run(self.run.folder)) if self.fork is None else self.fork.names
        describe_run(self.trainer.loggers, tags, head_commit(Path.cwd()), self.settings() | lineage, parents)
        return True

    def after_validate(self) -> None:
        """Print the metrics, as after a test, and the folder of the results."""
        folder = run_folder(self.trainer)
        if not self.trainer.is_global_zero:
            return
        if self.trainer.fast_dev_run:
            print("dry run passed: evaluated one batch; nothing was written")
            return
        print_results(self.trainer)
        for name, signature in self.model.signatures.items():
            print(f"{name}: {signature}")
        if folder is not None:
            print(f"\nThe results are saved in {escape_controls(relative(folder))}.")
        print_state_of_wandb(self.trainer)

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


class SettingsCLI(TfmCLI):
    """TfmCLI that parses and checks the settings of `fit`, but runs nothing."""

    def _run_subcommand(self, subcommand: str) -> None:
        """Run nothing."""


class ReplayCLI(TfmCLI):
    """TfmCLI that repeats the steps of a run up to that of a fork in another folder, and tests nothing."""

    EXTENDING = "repeating steps from {}"

    def _find_checkpoint(self) -> None:
        assert self.fork is not None
        self.last_step, kept = self.fork.step, self.fork.kept
        self.fork = None  # all settings are those of the run
        if kept is not None:
            self._extend(kept)

    def _configure_callbacks(self) -> None:
        if self.trainer.world_size > 1:
            raise UserError(
                f"--fork must name a step of a kept checkpoint, since steps are repeated in one process, but the run "
                f"has {self.trainer.world_size}; see --checkpoint.keep_every"
            )
        super()._configure_callbacks()
        for callback in self.trainer.checkpoint_callbacks:
            if isinstance(callback, Checkpoints):
                callback.last_step, callback.keep_every = self.last_step, 0

    def after_fit(self) -> None:
        """Test nothing."""


def replay(fork: Fork, folder: Path, checkpoints: VerifiedCheckpointIO) -> Fork:
    """Repeat the steps of a run up to that of a fork in a folder, and return the fork with their checkpoint."""
    settings = write_settings(fork.run, folder, logs_to=folder)
    rank_zero_print(f"no checkpoint of step {fork.step} is kept: repeating the steps before it")
    try:
        ReplayCLI("fit", ["fit", "--config", str(settings)], checkpoints, fork)
    except Interrupted as interrupted:
        if interrupted.signum:
            raise Interrupted(interrupted.signum) from None  # the temporary folder cannot be resumed
    copy = Run(folder / "replay/version_0")
    compare_replay(copy, fork.run)
    return fork._replace(checkpoint=copy.checkpoint_folder / Run.LAST)


def run(arguments: list[str], cli: type[TfmCLI] = TfmCLI) -> TfmCLI:
    """Run fit, validate or test."""
    keep_freed_memory()
    gc.freeze()  # exclude imported objects, which stay alive, from garbage collection
    handle_signals(interrupt)  # during training, Checkpoints replaces this handler to save first
    trust_packages = trusted_packages()
    if trust_packages:
        search_current_folder(trust_packages)
    configure_parsing(trust_packages)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)  # errors are a single line
    # The launcher names a process that was killed.
    logging.getLogger("lightning.fabric.strategies.launchers.subprocess_script").setLevel(logging.INFO)
    for pattern in SILENCED:
        warnings.filterwarnings("ignore", pattern)
    checkpoints, fork = VerifiedCheckpointIO(), None
    with TemporaryDirectory() as path:
        folder = Path(path)
        (command, *options), point = take_fork(with_underscores(arguments))
        if point is not None:
            fork = find_fork(point, checkpoints.peek)
            if not options or options[0].startswith("-"):
                options = [str(write_settings(fork.run, folder)), *options]
        options = with_options([command, *options], folder, checkpoints.peek)
        if fork is not None and fork.is_replayed and cli is TfmCLI:
            checked = SettingsCLI(command, options, checkpoints, fork)
            if checked.fork is not None and not checked.options.dry_run:
                fork = replay(fork, folder, checkpoints)
        return cli(command, options, checkpoints, fork)


def data_of_checkpoint(checkpoint: str, settings: Sequence[str]) -> TaskDataModule:
    """Return the data on which a checkpoint is tested, with all splits.

    Args:
        checkpoint: the checkpoint.
        settings: further arguments of `test`.
    """
    data = cast(TaskDataModule, run(["test", checkpoint, *settings], SettingsCLI).datamodule)
    data.prepare_data()
    data.setup("fit")
    return data


@contextmanager
def constructing() -> Iterator[None]:
    """Disable garbage collection while objects are constructed, and raise errors of their settings as UserError."""
    try:
        with gc_disabled():
            yield
    except (ArgumentError, ImportError, MisconfigurationException, OverflowError, TypeError, ValueError) as error:
        raise UserError(format_error(error)) from error


def _class(path: str) -> Any:
    """Return the class of a path, whose module the parser has imported."""
    module, _, name = path.rpartition(".")
    return getattr(sys.modules[module], name)
