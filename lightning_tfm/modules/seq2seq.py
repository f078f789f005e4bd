"""Sequence-to-sequence learning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_tfm.alignment import gold_links
from lightning_tfm.attention_maps import AttentionMap, attention_weights
from lightning_tfm.data import Batch, Pair, PairDataModule, PairDataset, pad_sequences
from lightning_tfm.decoding import DecodingOptions, beam_search, decode
from lightning_tfm.errors import UserError
from lightning_tfm.layers import attention_maps
from lightning_tfm.metrics import CorpusScores, SequenceMetrics, sequence_nll, token_nll
from lightning_tfm.modules.lines import strip_fields
from lightning_tfm.modules.prediction import Evaluation, Output, Score, make_prediction
from lightning_tfm.modules.task import TaskModule, check_label_smoothing
from lightning_tfm.networks import Seq2SeqNetwork
from lightning_tfm.optimizers import AdamW, LRSchedule
from lightning_tfm.parallel import data_group
from lightning_tfm.tokenization import BOS, EOS, PAD, Ids, Tokenizer


class Seq2SeqModule(TaskModule):
    """Module that trains a network to map a source to its target, and evaluates it by decoding.

    Logs `loss`, `perplexity`, `token_accuracy`, `exact_match` (the fraction of outputs equal to the target), `ser` (the
    symbol error rate) and the `text_metrics`. predictions.jsonl records which outputs are correct.

    Args:
        network: the network.
        tokenizer: the tokenizer of the data.
        max_target_length: maximum number of tokens in an output, including EOS.
        optimizer: a function from parameter groups to an optimizer, such as an optimizer class.
        lr_schedule: the schedule of the learning rate.
        label_smoothing: label smoothing of the training loss, but not of validation and test losses.
        text_metrics: corpus metrics, which require a word-based tokenizer.
        beam_size: the number of beams in testing; validation uses greedy decoding.
    """

    network: Seq2SeqNetwork
    datamodule_class = PairDataModule
    decoding_options = ("beam_size", "n_best", "temperature", "top_k", "top_p", "max_tokens", "scores", "alignments")
    gives_scores = True

    def __init__(
        self,
        network: Seq2SeqNetwork,
        tokenizer: Tokenizer,
        max_target_length: int,
        optimizer: OptimizerCallable = AdamW,
        lr_schedule: LRSchedule = LRSchedule(),
        label_smoothing: float = 0.0,
        text_metrics: Sequence[Literal["bleu", "chrf"]] = (),
        beam_size: int = 1,
    ) -> None:
        check_label_smoothing(label_smoothing)
        if beam_size < 1:
            raise UserError(f"beam_size must be at least 1, but is {beam_size}; try 5")
        if text_metrics and not tokenizer.is_word_based:
            raise UserError(
                f"text_metrics must be empty unless the tokenizer is word-based, but is "
                f"{', '.join(text_metrics)}; leave it out"
            )
        if network.hyper_parameters.get("text_only"):
            raise UserError("text_only must be false for a network with targets, since these end with EOS")
        super().__init__(
            network,
            tokenizer,
            optimizer,
            lr_schedule,
            max_target_length=max_target_length,
            label_smoothing=label_smoothing,
            text_metrics=list(text_metrics),
            beam_size=beam_size,
        )
        self.max_target_length = max_target_length
        self.label_smoothing = label_smoothing
        self.text_metrics = tuple(text_metrics)
        self.beam_size = beam_size
        self.scores: dict[str, CorpusScores] = {}

    @classmethod
    def data_settings(cls, data: PairDataModule) -> dict[str, Any]:
        return super().data_settings(data) | {"max_target_length": data.max_target_length}

    def new_metrics(self) -> nn.ModuleDict:
        return SequenceMetrics()

    def setup(self, stage: str) -> None:
        super().setup(stage)
        prefixes = ["val"] if stage in ("fit", "validate") else self.test_prefixes
        if self.text_metrics:
            group = data_group(self.trainer.strategy)
            self.scores = {prefix: CorpusScores(self.text_metrics, group) for prefix in prefixes}

    @property
    def signatures(self) -> dict[str, str]:
        return next(iter(self.scores.values())).signatures if self.scores else {}

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        logits = self.network(batch.source, batch.target_in)
        loss = token_nll(logits, batch.target_out, self.label_smoothing)
        return self.accumulate_loss(loss, (batch.target_out != PAD).sum())

    def _evaluate(self, batch: Batch, prefix: str, dataset: PairDataset, beam_size: int) -> Evaluation:
        metrics = cast(SequenceMetrics, self.metrics[prefix])
        logits = self.network(batch.source, batch.target_in)
        state = self.network.encode(batch.source)
        if beam_size > 1:
            outputs = beam_search(self.network.decode_step, state, self.max_target_length, beam_size)[0][:, 0]
        else:
            outputs = decode(self.network.decode_step, state, self.max_target_length)
        texts = [self.tokenizer.decode(ids) for ids in outputs.tolist()]
        pairs = [dataset.pairs[row] for row in batch.rows.tolist()]
        references = [pair.target for pair in pairs]  # the original text, which decoding may not restore
        exact = [text == reference for text, reference in zip(texts, references, strict=True)]
        symbols = ([self.tokenizer.split_target(text) for text in side] for side in (texts, references))
        metrics.count(batch, logits, torch.tensor(exact, device=self.device), *symbols)
        if self.text_metrics:
            self.scores[prefix].count(texts, references)
        self.log_dict(
            {f"{prefix}/{name}": metric for name, metric in cast(Mapping[str, Metric], metrics).items()},
            add_dataloader_idx=False,
            batch_size=batch.source.size(0),
        )
        nlls = sequence_nll(logits, batch.target_out).tolist()
        return {"predictions": [make_prediction(*values) for values in zip(pairs, texts, nlls, strict=True)]}

    def _log_scores(self) -> None:
        for prefix, scores in self.scores.items():
            for name, value in scores.compute().items():
                self.log(f"{prefix}/{name}", torch.tensor(value, device=self.device), sync_dist=True)

    def validation_step(self, batch: Batch, batch_idx: int) -> Evaluation:
        return self._evaluate(batch, "val", self.trainer.val_dataloaders.dataset, beam_size=1)

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        self._log_scores()

    def test_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Evaluation:
        prefix = self.test_prefixes[dataloader_idx]
        return self._evaluate(batch, prefix, self.trainer.test_dataloaders[dataloader_idx].dataset, self.beam_size)

    def on_test_epoch_end(self) -> None:
        self._log_scores()

    def encode_line(self, line: str) -> tuple[Ids, str]:
        ids = self.tokenize(strip_fields(line))
        self.network.check_lengths(len(ids) + 1, self.max_target_length)
        return [*ids, EOS], self.input_note(ids)

    def predict_ids(
        self, sources: list[Ids], options: DecodingOptions, generator: torch.Generator
    ) -> list[list[Output]]:
        source = pad_sequences(sources)[0].to(self.device)
        sample_fn = options.sample_fn(generator)
        state = self.network.encode(source)
        length = min(options.max_tokens or self.max_target_length, self.max_target_length)
        if options.beam_size > 1:
            beams = (options.beam_size, 1.0, options.n_best)
            outputs, scores = beam_search(self.network.decode_step, state, length, *beams)  # (B, N, T), (B, N)
            found = scores.isfinite()  # there may be fewer than N
        else:
            outputs = decode(self.network.decode_step, state, length, sample_fn).unsqueeze(1)
            found = torch.ones(outputs.shape[:2], dtype=torch.bool)
        rows: list[dict[str, Output]] = [{} for _ in sources]  # by text, since tokens can spell a text in several ways
        log_probabilities = self._log_probabilities(source, outputs) if options.scores else None
        for row, place in found.nonzero().tolist():
            value = None if log_probabilities is None else log_probabilities[row][place]
            text = self.tokenizer.decode(outputs[row, place].tolist())
            rows[row].setdefault(text, Output(text, log_probability=value))  # the best comes first
        return [list(found_texts.values()) for found_texts in rows]

    def _log_probabilities(self, source: Tensor, outputs: Tensor) -> list[list[float]]:
        """Return the log probabilities of outputs (B, N, T) for source (B, S), in nats."""
        values = []
        for output in outputs.unbind(1):  # (B, T)
            target_in = torch.cat((torch.full_like(output[:, :1], BOS), output[:, :-1]), dim=1)
            values.append(-sequence_nll(self.network(source, target_in.masked_fill(target_in == EOS, PAD)), output))
        return torch.stack(values, dim=1).tolist()

    def encode_pair(self, line: str) -> tuple[Ids, Ids]:
        source, tab, target = strip_fields(line).rpartition("\t")
        if not tab:
            raise UserError("it must have a source and a target, separated by a tab")
        source_ids, target_ids = self.tokenize(source), self.tokenizer.encode_target(target)
        self.network.check_lengths(len(source_ids) + 1, len(target_ids) + 1)
        return [*source_ids, EOS], [*target_ids, EOS]

    def score_ids(self, pairs: list[tuple[Ids, Ids]]) -> list[Score]:
        sources, targets = (pad_sequences(side)[0].to(self.device) for side in zip(*pairs, strict=True))
        found = self._log_probabilities(sources, targets.unsqueeze(1))
        return [Score(value, len(target)) for (value,), (_, target) in zip(found, pairs, strict=True)]

    def align(self, source: str, target: str) -> AttentionMap:
        """Return attention weights over the source and EOS, as a single head, which align a target with its source.

        These are the weights of the head with the highest alignment accuracy in validation, if the data have a gold
        alignment, and otherwise the mean over the heads of the middle layer.

        Note:
            Chen et al. (2020) read the attention of a Transformer of six layers one step later. In the experiments of
            this project, whose networks have two or three layers, the alignment would be wrong by one token.
        """
        inputs = self._inputs(Pair(source, target, None))
        with attention_maps(self.network) as maps:
            self.network(*inputs)
        source_attention = self.network.source_attention(maps, inputs[0])  # (1, H, T, S)
        sources, targets = [*self.tokenizer.split(source), "EOS"], self.tokenizer.split_target(target)
        layer, head = self.alignment_head or (list(source_attention)[len(source_attention) // 2], None)
        weights = source_attention[layer][0] if head is None else source_attention[layer][0, head].unsqueeze(0)
        rows = torch.arange(len(targets)).clamp(max=inputs[1].size(1) - 1)
        weights = weights.mean(0, keepdim=True)[:, rows, : len(sources)]
        return AttentionMap(layer, weights.float().cpu(), targets, sources, [], predicts=True)

    def _inputs(self, pair: Pair) -> tuple[Tensor, Tensor]:
        """Return source (1, S) and target_in (1, T) of a pair, with T truncated to max_target_length."""
        batch = PairDataset([pair], self.tokenizer)[torch.tensor([0])]
        return batch.source.to(self.device), batch.target_in[:, : self.max_target_length].to(self.device)

    def example_inputs(self, rows: int, length: int, generator: torch.Generator) -> dict[str, Tensor]:
        return {name: self.network.random_ids(rows, length, generator) for name in ("source", "target_in")}

    def max_input_lengths(self) -> dict[str, int | None]:
        target = self.network.max_target_length(self.max_target_length)
        return {"source": self.network.max_source_length(self.max_target_length), "target_in": target}

    def aligned_attention(self, dataset: PairDataset, batch: Batch) -> tuple[dict[str, Tensor], Tensor] | None:
        if any(pair.alignment is None for pair in dataset.pairs):  # of the whole split, since all processes must agree
            return None
        with attention_maps(self.network) as maps:
            self.network(batch.source, batch.target_in)
        gold = gold_links([dataset.pairs[row] for row in batch.rows.tolist()], batch)
        return self.network.source_attention(maps, batch.source), gold

    def attention(self, content: Mapping[str, Any]) -> list[AttentionMap]:
        alignment = content["alignment"]
        pair = Pair(content["source"], content["target"], alignment and tuple((i, j) for i, j in alignment))
        inputs = self._inputs(pair)
        source = [*self.tokenizer.split(pair.source), "EOS"]
        target = self.tokenizer.split_target(pair.target)
        T = inputs[1].size(1)
        target_in, target_out = ["BOS", *target][:T], [*target, "EOS"][:T]
        links = [(i, j) for i, j in pair.alignment or () if j < T]
        found = []
        for layer, weights in attention_weights(self.network, *inputs).items():
            if self.network.get_submodule(layer).over_memory:
                found.append(AttentionMap(layer, weights, target_out, source, links, predicts=True))
            elif weights.size(-1) == len(source) + len(target_in):  # one sequence: a row predicts the next symbol
                gold = [(i, len(source) + j) for i, j in links]
                rows, columns = [*source[1:], "BOS", *target_out], [*source, *target_in]
                found.append(AttentionMap(layer, weights, rows, columns, gold, len(source), predicts=True))
            elif layer.startswith("encoder"):
                found.append(AttentionMap(layer, weights, source, source, []))
            else:
                found.append(AttentionMap(layer, weights, target_out, target_in, [], predicts=True))
        return found
