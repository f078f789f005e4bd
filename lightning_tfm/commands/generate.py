"""`lightning-tfm generate`: run a trained model on your own input."""

from __future__ import annotations

import math
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import fields

import torch

from lightning_tfm.commands.lines import AttentionFigure, LineOutput, json_line, load_predictor, read_chunks
from lightning_tfm.commands.parser import CommandParser
from lightning_tfm.errors import UserError
from lightning_tfm.inference import LinePrediction, OutputStep, Predictor, clean_line
from lightning_tfm.inference.attention_maps import AttentionMap
from lightning_tfm.inference.decoding import DecodingOptions
from lightning_tfm.runs.names import HELP

BARS = " ▁▂▃▄▅▆▇█"
"""Characters for attention weights from 0 to the largest."""

VISIBLE = 0.02
"""Smallest attention weight that is not blank, as a fraction of the largest."""

TO_ONE_LINE = dict.fromkeys(map(ord, "\t\n\v\f\r\x1c\x1d\x1e\x85\u2028\u2029"), " ")
"""Replacements of tabs and of all characters at which `str.splitlines` and universal newlines end a line."""

UNCERTAIN = 0.5
"""Probability of a symbol below which a terminal shows its best alternative."""

MAX_WIDTH = 120
"""Maximum width of a table of attention weights, in characters."""


def generate(arguments: list[str]) -> int:
    """Write the output for each line of input; the exit status is 1 if there is none for a line."""
    options = make_parser().parse_intermixed_args(arguments)
    figure = AttentionFigure(options)
    if options.beam_size is None:
        options.beam_size = max(1, options.n_best)
    options.steps = options.json or (len(options.texts) == 1 and sys.stdout.isatty())
    decoding = DecodingOptions(**{field.name: getattr(options, field.name) for field in fields(DecodingOptions)})
    predictor = load_predictor(options)
    predictor.check_options(decoding)  # before input is read
    if options.show_attention and "alignments" not in predictor.decoding_options:
        raise UserError(
            f"--show-attention must not be set for a {predictor.task_name()}, whose outputs are not aligned with "
            "the input; leave it out, and see the attention with lightning-tfm report RUN --input TEXT"
        )
    generator = torch.Generator(predictor.device).manual_seed(decoding.seed)
    with ExitStack() as files:
        chunks = read_chunks(options, files, predictor.outputs_are_long)
        output = files.enter_context(LineOutput(options, generator))
        for lines in output.remaining(chunks):
            predictions = predictor.predict(lines, decoding, generator, output.bar.update)
            numbered = enumerate(zip(lines, predictions, strict=True), start=output.done + 1)
            texts = [_format(predictor, number, line, prediction, options) for number, (line, prediction) in numbered]
            if figure.path is not None and (text := predictions[0].text) is not None:
                figure.save(predictor, predictor.example(lines[0], text))
            failures = sum(prediction.outputs is None for prediction in predictions)
            output.write(texts, [prediction.note for prediction in predictions], failures)
    return 1 if output.failures else 0


def make_parser() -> CommandParser:
    """Return the parser of the command."""
    parser = CommandParser(
        "lightning-tfm generate",
        description="Write the output for each text: a line, a continuation, or a label with its probability, "
        "depending on the model. Reads standard input if neither TEXT nor --input is given.",
    )
    parser.add_argument("checkpoint", metavar="RUN", help=HELP)
    parser.add_lines("an input text")
    parser.add_argument(
        "--beam-size", type=int, metavar="N", help="search with N beams (default: that of --n-best; 1: greedy)"
    )
    parser.add_argument(
        "--n-best",
        type=int,
        default=1,
        metavar="N",
        help="write the N best outputs of the beam search, one per line, each text once",
    )
    parser.add_argument(
        "--vote",
        action="store_true",
        help="let the members of an ensemble vote, each for the N outputs of its own beam search, in place of the mean "
        "of their probabilities",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="sampling temperature; lower is more conservative (default: 0, greedy; for a language model, 0.8)",
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="sample among the K most probable tokens only")
    parser.add_argument(
        "--top-p", type=float, metavar="P", help="sample among the most probable tokens of total probability P"
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help="maximum number of tokens to generate (default: 500 for a language model); at most the maximum "
        "target length of a sequence-to-sequence model",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="the seed of sampling")
    parser.add_argument(
        "--scores", action="store_true", help="add columns with the log probability, in nats, and the rank"
    )
    parser.add_argument(
        "--alignments", action="store_true", help="add a column with the alignment, as SOURCE-OUTPUT from 0"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--json",
        action="store_true",
        help="write a JSON object per output, with the probabilities of its symbols and of their alternatives",
    )
    form.add_argument("--show-attention", action="store_true", help="draw the attention as text, if it fits")
    AttentionFigure.add_options(parser, "output")
    parser.add_trust_package()
    return parser


def _format(predictor: Predictor, number: int, line: str, prediction: LinePrediction, options: Namespace) -> str:
    """Format the outputs for a line of input."""
    separator = f"{'-' * 20}\n" if predictor.outputs_are_long and number > 1 and not options.json else ""
    if prediction.outputs is None:
        return json_line({"line": number, "text": line, "output": None}, None) if options.json else separator
    written = []
    for rank, output in enumerate(prediction.outputs, start=1):
        alignment = None if output.alignment is None else " ".join(f"{i}-{j}" for i, j in output.alignment)
        columns = {"output": output.text, "probability": output.probability}
        columns |= {"log_probability": output.log_probability, "rank": rank, "alignment": alignment}
        if options.json and output.steps is not None:
            columns["log_probability"] = sum(step.log_probability for step in output.steps)
        if not (options.scores or options.n_best > 1):
            del columns["rank"]
        columns = {name: value for name, value in columns.items() if value is not None}
        if options.json:
            written.append(json_line({"line": number, "text": line} | columns, output.steps))
            continue
        if not predictor.outputs_are_long:  # one line per output, but tokens may contain ends of lines
            columns["output"] = output.text.translate(TO_ONE_LINE)
        written.append("\t".join(f"{v:.4f}" if isinstance(v, float) else str(v) for v in columns.values()))
    if options.steps and not (options.json or predictor.outputs_are_long):
        written += _uncertain(prediction.outputs[0].steps or ())
    if options.show_attention:
        best = prediction.outputs[0].text
        written.append(_attention_table(predictor.align(clean_line(line), best)))
    return separator + "\n".join(written)


def _uncertain(steps: Sequence[OutputStep]) -> list[str]:
    """Return a line about the symbols of an output with a probability below UNCERTAIN; none without such symbols."""
    named = [
        f"{step.symbol!r} {step.probability:.2f}"
        + "".join(f" or {other.symbol!r} {other.probability:.2f}" for other in step.alternatives[:1])
        for step in steps
        if step.probability < UNCERTAIN
    ]
    return [f"(uncertain: {', '.join(named)})"] if named else []


def _attention_table(attention: AttentionMap) -> str:
    """Format attention weights as text, with the output in rows and the source in columns.

    Note:
        The weights are scaled by the largest one, which the last line gives.
    """
    first = max(map(len, attention.queries), default=0)
    if first + sum(len(key) + 1 for key in attention.keys) > MAX_WIDTH:
        return f"(the attention is wider than {MAX_WIDTH} characters)"
    lines = [" ".join(["".ljust(first), *attention.keys])]
    largest = max(attention.weights.flatten().tolist(), default=0.0) or 1.0
    for query, weights in zip(attention.queries, attention.weights[0].tolist(), strict=True):
        shares = [weight / largest for weight in weights]
        heights = [0 if share < VISIBLE else math.ceil(share * (len(BARS) - 1)) for share in shares]
        bars = [BARS[height] * len(key) for key, height in zip(attention.keys, heights, strict=True)]
        lines.append(" ".join([query.ljust(first), *bars]))
    lines.append(f"({BARS[-1]} is a weight of {largest:.2f}, a blank is below {VISIBLE * largest:.3f})")
    return "\n".join(line.rstrip() for line in lines)
