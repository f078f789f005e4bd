"""`lightning-tfm inspect`: show the roles of heads, and the effects of ablations."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lightning_tfm.commands.parser import CommandParser, check_writable, trust_arguments
from lightning_tfm.errors import UserError
from lightning_tfm.fit.cli import data_of_checkpoint
from lightning_tfm.inference.attention_maps import visible
from lightning_tfm.inference.loading import load
from lightning_tfm.insight import Sample, inspect_network, inspect_text
from lightning_tfm.insight.inspection import number_of_steps
from lightning_tfm.networks import Ensemble, Network
from lightning_tfm.reporting.inspection import further_tables, sentences, summary, tables
from lightning_tfm.runs.inspection import Inspection, OutcomeRecord
from lightning_tfm.runs.names import HELP, named_checkpoint
from lightning_tfm.runs.record import Run
from lightning_tfm.system.files import relative, write_text
from lightning_tfm.system.progress import progress_bar
from lightning_tfm.system.tables import latex
from lightning_tfm.system.terminal import LiteralConsole, print_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EXAMPLES = 200
"""Default number of test examples."""

SEED = 0
"""Seed with which the examples are drawn."""

PICTURES = (".png", ".pdf")
"""Suffixes of the pictures."""


def inspect(arguments: list[str]) -> int:
    """Print tables, and write inspect.json, tables.tex and pictures."""
    options, settings = make_parser().parse_known_args(arguments)
    if options.against is not None and not options.input:
        raise UserError("--against needs a text to compare with; add --input TEXT")
    if options.examples < 2:
        raise UserError(f"--examples must be at least 2, but is {options.examples}; try {EXAMPLES}")
    options.checkpoint = str(named_checkpoint(options.checkpoint))
    predictor = load(options.checkpoint, options.trust_package)
    written = Run(options.output or Path(options.checkpoint).resolve().parent.parent)
    if not options.output and not written.exists:
        raise UserError(f"{options.checkpoint!r} is not in the folder of a run; add --output FOLDER")
    check_writable("--output", written.inspection_folder)
    network = predictor.network
    if isinstance(network, Ensemble):
        raise UserError(f"RUN must have one network, but {options.checkpoint!r} is an ensemble; inspect its members")
    with progress_bar("inspecting", total=len(options.input) + number_of_steps(network)) as bar:
        texts = []
        for text in options.input:
            texts.append(inspect_text(predictor, text, options.against))
            bar.update()
        trusted = trust_arguments(options.trust_package)
        name, sample = draw_sample(network, options.checkpoint, options.examples, [*settings, *trusted])
        record = inspect_network(network, sample, bar.update)
    result: Inspection = {
        "checkpoint": options.checkpoint,
        "data": name,
        "seed": SEED,
        **record,
        "texts": texts,
    }
    written.write_inspection(result)
    in_latex = latex([*tables(result), *further_tables(result)], [summary(result), *sentences(result)])
    write_text(written.inspection_folder / Run.TABLES, in_latex)
    show(result)
    draw(result, written.inspection_folder)
    print(f"{Run.INSPECTION}, {Run.TABLES} and pictures are saved in {relative(written.inspection_folder)}")
    return 0


def make_parser() -> CommandParser:
    """Return the parser of the command."""
    parser = CommandParser(
        "lightning-tfm inspect",
        description="Show the roles of the heads of a trained network and the effects of ablations, on a sample of the "
        "test data of the checkpoint, and the layers and symbols that decide the output for a text. Further options "
        "are those of test, such as --data.path for other data.",
    )
    parser.add_argument("checkpoint", metavar="RUN", help=HELP)
    parser.add_argument(
        "--input", action="append", default=[], metavar="TEXT", help="inspect the output for a text, too"
    )
    parser.add_argument(
        "--against",
        metavar="TEXT",
        help="patch the activations for TEXT, which must have the same number of tokens, into each --input",
    )
    parser.add_argument(
        "--examples", type=int, default=EXAMPLES, metavar="N", help=f"number of test examples (default: {EXAMPLES})"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FOLDER", help="write to its folder inspect (default: the folder of the run)"
    )
    parser.add_trust_package()
    return parser


def draw_sample(network: Network, checkpoint: str, number: int, settings: Sequence[str]) -> tuple[str, Sample]:
    """Draw examples of the test data of a checkpoint, and return the name of the test set with them."""
    data = data_of_checkpoint(checkpoint, settings)
    name = data.test_sets[0]
    dataset = data.datasets[name]
    if len(dataset) < 2:
        raise UserError(f"the {name} set must have at least 2 examples, but has {len(dataset)}; use other data")
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(SEED))
    rows = order[:number].sort().values
    return name, Sample.from_dataset(dataset, rows, network, getattr(data, "target_parts", None))


def show(result: Inspection) -> None:
    """Print the tables of an inspection."""
    console = LiteralConsole()
    console.print(summary(result), soft_wrap=not console.is_terminal)
    for title, header, rows in tables(result):
        print_table(header, rows, console, title)
    for sentence in sentences(result):
        console.print(sentence, soft_wrap=not console.is_terminal)


def draw(result: Inspection, folder: Path) -> None:
    """Save the pictures of an inspection as PNG and PDF files, in place of those of an earlier one."""
    from lightning_tfm.plots.pictures import missing_glyphs_named, save_figure  # slow to import

    for path in folder.iterdir():
        if path.suffix in PICTURES:
            path.unlink()
    with missing_glyphs_named():
        for name, figure in _figures(result):
            for suffix in PICTURES:
                save_figure(figure, folder / f"{name}{suffix}")


def _figures(result: Inspection) -> Iterator[tuple[str, Figure]]:
    """Yield the pictures of an inspection with their names."""
    from lightning_tfm.plots.heatmaps import draw_heatmap  # slow to import

    heads = result["heads"]
    if scores := list(dict.fromkeys(name for head in heads for name in head["scores"] if name != "entropy")):
        values = [[head["scores"].get(name, math.nan) for name in scores] for head in heads]
        names = [head["name"] for head in heads]
        yield "head_scores", draw_heatmap(values, names, scores, "Scores of the heads", "score")
    parts: dict[str, OutcomeRecord] = {"all parts": result["full"]}
    ablated = [part for part in [*heads, *result["components"]] if part["without"]]
    parts |= {part["name"]: part["without"]["mean"] for part in ablated}
    title, label = "Errors without each part, replaced by its mean", "error rate"
    for by in ("position", "part", "category"):
        groups = [*result["full"]["errors"][by]]
        if groups and ablated:
            values = [[part["errors"][by][name] for name in groups] for part in parts.values()]
            yield f"errors_by_{by}", draw_heatmap(values, [*parts], groups, title, label, f"{by} of the target")
    for number, text in enumerate(result["texts"], start=1):
        outputs, inputs = ([*map(visible, text[side])] for side in ("target_symbols", "input_symbols"))
        title = f"{text['input']} \N{RIGHTWARDS ARROW} {text['output']}"
        labels = [*compress(outputs, text["is_target"])]
        for name, values in (("integrated_gradients", text["integrated_gradients"]), ("occlusion", text["occlusion"])):
            counted = [*compress(values, text["is_target"])]
            label = f"{name.replace('_', ' ')} (nats)"
            yield f"text_{number}_{name}", draw_heatmap(counted, labels, inputs, title, label, "input", "output")
        title = f"{text.get('against')} patched into {text['input']}"
        for side, symbols in (("input", text["input_symbols"]), ("decoder", text["decoder_symbols"])):
            rows = {
                each["layer"]: each["effects"]
                for each in text.get("patching", [])
                if each["side"] == side and len(each["effects"]) == len(symbols)
            }
            if rows:
                columns = [*map(visible, symbols)]
                figure = draw_heatmap([*rows.values()], [*rows], columns, title, "restored share", f"{side} position")
                yield f"text_{number}_patching_{side}", figure
