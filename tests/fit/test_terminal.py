"""Commands in a terminal, in a pipe and with other encodings."""

import os
import pty
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lightning_tfm.runs.record import Run
from support.experiments import INPUTS, OUTPUTS, fit, trained_run
from support.processes import ENVIRONMENT, SCRIPT, in_terminal

pytestmark = pytest.mark.run


def test_the_commands_that_fit_prints_run(run_folder):
    user = run_folder.parents[2]
    generate, report, _, _, upload = map(shlex.split, (user / "stdout").read_text().splitlines()[-5:])
    assert (Path(upload[0]).name, upload[1]) == ("wandb", "sync")
    for command, expected in ((generate, Run(run_folder).predictions[0]["prediction"]), (report, "report.html")):
        child = subprocess.run(command, cwd=user, capture_output=True, text=True, timeout=120)
        assert child.returncode == 0, child.stderr
        assert child.stdout == f"{expected}\n"


@pytest.mark.parametrize("columns", [80, 110])
def test_a_terminal_shows_progress_bars(columns, checkpoint, tmp_path):
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "COLUMNS"}
    status, printed = in_terminal([SCRIPT, *map(str, fit("gpt"))], tmp_path, environment, columns)
    assert status == 0, printed
    bars = [line for line in re.split(r"[\r\n]|\x1b\[A", printed) if re.search(r"\d/\d+ \|", line)]
    assert max(map(len, bars)) < columns, "a longer line would break"
    for start in ("validation, batch 0/3 |", "test, batch 0/6 |", "drawing the attention of example 0/4 |"):
        assert any(line.startswith(start) for line in bars), start
    last = r"step 60/60 \|.*\| 00:00 left, loss \d\.\d{4}, best \d\.\d{4} val/loss"
    assert any(re.fullmatch(last, line) for line in bars), bars
    validated = re.findall(r"step (\d+)/60: loss \d\.\d{4}, val/loss \d\.\d{4}", printed)
    assert validated == ["12", "24", "36", "48", "60"], "the validations stay on the screen"
    assert "starting ..." in printed
    assert "generating train" in printed
    config = yaml.safe_load(next(tmp_path.glob("runs/*/version_0/config.yaml")).read_text())
    assert config["trainer"]["enable_progress_bar"] is None, "the setting does not depend on the terminal"
    assert "Epoch" not in printed
    (tmp_path / "input").write_text("May 3, 1979\n" * 600)
    files = ["--input", tmp_path / "input", "--output", tmp_path / "output"]
    status, printed = in_terminal([SCRIPT, "generate", checkpoint, *files], tmp_path, environment)
    assert status == 0, printed
    assert "processing" in printed
    assert "/600" in printed
    assert (tmp_path / "output").read_text() == "1979-05-03\n" * 600


def test_no_warning_about_workers_is_printed_on_many_cores(tmp_path):
    """Lightning would suggest more workers on many cores, but data in memory need none."""
    script = "import os, sys; os.sched_getaffinity = lambda pid: set(range(8)); os.cpu_count = lambda: 8; "
    script += "from lightning_tfm.__main__ import main; sys.exit(main())"
    command = [sys.executable, "-c", script, *map(str, fit("gpt", **{"trainer.max_steps": 3}))]
    child = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=200)
    assert (child.returncode, child.stderr) == (0, "")


def test_a_run_works_in_an_ascii_terminal(tmp_path):
    environment = ENVIRONMENT | {"PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "lightning_tfm", *map(str, fit("gpt"))]
    child = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=200)
    assert child.returncode == 0, child.stderr
    assert b"\\u2192" in child.stdout, "the arrow before a prediction"


def test_generate_ends_quietly_if_its_output_is_closed(checkpoint, tmp_path):
    (tmp_path / "input").write_text("31/12/1999\n" * 20_000)
    command = f"{SCRIPT} generate {checkpoint} --input input | head -n 1"
    run = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True)
    assert (run.stdout, run.stderr) == ("1999-12-31\n", "")


def test_generate_loses_no_output_in_an_ascii_terminal(tmp_path_factory, tmp_path):
    checkpoint = trained_run("translation_transformer", tmp_path_factory) / "checkpoints/best.ckpt"
    command = [sys.executable, "-m", "lightning_tfm", "generate", checkpoint, "--max-tokens", "9", "--temperature", "9"]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    run = subprocess.run([*command, *["der Hund"] * 40], cwd=tmp_path, env=environment, capture_output=True)
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.split(b"\n")) == 40 + 1
    assert b"\\u" in run.stdout or b"\\x" in run.stdout, "some sampled bytes are not ASCII"


def test_generate_as_a_module_reads_standard_input(checkpoint, tmp_path):
    text = "\n".join([INPUTS[0], "", "3 Mäy 1979", INPUTS[1], "   ", "x" * 3]) + "\n"
    command = [sys.executable, "-m", "lightning_tfm", "generate", checkpoint]
    run = subprocess.run(command, input=text, capture_output=True, cwd=tmp_path, encoding="utf-8")
    assert run.returncode == 1
    assert run.stdout.splitlines() == [OUTPUTS[0], "", "", OUTPUTS[1], "", ""]
    assert run.stderr.splitlines() == [
        "lightning-tfm: line 2: the text is empty",
        "lightning-tfm: line 3: the vocabulary has no character 'ä' (position 4 of '3 Mäy 1979')",
        "lightning-tfm: line 5: the text is empty",
        "lightning-tfm: line 6: the vocabulary has no character 'x' (position 1 of 'xxx')",
    ]


def test_generate_prompts_in_a_terminal(checkpoint, tmp_path):
    terminal, stream = pty.openpty()
    command = [SCRIPT, "generate", checkpoint]
    process = subprocess.Popen(command, cwd=tmp_path, stdin=stream, stdout=stream, stderr=stream)
    os.close(stream)
    printed = b""
    while b"> " not in printed:
        printed += os.read(terminal, 4096)
    os.write(terminal, b"31/12/1999\n\x04")
    while b"1999-12-31" not in printed:
        printed += os.read(terminal, 4096)
    assert process.wait(60) == 0
    assert b"Type a text and press Enter; Ctrl-D ends." in printed
