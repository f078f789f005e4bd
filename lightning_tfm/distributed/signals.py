"""Exchange of signals of the operating system between the processes of a run."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import ReduceOp


class SignalExchange:
    """Exchange of the largest signal of all processes, which all of them call after the same steps."""

    def __init__(self) -> None:
        self._earlier: tuple[Tensor, Callable[[], object]] | None = None  # of the last step, and how to wait for it

    def now(self, signum: int, device: torch.device) -> int:
        """Return the largest signal of all processes.

        Args:
            signum: the signal that this process has received; 0 if none.
            device: the device of this process.
        """
        value = torch.full((), signum, device=device)
        torch.distributed.all_reduce(value, ReduceOp.MAX)  # without the barrier of Lightning's all_reduce
        return int(value)

    def of_last_step(self, signum: int, device: torch.device) -> int:
        """Return the largest signal of all processes at the last call, and start to exchange that of this one.

        To return the signal of this call would wait for the other processes, and synchronize with the device.

        Args:
            signum: the signal that this process has received; 0 if none.
            device: the device of this process.
        """
        value = torch.full((), signum, device=device)
        work = torch.distributed.all_reduce(value, ReduceOp.MAX, async_op=True)
        wait: Callable[[], object] = work.wait
        if device.type != "cpu":
            work.wait()  # in the stream of the device
            value, event = value.to("cpu", non_blocking=True), torch.Event(device)
            event.record()
            wait = event.synchronize
        earlier, self._earlier = self._earlier, (value, wait)
        if earlier is None:
            return 0
        value, wait = earlier
        wait()
        return int(value)
