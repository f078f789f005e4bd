"""Language modelling: what is learned, and how it is measured."""

from __future__ import annotations

import json
from pathlib import Path

from torch import Tensor, nn

from lightning_tfm.data import Batch, TextDataModule
from lightning_tfm.errors import UserError
from lightning_tfm.metrics import Mean, Perplexity, token_nll
from lightning_tfm.modules.optimization import Optimization
from lightning_tfm.modules.task import TaskModule
from lightning_tfm.networks import GPT
from lightning_tfm.tokenizer import NUM_SPECIAL, Tokenizer


class LanguageModel(TaskModule):
    """Trains a network to say which token comes next in a text.

    Logs, over the whole part, in nats: `loss` a token, `loss_per_character`, which texts of other tokens can be
    compared by, and `perplexity` of tokens.

    Args:
        network: a GPT.
        tokenizer: the data's vocabulary.
        optimization: optimizer and schedule.
        start_from: a folder of Hugging Face's GPT-2, of the network's size, whose weights training begins with; the
            data's tokenizer must be that of the folder.
    """

    task = "language modelling"
    fits = TextDataModule
    because = "for a text has no source that an encoder could read"

    def __init__(
        self,
        network: GPT,
        tokenizer: Tokenizer,
        optimization: Optimization = Optimization(),
        start_from: str | None = None,
    ) -> None:
        super().__init__(network, optimization, tokenizer=tokenizer.to_dict())
        self.tokenizer = tokenizer
        self.start_from = start_from
        self.metrics = nn.ModuleDict()

    def begin(self) -> None:
        if self.start_from is not None:
            self.network.load_state_dict(_gpt2(self.start_from, self.network).state_dict())

    def setup(self, stage: str) -> None:
        super().setup(stage)
        for prefix in ("val", "test"):
            if prefix not in self.metrics:
                self.metrics[prefix] = nn.ModuleDict(
                    {"loss": Mean(), "loss_per_character": Mean(), "perplexity": Perplexity()}
                )

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.summed(token_nll(self.network(batch.source, batch.target_in), batch.target_out), batch.tokens)

    def _evaluate(self, batch: Batch, prefix: str) -> None:
        examples = self.trainer.datamodule.datasets[prefix]
        nll, tokens = token_nll(self.network(batch.source, batch.target_in), batch.target_out), batch.tokens
        metrics = self.metrics[prefix]
        metrics["loss"].update(nll, tokens)
        metrics["perplexity"].update(nll, tokens)
        metrics["loss_per_character"].update(nll / examples.characters_per_token, tokens)
        for name, metric in metrics.items():
            self.log(
                f"{prefix}/{name}",
                metric,
                add_dataloader_idx=False,
                batch_size=batch.target_in.size(0),
            )

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, "val")

    def test_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._evaluate(batch, "test")


def _gpt2(folder: str, network: GPT) -> GPT:
    """The network with the weights of a folder.

    Raises:
        UserError: if they cannot be had, or do not fit.
    """
    if not Path(folder, "config.json").is_file():
        raise UserError(f"start_from must be a folder of Hugging Face's GPT-2, but there is no {folder}/config.json")
    try:
        from safetensors import SafetensorError
        from transformers import GPT2LMHeadModel
    except ImportError:
        raise UserError("start_from needs the package transformers; pip install transformers") from None
    try:
        kind = json.loads(Path(folder, "config.json").read_text(encoding="utf-8")).get("model_type")
        if kind != "gpt2":
            raise ValueError(f"it holds a model of type {kind}")
        model, loaded = GPT2LMHeadModel.from_pretrained(folder, local_files_only=True, output_loading_info=True)
        if loaded["missing_keys"]:  # which would be drawn
            raise ValueError(f"it lacks {sorted(loaded['missing_keys'])[0]}")
    except (OSError, ValueError, RuntimeError, AttributeError, SafetensorError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"start_from must be a folder of Hugging Face's GPT-2, but {folder!r} is not: {reason}"
        ) from None
    gpt = GPT.from_huggingface(model, NUM_SPECIAL)
    theirs = gpt.hyper_parameters | {"dropout": network.hyper_parameters["dropout"]}  # which has no weights
    if theirs["vocab_size"] != network.hyper_parameters["vocab_size"]:
        raise UserError(
            f"data.init_args.tokenizer_file must be the tokenizer.json of {folder!r}, which has "
            f"{theirs['vocab_size']} ids, but the data have {network.hyper_parameters['vocab_size']}"
        )
    for name, value in network.hyper_parameters.items():
        if theirs[name] != value:
            raise UserError(f"{name} must be that of {folder!r} ({theirs[name]}), but is {value}; set it so")
    return gpt
