"""In which order data come, and how they are cut into batches: one stream, whatever the number of processes."""

from __future__ import annotations

import hashlib
import itertools
import signal
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from lightning_tfm.errors import UserError
from lightning_tfm.memory import uncollected
from lightning_tfm.tokenizer import PAD, Ids, Tokenizer


class Batch(NamedTuple):
    """Right-padded ids of B sequences.

    Attributes:
        source: (B, S), each row ended by EOS; S = 0 where there is no source.
        target_in: (B, T), each row begun by BOS: what the decoder reads.
        target_out: (B, T), each row ended by EOS: what it should write, target_in one step on.
    """

    source: Tensor
    target_in: Tensor
    target_out: Tensor

    @property
    def inputs(self) -> tuple[Tensor, Tensor]:
        """What a network's forward takes."""
        return self.source, self.target_in

    @property
    def tokens(self) -> Tensor:
        """How many tokens are scored."""
        return (self.target_out != PAD).sum()


class Examples(Protocol):
    """Encoded data, cut into batches by one index operation: `examples[rows]` is a batch of those rows."""

    lengths: Tensor
    """Of each row, in tokens: rows of like length share a batch."""

    fingerprint: str
    """The hash of the data: equal data have equal fingerprints."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: Tensor) -> NamedTuple: ...


class BatchStream(Sampler[Tensor], ABC):
    """The rows of each training batch: an endless stream, from the seed alone.

    The stream passes over the data again and again, each time in another order. The global batch of a step is the
    same for any number of processes: they share its rows out.
    """

    def __init__(self, seed: int, rank: int = 0, world_size: int = 1) -> None:
        self.seed, self.rank, self.world_size = seed, rank, world_size
        self.start = 0  # the batch that iterating begins with

    @abstractmethod
    def _pass(self, number: int, generator: torch.Generator) -> Sequence[Tensor]:
        """The batches of a pass, each the rows of all processes."""

    def batches(self, number: int) -> Sequence[Tensor]:
        """Those of a pass, in their order."""
        return self._pass(number, torch.Generator().manual_seed(stable_hash(f"{self.seed} {number}") >> 1))

    @property
    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """What must be the same, beside the data, for a run to go on with the stream."""

    @abstractmethod
    def rows_before(self, position: int) -> int:
        """Rows of so many batches from the beginning of the stream, over all processes."""

    def __iter__(self) -> Iterator[Tensor]:
        skipped = self.start
        for number in itertools.count():
            batches = self.batches(number)
            for rows in batches[skipped:]:
                yield rows[self.rank :: self.world_size]
            skipped = max(0, skipped - len(batches))


class TrainingBatches(BatchStream):
    """Batches of a number of rows.

    Rows of like length share a batch, so that little of it is padding: the shuffled rows are sorted by length in pools
    of 16 batches, cut into batches, and the batches shuffled. Rows that do not fill a batch wait for another pass.
    """

    POOL = 16

    def __init__(self, lengths: Tensor, batch_size: int, seed: int, rank: int = 0, world_size: int = 1) -> None:
        super().__init__(seed, rank, world_size)
        self.lengths, self.batch_size = lengths, batch_size
        self.batches_per_pass = len(lengths) // batch_size

    @property
    def settings(self) -> dict[str, Any]:
        return {"seed_everything": self.seed, "batch_size": self.batch_size}

    def rows_before(self, position: int) -> int:
        return position * self.batch_size

    def _pass(self, number: int, generator: torch.Generator) -> Tensor:
        """(batches, B)."""
        order = torch.randperm(len(self.lengths), generator=generator)[: self.batches_per_pass * self.batch_size]
        pools = [pool[self.lengths[pool].argsort(stable=True)] for pool in order.split(self.POOL * self.batch_size)]
        batches = torch.cat(pools).view(self.batches_per_pass, self.batch_size)
        return batches[torch.randperm(self.batches_per_pass, generator=generator)]


class TokenBatches(BatchStream):
    """Batches of a number of tokens, padding among them: many short rows or few long ones.

    The rows are sorted by length, those of one length in a drawn order, and cut where a batch is full; the batches are
    shuffled. A row that is longer than a batch is one by itself.
    """

    def __init__(self, lengths: Tensor, batch_tokens: int, seed: int, rank: int = 0, world_size: int = 1) -> None:
        super().__init__(seed, rank, world_size)
        self.lengths, self.batch_tokens = lengths, batch_tokens
        self.cuts, begin = [], 0  # the same in each pass, for the sorted lengths are
        ordered = lengths.sort(descending=True).values.tolist()
        for place in range(1, len(ordered)):
            if (place + 1 - begin) * ordered[begin] > batch_tokens:
                self.cuts.append(place)
                begin = place
        if self.cuts:  # the rest shares rows with the batch before it, so that no batch is small
            begin = self.cuts[-2] if len(self.cuts) > 1 else 0
            self.cuts[-1] = min(self.cuts[-1], (begin + len(lengths) + 1) // 2)
        ends = [*self.cuts, len(lengths)]
        self.sizes = [end - begin for begin, end in zip([0, *self.cuts], ends, strict=True)]

    @property
    def fewest_rows(self) -> int:
        """Of a batch."""
        return min(self.sizes)

    @property
    def settings(self) -> dict[str, Any]:
        return {"seed_everything": self.seed, "batch_tokens": self.batch_tokens}

    def rows_before(self, position: int) -> int:
        passes, rest = divmod(position, len(self.sizes))
        return passes * len(self.lengths) + sum(len(batch) for batch in self.batches(passes)[:rest])

    def _pass(self, number: int, generator: torch.Generator) -> list[Tensor]:
        order = torch.randperm(len(self.lengths), generator=generator)
        order = order[self.lengths[order].argsort(stable=True, descending=True)]
        batches = order.tensor_split(self.cuts)
        return [batches[place] for place in torch.randperm(len(batches), generator=generator).tolist()]


class WindowBatches(BatchStream):
    """Batches of windows of a text, by where they begin: those of a pass lie side by side, from a drawn place on."""

    def __init__(
        self, num_tokens: int, context: int, batch_size: int, seed: int, rank: int = 0, world_size: int = 1
    ) -> None:
        super().__init__(seed, rank, world_size)
        self.num_tokens, self.context, self.batch_size = num_tokens, context, batch_size
        self.windows = (num_tokens - 1) // context - 1  # whole ones, wherever the first begins
        self.batches_per_pass = self.windows // batch_size

    @property
    def settings(self) -> dict[str, Any]:
        return {"seed_everything": self.seed, "batch_size": self.batch_size, "context": self.context}

    def rows_before(self, position: int) -> int:
        return position * self.batch_size

    def _pass(self, number: int, generator: torch.Generator) -> Tensor:
        """(batches, B)."""
        first = torch.randint(self.context, (), generator=generator)
        order = torch.randperm(self.windows, generator=generator)[: self.batches_per_pass * self.batch_size]
        return (first + order * self.context).view(self.batches_per_pass, self.batch_size)


class TrainingLoader(DataLoader):
    """The training batches of a run: reads on in the stream, also where another process stopped.

    Its state is the same on every process and counts the batches that were handed out, not those that workers have
    prepared. Lightning saves it in checkpoints. To Lightning the whole run is one epoch, for the passes over the
    data need not be equally long, and an epoch's edge is where resuming is hardest to get right.

    Args:
        examples: the encoded data.
        stream: the rows of each batch.
        num_batches: how many batches one iteration hands out at most: it ends at a multiple.
        settings: as those of a DataLoader.
    """

    def __init__(self, examples: Examples, stream: BatchStream, num_batches: int, **settings: Any) -> None:
        super().__init__(examples, sampler=stream, **settings)
        self.num_batches = num_batches
        self.position = 0  # batches handed out since the run began

    @property
    def samples(self) -> int:
        """Rows handed out since the run began, over all processes."""
        return self.sampler.rows_before(self.position)

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[NamedTuple]:
        self.sampler.start = self.position
        for batch in super().__iter__():
            self.position += 1
            yield batch
            if self.position % self.num_batches == 0:
                break

    def state_dict(self) -> dict[str, Any]:
        fingerprint = {"fingerprint of the training data": self.dataset.fingerprint}
        return {"position": self.position, **self.sampler.settings, **fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises UserError if the state is of another stream: the run could not go on as it began."""
        for name, ours in self.state_dict().items():
            theirs = state.get(name)
            if name != "position" and theirs != ours:
                raise UserError(
                    f"the {name} must be that of the checkpoint ({theirs}) to go on with its run, but is {ours}; "
                    "set it so, or begin a run of its own, without --ckpt_path"
                )
        self.position = state["position"]


class EvaluationBatches(Sampler[Tensor]):
    """The rows of each evaluation batch: every row once, on one process, by length so that little is padding.

    All processes get equally many batches, none of them empty, so none waits for another. The batches come in an
    order that is drawn once, so that the first few stand for all.
    """

    def __init__(self, lengths: Tensor, batch_size: int, rank: int, world_size: int) -> None:
        order = lengths.argsort(stable=True)
        fewest_rows, most_rows = len(order) // world_size, -(-len(order) // world_size)  # of any process
        num_batches = min(fewest_rows, -(-most_rows // batch_size))
        batches = order[rank::world_size].tensor_split(num_batches)
        drawn = torch.randperm(num_batches, generator=torch.Generator().manual_seed(0)).tolist()
        self.batches = [batches[number] for number in drawn]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.batches)


class TaskDataModule(LightningDataModule, ABC):
    """Examples in, batches out. A subclass says what its examples are.

    Args:
        tokenizer: the vocabulary.
        batch_size: examples in a training step, over all processes.
        eval_batch_size: examples in a batch of validation and test, on each process; one more where rows are few.
        num_workers: processes that cut batches; 0 for none, which suits data that lies in memory.
        seed: what the data and their order are made from.
        test_sets: names of the splits to test on; the first is "test".
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        batch_size: int,
        eval_batch_size: int,
        num_workers: int,
        seed: int,
        test_sets: tuple[str, ...] = ("test",),
    ) -> None:
        super().__init__()
        for name, value, least in (
            ("batch_size", batch_size, 1),
            ("eval_batch_size", eval_batch_size, 1),
            ("num_workers", num_workers, 0),
        ):
            if value < least:
                raise UserError(f"{name} must be at least {least}, but is {value}")
        self.tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.num_workers = num_workers
        self.seed = seed
        self.test_sets = test_sets
        self.datasets: dict[str, Examples] = {}

    @abstractmethod
    def examples(self, split: str) -> Examples:
        """Those of "train", "val" or a test set, the same at every call and on every machine."""

    def check_processes(self, world_size: int) -> None:
        """Raises UserError if there are more processes than rows of a training batch to share out."""
        if self.batch_size < world_size:
            raise UserError(
                f"batch_size must be at least the number of processes ({world_size}), but is {self.batch_size}"
            )

    @property
    def fingerprint(self) -> dict[str, str]:
        """The fingerprint of each split."""
        return {split: examples.fingerprint for split, examples in self.datasets.items()}

    def setup(self, stage: str) -> None:
        if not self.datasets:
            with uncollected():
                self.datasets = {split: self.examples(split) for split in ("train", "val", *self.test_sets)}

    def training_batches(self, rank: int, world_size: int) -> BatchStream:
        """The rows of the training batches, for a process of so many."""
        examples = self.datasets["train"]
        if self.batch_size > len(examples):
            raise UserError(
                f"batch_size must be at most the {len(examples)} training examples, but is {self.batch_size}"
            )
        return TrainingBatches(examples.lengths, self.batch_size, self.seed, rank, world_size)

    def _loader_settings(self) -> dict[str, Any]:
        return {
            "batch_size": None,  # the sampler's items are batches already
            "num_workers": self.num_workers,
            "persistent_workers": self.num_workers > 0,
            "worker_init_fn": _ignore_signals,
            "pin_memory": self.trainer is not None and self.trainer.strategy.root_device.type == "cuda",
            "generator": torch.Generator(),  # or each pass would draw from the generator that dropout uses
        }

    def _place(self) -> tuple[int, int]:
        """This process's rank, and how many there are."""
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)

    def train_dataloader(self) -> TrainingLoader:
        """All batches of a run that has a number of steps, otherwise those of a pass over the data."""
        stream = self.training_batches(*self._place())
        if self.trainer is not None and self.trainer.max_steps > 0:
            num_batches = self.trainer.max_steps * self.trainer.accumulate_grad_batches
        else:
            num_batches = len(stream.batches(0))
        return TrainingLoader(self.datasets["train"], stream, num_batches, **self._loader_settings())

    def _evaluation_loader(self, split: str) -> DataLoader:
        examples, (rank, world_size) = self.datasets[split], self._place()
        if len(examples) < world_size:
            raise UserError(f"{split} must hold a pair for each of {world_size} processes, but holds {len(examples)}")
        batches = EvaluationBatches(examples.lengths, self.eval_batch_size, rank, world_size)
        return DataLoader(examples, sampler=batches, **self._loader_settings())

    def val_dataloader(self) -> DataLoader:
        return self._evaluation_loader("val")

    def test_dataloader(self) -> list[DataLoader]:
        return [self._evaluation_loader(split) for split in self.test_sets]


def _ignore_signals(worker: int) -> None:
    """Ctrl-C at a terminal reaches every process; the one that trains says when its workers end."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)


def padded(rows: Sequence[Ids]) -> tuple[Tensor, Tensor]:
    """Rows of ids as one tensor (N, longest), right-padded with PAD, and their lengths (N).

    Of tokens with G ids each, it is (N, longest, G).
    """
    lengths = torch.tensor([len(row) for row in rows])
    tokens = torch.tensor([*itertools.chain.from_iterable(rows)], dtype=torch.long)
    ids = torch.full((len(rows), int(lengths.max()), *tokens.shape[1:]), PAD)
    ids[torch.arange(ids.size(1)) < lengths.unsqueeze(1)] = tokens
    return ids, lengths


def stable_hash(text: str) -> int:
    """64 bits of a text, equal on every machine, unlike `hash`."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def fingerprint(lines: Iterable[str]) -> str:
    """The hash of some lines."""
    total = hashlib.sha256()
    for line in lines:
        total.update(line.encode() + b"\n")
    return total.hexdigest()[:16]
