"""End of all processes of a run when one is lost."""

from __future__ import annotations

import sys
from multiprocessing.util import Finalize

from lightning import Callback, LightningModule, Trainer
from torch.distributed import DistError

from lightning_tfm.distributed.heartbeat import Endpoint, Monitor
from lightning_tfm.errors import UserError


class Heartbeat(Callback):
    """Callback that ends all processes of a run when one of them is lost, with a message that names it.

    A process is lost if it was killed, if it is stopped, or if its machine or the network is down. The processes check
    each other in the background, so a long computation, such as a validation, does not count.

    Args:
        timeout: number of seconds without an answer after which a process is lost.
    """

    def __init__(self, timeout: int = 20) -> None:
        if timeout < 5:
            raise UserError(f"heartbeat.timeout must be at least 5 s, but is {timeout}; try 20")
        self.timeout = timeout
        self.monitor: Monitor | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.world_size == 1 or self.monitor is not None:
            return
        if trainer.is_global_zero:
            self.monitor = Monitor(self.timeout)
        endpoint = trainer.strategy.broadcast(self.monitor.endpoint if self.monitor else None)
        if self.monitor is None:
            try:
                self.monitor = Monitor(self.timeout, Endpoint(*endpoint), trainer.global_rank)
            except OSError as error:
                print(
                    f"lightning-tfm: {error}: if a process is lost, the others wait for minutes; open the port",
                    file=sys.stderr,
                )
                return
        Finalize(None, self.monitor.stop, exitpriority=0)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self.monitor is None:
            return
        if is_of_communication(exception):
            self.monitor.wait()
        self.monitor.stop(failed=True)


def is_of_communication(error: BaseException) -> bool:
    """Return whether an error may follow from the loss of another process; gloo has no class for its errors."""
    return isinstance(error, DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
