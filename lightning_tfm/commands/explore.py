"""`lightning-tfm explore`: ask networks questions on a page."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

from lightning_tfm.commands.parser import CommandParser, check_new_file, trust_arguments
from lightning_tfm.errors import Interrupted, UserError, handle_signals, ignore_signals, interrupt
from lightning_tfm.explore import Explorer
from lightning_tfm.explore.file import write_page
from lightning_tfm.explore.server import serve
from lightning_tfm.fit.cli import data_of_checkpoint
from lightning_tfm.inference.loading import load
from lightning_tfm.runs.names import HELP, named_checkpoint

PORTS = range(1024, 65_536)
"""Ports that do not require root privileges."""


def explore(arguments: list[str]) -> int:
    """Serve the page until a signal, or write it to a file."""
    options, settings = make_parser().parse_known_args(arguments)
    if options.port is not None and options.port not in PORTS:
        raise UserError(f"--port must be from {PORTS[0]} to {PORTS[-1]}, but is {options.port}; try 8000")
    has_settings = bool(settings)
    if options.output is not None:
        if has_settings:
            raise UserError(f"{settings[0]} must not be set with --output, whose page has no data; leave it out")
        check_new_file("--output", options.output, options.overwrite)
    checkpoints = [*map(named_checkpoint, options.checkpoints)]
    predictors = [load(checkpoint, options.trust_package) for checkpoint in checkpoints]
    names = model_names(checkpoints)
    paths = [*map(str, checkpoints)]
    settings += trust_arguments(options.trust_package)
    data = [cache(partial(data_of_checkpoint, checkpoint, settings)) for checkpoint in paths]
    models = zip(predictors, names, data, paths, strict=True)
    explorers = [Explorer(*model, settings) for model in models]
    if options.output is not None:
        size = write_page(explorers, options.output)
        print(f"{options.output}: {size / 1e6:.1f} MB")
        return 0
    handle_signals(interrupt)
    try:
        if has_settings:
            for load_data in data:  # to check the settings; otherwise, data are loaded by the first question about them
                load_data()
        serve(explorers, options.port or 0, options.browser, shlex.join(["lightning-tfm", "explore", *arguments]))
    except Interrupted as interrupted:
        ignore_signals()
        return 128 + interrupted.signum
    return 0


def make_parser() -> CommandParser:
    """Return the parser of the command."""
    parser = CommandParser(
        "lightning-tfm explore",
        description="Open a page to explore trained networks: outputs step by step, attention, ablations, "
        "contributions and similar training examples. Further options are those of test, such as --data.path for "
        "other data.",
    )
    parser.add_argument("checkpoints", metavar="RUN", nargs="+", help=HELP)
    parser.add_argument("--port", type=int, metavar="N", help="port of the page (default: a free one)")
    parser.add_argument(
        "--no-browser", dest="browser", action="store_false", help="print the address without opening a browser"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="write a page with the networks to a file, which works without a server and without a connection, instead",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file")
    parser.add_trust_package()
    return parser


def model_names(checkpoints: Sequence[Path]) -> list[str]:
    """Return the shortest names that differ: of experiments, with their versions, and with their files."""
    candidates = []
    for path in map(Path.resolve, checkpoints):
        run = path.parent.parent
        experiment, version = run.parent.name, run.name
        if path.parent.name == "checkpoints":
            candidates.append((experiment, f"{experiment}/{version}", f"{experiment}/{version}/{path.stem}"))
        else:
            candidates.append((path.stem, f"{path.parent.name}/{path.stem}", str(path)))
    for names in zip(*candidates, strict=True):
        if len(set(names)) == len(names):
            break
    return [*names]
