"""Loading of the model, line-by-line input and output, and the figure of attention, of `generate` and `score`."""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from io import BufferedReader, TextIOWrapper
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TextIO, cast

import torch
from tqdm import tqdm

from lightning_tfm.commands.parser import CommandParser, check_figures
from lightning_tfm.config.settings import read_json
from lightning_tfm.errors import UserError, escape_controls, rank_zero_print, shell_quote
from lightning_tfm.inference import BATCH_SIZE, OutputStep, Predictor, short_title
from lightning_tfm.inference.loading import load
from lightning_tfm.layers import quantize
from lightning_tfm.runs.lock import lock_file
from lightning_tfm.runs.names import named_checkpoint
from lightning_tfm.system.files import naming_file, replace_file, write_text
from lightning_tfm.system.progress import progress_bar

BINARY = "has zero bytes, as binary files and texts in UTF-16 do; save it in UTF-8"
"""End of the message for an input with zero bytes."""

CHUNK_SIZE = 4 * BATCH_SIZE
"""Number of lines of a file that are sorted by length and written together."""


ESCAPED = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}
"""Escapes of the ends of lines that JSON allows in a string."""


def json_line(values: Mapping[str, Any], steps: Sequence[OutputStep] | None) -> str:
    """Return values, without numbers that are not finite, and the steps of an output as an object of JSON, on one line.

    Probabilities are rounded to six decimals.
    """
    content = {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in values.items()}
    if steps is not None:
        content["steps"] = [
            _step(step.symbol, step.probability)
            | {"alternatives": [_step(each.symbol, each.probability) for each in step.alternatives]}
            for step in steps
        ]
    # Bytes of a line that is not valid UTF-8 are surrogates, which can only be escaped.
    is_valid = not any("\ud800" <= character <= "\udfff" for character in str(values.get("text")))
    return json.dumps(content, ensure_ascii=not is_valid, allow_nan=False).translate(ESCAPED)


def _step(symbol: str, probability: float) -> dict[str, Any]:
    return {"symbol": symbol, "probability": round(probability, 6) if math.isfinite(probability) else None}


def load_predictor(options: Namespace) -> Predictor:
    """Load the model of a command: quantized on the CPU with `int8`, otherwise on the GPU, if there is one.

    The path of the checkpoint replaces the name of a run, since an interrupted command must continue with the same one.
    """
    if options.texts and Path(options.texts[0]).suffix == ".ckpt" and os.path.isfile(options.texts[0]):
        first = shell_quote(options.texts[0])
        raise UserError(f"RUN must come before TEXT, but is {options.checkpoint!r}; try {first} first")
    options.checkpoint = str(named_checkpoint(options.checkpoint))
    predictor = load(options.checkpoint, options.trust_package)
    if options.int8:
        quantize(predictor.network)
    elif torch.cuda.is_available():
        predictor.to("cuda")
    return predictor


class AttentionFigure:
    """Figure of the attention for one text, of `generate` and `score`.

    Args:
        options: the options of the command, see `add_options`.

    Raises:
        UserError: if an option is not valid.
    """

    def __init__(self, options: Namespace) -> None:
        self.path, self.layer = options.figure, options.layer
        if self.path is not None and len(options.texts) != 1:
            raise UserError(f"--figure must be set for one TEXT, but there are {len(options.texts)}; name one")
        if self.layer is not None and self.path is None:
            raise UserError(f"--layer must be set for --figure only, but is {self.layer!r}; add --figure FILE")
        self.columns = check_figures(options, "figure")

    @staticmethod
    def add_options(parser: CommandParser, rows: str) -> None:
        """Add the options of a figure, whose rows are those of an output or of a target."""
        parser.add_figures(figure=f"draw the attention for one TEXT, with the rows of the {rows},")
        parser.add_argument(
            "--layer",
            metavar="NAME",
            help="layer whose heads the figure shows, such as decoder.0.cross_attention (default: the weights that "
            "define the alignment or, without one, the last layer)",
        )

    def save(self, predictor: Predictor, content: Mapping[str, Any]) -> None:
        """Save the figure for the content of an AttentionExample.

        Raises:
            UserError: if the network has no attention weights, or not the layer.
        """
        from lightning_tfm.plots.pictures import draw_attention, missing_glyphs_named, save_figure  # slow to import

        layers = {layer.layer: layer for layer in predictor.attention(content)}
        if not layers:
            raise UserError(
                f"--figure needs attention weights, but {type(predictor.network).__name__} has none; leave it out"
            )
        if self.layer is not None and self.layer not in layers:
            raise UserError(f"--layer must be one of {', '.join(layers)}, but is {self.layer!r}")
        source, text = content["source"], content.get("prediction", content["target"])
        if self.layer is not None:
            attention = layers[self.layer]
        elif text and "alignments" in predictor.decoding_options:  # an empty text has no rows but that of EOS
            predicts: Literal["output", "target"] = "output" if "prediction" in content else "target"
            attention = predictor.align(source, text)._replace(predicts=predicts)
        else:
            attention = [*layers.values()][-1]
        title = f"{short_title(source)} \N{RIGHTWARDS ARROW} {short_title(text)}"
        with missing_glyphs_named():
            save_figure(draw_attention(attention.cropped(), title, self.columns), self.path)


def read_chunks(options: Namespace, files: ExitStack, one_by_one: bool) -> Iterator[list[str]]:
    """Return an iterator over chunks of input lines from TEXT, the file `--input`, or standard input.

    Args:
        options: the options `texts` and `input`.
        files: the stack that closes the file.
        one_by_one: whether each line is its own chunk, as is always the case in a terminal.
    """
    size = 1 if one_by_one else CHUNK_SIZE
    if options.texts and options.input:
        raise UserError("the input must be TEXT or --input, but both are given; leave one out")
    if options.texts:
        return _chunks(options.texts, size)
    if options.input:
        return _chunks(_lines(files.enter_context(_open(options.input))), size)
    if sys.stdin is None:
        raise UserError("the input must be TEXT, --input or standard input, but there is none; try TEXT")
    cast(TextIOWrapper, sys.stdin).reconfigure(encoding="utf-8-sig", errors="surrogateescape", newline="\n")
    if sys.stdin.isatty():
        return _chunks(_prompted(), 1)
    if isinstance(sys.stdin.buffer, BufferedReader) and b"\0" in sys.stdin.buffer.peek():
        raise UserError(f"standard input must be a text in UTF-8, but {BINARY}")
    return _chunks(_lines(sys.stdin), min(size, BATCH_SIZE))  # earlier output for slow pipes


def _open(path: Path) -> TextIO:
    newline = "\n"
    try:
        if path.is_file():
            with path.open("rb") as file:
                head = file.read(10_000)
            if b"\0" in head:
                raise UserError(f"--input must be a text in UTF-8, but {str(path)!r} {BINARY}")
            if b"\r" in head[:-1] and b"\n" not in head:
                newline = "\r"  # the line end of the classic Mac OS
        # Bytes that are not UTF-8 are decoded to surrogates, which Predictor reports.
        return path.open(encoding="utf-8-sig", errors="surrogateescape", newline=newline)
    except OSError as error:
        raise UserError(f"--input must be a file, but {str(path)!r} cannot be opened: {error.strerror}") from None


def _chunks(lines: Iterable[str], size: int) -> Iterator[list[str]]:
    lines = iter(lines)
    while chunk := list(islice(lines, size)):
        yield chunk


def _lines(file: TextIO) -> Iterator[str]:
    return (line.rstrip("\r\n") for line in file)


def _prompted() -> Iterator[str]:
    """Yield lines typed by the user, after a prompt on standard error, since standard output may be redirected."""
    print("Type a text and press Enter; Ctrl-D ends.", file=sys.stderr)
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        if not (line := sys.stdin.readline()):
            print(file=sys.stderr)
            return
        yield line.rstrip("\r\n")


@dataclass(frozen=True)
class State:
    """State of an interrupted output: a hash of the command, processed lines, and the size of the file."""

    command: str
    lines: int
    failures: int
    bytes: int
    generator: list[int] | None = None


class LineOutput:
    """Output of a command, with a progress bar if neither input nor output is a terminal.

    With `--output FILE`, the lines are written to `FILE.part`, which is renamed to FILE at the end. If the command is
    interrupted, running it again continues the output, unless it reads standard input or a pipe.

    Args:
        options: all options of the command, including `texts`, `input` and `output`.
        generator: the random number generator, whose state is restored.

    Raises:
        UserError: if the file cannot be written, or a different command was interrupted while writing it.
    """

    def __init__(self, options: Namespace, generator: torch.Generator | None = None) -> None:
        self.options, self.generator = options, generator
        self.done = 0  # number of processed lines, including those of an interrupted command
        self.failures = 0
        self.file: TextIO = sys.stdout
        self.part = Path("standard output")  # the name of the file in errors
        if options.output:
            self._open_file()
        self.bar = _bar(options, self.done)

    def _open_file(self) -> None:
        path = self.options.output
        if self.options.input and path.exists() and path.samefile(self.options.input):
            raise UserError(f"--output must be another file than --input, but both are {str(path)!r}")
        suffixes = ("part", "part.json", "part.lock")
        self.part, self.state, lock = (path.with_name(f"{path.name}.{suffix}") for suffix in suffixes)
        self.command = _fingerprint(self.options)
        try:
            if path.is_dir():
                raise IsADirectoryError(None, "Is a directory")
            if path.exists() and not path.is_file():
                raise OSError(None, "Not a regular file")
            os.stat(path.parent)  # the lock would create the folder
            self.lock = lock_file(lock, f"--output {str(path)!r}")
            if self.state.exists() and self.part.exists():
                size = self._restore()
            else:
                size = 0
                self.state.unlink(missing_ok=True)  # its part was deleted
            self.file = self.part.open("a" if size else "w", encoding="utf-8", newline="")
            self.file.truncate(size)
        except OSError as error:
            raise UserError(f"--output must be a file, but {str(path)!r} cannot be opened: {error.strerror}") from None

    def _restore(self) -> int:
        """Restore the state of the same command before it was interrupted, and return the size of its output."""
        state = read_json(self.state, State)
        if state.command != self.command:
            raise UserError(
                f"--output {str(self.options.output)!r} must not be the output of an interrupted command with other "
                f"options or files, but {str(self.part)!r} exists; repeat that command, or delete this file"
            )
        self.done, self.failures = state.lines, state.failures
        if self.generator is not None:
            self.generator.set_state(torch.tensor(state.generator, dtype=torch.uint8))
        rank_zero_print(f"continuing {str(self.part)!r} after {self.done:,} lines")
        return state.bytes

    def remaining(self, chunks: Iterator[list[str]]) -> Iterator[list[str]]:
        """Yield the chunks not yet processed; an interrupted command has only written complete chunks."""
        completed, skipped = self.done, 0
        for chunk in chunks:
            if skipped < completed:
                skipped += len(chunk)
            else:
                yield chunk

    def write(self, texts: list[str], notes: list[str], failures: int) -> None:
        """Write the outputs for a chunk of lines.

        Args:
            texts: the output for each line.
            notes: a note about each line, printed to standard error unless it is empty.
            failures: the number of lines without an output.
        """
        with naming_file(self.part), self.bar.external_write_mode(sys.stderr):  # hides the bar
            for text, note in zip(texts, notes, strict=True):
                self.done += 1
                if note:
                    print(f"lightning-tfm: line {self.done}: {escape_controls(note)}", file=sys.stderr)
                print(escape_controls(text) if self.file.isatty() else text, file=self.file)
            self.file.flush()
        self.failures += failures
        if self.options.output and _is_repeatable(self.options):
            os.fsync(self.file.fileno())
            generator = None if self.generator is None else self.generator.get_state().tolist()
            state = State(self.command, self.done, self.failures, self.file.tell(), generator)
            write_text(self.state, json.dumps(asdict(state)))
        self.bar.update(self.done - self.bar.n)  # also counts lines without an output

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.close()
        if self.options.output:
            with naming_file(self.part), self.file:
                self.file.flush()
                os.fsync(self.file.fileno())
            if kind is None:
                replace_file(self.part, self.options.output)
                self.state.unlink(missing_ok=True)
            elif not self.done:
                self.part.unlink(missing_ok=True)
            with suppress(PermissionError):  # Windows deletes no open file
                Path(self.lock.lock_file).unlink(missing_ok=True)
            self.lock.release()


def _is_repeatable(options: Namespace) -> bool:
    """Return whether the input can be read again, unlike standard input or a pipe."""
    return bool(options.texts or (options.input and options.input.is_file()))


def _fingerprint(options: Namespace) -> str:
    """Return a hash of the options of a command and of the sizes and modification times of its input files."""
    facts = {name: str(value) for name, value in vars(options).items()}
    for name in ("checkpoint", "input"):
        path = getattr(options, name)
        if path and Path(path).is_file():
            facts[f"{name} file"] = str((Path(path).stat().st_size, Path(path).stat().st_mtime_ns))
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _bar(options: Namespace, done: int) -> tqdm[Any]:
    """Return a progress bar, which is shown in a terminal for input from a file or a pipe."""
    is_long = options.input or not (options.texts or sys.stdin.isatty())
    is_shown = bool(is_long and sys.stderr.isatty())
    total = None
    if is_shown and options.input and options.input.is_file():  # a pipe can be read only once
        with options.input.open("rb") as file:
            total = sum(1 for _ in file)
    return progress_bar("processing, line", is_shown, total=total, initial=done, leave=False)
