"""`lightning-tfm verify`: verify the files, data, results and training of a pack."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from lightning_tfm.checkpoint import read, write
from lightning_tfm.commands.crate import (
    CARD,
    CRATE,
    CROISSANT,
    DATA,
    card_results,
    is_inside,
    named_files,
    recorded_files,
    sha256,
    with_names,
)
from lightning_tfm.commands.pack import restored, without_places
from lightning_tfm.commands.parser import CommandParser, trust_arguments
from lightning_tfm.comparison.differences import different_environments, first_results, shown
from lightning_tfm.comparison.tensors import different_states
from lightning_tfm.config.parsing_errors import format_error
from lightning_tfm.errors import UserError
from lightning_tfm.fit.arguments import portable_settings
from lightning_tfm.fit.cli import run as run_cli
from lightning_tfm.runs.children import ChildRun, run_children
from lightning_tfm.runs.names import named_checkpoint
from lightning_tfm.runs.record import Run, is_per_category
from lightning_tfm.system.portability import VariablesError
from lightning_tfm.system.stored_zip import read_archive
from lightning_tfm.system.terminal import LiteralConsole, print_table

TOLERANCE = 1e-3
"""Maximum relative difference of a metric, and share of different outputs, on another kind of processor."""

VERIFIED, FAILED, UNCHECKED = "verified", "failed", "not checked"

ONE_PROCESS = ("--trainer.devices=1", "--trainer.num_nodes=1", "--trainer.enable_progress_bar=false")


@dataclass(frozen=True)
class Claim:
    """Claim of a pack.

    Attributes:
        run: the folder of the run in the pack; empty for the pack itself.
        name: what is claimed, such as "test/exact_match".
        recorded: the recorded value; empty for other claims.
        found: the value found, or why the claim fails.
        verdict: VERIFIED, FAILED or UNCHECKED.
    """

    run: str
    name: str
    recorded: str
    found: str
    verdict: str


def verify(arguments: list[str]) -> int:
    """Print the verdict on each claim.

    Returns:
        The exit status: 0 if no claim fails, 1 otherwise.
    """
    options = make_parser().parse_args(arguments)
    os.environ["WANDB_MODE"] = "disabled"  # the runs are not experiments of the user
    with TemporaryDirectory() as temporary:
        read_archive(options.pack, folder := Path(temporary) / "pack", "PACK")
        claims = _file_claims(folder)
        places = sorted(folder.glob("run_*"), key=lambda place: (len(place.name), place.name))
        if not places:
            raise UserError(f"PACK must hold a run, but {str(options.pack)!r} holds none; get it again from its author")
        if claims[0].verdict == VERIFIED:
            for place in places:
                claims += PackedRun(place, Path(temporary), options.trust_package).claims(options.retrain)
    fails, checksum = any(claim.verdict == FAILED for claim in claims), sha256(options.pack)
    if options.json:
        content = {"sha256": checksum, "verified": not fails, "claims": [*map(asdict, claims)]}
        print(json.dumps(content, indent=2, ensure_ascii=False))
    else:
        # The metrics of categories may be many.
        shown_claims = [each for each in claims if each.verdict == FAILED or not is_per_category(each.name)]
        rows = [[claim.run, claim.name, claim.recorded, claim.found, claim.verdict] for claim in shown_claims]
        print_table(["run", "claim", "recorded", "found", "verdict"], rows, LiteralConsole())
        print(f"SHA-256, to compare with the one that the author has published: {checksum}")
    return 1 if fails else 0


def make_parser() -> CommandParser:
    """Return the parser of the command."""
    parser = CommandParser(
        "lightning-tfm verify",
        description="Verify a pack without trusting it: the checksums of its files, its data, and the metrics and "
        "predictions of its weights. Data files that it does not include are read from the current folder. The exit "
        "status is 0 if no claim fails, 1 if one does, and 2 if the archive is refused.",
    )
    parser.add_argument("pack", metavar="PACK", type=Path, help="the archive that `lightning-tfm pack` has written")
    parser.add_argument("--retrain", action="store_true", help="also train again, and compare the weights to the bit")
    parser.add_argument("--json", action="store_true", help="write a JSON object")
    parser.add_trust_package()
    return parser


def _file_claims(folder: Path) -> list[Claim]:
    """Return the claims of the whole pack: that its files are those that its metadata list."""
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    try:
        recorded = recorded_files(json.loads((folder / CRATE).read_bytes()))
        files.pop(CRATE)
    except Exception as error:  # the content may be anything
        return [Claim("", "files", "", f"{CRATE} cannot be read: {_reason(error)}", FAILED)]
    for name in sorted({*files, *recorded}):
        if name not in files or name not in recorded:
            problem = f"{name} is {'missing' if name in recorded else 'not listed'}"
            return [Claim("", "files", "", problem, FAILED)]
        if sha256(files[name]) != recorded[name]:
            return [Claim("", "files", f"SHA-256 of {name}", "another", FAILED)]
    others = Claim("", "report, pictures and texts", "", "no program can check them", UNCHECKED)
    return [Claim("", "files", f"{len(recorded)} checksums", "equal", VERIFIED), others]


def _reason(error: Exception) -> str:
    """Return the message of an error in one line."""
    text = " ".join(format_error(error).split())
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text}"


class PackedRun:
    """Run in a pack whose claims are verified.

    Args:
        folder: the folder of the run in the extracted pack.
        work: a temporary folder.
        trust_packages: the trusted packages, see `--trust-package`.
    """

    def __init__(self, folder: Path, work: Path, trust_packages: Sequence[str]) -> None:
        self.run, self.work, self.trusted = Run(folder), work, trust_arguments(trust_packages)
        self.config = work / f"{folder.name}.yaml"
        self.checkpoint = work / f"{folder.name}.ckpt"

    def claims(self, retrain: bool) -> list[Claim]:
        """Return the claims; those after one that cannot be checked are omitted."""
        stages = {
            "settings": self._settings,
            "weights": self._weights,
            "model card": self._card,
            "data files": self._data_files,
            "test": self._test,
            "training": self._training if retrain else self._no_training,
        }
        claims: list[Claim] = []
        for name, check in stages.items():
            try:
                claims += check()
            except VariablesError:  # with which the command starts again
                raise
            except Exception as error:  # the content may be anything
                return [*claims, self._claim(name, "", _reason(error).replace(f"{self.work}{os.sep}", ""), False)]
        return claims

    def _claim(self, name: str, recorded: str, found: str, holds: bool) -> Claim:
        return Claim(self.run.folder.name, name, recorded, found, VERIFIED if holds else FAILED)

    def _settings(self) -> list[Claim]:
        """Write the configuration with the data files of the pack and a logger in the temporary folder."""
        path = self.run.folder / Run.CONFIG
        settings = portable_settings(path.read_text(encoding="utf-8"), path)
        names = [*named_files(settings["data"]["init_args"])]
        if without_places(settings) != settings or not all(map(is_inside, names)):
            raise UserError("the settings must not name a file outside of the pack, but do; do not trust it")
        included = {name: str(path) for name in names if (path := self.run.folder / DATA / name).exists()}
        settings["data"]["init_args"] = with_names(settings["data"]["init_args"], included)
        logger = {"save_dir": str(self.work), "name": f"tested_{self.run.folder.name}"}
        settings["trainer"]["logger"] = [{"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": logger}]
        self.config.write_text(yaml.safe_dump(settings), encoding="utf-8")
        return []

    def _weights(self) -> list[Claim]:
        """Write the weights as a checkpoint, which is read as data only."""
        write(restored(self.run.folder), self.checkpoint)
        number = len(read(self.checkpoint)["state_dict"])
        return [self._claim("weights", "", f"{number} tensors, read as data only", True)]

    def _card(self) -> list[Claim]:
        stated = card_results(self.run.folder.parent / CARD)[self.run.folder.name]
        wrong = [name for name, value in stated.items() if not _is_equal(value, self.run.summary.metrics.get(name))]
        found = f"other {', '.join(wrong)}" if wrong else "equal"
        return [self._claim("model card", f"{len(stated)} metrics", found, not wrong)]

    def _data_files(self) -> list[Claim]:
        """Return a claim for each data file; those that are downloaded are checked when they are read."""
        listed = json.loads((self.run.folder / CROISSANT).read_bytes()).get("distribution", [])
        claims = []
        for file in listed:
            name = str(file["contentUrl"])
            if "://" not in name:
                if not is_inside(name):
                    raise UserError("the data must not name a file outside of the pack, but do; do not trust it")
                inside = self.run.folder / name
                path = inside if inside.is_file() else Path(name).relative_to(DATA)
                found = sha256(path)[:20] if path.is_file() else "missing; run verify in the folder that holds it"
                claims.append(self._claim(name, file["sha256"][:20], found, found == file["sha256"][:20]))
        return claims

    def _test(self) -> list[Claim]:
        """Test the weights on the data, and compare what the run has recorded."""
        arguments = ["--config", str(self.config), "--ckpt_path", str(self.checkpoint), *ONE_PROCESS, *self.trusted]
        with redirect_stdout(StringIO()):
            cli = run_cli(["test", *arguments])
            cli.datamodule.setup("fit")
        assert cli.run is not None
        tested, recorded = cli.run, self.run.summary
        before, now = (run.starts[-1] for run in (self.run, tested))
        is_same = _kind(before) == _kind(now)
        claims = [
            self._claim(
                f"{split} data",
                fingerprint,
                found := cli.datamodule.fingerprint.get(split, "none"),
                found == fingerprint,
            )
            for split, fingerprint in before["data_fingerprint"].items()
        ]
        for name in ("parameters", "seed"):
            value, other = (str(getattr(summary, name)) for summary in (recorded, tested.summary))
            claims.append(self._claim(name, value, other, value == other))
        sizes = before.get("data_sizes", {})
        for name, metric in recorded.metrics.items():
            found = tested.summary.metrics.get(name)
            holds = _is_equal(metric, found)
            if not holds and not is_same and found is not None:
                split = name.split("/")[1] if name.split("/")[1] in sizes else recorded.split
                is_of_tokens = name.partition("/")[2] in recorded.token_metrics
                example = 0.0 if is_of_tokens else 1 / sizes.get(split, math.inf)
                holds = abs(found - metric) <= TOLERANCE * abs(metric) + example
            claims.append(self._claim(name, repr(metric), repr(found), holds))
        return [*claims, self._predictions(tested, is_same)]

    def _predictions(self, tested: Run, is_same: bool) -> Claim:
        keys = ("split", "source", "target", "prediction", "correct", *(["nll"] if is_same else []))
        lines: list[Sequence[Any]] = [self.run.predictions, tested.predictions]
        pairs = [*itertools.zip_longest(*lines, fillvalue={})]
        number = sum(any(not _is_equal(*(line.get(key) for line in pair)) for key in keys) for pair in pairs)
        allowed = 0 if is_same else 1 + TOLERANCE * len(pairs)
        return self._claim("predictions", f"{len(self.run.predictions)}", f"{number} differ", number <= allowed)

    def _no_training(self) -> list[Claim]:
        return [Claim(self.run.folder.name, "training", "", "--retrain repeats it", UNCHECKED)]

    def _training(self) -> list[Claim]:
        """Train again, and compare the weights of the best checkpoint, the logged metrics and the predictions."""
        if self.run.begins_elsewhere or self.run.config["model"]["init_args"].get("pretrained"):
            reason = "it begins with the weights of another run, which the pack does not hold"
            return [Claim(self.run.folder.name, "training", "", reason, UNCHECKED)]
        arguments = ["--config", str(self.config), "--name", f"trained_{self.run.folder.name}", *self.trusted]
        (child,) = run_children([lambda: ChildRun(arguments, self.work / "training.log")])
        if child.process.returncode:
            return [self._claim("training", "", child.last_line, False)]
        trained = Run(self.work / f"trained_{self.run.folder.name}" / "version_0")
        weights = [read(path) for path in (self.checkpoint, named_checkpoint(trained.folder))]
        found = [
            *(f"{len(rows)} differences of the {part}" for part, rows in different_states(*weights).items() if rows),
            *(f"{row['name']}: {' and '.join(map(shown, row['values']))}" for row in first_results(self.run, trained)),
        ]
        others = [f"other {row['name']}" for row in different_environments(self.run, trained)] if found else []
        return [self._claim("training", "", "; ".join([*others, *found]) or "same bits", not found)]


def _is_equal(first: Any, second: Any) -> bool:
    return first == second or (first != first and second != second)  # NaN


def _kind(start: Mapping[str, Any]) -> list[Any]:
    """Return what floating-point results depend on, besides the settings."""
    names = ("processor", "instruction_set", "gpus", "threads")
    return [start["versions"]["torch"], *(start["hardware"][name] for name in names)]
