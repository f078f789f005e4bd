"""`lightning-tfm score`: compute the log probability of given targets or texts."""

from __future__ import annotations

from contextlib import ExitStack

from lightning_tfm.commands.lines import AttentionFigure, LineOutput, json_line, load_predictor, read_chunks
from lightning_tfm.commands.parser import CommandParser
from lightning_tfm.inference import Score
from lightning_tfm.runs.names import HELP


def score(arguments: list[str]) -> int:
    """Write the log probability, in nats, and the perplexity per token of each line.

    Returns:
        The exit status: 1 if a line could not be scored, 0 otherwise.
    """
    options = make_parser().parse_intermixed_args(arguments)
    figure = AttentionFigure(options)
    predictor = load_predictor(options)
    with ExitStack() as files:
        chunks = read_chunks(options, files, one_by_one=False)
        output = files.enter_context(LineOutput(options))
        for lines in output.remaining(chunks):
            scores = predictor.score(lines, output.bar.update, with_steps=options.json)
            numbered = enumerate(zip(lines, scores, strict=True), start=output.done + 1)
            texts = [_format(number, line, value, options.json) for number, (line, value) in numbered]
            failures = sum(value.log_probability is None for value in scores)
            if figure.path is not None and not failures:
                figure.save(predictor, predictor.given_example(lines[0]))
            output.write(texts, [value.note for value in scores], failures)
    return 1 if output.failures else 0


def _format(number: int, line: str, score: Score, as_json: bool) -> str:
    """Format the score of a line."""
    if as_json:
        values = {"line": number, "text": line, "log_probability": score.log_probability}
        return json_line(values | {"perplexity": score.perplexity}, score.steps)
    return "" if score.log_probability is None else f"{score.log_probability:.4f}\t{score.perplexity:.4f}"


def make_parser() -> CommandParser:
    """Return the parser of the command."""
    parser = CommandParser(
        "lightning-tfm score",
        description="Write the log probability, in nats, and the perplexity per token of each line: of a target given "
        "its source, separated by a tab, or of a text given its first token. Reads standard input if neither TEXT nor "
        "--input is given.",
    )
    parser.add_argument("checkpoint", metavar="RUN", help=HELP)
    parser.add_lines("a line: SOURCE, a tab and TARGET, or a text")
    parser.add_argument(
        "--json",
        action="store_true",
        help="write a JSON object per line, with the probabilities of its symbols and of their alternatives",
    )
    AttentionFigure.add_options(parser, "given target")
    parser.add_trust_package()
    return parser
