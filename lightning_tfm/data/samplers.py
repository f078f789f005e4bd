"""Samplers of the rows of training and evaluation batches."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.utils.data import Sampler

from lightning_tfm.data.hashing import stable_hash


class BatchDivision(NamedTuple):
    """Division of each training batch into micro-batches, of which each process computes equally many.

    Attributes:
        rank: the rank of this process among those that read different data.
        world_size: the number of processes that read different data.
        num_micro_batches: the number of micro-batches over all processes, a multiple of the number of processes.
    """

    rank: int = 0
    world_size: int = 1
    num_micro_batches: int = 1

    @classmethod
    def of(cls, strategy: Strategy | None) -> BatchDivision:
        """Return the micro-batches of this process in a strategy: as many as it sets, or one for each process.

        Processes of a tensor-parallel group read the same data, so they count as one.
        """
        place = getattr(strategy, "distributed_sampler_kwargs", {"num_replicas": 1, "rank": 0})
        return cls(place["rank"], place["num_replicas"], getattr(strategy, "num_micro_batches", place["num_replicas"]))

    @property
    def own(self) -> range:
        """Return the micro-batches of this process, in order."""
        size = self.num_micro_batches // self.world_size
        return range(self.rank * size, (self.rank + 1) * size)


class TrainingSampler(Sampler[Tensor], ABC):
    """Base class of samplers of training batches: an endless stream that depends only on the seed.

    The stream consists of epochs, each in a different order. The global batch of a step is the same for any number of
    micro-batches, among which its rows are divided. An iteration yields the rows of the micro-batches of this process
    one after another, starting at batch `start` of the stream.
    """

    def __init__(self, seed: int, division: BatchDivision = BatchDivision()) -> None:
        self.seed, self.division = seed, division
        self.start = 0

    @abstractmethod
    def _epoch(self, number: int, generator: torch.Generator) -> Tensor | Sequence[Tensor]:
        """Return the batches of an epoch, each with the rows of all micro-batches."""

    def batches(self, number: int) -> Tensor | Sequence[Tensor]:
        """Return the batches of epoch `number` in order, each with the rows of all micro-batches."""
        return self._epoch(number, torch.Generator().manual_seed(stable_hash(f"{self.seed} {number}") >> 1))

    @property
    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Return the settings that must be unchanged, in addition to the data, to resume the stream."""

    @abstractmethod
    def samples_seen(self, position: int) -> int:
        """Return the number of rows in the first `position` batches of the stream, over all processes."""

    def progress(self, position: int) -> dict[str, float]:
        """Return what the first `position` batches consist of, to be logged by name."""
        return {}

    def __iter__(self) -> Iterator[Tensor]:
        skipped = self.start
        for number in itertools.count():
            batches = self.batches(number)
            for rows in map(batches.__getitem__, range(skipped, len(batches))):
                for index in self.division.own:
                    yield rows[index :: self.division.num_micro_batches]
            skipped = max(0, skipped - len(batches))


class LengthGroupedSampler(TrainingSampler):
    """Sampler of batches with a fixed number of rows, over all processes.

    Rows of similar length are grouped into batches to reduce padding: the shuffled rows are sorted by length in pools
    of 16 batches and split into batches, which are shuffled. Rows that do not fill a batch are dropped from the epoch.

    Args:
        lengths: the length of each row in tokens (N).
        batch_size: number of rows in a batch, over all processes.
        seed: the seed of the order.
        division: the micro-batches of this process.
    """

    POOL = 16

    def __init__(self, lengths: Tensor, batch_size: int, seed: int, division: BatchDivision = BatchDivision()) -> None:
        super().__init__(seed, division)
        self.lengths, self.batch_size = lengths, batch_size
        self.batches_per_epoch = len(lengths) // batch_size

    @property
    def settings(self) -> dict[str, Any]:
        return {"seed_everything": self.seed, "batch_size": self.batch_size}

    def samples_seen(self, position: int) -> int:
        return position * self.batch_size

    def _epoch(self, number: int, generator: torch.Generator) -> Tensor:
        """Return the batches of an epoch (batches, B)."""
        order = torch.randperm(len(self.lengths), generator=generator)[: self.batches_per_epoch * self.batch_size]
        for pool in order.split(self.POOL * self.batch_size):
            pool.copy_(pool[self.lengths[pool].argsort(stable=True)])  # in place, which halves the memory
        batches = order.view(self.batches_per_epoch, self.batch_size)
        return batches[torch.randperm(self.batches_per_epoch, generator=generator)]


class MaxTokensSampler(TrainingSampler):
    """Sampler of batches with a maximum number of tokens, including padding: many short rows or few long rows.

    The rows are sorted by length, with rows of equal length in random order, and split into full batches, which are
    shuffled. `batch_tokens` is the maximum over all processes, including padding. A row longer than that is its own
    batch. The other arguments are those of `LengthGroupedSampler`.
    """

    def __init__(
        self, lengths: Tensor, batch_tokens: int, seed: int, division: BatchDivision = BatchDivision()
    ) -> None:
        super().__init__(seed, division)
        self.lengths, self.batch_tokens = lengths, batch_tokens
        self.cuts, begin = [], 0  # the same in each epoch
        ordered = lengths.sort(descending=True).values.tolist()
        for index in range(1, len(ordered)):
            if (index + 1 - begin) * ordered[begin] > batch_tokens:
                self.cuts.append(index)
                begin = index
        if self.cuts:  # balance the last two batches
            begin = self.cuts[-2] if len(self.cuts) > 1 else 0
            self.cuts[-1] = min(self.cuts[-1], (begin + len(lengths) + 1) // 2)
        ends = [*self.cuts, len(lengths)]
        # The number of rows of each batch.
        self.sizes = [end - begin for begin, end in zip([0, *self.cuts], ends, strict=True)]

    @property
    def settings(self) -> dict[str, Any]:
        return {"seed_everything": self.seed, "batch_tokens": self.batch_tokens}

    def samples_seen(self, position: int) -> int:
        passes, rest = divmod(position, len(self.sizes))
        return passes * len(self.lengths) + sum(len(batch) for batch in self.batches(passes)[:rest])

    def _epoch(self, number: int, generator: torch.Generator) -> list[Tensor]:
        order = torch.randperm(len(self.lengths), generator=generator)
        order = order[self.lengths[order].argsort(stable=True, descending=True)]
        batches = order.tensor_split(self.cuts)
        return [batches[index] for index in torch.randperm(len(batches), generator=generator).tolist()]


class WindowSampler(TrainingSampler):
    """Sampler of batches of windows of a text, given by the positions of their first tokens.

    The windows of an epoch are adjacent and start at a random offset. Their order is a list, or for more than `LISTED`
    windows a function of their number, which needs no memory.

    Args:
        num_tokens: number of tokens in the text.
        max_length: number of tokens in a window.
        batch_size: number of windows in a batch, over all processes.
        seed, division: see `LengthGroupedSampler`.
    """

    LISTED = 1 << 22

    def __init__(
        self, num_tokens: int, max_length: int, batch_size: int, seed: int, division: BatchDivision = BatchDivision()
    ) -> None:
        super().__init__(seed, division)
        self.num_tokens, self.max_length, self.batch_size = num_tokens, max_length, batch_size
        self.windows = (num_tokens - 1) // max_length - 1  # complete windows, for any offset
        self.batches_per_epoch = self.windows // batch_size

    @property
    def settings(self) -> dict[str, Any]:
        return {"seed_everything": self.seed, "batch_size": self.batch_size, "max_length": self.max_length}

    def samples_seen(self, position: int) -> int:
        return position * self.batch_size

    def _epoch(self, number: int, generator: torch.Generator) -> Tensor | Sequence[Tensor]:
        """Return the batches of an epoch (batches, B)."""
        first = torch.randint(self.max_length, (), generator=generator)
        if self.windows > self.LISTED:
            return _LargeEpoch(self, first, generator)
        order = torch.randperm(self.windows, generator=generator)[: self.batches_per_epoch * self.batch_size]
        return order.mul_(self.max_length).add_(first).view(self.batches_per_epoch, self.batch_size)


class _LargeEpoch(Sequence[Tensor]):
    """Batches of an epoch of windows, whose order is computed when it is needed.

    The order is a pseudorandom permutation by a Feistel network (Luby & Rackoff 1988) of the numbers below the next
    square, which is applied until the result is the number of a window (Black & Rogaway 2002).
    """

    ROUNDS, FACTOR = 4, 0x1E3779B97F4A7C15  # an odd number of 61 bits

    def __init__(self, sampler: WindowSampler, first: Tensor, generator: torch.Generator) -> None:
        self.sampler, self.first = sampler, first
        self.root = math.isqrt(sampler.windows - 1) + 1
        self.keys = torch.randint(1 << 62, (self.ROUNDS,), generator=generator).tolist()

    def __len__(self) -> int:
        return self.sampler.batches_per_epoch

    def __getitem__(self, index: int | slice) -> Tensor:  # type: ignore[override]  # as of a tensor
        batches = range(len(self))[index]
        if isinstance(batches, int):
            return self[batches : batches + 1][0]
        batch_size = self.sampler.batch_size
        numbers = self._permute(torch.arange(batches.start * batch_size, batches.stop * batch_size))
        while (outside := numbers >= self.sampler.windows).any():
            numbers[outside] = self._permute(numbers[outside])
        return (self.first + numbers * self.sampler.max_length).view(-1, batch_size)

    def _permute(self, numbers: Tensor) -> Tensor:
        left, right = numbers // self.root, numbers % self.root
        for key in self.keys:
            hashed = (right ^ key) * self.FACTOR  # modulo 2 ** 64
            hashed = (hashed ^ hashed >> 32) * self.FACTOR >> 32
            left, right = right, (left + hashed) % self.root
        return left * self.root + right


class MixtureSampler(TrainingSampler):
    """Sampler of batches of windows of several texts in proportion to their weights, see `MixtureDataset`.

    The windows of each text are visited in the order of a `WindowSampler`. Of the first n rows of the stream, each text
    has as many as a party with its share of the votes has of n seats, by the method of Sainte-Laguë (Balinski & Young
    1982, Fair Representation). So every part of the stream holds the texts in proportion to their weights, up to
    rounding, and the number of rows of a text before a batch is known without counting them. An epoch has as many
    windows as all texts together.

    Args:
        sizes: number of tokens in each text.
        weights: the weight of each text, by name; their sum is arbitrary.
        max_length, batch_size, seed, division: see `WindowSampler`.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Mapping[str, float],
        max_length: int,
        batch_size: int,
        seed: int,
        division: BatchDivision = BatchDivision(),
    ) -> None:
        super().__init__(seed, division)
        self.weights, self.max_length, self.batch_size = dict(weights), max_length, batch_size
        seeds = [stable_hash(f"{seed} {index}") for index in range(len(sizes))]
        self.texts = [WindowSampler(size, max_length, 1, own, division) for size, own in zip(sizes, seeds, strict=True)]
        self.offsets = [0, *itertools.accumulate(size - max_length for size in sizes)]  # of the rows of each text
        # Fractions are exact, so rows are not counted twice, or never, because of rounding.
        self.shares = [Fraction(weight) / sum(map(Fraction, weights.values())) for weight in weights.values()]
        self.orders: dict[int, tuple[int, Tensor | Sequence[Tensor]]] = {}  # the current epoch of each text
        self.windows = sum(text.windows for text in self.texts)
        self.batches_per_epoch = self.windows // batch_size

    @property
    def settings(self) -> dict[str, Any]:
        sizes = {"batch_size": self.batch_size, "max_length": self.max_length}
        return {"seed_everything": self.seed, **sizes, "weights": self.weights}

    def samples_seen(self, position: int) -> int:
        return position * self.batch_size

    def progress(self, position: int) -> dict[str, float]:
        """Return the share of each text in the first `position` batches, and how often its windows were visited."""
        values = {}
        for name, text, count in zip(self.weights, self.texts, self.counts(position), strict=True):
            values[f"share/{name}"] = count / (position * self.batch_size)
            values[f"passes/{name}"] = count / text.windows
        return values

    def counts(self, position: int) -> list[int]:
        """Return the number of rows of each text in the first `position` batches."""
        number = position * self.batch_size
        # A text has at least those rows whose quotients, computed below, are at most this bound.
        bound = number - Fraction(len(self.shares), 2)
        counts = [max(0, math.floor(bound * share + Fraction(1, 2))) for share in self.shares]
        while sum(counts) < number:
            quotients = [(count + Fraction(1, 2)) / share for count, share in zip(counts, self.shares, strict=True)]
            counts[quotients.index(min(quotients))] += 1
        return counts

    def batch(self, position: int) -> Tensor:
        """Return the rows (B) of a batch of the stream."""
        rows = []
        for index, (begin, end) in enumerate(zip(self.counts(position), self.counts(position + 1), strict=True)):
            windows = self.texts[index].windows
            while begin < end:
                number, first = divmod(begin, windows)
                last = min(windows, first + end - begin)
                rows.append(self._order(index, number)[first:last].flatten() + self.offsets[index])  # type: ignore[union-attr]  # of a tensor or of _LargeEpoch
                begin += last - first
        return torch.cat(rows)

    def _order(self, index: int, number: int) -> Tensor | Sequence[Tensor]:
        """Return the windows of an epoch of a text, in order."""
        if self.orders.get(index, (None,))[0] != number:
            self.orders[index] = number, self.texts[index].batches(number)
        return self.orders[index][1]

    def _epoch(self, number: int, generator: torch.Generator) -> Sequence[Tensor]:
        return _MixtureEpoch(self, number)


class _MixtureEpoch(Sequence[Tensor]):
    """Batches of an epoch of a mixture, which are computed when they are needed."""

    def __init__(self, sampler: MixtureSampler, number: int) -> None:
        self.sampler, self.number = sampler, number

    def __len__(self) -> int:
        return self.sampler.batches_per_epoch

    def __getitem__(self, index: int) -> Tensor:  # type: ignore[override]  # no slices are needed
        return self.sampler.batch(self.number * len(self) + range(len(self))[index])


class EvaluationSampler(Sampler[Tensor]):
    """Sampler of evaluation batches of rows of similar length, which contain every row once over all processes.

    Each batch is divided into micro-batches of at most `batch_size` rows (2 if it is 1), which do not depend on the
    number of processes. None of them is empty, since processes wait for each other after each one. The order of the
    batches is random but fixed, so the first few are representative.

    Args:
        num_rows: the number of rows.
        by_length: the function from positions (N) in the order by length to rows.
        batch_size: the maximum number of rows in a micro-batch.
        division: the micro-batches of this process.
    """

    def __init__(
        self, num_rows: int, by_length: Callable[[Tensor], Tensor], batch_size: int, division: BatchDivision
    ) -> None:
        self.by_length = by_length
        parts = division.num_micro_batches
        fewest_rows, most_rows = num_rows // parts, -(-num_rows // parts)  # of a micro-batch
        self.num_batches = min(fewest_rows, -(-most_rows // batch_size))
        self.places = [range(index, num_rows, parts) for index in division.own]

    def __len__(self) -> int:
        return self.num_batches * len(self.places)

    def __iter__(self) -> Iterator[Tensor]:
        drawn = torch.randperm(self.num_batches, generator=torch.Generator().manual_seed(0))
        for number in drawn.tolist():
            for places in self.places:
                size, larger = divmod(len(places), self.num_batches)  # the first batches have one more row
                begin = number * size + min(number, larger)
                own = places[begin : begin + size + (number < larger)]
                yield self.by_length(torch.arange(own.start, own.stop, own.step))
