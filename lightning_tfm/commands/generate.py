"""`lightning-tfm generate`: answers a user's own input with a trained model."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import TextIO

import torch
from tqdm import tqdm

from lightning_tfm.checkpoint import Trained, load
from lightning_tfm.commands.parser import CommandParser
from lightning_tfm.data import normalized, padded
from lightning_tfm.decoding import beam_search, decode, go_on, greedy, sampler
from lightning_tfm.errors import UserError
from lightning_tfm.tokenizer import EOS

BATCH_SIZE = 256
LONG = 1_000
"""Tokens above which a line is answered by itself: the other lines of its batch would be padded to it."""


def generate(arguments: list[str]) -> int:
    """Answers each line of the input; the exit status is 1 if a line could not be answered."""
    options = _parse(arguments)
    trained = load(options.checkpoint, options.allow)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    trained.network.to(device)
    _check_options(options, trained.task)
    generator = torch.Generator(device).manual_seed(options.seed)
    failures = 0
    with ExitStack() as files:
        # A text is gone on with by itself, and told at once: nothing stands before its beginning, and it takes long.
        alone = trained.task == "language modelling"
        lines, batch_size = _input(options, files, alone)
        output = files.enter_context(_open(options.output, "w")) if options.output else sys.stdout
        numbered = enumerate(lines, start=1)
        bar = files.enter_context(_bar(options))
        while batch := list(islice(numbered, batch_size)):
            sources, notes = _encode(batch, trained)
            groups = [{number: ids for number, ids in sources.items() if len(ids) <= LONG}]
            groups += [{number: ids} for number, ids in sources.items() if len(ids) > LONG]
            answers: dict[int, str] = {}
            for group in groups:
                answers |= _answer(group, trained, options, generator) if group else {}
            for number, _ in batch:
                if number in notes:
                    bar.write(f"lightning-tfm: line {number}: {notes[number]}", file=sys.stderr)
                if alone and number > 1:  # a text is of lines itself
                    print("-" * 20, file=output)
                answer = answers.get(number, "")
                if not alone:  # a line for each line, so that they stay side by side; subwords could write two
                    answer = answer.replace("\n", " ")
                print(answer, file=output)
            output.flush()
            failures += sum(number not in sources for number in notes)
            bar.update(len(batch))
    return 1 if failures else 0


def _parse(arguments: list[str]) -> Namespace:
    parser = CommandParser(
        "lightning-tfm generate",
        description="Answer each text: with one line, go on with it, or say its label and the probability of that, as "
        "the model was trained for. Reads standard input where neither TEXT nor --input is given.",
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a file that fit has written")
    parser.add_argument("texts", metavar="TEXT", nargs="*", help="what to answer")
    parser.add_argument("--input", type=Path, metavar="FILE", help="answer each line of a file")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the answers to a file")
    parser.add_argument("--beam-size", type=int, default=1, metavar="N", help="search with N beams (1: greedy)")
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="sample: the lower, the more conservative (default: 0, greedy decoding; for a language model, 0.8)",
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="sample among the K likeliest tokens only")
    parser.add_argument("--top-p", type=float, metavar="P", help="sample among the likeliest tokens of probability P")
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="how many tokens to go on with (default: 500), or an answer's most"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="what samples are drawn from")
    parser.add_allow()
    options = parser.parse_intermixed_args(arguments)
    if options.texts and options.input:
        raise UserError("the input must be TEXT or --input, but both are given; leave one out")
    if options.beam_size < 1:
        raise UserError(f"--beam-size must be at least 1, but is {options.beam_size}; try 4")
    if options.temperature and not 0.01 <= options.temperature <= 100:
        raise UserError(f"--temperature must be 0 or from 0.01 to 100, but is {options.temperature}; try 0.8")
    if options.max_tokens is not None and options.max_tokens < 1:
        raise UserError(f"--max-tokens must be at least 1, but is {options.max_tokens}; try 500")
    if options.top_k is not None and options.top_k < 1:
        raise UserError(f"--top-k must be at least 1, but is {options.top_k}; try 10")
    if options.top_p is not None and not 0 < options.top_p <= 1:
        raise UserError(f"--top-p must be above 0 and at most 1, but is {options.top_p}; try 0.9")
    if not 0 <= options.seed < 2**32:
        raise UserError(f"--seed must be from 0 to {2**32 - 1}, but is {options.seed}; try 1")
    if options.input and options.output and options.output.exists() and options.output.samefile(options.input):
        raise UserError(f"--output must be another file than --input, but both are {str(options.input)!r}")
    return options


def _check_options(options: Namespace, task: str) -> None:
    """Gives options that are not given the task's defaults; raises UserError if one does not suit it."""
    searched = {"--beam-size": options.beam_size > 1, "--max-tokens": options.max_tokens is not None}
    sampled = {"--top-k": options.top_k is not None, "--top-p": options.top_p is not None}
    if options.temperature is None:
        options.temperature = 0.8 if task == "language modelling" else 0.0
        sampled["--temperature"] = False
    else:
        sampled["--temperature"] = options.temperature > 0
    if task == "classification":
        for name, given in (searched | sampled).items():
            if given:
                raise UserError(
                    f"{name} must not be given, for this model says which class a text is of, and writes none"
                )
    if task == "language modelling" and options.beam_size > 1:
        raise UserError(
            "--beam-size must be 1, for a text that is gone on with has no end to search for; sample instead"
        )
    if options.beam_size > 1 and options.temperature > 0:
        raise UserError("--beam-size and --temperature exclude each other: a beam search does not sample")
    if options.temperature == 0 and (options.top_k is not None or options.top_p is not None):
        raise UserError("--top-k and --top-p need --temperature above 0, but it is 0; try --temperature 1")


def _open(path: Path, mode: str) -> TextIO:
    try:
        if mode == "w":
            return path.open(mode, encoding="utf-8")
        # What is no UTF-8 becomes half a character, by which its line is known.
        return path.open(encoding="utf-8-sig", errors="surrogateescape", newline="\n")
    except OSError as error:
        option = "--output" if mode == "w" else "--input"
        raise UserError(f"{option} must be a file, but {str(path)!r} cannot be opened: {error.strerror}") from None


def _input(options: Namespace, files: ExitStack, alone: bool) -> tuple[Iterable[str], int]:
    """The lines to answer, and how many at once: a person at a terminal gets each answer at once."""
    batch_size = 1 if alone else BATCH_SIZE
    if options.texts:
        return options.texts, batch_size
    if options.input:
        return _lines(files.enter_context(_open(options.input, "r"))), batch_size
    if sys.stdin is None:
        raise UserError("the input must be TEXT, --input or standard input, but there is none; try TEXT")
    sys.stdin.reconfigure(encoding="utf-8-sig", errors="surrogateescape", newline="\n")
    return _lines(sys.stdin), 1 if sys.stdin.isatty() else batch_size


def _lines(file: TextIO) -> Iterator[str]:
    return (line.rstrip("\r\n") for line in file)


def _bar(options: Namespace) -> tqdm:
    """A bar for a file or a pipe whose answers do not go to the terminal themselves."""
    is_long = options.input or not (options.texts or sys.stdin.isatty())
    shown = bool(is_long and sys.stderr.isatty() and (options.output or not sys.stdout.isatty()))
    total = None
    if shown and options.input and options.input.is_file():  # a pipe can be read once only
        with options.input.open("rb") as file:
            total = sum(1 for _ in file)
    return tqdm(total=total, desc="answering", unit=" lines", leave=False, disable=not shown)


def _encode(batch: list[tuple[int, str]], trained: Trained) -> tuple[dict[int, list[int]], dict[int, str]]:
    """Return the ids of the numbered lines that can be answered, and notes on some; normalized as in training."""
    sources: dict[int, list[int]] = {}
    notes: dict[int, str] = {}
    for number, line in batch:
        line = normalized(line)
        if trained.task != "language modelling":
            line = "\t".join(field.strip() for field in line.split("\t")).rstrip("\t")  # as what it was trained on
        try:
            if not line:
                raise UserError("it is empty")
            if any("\ud800" <= character <= "\udfff" for character in line):
                raise UserError("it must be UTF-8, but is not")
            ids = trained.tokenizer.encode(line)
            if not ids:
                raise UserError("there is no word in it")
            if trained.task != "classification" and trained.tokenizer.unknown_id in ids:
                unknown = sum(id == trained.tokenizer.unknown_id for id in ids)
                notes[number] = f"{unknown} of its {len(ids)} symbols are unknown to the model"
            if trained.task == "seq2seq":
                ids = [*ids, EOS]
                trained.network.check_lengths(len(ids), trained.max_target_length)
            elif trained.task == "classification" and len(ids) > trained.network.max_length:
                notes[number] = f"of its {len(ids)} tokens the last {trained.network.max_length} are read"
                ids = ids[-trained.network.max_length :]
            sources[number] = ids
        except UserError as error:
            notes[number] = str(error)
    return sources, notes


@torch.inference_mode()
def _answer(
    sources: dict[int, list[int]], trained: Trained, options: Namespace, generator: torch.Generator
) -> dict[int, str]:
    """The answers to the encoded lines, all in one batch."""
    network, tokenizer = trained.network, trained.tokenizer
    source, _ = padded(list(sources.values()))
    source = source.to(generator.device)
    if trained.task == "classification":
        probabilities, labels = network(source).float().softmax(-1).max(1)
        told = zip(labels.tolist(), probabilities.tolist(), strict=True)
        return {
            number: f"{trained.labels[label]}\t{probability:.4f}"
            for number, (label, probability) in zip(sources, told, strict=True)
        }
    choose = greedy
    if options.temperature > 0:
        choose = sampler(options.temperature, options.top_k, options.top_p, generator)
    if trained.task == "language modelling":
        length = options.max_tokens or 500
        more = go_on(network.encode, network.decode_step, source, length, network.max_length, choose)
        tokens = torch.cat((source, more), dim=1)
    else:
        state = network.encode(source)
        length = min(options.max_tokens or trained.max_target_length, trained.max_target_length)
        if options.beam_size > 1:
            tokens, _ = beam_search(network.decode_step, state, length, options.beam_size)
        else:
            tokens = decode(network.decode_step, state, length, choose)
    return {number: tokenizer.decode(row) for number, row in zip(sources, tokens.tolist(), strict=True)}
