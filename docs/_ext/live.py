"""Sphinx extension that writes pages with the networks of the tutorials.

The last cells of the tutorials write their checkpoints, docs/live/NAME.ckpt, and the results of `inspect_network`,
docs/live/NAME.json.

A tutorial shows a page as `<iframe class="live" src="../live/NAME.html" title="...">`.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from lightning_tfm import load
from lightning_tfm.explore import Explorer
from lightning_tfm.explore.file import write_page

LIVE = Path(__file__).parents[1] / "live"
"""Folder of the checkpoints and results."""


def write_pages(app: Any, error: Exception | None) -> None:
    """Write a page for each checkpoint, beside the pages of the site."""
    if error is None and app.builder.name == "html":
        for name in ("onnx_ir", "onnxscript"):  # Sphinx shows messages of all packages
            logging.getLogger(name).setLevel(logging.WARNING)
        folder = Path(app.outdir) / LIVE.name
        folder.mkdir(exist_ok=True)
        for path in sorted(LIVE.glob("*.ckpt")):
            inspection = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
            write_page([Explorer(load(path), path.stem, inspection=inspection)], folder / f"{path.stem}.html")


def setup(app: Any) -> dict[str, bool]:
    """Register the extension."""
    app.connect("build-finished", write_pages)
    return {"parallel_read_safe": True}
