"""Faults that are injected into a run: signals, a full disk, a crash of W&B."""

import math
import os
import pkgutil
import resource
import signal
import time
from pathlib import Path


def patch(moment, call, fault="SIGKILL"):
    """Patch the function of a moment so that one of its calls, counted from 1, injects a fault."""
    name, late = MOMENTS[moment]
    owner, _, attribute = name.rpartition(".")
    owner = pkgutil.resolve_name(owner)
    original = getattr(owner, attribute)
    calls = 0

    def patched(*args, **kwargs):
        nonlocal calls
        counts = attribute not in COUNTED or COUNTED[attribute](args)
        calls += counts
        fails = counts and calls == call
        if fails and not late:
            _inject(fault)
        result = original(*args, **kwargs)
        if fails and late:
            _inject(fault)
        return result * math.nan if fails and fault == "nan" else result

    setattr(owner, attribute, patched)


def _inject(fault):
    if fault.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, fault))
    elif fault == "the disk is full":  # for every file larger than this
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    elif fault == "W&B dies":
        for service in _services():
            os.kill(service, signal.SIGKILL)
        time.sleep(0.2)
    elif fault == "W&B cannot write":
        for service in _services():
            resource.prlimit(service, resource.RLIMIT_FSIZE, (0, 0))


def _services():
    """Return the processes of W&B that serve this one."""
    parent = f"--pid\0{os.getpid()}\0".encode()
    commands = {int(path.parent.name): path for path in Path("/proc").glob("[0-9]*/cmdline")}
    services = [pid for pid, path in commands.items() if b"wandb-core" in (text := _text(path)) and parent in text]
    assert services
    return services


def _text(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""


MOMENTS = {
    "in the loss": ("lightning_tfm.tasks.seq2seq.token_nll", True),
    "in a training step": ("lightning_tfm.tasks.Seq2SeqModule.training_step", False),
    "before an update of the weights": ("torch.optim.AdamW.step", False),
    "after an update of the weights": ("torch.optim.AdamW.step", True),
    "while a checkpoint is written": ("torch._C.PyTorchFileWriter.write_record", True),
    "while shards are written": ("torch.distributed.checkpoint.HuggingFaceStorageWriter.write_data", False),
    "before a checkpoint is on the disk": ("os.fsync", False),
    "after a checkpoint is in its place": ("pathlib.Path.replace", True),
    "in a validation": ("lightning_tfm.tasks.Seq2SeqModule.validation_step", False),
    "after a validation": ("lightning_tfm.callbacks.Checkpoints.on_validation_end", True),
    "between two passes over the data": ("lightning_tfm.data.LengthGroupedSampler._epoch", False),
    "in the test": ("lightning_tfm.tasks.Seq2SeqModule.test_step", False),
}
"""Moments of a fault: the name of a function, and whether the fault comes after the call or before.

Of the calls of the system, see COUNTED, only those for a checkpoint count.
"""

COUNTED = {
    "replace": lambda arguments: Path(arguments[1]).suffix == ".ckpt",
    "fsync": lambda arguments: os.readlink(f"/proc/self/fd/{arguments[0]}").endswith(".ckpt.part"),
}
"""Predicates of the path of a checkpoint, by the name of the function that is called with it."""


PLANTED = "import pathlib\npathlib.Path('canary').touch()\nclass Evil:\n    pass\n"
