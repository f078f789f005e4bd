"""Descriptions of packed runs: an RO-Crate, a model card, Croissant metadata and a reproducibility checklist."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from mimetypes import MimeTypes
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

import yaml

from lightning_tfm.config.settings import parse_yaml
from lightning_tfm.config.trust import trusted
from lightning_tfm.data.text_files import list_files
from lightning_tfm.runs.record import Run, is_per_category

CARD = "README.md"
CHECKLIST = "checklist.md"
CRATE = "ro-crate-metadata.json"
CROISSANT = "croissant.json"
DATA = "data"
MODEL = "model.json"
PAGE = "report.html"
PINS = "versions.txt"
WEIGHTS = "model.safetensors"

PROFILE = "https://w3id.org/ro/wfrun/process/0.5"
"""Profile of RO-Crate for the record of processes."""

TERMS = "https://w3id.org/ro/terms/workflow-run/context"
"""JSON-LD context of its terms, among them sha256."""

DESCRIPTIONS = {
    CARD: "Model card in the format of the Hugging Face Hub, with the results",
    CHECKLIST: "Reproducibility checklist",
    PAGE: "Report: results, attention, errors, curves and settings",
    Run.CONFIG: "All settings of the run",
    Run.SUMMARY: "Results and cost",
    Run.PROVENANCE: "Starts of the run: commit, versions, hardware and fingerprints of the data",
    Run.METRICS: "Logged metrics by step",
    Run.PREDICTIONS: "Prediction for each example of the test sets",
    WEIGHTS: "Weights of the best checkpoint",
    MODEL: "Hyper-parameters and tokenizer",
    PINS: "Versions of Python and the packages",
    CROISSANT: "Croissant metadata of the data",
}
"""Descriptions of files, by name."""

MEDIA_TYPES = {".diff": "text/x-diff", ".jsonl": "application/jsonl", ".yaml": "application/yaml"}
"""Media types of suffixes that Python does not know."""

TEMPLATES = Path(__file__).parents[1] / "reporting"
"""Folder of the templates of the texts."""

UNKNOWN = "**to be filled in**"
"""Answer that a run does not know."""


@dataclass(frozen=True)
class Statement:
    """Metadata that the author of a pack provides, each None by default.

    Attributes:
        author: the name of the author.
        license: the license of the pack, an SPDX identifier or an address.
        data_license: the license of the included data files.
    """

    author: str | None = None
    license: str | None = None
    data_license: str | None = None


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# Texts


def write_texts(folder: Path, names: Mapping[str, str], runs: Mapping[str, Run], statement: Statement) -> None:
    """Write the model card, and the reproducibility checklist with the answers that the runs know.

    Args:
        folder: the folder of the pack.
        names: the name of the experiment of each run, by its folder in the pack.
        runs: the runs in the same way.
        statement: the metadata that the author provides.
    """
    import jinja2

    content: dict[str, Any] = {"library_name": "lightning_tfm", "tags": [*dict.fromkeys(names.values())]}
    if statement.license is not None:
        is_address = "://" in statement.license
        content["license"] = "other" if is_address else statement.license.lower()
        content |= {"license_link": statement.license} if is_address else {}
    content["model-index"] = [{"name": place, "results": [_result(names[place], run)]} for place, run in runs.items()]
    header = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), keep_trailing_newline=True, undefined=jinja2.StrictUndefined
    )
    for name in (CARD, CHECKLIST):
        text = templates.get_template("pack_card.md" if name == CARD else "pack_checklist.md").render(
            header=header, title=_title(names), names=names, runs=runs, statement=statement, unknown=UNKNOWN
        )
        (folder / name).write_text(text, encoding="utf-8")


def card_results(path: Path) -> dict[str, dict[str, float]]:
    """Return the metrics in the metadata of a card, by the folder of their run; raise an exception without any."""
    _, header, _ = path.read_text(encoding="utf-8").split("---\n", 2)
    return {
        model["name"]: {metric["name"]: metric["value"] for result in model["results"] for metric in result["metrics"]}
        for model in parse_yaml(header, path, "PACK")["model-index"]
    }


def _result(name: str, run: Run) -> dict[str, Any]:
    """Return the results of a run as the Hub reads them."""
    task = {"Classifier": "text-classification", "LanguageModel": "text-generation", "MaskedLanguageModel": "fill-mask"}
    kind = _short(run.config["model"]["class_path"])
    return {
        "task": {"type": task.get(kind, "text2text-generation")},
        "dataset": {"name": name, "type": _short(run.config["data"]["class_path"]), "split": run.summary.split},
        "metrics": [
            {"type": metric.rpartition("/")[2], "name": metric, "value": value}
            for metric, value in run.summary.metrics.items()
            if not is_per_category(metric)
        ],
    }


def _title(names: Mapping[str, str]) -> str:
    return ", ".join(dict.fromkeys(names.values()))


def _short(class_path: str) -> str:
    return class_path.rpartition(".")[2]


# The data


def croissant(run: Run, name: str, files: Mapping[str, Path], statement: Statement) -> dict[str, Any]:
    """Return Croissant metadata of the data of a run.

    Args:
        run: the packed run.
        name: the name of its experiment.
        files: the local files, by their path in the folder of the run.
        statement: the metadata that the author provides.
    """
    import mlcroissant

    data, start = run.config["data"], run.starts[-1]
    sizes = start.get("data_sizes", {})
    splits = "; ".join(
        f"{split}: {fingerprint}" + (f" ({sizes[split]:,} examples)" if split in sizes else "")
        for split, fingerprint in start["data_fingerprint"].items()
    )
    objects = [(path, path, sha256(file)) for path, file in files.items()] + [
        (path, download.address, download.sha256) for path, download in _downloads(data, bool(files)).items()
    ]
    origin = "read from files" if objects else "generated by its code"
    dataset = mlcroissant.Metadata(
        name=f"{name}-data",
        description=f"Data module {data['class_path']} of lightning_tfm, {origin}, with the settings "
        f"{json.dumps(data['init_args'], ensure_ascii=False)}. Fingerprints of the splits: {splits}.",
        license=[statement.data_license] if files and statement.data_license else None,
        date_published=start["time"],
        version="1.0.0",
        distribution=[
            mlcroissant.FileObject(
                id=path, name=path, content_url=address, encoding_formats=[_media_type(path)], sha256=checksum
            )
            for path, address, checksum in objects
        ],
    )
    content: dict[str, Any] = dataset.to_json()
    return content


def _downloads(data: Mapping[str, Any], has_files: bool) -> Mapping[str, Any]:
    """Return the downloads that the settings of a data module name or, if they name none and no file, all of them."""
    cls = trusted().get(data["class_path"])
    known: Mapping[str, Any] = getattr(import_module(cls.__module__), "FILES", {}) if cls else {}
    named = {name: known[name] for name in named_files(data["init_args"]) if name in known}
    return named if named or has_files else known


DATA_FILES = {"train", "val", "test", "path", "tokenizer_file"}
"""Settings of data modules that name files or folders."""


def named_files(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of files, folders and downloads in the arguments of a data module."""
    for setting in sorted(DATA_FILES & arguments.keys()):
        value = arguments[setting]
        yield from [value] if isinstance(value, str) else value if isinstance(value, list | dict) else ()


def with_names(arguments: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments of a data module with other names of files, given by the present ones."""

    def renamed(value: Any) -> Any:
        if isinstance(value, dict):  # a mixture of texts with weights
            return {names.get(name, name): weight for name, weight in value.items()}
        if isinstance(value, list):
            return [names.get(name, name) for name in value]
        return names.get(value, value) if isinstance(value, str) else value

    return {name: renamed(value) if name in DATA_FILES else value for name, value in arguments.items()}


def is_inside(name: str) -> bool:
    """Return whether the name of a file is relative and stays in its folder on any system."""
    path = PurePosixPath(name)
    return (
        path.as_posix() == name
        and not path.is_absolute()
        and name[0] not in "~."
        and not {*"\\:$"} & {*name}
        and ".." not in path.parts
    )


def files_below(path: Path) -> list[Path]:
    """Return a file, or the files in a folder except hidden ones."""
    return [path] if path.is_file() else list_files(path)


# The crate


def crate(folder: Path, names: Mapping[str, str], runs: Mapping[str, Run], statement: Statement) -> dict[str, Any]:
    """Return the metadata of an RO-Crate of the files of a folder, each with its SHA-256.

    All dates are those of the runs, so that the same runs give the same metadata.
    """
    from rocrate.model.contextentity import ContextEntity
    from rocrate.rocrate import ROCrate

    made = ROCrate(version="1.1")
    made.metadata.extra_contexts.append(TERMS)
    made.name = _title(names)
    made.description = f"Trained networks of {_title(names)}, with what is needed to verify and repeat their results"
    made.datePublished = max(run.starts[-1]["time"] for run in runs.values())

    def add(identifier: str, kind: str, **properties: Any) -> Any:
        return made.add(ContextEntity(made, identifier, properties={"@type": kind, **properties}))

    profile = add(PROFILE, "CreativeWork", name="Process Run Crate", version="0.5")
    made.root_dataset["conformsTo"] = profile
    given = statement.license or "#license"
    address = given if "://" in given or given[0] == "#" else f"https://spdx.org/licenses/{given}"
    described = f"The license is {given}." if statement.license else "The author has stated no license."
    made.license = add(address, "CreativeWork", name=statement.license or "not stated", description=described)
    author = add("#author", "Person", name=statement.author) if statement.author else None
    if author is not None:
        made.root_dataset["author"] = author
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            name = path.relative_to(folder).as_posix()
            properties = {
                "name": DESCRIPTIONS.get(path.name, path.name),
                "encodingFormat": _media_type(name),
                "contentSize": str(path.stat().st_size),
                "sha256": sha256(path),
            }
            files[name] = made.add_file(path, name, properties=properties)
    actions = []
    for number, (place, run) in enumerate(runs.items(), start=1):
        start, version = run.starts[0], run.starts[-1]["versions"]["lightning_tfm"]
        commit = run.starts[-1]["framework"]["commit"]
        program = add(
            f"#program_{number}",
            "SoftwareApplication",
            name="lightning_tfm",
            softwareVersion=f"{version}{f' at {commit}' if commit else ''}",
        )
        inside = [name for name in files if name.startswith(f"{place}/")]
        inputs = [name for name in inside if name.startswith(f"{place}/{DATA}/")]
        inputs += [f"{place}/{name}" for name in (Run.CONFIG, CROISSANT)]
        ended: dict[str, Any] = {}
        if len(run.starts) == 1 and run.summary.train_seconds is not None:
            ended = {"endTime": (start["time"] + timedelta(seconds=round(run.summary.train_seconds))).isoformat()}
        actions.append(
            add(
                f"#{place}",
                "CreateAction",
                name=f"Training of {names[place]} with seed {run.summary.seed}",
                description=start["command"],
                instrument=program,
                object=[files[name] for name in sorted(inputs)],
                result=[files[name] for name in inside if name not in inputs],
                startTime=start["time"].isoformat(),
                actionStatus="http://schema.org/CompletedActionStatus",
                **ended,
                **({} if author is None else {"agent": author}),
            )
        )
    made.root_dataset["mentions"] = actions if len(actions) > 1 else actions[0]
    content: dict[str, Any] = made.metadata.generate()
    return content


def _media_type(name: str) -> str:
    suffix = PurePosixPath(name).suffix
    return MEDIA_TYPES.get(suffix) or MimeTypes().guess_type(name)[0] or "application/octet-stream"


def recorded_files(content: Any) -> dict[str, str]:
    """Return the SHA-256 of the files in the metadata of an RO-Crate, by name."""
    graph: Sequence[Any] = content["@graph"]
    return {unquote(str(entity["@id"])): str(entity["sha256"]) for entity in graph if "sha256" in entity}
