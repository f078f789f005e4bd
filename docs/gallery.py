"""Pictures in docs/images, drawn from trained models.

`python docs/gallery.py` draws them in the folder where the commands of gallery.md were run. Screenshots require
Chromium; without it, only the other pictures are drawn.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from PIL import Image

import lightning_tfm
from datamodules import Date, ToyTranslation
from datamodules.date import links
from lightning_tfm.commands.report import report
from lightning_tfm.data import Pair
from lightning_tfm.plots.pictures import draw_attention
from lightning_tfm.plots.style import HIGHLIGHT, PALETTE, STYLE
from lightning_tfm.runs.record import Run

IMAGES = Path(__file__).parent / "images"
LSTM, TRANSFORMER, CLASSIFIER = (
    Path("runs") / name / "version_0"
    for name in ("date_attention_lstm", "toy_translation_transformer", "polarity_classifier")
)
SHORT = Path("runs/short/version_0")

SWEEP = Path("runs/sweeps/date_attention_lstm/sweep.html")

HEIGHT = 1190
"""Height of the two regions of a page in a screenshot, in pixels."""


def date_pair(day: date, text: str) -> Pair:
    """Return the pair of a date in one of its formats, with its gold alignment."""
    written = (pattern.format(day) for pattern in Date().patterns)
    spans = next(spans for source, spans in written if source == text)
    return Pair(text, day.isoformat(), links(spans))


def attention(run: Path, pair: Pair, layer: str, name: str) -> None:
    """Draw the attention of a layer for a pair, in the width of a page on a screen of high resolution."""
    predictor = lightning_tfm.load(run / "checkpoints/best.ckpt")
    content = {"source": pair.source, "target": pair.target, "alignment": pair.alignment}
    maps = next(maps for maps in predictor.attention(content) if maps.layer == layer)
    with rc_context(STYLE):
        figure = draw_attention(maps)
        figure.legend([Patch(facecolor="none", edgecolor=HIGHLIGHT)], ["gold alignment"], loc="upper right")
    figure.savefig(IMAGES / name, dpi=250)


def curves(runs: list[Path]) -> None:
    """Draw the losses of runs: lines for training, dots for validation."""
    with rc_context(STYLE):
        figure = Figure(figsize=(7, 3.4), layout="constrained")
        axes = figure.subplots()
        for color, run in zip(PALETTE, runs, strict=False):
            rows = Run(run).metrics()
            for metric, style in (("train/loss", "-"), ("val/loss", "o")):
                points = [(int(row["step"]) + 1, float(row[metric])) for row in rows if metric in row]
                label = run.parent.name if style == "-" else None
                axes.plot(*zip(*points, strict=True), style, color=color, label=label, linewidth=1.5, markersize=5)
        axes.set_yscale("log")
        axes.set_xlabel("step")
        axes.set_ylabel("loss: training (line), validation (dots)")
        axes.legend()
    figure.savefig(IMAGES / "learning_curves.png", dpi=110)


def screenshot(page: Path, tops: tuple[int, int], name: str) -> None:
    """Show two regions of a page in Chromium, side by side.

    Args:
        page: the page.
        tops: the top edges of the regions, in pixels.
        name: the file name of the picture.
    """
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("screenshots require Chromium, which is not installed; the other pictures are drawn")
    with tempfile.TemporaryDirectory() as folder:
        picture = Path(folder) / name
        options = ["--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1000,3200"]
        options += ["--virtual-time-budget=10000", f"--screenshot={picture}"]
        subprocess.run([chromium, *options, page.resolve().as_uri()], check=True, capture_output=True, timeout=120)
        with Image.open(picture) as whole:
            regions = [whole.crop((0, top, 1000, top + HEIGHT)) for top in tops]
    image = Image.new("RGB", (2000, HEIGHT), "white")
    for number, region in enumerate(regions):
        image.paste(region, (1000 * number, 0))
    image = image.resize((1400, HEIGHT * 7 // 10), Image.Resampling.LANCZOS)
    image.quantize(128, method=Image.Quantize.MAXCOVERAGE).save(IMAGES / name, optimize=True)


def main() -> None:
    """Draw all pictures."""
    attention(LSTM, date_pair(date(1979, 5, 3), "Thursday, May 3, 1979"), "attention", "attention_date.png")
    sentence = next(pair for pair in ToyTranslation().stream("test", seed=1) if len(pair.source.split()) == 7)
    attention(TRANSFORMER, sentence, "decoder.1.cross_attention", "attention_transformer.png")
    shutil.copy(CLASSIFIER / "confusion.png", IMAGES / "confusion.png")
    curves([LSTM, TRANSFORMER])
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        report([str(SHORT), "--output", str(page)])
        screenshot(page, (0, 960), "report.png")
    if SWEEP.is_file():
        screenshot(SWEEP, (0, 1190), "sweep.png")


if __name__ == "__main__":
    main()
