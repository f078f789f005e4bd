"""Comparison of the ONNX interpreter of the explorer's pages with onnxruntime-web, both in Node with one thread.

    make onnxruntime-web
    python -m benchmarks.onnxruntime_web [CHECKPOINT ...]

prints the largest difference of logits and attention weights of the networks of the tutorials, or those of some
checkpoints from sources to targets, for random inputs of many lengths, half of them with random heads off. It also
prints how many outputs of greedy decoding and of the page's beam search are equal, and the time of a decoding step. The
exit status is 1 if a difference is above LIMIT, or an output differs.
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

INPUTS = 200

ROOT = Path(__file__).resolve().parents[1]

PACKAGE = ROOT / ".venv/node_modules/onnxruntime-web"
"""The package that `make onnxruntime-web` installs."""

CHECKPOINTS = ROOT / "docs/live"

SCRIPT = f"""
import {{ readFileSync }} from "node:fs";
import {{ join }} from "node:path";
import * as ort from {json.dumps((PACKAGE / "dist/ort.node.min.mjs").as_uri())};
import {{ compareNetwork }} from {json.dumps(Path(__file__).with_suffix(".mjs").as_uri())};
const read = (name) => new Uint8Array(readFileSync(join(process.argv[1], name)));
const files = {{ encode: read("encode.onnx"), decode_step: read("decode_step.onnx") }};
const compared = await compareNetwork(ort, JSON.parse(new TextDecoder().decode(read("model.json"))), files, {INPUTS});
process.stdout.write(JSON.stringify(compared));
"""

COLUMNS = ("network", "difference", "greedy", "beam", "page", "onnxruntime-web")


def compare(checkpoints: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """Yield the comparison of the network of each checkpoint, see onnxruntime_web.mjs."""
    for logger in ("onnx_ir", "onnxscript"):
        logging.getLogger(logger).setLevel(logging.WARNING)
    for path in checkpoints:
        with TemporaryDirectory() as folder:
            convert(load(path)).save(Path(folder))
            command = ["node", "--input-type=module", "--eval", SCRIPT, folder]
            yield json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def main(checkpoints: Sequence[Path]) -> int:
    """Print a table of the comparisons, and return the exit status."""
    if not PACKAGE.exists():
        print("error: onnxruntime-web is missing; run make onnxruntime-web", file=sys.stderr)
        return 2
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
