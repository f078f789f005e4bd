"""Benchmarks of texts that are mapped into memory: preparation, batches, and the start and the memory of a training."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from tokenizers import Tokenizer, pre_tokenizers
from torch import Tensor

from benchmarks import peers
from benchmarks.convergence import SHAKESPEARE_FILES
from benchmarks.framework import EXPERIMENTS, IMPORTS, run_start
from benchmarks.measure import ROUNDS, THREADS, Block, Built, Facts, Row, Side, absolute_row, compared, timed
from benchmarks.steps import repeated
from datamodules import Text
from lightning_tfm.data import resolve_path
from lightning_tfm.data.token_files import _blocks
from lightning_tfm.errors import UserError
from lightning_tfm.tokenization import NUM_SPECIAL, train_tokenizer

SEED = 61
"""Seed of the order of the speeches."""

CHARACTERS, SUBWORDS = 20_000_000, 4_000_000
"""Number of characters of the texts that are prepared by characters and by subwords."""

SPLITS = "train", "val"

READ, SMALL = 100_000_000, 1_115_394
"""Number of characters of a text whose batches are read, and of tiny Shakespeare."""

SIZES = 10**6, 10**7, 10**8, 10**9, 10**10
"""Numbers of characters in `large_texts`."""

BATCH_SIZE, LENGTH, BATCHES = 64, 256, 500
"""Number of windows in a batch, of tokens in a window, and of batches in a block."""

LITDATA = "LITDATA_PYTHON"
"""Environment variable that names the Python of an environment with litdata."""

SAMPLED = """
import sys, threading, time

def sample(file, peak=0):
    while True:
        with open("/proc/self/status") as status:
            memory = next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))
        if memory > peak:
            peak = memory
            print(peak, file=file)
        time.sleep(0.01)

threading.Thread(target=sample, args=(open("memory", "w", buffering=1),), daemon=True).start()
"""
"""Beginning of a program that writes each new peak of its memory to the file `memory`, in KiB."""

FIT = "import runpy\nrunpy.run_module('lightning_tfm', run_name='__main__')"


@contextmanager
def texts_of(*sizes: int) -> Iterator[list[Path]]:
    """Write texts to a temporary folder, which also is the cache of child processes, and yield their paths.

    They repeat the speeches of tiny Shakespeare, shuffled anew each time; each character is a byte.
    """
    downloads, name = SHAKESPEARE_FILES
    speeches, draw = resolve_path(name, downloads).read_text(encoding="utf-8").split("\n\n"), random.Random(SEED)
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"{size}.txt") for size in sizes]
        for path, rest in zip(paths, sizes, strict=True):
            with path.open("w", encoding="utf-8", newline="\n") as file:
                while rest > 0:
                    draw.shuffle(speeches)
                    rest -= file.write(("\n\n".join(speeches) + "\n\n")[:rest])
        with mock.patch.dict(os.environ, XDG_CACHE_HOME=folder):
            yield paths


def prepare(side: str, path: Path, folder: str) -> tuple[dict[str, np.ndarray], Callable[[list[int]], str]]:
    """Prepare a text by characters in an empty folder; return the tokens of each split, and what decodes them."""
    if side == "nano":
        characters = peers.nano_characters(path, Path(folder))
        ids = {split: np.memmap(Path(folder, f"{split}.bin"), np.uint16, "r") for split in SPLITS}
        return ids, lambda ids: "".join(characters[id] for id in ids)
    with mock.patch.dict(os.environ, XDG_CACHE_HOME=folder):
        data = Text(str(path))
    return {split: data.tokens.ids(split, "the text").numpy() for split in SPLITS}, data.tokenizer.decode


def build_characters(side: str, path: Path) -> Built:
    """Build preparations by characters, "ours" or "nano"; the facts are the sizes and the ends of its splits."""

    def work() -> Block:
        with tempfile.TemporaryDirectory() as folder:
            return timed(lambda: sum(map(len, prepare(side, path, folder)[0].values())))

    with tempfile.TemporaryDirectory() as folder:
        ids, decode = prepare(side, path, folder)
        splits = {split: (len(part), decode(part[-1000:].tolist())) for split, part in ids.items()}
        return Built({"splits": splits, "tokens": sum(map(len, ids.values()))}, work)


def build_subwords(side: str, path: Path) -> Built:
    """Build preparations by subwords; the facts are all ids.

    Args:
        side: "ours", or the method of Hugging Face's Tokenizer that encodes our blocks, which are in memory.
        path: the path of the text, from whose beginning the subwords are learned.
    """
    file = path.with_name("tokenizer.json")
    text = path.read_text(encoding="utf-8")
    if not file.exists():
        model = train_tokenizer([text[:2_000_000]], "subword", 6000).model
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.save(str(file))

    def prepare() -> list[Tensor]:
        with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, XDG_CACHE_HOME=folder):
            tokens = Text(str(path), tokenizer_file=str(file)).tokens
            return [tokens.ids(split, "the text") for split in SPLITS]

    if side == "ours":
        ids = torch.cat(prepare()).int() - NUM_SPECIAL
        return Built({"ids": ids}, lambda: timed(lambda: sum(map(len, prepare()))))
    encode_batch = getattr(Tokenizer.from_file(str(file)), side)
    end = round(0.9 * len(text))
    batches = [*chain(_blocks([text[:end]]), _blocks([text[end:]]))]

    def encode() -> Iterator[list[int]]:
        for blocks in batches:
            yield from (encoding.ids for encoding in encode_batch(blocks, add_special_tokens=False))

    ids = torch.tensor([*chain.from_iterable(encode())], dtype=torch.int32)
    return Built({"ids": ids}, lambda: timed(lambda: sum(map(len, encode()))))


def build_batches(side: str, path: Path) -> Built:
    """Build reading of training batches, "ours" or "nano", of the same ids; the facts are the first windows."""
    data = Text(str(path), max_length=LENGTH, batch_size=BATCH_SIZE)
    data.setup("fit")
    dataset, places = data.datasets["train"], torch.arange(BATCH_SIZE)
    if side == "nano":
        file = path.with_suffix(".bin")
        dataset.ids.numpy().astype(np.uint16).tofile(file)
        windows = partial(peers.nano_windows, file, length=LENGTH)
        batches = (windows(torch.randint(len(dataset.ids) - LENGTH, (BATCH_SIZE,))) for _ in repeat(None))
        first = windows(places)
    else:
        batches = chain.from_iterable(repeat(data.train_dataloader()))
        _, *first, _ = dataset[places]
    facts = {"windows": torch.stack([*first]), "first": data.tokenizer.decode(dataset.ids[: LENGTH + 1].tolist())}
    return Built(facts, repeated(lambda batch: None, batches, BATCHES, lambda batch: BATCH_SIZE * LENGTH))


def same(name: str, what: str, ours: Facts, peer: Facts) -> str:
    """Check that a fact is the same on both sides."""
    assert torch.as_tensor(ours[name] == peer[name]).all(), f"the sides have different {what}"
    return f"the same {what}"


same_splits = partial(same, "splits", "numbers of tokens in each split, and characters at its end")
same_number = partial(same, "tokens", "number of tokens")
same_ids = partial(same, "ids", "ids of the whole text")
same_windows = partial(same, "windows", "windows at the same places")
same_text = partial(same, "first", "text in the first window")


def fit(path: Path, callback: str) -> tuple[str, ...]:
    """Return the arguments of `fit` on a text, with a callback of first_step.py."""
    text = "--config", str(EXPERIMENTS / "shakespeare_gpt.yaml"), f"--data.init_args.path={path}"
    usual = f"--num_threads={THREADS}", "--trainer.accelerator=cpu", "--trust-package=benchmarks"
    return "fit", *text, *usual, f"--trainer.callbacks+=benchmarks.first_step.{callback}"


def start(path: Path) -> float:
    """Return the seconds of `fit` on a text until its first step."""
    with tempfile.TemporaryDirectory() as folder:
        return run_start(Path(folder), "-m", "lightning_tfm", *fit(path, "FirstStep"))


def texts(full: bool) -> Iterator[Row]:
    """Measure preparation and batches of a text against nanoGPT and tokenizers, and the start of a training."""
    with texts_of(CHARACTERS, SUBWORDS, READ, SMALL) as (path, short, large, small):
        sides = (Side(build_characters, side, path) for side in ("ours", "nano"))
        note = "20 MB; ours reads the text three times, counts lines that recur and waits for the disk"
        yield compared("characters of a text prepared / nanoGPT", "tokens/s", "≥ 0.8 x", *sides, same_splits, note=note)
        for method in ("encode_batch", "encode_batch_fast"):
            sides = (Side(build_subwords, side, short) for side in ("ours", method))
            name, note = f"subwords of a text prepared / {method}", "4 MB; the peer writes nothing"
            yield compared(name, "tokens/s", "≥ 0.8 x", *sides, same_ids, note=note)
        sides = (Side(build_batches, side, large) for side in ("ours", "nano"))
        name, note = "batches of windows of a text / nanoGPT", f"100 MB, {BATCH_SIZE} windows of {LENGTH} tokens"
        yield compared(name, "tokens/s", "≥ 0.83 x", *sides, same_windows, note=note)
        for each in (small, large):
            start(each)  # prepares the text
        more = [start(large) - start(small) for _ in range(ROUNDS)]
        name, note = "`fit` until its first step, 100 MB - 1 MB of text", "once prepared; shakespeare_gpt"
        yield absolute_row(name, "s", "≤ 1 s", more, note=note)


def build_litdata(work: str, path: Path) -> Built:
    """Build a side of litdata in its own environment; see litdata_side.py."""
    program = str(Path(__file__).with_name("litdata_side.py"))
    command = [os.environ[LITDATA], program, work, str(path), *map(str, (BATCH_SIZE, LENGTH, BATCHES))]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8")

    def run() -> Block:
        print(file=process.stdin, flush=True)
        return Block(*json.loads(process.stdout.readline()))

    return Built(json.loads(process.stdout.readline()), run)


def texts_against_litdata(full: bool) -> Iterator[Row]:
    """Measure preparation and batches of a text against litdata."""
    if not os.environ.get(LITDATA):
        raise UserError(f"{LITDATA} must name the Python of an environment with litdata; see benchmarks/README.md")
    with texts_of(READ) as (path,):
        sides = Side(build_characters, "ours", path), Side(build_litdata, "prepare", path)
        note = "100 MB; litdata looks up bytes in a table, on two processes"
        yield compared("characters of a text prepared / litdata", "tokens/s", "", *sides, same_number, note=note)
        sides = Side(build_batches, "ours", path), Side(build_litdata, "batches", path)
        note = f"100 MB, {BATCH_SIZE} windows of {LENGTH} tokens, without workers"
        yield compared("batches of windows of a text / litdata", "tokens/s", "≥ 1 x", *sides, same_text, note=note)


def sampled(program: str, *arguments: str) -> tuple[float, float]:
    """Run a program as `run_start`; return its seconds, and the peak of its anonymous memory in MB."""
    with tempfile.TemporaryDirectory() as folder:
        seconds = run_start(Path(folder), "-c", SAMPLED + program, *arguments)
        return seconds, 1024 / 1e6 * max(map(int, Path(folder, "memory").read_text(encoding="utf-8").split()))


def large_texts(full: bool) -> Iterator[Row]:
    """Measure `fit` by the size of the text: the preparation, the time until the first step, and the memory."""
    if sys.platform != "linux":
        raise UserError("the memory without mapped pages can be measured on Linux only")
    _, imports = sampled(IMPORTS.format("lightning.pytorch, torch, torchmetrics, wandb"))
    few = "--trainer.max_steps=20", "--trainer.val_check_interval=20", "--trainer.limit_val_batches=2"
    few += ("--data.init_args.eval_batch_size=40",)  # as in training; 256 windows take 80 MB more
    for size in SIZES:
        with texts_of(size) as (path,):
            seconds, memory = sampled(FIT, *fit(path, "FewSteps"), *few)
            starts = [start(path) for _ in range(3)]
        text = f"10^{len(str(size)) - 1} characters"
        rest = [seconds - statistics.median(starts)]
        yield absolute_row(f"preparation, {text}", "s", "", rest, note="the first start of `fit` - another")
        yield absolute_row(f"`fit` until its first step, {text}", "s", "", starts, note="once prepared")
        note = "preparation, 20 steps and 2 validation batches of 40 windows; without mapped pages, every 10 ms"
        yield absolute_row(f"peak memory of `fit` - imports, {text}", "MB", "≤ 200 MB", [memory - imports], note=note)
