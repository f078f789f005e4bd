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
from lightning.pytorch.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch.strategies import ParallelStrategy
from torch.distributed import DistError, TCPStore, is_initialized  # type: ignore[attr-defined]  # exported at run time only

from lightning_tfm.errors import UserError
from lightning_tfm.strategies import TIMEOUT

LAUNCHERS = {
    "torchrun": ("TORCHELASTIC_RUN_ID", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    "srun": ("SLURM_PROCID", "SLURM_NNODES", "SLURM_NTASKS_PER_NODE"),
}
"""Launchers, and the environment variables that show them, and hold the numbers of nodes and of processes per node."""

MAX_CPU_PROCESSES = 8
"""Processes that may share a machine with fewer cores, for example to try a run."""

ANSWER_TIMEOUT = 15
"""Seconds in which the store of rank 0 answers."""


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
    for launcher, (shown, *variables) in LAUNCHERS.items():
        if launched or any(name not in os.environ for name in (shown, *variables)):
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
    """Check that the processes of a run can be started.

    Raises:
        UserError: if they cannot.
    """
    strategy = trainer.strategy
    if not isinstance(strategy, ParallelStrategy):
        return
    limit = max(MAX_CPU_PROCESSES, os.cpu_count() or 1)
    if isinstance(trainer.accelerator, CPUAccelerator) and trainer.num_devices > limit:
        raise UserError(
            f"trainer.devices must be at most {limit} on this machine, which has {os.cpu_count()} cores, but is "
            f"{trainer.num_devices}; try {os.cpu_count()}"
        )
    if (
        isinstance(strategy.cluster_environment, LightningEnvironment)
        and trainer.num_nodes > 1
        and "MASTER_ADDR" not in os.environ
    ):
        raise UserError(
            f"trainer.num_nodes must be 1 without a launcher of several machines, but is {trainer.num_nodes}; start "
            "the command with torchrun or srun, or set MASTER_ADDR, MASTER_PORT and NODE_RANK on each machine"
        )


def check_port(trainer: Trainer) -> None:
    """Check that the port of the run is free or, on ranks other than 0, that rank 0 answers at it.

    Raises:
        UserError: if another program uses it.
    """
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if environment is None or isinstance(environment, TorchElasticEnvironment):  # torchrun holds the port itself
        return
    if is_initialized():  # by an earlier run of this process, which holds the port
        return
    address, port = environment.main_address, environment.main_port
    taken = UserError(
        f"MASTER_PORT must be a free port on the machine of rank 0, but another program uses {port}; try {port + 1}"
    )
    if not environment.node_rank() and not environment.local_rank():
        try:
            socket.create_server(("", port)).close()
        except OSError as error:
            raise taken from error
        return
    limit = time.monotonic() + TIMEOUT.total_seconds()
    while time.monotonic() < limit:
        try:
            socket.create_connection((address, port), timeout=ANSWER_TIMEOUT).close()
            break
        except OSError:  # rank 0 has not started yet
            time.sleep(0.1)
    else:
        raise UserError(f"rank 0 must be reachable at MASTER_ADDR and MASTER_PORT, but is not at {address}:{port}")
    stores = []

    def connect() -> None:
        with suppress(DistError):
            stores.append(TCPStore(address, port, is_master=False, wait_for_workers=False))

    # The client of the store waits for an answer without a limit.
    client = threading.Thread(target=connect, daemon=True)
    client.start()
    client.join(ANSWER_TIMEOUT)
    if not stores:
        raise taken
