"""Runs of the command line in processes of their own, which a test may kill, and where it may choose the moment.

The processes are forked from a server that has imported everything and computed nothing, so each starts at once.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["lightning_tfm.cli", "datamodules", "wandb"])


@dataclass
class Child:
    process: BaseProcess
    out: Path
    err: Path

    def wait(self) -> int:
        """The exit status; negative for a signal."""
        self.process.join(300)
        assert self.process.exitcode is not None, "the process hangs"
        return self.process.exitcode


def start(*arguments: object, cwd: Path, sabotage: tuple[str, int] | None = None, **environment: str) -> Child:
    """Starts `lightning-tfm` with arguments, in a folder, with environment variables.

    `sabotage` is one of SABOTAGES and at which of its calls it strikes, from 1.
    """
    out, err = cwd / "stdout", cwd / "stderr"
    arguments = [str(argument) for argument in arguments]
    environment = {"WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1"} | environment
    process = CONTEXT.Process(target=_child, args=(arguments, cwd, out, err, sabotage, environment))
    process.start()
    return Child(process, out, err)


def run(*arguments: object, cwd: Path, sabotage: tuple[str, int] | None = None, **environment: str) -> Child:
    """As `start`, and waits for it."""
    child = start(*arguments, cwd=cwd, sabotage=sabotage, **environment)
    child.wait()
    return child


def _child(arguments, cwd, out, err, sabotage, environment):
    import warnings

    import torch

    from lightning_tfm.__main__ import main

    os.chdir(cwd)
    os.environ.update(environment)
    for path, descriptor in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    torch.set_num_threads(1)
    warnings.simplefilter("default")
    sys.argv = ["lightning-tfm", *arguments]
    if sabotage is not None:
        name, call = sabotage
        owner, attribute, late = SABOTAGES[name]()
        _strike(owner, attribute, call, late)
    main()


def _strike(owner, attribute, call, late):
    """Kills this process at a call of a function, before it or (late) after it."""
    original = getattr(owner, attribute)
    calls = 0

    def struck(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == call and not late:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args, **kwargs)
        if calls == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, attribute, struck)


def _step():
    import torch

    return torch.optim.AdamW, "step", False


def _after_step():
    import torch

    return torch.optim.AdamW, "step", True


def _write():
    from lightning_tfm import checkpoint

    return checkpoint._SummingWriter, "write", True


def _sync():
    return os, "fsync", False


def _rename():
    return Path, "replace", True


def _validation():
    from lightning_tfm.modules import Seq2SeqModule

    return Seq2SeqModule, "validation_step", False


def _after_validation():
    from lightning_tfm.callbacks import Checkpoints

    return Checkpoints, "on_validation_end", True


def _pass():
    from lightning_tfm.data import TrainingBatches

    return TrainingBatches, "_pass", False


def _test():
    from lightning_tfm.modules import Seq2SeqModule

    return Seq2SeqModule, "test_step", False


SABOTAGES = {
    "before an update of the weights": _step,
    "after an update of the weights": _after_step,
    "while a checkpoint is written": _write,
    "before a checkpoint is on the disk": _sync,
    "after a checkpoint is in its place": _rename,
    "in a validation": _validation,
    "after a validation": _after_validation,
    "at the edge of a pass over the data": _pass,
    "in the test": _test,
}
