"""Collection of the content of a report from the folders of runs."""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from lightning_tfm.config.settings import flatten
from lightning_tfm.errors import UserError, rank_zero_print
from lightning_tfm.inference import OutputStep, Predictor, Seq2SeqPredictor, short_title, worst_first
from lightning_tfm.inference.attention_maps import MAX_POSITIONS, AttentionMap
from lightning_tfm.inference.decoding import DecodingOptions
from lightning_tfm.inference.loading import load
from lightning_tfm.runs.inspection import Inspection
from lightning_tfm.runs.record import FINAL, Prediction, Run, is_per_category
from lightning_tfm.system.files import relative
from lightning_tfm.system.terminal import format_duration
from lightning_tfm.tokenization import Tokenizer, align

PREDICTIONS = 500
"""Maximum number of predictions shown per run: half with the largest losses, half evenly spaced over the others."""

EXAMPLES = 6
"""Number of examples per run with the largest losses, and of typical examples, whose attention is shown."""

MAX_LABELS = 20
"""Maximum number of labels for which a confusion matrix is shown."""

ALTERNATIVES = 3
"""Maximum number of alternatives of a symbol."""

MAX_CONFUSIONS = 100
"""Maximum number of confused symbols of a run, the most frequent ones."""

LEAST_PROBABILITY = 0.001
"""Minimum probability of an alternative."""

Json = dict[str, Any]


@dataclass
class RunPage:
    """Content of the page for a run; what a run lacks is empty.

    Attributes:
        name: the name of the run on the page.
        run: the run.
        checkpoint: the checkpoint of the run, or that of a later test; None if there is none.
        task: the task and the data, such as "Seq2SeqModule on Date".
        data: the hash of the main test set, which distinguishes files of equal names.
        facts: the results and the provenance in words, by name.
        curves: points (step, value) of each metric.
        non_finite: the number of values of each metric that are not finite.
        categories: the results of each category.
        confusion: the cells of the confusion matrix.
        confused: the symbols that are confused, left out or added in predicted targets, the most frequent first.
        lengths: the number of tokens of each source with a predicted target, and whether the prediction is correct.
        predictions: the predictions that are shown.
        inputs: the texts of the user with their outputs.
        attention: the examples whose attention is shown.
        history: the examples whose attention is shown during the training, and the steps of its validations.
        forks: the forks of the run that have no page of their own, of which only the curves are shown.
        group: the name of the group of runs that differ in their seeds only; by default, that of the run.
        inspection: the results of `inspect`; None without any.
    """

    name: str
    run: Run
    checkpoint: Path | None = None
    task: str = ""
    data: str = ""
    facts: dict[str, str] = field(default_factory=dict)
    curves: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    non_finite: Mapping[str, int] = field(default_factory=dict)
    categories: list[Json] = field(default_factory=list)
    confusion: list[Json] = field(default_factory=list)
    confused: list[Json] = field(default_factory=list)
    lengths: list[tuple[int, bool]] = field(default_factory=list)
    predictions: list[Json] = field(default_factory=list)
    inputs: list[Json] = field(default_factory=list)
    attention: list[Json] = field(default_factory=list)
    history: list[Json] = field(default_factory=list)
    forks: list[RunPage] = field(default_factory=list)
    group: str = ""
    inspection: Inspection | None = None

    def __post_init__(self) -> None:
        self.group = self.group or self.name

    @property
    def split(self) -> str:
        """Return the name of the main test set."""
        return self.run.summary.split if self.run.has_finished else "test"

    @property
    def settings(self) -> dict[str, str]:
        """Return all settings as JSON, by dotted name."""
        return {name: json.dumps(value, ensure_ascii=False) for name, value in flatten(self.run.config).items()}


def run_names(folders: Sequence[Path]) -> list[str]:
    """Return the shortest unique suffixes of the paths, with at least two parts each."""
    paths = [folder.resolve().parts for folder in folders]
    for parts in range(2, max(map(len, paths)) + 1):
        names = ["/".join(path[-parts:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return names


def collect_run(
    folder: Path, name: str, points: int, trust_packages: Sequence[str], inputs: Sequence[str] = ()
) -> RunPage:
    """Return the content of the page for a run.

    Args:
        folder: the folder of the run.
        name: the name of the run on the page.
        points: the approximate number of points in each curve.
        trust_packages: the trusted packages, see `--trust-package`.
        inputs: texts whose outputs and attention are shown first.

    Raises:
        UserError: if a file of the run is damaged.
    """
    run = Run(folder)
    checkpoint = _checkpoint(run)
    curves, non_finite = _curves(run, points)
    page = RunPage(name, run, checkpoint, facts=_facts(run), curves=curves, non_finite=non_finite)
    page.inspection = run.inspection
    model, data = (run.config.get(key) or {} for key in ("model", "data"))
    page.task = " on ".join(str(each.get("class_path", "unknown")).rpartition(".")[2] for each in (model, data))
    arguments = data.get("init_args") or {}
    files: Any = next((arguments[key] for key in ("test", "val", "path") if arguments.get(key)), [])
    if files:
        names = [Path(str(file)).name for file in (files if isinstance(files, list) else [files])]
        page.task += f" ({', '.join(names)})"
        fingerprints = run.starts[-1]["data_fingerprint"] if run.starts else {}
        page.data = fingerprints.get("test", fingerprints.get("val", ""))
    page.categories, page.confusion = _per_category(run), _confusion(run.predictions)
    page.predictions = [shown(line) for line in _sample(run.predictions, PREDICTIONS)]
    if recorded := run.attention_history:
        page.history = [
            {"title": example["title"], "validations": recorded["steps"], "layers": {"target": example["layers"]}}
            for example in recorded["examples"]
        ]
    has_attention = inputs or run.predictions or run.examples
    predictor = _load(checkpoint, trust_packages) if checkpoint and has_attention else None
    examples = [_own_example(predictor, text) for text in inputs]
    page.inputs = [
        {"input": text, "output": example.get("output"), "note": example.get("note")}
        for text, example in zip(inputs, examples, strict=True)
    ]
    if isinstance(predictor, Seq2SeqPredictor):
        page.confused = _confused(run.predictions, predictor.tokenizer)
        page.lengths = [(len(predictor.tokenizer.split(line["source"])), line["correct"]) for line in run.predictions]
    if predictor is not None:
        own = [example for example in examples if "note" not in example]
        page.attention = list(_attention(predictor, own, run))
        _add_steps(predictor, [line for line in page.predictions if not line["correct"]])
        _add_steps(predictor, [example for example in page.attention if "prediction" in example])
    return page


def add_forks(pages: Sequence[RunPage], points: int) -> None:
    """Add to each run its forks in the folder of its experiment, or in that of another one beside it.

    Args:
        pages: the pages; a fork that has one is left out.
        points: the approximate number of points in each curve of a fork.
    """
    by_folder = {page.run.folder.resolve(): page for page in pages}
    parents = {folder.parents[1] for folder in by_folder}
    folders = {config.parent for parent in parents for config in parent.glob(f"*/*/{Run.CONFIG}")}
    for run in map(Run, sorted(folders - by_folder.keys())):
        with suppress(UserError):  # a damaged file of a run that the user has not named
            if branch := find_branch(run, by_folder):
                name = "/".join(run.folder.parts[-2:])
                by_folder[branch[0]].forks.append(RunPage(name, run, curves=_curves(run, points)[0]))


def find_branch(run: Run, folders: Container[Path]) -> tuple[Path, int] | None:
    """Return the last run among given folders from which a fork began, and its step; None if there is none."""
    origins = [(Path(start["fork"]["run"]).resolve(), start["fork"]["step"]) for start in run.forks]
    return next((origin for origin in reversed(origins) if origin[0] in folders), None)


def _facts(run: Run) -> dict[str, str]:
    facts: dict[str, str] = {}
    if run.has_finished:
        summary = run.summary
        facts = {name: f"{value:.4f}" for name, value in summary.metrics.items() if not is_per_category(name)}
        if summary.train_seconds is not None:
            facts["training"] = format_duration(summary.train_seconds)
        if summary.samples_per_second is not None:
            facts["samples per second"] = f"{summary.samples_per_second:,.0f}"
        if summary.checkpoint:
            facts["tested checkpoint"] = summary.checkpoint
        facts |= {"steps": f"{summary.steps:,}", "parameters": f"{summary.parameters:,}", "seed": str(summary.seed)}
    if run.starts:
        first, last = run.starts[0], run.starts[-1]
        for start in run.forks[-1:]:
            facts["fork of"] = f"{start['fork']['run']} at step {start['fork']['step']}"
        commit, versions = last["framework"]["commit"], last["versions"]
        facts |= {
            "started": first["time"].strftime("%Y-%m-%d %H:%M UTC"),
            "commit": (last["git"]["commit"] or "unknown")[:10] + (" and changes" if last["git"]["dirty"] else ""),
            "processor": ", ".join(dict.fromkeys([last["hardware"]["processor"], *last["hardware"]["gpus"]])),
            "lightning_tfm": versions.get("lightning_tfm", "unknown") + (f" at {commit[:10]}" if commit else ""),
            "torch": versions.get("torch", "unknown"),
        }
    return facts


def _curves(run: Run, number: int) -> tuple[dict[str, list[tuple[int, float]]], Counter[str]]:
    """Return about `number` finite points (step, value) of each metric, and the number of points that are not finite.

    The last finite point is always included.
    """
    curves: dict[str, list[tuple[int, float]]] = defaultdict(list)
    non_finite: Counter[str] = Counter()
    rows, damaged = run.read_rows()
    if damaged:
        rank_zero_print(f"skipping {damaged} damaged rows of {relative(run.folder / Run.METRICS)}")
    for row in rows:
        for name, value in row.items():
            if not value or name == "step" or name.startswith(FINAL):
                continue
            if math.isfinite(float(value)):
                curves[name].append((int(row["step"]) + 1, float(value)))  # Lightning counts from 0
            else:
                non_finite[name] += 1
    thinned = {name: points[:: -max(1, len(points) // number)][::-1] for name, points in curves.items()}
    return thinned, non_finite


def _sample(predictions: Sequence[Prediction], number: int) -> list[Prediction]:
    """Return up to `number` predictions by decreasing loss: half with the largest losses, half spread over the rest."""
    by_loss = sorted(predictions, key=worst_first)
    worst, rest = by_loss[: number // 2], by_loss[number // 2 :]
    others = min(len(rest), number - len(worst))
    return worst + [rest[index * len(rest) // others] for index in range(others)]


def shown(line: Prediction) -> Json:
    """Return a prediction as the page shows it."""
    nll = line["nll"] if math.isfinite(line["nll"]) else None  # JSON has no NaN
    marks = {} if line["correct"] else {"marks": differences(line["target"], line["prediction"])}
    return {name: value for name, value in line.items() if name != "alignment"} | {"nll": nll} | marks


def differences(target: str, prediction: str) -> list[list[tuple[int, int]]]:
    """Return the parts (start, end) in which a target and a prediction differ, as characters of each.

    Words are compared if both have blanks, otherwise characters.
    """
    pattern = r"\s+|\S+" if " " in target and " " in prediction else r"(?s)."
    spans = [[match.span() for match in re.finditer(pattern, text)] for text in (target, prediction)]
    texts = (target, prediction)
    parts = [[text[slice(*span)] for span in spans_of] for text, spans_of in zip(texts, spans, strict=True)]
    changes = [
        each for each in SequenceMatcher(a=parts[0], b=parts[1], autojunk=False).get_opcodes() if each[0] != "equal"
    ]
    bounds = [[(first, last) for _, first, last, *_ in changes], [(first, last) for *_, first, last in changes]]
    return [
        [(spans_of[first][0], spans_of[last - 1][1]) for first, last in bounds_of if last > first]
        for spans_of, bounds_of in zip(spans, bounds, strict=True)
    ]


def _add_steps(predictor: Predictor, lines: Sequence[Json]) -> None:
    """Add to predictions the probability of each symbol, and its alternatives, if the model gives them."""
    if predictor.gives_scores:
        scores = predictor.score([f"{line['source']}\t{line['prediction']}" for line in lines], with_steps=True)
        steps = [score.steps for score in scores]
    else:
        predictions = predictor.predict([line["source"] for line in lines], DecodingOptions(steps=True))
        steps = [each.outputs[0].steps if each.outputs else None for each in predictions]
    for line, of_line in zip(lines, steps, strict=True):
        if of_line:
            line["steps"] = [_step(step) for step in of_line]


def _step(step: OutputStep) -> tuple[str, float, list[tuple[str, float]]]:
    """Return the symbol of a step, its probability, and those of its alternatives."""
    others = [each for each in step.alternatives[:ALTERNATIVES] if each.probability >= LEAST_PROBABILITY]
    return step.symbol, round(step.probability, 4), [(each.symbol, round(each.probability, 4)) for each in others]


def _per_category(run: Run) -> list[Json]:
    """Return the results of each category, with the symbol error rate as `fit` or `test` has logged it, if at all."""
    metrics = run.summary.metrics if run.has_finished else {}
    by_category: dict[tuple[str, str], list[Prediction]] = defaultdict(list)
    for line in run.predictions:
        if line["category"] is not None:
            by_category[line.get("split", "test"), line["category"]].append(line)
    return [
        {
            "split": split,
            "category": category,
            "exact match": sum(line["correct"] for line in lines) / len(lines),
            "ser": metrics.get(f"{split if split in ('test', 'val') else f'test/{split}'}/ser/{category}"),
            "loss": f"{sum(line['nll'] for line in lines) / len(lines):.4f}",  # as text, since it may not be finite
            "pairs": len(lines),
        }
        for (split, category), lines in sorted(by_category.items(), key=lambda item: (item[0][0] != "test", item[0]))
    ]


def _confusion(predictions: Sequence[Prediction]) -> list[Json]:
    """Return the cells of the confusion matrix; empty unless the predictions are at most MAX_LABELS distinct labels."""
    counts = Counter((line["target"], line["prediction"]) for line in predictions if "probability" in line)
    labels = sorted({label for pair in counts for label in pair})
    if len(labels) > MAX_LABELS:
        return []
    totals = {label: max(1, sum(counts[label, other] for other in labels)) for label in labels}
    return [
        {"true": true, "predicted": other, "count": counts[true, other], "share": counts[true, other] / totals[true]}
        for true in labels
        for other in labels
    ]


def _confused(predictions: Sequence[Prediction], tokenizer: Tokenizer) -> list[Json]:
    """Return the most frequent substitutions, deletions and insertions of symbols in predictions, by their alignment.

    Each has its count and, as an example, the prediction with the fewest edits that contains it. The symbol that the
    target, or the prediction, lacks is "".
    """
    wrong = [line for line in predictions if not line["correct"]]
    outputs, targets = ([tokenizer.split_scored(line[side]) for line in wrong] for side in ("prediction", "target"))
    counts: Counter[tuple[str, str]] = Counter()
    examples: dict[tuple[str, str], tuple[int, Prediction]] = {}
    for line, pairs in zip(wrong, align(outputs, targets), strict=True):
        edits = [(symbol, other) for symbol, other in pairs if symbol != other]
        counts.update(edits)
        for edit in edits:
            if edit not in examples or len(edits) < examples[edit][0]:
                examples[edit] = len(edits), line
    frequent = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:MAX_CONFUSIONS]
    return [
        {
            "edit": "insertion" if not symbol else "deletion" if not other else "substitution",
            "target": symbol,
            "predicted": other,
            "count": count,
            "example": shown(examples[symbol, other][1]),
        }
        for (symbol, other), count in frequent
    ]


def _checkpoint(run: Run) -> Path | None:
    """Return the checkpoint of a run, or that of a later test; None if there is none."""
    checkpoint = run.checkpoint(Run.BEST, Run.LAST)
    if checkpoint is None and run.has_finished:
        checkpoint = next(filter(Path.is_file, run.tested_checkpoints), None)
    return checkpoint


def _load(checkpoint: Path, trust_packages: Sequence[str]) -> Predictor | None:
    """Load the model of a checkpoint; return None, and print a message, if it cannot be loaded."""
    try:
        return load(checkpoint, trust_packages)
    except UserError as error:  # an untrusted package or a damaged file must not prevent the rest of the page
        rank_zero_print(f"cannot show the attention of {checkpoint}: {error}")
        return None


def _own_example(predictor: Predictor | None, text: str) -> Json:
    """Return a text of the user with its output, as an attention example, or with a note if there is no output."""
    if predictor is None:
        return {"source": text, "note": "no checkpoint can be loaded"}
    (prediction,) = predictor.predict([text])
    if prediction.outputs is None or prediction.text is None:
        return {"source": text, "note": prediction.note}
    probability = "" if (value := prediction.outputs[0].probability) is None else f" ({value:.4f})"
    return predictor.example(text, prediction.text) | {"output": f"{prediction.text}{probability}"}


def _attention(predictor: Predictor, own: Sequence[Json], run: Run) -> Iterator[Json]:
    """Yield the attention weights of all layers for a few examples.

    Args:
        predictor: the model.
        own: the texts of the user.
        run: the run, whose predictions are shown or, without any, the examples that were plotted after the test.
    """
    described: list[tuple[Json, Json]] = []
    for content in own:
        texts = {} if "ids" in content else {name: content[name] for name in ("source", "prediction")}
        described.append((content, texts | {"title": f"your input: {_title(content['source'], content['output'])}"}))
    for line in _sample(run.predictions, 2 * EXAMPLES):
        mark = "\N{CHECK MARK}" if line["correct"] else "\N{BALLOT X}"
        title = f"{mark} {_title(line['source'], line['prediction'])}"
        described.append((dict(line), shown(line) | {"title": title}))
    for content in [] if run.predictions else run.examples:
        described.append((content, {"title": short_title(str(content.get("text", "")))}))
    for content, description in described:
        try:
            layers = {"output": predictor.attention(content)}
            if not content.get("correct", True) and any(layer.predicts for layer in layers["output"]):
                of_target = {name: value for name, value in content.items() if name != "prediction"}
                layers["target"] = predictor.attention(of_target)
        except UserError as error:  # such as a prediction by another vocabulary, which must not prevent the page
            rank_zero_print(f"cannot show the attention of an example: {error}")
            continue
        if layers["output"]:
            yield description | {"layers": {rows: list(map(_layer, each)) for rows, each in layers.items()}}


def _title(source: str, output: str) -> str:
    return f"{short_title(source)} \N{RIGHTWARDS ARROW} {short_title(output)}"


def _layer(layer: AttentionMap) -> Json:
    """Return a layer with its weights as base64-encoded bytes, where 255 is a weight of 1."""
    cropped = layer.cropped()
    return {
        "layer": cropped.layer,
        "heads": cropped.weights.size(0),
        "queries": cropped.queries,
        "keys": cropped.keys,
        "gold": cropped.gold,
        "predicts": cropped.predicts,
        "first": 0 if len(layer.queries) > MAX_POSITIONS else layer.first_target,  # the row of the first output symbol
        "weights": [cropped.encoded()],
    }
