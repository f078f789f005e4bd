"""Language modeling: prediction of the next token of a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_tfm.attention_maps import MAX_POSITIONS, VISIBLE, AttentionMap, text_attention
from lightning_tfm.data import Batch, TextDataModule, TextDataset
from lightning_tfm.decoding import DecodingOptions, continue_text
from lightning_tfm.errors import UserError
from lightning_tfm.metrics import Mean, Perplexity, sequence_nll, token_nll
from lightning_tfm.modules.prediction import AttentionExample, Output, Prediction, Score
from lightning_tfm.modules.task import NUM_EXAMPLES, TaskModule
from lightning_tfm.networks import CausalNetwork
from lightning_tfm.optimizers import AdamW, LRSchedule
from lightning_tfm.tokenization import Ids, Tokenizer


class LanguageModel(TaskModule):
    """Module that trains a network to predict the next token of a text.

    Logs, over the whole split and in nats, the `loss` per token, the `loss_per_character`, which is comparable between
    tokenizers, and the `perplexity` per token.

    Args:
        network: the network.
        tokenizer: the tokenizer of the data.
        optimizer: a function from parameter groups to an optimizer, such as an optimizer class.
        lr_schedule: the schedule of the learning rate.
        pretrained: a folder with a Hugging Face GPT-2 of the network's size, from whose weights training starts;
            requires the tokenizer in the folder.
    """

    network: CausalNetwork
    datamodule_class = TextDataModule
    decoding_options = ("temperature", "top_k", "top_p", "max_tokens")
    gives_scores = True
    outputs_are_long = True
    default_temperature, default_max_tokens = 0.8, 500

    def __init__(
        self,
        network: CausalNetwork,
        tokenizer: Tokenizer,
        optimizer: OptimizerCallable = AdamW,
        lr_schedule: LRSchedule = LRSchedule(),
        pretrained: str | None = None,
    ) -> None:
        super().__init__(network, tokenizer, optimizer, lr_schedule)
        self.pretrained = pretrained

    def load_pretrained(self) -> None:
        if self.pretrained is not None:
            self.network.load_pretrained(self.pretrained)
            self.pretrained = None

    def new_metrics(self) -> nn.ModuleDict:
        return nn.ModuleDict({"loss": Mean(), "loss_per_character": Mean(), "perplexity": Perplexity()})

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        nll = token_nll(self.network(batch.source, batch.target_in), batch.target_out)
        return self.accumulate_loss(nll, batch.tokens)

    def _evaluate(self, batch: Batch, prefix: str, dataset: TextDataset) -> None:
        nll, tokens = token_nll(self.network(batch.source, batch.target_in), batch.target_out), batch.tokens
        metrics = cast(Mapping[str, Metric], self.metrics[prefix])
        metrics["loss"].update(nll, tokens)
        metrics["perplexity"].update(nll, tokens)
        metrics["loss_per_character"].update(nll / dataset.characters_per_token, tokens)
        for name, metric in metrics.items():
            self.log(
                f"{prefix}/{name}",
                metric,
                add_dataloader_idx=False,
                batch_size=batch.target_in.size(0),
            )

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, "val", self.trainer.val_dataloaders.dataset)

    def test_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._evaluate(batch, self.test_prefixes[dataloader_idx], self.trainer.test_dataloaders[dataloader_idx].dataset)

    def encode_line(self, line: str) -> tuple[Ids, str]:
        ids = self.tokenize(line)
        return ids, self.input_note(ids)

    def predict_ids(
        self, sources: list[Ids], options: DecodingOptions, generator: torch.Generator
    ) -> list[list[Output]]:
        """Return each text with its continuation; texts are not batched, since they cannot be padded on the left."""
        sample_fn = options.sample_fn(generator, self.default_temperature)
        texts = []
        for ids in sources:
            text = torch.tensor([ids], device=self.device)
            length = options.max_tokens or self.default_max_tokens
            network = self.network
            more = continue_text(network.encode, network.decode_step, text, length, network.max_length, sample_fn)
            texts.append(self.tokenizer.decode(torch.cat((text, more), dim=1)[0].tolist()))
        return [[Output(text)] for text in texts]

    def encode_pair(self, line: str) -> tuple[Ids, Ids]:
        ids = self.tokenize(line)
        if len(ids) == 1:
            raise UserError("it has one token, but the first one is not predicted")
        return [], ids

    def score_ids(self, pairs: list[tuple[Ids, Ids]]) -> list[Score]:
        """Return the log probability of each text given its first token.

        Note:
            A text with more tokens than the network has positions is split into overlapping windows: each token is
            predicted from all preceding tokens, or from at least half as many as there are positions.
        """
        length, scores = self.network.max_length, []
        for _, ids in pairs:
            text, log_probability, seen = torch.tensor([ids], device=self.device), 0.0, 1  # predicted up to here
            while seen < len(ids):
                start = 0 if seen == 1 else seen - max(1, length // 2)
                end = min(start + length + 1, len(ids))
                logits = self.network(text[:, :0], text[:, start : end - 1])[:, seen - start - 1 :]
                log_probability -= sequence_nll(logits, text[:, seen:end]).item()
                seen = end
            scores.append(Score(log_probability, len(ids) - 1))
        return scores

    def example_inputs(self, rows: int, length: int, generator: torch.Generator) -> dict[str, Tensor]:
        target_in = self.network.random_ids(rows, length, generator)
        return {"source": target_in[:, :0], "target_in": target_in}

    def max_input_lengths(self) -> dict[str, int | None]:
        return {"target_in": self.network.max_length}

    def example(self, line: str, output: str) -> dict[str, Any]:
        return super().example(line, output) | {"ids": self.tokenizer.encode(output)}

    def attention(self, content: Mapping[str, Any]) -> list[AttentionMap]:
        ids = content["ids"][:MAX_POSITIONS]  # earlier tokens do not attend to later ones
        symbols = [self.tokenizer.decode([number]).translate(VISIBLE) for number in ids]
        text = torch.tensor([ids])
        return text_attention(self.network, symbols, text[:, :0], text)

    def attention_examples(
        self, dataset: TextDataset, predictions: Sequence[tuple[int, Prediction]]
    ) -> list[AttentionExample]:
        """Return the first windows of the text."""
        return window_examples(dataset, self.tokenizer, "causal self-attention")


def window_examples(dataset: TextDataset, tokenizer: Tokenizer, title: str) -> list[AttentionExample]:
    """Return the first windows of a text as attention examples.

    Args:
        dataset: the windows.
        tokenizer: the tokenizer.
        title: the title of the plots.
    """
    examples = []
    for row in range(min(NUM_EXAMPLES, len(dataset))):
        ids = dataset[torch.tensor([row])].target_in[0].tolist()
        examples.append(AttentionExample(row, title, {"ids": ids, "text": tokenizer.decode(ids).strip()}))
    return examples
