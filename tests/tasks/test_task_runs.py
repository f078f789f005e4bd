"""Runs of all tasks: killed, of two processes and averaged."""

import re

import pytest
import yaml

from lightning_tfm.checkpoint import read
from lightning_tfm.runs.record import Run
from support.corpora import write_lines
from support.equality import assert_same_files, contents
from support.experiments import write_task
from support.processes import run

pytestmark = pytest.mark.run


def test_a_killed_run_resumes_bitwise(task, trained, tmp_path):
    path = trained.parents[2] / f"{task}.yaml"
    arguments = ("fit", "--config", path, "--ckpt_path=last")
    for call in (7, 23):
        run(*arguments, cwd=tmp_path, fault=("before an update of the weights", call)).die()
    run(*arguments, cwd=tmp_path).finish()
    assert_same_files(tmp_path / f"runs/{task}/version_0", trained)


def test_a_checkpoint_is_tested_in_a_folder_of_its_own(task, trained, tmp_path):
    """Evaluate without a YAML, and leave the run unchanged."""
    before = contents(trained)
    for command, split in (("test", "test"), ("validate", "val"), ("test", "test")):
        child = run(command, trained / "checkpoints/best.ckpt", cwd=tmp_path).finish()
        printed = child.out.read_text()
        folder = max(tmp_path.glob(f"runs/{task}/{command}_*"))
        summary = Run(folder).summary
        assert summary.checkpoint == str(trained / "checkpoints/best.ckpt")
        for name, value in getattr(summary, split).items():
            assert re.search(rf"^ *{name} +{value:.4f} *$", printed, re.MULTILINE)
        for name, signature in summary.signatures.items():
            assert f"{name}: {signature}\n" in printed
        assert f"The results are saved in {folder.relative_to(tmp_path)}.\n" in printed
        (start,) = Run(folder).starts
        assert start["checkpoint"] == summary.checkpoint
        assert (start["step"], start["changed_settings"]) == (summary.steps, {})
        if command == "test":
            assert summary.test == Run(trained).summary.test
            if (trained / "predictions.jsonl").exists():
                assert (folder / "predictions.jsonl").read_bytes() == (trained / "predictions.jsonl").read_bytes()
        elif (trained / "predictions.jsonl").exists():
            assert {line["split"] for line in Run(folder).predictions} == {"val"}
    assert {path.name for path in tmp_path.glob(f"runs/{task}/*")} == {"test_0", "validate_0", "test_1"}
    assert contents(trained) == before
    child = run("runs", cwd=tmp_path)
    assert child.out.read_text().count("evaluated") == 3


@pytest.mark.parametrize("task", ["translation_transformer", "spelling_gpt", "text_gpt", "reviews_classifier"])
def test_sources_that_also_occur_in_training_are_counted(task, tmp_path):
    path = write_task(task, tmp_path)
    config = yaml.safe_load(path.read_text())
    settings = config["data"]["init_args"]
    if "path" in settings:
        settings["path"] = write_lines(tmp_path / "lines.txt", 20 * ["the same long line, again and again, and again"])
    else:
        settings["val"] = settings["train"]
    path.write_text(yaml.safe_dump(config))
    child = run("fit", "--config", path, "--trainer.max_steps=1", cwd=tmp_path).finish()
    counts = re.search(r"([\d,]+) of ([\d,]+) \w+ of val also occur in train", child.err.read_text())
    assert counts[1] == counts[2] or (task.startswith("reviews") and int(counts[1]) > 100)  # some are held out of train


def test_averaged_weights_are_saved_and_tested(tmp_path):
    path = write_task("reviews_classifier", tmp_path)
    averaging = "--trainer.callbacks+={class_path: lightning_tfm.callbacks.WeightAveraging, init_args: {decay: 0.8}}"
    run("fit", "--config", path, averaging, "--trainer.max_steps=10", cwd=tmp_path).finish()
    trained = Run(tmp_path / "runs/reviews_classifier/version_0")
    last = read(trained.checkpoint_folder / Run.LAST)
    assert any(not weight.equal(last["current_model_state"][name]) for name, weight in last["state_dict"].items())
    child = run("test", "--config", path, "--ckpt_path", trained.checkpoint_folder / Run.BEST, cwd=tmp_path).finish()
    printed = float(re.search(r"^ *accuracy +([\d.]+)", child.out.read_text(), re.MULTILINE)[1])
    assert printed == pytest.approx(trained.summary.test["accuracy"], abs=1e-4), "the average is tested"


def test_adding_or_removing_weight_averaging_is_refused_on_resuming(tmp_path, command):
    """The state of the optimizer would belong to other weights."""
    path = write_task("spelling_gpt", tmp_path)
    averaging = "--trainer.callbacks+=lightning_tfm.callbacks.WeightAveraging"
    arguments = ["fit", "--config", path, "--trainer.max_steps=2"]
    for version, (before, now, message) in enumerate(
        (
            ([], [averaging], "must not contain WeightAveraging to resume from '.*', which was trained without it"),
            ([averaging], [], "must contain WeightAveraging to resume from '.*', which was trained with it"),
        )
    ):
        run(*arguments, *before, cwd=tmp_path).finish()
        last = f"--ckpt_path=runs/spelling_gpt/version_{version}/checkpoints/last.ckpt"
        assert re.search(message, command(*arguments, *now, last, status=2).err)
