"""Processes that a launcher, such as torchrun or SLURM, starts on one or several machines."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress
from typing import Any

from lightning import Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins.environments import ClusterEnvironment, LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch.strategies import ParallelStrategy
from torch.distributed import DistError, TCPStore, is_initialized  # type: ignore[attr-defined]  # exported at run time only

from lightning_tfm.distributed.strategies import TIMEOUT
from lightning_tfm.errors import UserError

LAUNCHERS = {
    "torchrun": ("TORCHELASTIC_RUN_ID", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    "srun": ("SLURM_PROCID", "SLURM_NNODES", "SLURM_NTASKS_PER_NODE"),
}
"""Variables by launcher: the one that identifies it, and those with the numbers of nodes and of processes per node."""

MAX_CPU_PROCESSES = 8
"""Processes that may share a machine with fewer cores, for example to try a run."""

ANSWER_TIMEOUT = 15
"""Seconds in which the store of rank 0 answers."""


def free_address() -> dict[str, str]:
    """Return the environment variables of a free port of this machine, at which the processes of a run meet."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1])}


def launched_settings(settings: Any) -> dict[str, int]:
    """Return the settings of the Trainer that follow from the launcher of this process.

    Args:
        settings: the settings of the Trainer, of which `num_nodes` and `devices` may be left out, or 1.

    Returns:
        `num_nodes` and `devices`, unless they are set; empty if there is no launcher.

    Raises:
        UserError: if they are set and differ from the numbers of processes that the launcher has started.
    """
    launched: dict[str, int] = {}
    for launcher, (identifier, *variables) in LAUNCHERS.items():
        if launched or any(name not in os.environ for name in (identifier, *variables)):
            continue
        for name, variable in zip(("num_nodes", "devices"), variables, strict=True):
            number, value = int(os.environ[variable]), settings[name]
            if str(value) in ("1", "auto", "-1"):
                launched[name] = number
            elif str(value).isdecimal() and int(value) != number:
                raise UserError(
                    f"trainer.{name} must be the number that {launcher} has started ({number}), but is {value}; "
                    "leave it out"
                )
    return launched


def check_processes(trainer: Trainer) -> None:
    """Raise UserError if the processes of a run cannot be started."""
    strategy = trainer.strategy
    if not isinstance(strategy, ParallelStrategy):
        return
    limit = max(MAX_CPU_PROCESSES, os.cpu_count() or 1)
    if isinstance(trainer.accelerator, CPUAccelerator) and trainer.num_devices > limit:
        raise UserError(
            f"trainer.devices must be at most {limit} on this machine, which has {os.cpu_count()} cores, but is "
            f"{trainer.num_devices}; try {os.cpu_count()}"
        )
    if not isinstance(strategy.cluster_environment, LightningEnvironment) or "MASTER_ADDR" in os.environ:
        return
    if trainer.num_nodes > 1:
        raise UserError(
            f"trainer.num_nodes must be 1 without a launcher of several machines, but is {trainer.num_nodes}; start "
            "the command with torchrun or srun, or set MASTER_ADDR, MASTER_PORT and NODE_RANK on each machine"
        )
    try:
        socket.create_server(("127.0.0.1", 0)).close()
    except OSError as error:
        raise UserError(
            "MASTER_ADDR must be set on a machine without IPv4, but is unset; set MASTER_ADDR=::1 and "
            "GLOO_SOCKET_IFNAME=lo"
        ) from error


def meet_processes(trainer: Trainer) -> TCPStore | None:
    """Check the port of the run, and wait for the processes that this one does not start itself.

    Returns:
        The store of the run, which rank 0 must keep until the processes are connected; None if it is not needed.

    Raises:
        UserError: if another program uses the port, or if a process does not come.

    Note:
        torch would wait too, but in C++, where signals are not handled.
    """
    environment = getattr(trainer.strategy, "cluster_environment", None)
    # torchrun holds the port itself, and so does an earlier run of this process.
    if environment is None or isinstance(environment, TorchElasticEnvironment) or is_initialized():
        return None
    per_node = trainer.num_devices if environment.creates_processes_externally else 1
    names = [f"process {rank} of node {node}" for node in range(trainer.num_nodes) for rank in range(per_node)]
    limit = time.monotonic() + TIMEOUT.total_seconds()
    try:
        if environment.node_rank() == environment.local_rank() == 0:
            store = _start_store(environment)
        else:
            store = _connect_store(environment, limit)
        store.set(f"process {environment.local_rank()} of node {environment.node_rank()}", "")
        while not store.check(names):
            if time.monotonic() > limit:
                missing = ", ".join(name for name in names if not store.check([name]))
                raise UserError(
                    f"all {len(names)} processes of a run must start within {TIMEOUT}, but {missing} did not; "
                    "start the command on each machine"
                )
            time.sleep(0.1)
    except DistError as error:
        raise UserError("rank 0 must wait for the other processes, but has ended; its output may show why") from error
    return store


def _start_store(environment: ClusterEnvironment) -> TCPStore:
    """Return the store of the run, which listens at its port."""
    port = environment.main_port
    try:
        socket.create_server(("", port)).close()
        return TCPStore(environment.main_address, port, is_master=True, wait_for_workers=False, multi_tenant=True)
    except (OSError, DistError) as error:
        raise _taken(port) from error


def _connect_store(environment: ClusterEnvironment, limit: float) -> TCPStore:
    """Connect to the store of rank 0 once it answers, until a limit of `time.monotonic`."""
    address, port = environment.main_address, environment.main_port
    while True:
        try:
            socket.create_connection((address, port), timeout=ANSWER_TIMEOUT).close()
            break
        except OSError as error:  # rank 0 has not started yet
            if time.monotonic() > limit:
                raise UserError(
                    f"rank 0 must be reachable at MASTER_ADDR and MASTER_PORT, but is not at {address}:{port}"
                ) from error
            time.sleep(0.1)
    stores = []

    def connect() -> None:
        with suppress(DistError):
            stores.append(TCPStore(address, port, is_master=False, wait_for_workers=False))

    # The client of the store waits for an answer without a limit.
    client = threading.Thread(target=connect, daemon=True)
    client.start()
    client.join(ANSWER_TIMEOUT)
    if not stores:
        raise _taken(port)
    return stores[0]


def _taken(port: int) -> UserError:
    return UserError(
        f"MASTER_PORT must be a free port on the machine of rank 0, but another program uses {port}; try {port + 1}"
    )
