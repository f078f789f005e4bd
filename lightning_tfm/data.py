"""From pairs of texts to batches of ids: disjoint splits, encoding, order, and the base of every data module."""

from __future__ import annotations

import hashlib
import itertools
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from lightning import LightningDataModule
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler
from tqdm import tqdm

from lightning_tfm.errors import UserError
from lightning_tfm.memory import uncollected
from lightning_tfm.tokenizer import BOS, EOS, PAD, Tokenizer


class Pair(NamedTuple):
    """A source text and the target text that answers it.

    `alignment` holds, where it is known, which symbols belong together: (source index, target index), from 0.
    `kind` is what the pair is an example of, where the data have several; metrics are told by it.
    """

    source: str
    target: str
    alignment: tuple[tuple[int, int], ...] | None = None
    kind: str | None = None


class Batch(NamedTuple):
    """Ids, right-padded with PAD.

    Attributes:
        source: (B, S), each row ended by EOS; S = 0 where there is no source.
        target_in: (B, T), each row begun by BOS: what the decoder reads.
        target_out: (B, T), each row ended by EOS: what it should write, target_in one step on.
    """

    source: Tensor
    target_in: Tensor
    target_out: Tensor


class PairDataset(Dataset):
    """Encoded pairs, cut into batches by one index operation: `dataset[rows]` is a Batch."""

    def __init__(self, pairs: Sequence[Pair], tokenizer: Tokenizer) -> None:
        self.pairs = pairs
        self.sources, self.source_lengths = padded([[*tokenizer.encode(pair.source), EOS] for pair in pairs])
        self.targets, self.target_lengths = padded([[BOS, *tokenizer.encode(pair.target), EOS] for pair in pairs])

    @cached_property
    def fingerprint(self) -> str:
        """The hash of the pairs: equal data have equal fingerprints."""
        lines = "".join(f"{pair.source}\t{pair.target}\n" for pair in self.pairs)
        return hashlib.sha256(lines.encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, rows: Tensor) -> Batch:
        source = self.sources[rows, : self.source_lengths[rows].max()]
        target = self.targets[rows, : self.target_lengths[rows].max()]
        target_in = target[:, :-1]
        return Batch(source, target_in.masked_fill(target_in == EOS, PAD), target[:, 1:])


class TrainingBatches(Sampler[Tensor]):
    """The rows of each training batch: an endless stream, from the seed alone.

    The stream passes over the data again and again, each time in another order. Rows of like length share a batch,
    so that little of it is padding: the shuffled rows are sorted by length in pools of 16 batches, cut into
    batches, and the batches shuffled. Rows that do not fill a batch wait for another pass. The global batch of a
    step is the same for any number of processes: they share its rows out.
    """

    POOL = 16

    def __init__(self, lengths: Tensor, batch_size: int, seed: int, rank: int = 0, world_size: int = 1) -> None:
        self.lengths, self.batch_size, self.seed = lengths, batch_size, seed
        self.rank, self.world_size = rank, world_size
        self.batches_per_pass = len(lengths) // batch_size
        self.start = 0  # the batch that iterating begins with

    def __iter__(self) -> Iterator[Tensor]:
        first_pass, skipped = divmod(self.start, self.batches_per_pass)
        for number in itertools.count(first_pass):
            yield from self._pass(number)[skipped:, self.rank :: self.world_size]
            skipped = 0

    def _pass(self, number: int) -> Tensor:
        """The batches of a pass: (batches, B)."""
        generator = torch.Generator().manual_seed(stable_hash(f"{self.seed} {number}") >> 1)
        order = torch.randperm(len(self.lengths), generator=generator)[: self.batches_per_pass * self.batch_size]
        pools = [pool[self.lengths[pool].argsort(stable=True)] for pool in order.split(self.POOL * self.batch_size)]
        batches = torch.cat(pools).view(self.batches_per_pass, self.batch_size)
        return batches[torch.randperm(self.batches_per_pass, generator=generator)]


class TrainingLoader(DataLoader):
    """The training batches of a run: reads on in the stream, also where another process stopped.

    Its state is the same on every process and counts the batches that were handed out, not those that workers have
    prepared. Lightning saves it in checkpoints. To Lightning the whole run is one epoch, for the passes over the
    data need not be equally long, and an epoch's edge is where resuming is hardest to get right.

    Args:
        dataset: the encoded pairs.
        stream: the rows of each batch.
        num_batches: how many batches one iteration hands out at most: it ends at a multiple.
        settings: as those of a DataLoader.
    """

    def __init__(self, dataset: PairDataset, stream: TrainingBatches, num_batches: int, **settings: Any) -> None:
        super().__init__(dataset, sampler=stream, **settings)
        self.num_batches = num_batches
        self.position = 0  # batches handed out since the run began

    @property
    def samples(self) -> int:
        """Pairs handed out since the run began, over all processes."""
        return self.position * self.sampler.batch_size

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[Batch]:
        self.sampler.start = self.position
        for batch in super().__iter__():
            self.position += 1
            yield batch
            if self.position % self.num_batches == 0:
                break

    def state_dict(self) -> dict[str, Any]:
        stream = self.sampler
        return {
            "position": self.position,
            "seed_everything": stream.seed,
            "batch_size": stream.batch_size,
            "fingerprint of the training data": self.dataset.fingerprint,
        }

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


class PairDataModule(LightningDataModule, ABC):
    """Pairs in, batches out. A subclass says what its pairs are.

    Vocabulary and lengths are known before any pair is made, so that a model can be built, and refused, first.

    Args:
        tokenizer: the vocabulary of sources and targets.
        max_source_length: the longest source in tokens, EOS included.
        max_target_length: the longest target in tokens, EOS included.
        batch_size: pairs in a training step, over all processes.
        eval_batch_size: pairs in a batch of validation and test, on each process; one more where rows are few.
        num_workers: processes that cut batches; 0 for none, which suits data that lies in memory.
        seed: what the data and their order are made from.
        test_sets: names of the splits to test on; the first is "test".
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_source_length: int,
        max_target_length: int,
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
        self.max_source_length = max_source_length
        self.max_target_length = max_target_length
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.num_workers = num_workers
        self.seed = seed
        self.test_sets = test_sets
        self.datasets: dict[str, PairDataset] = {}

    @abstractmethod
    def pairs(self, split: str) -> list[Pair]:
        """All pairs of "train", "val" or a test set, the same at every call and on every machine."""

    def check_processes(self, world_size: int) -> None:
        """Raises UserError if there are more processes than rows of a training batch to share out."""
        if self.batch_size < world_size:
            raise UserError(
                f"batch_size must be at least the number of processes ({world_size}), but is {self.batch_size}"
            )

    @property
    def fingerprint(self) -> dict[str, str]:
        """The fingerprint of each split."""
        return {split: dataset.fingerprint for split, dataset in self.datasets.items()}

    def setup(self, stage: str) -> None:
        if self.datasets:
            return
        with uncollected():
            datasets = {
                split: PairDataset(self.pairs(split), self.tokenizer) for split in ("train", "val", *self.test_sets)
            }
        seen: dict[str, str] = {}
        for split, dataset in datasets.items():
            for source in {pair.source for pair in dataset.pairs}:
                if source in seen:
                    raise UserError(f"splits must be disjoint, but {source!r} is in {seen[source]} and in {split}")
                seen[source] = split
            for side, length, limit in (
                ("source", int(dataset.source_lengths.max()), self.max_source_length),
                ("target", int(dataset.target_lengths.max()) - 1, self.max_target_length),
            ):
                if length > limit:
                    raise UserError(f"max_{side}_length must be at least {length} for {split}, but is {limit}")
        self.datasets = datasets

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
        dataset, (rank, world_size) = self.datasets["train"], self._place()
        if self.batch_size > len(dataset):
            raise UserError(f"batch_size must be at most the {len(dataset)} training pairs, but is {self.batch_size}")
        stream = TrainingBatches(dataset.source_lengths, self.batch_size, self.seed, rank, world_size)
        num_batches = stream.batches_per_pass
        if self.trainer is not None and self.trainer.max_steps > 0:
            num_batches = self.trainer.max_steps * self.trainer.accumulate_grad_batches
        return TrainingLoader(dataset, stream, num_batches, **self._loader_settings())

    def _evaluation_loader(self, split: str) -> DataLoader:
        dataset, (rank, world_size) = self.datasets[split], self._place()
        if len(dataset) < world_size:
            raise UserError(f"{split} must hold a pair for each of {world_size} processes, but holds {len(dataset)}")
        batches = EvaluationBatches(dataset.source_lengths, self.eval_batch_size, rank, world_size)
        return DataLoader(dataset, sampler=batches, **self._loader_settings())

    def val_dataloader(self) -> DataLoader:
        return self._evaluation_loader("val")

    def test_dataloader(self) -> list[DataLoader]:
        return [self._evaluation_loader(split) for split in self.test_sets]


class GeneratedDataModule(PairDataModule):
    """Pairs drawn from a seed. A subclass says how one is drawn.

    A source belongs to one split by its hash alone, whatever the seed: a tenth of all sources to validation, a
    fifth to the test sets, the rest to training. So no source is in two splits, not even under two seeds. Training
    pairs are drawn with repetition, as they come; the pairs of other splits are distinct.

    Args:
        sizes: how many pairs each split holds.
        spelling: sources of one spelling, in the sense of this function, belong to one split.
        others: as in PairDataModule.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_source_length: int,
        max_target_length: int,
        batch_size: int,
        eval_batch_size: int,
        num_workers: int,
        seed: int,
        sizes: dict[str, int],
        spelling: Callable[[str], str] = str,
    ) -> None:
        test_sets = tuple(split for split in sizes if split not in ("train", "val"))
        super().__init__(
            tokenizer,
            max_source_length,
            max_target_length,
            batch_size,
            eval_batch_size,
            num_workers,
            seed,
            test_sets,
        )
        for split, size in sizes.items():
            if size < 1:
                raise UserError(f"{split}_size must be at least 1, but is {size}")
        if batch_size > sizes["train"]:
            raise UserError(f"batch_size must be at most train_size ({sizes['train']}), but is {batch_size}")
        self.sizes = sizes
        self.spelling = spelling

    @abstractmethod
    def stream(self, split: str, seed: int) -> Iterator[Pair]:
        """Endless pairs, from a seed; `split` is for those data that draw some pairs for one split only."""

    def pairs(self, split: str) -> list[Pair]:
        size = self.sizes[split]
        bucket = split if split in ("train", "val") else "test"
        pairs: list[Pair] = []
        seen: set[str] = set()
        fruitless = 0
        hidden = rank_zero_only.rank > 0 or not sys.stderr.isatty()
        with tqdm(total=size, desc=f"generating {split}", unit=" pairs", leave=False, disable=hidden) as bar:
            for pair in self.stream(split, stable_hash(f"{split} {self.seed}")):
                if _bucket(self.spelling(pair.source)) == bucket and (bucket == "train" or pair.source not in seen):
                    seen.add(pair.source)
                    pairs.append(pair)
                    fruitless = 0
                    bar.update()
                    if len(pairs) == size:
                        return pairs
                fruitless += 1
                if fruitless > 100_000:
                    raise UserError(
                        f"{split}_size is {size}, but only {len(pairs)} distinct sources were found; try {len(pairs)}"
                    )
        raise AssertionError("a stream ended")


def _ignore_signals(worker: int) -> None:
    """Ctrl-C at a terminal reaches every process; the one that trains says when its workers end."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)


def padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Rows of ids as one tensor (N, longest), right-padded with PAD, and their lengths (N)."""
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.full((len(rows), int(lengths.max())), PAD)
    ids[torch.arange(ids.size(1)) < lengths.unsqueeze(1)] = torch.tensor([*itertools.chain.from_iterable(rows)])
    return ids, lengths


def stable_hash(text: str) -> int:
    """64 bits of a text, equal on every machine, unlike `hash`."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def _bucket(source: str) -> str:
    """The split that a source belongs to: "test" for all test sets."""
    return ("val", "test", "test", *["train"] * 7)[stable_hash(source) % 10]
