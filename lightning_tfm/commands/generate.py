"""`lightning-tfm generate`: answers a user's own input with a trained model."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor
from tqdm import tqdm

from lightning_tfm.checkpoint import load
from lightning_tfm.commands.parser import CommandParser
from lightning_tfm.data import padded
from lightning_tfm.decoding import State, Step, beam_search, decode, sampler
from lightning_tfm.errors import UserError
from lightning_tfm.networks import Network
from lightning_tfm.tokenizer import EOS, Tokenizer

BATCH_SIZE = 256
LONG = 1_000
"""Tokens above which a line is answered by itself: the other lines of its batch would be padded to it."""


def generate(arguments: list[str]) -> int:
    """Answers each line of the input with one line; the exit status is 1 if a line could not be answered."""
    options = _parse(arguments)
    network, tokenizer, max_length = load(options.checkpoint)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network.to(device)
    if options.beam_size > 1:
        search = partial(_beam_tokens, beam_size=options.beam_size)
    elif options.temperature > 0:
        generator = torch.Generator(device).manual_seed(options.seed)
        search = partial(decode, choose=sampler(options.temperature, options.top_k, options.top_p, generator))
    else:
        search = decode

    failures = 0
    with ExitStack() as files:
        lines, batch_size = _input(options, files)
        output = files.enter_context(_open(options.output, "w")) if options.output else sys.stdout
        numbered = enumerate(lines, start=1)
        bar = files.enter_context(_bar(options))
        while batch := list(islice(numbered, batch_size)):
            sources, errors = _encode(batch, network, tokenizer, max_length)
            groups = [{number: ids for number, ids in sources.items() if len(ids) <= LONG}]
            groups += [{number: ids} for number, ids in sources.items() if len(ids) > LONG]
            answers: dict[int, str] = {}
            for group in groups:
                answers |= _answer(group, network, tokenizer, max_length, search)
            for number, _ in batch:
                if number in errors:
                    bar.write(f"lightning-tfm: line {number}: {errors[number]}", file=sys.stderr)
                print(answers.get(number, ""), file=output)  # a line for each line, so that they stay side by side
            output.flush()
            failures += len(errors)
            bar.update(len(batch))
    return 1 if failures else 0


def _beam_tokens(step: Step, state: State, max_length: int, beam_size: int) -> Tensor:
    tokens, _ = beam_search(step, state, max_length, beam_size)
    return tokens


def _parse(arguments: list[str]) -> Namespace:
    parser = CommandParser(
        "lightning-tfm generate",
        description="Answer each text with one line; read standard input where neither TEXT nor --input is given.",
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a file that fit has written")
    parser.add_argument("texts", metavar="TEXT", nargs="*", help="what to answer")
    parser.add_argument("--input", type=Path, metavar="FILE", help="answer each line of a file")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the answers to a file")
    parser.add_argument("--beam-size", type=int, default=1, metavar="N", help="search with N beams (1: greedy)")
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="sample; below 1 is bolder (0: do not sample)"
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="sample among the K likeliest tokens only")
    parser.add_argument("--top-p", type=float, metavar="P", help="sample among the likeliest tokens of probability P")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="what samples are drawn from")
    options = parser.parse_intermixed_args(arguments)
    if options.texts and options.input:
        raise UserError("the input must be TEXT or --input, but both are given; leave one out")
    if options.beam_size < 1:
        raise UserError(f"--beam-size must be at least 1, but is {options.beam_size}; try 4")
    if options.temperature != 0 and not 0.01 <= options.temperature <= 100:
        raise UserError(f"--temperature must be 0 or from 0.01 to 100, but is {options.temperature}; try 0.8")
    if options.top_k is not None and options.top_k < 1:
        raise UserError(f"--top-k must be at least 1, but is {options.top_k}; try 10")
    if options.top_p is not None and not 0 < options.top_p <= 1:
        raise UserError(f"--top-p must be above 0 and at most 1, but is {options.top_p}; try 0.9")
    if options.input and options.output and options.output.exists() and options.output.samefile(options.input):
        raise UserError(f"--output must be another file than --input, but both are {str(options.input)!r}")
    if options.beam_size > 1 and options.temperature > 0:
        raise UserError("--beam-size and --temperature exclude each other: a beam search does not sample")
    if options.temperature == 0 and (options.top_k is not None or options.top_p is not None):
        raise UserError("--top-k and --top-p need --temperature above 0, but it is 0; try --temperature 1")
    return options


def _open(path: Path, mode: str) -> TextIO:
    try:
        # what is no UTF-8 becomes a character that no vocabulary has, so that its line is named like any other
        return path.open(mode, encoding="utf-8-sig" if mode == "r" else "utf-8", errors="surrogateescape")
    except OSError as error:
        raise UserError(f"the file {str(path)!r} cannot be opened: {error.strerror}") from None


def _input(options: Namespace, files: ExitStack) -> tuple[Iterable[str], int]:
    """The lines to answer, and how many at once: a person at a terminal gets each answer at once."""
    if options.texts:
        return options.texts, BATCH_SIZE
    if options.input:
        return files.enter_context(_open(options.input, "r")), BATCH_SIZE
    if sys.stdin is None:
        raise UserError("the input must be TEXT, --input or standard input, but there is none; try TEXT")
    sys.stdin.reconfigure(encoding="utf-8-sig", errors="surrogateescape")
    return sys.stdin, 1 if sys.stdin.isatty() else BATCH_SIZE


def _bar(options: Namespace) -> tqdm:
    """A bar for a file or a pipe whose answers do not go to the terminal themselves."""
    is_long = options.input or not (options.texts or sys.stdin.isatty())
    shown = bool(is_long and sys.stderr.isatty() and (options.output or not sys.stdout.isatty()))
    total = None
    if shown and options.input and options.input.is_file():  # a pipe can be read once only
        with options.input.open("rb") as file:
            total = sum(1 for _ in file)
    return tqdm(total=total, desc="answering", unit=" lines", leave=False, disable=not shown)


def _encode(
    batch: list[tuple[int, str]], network: Network, tokenizer: Tokenizer, max_length: int
) -> tuple[dict[int, list[int]], dict[int, UserError]]:
    """Of the numbered lines: the ids of those that can be answered, and what is wrong with the others."""
    sources: dict[int, list[int]] = {}
    errors: dict[int, UserError] = {}
    for number, line in batch:
        line = line.rstrip("\r\n")
        if not line.strip():
            continue
        try:
            ids = [*tokenizer.encode(line), EOS]
            network.check_lengths(len(ids), max_length)
            sources[number] = ids
        except UserError as error:
            errors[number] = error
    return sources, errors


@torch.inference_mode()
def _answer(
    sources: dict[int, list[int]],
    network: Network,
    tokenizer: Tokenizer,
    max_length: int,
    search: Callable[[Step, State, int], Tensor],
) -> dict[int, str]:
    """The answers to the encoded lines, all in one batch."""
    if not sources:
        return {}
    source, _ = padded(list(sources.values()))
    source = source.to(next(network.parameters()).device)
    tokens = search(network.decode_step, network.encode(source), max_length).tolist()
    return {number: tokenizer.decode(row) for number, row in zip(sources, tokens, strict=True)}
