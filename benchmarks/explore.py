"""Times of the questions of `lightning-tfm explore` over HTTP, as its page asks them, and sizes of its pages in files.

    python -m benchmarks.explore [--runs FOLDER]

prints the median of five times in ms of each question about an experiment's example, with one thread, and the size in
MB of the file that `explore CHECKPOINT --output` writes. FOLDER contains a finished run of each experiment; without it,
they are trained first. The exit status is 1 if a median is above LIMIT. The first question about neighbors, which loads
the data, is timed once and has no limit; questions that a network does not support have no time. The integrated
gradients are those of the slowest step.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import parse_qs, urlsplit

from lightning_tfm.runs.record import Run
from lightning_tfm.tokenization import EOS

TASKS = ("copy", "date", "toy_translation")
EXPERIMENTS = [f"{task}_{network}" for task in TASKS for network in ("attention_lstm", "gpt", "transformer")]

LIMIT, REPEATS = 300, 5
"""Largest median, in ms, and number of times of which it is the median."""

FIRST = "first neighbors"
COLUMNS = ["answer", "forced", "head off", "drawn", "beam", "occlusion", "gradients", "patch", FIRST, "by source"]
COLUMNS += ["by decoder", "worst", "sample", "page"]

Ask = Callable[..., tuple[Any, float]]
"""Function of the name and the arguments of a question; it returns the result, None if it is refused, and the ms."""


def command(*arguments: str, threads: int | None = None) -> dict[str, Any]:
    """Return the arguments of `subprocess.run` for a command of lightning-tfm, without its output."""
    environment = {"WANDB_MODE": "disabled"} | ({"OMP_NUM_THREADS": f"{threads}"} if threads else {})
    return {"args": [sys.executable, "-m", "lightning_tfm", *arguments], "env": os.environ | environment}


@contextmanager
def serving(checkpoint: Path) -> Iterator[Ask]:
    """Serve the page of a checkpoint in the context, and return a function that asks questions as the page does."""
    explore = command("explore", str(checkpoint), "--no-browser", threads=1)
    with subprocess.Popen(**explore, stdout=subprocess.PIPE, encoding="utf-8") as process:
        try:
            assert process.stdout is not None
            address = urlsplit(re.findall(r"http://\S+", process.stdout.readline())[0])
            connection = HTTPConnection(address.netloc)  # which stays open, as that of a browser
            headers = {"Content-Type": "application/json", "Origin": f"http://{address.netloc}"}
            headers["X-Token"] = parse_qs(address.query)["token"][0]

            def ask(question: str, **arguments: Any) -> tuple[Any, float]:
                message = json.dumps({"model": 0, "question": question, "arguments": arguments})
                begin = time.perf_counter()
                connection.request("POST", "/ask", message, headers)
                response = connection.getresponse()
                content = response.read()
                milliseconds = 1_000 * (time.perf_counter() - begin)
                assert response.status in (200, 400), content
                return json.loads(content).get("result"), milliseconds

            yield ask
        finally:
            process.terminate()


def questions(ask: Ask) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the column, the name and the arguments of each question that the network supports."""
    (model,) = ask("describe")[0]["models"]
    text = {"text": model["example"]}
    answer, _ = ask("answer", **text)
    first, *_ = answer["steps"]
    forced = next(other["id"] for other in first["alternatives"] if other["id"] not in (first["id"], EOS))
    unchanged: dict[str, Any] = {"off": [], "drawn": [], "patched": []}
    yield "answer", "answer", text
    yield "forced", "answer", text | {"prefix": [forced]}
    yield "head off", "answer", text | {"changes": unchanged | {"off": [f"{model['attention'][0]['layer']}.0"]}}
    for layer in model["drawable"][:1]:
        drawn = {"layer": layer, "query": 0, "key": 0, "head": None}
        yield "drawn", "answer", text | {"changes": unchanged | {"drawn": [drawn]}}
    yield "beam", "beam", text | {"beam_size": 5}
    yield "occlusion", "attributions", text | {"method": "occlusion"}
    gradients = text | {"method": "integrated_gradients"}
    times = [ask("attributions", **gradients, step=step)[1] for step in range(len(answer["steps"]))]
    yield "gradients", "attributions", gradients | {"step": times.index(max(times))}
    for against in second_texts(model["example"], answer["source"][:-1]):
        if ask("patch", **text, against=against)[0] is not None:
            yield "patch", "patch", text | {"against": against}
            break
    yield "by source", "neighbors", text | {"by": "source"}
    yield "by decoder", "neighbors", text | {"by": "decoder", "step": 0, "prefix": []}
    yield "worst", "worst", {}
    sampling = {"temperature": 1, "top_k": None, "top_p": None, "seed": 0, "max_tokens": 100}
    yield "sample", "sample", text | sampling


def second_texts(text: str, symbols: list[str]) -> Iterator[str]:
    """Yield the texts in which one of the symbols of a text, from the last on, is replaced by another of them."""
    separator = " " if " ".join(symbols) == text else ""
    for place in reversed(range(len(symbols))):
        for other in reversed(symbols):
            if other != symbols[place]:
                yield separator.join((*symbols[:place], other, *symbols[place + 1 :]))


def measure(checkpoint: Path) -> dict[str, float]:
    """Return the values of the columns."""
    values = {}
    with serving(checkpoint) as ask:
        for column, question, arguments in questions(ask):
            results, times = zip(*(ask(question, **arguments) for _ in range(REPEATS + 1)), strict=True)
            assert None not in results, f"{column} is refused"
            values[column] = statistics.median(times[1:])
            if column == "by source":
                values[FIRST] = times[0]
    with TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        explore = command("explore", str(checkpoint), "--output", str(page))
        subprocess.run(**explore, stdout=subprocess.DEVNULL, check=True)
        return values | {"page": page.stat().st_size / 1e6}


def newest(folder: Path, experiment: str) -> Path:
    """Return the checkpoint of the newest finished run of an experiment."""
    runs = [run for run in Run.below(folder) if run.folder.parent.name == experiment and run.state == "finished"]
    if not runs:
        sys.exit(f"{folder} must contain a finished run of {experiment}, but contains none; train it")
    checkpoint = max(runs, key=lambda run: run.starts[-1]["time"]).checkpoint(Run.BEST, Run.LAST)
    assert checkpoint is not None
    return checkpoint


def main(folder: Path) -> int:
    """Print the table of the runs in a folder, and return the exit status."""
    checkpoints = {experiment: newest(folder, experiment) for experiment in EXPERIMENTS}
    print(f"| experiment | {' | '.join(COLUMNS)} |\n|---{'|---:' * len(COLUMNS)}|", flush=True)
    medians = []
    for experiment, checkpoint in checkpoints.items():
        values = measure(checkpoint)
        cells = [f"{values[name]:.{int(name == 'page')}f}" if name in values else "" for name in COLUMNS]
        print(f"| `{experiment}` | {' | '.join(cells)} |", flush=True)
        medians += [(values[name], name, experiment) for name in values if name not in (FIRST, "page")]
    largest, name, experiment = max(medians)
    print(f"largest: {largest:.0f} ms, {name} of {experiment}")
    return int(largest > LIMIT)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, metavar="FOLDER", help="a folder with a finished run of each experiment")
    if (runs := parser.parse_args().runs) is not None:
        sys.exit(main(runs))
    with TemporaryDirectory() as trained:
        for name in EXPERIMENTS:
            fit = command("fit", name, "--seed_everything", "1")
            subprocess.run(**fit, cwd=trained, stdout=subprocess.DEVNULL, check=True)
        sys.exit(main(Path(trained)))
