"""Detection of lost processes of a run."""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import NoReturn

import torch
from lightning import Callback, LightningModule, Trainer
from torch.distributed import DistError

from lightning_tfm.errors import UserError
from lightning_tfm.system.private import default_store

SILENCE = 6
"""Seconds without a beat after which a process is lost once communication has failed; a busy machine delays beats."""


class Heartbeat(Callback):
    """Callback that ends all processes of a run when one of them is lost, with a message that names it.

    A process is lost if it has ended, is stopped, or cannot be reached. A thread sends the beats, so a process that
    computes for a long time, such as in a validation, is not lost.

    Args:
        timeout: number of seconds without a beat after which a process is lost.
    """

    def __init__(self, timeout: int = 20) -> None:
        if timeout < 5:
            raise UserError(f"heartbeat.timeout must be at least 5 s, but is {timeout}; try 20")
        self.timeout = timeout
        self.monitor: Monitor | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.world_size > 1:
            self.monitor = Monitor(self.timeout)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.monitor is not None:
            trainer.strategy.barrier()  # a process that waits here for another one still watches it
            self.monitor.stopped.set()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self.monitor is not None:
            if is_of_communication(exception):
                self.monitor.wait()
            self.monitor.stopped.set()


class Monitor:
    """Threads that count the beats of this process in the store of torch.distributed, and watch those of others.

    Rank 0, which has the store, watches all processes and tells them which one is lost. The others watch rank 0.

    Args:
        timeout: number of seconds without a beat after which a process is lost.
    """

    def __init__(self, timeout: int) -> None:
        self.timeout, self.rank = timeout, torch.distributed.get_rank()
        hosts: list[str] = [""] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(hosts, socket.gethostname())
        self.names = [f"rank {rank} on {host}" for rank, host in enumerate(hosts)]
        self.silent = dict.fromkeys([0] if self.rank else range(1, len(hosts)), 0)  # seconds, by rank
        self.lost = b""  # the names of the lost processes, set by rank 0
        # The main thread may wait in the original.
        self.store = default_store().clone()
        self.store.set(f"beats of rank {self.rank}", "0")
        if self.rank == 0:
            self.store.set("lost", "")
        torch.distributed.barrier()
        self.stopped = threading.Event()
        # Two threads, since a store that cannot be reached never answers.
        threading.Thread(target=self._beat, daemon=True).start()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    def wait(self) -> None:
        """Wait, after communication has failed, until the thread finds the lost process and ends this one."""
        seconds, self.timeout = self.timeout + 10, min(self.timeout, SILENCE)
        self.thread.join(seconds)

    def _beat(self) -> None:
        beats: dict[int, bytes] = {}
        keys = ["lost", *(f"beats of rank {rank}" for rank in self.silent)]
        with suppress(RuntimeError):  # rank 0 has ended, which is found as its silence
            while not self.stopped.wait(1):
                self.store.add(f"beats of rank {self.rank}", 1)
                self.lost, *values = self.store.multi_get(keys)
                for rank, value in zip(self.silent, values, strict=True):
                    if value != beats.get(rank):
                        self.silent[rank], beats[rank] = 0, value

    def _watch(self) -> None:
        # The seconds are counted, since a process that was stopped itself must not take the others for silent.
        while not self.stopped.wait(1):
            for rank in self.silent:
                self.silent[rank] += 1
            if self.lost:
                self._end(self.lost.decode())
            if max(self.silent.values()) > self.timeout:
                lost = (self.names[rank] for rank, seconds in self.silent.items() if seconds > self.timeout / 2)
                self._end(", ".join(lost))

    def _end(self, lost: str) -> NoReturn:
        """End this process, whose main thread may wait for the lost one, and name that one to the others."""
        reason = "no answer, so it has ended or is stopped, or its machine or the network is down"
        os.write(2, f"lightning-tfm: error: lost {lost}: {reason}; resume with --ckpt_path last\n".encode())
        flush = threading.Thread(target=sys.stdout.flush, daemon=True)  # waits forever if the main thread writes
        flush.start()
        flush.join(1)
        if self.rank == 0:
            self.store.set("lost", lost)
            time.sleep(2)  # until the others have read it
        os._exit(1)


def is_of_communication(error: BaseException) -> bool:
    """Return whether an error may follow from the loss of another process; gloo has no class for its errors."""
    return isinstance(error, DistError) or (
        isinstance(error, RuntimeError) and re.search("gloo|pair closure", str(error)) is not None
    )
