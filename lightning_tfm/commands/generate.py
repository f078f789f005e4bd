"""`lightning-tfm generate`: run a trained model on lines of text."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import fields
from io import TextIOWrapper
from itertools import islice
from pathlib import Path
from typing import Any, TextIO, cast

import torch
from tqdm import tqdm

from lightning_tfm.commands.parser import CommandParser
from lightning_tfm.decoding import DecodingOptions
from lightning_tfm.errors import UserError
from lightning_tfm.loading import load

BATCH_SIZE = 256
"""Lines per batch."""


def generate(arguments: list[str]) -> int:
    """Write the output for each line of input.

    Args:
        arguments: the command-line arguments.

    Returns:
        The exit status: 1 if a line could not be answered, 0 otherwise.
    """
    options = _parse(arguments)
    decoding = DecodingOptions(**{field.name: getattr(options, field.name) for field in fields(DecodingOptions)})
    module = load(options.checkpoint, options.trust_package)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    module.to(device)
    generator = torch.Generator(device).manual_seed(decoding.seed)
    number, failures = 0, 0
    with ExitStack() as files:
        lines, batch_size = _input(options, files, module.outputs_are_long)
        output = files.enter_context(_open(options.output, "w")) if options.output else sys.stdout
        bar = files.enter_context(_bar(options))
        for answers in module.predict_batches(_batches(lines, batch_size), decoding, generator):
            for answer in answers:
                number += 1
                if answer.note:
                    bar.write(f"lightning-tfm: line {number}: {answer.note}", file=sys.stderr)
                text = answer.text or ""
                if module.outputs_are_long:
                    if number > 1:
                        print("-" * 20, file=output)
                else:  # one line of output for each line of input, but subwords can contain line feeds
                    text = text.replace("\n", " ")
                print(text, file=output)
                failures += answer.text is None
            output.flush()
            bar.update(len(answers))
    return 1 if failures else 0


def make_parser() -> CommandParser:
    """Return the parser of the command."""
    parser = CommandParser(
        "lightning-tfm generate",
        description="Write the output for each text: a line, a continuation, or a label with its probability, "
        "depending on the model. Reads standard input if neither TEXT nor --input is given.",
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a file that fit has written")
    parser.add_argument("texts", metavar="TEXT", nargs="*", help="an input text")
    parser.add_argument("--input", type=Path, metavar="FILE", help="read the texts from a file, one per line")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the outputs to a file")
    parser.add_argument("--beam-size", type=int, default=1, metavar="N", help="search with N beams (1: greedy)")
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
        help="maximum number of tokens to generate (default: 500 for a language model)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="the seed of sampling")
    parser.add_trust_package()
    return parser


def _parse(arguments: list[str]) -> Namespace:
    options = make_parser().parse_intermixed_args(arguments)
    if options.texts and options.input:
        raise UserError("the input must be TEXT or --input, but both are given; leave one out")
    if options.input and options.output and options.output.exists() and options.output.samefile(options.input):
        raise UserError(f"--output must be another file than --input, but both are {str(options.input)!r}")
    return options


def _batches(lines: Iterable[str], size: int) -> Iterator[list[str]]:
    lines = iter(lines)
    while batch := list(islice(lines, size)):
        yield batch


def _open(path: Path, mode: str) -> TextIO:
    try:
        if mode == "w":
            return path.open("w", encoding="utf-8")
        # Bytes that are not UTF-8 become surrogates, which `TaskModule.predict_batches` reports.
        return path.open(encoding="utf-8-sig", errors="surrogateescape", newline="\n")
    except OSError as error:
        option = "--output" if mode == "w" else "--input"
        raise UserError(f"{option} must be a file, but {str(path)!r} cannot be opened: {error.strerror}") from None


def _input(options: Namespace, files: ExitStack, one_by_one: bool) -> tuple[Iterable[str], int]:
    """Return the lines of input and the batch size, which is 1 at a terminal to answer each line immediately."""
    batch_size = 1 if one_by_one else BATCH_SIZE
    if options.texts:
        return options.texts, batch_size
    if options.input:
        if options.input.is_file() and _is_binary(options.input):
            raise UserError(f"--input must be a text file, but {str(options.input)!r} is binary")
        return _lines(files.enter_context(_open(options.input, "r"))), batch_size
    if sys.stdin is None:
        raise UserError("the input must be TEXT, --input or standard input, but there is none; try TEXT")
    cast(TextIOWrapper, sys.stdin).reconfigure(encoding="utf-8-sig", errors="surrogateescape", newline="\n")
    return (_prompted(), 1) if sys.stdin.isatty() else (_lines(sys.stdin), batch_size)


def _is_binary(path: Path) -> bool:
    with path.open("rb") as file:
        return b"\0" in file.read(10_000)


def _prompted() -> Iterator[str]:
    """Yield the lines that the user types, after a prompt on standard error: the output may be redirected."""
    print("Type a text and press Enter; Ctrl-D ends.", file=sys.stderr)
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        if not (line := sys.stdin.readline()):
            print(file=sys.stderr)
            return
        yield line.rstrip("\r\n")


def _lines(file: TextIO) -> Iterator[str]:
    return (line.rstrip("\r\n") for line in file)


def _bar(options: Namespace) -> tqdm[Any]:
    """Return a progress bar, shown for a file or a pipe whose outputs are not written to the terminal."""
    is_long = options.input or not (options.texts or sys.stdin.isatty())
    shown = bool(is_long and sys.stderr.isatty() and (options.output or not sys.stdout.isatty()))
    total = None
    if shown and options.input and options.input.is_file():  # a pipe can be read only once
        with options.input.open("rb") as file:
            total = sum(1 for _ in file)
    return tqdm(total=total, desc="answering", unit=" lines", leave=False, disable=not shown)
