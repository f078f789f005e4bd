"""Code that a checkpoint or a YAML file names, and that is not run."""

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


@pytest.fixture
def refuse(command, monkeypatch, tmp_path):
    """Return a function that runs a command, which must be refused and not run the planted code."""
    (tmp_path / "planted.py").write_text(PLANTED)
    monkeypatch.syspath_prepend(tmp_path)

    def refuse(*arguments):
        error = command(*arguments, status=2).err
        assert error.splitlines()[-1].startswith("lightning-tfm: error: ")
        assert "Traceback" not in error
        assert not (tmp_path / "canary").exists()
        return error

    return refuse


@pytest.mark.parametrize("name", ["generate", "test", "fit"])
@pytest.mark.parametrize("case", range(7))
def test_a_checkpoint_executes_no_code(case, name, trained, refuse):
    write(checkpoints_with_code(trained)[case], "evil.ckpt")
    refuse(name, *(("evil.ckpt", "1 2") if name == "generate" else fit("gpt", "--ckpt_path=evil.ckpt")[1:]))


NETWORK = "model: {class_path: lightning_tfm.tasks.Seq2SeqModule, init_args: {network: %s}}"
LOGGER = "{class_path: lightning_tfm.loggers.WandbLogger, init_args: {experiment: {class_path: planted.Evil}}}"
NAMED = {
    "data": "data: planted.Evil",
    "model": "model: planted.Evil",
    "network": NETWORK % "planted.Evil",
    "a function": "trainer: {callbacks: [{class_path: os.system}]}",
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
def test_a_yaml_imports_no_untrusted_code(case, refuse):
    Path("evil.yaml").write_text(NAMED[case])
    refuse("fit", "--config", EXPERIMENTS / "copy_gpt.yaml", "--config", "evil.yaml")


@pytest.mark.parametrize("setting", ["data", "trainer.callbacks", "model.init_args.network"])
def test_the_command_line_imports_no_untrusted_code(setting, refuse):
    assert "--trust-package planted" in refuse(*fit("gpt", f"--{setting}=planted.Evil"))


def test_trusted_packages_are_imported(tmp_path):
    (tmp_path / "planted.py").write_text(PLANTED)
    run(*fit("gpt", "--data=planted.Evil", "--trust-package=planted"), cwd=tmp_path).refuse("Evil")  # not a data module
    assert (tmp_path / "canary").exists(), "the tests above look for this file"
    (tmp_path / "mine.py").write_text("import datamodules\nclass Mine(datamodules.Copy):\n    pass\n")
    for option in ("--trust-package=mine", "--trust-package=other,mine"):
        settings = {"trainer.max_steps": 1}
        run(*fit("gpt", "--data=mine.Mine", "--dry-run", option, **settings), cwd=tmp_path).finish()
