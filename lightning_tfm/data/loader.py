"""Data loader whose position in the stream of training batches is saved in checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple, cast

from torch.utils.data import DataLoader, Dataset

from lightning_tfm.data.batch import Examples, MicroBatches
from lightning_tfm.data.samplers import TrainingSampler
from lightning_tfm.errors import UserError


class ResumableDataLoader(DataLoader[Any]):
    """Data loader of the training batches of a run, resumable at any batch, with at most `num_batches` in an iteration.

    Its state, which Lightning saves in checkpoints, is the same on every process. It counts the batches that were
    yielded, not those that workers have prefetched. A process with several micro-batches gets all of them at once.
    `settings` are further arguments of DataLoader.

    Note:
        In Lightning, the whole run is a single epoch, since epochs over the data may differ in length, and resuming is
        most error-prone at the end of an epoch.
    """

    dataset: Any  # Examples
    sampler: TrainingSampler

    def __init__(self, examples: Examples, stream: TrainingSampler, num_batches: int, **settings: Any) -> None:
        super().__init__(cast(Dataset[Any], examples), sampler=stream, **settings)
        self.num_batches = num_batches
        self.position = 0  # batches yielded since the run started

    @property
    def samples(self) -> int:
        """Return the number of rows yielded since the run started, over all processes."""
        return self.sampler.samples_seen(self.position)

    @property
    def progress(self) -> dict[str, float]:
        """Return what the batches yielded since the run started consist of, to be logged by name."""
        return self.sampler.progress(self.position)

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[NamedTuple | MicroBatches]:  # type: ignore[override]  # torch names its own class of iterators
        self.sampler.start = self.position
        batches = super().__iter__()
        at_once = [batches] * len(self.sampler.division.own)  # one iterator, several at a time
        for micro_batches in islice(zip(*at_once, strict=True), self.num_batches):
            self.position += 1
            yield micro_batches[0] if len(micro_batches) == 1 else MicroBatches(micro_batches)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the stream, and the settings and the data that it depends on."""
        data = {
            "fingerprint of the training data": self.dataset.fingerprint,
            "number of training tokens": self.dataset.num_tokens,  # of the data as encoded and truncated
        }
        return {"position": self.position, **self.sampler.settings, **data}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the position in the stream; raise UserError if the state is that of other data or settings.

        A state of the position only, of a fork, fits any stream.
        """
        current = self.state_dict()
        for name, value in state.items():
            if name != "position" and value != current.get(name):
                raise UserError(
                    f"the {name} must match the checkpoint ({value}) to resume its run, but is {current.get(name)}; "
                    "restore it, or start a new run without --ckpt_path"
                )
        self.position = state["position"]
