"""Comparison of the ONNX interpreter of the explorer's pages with onnxruntime-web, both in Node with one thread.

onnxruntime-web is not a dependency of the benchmarks. With node and npm,

    python -m benchmarks.onnxruntime_web [CHECKPOINT ...]

installs it in a temporary folder, and prints the largest difference of logits and attention weights of the networks of
the tutorials, or those of some checkpoints from sources to targets, for random inputs of many lengths, every other one
with random heads off. It also prints how many outputs of greedy decoding and of the page's beam search are equal, and
the time of a decoding step. The exit status is 1 if a difference is above LIMIT, or an output differs.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lightning_tfm import load
from lightning_tfm.inference.onnx_pair import convert

LIMIT = 1e-4
"""Largest difference."""

PACKAGE = "onnxruntime-web@1.30.0"

SCRIPT = Path(__file__).with_suffix(".mjs")
CHECKPOINTS = Path(__file__).resolve().parents[1] / "docs/live"

COLUMNS = ("network", "difference", "greedy", "beam", "page", "onnxruntime-web")


def compare(checkpoints: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """Yield the comparison of the network of each checkpoint, see onnxruntime_web.mjs."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        install = ["npm", "install", "--prefix", name, "--ignore-scripts", "--no-audit", "--no-fund", "--silent"]
        subprocess.run([*install, PACKAGE], check=True)
        for logger in ("onnx_ir", "onnxscript"):
            logging.getLogger(logger).setLevel(logging.WARNING)
        for number, path in enumerate(checkpoints):
            (export := folder / f"{number}").mkdir()
            convert(load(path)).save(export)
            command = ["node", str(SCRIPT), name, str(export)]
            yield json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def main(checkpoints: Sequence[Path]) -> int:
    """Print a table of the comparisons, and return the exit status."""
    print(f"| {' | '.join(COLUMNS)} |\n|---{'|---:' * (len(COLUMNS) - 1)}|", flush=True)
    status = 0
    for path, row in zip(checkpoints, compare(checkpoints), strict=True):
        equal = [f"{row[name]} of {row['inputs']}" for name in ("greedy", "beam")]
        times = [f"{row[name]:.2f} ms" for name in ("page", "runtime")]
        cells = path.stem, f"{row['difference']:.1e}", *equal, *times
        print(f"| {' | '.join(cells)} |", flush=True)
        status |= row["difference"] > LIMIT or min(row["greedy"], row["beam"]) < row["inputs"]
    return int(status)


if __name__ == "__main__":
    sys.exit(main([*map(Path, sys.argv[1:])] or sorted(CHECKPOINTS.glob("*.ckpt"))))
