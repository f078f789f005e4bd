"""Side of litdata in `texts_against_litdata`: `python litdata_side.py WORK TEXT ROWS LENGTH BATCHES`.

It runs in an environment with litdata. It writes a line with its facts and, for each line that it reads, does the work
once and writes its amount and seconds.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from itertools import chain, islice, repeat
from pathlib import Path

import numpy as np
import torch
from litdata import StreamingDataLoader, StreamingDataset, TokensLoader, optimize

PART = 1 << 20
"""Number of characters that are encoded at a time, each of which is a byte."""


def encode(begin: int, path: str, characters: list[int]) -> Iterator[torch.Tensor]:
    """Yield the numbers of the characters of a part of a text."""
    numbers = np.zeros(256, np.uint8)
    numbers[characters] = np.arange(len(characters))
    yield torch.from_numpy(numbers[np.fromfile(path, np.uint8, PART, offset=begin)])


def prepare(path: str, folder: str, workers: int) -> int:
    """Write the tokens of a text to a folder in chunks, and return their number."""
    characters = np.unique(np.fromfile(path, np.uint8)).tolist()
    parts = [*range(0, os.path.getsize(path), PART)]
    # Starting processes without a fork takes longer than the work.
    settings = {
        "chunk_bytes": "64MB",
        "num_workers": workers,
        "keep_data_ordered": True,
        "verbose": False,
        "start_method": "fork",
    }
    optimize(partial(encode, path=path, characters=characters), parts, folder, item_loader=TokensLoader(), **settings)
    return sum(chunk["dim"] for chunk in json.loads(Path(folder, "index.json").read_text(encoding="utf-8"))["chunks"])


def main() -> None:
    """Serve the work "prepare", on two processes, or "batches", of which a block has several."""
    work, path, rows, length, number = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # litdata prints
    with tempfile.TemporaryDirectory() as kept:
        tokens = prepare(path, kept, 2)
        windows = partial(StreamingDataset, kept, item_loader=TokensLoader(length + 1))
        loader = StreamingDataLoader(windows(shuffle=True, drop_last=True), batch_size=rows, num_workers=0)
        batches = (batch.long() for batch in chain.from_iterable(repeat(loader)))

        def run() -> float:
            if work == "batches":
                return sum(batch[:, 1:].numel() for batch in islice(batches, number))
            with tempfile.TemporaryDirectory() as folder:
                return prepare(path, folder, 2)

        characters = bytes(np.unique(np.fromfile(path, np.uint8))).decode()
        first = "".join(characters[number] for number in windows()[0].tolist())
        print(json.dumps({"tokens": tokens, "first": first}), file=answers, flush=True)
        for _ in sys.stdin:
            begun = time.perf_counter()
            amount = run()
            print(json.dumps([amount, time.perf_counter() - begun]), file=answers, flush=True)


if __name__ == "__main__":
    main()
