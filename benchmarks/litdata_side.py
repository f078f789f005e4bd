"""Side of litdata in `texts_against_litdata`: `python litdata_side.py WORK TEXT ROWS LENGTH BATCHES`.

It writes a line with its facts and, for each line that it reads, does the work once and writes its amount and seconds.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from functools import partial
from itertools import chain, islice, repeat
from pathlib import Path

import numpy as np
import torch

PART = 1 << 20  # characters that are encoded at a time, each of which is a byte


def encode(begin: int, path: str, numbers: np.ndarray) -> torch.Tensor:
    """Return the numbers of the characters of a part of a text."""
    return torch.from_numpy(numbers[np.fromfile(path, np.uint8, PART, offset=begin)])


def prepare(path: str, characters: bytes, folder: str) -> int:
    """Write the tokens of a text to a folder in chunks, with two processes, and return their number."""
    from litdata import TokensLoader, optimize  # in an environment of its own

    numbers, parts = np.zeros(256, np.uint8), [*range(0, os.path.getsize(path), PART)]
    numbers[[*characters]] = np.arange(len(characters))
    # Starting processes without a fork takes longer than the work.
    settings = {"chunk_bytes": "64MB", "num_workers": 2, "start_method": "fork", "verbose": False}
    settings |= {"item_loader": TokensLoader(), "keep_data_ordered": True}
    optimize(partial(encode, path=path, numbers=numbers), parts, folder, **settings)
    return sum(chunk["dim"] for chunk in json.loads(Path(folder, "index.json").read_text(encoding="utf-8"))["chunks"])


def main() -> None:
    """Run the work, "prepare" or "batches", once for each line of standard input."""
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader

    work, path, (rows, length, number) = sys.argv[1], sys.argv[2], map(int, sys.argv[3:])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # litdata prints
    characters = bytes(np.unique(np.fromfile(path, np.uint8)).tolist())
    with tempfile.TemporaryDirectory() as folder:
        facts = {"tokens": prepare(path, characters, folder)}
        windows = partial(StreamingDataset, folder, item_loader=TokensLoader(length + 1))
        facts["first"] = "".join(chr(characters[number]) for number in windows()[0].tolist())
        loader = StreamingDataLoader(windows(shuffle=True, drop_last=True), batch_size=rows, num_workers=0)
        batches = (batch.long() for batch in chain.from_iterable(repeat(loader)))
        print(json.dumps(facts), file=answers)
        for _ in sys.stdin:
            with tempfile.TemporaryDirectory() as empty:
                begun = time.perf_counter()
                if work == "prepare":
                    amount = prepare(path, characters, empty)
                else:
                    amount = sum(batch[:, 1:].numel() for batch in islice(batches, number))
                print(json.dumps([amount, time.perf_counter() - begun]), file=answers)


if __name__ == "__main__":
    main()
