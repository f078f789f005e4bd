"""Predictions of a target from its source."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, cast

import torch
from torch import Tensor

from lightning_tfm.errors import UserError
from lightning_tfm.inference.attention_maps import AttentionMap, attention_weights
from lightning_tfm.inference.decoding import DecodingOptions, beam_search, decode
from lightning_tfm.inference.prediction import Output, Score, TeacherForced
from lightning_tfm.inference.predictor import Predictor, clean_line, strip_fields
from lightning_tfm.inference.voting import check_vote, vote
from lightning_tfm.layers import attention_maps
from lightning_tfm.layers.losses import sequence_nll
from lightning_tfm.networks import CausalNetwork, Ensemble, Seq2SeqNetwork
from lightning_tfm.tokenization import BOS, EOS, PAD, UNKNOWN, Ids, Tokenizer, name_symbols, pad_sequences


class Seq2SeqPredictor(Predictor):
    """Predictor of a target, of at most max_target_length tokens, including EOS, from its source."""

    network: Seq2SeqNetwork
    task = "seq2seq"
    predictor_arguments = ("max_target_length",)
    decoding_options = (
        *("beam_size", "n_best", "vote", "temperature", "top_k", "top_p", "max_tokens"),
        *("scores", "alignments"),
    )
    gives_scores = True
    excluded_ids = (PAD, BOS)

    def __init__(self, network: Seq2SeqNetwork, tokenizer: Tokenizer, max_target_length: int) -> None:
        super().__init__(network, tokenizer)
        self.max_target_length = max_target_length

    def check_options(self, options: DecodingOptions) -> None:
        super().check_options(options)
        if (options.max_tokens or 0) > self.max_target_length:
            raise UserError(
                f"max_tokens must be at most the max_target_length of the model ({self.max_target_length}), but is "
                f"{options.max_tokens}; leave it out"
            )
        if options.vote:
            check_vote(self.network)

    def encode_line(self, line: str) -> tuple[Ids, str]:
        source = strip_fields(line)
        note = self.check_columns(source)
        ids = self.tokenize(source)
        self.network.check_lengths(len(ids) + 1, self.max_target_length)
        return [*ids, EOS], self.input_note(ids, [source], note)

    def predict_ids(
        self, sources: list[Ids], options: DecodingOptions, generator: torch.Generator
    ) -> list[list[Output]]:
        source = pad_sequences(sources)[0].to(self.device)
        sample_fn = options.sample_fn(generator)
        state = self.network.encode(source)
        length = options.max_tokens or self.max_target_length
        if options.vote:
            outputs, votes = vote(cast(Ensemble, self.network), state, length, options.beam_size, options.n_best)
            exist = votes.isfinite()
        elif options.beam_size > 1:
            beams = (options.beam_size, 1.0, options.n_best)
            outputs, means = beam_search(self.network.decode_step, state, length, *beams)  # (B, N, T), (B, N)
            exist = means.isfinite()  # there may be fewer than N
        else:
            outputs = decode(self.network.decode_step, state, length, sample_fn).unsqueeze(1)
            exist = torch.ones(outputs.shape[:2], dtype=torch.bool)
        # The outputs are stored by text, since tokens can spell a text in several ways.
        rows: list[dict[str, Output]] = [{} for _ in sources]
        is_scored = options.scores or options.steps
        scores = [self._scores(source, ids, options.steps) for ids in outputs.unbind(1)] if is_scored else []
        for row, place in exist.nonzero().tolist():
            output = Output(self.tokenizer.decode(outputs[row, place].tolist()))
            if is_scored:
                score = scores[place][row]
                value = score.log_probability if options.scores else None
                output = output._replace(log_probability=value, steps=score.steps)
            rows[row].setdefault(output.text, output)  # the best comes first
        return [list(by_text.values()) for by_text in rows]

    def _scores(self, source: Tensor, output: Tensor, with_steps: bool) -> list[Score]:
        """Return the scores of outputs (B, T) for sources (B, S)."""
        target_in = torch.cat((torch.full_like(output[:, :1], BOS), output[:, :-1]), dim=1)
        logits = self.network(source, target_in.masked_fill(target_in == EOS, PAD))  # (B, T, V)
        scores = []
        for row, value in enumerate((-sequence_nll(logits, output)).tolist()):
            ids = output[row][output[row] != PAD]
            steps = self.steps(logits[row, : len(ids)], ids) if with_steps else None
            scores.append(Score(value, len(ids), steps=steps))
        return scores

    def encode_pair(self, line: str) -> tuple[Ids, Ids, str]:
        source, tab, target = strip_fields(line).rpartition("\t")
        if not tab:
            raise UserError(
                "it must have a source and a target, separated by a tab, but has no tab; add the target, as with paste "
                "SOURCES TARGETS"
            )
        note = self.check_columns(source)
        source_ids, target_ids = self.tokenize(source), self.tokenizer.encode_target(target)
        self.network.check_lengths(len(source_ids) + 1, len(target_ids) + 1)
        note = self.input_note(source_ids, [source], note)
        if unknown := self.tokenizer.unknown_symbols(target, is_target=True):
            symbols = f"{len(unknown)} of {len(target_ids)} tokens of the target"
            note = "; ".join(filter(None, (note, f"{symbols} are not in the vocabulary: {name_symbols(unknown)}")))
        return [*source_ids, EOS], [*target_ids, EOS], note

    def score_ids(self, pairs: list[tuple[Ids, Ids]], with_steps: bool) -> list[Score]:
        sources, targets = (pad_sequences(side)[0].to(self.device) for side in zip(*pairs, strict=True))
        return self._scores(sources, targets, with_steps)

    @torch.no_grad()
    def copy_unknown(self, source: str, output: str) -> str:
        """Return the output of a network that copies, with symbols of the source in place of unknown ones.

        Each is the unknown symbol of the source with the largest weight in the last attention layer, from which the
        network copies (Jean et al. 2015). The output of another network, or for a source without one, is unchanged.
        """
        written = self.tokenizer.split_target(output)[: self.max_target_length]  # of which the attention is computed
        rows = [row for row, symbol in enumerate(written) if symbol == UNKNOWN]
        if not rows or not self.network.copies:
            return output
        symbols, ids = self.tokenizer.split(source), self.tokenizer.encode(source)
        unknown = [
            place
            for place, (symbol, id) in enumerate(zip(symbols, ids, strict=True))
            if id == self.tokenizer.unknown_id and len(self.tokenizer.split_target(symbol)) == 1  # no feature
        ]
        if not unknown:
            return output
        inputs = self._inputs(source, output)
        with attention_maps(self.network) as maps:
            self.network.logits(*inputs, self.network.encode(inputs[0]))
        *_, weights = self.network.source_attention(maps, inputs[0]).values()  # (1, H, T, S)
        chosen = weights.mean(1)[0, rows][:, unknown].argmax(1)
        copied = iter([symbols[unknown[place]] for place in chosen.tolist()])
        return re.sub(UNKNOWN, lambda _: next(copied, UNKNOWN), output)

    @torch.no_grad()
    def align(self, source: str, target: str) -> AttentionMap:
        """Return attention weights over the source and EOS, as a single head, which align a target with its source.

        These are the weights of the head with the highest alignment accuracy in validation, if the data have a gold
        alignment, and otherwise the mean over the heads of the middle layer.

        Note:
            Chen et al. (2020) read the attention of a Transformer of six layers one step later. In the experiments of
            this project, whose networks have two or three layers, the alignment would be wrong by one token.
        """
        inputs = self._inputs(source, target)
        with attention_maps(self.network) as maps:
            self.network(*inputs)
        source_attention = self.network.source_attention(maps, inputs[0])  # (1, H, T, S)
        sources, targets = [*self.tokenizer.split(source), "EOS"], self.tokenizer.split_target(target)
        layer, head = self.alignment_head or (list(source_attention)[len(source_attention) // 2], None)
        weights = source_attention[layer][0] if head is None else source_attention[layer][0, head].unsqueeze(0)
        rows = torch.arange(len(targets)).clamp(max=inputs[1].size(1) - 1)
        weights = weights.mean(0, keepdim=True)[:, rows, : len(sources)]
        return AttentionMap(layer, weights.float().cpu(), targets, sources, [], predicts="output")

    def teacher_forced(self, line: str) -> TeacherForced:
        source, output = clean_line(line), self.output_text(line)
        inputs = self._inputs(source, output)
        T = inputs[1].size(1)
        targets = torch.tensor([[*self.tokenizer.encode_target(output), EOS][:T]], device=self.device)
        symbols, target_symbols = [*self.tokenizer.split(source), "EOS"], [*self.tokenizer.split_target(output), "EOS"]
        decoder_symbols = ["BOS", *target_symbols][:T]
        if isinstance(self.network, CausalNetwork):  # which embeds source and target in one sequence
            symbols, decoder_symbols = symbols + decoder_symbols, []
        return TeacherForced(output, inputs, targets, targets != PAD, symbols, target_symbols[:T], decoder_symbols)

    def _inputs(self, source: str, target: str) -> tuple[Tensor, Tensor]:
        """Return source (1, S) and target_in (1, T) of a pair, with T truncated to max_target_length."""
        target_in = [BOS, *self.tokenizer.encode_target(target)][: self.max_target_length]
        rows = [*self.tokenizer.encode(source), EOS], target_in
        source_ids, target_ids = (torch.tensor([ids], device=self.device) for ids in rows)
        return source_ids, target_ids

    def example_inputs(self, rows: int, length: int, generator: torch.Generator) -> dict[str, Tensor]:
        return {name: self.network.random_ids(rows, length, generator) for name in ("source", "target_in")}

    def max_input_lengths(self) -> dict[str, int | None]:
        return dict(zip(("source", "target_in"), self.network.max_lengths(self.max_target_length), strict=True))

    def given_example(self, line: str) -> dict[str, Any]:
        """Return a source and its target, separated by a tab, as the content of an AttentionExample."""
        source, _, target = clean_line(line).rpartition("\t")
        return {"source": source, "target": target, "alignment": None}

    def attention(self, content: Mapping[str, Any]) -> list[AttentionMap]:
        text = content.get("prediction", content["target"])
        inputs = self._inputs(content["source"], text)
        source = [*self.tokenizer.split(content["source"]), "EOS"]
        target = self.tokenizer.split_target(text)
        T = inputs[1].size(1)
        target_in, target_out = ["BOS", *target][:T], [*target, "EOS"][:T]
        gold = content["alignment"] if text == content["target"] else None
        links = [(i, j) for i, j in gold or () if j < T]
        predicts: Literal["output", "target"] = "output" if "prediction" in content else "target"
        maps = []
        for layer, weights in attention_weights(self.network, *inputs).items():
            side = self.network.side(layer)
            if side == "source":
                maps.append(AttentionMap(layer, weights, target_out, source, links, predicts=predicts))
            elif side == "sequence":  # in which a row predicts the next symbol
                moved = [(i, len(source) + j) for i, j in links]
                rows, columns = [*source[1:], "BOS", *target_out], [*source, *target_in]
                maps.append(AttentionMap(layer, weights, rows, columns, moved, len(source), predicts=predicts))
            elif side == "encoder":
                maps.append(AttentionMap(layer, weights, source, source, []))
            else:
                maps.append(AttentionMap(layer, weights, target_out, target_in, [], predicts=predicts))
        return maps
