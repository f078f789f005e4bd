"""The folder of a run: what its readers return, and which files they refuse."""

import ast
import json
import math
import re
from datetime import datetime
from fnmatch import fnmatch
from pathlib import Path

import pytest

from lightning_tfm.errors import DamagedError, UserError
from lightning_tfm.runs.record import FORMAT, Run, Summary
from lightning_tfm.system.files import write_text
from support.experiments import folder
from support.records import PREDICTION, START, SUMMARY

ROOT = Path(__file__).parents[2]


def test_each_file_is_read_as_it_was_written(tmp_path):
    run = Run(tmp_path)
    run.write_summary(Summary(**SUMMARY))
    run.write_starts([START | {"time": datetime.fromisoformat(START["time"])}])
    prediction = PREDICTION | {"source": "a\u0085b", "nll": math.nan, "alignment": [[0, 0]]}
    run.write_predictions([prediction])
    run.write_examples([{"text": "a"}])
    history = {"steps": [10], "examples": [{"title": "a", "layers": []}]}
    run.write_attention_history(history)
    run.write_rows([{"step": "0", "loss": "1.5"}, {"step": "9"}], ["loss", "step"])
    assert run.summary == Summary(**SUMMARY)
    assert run.starts == [START | {"time": datetime.fromisoformat(START["time"])}]
    assert json.loads((tmp_path / Run.PROVENANCE).read_text()) == [START]
    assert json.dumps(run.predictions) == json.dumps([prediction])  # NaN differs from itself
    assert run.examples == [{"text": "a"}]
    assert run.attention_history == history
    assert run.metrics() == [{"step": 0, "loss": 1.5}, {"step": 9}]


PAGE = (ROOT / "docs/reference/run_folder.md").read_text(encoding="utf-8")


def test_the_examples_of_the_documentation_can_be_read(tmp_path):
    for name, content in re.findall(r"^`([a-z.]+)`.*:\n\n```.*\n([\s\S]*?)```", PAGE, re.MULTILINE):
        joined = content.replace("\n ", " ") if name.endswith(".jsonl") else content  # the page breaks its lines
        (tmp_path / name).write_text(joined)
    run = Run(tmp_path)
    assert run.summary.headline == ("test/exact_match", run.summary.metrics["test/exact_match"])
    assert run.starts[0]["format"] == FORMAT
    assert run.predictions[0]["split"] == "test"
    assert {name for row in run.metrics() for name in row} >= {"step", "train/loss", "val/loss"}


def test_the_documentation_names_every_file(reference):
    run = Run(folder(reference("gpt"), "gpt"))
    names = {path.relative_to(run.folder).as_posix() for path in run.folder.rglob("*") if path.is_file()}
    assert names >= {Run.CONFIG, Run.SUMMARY, Run.PROVENANCE, Run.METRICS, Run.PREDICTIONS}
    documented = [name.replace("N", "*").replace("*AME", "*") for name in re.findall(r"`([^ `]*\.\w+|\.lock)`", PAGE)]
    documented += ["attention/example_*.png"]
    assert [name for name in sorted(names) if not any(fnmatch(name, pattern) for pattern in documented)] == []


NAMES = (
    r"config\.yaml|summary\.json|provenance\.json|metrics\.csv|predictions\.jsonl|(examples|history)\.json|(best|last)\.ckpt|"
    r"inspect\.json|tables\.tex|step_\{.*|\.lock|uncommitted_\S*|(example_)?\{\S*\.png"
)


def test_each_file_name_is_spelled_in_one_module():
    """Docstrings and messages may name files."""
    places = {}
    for path in (ROOT / "lightning_tfm").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and re.fullmatch(rf"(\S*/)?({NAMES})", str(node.value)):
                places.setdefault(path.relative_to(ROOT / "lightning_tfm").as_posix(), set()).add(node.value)
    # Two others lock files of their own: a download, and the folder of a sweep.
    assert places.keys() == {"runs/record.py", "data/download.py", "commands/sweep.py"}
    names = {value for name, value in vars(Run).items() if name.isupper()}
    assert names <= places["runs/record.py"]


def test_a_new_folder_holds_nothing(tmp_path):
    run = Run(tmp_path)
    assert (run.starts, run.predictions, run.examples, run.metrics(), run.checkpoints()) == ([], [], [], [], [])
    assert (run.best(), run.checkpoint(Run.BEST, Run.LAST), run.state) == (None, None, "interrupted")
    assert run.is_empty
    assert run.inspection is None
    assert run.attention_history is None
    with pytest.raises(UserError, match="must have finished"):
        run.summary  # noqa: B018


@pytest.mark.parametrize(
    ("metrics", "headline"),
    [
        ({"test": {"loss": 0.5, "exact_match": 1.0}}, ("test/exact_match", 1.0)),
        ({"val": {"loss": 0.5}}, ("val/loss", 0.5)),
        ({"test": {"f1": 0.5}}, None),
    ],
)
def test_the_headline_is_the_first_metric_by_priority(metrics, headline):
    assert Summary(**metrics, steps=1, parameters=1, seed=1).headline == headline


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        (Run.SUMMARY, "{", "Invalid JSON"),
        (Run.SUMMARY, "[" * 10_000, "Invalid JSON"),
        (Run.SUMMARY, "[]", "object"),
        (Run.SUMMARY, {**SUMMARY, "test": {"loss": "low"}}, "test.loss: .*number"),
        (Run.SUMMARY, {**SUMMARY, "seed": None}, "seed: .*integer"),
        (Run.SUMMARY, {"test": {}}, "steps: .*required"),
        (Run.PROVENANCE, "{}", "array"),
        (Run.PROVENANCE, [{**START, "hardware": {}}], "0.hardware.system: .*required"),
        (Run.PROVENANCE, [{**START, "step": "0"}], "0.step: .*integer"),
        (Run.PROVENANCE, [{**START, "time": "yesterday"}], "0.time: .*datetime"),
        (Run.PREDICTIONS, json.dumps(PREDICTION) + "\n{}\n", "1.source: .*required"),
        (Run.PREDICTIONS, json.dumps({**PREDICTION, "source": 1}) + "\n", "0.source: .*string"),
        ("attention/examples.json", "3", "array"),
        ("attention/history.json", {"steps": [0]}, "examples: .*required"),
        (Run.PREDICTIONS, b"\xff\n", "Invalid JSON"),
    ],
)
def test_a_damaged_file_is_refused_by_name(name, content, problem, tmp_path):
    if not isinstance(content, bytes):
        content = (content if isinstance(content, str) else json.dumps(content)).encode()
    write_text(tmp_path / name, "")
    (tmp_path / name).write_bytes(content)
    read = {
        Run.SUMMARY: lambda run: run.summary,
        Run.PROVENANCE: lambda run: run.starts,
        Run.PREDICTIONS: lambda run: run.predictions,
        "attention/examples.json": lambda run: run.examples,
        "attention/history.json": lambda run: run.attention_history,
    }[name]
    with pytest.raises(DamagedError, match=rf"{re.escape(name)}' .* is damaged: .*{problem}"):
        read(Run(tmp_path))


def test_another_version_of_the_format_is_refused(tmp_path):
    (tmp_path / Run.PROVENANCE).write_text(json.dumps([{"format": FORMAT + 1, "renamed": 1}]))
    with pytest.raises(
        UserError, match=f"must have version {FORMAT} of the format of a run, but has version {FORMAT + 1}"
    ):
        Run(tmp_path).starts  # noqa: B018


def test_a_folder_in_place_of_a_file_is_refused_by_name(tmp_path):
    (tmp_path / Run.PROVENANCE).mkdir()
    with pytest.raises(UserError, match=f"{Run.PROVENANCE}' must be a file that can be read, but is not: Is a dir"):
        Run(tmp_path).starts  # noqa: B018
    assert Run(tmp_path).wandb_id is None


def test_the_runs_below_a_folder_exclude_those_of_wandb(tmp_path):
    parent = tmp_path / "wandb"  # a folder above them does not count
    for name in ("version_1", "version_0", "wandb/run-1/files"):
        (parent / name).mkdir(parents=True)
        (parent / name / Run.CONFIG).touch()
    assert Run.below(parent) == [Run(parent / "version_0"), Run(parent / "version_1")]
    assert Run.below(parent / "version_0") == [Run(parent / "version_0")]


def test_only_the_checkpoints_of_fit_are_listed(tmp_path):
    run = Run(tmp_path)
    run.checkpoint_folder.mkdir()
    for name in ("best.ckpt", "step_12.ckpt", "step_012.ckpt", "last.ckpt.part", "other.ckpt"):
        (run.checkpoint_folder / name).touch()
    assert {path.name for path in run.checkpoints()} == {"best.ckpt", "step_12.ckpt"}
    assert run.checkpoint(Run.LAST, Run.BEST) == run.checkpoint_folder / Run.BEST
    assert Run.of(run.checkpoint_folder / Run.BEST) == run
