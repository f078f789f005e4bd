"""`lightning-tfm reproduce`, on experiments that take a second; and what the README says of the real ones."""

from __future__ import annotations

import json
import math
import re
import time
from pathlib import Path

import pytest

from lightning_tfm.commands.reproduce import Claim, Experiment, Run, _logged, compared, read_experiment
from runs import EXPERIMENTS, SETTINGS, run, start

README = Path(__file__).parent.parent / "README.md"
YAMLS = [path for path in sorted(EXPERIMENTS.glob("*.yaml")) if "# claims:" in path.read_text()]


@pytest.fixture
def project(tmp_path):
    """A folder with two short experiments: what one claims holds, and one of two claims of the other."""
    (tmp_path / "experiments").mkdir()
    for model, claims in (
        ("gpt", [("test/exact_match", 0.0, 0.1)]),
        ("attention_lstm", [("test/exact_match", 0.9, 0.1), ("test/loss", 2.0, 2.0)]),
    ):
        lines = (EXPERIMENTS / f"copy_{model}.yaml").read_text().splitlines()
        lines = [line for line in lines if not line.startswith("#")]
        for name, value in SETTINGS.items():
            key = name.rpartition(".")[2]
            if name.startswith("data.init_args") and key != "batch_size":
                lines.append(f"    {key}: {value}")
            else:
                lines = [re.sub(rf"\b{key}: .*", f"{key}: {value}", line) for line in lines]
        header = ["# Short.", "#", "# claims:"]
        header += [f"# - {{metric: {metric}, value: {value}, tolerance: {by}}}" for metric, value, by in claims]
        header.append("# training: {seconds: 2, machine: any}")
        (tmp_path / f"experiments/copy_{model}.yaml").write_text("\n".join([*header, *lines]) + "\n")
    return tmp_path


def cells(markdown):
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in markdown.splitlines() if line.startswith("|")]


def test_claims_are_compared_and_written_down(project):
    child = run("reproduce", "--seeds", "2", cwd=project)
    assert child.wait() == 1, child.err.read_text()
    content = json.loads((project / "runs/reproduce/reproduce.json").read_text())
    rows = {(e["name"], c["metric"]): c for e in content["experiments"] for c in e["claims"]}
    assert {key: row["holds"] for key, row in rows.items()} == {
        ("copy_attention_lstm", "test/exact_match"): False,
        ("copy_attention_lstm", "test/loss"): True,
        ("copy_gpt", "test/exact_match"): True,
    }
    for experiment in content["experiments"]:
        for seed, one in enumerate(experiment["runs"], start=1):
            (path,) = (project / f"runs/reproduce/{experiment['name']}/seed_{seed}").glob("runs/*/*/summary.json")
            assert one == {"seed": seed, "summary": json.loads(path.read_text()), "failure": None}
            assert one["summary"]["seed"] == seed
    markdown = (project / "runs/reproduce/RESULTS.md").read_text()
    results = {(row[0], row[1]): row[6] for row in cells(markdown)[2:]}
    assert results == {
        ("`copy_attention_lstm`", "test/exact_match"): "FAIL",
        ("", "test/loss"): "PASS",
        ("`copy_gpt`", "test/exact_match"): "PASS",
    }
    printed = child.out.read_text()
    assert cells(printed) == cells(markdown)
    assert printed.splitlines()[-1] == "2 of 3 claims hold; written: runs/reproduce/RESULTS.md"
    assert len(child.err.read_text().splitlines()) == 4, "a line a run"


def test_an_interrupted_reproduction_goes_on_where_it_was(project):
    arguments = ("reproduce", "copy_gpt", "experiments/copy_attention_lstm.yaml", "--seeds", "1", "--output", "out")
    child = start(*arguments, cwd=project)
    while not list((project / "out").glob("copy_attention_lstm/seed_1/runs/*/*/checkpoints/last.ckpt")):
        assert child.process.is_alive(), child.err.read_text()
        time.sleep(0.02)
    child.process.terminate()
    assert child.wait() == 143
    assert child.err.read_text().splitlines()[-2:] == [
        "lightning-tfm: ended by SIGTERM; go on with:",
        f"  lightning-tfm {' '.join(arguments)}",
    ]
    (first,) = (project / "out").glob("copy_gpt/seed_1/runs/*/*/summary.json")
    written = first.stat().st_mtime_ns

    child = run(*arguments, cwd=project)
    assert child.wait() == 1, child.err.read_text()
    assert first.stat().st_mtime_ns == written, "what was finished is not run again"
    (starts,) = (project / "out").glob("copy_attention_lstm/seed_1/runs/*/*/provenance.json")
    first_step, *later = (begun["step"] for begun in json.loads(starts.read_text()))
    assert first_step == 0
    assert all(step >= 5 for step in later)
    assert len(list((project / "out").glob("*/seed_*/runs/*/*/summary.json"))) == 2


def test_a_run_that_fails_is_a_claim_that_does_not_hold(project):
    path = project / "experiments/copy_gpt.yaml"
    path.write_text(re.sub("learning_rate: .*", "learning_rate: 1e30", path.read_text()))
    child = run("reproduce", "copy_gpt", "--seeds=1", cwd=project)
    assert child.wait() == 1
    assert "FAILED: lightning-tfm: error: loss and gradients must be finite" in child.err.read_text()
    assert "0 of 1 claims hold" in child.out.read_text()


def test_runs_of_another_state_are_not_mixed_in(project):
    assert run("reproduce", "copy_gpt", "--seeds=1", cwd=project).wait() == 0
    path = project / "experiments/copy_gpt.yaml"
    path.write_text(path.read_text() + "\n# changed\n")
    child = run("reproduce", "copy_gpt", "--seeds=1", cwd=project)
    assert child.wait() == 2
    assert "of the same yaml, but 'runs/reproduce/copy_gpt/seed_1' is of another" in child.err.read_text()
    assert run("reproduce", "copy_gpt", "--seeds=1", "--output=other", cwd=project).wait() == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none"], "there is no 'experiments/none.yaml'"),
        (["--seeds", "0"], "--seeds must be from 1 to 31, but is 0"),
        (["--seeds", "many"], "--seeds"),
        (["copy_gpt", "experiments/copy_gpt.yaml"], "NAME must name each experiment once"),
        (["unclaimed.yaml"], "the header of 'unclaimed.yaml' must claim what the experiment reaches"),
    ],
)
def test_a_mistake_is_named_in_one_line(arguments, message, project):
    (project / "unclaimed.yaml").write_text("# claims:\n# - nothing\nseed_everything: 1\n")
    child = run("reproduce", *arguments, cwd=project)
    assert child.wait() == 2
    (line,) = child.err.read_text().splitlines()
    assert message in line
    assert not (project / "runs").exists()


def test_without_experiments_it_says_where_to_go(tmp_path):
    child = run("reproduce", cwd=tmp_path)
    assert child.wait() == 2
    assert "there is no experiments/*.yaml below the current folder" in child.err.read_text()


def test_the_bar_says_what_a_run_has_logged_last(tmp_path):
    folder = tmp_path / "runs/copy_gpt/version_0"
    folder.mkdir(parents=True)
    assert _logged(tmp_path) == ""
    lines = ["step,train/loss,tokens_per_second,val/loss", "49,2.5,,", "49,,12345.6,", "99,1.25,,", "99,,,0.75"]
    (folder / "metrics.csv").write_text("\n".join([*lines, "149,1.1,9"]))  # the last one is being written
    assert _logged(tmp_path) == "step 99, 12,346 tokens/s, val/loss 0.75"


def experiment(value, tolerance):
    return Experiment(Path("x.yaml"), "", (Claim("test/exact_match", value, tolerance),), 1.0, "any")


def runs(*values):
    return [Run(seed, {"test": {"exact_match": value}}) for seed, value in enumerate(values, start=1)]


def test_the_interval_is_students():
    """Against the textbook's t of 2 and of 9 degrees of freedom."""
    (row,) = compared(experiment(2.0, 0.5), runs(1.0, 2.0, 3.0))
    assert (row["mean"], row["holds"]) == (2.0, True)
    assert row["high"] - row["mean"] == pytest.approx(4.302653 / math.sqrt(3), rel=1e-3)
    (row,) = compared(experiment(0.0, 0.5), runs(*range(10)))
    assert row["mean"] - row["low"] == pytest.approx(2.262157 * 3.027650 / math.sqrt(10), rel=1e-3)
    assert not row["holds"]
    (row,) = compared(experiment(1.0, 0.0), runs(1.0))
    assert (row["low"], row["high"], row["holds"]) == (None, None, True)
    (row,) = compared(experiment(1.0, 1.0), [*runs(1.0), Run(2, None, "failed")])
    assert (row["mean"], row["holds"]) == (None, False)


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: path.stem)
def test_the_readme_shows_what_the_yaml_claims(path):
    """The README's table is the command's output: all claims, each held."""
    name, rows = None, {}
    for row in cells(README.read_text()):
        if len(row) == 10:
            name = row[0] or name
            rows[name.strip("`"), row[1]] = row
    for claim in read_experiment(path).claims:
        row = rows[path.stem, claim.metric]
        value, tolerance = map(float, row[2].split(" ± "))
        assert (value, tolerance) == (pytest.approx(claim.value), pytest.approx(claim.tolerance))
        values = [float(value) for value in row[5].split(", ")]
        assert sum(values) / len(values) == pytest.approx(
            float(row[3]), abs=1e-4 if claim.value < 10 else 1e-2
        )  # as rounded
        assert abs(float(row[3]) - claim.value) <= claim.tolerance + 1e-9  # as `compared` has it
        assert row[6] == "PASS"
