"""Power losses at any moment of a run."""

import json
from collections import Counter
from io import BytesIO
from pathlib import Path

import pytest
import torch
import yaml

from lightning_tfm.checkpoint import read
from lightning_tfm.runs.record import Run
from support.equality import assert_same_files
from support.experiments import fit, folder
from support.power_loss import crashes, record, restore
from support.processes import run

pytestmark = pytest.mark.run


RUN = Path("runs/copy_gpt/version_0")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Return the folder of a short run, its arguments, and the distinct outcomes of a power loss in it.

    The outcomes in which all changes are lost are also returned, in their order.
    """
    whole = tmp_path_factory.mktemp("whole")
    settings = {"trainer.max_steps": 18, "trainer.val_check_interval": 7, "checkpoint.keep_last": 1}
    arguments = fit("gpt", "--ckpt_path=last", **settings)
    calls = record(*arguments, cwd=whole)
    lost, kept = (list(crashes(calls, whole.stat().st_ino, names_kept)) for names_kept in (False, True))
    outcomes = {frozenset((path, data) for path, (data, _) in files.items()): files for files in lost + kept}
    return whole, arguments, list(outcomes.values()), lost


def files_of(run):
    """Return the paths of the files of a run, relative to its folder, except those of a process that has ended."""
    paths = (path.relative_to(run) for path in run.rglob("*") if path.is_file())
    return {path for path in paths if path.suffix != ".part" and path.name != ".lock"}


def test_a_power_loss_damages_no_file_of_a_run(recorded, tmp_path):
    """Only the row of the last step can be lost, between its checkpoint and its row."""
    whole, _, outcomes, all_lost = recorded
    expected = Run(whole / RUN).read_rows()[0]
    lost_rows = Counter()
    for number, files in enumerate(outcomes):
        restore(files, tmp_path / str(number))
        run = tmp_path / str(number) / RUN
        paths = files_of(run)
        steps = [read(run / path)["global_step"] for path in paths if path.suffix == ".ckpt"]
        for path in paths:
            if path.suffix == ".yaml":
                assert yaml.safe_load((run / path).read_text()), path
            elif path.name == "history.json":  # replaced at each validation
                actual, earlier = (json.loads((root / path).read_text()) for root in (run, whole / RUN))
                kept = len(actual["steps"])
                earlier["steps"] = earlier["steps"][:kept]
                for layer in (layer for example in earlier["examples"] for layer in example["layers"]):
                    layer["weights"] = layer["weights"][:kept]
                assert actual == earlier
            elif path.suffix != ".ckpt" and path.name != "metrics.csv":
                assert (run / path).read_bytes() == (whole / RUN / path).read_bytes(), path
        rows, damaged = Run(run).read_rows() if Path("metrics.csv") in paths else ([], 0)
        assert damaged == 0
        logged = [{name: value for name, value in row.items() if value} for row in rows]
        before = [row for row in expected if int(row["step"]) < max(steps, default=0)]
        lost = [row for row in before if {name: value for name, value in row.items() if value} not in logged]
        assert [int(row["step"]) for row in lost] in ([], [max(steps, default=0) - 1])
        if Path("summary.json") in paths:
            assert paths == files_of(whole / RUN)
            assert rows == expected
        lost_rows[len(lost)] += 1
    print(f"{len(outcomes)} outcomes of a power loss; without one row: {lost_rows[1]}")
    saved = [
        [
            torch.load(BytesIO(data), weights_only=True)["global_step"]
            for path, (data, _) in files.items()
            if path.suffix == ".ckpt"
        ]
        for files in all_lost
    ]
    assert sorted({max(steps, default=0) for steps in saved}) == [0, 5, 7, 10, 14, 15, 18]
    restore(all_lost[-1], tmp_path / "end")
    assert files_of(tmp_path / "end" / RUN) == files_of(whole / RUN)


@pytest.mark.parametrize("every", [10, pytest.param(1, marks=pytest.mark.soak)])
def test_a_run_resumes_after_a_power_loss(every, recorded, tmp_path):
    whole, arguments, outcomes, _ = recorded
    for number, files in enumerate(outcomes[::every]):
        cwd = tmp_path / str(number)
        restore(files, cwd)
        has_finished = RUN / "summary.json" in files
        child = run(*arguments, cwd=cwd)
        assert child.wait() == (2 if has_finished else 0), child.err.read_text()
        assert "Traceback" not in child.err.read_text()
        assert_same_files(folder(cwd, "gpt"), whole / RUN, rows_lost=1)
    print(f"resumed after {number + 1} power losses")
