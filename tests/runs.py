"""Short runs of the command line in child processes, with fault injection.

The processes are forked from a server that has imported the package, so that each starts immediately.
"""

from __future__ import annotations

import csv
import ctypes
import inspect
import json
import math
import multiprocessing
import os
import pty
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import termios
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import wandb
import yaml
from filelock import FileLock

from corpora import TEXT, reviews, sentences, write_lines
from lightning_tfm import networks
from lightning_tfm.checkpoint import read
from lightning_tfm.errors import SIGNALS
from lightning_tfm.tokenization import train_tokenizer

CLONE_NEWNET = 0x40000000  # from sched.h
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["lightning_tfm.fit.cli", "datamodules", "optuna", "wandb"])


@dataclass
class Child:
    process: BaseProcess
    out: Path
    err: Path
    others: Sequence[BaseProcess] = ()
    """The processes of ranks 1 and above."""

    def wait(self) -> int:
        """Wait for all processes, and return the exit status of the first, negative if a signal ended it."""
        for process in (self.process, *self.others):
            process.join(300)
            assert process.exitcode is not None, "the process hangs"
        return self.process.exitcode


def start(
    *arguments: object,
    cwd: Path,
    fault: tuple[object, ...] | None = None,
    pictures: bool = False,
    network: Path | None = None,
    forks: bool = False,
    **environment: str | None,
) -> Child:
    """Start `lightning-tfm` in a child process.

    Args:
        arguments: the command-line arguments.
        cwd: the working directory, which receives the files `stdout` and `stderr`, or `stdout_1` and `stderr_1` of the
            process of local rank 1, and so on; on the node of rank 1, `stdout_node_1` and so on.
        fault: a key of MOMENTS, the number of the call to fail, from 1, and what to inject: the name of a signal
            (default: SIGKILL), "nan" in place of the loss, "the disk is full", "W&B dies" or "W&B cannot write".
        pictures: whether to draw pictures, which take half of the time of a short run; otherwise they are blank.
        network: the file of the network namespace of the process.
        forks: whether the runs that the command starts are forked from its process, too.
        environment: environment variables to set, or to unset if None.
    """
    rank = f"_node_{environment['NODE_RANK']}" if environment.get("NODE_RANK", "0") != "0" else ""
    rank += f"_{environment['LOCAL_RANK']}" if environment.get("LOCAL_RANK", "0") != "0" else ""
    out, err = cwd / f"stdout{rank}", cwd / f"stderr{rank}"
    arguments = [str(argument) for argument in arguments]
    environment = {"WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1"} | environment
    process = CONTEXT.Process(
        target=_child, args=(arguments, cwd, out, err, fault, pictures, network, forks, environment)
    )
    process.start()
    return Child(process, out, err)


def run(*arguments: object, cwd: Path, **settings: object) -> Child:
    """Run `lightning-tfm` in a child process, see `start`, and wait for its end."""
    child = start(*arguments, cwd=cwd, **settings)
    child.wait()
    return child


TWO_PROCESSES = ["--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.strategy=ddp"]
"""Options for which Lightning starts a second process."""


PORTS = range(10_000, 32_768)
"""Candidates for the ports of runs. Linux assigns those from 32,768 to connections, perhaps before a run binds its."""


def free_port() -> int:
    """Return a random port that no program uses now."""
    while True:
        port = random.SystemRandom().choice(PORTS)
        with suppress(OSError), socket.create_server(("", port)):
            return port


def ranks(number=2):
    """Return the environments of the ranks of a run, with which Lightning launches no process itself."""
    port = str(free_port())
    return [{"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} for rank in range(number)]


def start_two(
    *arguments: object, cwd: Path, strategy: str = "ddp", number: int = 2, **environment: str | None
) -> Child:
    """Start a run of two processes, or another number, see `start`."""
    options = [*TWO_PROCESSES, f"--trainer.strategy={strategy}", f"--trainer.devices={number}"]
    return _start_ranks(number, *arguments, *options, cwd=cwd, **environment)


def start_elastic(
    number: int, *arguments: object, cwd: Path, num_shards: int = 8, num_threads: int = 1, **settings: Any
) -> Child:
    """Start a run of a number of processes with elastic determinism, see `start`."""
    options = {"accelerator": "cpu", "devices": number}
    options |= {"strategy.init_args.num_shards": num_shards, "strategy.init_args.num_threads": num_threads}
    elastic = (f"--trainer.{name}={value}" for name, value in options.items())
    arguments = (*arguments, "--config", EXPERIMENTS / "elastic.yaml", *elastic)
    return _start_ranks(number, *arguments, cwd=cwd, **settings)


def start_parallel(
    number: int,
    tensor_parallel_size: int,
    *arguments: object,
    activation_checkpointing: bool = False,
    save_distributed_checkpoint: bool = False,
    **settings: Any,
) -> Child:
    """Start a run of a number of processes that divide the network, see `start`."""
    options = {
        "accelerator": "cpu",
        "devices": number,
        "strategy.init_args.tensor_parallel_size": tensor_parallel_size,
        "strategy.init_args.activation_checkpointing": activation_checkpointing,
        "strategy.init_args.save_distributed_checkpoint": save_distributed_checkpoint,
    }
    parallel = (f"--trainer.{name}={value}" for name, value in options.items())
    arguments = (*arguments, "--config", EXPERIMENTS / "model_parallel.yaml", *parallel)
    return _start_ranks(number, *arguments, **settings)


def _start_ranks(
    number: int,
    *arguments: object,
    fault: tuple[object, ...] | None = None,
    faulty_rank: int | None = None,
    **settings: Any,
) -> Child:
    """Start a process for each rank, see `start`; a fault is injected into all of them, or into one."""
    first, *others = (
        start(*arguments, fault=fault if faulty_rank in (None, rank) else None, **settings, **environment)
        for rank, environment in enumerate(ranks(number))
    )
    return Child(first.process, first.out, first.err, [other.process for other in others])


def _child(arguments, cwd, out, err, fault, pictures, network, forks, environment):
    import warnings

    import torch

    from lightning_tfm.__main__ import main

    if network is not None:  # os.setns requires Python 3.12
        assert ctypes.CDLL(None).setns(os.open(network, os.O_RDONLY), CLONE_NEWNET) == 0
    os.chdir(cwd)
    sys.path.insert(0, str(cwd))  # so that a configuration could import modules of the folder, which it must not
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    for path, descriptor in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    warnings.simplefilter("default")
    sys.argv = ["lightning-tfm", *arguments]
    if fault is not None:
        _patch(*fault)
    if not pictures:
        _draw_blank_pictures()
    if forks:
        from lightning_tfm.runs import children

        children.subprocess = SimpleNamespace(Popen=ForkedRun, DEVNULL=subprocess.DEVNULL)
    try:
        main()
    finally:
        if environment["WANDB_MODE"] == "offline":  # at exit, which a forked process does not reach
            with suppress(Exception):
                wandb.teardown()


class ForkedRun:
    """Replacement of `subprocess.Popen` that forks this process, in which all packages are imported."""

    def __init__(self, command, stdin, stdout, stderr, env, start_new_session, pass_fds):
        self.returncode = None
        self.pid = os.fork()
        if self.pid:
            return
        status = 1
        try:
            os.setsid()
            for descriptor in map(int, os.listdir("/proc/self/fd")):
                if descriptor not in (*pass_fds, stdout.fileno()) and _is_lock(descriptor):
                    os.close(descriptor)
            os.dup2(stdout.fileno(), 1)
            os.dup2(stderr.fileno(), 2)
            os.environ |= env
            for signum in SIGNALS:
                signal.signal(signum, signal.SIG_DFL)
            sys.argv = ["lightning-tfm", *command[command.index("fit") :]]
            from lightning_tfm.__main__ import main

            main()
            status = 0
        except SystemExit as end:
            status = end.code or 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def poll(self):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def terminate(self):
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def wait(self):
        while self.poll() is None:
            time.sleep(0.02)
        return self.returncode


def _is_lock(descriptor):
    try:
        return Path(os.readlink(f"/proc/self/fd/{descriptor}")).name in (".claim", ".lock")
    except OSError:
        return False


def _draw_blank_pictures():
    from matplotlib.figure import Figure

    from lightning_tfm.plots import pictures

    for name in ("draw_attention", "draw_positions", "draw_confusion"):
        setattr(pictures, name, lambda *_: Figure(figsize=(0.1, 0.1)))


def _patch(moment, call, fault="SIGKILL"):
    """Patch the function of a moment so that one of its calls, counted from 1, injects a fault."""
    owner, attribute, late = MOMENTS[moment]()
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


def _optimizer():
    import torch

    return torch.optim.AdamW, "step"


def _module(hook):
    from lightning_tfm.tasks import Seq2SeqModule

    return Seq2SeqModule, hook


def _loss():
    from lightning_tfm.tasks import seq2seq

    return seq2seq, "token_nll"


def _checkpoints():
    from lightning_tfm.callbacks import Checkpoints

    return Checkpoints, "on_validation_end"


def _writer():
    from lightning_tfm.checkpoint import archive

    return archive._ChecksumWriter, "write"


def _shards():
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    return HuggingFaceStorageWriter, "write_data"


def _stream():
    from lightning_tfm.data import LengthGroupedSampler

    return LengthGroupedSampler, "_epoch"


MOMENTS = {
    "in the loss": lambda: (*_loss(), True),
    "in a training step": lambda: (*_module("training_step"), False),
    "before an update of the weights": lambda: (*_optimizer(), False),
    "after an update of the weights": lambda: (*_optimizer(), True),
    "while a checkpoint is written": lambda: (*_writer(), True),
    "while shards are written": lambda: (*_shards(), False),
    "before a checkpoint is on the disk": lambda: (os, "fsync", False),
    "after a checkpoint is in its place": lambda: (Path, "replace", True),
    "in a validation": lambda: (*_module("validation_step"), False),
    "after a validation": lambda: (*_checkpoints(), True),
    "between two passes over the data": lambda: (*_stream(), False),
    "in the test": lambda: (*_module("test_step"), False),
}
"""Moments of a fault: the owner and name of a function, and whether the fault comes after the call or before.

Of the calls of the system, see COUNTED, only those for a checkpoint count.
"""

COUNTED = {
    "replace": lambda arguments: Path(arguments[1]).suffix == ".ckpt",
    "fsync": lambda arguments: os.readlink(f"/proc/self/fd/{arguments[0]}").endswith(".ckpt.part"),
}
"""Predicates of the path of a checkpoint, by the name of the function that is called with it."""


def in_process(monkeypatch, *arguments):
    """Run a command in this process, and return its exit status; signals are handled as before.

    W&B is disabled unless WANDB_MODE is set, since its service would survive the command.
    """
    from lightning_tfm.__main__ import main

    monkeypatch.setenv("WANDB_MODE", os.environ.get("WANDB_MODE", "disabled"))
    monkeypatch.setenv("PYTHONSAFEPATH", "1")  # to restore it, since the command sets it
    monkeypatch.setattr(sys, "argv", ["lightning-tfm", *map(str, arguments)])
    handlers = {signum: signal.getsignal(signum) for signum in SIGNALS}
    try:
        main()
    except SystemExit as end:
        return end.code or 0
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
    return 0


EXPERIMENTS = Path(__file__).parent.parent / "experiments"
NETWORKS = {
    "transformer": {"d_model": 16, "num_heads": 2, "num_layers": 1, "d_ff": 32, "positions": "sinusoidal"},
    "gpt": {"d_model": 16, "num_heads": 2, "num_layers": 1, "positions": "learned"},
    "attention_lstm": {"d_model": 16, "attention": "additive"},
}
"""Small networks. `SETTINGS` has dropout, so that a resumed run must restore its random numbers."""

SETTINGS = {
    "data.init_args.train_size": 200,
    "data.init_args.val_size": 30,
    "data.init_args.test_size": 30,
    "data.init_args.longer_size": 30,
    "data.init_args.multiples": "[]",
    "data.init_args.eval_batch_size": 10,
    "data.init_args.batch_size": 15,
    "trainer.max_steps": 60,
    "trainer.val_check_interval": 12,
    "trainer.log_every_n_steps": 1,
    "checkpoint.every_n_train_steps": 5,
    "model.init_args.network.init_args.dropout": 0.2,
    "model.init_args.lr_schedule.warmup_steps": 10,
}

AVERAGED = {"trainer.callbacks": "[{class_path: lightning_tfm.callbacks.WeightAveraging}]"}
MUON = {"model.init_args.optimizer": "lightning_tfm.optimizers.Muon"}


def fit(model, *options, **settings):
    """Return the arguments of a short run."""
    network = {f"model.init_args.network.init_args.{name}": value for name, value in NETWORKS[model].items()}
    settings = SETTINGS | network | settings
    return (
        "fit",
        *("--config", EXPERIMENTS / f"copy_{model}.yaml"),
        *(f"--{name}={value}" for name, value in settings.items()),
        *options,
    )


def folder(cwd, model):
    """Return the folder of the run that has saved a checkpoint; a run killed before that leaves a folder, too."""
    name = model if model in TASKS else f"copy_{model}"
    (path,) = (path for path in (cwd / f"runs/{name}").iterdir() if (path / "checkpoints/last.ckpt").exists())
    return path


SMALL = {"d_model": 16, "num_heads": 2, "num_layers": 1}
TASKS = {
    "translation_transformer": (
        "Seq2SeqModule",
        "Transformer",
        SMALL | {"d_ff": 32, "tie_embeddings": True, "pointer_generator": True},
    ),
    "translation_attention_lstm": (
        "Seq2SeqModule",
        "AttentionLSTM",
        {"d_model": 16, "attention": "hard_monotonic", "cell": "gru"},
    ),
    "spelling_gpt": ("Seq2SeqModule", "GPT", SMALL),
    "text_gpt": ("LanguageModel", "GPT", SMALL | {"max_length": 16, "positions": "rotary"}),
    "text_linear_transformer": ("LanguageModel", "LinearTransformer", SMALL | {"max_length": 16}),
    "masked_encoder": ("MaskedLanguageModel", "MaskedEncoder", SMALL | {"max_length": 16}),
    "reviews_classifier": (
        "Classifier",
        "EncoderClassifier",
        SMALL | {"d_ff": 32, "word_dropout": 0.1, "num_bigram_buckets": 100},
    ),
}
"""The module, the network and the size of the network of each task."""


def network_names(base):
    """Return the names of all networks of a base class, as listed in error messages."""
    classes = {name: getattr(networks, name) for name in networks.__all__}
    return " or ".join(name for name, cls in classes.items() if issubclass(cls, base) and not inspect.isabstract(cls))


def write_task(name, folder):
    """Write the data and the YAML of a task, and return the path of the YAML."""
    module, network, size = TASKS[name]
    own = {}
    if name.startswith("translation"):
        files = {}
        for split, number in (("train", 200), ("val", 30), ("test", 31)):
            german, english = zip(*sentences(number, seed=number), strict=True)
            files[split] = [write_lines(folder / f"{split}.de", german), write_lines(folder / f"{split}.en", english)]
        data = "ParallelText", files | {"vocab_size": 300, "batch_tokens": 400}
        own = {"text_metrics": ["bleu", "chrf"], "beam_size": 2, "label_smoothing": 0.1}
    elif name.startswith("spelling"):
        words = ["".join(random.Random(number).choices("abcde", k=number % 6 + 1)) for number in range(120)]
        rows = [f"{word}\t{' '.join(word.upper())}" for word in words]
        files = {
            "train": write_lines(folder / "train.tsv", rows[:100]),
            "val": write_lines(folder / "val.tsv", rows[100:110]),
            "test": write_lines(folder / "test.tsv", rows[110:]),
        }
        data = (
            "Tsv",
            files | {"target_separator": " ", "max_source_length": 16, "max_target_length": 16, "batch_size": 20},
        )
    elif name.startswith(("text", "masked")):
        (folder / "text.txt").write_text(TEXT)
        data = "Text", {"path": str(folder / "text.txt"), "max_length": 16, "batch_size": 8, "test_fraction": 0.1}
        own = {"mask_fraction": 0.5} if name.startswith("masked") else {}
    else:
        table = write_lines(folder / "reviews.tsv", map("\t".join, reviews(200)))
        data = "Sentiment", {"train": [table], "num_ngrams": 50, "max_length": 16, "batch_size": 20}
    config = {
        "seed_everything": 1,
        "trainer": {
            "accelerator": "cpu",
            "max_steps": 40,
            "val_check_interval": 10,
            "check_val_every_n_epoch": None,
            "log_every_n_steps": 1,
            "gradient_clip_val": 1.0,
        },
        "checkpoint": {"every_n_train_steps": 5},
        "model": {
            "class_path": f"lightning_tfm.tasks.{module}",
            "init_args": own
            | {
                "network": {"class_path": f"lightning_tfm.networks.{network}", "init_args": size | {"dropout": 0.1}},
                "optimizer": {"class_path": "lightning_tfm.optimizers.AdamW", "init_args": {"lr": 0.01}},
                "lr_schedule": {"warmup_steps": 5},
            },
        },
        "data": {"class_path": f"datamodules.{data[0]}", "init_args": data[1]},
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def write_gpt2(folder, shift=-55.0):
    """Write a small GPT-2 of Hugging Face with a tokenizer, its logits shifted by a constant; return the folder."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=287, n_positions=16, n_embd=16, n_layer=1, n_head=2))
    with torch.no_grad():  # the softmax ignores a shift of all logits, which the real GPT-2 has, too
        model.transformer.ln_f.weight[0], model.transformer.ln_f.bias[0] = 0, 1
        model.transformer.wte.weight[:, 0] = shift
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(train_tokenizer([TEXT], "subword", 290).to_dict()["model"])
    return folder


def made_once(name, make, tmp_path_factory):
    """Return a folder that `make(folder)` fills once for all workers of pytest-xdist; tests must not change it."""
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    folder = root / f"shared_{name}"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            folder.mkdir()
            try:
                make(folder)
            except BaseException:
                shutil.rmtree(folder)  # so that no other test takes it for complete
                raise
    return folder


def trained_run(name, tmp_path_factory):
    """Return the folder of an undisturbed run, trained once per session."""

    def train(cwd):
        child = run("fit", "--config", write_task(name, cwd), cwd=cwd, pictures=True)
        assert child.wait() == 0, child.err.read_text()

    return made_once(name, train, tmp_path_factory) / f"runs/{name}/version_0"


def in_terminal(command, cwd, environment, columns=120):
    """Run a command in a pseudo-terminal, and return its exit status and output."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, columns))
    process = subprocess.Popen(
        command, cwd=cwd, env=environment, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    printed = b""
    with suppress(OSError):  # reading fails when the command has closed the terminal
        while part := os.read(ours, 4096):
            printed += part
    os.close(ours)
    return process.wait(60), printed.decode()


def wait_for_step(step, process, cwd, model):
    """Wait until a run has saved a checkpoint of at least this step."""

    def saved(path):
        return path.exists() and read(path)["global_step"] >= step

    while not any(saved(path) for path in (cwd / f"runs/copy_{model}").glob("*/checkpoints/last.ckpt")):
        assert Path(f"/proc/{process.pid}").exists(), [path.read_text() for path in cwd.glob("stderr*")]
        time.sleep(0.02)


TINY = {
    "experiment": str(EXPERIMENTS / "copy_gpt.yaml"),
    "objective": {"metric": "val/loss", "mode": "min"},
    "sampler": "tpe",
    "parallel": 2,
    "trials": 12,
    "seed": 3,
    "asha": {"min_steps": 6, "reduction_factor": 2},
    "search": {
        "model.optimizer.lr": {"min": 1e-3, "max": 0.03, "log": True},
        "model.network.d_model": {"values": [8, 15, 16]},  # 15 is not divisible by the number of heads
    },
    "settings": {
        "data.train_size": 60,
        "data.val_size": 10,
        "data.longer_size": 5,
        "data.test_size": 10,
        "data.batch_size": 15,
        "trainer.max_steps": 24,
        "trainer.val_check_interval": 6,
        "trainer.log_every_n_steps": 1,
        "checkpoint.every_n_train_steps": 2,
        "model.network.num_heads": 2,
        "model.network.num_layers": 1,
        "model.network.dropout": 0.2,
        "model.lr_schedule.warmup_steps": 5,
    },
}


def tiny(folder, **changes):
    """Write a specification of short runs, and return its path."""
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(TINY | changes))
    return path


def new_folders(parent, *names):
    """Create folders, and return their paths."""
    folders = [parent / name for name in names]
    for folder in folders:
        folder.mkdir()
    return folders


def contents(folder):
    """Return the bytes of all files below a folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def equal(ours, theirs, where=""):
    """Assert that two nested values are bitwise equal, naming the first difference."""
    assert type(ours) is type(theirs), where
    if isinstance(ours, torch.Tensor):
        assert ours.dtype == theirs.dtype, where
        assert ours.shape == theirs.shape, where
        assert ours.flatten().view(torch.uint8).equal(theirs.flatten().view(torch.uint8)), where
    elif isinstance(ours, dict):
        assert list(ours) == list(theirs), where
        for key in ours:
            equal(ours[key], theirs[key], f"{where}/{key}")
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(theirs), where
        for index, pair in enumerate(zip(ours, theirs, strict=True)):
            equal(*pair, f"{where}/{index}")
    else:
        assert ours == theirs, where


def assert_same_run(cwd, reference, model, rows_lost=0, best=True, same_processes=True):
    """Assert that two runs have equal checkpoints, logged metrics and test metrics, see `assert_same_files`."""
    assert_same_files(folder(cwd, model), folder(reference, model), rows_lost, best, same_processes)


def assert_same_files(ours, theirs, rows_lost=0, best=True, same_processes=True):
    """Assert that the folders of two runs have bitwise equal checkpoints, logged metrics and test metrics.

    Args:
        ours: one folder.
        theirs: the other, the reference.
        rows_lost: the most rows of the log that ours may lack.
        best: whether there is a best checkpoint.
        same_processes: whether both have the same number of processes, which divide the validation batches.
    """
    for name in ("last", "best") if best else ("last",):
        contents = [read(path / f"checkpoints/{name}.ckpt") for path in (ours, theirs)]
        for content in contents:
            for state in content["callbacks"].values():
                state.pop("train_seconds", None)  # may differ
            content.pop("experiment")  # the settings, such as the number of workers
            if not same_processes:
                content["loops"]["fit_loop"].pop("epoch_loop.val_loop.batch_progress")
        equal(*contents, name)
    logs = [list(csv.DictReader((path / "metrics.csv").read_text().splitlines())) for path in (ours, theirs)]
    for row in (row for log in logs for row in log):
        row.pop("tokens_per_second")  # may differ
    trained = [[row for row in log if row["train/loss"] or row.get("val/loss")] for log in logs]
    missing = [row for row in trained[1] if row not in trained[0]]
    assert len(missing) <= rows_lost
    assert trained[0] == [row for row in trained[1] if row not in missing]
    tests = [json.loads((path / "summary.json").read_text())["test"] for path in (ours, theirs)]
    assert tests[0] == tests[1]
