"""Training of two runs again, side by side, up to the step at which they part.

Each process of a run is a child process. After each step, it sends a fingerprint of all that the step has computed, and
waits for the others. The values themselves are kept until the fingerprints are known to be equal, so that each run is
trained once, and the memory does not depend on the number of steps.
"""

from __future__ import annotations

import hashlib
import io
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from typing_extensions import TypedDict

from lightning_tfm.checkpoint import read
from lightning_tfm.commands.parser import trust_arguments
from lightning_tfm.comparison.differences import Difference, rows_by_step
from lightning_tfm.comparison.tensors import difference, fingerprint, state_fingerprint
from lightning_tfm.config.parsing_errors import format_error
from lightning_tfm.distributed.launch import free_address
from lightning_tfm.errors import DamagedError, UserError
from lightning_tfm.fit.cli import TfmCLI
from lightning_tfm.fit.cli import run as run_cli
from lightning_tfm.fit.trainer_settings import as_list
from lightning_tfm.runs.record import Run
from lightning_tfm.system.files import relative
from lightning_tfm.system.portability import VARIABLES
from lightning_tfm.system.progress import progress_bar

PROCESSES = multiprocessing.get_context("spawn")

PATIENCE = 10
"""Seconds in which a process ends by itself, once its connection is closed."""

REPEATED = ("train/loss", "trainer/gradient_norm", "trainer/learning_rate")
"""Metrics of a step that must be those that a run has recorded."""

SETTINGS = (
    *("--trainer.logger=false", "--trainer.limit_val_batches=0", "--trainer.enable_progress_bar=false", "--skip_test"),
    "--trainer.num_nodes=1",
)
"""Settings of `fit` for the training only, on one machine."""

SHARED = ("gradient", "learning rate", "clipped gradient", "optimizer state", "parameter")
"""Kinds of values that all processes of a run have in common."""

LAUNCHER = ("SLURM_", "TORCHELASTIC_", "GROUP_RANK")
"""Beginnings of the environment variables by which Lightning recognizes a launcher of processes."""

Values = list[tuple[str, Tensor]]
"""Tensors with their names, in the order in which they were computed."""


class StepTrace(Callback):
    """Callback that keeps what a step computes, in order, and sends it to another process on request.

    Args:
        connection: the connection to that process, which receives a fingerprint of the state before the first step,
            and one of all values after each step, with the metric that is not the recorded one. It answers None for the
            next step, "names" for the names and the fingerprints of the values, or the index of one of them.
        recorded: the metrics that the run has recorded, as texts by step.

    Note:
        Global hooks are used, since networks choose another kernel for a layer with hooks.
    """

    def __init__(self, connection: Connection, recorded: dict[int, dict[str, str]]) -> None:
        self.connection, self.recorded = connection, recorded
        self.values: Values = []
        self.step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.names = {module: _short(name) for name, module in pl_module.named_modules() if name}
        self.hooks = [
            register_module_forward_pre_hook(lambda module, args: self._keep_call("input", module, args)),
            register_module_forward_hook(lambda module, args, output: self._keep_call("output", module, output)),
        ]
        self.step = trainer.global_step
        self._send(pl_module, None)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._keep("batch", batch)

    def _keep_call(self, kind: str, module: nn.Module, value: Any) -> None:
        if (name := self.names.get(module)) is not None:
            self._keep(f"{kind} of {name}", value[0] if isinstance(value, tuple) and len(value) == 1 else value)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._keep("loss", loss)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self._keep_gradients("gradient", pl_module, trainer.world_size)  # by which DDP has divided their sum
        for group in optimizer.param_groups:
            self._keep("learning rate", torch.as_tensor(group["lr"], dtype=torch.float64))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step > self.step:  # otherwise, gradients are accumulated
            self._keep_gradients("clipped gradient", pl_module)
            self.step = trainer.global_step
            self._send(pl_module, self._mismatch(trainer))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for hook in self.hooks:
            hook.remove()

    def _keep(self, name: str, value: Any) -> None:
        """Keep copies of the tensors in a value, which may be nested."""
        if isinstance(value, Tensor):
            self.values.append((name, value.detach().clone()))
        elif isinstance(value, list | tuple):
            self._keep(name, dict(zip(getattr(value, "_fields", range(len(value))), value, strict=True)))
        elif isinstance(value, dict):
            for key, each in value.items():
                self._keep(f"{name}, {key}", each)

    def _keep_gradients(self, kind: str, module: LightningModule, factor: int = 1) -> None:
        for name, weight in module.named_parameters():
            self._keep(f"{kind} of {_short(name)}", weight.grad)
            if factor > 1 and weight.grad is not None:
                self.values[-1][1].mul_(factor)

    def _state(self, module: LightningModule) -> Values:
        """Return the optimizer state and the parameters, by name."""
        weights = dict(module.named_parameters())
        states = [
            (f"optimizer state {key} of {_short(name)}", value)
            for name, weight in weights.items()
            for key, value in module.trainer.optimizers[0].state.get(weight, {}).items()
            if isinstance(value, Tensor)
        ]
        return [*states, *((f"parameter {_short(name)}", weight.detach()) for name, weight in weights.items())]

    def _mismatch(self, trainer: Trainer) -> Difference | None:
        """Return the first metric of the step that is not the recorded one, with the recorded value first."""
        row = self.recorded.get(self.step - 1, {})
        for name in REPEATED:
            if name in row and float(row[name]) != (value := trainer.callback_metrics[name].item()):
                return {"name": f"{name} at step {self.step - 1}", "values": [float(row[name]), value]}
        return None

    def _send(self, module: LightningModule, mismatch: Difference | None) -> None:
        """Send the end of a step, and answer requests until the next step may begin."""
        values = [*self.values, *self._state(module)]
        names = [(name, fingerprint(value)) for name, value in values]
        self.connection.send((hashlib.sha256(b"".join(each for _, each in names)).digest(), mismatch))
        while (request := self.connection.recv()) is not None:
            if request == "names":
                self.connection.send(names)
            else:
                torch.save(values[request][1].cpu(), content := io.BytesIO())
                self.connection.send(content.getvalue())
        self.values.clear()


def _short(name: str) -> str:
    return name.removeprefix("network.")


def train_again(
    connection: Connection,
    cwd: str,
    folder: Path,
    checkpoint: Path | None,
    trust_packages: Sequence[str],
    num_processes: int,
    environment: dict[str, str],
) -> None:
    """Train a run again in this process with a `StepTrace`, from a checkpoint or from its start.

    An error is sent as a text. Nothing is written or printed. The training ends if the connection is closed.
    """
    for name in [name for name in os.environ if name.startswith(LAUNCHER)]:
        del os.environ[name]
    os.environ.update(environment)
    os.chdir(cwd)  # multiprocessing starts in another folder if the current one was changed
    sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # until the process ends
    for descriptor in (1, 2):  # to which C++ writes
        os.dup2(sys.stdout.fileno(), descriptor)
    run = Run(folder)
    trace = StepTrace(connection, rows_by_step(run))

    class TracingCLI(TfmCLI):
        """TfmCLI that trains with the trace, and does not test."""

        def instantiate_trainer(self, **kwargs: Any) -> Trainer:
            trainer = super().instantiate_trainer(**kwargs)
            trainer.callbacks.append(trace)  # after those of the user, which may change what it keeps
            return trainer

        def after_fit(self) -> None:
            """Do not test."""

    arguments = ["fit", "--config", str(folder / Run.CONFIG), *SETTINGS, *trust_arguments(trust_packages)]
    arguments += [f"--trainer.devices={num_processes}", "--trainer.callbacks", json.dumps(_training_callbacks(run))]
    arguments += [] if checkpoint is None else ["--ckpt_path", str(checkpoint)]
    try:
        run_cli(arguments, TracingCLI)
    except Exception as error:  # of the code of the user, too
        with suppress(OSError):  # it is closed
            connection.send(format_error(error))


def _training_callbacks(run: Run) -> list[dict[str, Any]]:
    """Return the settings of the callbacks that may change the training: those of the user, and WeightAveraging."""
    return [
        callback
        for callback in as_list(run.config["trainer"]["callbacks"])
        if callback["class_path"].endswith(".WeightAveraging")
        or not callback["class_path"].startswith(("lightning.", "lightning_tfm."))
    ]


class Trace(TypedDict):
    """Result of training two runs again.

    Attributes:
        first_step: the step, counted from 0, from which both were trained: that after their last equal checkpoints.
        steps: the number of steps from there that both have recorded.
        equal_steps: the number of these that are equal before the first difference.
        not_repeated: the metric in which a run has parted from its own record, with the recorded value first.
        difference: the first value that differs, with its name, the `step` (None before the first), and `before`, the
            name of the last equal value of the step. Of runs of several processes, it also has `process`, the rank of
            the process, or `reduced`, the number of processes that have added the gradient. See
            `lightning_tfm.comparison.tensors.difference` for the others.
        skipped: the number of values of the step that one process and several do not share, so they are not compared.
    """

    first_step: int
    steps: int
    equal_steps: int
    not_repeated: list[Difference]
    difference: dict[str, Any] | None
    skipped: int


def trace(runs: Sequence[Run], trust_packages: Sequence[str]) -> Trace:
    """Train two runs again, from their last equal checkpoints, until they part.

    Raises:
        UserError: if a run cannot be trained again, or not with the same bits on this machine.
    """
    numbers = [_num_processes(run) for run in runs]
    if numbers[0] != numbers[1] and 1 not in numbers:
        raise UserError(
            "--trace needs runs with the same number of processes, or one run with a single process, but "
            f"{' and '.join(repr(relative(run.folder)) for run in runs)} have {numbers[0]} and {numbers[1]}; compare "
            "each with a run of one process"
        )
    first, checkpoints = _last_equal_checkpoints(runs)
    steps = max(min(map(_recorded_steps, runs)) - first, 0)
    traced = Trace(first_step=first, steps=steps, equal_steps=0, not_repeated=[], difference=None, skipped=0)
    if not steps:
        return traced
    for run in runs:
        if not first and run.begins_elsewhere:
            raise UserError(
                f"--trace needs runs with equal checkpoints if one is a fork, but {relative(run.folder)!r} begins with "
                "a checkpoint of another run; compare forks of it that keep checkpoints (checkpoint.keep_every)"
            )
    with ExitStack() as stack, progress_bar("tracing, step", total=steps) as bar:
        trainings = []
        for run, checkpoint, number in zip(runs, checkpoints, numbers, strict=True):
            trainings.append(Training(run, checkpoint, number, trust_packages))
            stack.callback(trainings[-1].end)
        for number in range(steps + 1):  # the first is the state before the first step
            fingerprints, mismatches = zip(*(training.receive() for training in trainings), strict=True)
            traced["not_repeated"] = [
                {"name": f"{mismatch['name']} of {training.name}", "values": mismatch["values"]}
                for training, mismatch in zip(trainings, mismatches, strict=True)
                if mismatch is not None
            ]
            if fingerprints[0] != fingerprints[1]:
                found, traced["skipped"] = _first_difference(trainings)
                if found is not None:
                    traced["difference"] = {"step": first + number - 1 if number else None, **found}
            if traced["difference"] or traced["not_repeated"]:
                break
            traced["equal_steps"] = number
            bar.update(number - bar.n)
            for training in trainings:
                training.go_on()
    return traced


class Training:
    """Child processes that train a run again, see `train_again`; one for each process of the run."""

    def __init__(self, run: Run, checkpoint: Path | None, num_processes: int, trust_packages: Sequence[str]) -> None:
        self.name = relative(run.folder)
        self.connections, self.processes = [], []
        environment = free_address() | {"NODE_RANK": "0"} if num_processes > 1 else {}
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited: on Ctrl-C, the connections are closed
        try:
            for rank in range(num_processes):
                connection, other = PROCESSES.Pipe()
                place = environment | {"LOCAL_RANK": str(rank)} if environment else {}
                arguments = other, os.getcwd(), run.folder, checkpoint, trust_packages, num_processes, place
                process = PROCESSES.Process(target=train_again, args=arguments)
                with portable_variables(run):
                    process.start()
                other.close()
                self.connections.append(connection)
                self.processes.append(process)
        finally:
            signal.signal(signal.SIGINT, handler)

    def receive(self) -> tuple[list[bytes], Difference | None]:
        """Return the fingerprints of the processes after a step, and the first metric that is not the recorded one."""
        received: dict[Connection, Any] = {}
        while missing := [connection for connection in self.connections if connection not in received]:
            # in order of arrival, since the first process may wait for one that has failed
            for connection in cast(list[Connection], wait(missing)):
                received[connection] = self._receive(connection)
        fingerprints, mismatches = zip(*(received[connection] for connection in self.connections), strict=True)
        return list(fingerprints), next(filter(None, mismatches), None)

    def _receive(self, connection: Connection) -> Any:
        """Return what a process has sent; raise UserError if it has failed."""
        try:
            received = connection.recv()
        except EOFError:
            received = "its process was killed"
        if isinstance(received, str):
            raise UserError(f"RUN must be a run that can be trained again, but {self.name!r} is not: {received}")
        return received

    def names(self, rank: int) -> list[tuple[str, bytes]]:
        """Return the names and the fingerprints of the values of a process."""
        self.connections[rank].send("names")
        return cast(list[tuple[str, bytes]], self._receive(self.connections[rank]))

    def value(self, rank: int, index: int) -> Tensor:
        """Return a value of a process."""
        self.connections[rank].send(index)
        return cast(Tensor, torch.load(io.BytesIO(self._receive(self.connections[rank])), weights_only=True))

    def go_on(self) -> None:
        """Let all processes begin the next step."""
        for connection in self.connections:
            connection.send(None)

    def end(self) -> None:
        """End all processes."""
        for connection in self.connections:
            connection.close()
        end = time.monotonic() + PATIENCE
        for process in self.processes:
            process.join(max(end - time.monotonic(), 0))
            process.kill()  # if it waits for another process that has failed
            process.join()


@contextmanager
def portable_variables(run: Run) -> Iterator[None]:
    """Set the environment variables of a portable run, which a child process reads when it starts."""
    before = dict(os.environ)
    os.environ.update(VARIABLES if run.config.get("portable") else {})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _first_difference(trainings: Sequence[Training]) -> tuple[dict[str, Any] | None, int]:
    """Return the first value of a step that differs between two trainings, and the number of values before it skipped.

    If one has a single process and the other several, the values of each process are compared with the rows that it
    computes of the other; see `_counterparts`.
    """
    numbers = [len(training.processes) for training in trainings]
    is_same = numbers[0] == numbers[1]
    names = [
        [training.names(rank) for rank in range(number)] for training, number in zip(trainings, numbers, strict=True)
    ]
    before, num_rows, skipped = None, (0, 0), 0
    for index in range(max(len(each) for of_run in names for each in of_run)):
        is_skipped = False
        for rank in range(max(numbers)):
            ranks = [rank % number for number in numbers]
            (name, first), (other, second) = (
                each[place][index] if index < len(each[place]) else ("nothing", b"")
                for each, place in zip(names, ranks, strict=True)
            )
            is_shared = is_same or name.startswith(SHARED)
            found: dict[str, Any] = {"name": name if name == other else f"{name} or {other}", "before": before}
            if max(numbers) > 1 and not name.startswith(SHARED):
                found["process"] = rank
            if name != other:
                return found, skipped
            if is_shared and first == second:
                continue
            values = [training.value(place, index) for training, place in zip(trainings, ranks, strict=True)]
            if not is_shared:
                if name.startswith("batch") and values[0].dim() > 1:
                    num_rows = len(values[0]), len(values[1])
                counterparts = _counterparts(name, values, num_rows, rank, max(numbers), numbers.index(1))
                if counterparts is None:
                    is_skipped = True
                    continue
                values = counterparts
            if (different := difference(*values)) is not None:
                if not is_same and name.startswith("gradient"):
                    found["reduced"] = max(numbers)
                return {**found, **different}, skipped
        skipped += is_skipped
        if not is_skipped:
            before = name
    return None, skipped


def _counterparts(
    name: str, values: Sequence[Tensor], num_rows: tuple[int, int], rank: int, num_processes: int, single: int
) -> list[Tensor] | None:
    """Return the parts of a value of a single process, and of one of several, that must be equal.

    Process `rank` of P computes the rows `rank`, `rank` + P, ... of a batch, with their own padding, without which
    batches are compared. None if the values do not have these rows, as a loss, or have different padding.
    """
    is_batch = name.startswith("batch")
    if any(value.dim() == 0 or len(value) != rows for value, rows in zip(values, num_rows, strict=True)):
        return None
    parts = [*values]
    parts[single] = parts[single][rank::num_processes]
    if is_batch and parts[0].dim() == parts[1].dim():
        shape = [min(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
        parts = [part[(slice(None), *map(slice, shape))] for part in parts]
    return parts if is_batch or parts[0].shape == parts[1].shape else None


def _last_equal_checkpoints(runs: Sequence[Run]) -> tuple[int, Sequence[Path | None]]:
    """Return the step and the paths of the last checkpoints of two runs with equal states; 0 and None if none have."""
    found: list[dict[tuple[int, bytes], Path]] = []
    for run in runs:
        states = {}
        for path in run.checkpoints():
            with suppress(DamagedError):
                checkpoint = read(path)
                states[checkpoint["global_step"], state_fingerprint(checkpoint)] = path
        found.append(states)
    last = max(found[0].keys() & found[1].keys(), default=None)
    return (0, (None, None)) if last is None else (last[0], [states[last] for states in found])


def _recorded_steps(run: Run) -> int:
    """Return the number of steps that a run has trained, or those of its settings if it has recorded none."""
    if run.has_finished:
        return run.summary.steps
    max_steps = int(run.config["trainer"]["max_steps"])
    return min(max([run.last_checkpoint[0], *(step + 1 for step in rows_by_step(run))]), max_steps) or max_steps


def _num_processes(run: Run) -> int:
    """Return the number of processes that repeat the bits of a run: with elastic determinism, one does.

    Raises:
        UserError: if the run was not trained, or its weights are divided among processes.
    """
    folder, strategy = relative(run.folder), str(run.config["trainer"]["strategy"])
    if run.state == "evaluated":
        raise UserError(f"--trace needs runs that were trained, but {folder!r} is a test; name its run")
    processes = {start["processes"] for start in run.starts} or {1}
    if "Elastic" in strategy or processes == {1}:
        return 1
    if len(processes) > 1:
        raise UserError(
            f"--trace needs runs with one number of processes, but {folder!r} was started with "
            f"{' and '.join(map(str, sorted(processes)))}; name another run"
        )
    if "ModelParallel" in strategy:
        raise UserError(
            f"--trace needs runs whose processes have all weights, as with ddp, but {folder!r} has ModelParallel; name "
            "another run"
        )
    return processes.pop()
