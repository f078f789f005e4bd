"""`lightning-tfm pack`: pack runs in one archive that others can verify."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path, PurePath
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from lightning_tfm.checkpoint import read, write
from lightning_tfm.commands.crate import (
    CRATE,
    CROISSANT,
    DATA,
    MODEL,
    PAGE,
    PINS,
    WEIGHTS,
    Statement,
    crate,
    croissant,
    files_below,
    is_inside,
    named_files,
    sha256,
    with_names,
    write_texts,
)
from lightning_tfm.commands.parser import CommandParser, check_new_file
from lightning_tfm.commands.report import POINTS, page_of
from lightning_tfm.config.settings import read_json
from lightning_tfm.data.text_files import expand_path
from lightning_tfm.errors import UserError
from lightning_tfm.fit.arguments import portable_settings
from lightning_tfm.reporting import collect_run
from lightning_tfm.runs.names import HELP, named_checkpoint, named_run
from lightning_tfm.runs.record import Run
from lightning_tfm.system.files import write_json
from lightning_tfm.system.stored_zip import write_archive

MAX_DATA = 100_000_000
"""Maximum size of the data files of a run that are included, in bytes."""

ENTRIES = (
    *("format_version", "pytorch-lightning_version", "epoch", "global_step", "hyper_parameters", "hparams_name"),
    *("longest_source", "shortest_source", "alignment_head"),
)
"""Entries of a checkpoint, besides the weights, that its test needs."""

COPIED = (Run.METRICS, Run.PREDICTIONS, "*.png", "attention/*.png", "attention/*.json", "inspect/*")
"""Files of a run that are packed as they are."""

ABSOLUTE = re.compile(r"(?<![\w.~/:\\-])(~|[A-Za-z]:(?=\\))?([/\\][^\s/\\'\",;()\[\]{}=:]+){2,}|(?<![\w.])~/[^\s'\",]+")
"""Absolute path within a text."""

SECRET = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY|\b(AKIA[0-9A-Z]{16}|gh[pousr]_\w{30,}|github_pat_\w{22,}|hf_[A-Za-z0-9]{30,}"
    r"|sk-[\w-]{20,}|glpat-[\w-]{20,}|xox[abprs]-[\w-]{10,})"
    r"|(?<![A-Za-z])(?i:api_?key|secret(_?key)?|token|passw(or)?d)['\"]?\s*[:=]\s*['\"]?(?=[\w+/-]*\d)[\w+/-]{16,}"
)
"""Text that looks like a key or a password."""


def pack(arguments: list[str]) -> int:
    """Write the archive, and print its SHA-256."""
    options = make_parser().parse_args(arguments)
    if find_spec("rocrate") is None or find_spec("mlcroissant") is None:
        raise UserError(
            "pack needs the packages 'rocrate' and 'mlcroissant', but one is missing; pip install 'lightning_tfm[pack]'"
        )
    check_new_file("--output", options.output, options.overwrite)
    runs = [named_run(name) for name in options.runs]
    if len({run.folder.resolve() for run in runs}) < len(runs):
        raise UserError("RUN must name each run once, but one is given twice; remove it")
    statement = Statement(options.author, options.license, options.include_data)
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        staged, names = {}, {}
        for number, run in enumerate(runs, start=1):
            place = f"run_{number}"
            names[place] = _stage(run, folder / place, statement, not options.no_patch)
            staged[place] = Run(folder / place)
        _check_private(folder)  # the other texts are made of these
        points = POINTS // len(runs)
        pages = [collect_run(run.folder, place, points, options.trust_package) for place, run in staged.items()]
        for run in staged.values():
            shutil.rmtree(run.checkpoint_folder)  # only the page needs it
        (folder / PAGE).write_text(page_of(pages), encoding="utf-8")
        write_texts(folder, names, staged, statement)
        write_json(folder / CRATE, crate(folder, names, staged, statement))
        write_archive(folder, options.output)
    size = options.output.stat().st_size
    print(f"{options.output}: {size / 1e6:,.1f} MB\nSHA-256, to publish beside it: {sha256(options.output)}")
    return 0


def make_parser() -> CommandParser:
    """Return the parser of the command."""
    parser = CommandParser(
        "lightning-tfm pack",
        description="Pack finished runs in one archive, an RO-Crate: settings, metrics, predictions, pictures, report, "
        "weights, versions, code changes, metadata of the data, a model card and a reproducibility checklist. "
        "`lightning-tfm verify` verifies it elsewhere. Equal runs give equal bytes.",
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help=HELP)
    parser.add_argument("--output", type=Path, metavar="FILE", required=True, help="the .zip file to write")
    parser.add_argument("--author", metavar="NAME", help="name of the author (default: none)")
    parser.add_argument("--license", metavar="LICENSE", help="license of the pack: an SPDX identifier or an address")
    parser.add_argument(
        "--include-data",
        metavar="LICENSE",
        help=f"include your data files, up to {MAX_DATA // 1_000_000} MB per run, under the license that allows it",
    )
    parser.add_argument("--no-patch", action="store_true", help="leave out the uncommitted changes of the code")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file")
    parser.add_trust_package()
    return parser


def _stage(run: Run, folder: Path, statement: Statement, with_patch: bool) -> str:
    """Write the files of a run to a folder, without places of this machine, and return the name of its experiment.

    The checkpoint is written as `restored` reads it, for the report.
    """
    if run.summary.train_seconds is None or not run.starts:
        raise UserError(f"RUN must be a run that was trained, but {str(run.folder)!r} is not; name one that fit wrote")
    path = named_checkpoint(run.folder)
    checkpoint = read(path)
    settings = portable_settings((run.folder / Run.CONFIG).read_text(encoding="utf-8"), path)
    arguments = settings["data"]["init_args"]
    names = _packed_names(arguments)
    files = {
        f"{DATA}/{target}" + ("" if file == source else f"/{file.relative_to(source).as_posix()}"): file
        for source, target in names.values()
        for file in files_below(source)
    }
    settings["data"]["init_args"] = with_names(arguments, {name: target for name, (_, target) in names.items()})
    folder.mkdir()
    (folder / Run.CONFIG).write_text(
        yaml.safe_dump(without_places(settings), sort_keys=False, allow_unicode=True), encoding="utf-8"
    )
    starts = read_json(run.folder / Run.PROVENANCE, list[dict[str, Any]])
    for start in starts:
        start["git"].pop("untracked", None)  # names of private files
        start["wandb"] = None
    write_json(folder / Run.PROVENANCE, without_places(starts))
    write_json(folder / Run.SUMMARY, without_places(read_json(run.folder / Run.SUMMARY, dict[str, Any])))
    patches = [Run.DIFF.format(number) for number in range(len(starts))] if with_patch else []
    for pattern in (*COPIED, *patches):
        for file in run.folder.glob(pattern):
            (target := folder / file.relative_to(run.folder)).parent.mkdir(exist_ok=True)
            shutil.copyfile(file, target)
    name = str(without_places(checkpoint.get("experiment", {}).get("name", "unnamed")))
    _write_model(checkpoint, name, folder)
    versions = {"lightning_tfm": "", **run.starts[-1]["versions"]}
    pins = [f"{package}=={version}" for package, version in versions.items() if package != "python"]
    text = "\n".join([f"# Python {versions['python']}", *pins])
    (folder / PINS).write_text(f"{text}\n", encoding="utf-8")
    write_json(folder / CROISSANT, croissant(Run(folder), name, files, statement))
    size = sum(file.stat().st_size for file in files.values())
    if statement.data_license is None and files:
        print(f"{size / 1e6:,.1f} MB of data of {str(run.folder)!r} are not included; --include-data includes them")
    elif statement.data_license is not None:
        if size > MAX_DATA:
            raise UserError(
                f"--include-data must be given for at most {MAX_DATA:,} bytes of data, but {str(run.folder)!r} "
                f"has {size:,}; leave it out, and publish them elsewhere"
            )
        for inside, file in files.items():
            (target := folder / inside).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
    write(restored(folder), Run(folder).checkpoint_folder / Run.BEST)
    return name


def _packed_names(arguments: Mapping[str, Any]) -> dict[str, tuple[Path, str]]:
    """Return the local files and folders that the arguments of a data module name, with their names in a pack.

    A relative name is kept. Another one is that of the file, after a number if it is taken.
    """
    found: dict[str, tuple[Path, str]] = {}
    for name in named_files(arguments):
        path = expand_path(name)
        if name in found or not path.exists():
            continue
        inside = Path(os.path.relpath(path)).as_posix()
        taken = {target for _, target in found.values()}
        short = path.resolve().name if path.resolve().name not in taken else f"{len(found)}/{path.resolve().name}"
        found[name] = path, inside if is_inside(inside) else short
    return found


def _write_model(checkpoint: Mapping[str, Any], name: str, folder: Path) -> None:
    """Write the weights of a checkpoint as safetensors, and the entries that its test needs as JSON."""
    from safetensors.torch import save_file

    # Tied weights are written twice, since a file of safetensors has no two names of a tensor.
    weights = {name: weight.clone().contiguous() for name, weight in checkpoint["state_dict"].items()}
    save_file(weights, folder / WEIGHTS, {"format": "pt"})
    entries = {entry: checkpoint[entry] for entry in ENTRIES if entry in checkpoint}
    write_json(folder / MODEL, {"name": name, "checkpoint": entries})


def restored(folder: Path) -> dict[str, Any]:
    """Return the content of the checkpoint of a packed run, given its folder."""
    from safetensors.torch import load_file

    model = read_json(folder / MODEL, dict[str, Any])
    content: dict[str, Any] = model["checkpoint"]
    if isinstance(head := content.get("alignment_head"), list):
        content["alignment_head"] = tuple(head)
    config = (folder / Run.CONFIG).read_text(encoding="utf-8")
    return content | {
        "state_dict": load_file(folder / WEIGHTS),
        "experiment": {"name": model["name"], "config": config},
        "callbacks": {},
    }


def without_places(value: Any) -> Any:
    """Replace absolute paths in nested plain values by the names of their files."""
    if isinstance(value, dict):
        return {without_places(name): without_places(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [*map(without_places, value)]
    if not isinstance(value, str):
        return value
    for place, replacement in ((Path.cwd(), ""), (Path.home(), "~/")):  # their names may have blanks
        value = value.replace(f"{place}{os.sep}", replacement) if len(place.parts) > 1 else value
    return ABSOLUTE.sub(lambda path: PurePath(path[0].replace("\\", "/")).name, value)


def _check_private(folder: Path) -> None:
    """Raise UserError if a text file, except for the data, holds a secret or names a folder of the user."""
    environment = [
        value
        for name, value in os.environ.items()
        if re.search("KEY|TOKEN|SECRET|PASSW", name, re.IGNORECASE) and len(value) >= 8
    ]
    home, user = Path.home(), os.environ.get("LOGNAME") or os.environ.get("USERNAME")
    known = [*map(re.escape, environment)]
    known += [rf"{re.escape(str(home))}(?!\w)"] if len(home.parts) > 1 else []
    known += [rf"(?<![\w./:\\])([A-Za-z]:)?[/\\]([\w.-]+[/\\])*{re.escape(user)}(?!\w)"] if user else []
    private = re.compile("|".join(known) or "(?!)")
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if not path.is_file() or path.suffix in (".ckpt", ".png", ".safetensors") or f"/{DATA}/" in name:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
            is_secret = SECRET.search(line)
            if is_secret or private.search(line):
                kind = "what looks like a secret" if is_secret else "a secret or a folder of the user"
                mend = "--no-patch leaves it out" if path.suffix == ".diff" else "remove it from the run"
                raise UserError(f"a pack must hold nothing private, but line {number} of {name} holds {kind}; {mend}")
