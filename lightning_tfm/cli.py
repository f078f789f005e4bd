"""From a YAML to a run: the settings a user can make, and the links between data and model."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentError
from netrc import NetrcParseError, netrc
from urllib.parse import urlparse

from lightning import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_tfm.callbacks import Summary
from lightning_tfm.checkpoint import check_fits
from lightning_tfm.errors import UserError, explain


class TfmCLI(LightningCLI):
    """Lightning's command line, where any model of a YAML fits any data of it."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """`predict` is left out: `lightning-tfm generate` answers a user's input."""
        commands = LightningCLI.subcommands()
        del commands["predict"]
        return commands

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        # What the model must know of the data, it gets from the data. The links are applied once the data module
        # is constructed, which makes its vocabulary but no data yet.
        network = "model.init_args.network.init_args"
        parser.link_arguments("data.vocab_size", f"{network}.vocab_size", apply_on="instantiate")
        for name in ("tokenizer", "max_target_length"):
            parser.link_arguments(f"data.{name}", f"model.init_args.{name}", apply_on="instantiate")
        parser.link_arguments("seed_everything", "data.init_args.seed")
        parser.add_lightning_class_args(ModelCheckpoint, "checkpoint")
        parser.set_defaults(
            {
                "checkpoint.filename": "best",
                "checkpoint.monitor": "val/loss",
                "checkpoint.save_last": True,
                "checkpoint.enable_version_counter": False,
            }
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: object) -> None:
        try:
            super().parse_arguments(parser, args)
        except ArgumentError as error:
            accepted = self._subcommand_parsers["fit"].get_defaults().keys()
            raise UserError(explain(error, accepted)) from None

    def _parse_ckpt_path(self) -> None:
        """The YAML says what the model is; a checkpoint that differs is refused, see after_instantiate_classes."""
        path = self.config[self.config.subcommand].ckpt_path
        if path is None and self.config.subcommand != "fit":
            raise UserError(f"--ckpt_path must name the checkpoint to {self.config.subcommand}, but is missing")

    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except (ArgumentError, MisconfigurationException, TypeError, ValueError) as error:
            raise UserError(explain(error)) from error

    def after_instantiate_classes(self) -> None:
        self.model.network.check_lengths(self.datamodule.max_source_length, self.datamodule.max_target_length)
        if self.subcommand == "fit" and not self.trainer.fast_dev_run:
            self.model.optimization.check_steps(self.trainer.max_steps)
        path = self._get(self.config, "ckpt_path")
        if path is not None and path not in ("best", "last"):
            check_fits(path, self.model.hparams_initial)

    def after_fit(self) -> None:
        if not self.trainer.fast_dev_run and not self.trainer.interrupted:
            self.trainer.test(self.model, datamodule=self.datamodule, ckpt_path="best", weights_only=True)
            if self.trainer.is_global_zero:
                print(f"best checkpoint: {os.path.relpath(self.trainer.checkpoint_callback.best_model_path)}")


def run() -> None:
    """Runs fit, validate or test as the command line says."""
    os.environ.setdefault("WANDB_MODE", "online" if _logged_in_to_wandb() else "offline")  # or it would prompt
    strict = {"exit_on_error": False, "allow_abbrev": False}
    TfmCLI(
        LightningModule,
        LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        auto_configure_optimizers=False,  # the modules do, by the step
        load_from_checkpoint_support=False,  # the modules save plain values, see lightning_tfm.checkpoint
        seed_everything_default=0,
        trainer_defaults={
            "callbacks": [Summary()],
            "enable_progress_bar": sys.stderr.isatty(),
            "use_distributed_sampler": False,  # the data modules share batches out, see TrainingBatches
        },
        parser_kwargs={**strict, **{command: dict(strict) for command in TfmCLI.subcommands()}},
    )


def _logged_in_to_wandb() -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    try:
        return netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, NetrcParseError):
        return False
