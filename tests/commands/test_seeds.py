"""`lightning-tfm fit --seeds`: ordinary runs, one per seed, in child processes."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import yaml

from lightning_tfm.commands.seeds import SeededRuns, parse_seeds
from lightning_tfm.errors import UserError
from lightning_tfm.fit.cli import SettingsCLI
from lightning_tfm.fit.cli import run as run_cli
from lightning_tfm.runs.children import ChildRun, run_children
from lightning_tfm.runs.record import Run
from support.experiments import fit
from support.processes import run, start

FOLDER = "runs/copy_gpt"


def seeded(*options, **settings):
    return fit("gpt", *options, **settings)


def summaries(cwd):
    """Return the summary of each run by seed, without its times."""
    contents = [json.loads(path.read_text()) for path in sorted(cwd.glob(f"{FOLDER}/version_*/summary.json"))]
    return {
        content["seed"]: {k: v for k, v in content.items() if k not in ("train_seconds", "samples_per_second")}
        for content in contents
    }


def alone(cwd, seed):
    """Return the summary of a run of one seed."""
    (cwd / "alone").mkdir()
    run(*seeded(f"--seed_everything={seed}"), cwd=cwd / "alone").finish()
    return summaries(cwd / "alone")[seed]


@pytest.mark.run
def test_seeds_are_ordinary_runs(tmp_path):
    child = run(*seeded("--seeds", "4,7", "--jobs=2"), cwd=tmp_path, forks=True).finish()
    runs = summaries(tmp_path)
    assert sorted(runs) == [4, 7]
    assert runs[7] == alone(tmp_path, 7)
    lines = child.out.read_text().splitlines()
    assert sorted(line.split(":")[0] for line in lines[:2]) == ["seed 4", "seed 7"]
    assert lines[-1] == f"  lightning-tfm compare {FOLDER}"
    assert "copy_gpt" in run("compare", FOLDER, cwd=tmp_path).finish().out.read_text()


@pytest.mark.run
def test_interrupted_seeds_are_resumed(tmp_path):
    arguments = seeded("--seeds=4..5")
    child = start(*arguments, cwd=tmp_path, forks=True)
    child.wait_until((tmp_path / FOLDER / "version_1/checkpoints/last.ckpt").exists)
    child.process.terminate()
    assert child.wait() == 143
    *_, line, command = child.err.read_text().splitlines()
    assert line == "lightning-tfm: interrupted by SIGTERM; resume with:"
    assert command.endswith(" --seeds=4..5 --ckpt_path last")
    written = (tmp_path / FOLDER / "version_0/summary.json").stat().st_mtime_ns

    child = run(*arguments, "--ckpt_path", "last", cwd=tmp_path, forks=True).finish()
    assert "seed 4: finished before, runs/copy_gpt/version_0\n" in child.out.read_text()
    assert (tmp_path / FOLDER / "version_0/summary.json").stat().st_mtime_ns == written
    assert len(list((tmp_path / FOLDER).glob("version_*"))) == 2
    assert summaries(tmp_path)[5] == alone(tmp_path, 5)


@pytest.mark.run
def test_surviving_runs_are_awaited(tmp_path):
    arguments = seeded("--seeds=4..5", **{"trainer.max_steps": 300})
    child = start(*arguments, cwd=tmp_path, forks=True)
    child.wait_until((tmp_path / FOLDER / "version_0/checkpoints/last.ckpt").exists)
    child.process.kill()
    assert child.wait() == -9
    child = run(*arguments, "--ckpt_path", "last", cwd=tmp_path, forks=True).finish()
    assert "seed 4: finished before, runs/copy_gpt/version_0\n" in child.out.read_text()
    assert sorted(summaries(tmp_path)) == [4, 5]


@pytest.mark.run
def test_failed_seed_does_not_stop_others(tmp_path):
    child = run(*seeded("--seeds=4..5", "--model.optimizer.lr=1e30"), cwd=tmp_path)
    assert child.wait() == 1
    lines = child.out.read_text().splitlines()
    for seed, line in zip((4, 5), lines, strict=False):
        assert line.startswith(f"seed {seed}: FAILED: loss and gradients must be finite")
        assert line.endswith(f"({FOLDER}/seed_{seed}.log)")
    assert lines[3].startswith("0 of 2 seeds have finished")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seeds=many"], "--seeds must be 1 to 1000 different numbers below 4294967296, such as 7, 1..5 or 1,4,9"),
        (["--seeds=1..2", "--jobs=0"], "--jobs must be at least 1, but is 0; try 1"),
        (["--seeds=1..2", "--seed_everything=3"], "--seed_everything must not be given with --seeds"),
        (["--seeds=1..2", "--dry-run"], "--dry-run must not be given with --seeds"),
        (["--seeds=1..2", "--ckpt_path=x.ckpt"], "argument --ckpt_path: invalid choice: 'x.ckpt'"),
        (["--seeds=1..2", "--trainer.logger=false"], "trainer.logger must not be false with several seeds"),
        (["--seeds=1..2", "--model.network.d_model=17"], "d_model must be divisible by num_heads (2), but is 17"),
        (["--seeds=1..2", "--trainer.max_stepz=3"], "there is no setting 'trainer.max_stepz'; did you mean"),
    ],
)
def test_errors_precede_runs(options, message, mistake):
    assert message in mistake(*seeded(*options))
    assert not Path("runs").exists()


@pytest.mark.parametrize("variable", ["WORLD_SIZE", "SLURM_NTASKS"])
def test_seeds_need_one_process(variable, monkeypatch, mistake):
    monkeypatch.setenv(variable, "2")
    assert "--seeds must be used in one process" in mistake(*seeded("--seeds=1..2"))


def test_newest_run_of_each_seed(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lightning_tfm.fit.cli.handle_signals", lambda handler: None)
    runs = SeededRuns([*map(str, seeded("--data.init_args.batch_size=15")[1:])])
    for number, (seed, batch_size) in enumerate([(1, 15), (2, 15), (1, 15), (3, 16)]):
        settings = [f"--seed_everything={seed}", f"--data.init_args.batch_size={batch_size}"]
        cli = run_cli(["fit", *map(str, seeded(*settings)[1:])], SettingsCLI)
        path = Path(f"{FOLDER}/version_{number}/config.yaml")
        path.parent.mkdir(parents=True)
        path.write_text(yaml.safe_dump(cli.settings()))
    Path(f"{FOLDER}/version_9").mkdir()
    Path(f"{FOLDER}/version_9/config.yaml").write_text("{")
    with monkeypatch.context() as patch:  # a run is deleted after it was listed
        listed = [*runs.folder.glob("version_*/config.yaml"), runs.folder / "version_10/config.yaml"]
        patch.setattr(Path, "glob", lambda self, pattern: listed)
        assert runs.newest() == {1: Run(Path(FOLDER, "version_2")), 2: Run(Path(FOLDER, "version_1"))}
    # The folder of a run without results is deleted, and its name is used again.
    path = Path(f"{FOLDER}/version_2/config.yaml")
    path.write_text(path.read_text().replace("seed_everything: 1", "seed_everything: 4"))
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    expected = {seed: Run(Path(FOLDER, f"version_{number}")) for seed, number in ((1, 0), (2, 1), (4, 2))}
    assert runs.newest() == expected


@pytest.mark.parametrize(
    ("text", "seeds"),
    [("7", [7]), ("1..3", [1, 2, 3]), ("1, 4 ,9", [1, 4, 9]), ("5..5,1..2", [5, 1, 2]), ("1..1000", [*range(1, 1001)])],
)
def test_parse_seeds(text, seeds):
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize(
    "text",
    ["", "many", "1,1", "1..2,2", "3..1", "1..2..3", "-1", "1.5", "4294967296", "1..1001", "0..99999999999", "1,"],
)
def test_invalid_seeds(text):
    with pytest.raises(UserError, match=f"--seeds must be .*, but is {re.escape(repr(text))}; try 1..5"):
        parse_seeds(text)


def test_exception_terminates_child_runs(tmp_path):
    def stop(children):
        raise KeyboardInterrupt

    started = []

    def begin():
        started.append(ChildRun(["--help"], tmp_path / "logs/log"))
        return started[-1]

    with pytest.raises(KeyboardInterrupt):
        run_children([begin, begin], watch=stop)
    assert len(started) == 1
    assert not started[0].is_running


def test_last_line_of_log(tmp_path):
    (tmp_path / "log").write_text("an earlier run\n")
    (child,) = run_children([lambda: ChildRun(["x\x1b"], tmp_path / "log")])
    assert child.process.returncode == 2
    assert child.last_line.startswith(r"'x\x1b' must be a YAML file")
    assert (tmp_path / "log").read_text().startswith("an earlier run\n")
