"""Code that a checkpoint or a YAML file names, and that is not run."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_tfm.checkpoint import read, write
from support.experiments import fit, folder
from support.faults import PLANTED
from support.processes import EXPERIMENTS, last_line, run

pytestmark = pytest.mark.run


class Malicious:
    def __reduce__(self):
        return (Path.touch, (Path("canary"),))


@pytest.fixture(scope="module")
def trained(reference):
    return folder(reference("gpt"), "gpt") / "checkpoints/best.ckpt"


def checkpoints_with_code(trained):
    """Yield checkpoints with a valid checksum that name code."""
    content = read(trained)
    yield "a pickle that calls", content | {"extra": Malicious()}
    for path in ("planted.Evil", "os.system", "pathlib.Path", "lightning_tfm.checkpoint.write"):
        hyper_parameters = content["hyper_parameters"]
        network = hyper_parameters["network"] | {"class_path": path}
        yield path, content | {"hyper_parameters": hyper_parameters | {"network": network}}
    arguments = content["hyper_parameters"]["network"]["init_args"]
    network = {
        "class_path": content["hyper_parameters"]["network"]["class_path"],
        "init_args": arguments | {"d_model": {"class_path": "planted.Evil"}},
    }
    yield "an argument", content | {"hyper_parameters": content["hyper_parameters"] | {"network": network}}
    yield (
        "a class of its own",
        content | {"hyper_parameters": content["hyper_parameters"] | {"_class_path": "planted.Evil"}},
    )


@pytest.mark.parametrize("command", ["generate", "test", "fit"])
@pytest.mark.parametrize("case", range(7))
def test_a_checkpoint_executes_no_code(case, command, trained, tmp_path):
    (tmp_path / "planted.py").write_text(PLANTED)
    name, content = list(checkpoints_with_code(trained))[case]
    write(content, tmp_path / "evil.ckpt")
    arguments = ("generate", "evil.ckpt", "1 2") if command == "generate" else fit("gpt", "--ckpt_path=evil.ckpt")
    if command == "test":
        arguments = ("test", *arguments[1:])
    child = run(*arguments, cwd=tmp_path)
    assert not (tmp_path / "canary").exists(), name
    assert child.wait() == 2, child.err.read_text()
    assert last_line(child).startswith("lightning-tfm: error: ")


NAMED = {
    "data": "data: planted.Evil",
    "data.class_path": "data:\n  class_path: planted.Evil",
    "model": "model: planted.Evil",
    "network": "model:\n  class_path: lightning_tfm.tasks.Seq2SeqModule\n  init_args:\n    network: planted.Evil",
    "network.class_path": "model:\n  class_path: lightning_tfm.tasks.Seq2SeqModule\n  init_args:\n"
    "    network:\n      class_path: planted.Evil",
    "a callback": "trainer:\n  callbacks:\n  - class_path: planted.Evil",
    "a logger": "trainer:\n  logger:\n  - class_path: planted.Evil",
    "a function": "trainer:\n  callbacks:\n  - class_path: os.system",
    "a plugin": "trainer:\n  plugins:\n  - class_path: planted.Evil",
    "an argument": "trainer:\n  max_steps:\n    class_path: planted.Evil",
    "an argument of any type": "trainer:\n  logger:\n  - class_path: lightning_tfm.loggers.WandbLogger\n"
    "    init_args:\n      experiment:\n        class_path: planted.Evil",
    "the text of an error as a value": """trainer:
  max_steps: "module 'planted' has no attribute 'x'"
""",
    "the text of another error as a value": """trainer:
  max_steps: "Problem with given class_path 'planted.Evil': does not accept option 'x'"
""",
    "a Python tag": "data: !!python/object/apply:os.system ['touch canary']",
    "trust_package in the YAML": "trust_package: planted\ndata: planted.Evil",
}


@pytest.mark.parametrize("case", NAMED)
def test_a_yaml_imports_no_untrusted_code(case, tmp_path):
    (tmp_path / "planted.py").write_text(PLANTED)
    (tmp_path / "evil.yaml").write_text(NAMED[case])
    child = run(
        *("fit", "--config", EXPERIMENTS / "copy_gpt.yaml", "--config", "evil.yaml"),
        cwd=tmp_path,
    )
    assert not (tmp_path / "canary").exists()
    assert child.wait() == 2, child.err.read_text()
    assert last_line(child).startswith("lightning-tfm: error: ")


def test_trusted_packages_are_imported(tmp_path):
    (tmp_path / "planted.py").write_text(PLANTED)
    child = run(*fit("gpt", "--data=planted.Evil", "--trust-package=planted"), cwd=tmp_path)
    assert child.wait() == 2, "Evil is not a data module"
    assert (tmp_path / "canary").exists(), "the tests above look for this file"
    (tmp_path / "mine.py").write_text("import datamodules\nclass Mine(datamodules.Copy):\n    pass\n")
    for count, option in enumerate(("--trust-package=mine", "--trust-package=other,mine")):
        run(*fit("gpt", "--data=mine.Mine", option), cwd=tmp_path).finish()
        assert len(list((tmp_path / "runs/copy_gpt").iterdir())) == count + 1
