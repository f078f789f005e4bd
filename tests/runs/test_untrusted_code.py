"""Code that a checkpoint or a YAML file names, and that is not run."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_tfm.checkpoint import read, write
from support.experiments import fit, folder
from support.faults import PLANTED
from support.processes import EXPERIMENTS, run

pytestmark = pytest.mark.run


class Malicious:
    def __reduce__(self):
        return (Path.touch, (Path("canary"),))


@pytest.fixture(scope="module")
def trained(reference):
    return folder(reference("gpt"), "gpt") / "checkpoints/best.ckpt"


def checkpoints_with_code(trained):
    """Return checkpoints with a valid checksum that name code."""
    content = read(trained)
    settings = content["hyper_parameters"]
    network = settings["network"]
    classes = ("planted.Evil", "os.system", "pathlib.Path", "lightning_tfm.checkpoint.write")
    changes = [{"network": network | {"class_path": path}} for path in classes]
    changes.append({"network": network | {"init_args": network["init_args"] | {"d_model": {"class_path": classes[0]}}}})
    changes.append({"_class_path": classes[0]})
    return [
        content | {"extra": Malicious()},
        *(content | {"hyper_parameters": settings | change} for change in changes),
    ]


@pytest.mark.parametrize("command", ["generate", "test", "fit"])
@pytest.mark.parametrize("case", range(7))
def test_a_checkpoint_executes_no_code(case, command, trained, tmp_path):
    (tmp_path / "planted.py").write_text(PLANTED)
    write(checkpoints_with_code(trained)[case], tmp_path / "evil.ckpt")
    arguments = fit("gpt", "--ckpt_path=evil.ckpt")[1:] if command != "generate" else ("evil.ckpt", "1 2")
    run(command, *arguments, cwd=tmp_path).refuse("")
    assert not (tmp_path / "canary").exists()


NETWORK = "model: {class_path: lightning_tfm.tasks.Seq2SeqModule, init_args: {network: %s}}"
LOGGER = "{class_path: lightning_tfm.loggers.WandbLogger, init_args: {experiment: {class_path: planted.Evil}}}"
NAMED = {
    "data": "data: planted.Evil",
    "data.class_path": "data: {class_path: planted.Evil}",
    "model": "model: planted.Evil",
    "network": NETWORK % "planted.Evil",
    "network.class_path": NETWORK % "{class_path: planted.Evil}",
    "a callback": "trainer: {callbacks: [{class_path: planted.Evil}]}",
    "a logger": "trainer: {logger: [{class_path: planted.Evil}]}",
    "a function": "trainer: {callbacks: [{class_path: os.system}]}",
    "a plugin": "trainer: {plugins: [{class_path: planted.Evil}]}",
    "an argument": "trainer: {max_steps: {class_path: planted.Evil}}",
    "an argument of any type": f"trainer: {{logger: [{LOGGER}]}}",
    "the text of an error as a value": "trainer: {max_steps: \"module 'planted' has no attribute 'x'\"}",
    "the text of another error as a value": (
        "trainer: {max_steps: \"Problem with given class_path 'planted.Evil': does not accept option 'x'\"}"
    ),
    "a Python tag": "data: !!python/object/apply:os.system ['touch canary']",
    "trust_package in the YAML": "trust_package: planted\ndata: planted.Evil",
}


@pytest.mark.parametrize("case", NAMED)
def test_a_yaml_imports_no_untrusted_code(case, tmp_path):
    (tmp_path / "planted.py").write_text(PLANTED)
    (tmp_path / "evil.yaml").write_text(NAMED[case])
    run("fit", "--config", EXPERIMENTS / "copy_gpt.yaml", "--config", "evil.yaml", cwd=tmp_path).refuse("")
    assert not (tmp_path / "canary").exists()


def test_trusted_packages_are_imported(tmp_path):
    (tmp_path / "planted.py").write_text(PLANTED)
    run(*fit("gpt", "--data=planted.Evil", "--trust-package=planted"), cwd=tmp_path).refuse(
        ""
    )  # Evil is not a data module
    assert (tmp_path / "canary").exists(), "the tests above look for this file"
    (tmp_path / "mine.py").write_text("import datamodules\nclass Mine(datamodules.Copy):\n    pass\n")
    for count, option in enumerate(("--trust-package=mine", "--trust-package=other,mine")):
        run(*fit("gpt", "--data=mine.Mine", option), cwd=tmp_path).finish()
        assert len(list((tmp_path / "runs/copy_gpt").iterdir())) == count + 1
