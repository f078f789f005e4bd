"""Runs of the command line in child processes.

The processes are forked from a server that has imported the package, so that each starts immediately.
"""

import ctypes
import multiprocessing
import os
import pty
import random
import re
import signal
import socket
import subprocess
import sys
import termios
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import torch
import wandb

from lightning_tfm.errors import SIGNALS
from support.faults import patch

CLONE_NEWNET = 0x40000000  # from sched.h
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["lightning_tfm.fit.cli", "datamodules", "optuna", "wandb"])


EXPERIMENTS = Path(__file__).parents[2] / "experiments"
SCRIPT = Path(sys.executable).with_name("lightning-tfm")
ENVIRONMENT = {**os.environ, "WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1"}
"""Environment of a command that is started by its script."""


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

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Wait until a condition holds, such as that a file exists, while the first process runs."""
        while not condition():
            assert self.process.is_alive(), self.err.read_text()
            time.sleep(0.02)

    def finish(self) -> Self:
        """Wait for all processes, which must succeed."""
        assert self.wait() == 0, self.err.read_text()
        return self

    def die(self) -> None:
        """Wait until a fault has killed the first process, and kill the others, which may wait for it."""
        self.process.join(300)
        for other in self.others:
            other.kill()
        assert self.wait() == -signal.SIGKILL, self.err.read_text()

    def interrupted(self, status: int) -> tuple[str, list[str]]:
        """Wait for an interruption, and return its message and the arguments of the command that resumes."""
        assert self.wait() == status, self.err.read_text()
        printed = self.err.read_text()
        assert "Traceback" not in printed
        message, command = printed.splitlines()[-2:]
        program, *arguments = shell_words(command)
        assert program == "lightning-tfm"
        return message, arguments

    def refuse(self, message: str) -> str:
        """Wait for all processes, whose last line must report a mistake by a text or a pattern; return the line."""
        assert self.wait() == 2, self.err.read_text()
        assert [other.exitcode for other in self.others] == [2] * len(self.others)
        printed = self.err.read_text()
        last = printed.splitlines()[-1]
        assert last.startswith("lightning-tfm: error: ")
        assert message in last or re.search(message, last), last
        assert "Traceback" not in printed
        return last


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
        target=child_main, args=(arguments, cwd, out, err, fault, pictures, network, forks, environment)
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


def start_elastic(number: int, *arguments: object, num_micro_batches: int = 8, **settings: Any) -> Child:
    """Start a run of a number of processes with elastic determinism, see `start`."""
    return _start_strategy("elastic.yaml", {"num_micro_batches": num_micro_batches}, number, *arguments, **settings)


def start_parallel(
    number: int,
    tensor_parallel_size: int,
    *arguments: object,
    activation_checkpointing: bool = False,
    save_distributed_checkpoint: bool = False,
    **settings: Any,
) -> Child:
    """Start a run of a number of processes that divide the network, see `start`."""
    strategy = {
        "tensor_parallel_size": tensor_parallel_size,
        "activation_checkpointing": activation_checkpointing,
        "save_distributed_checkpoint": save_distributed_checkpoint,
    }
    return _start_strategy("model_parallel.yaml", strategy, number, *arguments, **settings)


def _start_strategy(overlay, strategy, number, *arguments, **settings):
    options = {"accelerator": "cpu", "devices": number}
    options |= {f"strategy.init_args.{name}": value for name, value in strategy.items()}
    options = (f"--trainer.{name}={value}" for name, value in options.items())
    return _start_ranks(number, *arguments, "--config", EXPERIMENTS / overlay, *options, **settings)


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


def child_main(arguments, cwd, out, err, fault, pictures, network, forks, environment):
    import warnings

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
        patch(*fault)
    if not pictures:
        draw_blank_pictures()
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

    def __init__(self, command, stdin, stdout, stderr, start_new_session, pass_fds):
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
        return os.readlink(f"/proc/self/fd/{descriptor}").endswith(".lock")
    except OSError:
        return False


def draw_blank_pictures():
    from matplotlib.figure import Figure

    from lightning_tfm.plots import pictures

    for name in ("draw_attention", "draw_positions", "draw_confusion"):
        setattr(pictures, name, lambda *_: Figure(figsize=(0.1, 0.1)))


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
        if wandb.run is not None and wandb.run.disabled:
            wandb.finish()  # which the end of a process does
    return 0


def in_terminal(command, cwd, environment, columns=120):
    """Run a command in a pseudo-terminal, and return its exit status and output."""
    terminal, stream = pty.openpty()
    termios.tcsetwinsize(stream, (24, columns))
    process = subprocess.Popen(
        command, cwd=cwd, env=environment, stdin=stream, stdout=stream, stderr=stream, start_new_session=True
    )
    os.close(stream)
    printed = b""
    with suppress(OSError):  # reading fails when the command has closed the terminal
        while part := os.read(terminal, 4096):
            printed += part
    os.close(terminal)
    return process.wait(60), printed.decode()


def shell_words(command):
    """Return the arguments into which bash splits a command."""
    shell = subprocess.run(["bash", "-c", f"printf '%s\\0' {command}"], capture_output=True, check=True)
    return os.fsdecode(shell.stdout).split("\0")[:-1]
