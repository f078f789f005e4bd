"""Base class of all data modules."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar, cast

import torch
from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_tfm.data.batch import Examples
from lightning_tfm.data.loader import ResumableDataLoader
from lightning_tfm.data.samplers import BatchDivision, EvaluationSampler, LengthGroupedSampler, TrainingSampler
from lightning_tfm.errors import UserError, ignore_signals, rank_zero_print
from lightning_tfm.system.memory import gc_disabled
from lightning_tfm.tokenization import Tokenizer

try:
    import resource
except ImportError:  # on Windows, which has no such limit
    resource = None  # type: ignore[assignment]

OWN_FILES, FILES_PER_WORKER = 64, 16
"""Files that a process opens itself, and for each worker of its data loaders: pipes and the tensors of batches."""


class TaskDataModule(LightningDataModule, ABC):
    """Base class of data modules. Subclasses implement `examples`.

    Args:
        tokenizer: the tokenizer of the data.
        batch_size: number of rows in a training batch, over all processes.
        eval_batch_size: number of rows in a validation or test batch per process; with 1, a batch may have 2 rows to
            give all processes the same number of batches.
        num_workers: number of worker processes that load batches; 0, to load them in the main process, suits data in
            memory.
        seed: seed of generated data and of the order of training batches.

    Attributes:
        test_sets: names of the test splits, starting with "test"; ("val",) if the data have no test split.
        holds: what the data are, such as "pairs of source and target", for messages.
        source_noun: what a source is called in messages.
        test_setting: the setting by which a user provides test data, for a message.
        max_source_length, max_target_length: maximum lengths in tokens, including EOS; 0 without targets.
    """

    holds: ClassVar[str]
    test_setting: ClassVar[str] = "test"
    source_noun: ClassVar[str] = "sources"
    max_source_length: int
    max_target_length: int = 0
    test_sets: tuple[str, ...] = ("test",)

    def __init__(
        self,
        tokenizer: Tokenizer,
        batch_size: int = 64,
        eval_batch_size: int = 256,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        sizes = {"batch_size": batch_size, "eval_batch_size": eval_batch_size, "num_workers": num_workers}
        for name, value in sizes.items():
            least = 0 if name == "num_workers" else 1
            if value is None or value < least:  # the parser accepts null
                raise UserError(f"{name} must be at least {least}, but is {value}")
        self.tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size
        self.feature_ids, self.target_ids = tokenizer.feature_ids, tokenizer.target_ids
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.num_workers = num_workers
        self.seed = seed
        self.skips_test = False
        self.datasets: Mapping[str, Examples] = {}

    @abstractmethod
    def examples(self, split: str) -> Examples:
        """Return the encoded examples of "train", "val" or a test set, the same in every call and on every machine."""

    def sources(self, split: str) -> Sequence[str]:
        """Return the sources of a split, which the tokenizer normalizes to count overlaps with the training data."""
        return ()

    @property
    def longest_source(self) -> int | None:
        """Return the number of tokens of the longest training source; None if sources have no length of their own."""
        return None

    @property
    def shortest_source(self) -> int | None:
        """Return the number of tokens of the shortest training source; None if sources have no length of their own."""
        return None

    def overlaps(self, splits: Sequence[str]) -> Mapping[str, tuple[int, int]]:
        """Return the number of sources of each of splits except "train", and how many of them also occur in "train"."""
        normalize = self.tokenizer.normalize
        others = {split: [*map(normalize, self.sources(split))] for split in splits if split != "train"}
        # The training sources, which may be many, are read once and not kept.
        repeated = set(chain.from_iterable(others.values())).intersection(map(normalize, self.sources("train")))
        return {split: (len(some), sum(source in repeated for source in some)) for split, some in others.items()}

    def _report_overlaps(self, splits: Sequence[str]) -> None:
        for split, (total, number) in self.overlaps(splits).items():
            if number:
                rank_zero_print(f"{number:,} of {total:,} {self.source_noun} of {split} also occur in train")

    def _report_unknown(self, splits: Sequence[str]) -> None:
        """Print how many symbols of validation and test splits are not in the vocabulary, if the data count them."""

    def check_micro_batches(self, num_micro_batches: int) -> None:
        """Raise UserError if a training batch has fewer rows than there are micro-batches, or processes without any."""
        if self.batch_size < num_micro_batches:
            raise UserError(
                f"batch_size must be at least the number of processes or micro-batches ({num_micro_batches}), but is "
                f"{self.batch_size}"
            )

    def _check_splits(self) -> None:
        """Raise UserError if a split has fewer examples than there are micro-batches."""
        for split, examples in self.datasets.items():
            if len(examples) < self.division.num_micro_batches:
                raise UserError(
                    f"{split} must hold at least one example for each of {self.division.num_micro_batches} processes "
                    f"or micro-batches, but holds {len(examples)}"
                )

    @property
    def fingerprint(self) -> dict[str, str]:
        """Return the fingerprint of each split that is encoded."""
        return {split: examples.fingerprint for split, examples in self.datasets.items()}

    def skip_test(self) -> None:
        """Test on the validation split, without reading the test data; must be called before `setup`."""
        self.test_sets, self.skips_test = ("val",), True

    def _encode(self, *splits: str) -> list[str]:
        """Encode the splits that are not encoded yet, and return their names."""
        missing = [split for split in dict.fromkeys(splits) if split not in self.datasets]
        with gc_disabled():
            self.datasets = {**self.datasets, **{split: self.examples(split) for split in missing}}
        return missing

    def count_batches(self) -> int:
        """Return the number of batches of a pass over the training data, over all processes; encodes these data."""
        self._encode("train")
        return len(self.training_batches(BatchDivision()).batches(0))

    def setup(self, stage: str) -> None:
        """Encode the training data, with which others are compared, and the splits that a stage evaluates.

        Args:
            stage: "validate" or "test", or "fit", which encodes all splits, since a test follows the training.
        """
        _check_open_files(self.num_workers)
        evaluated = {"validate": ("val",), "test": self.test_sets}.get(stage, ("val", *self.test_sets))
        if encoded := self._encode("train", *evaluated):
            self._check_splits()
            self._report_overlaps(encoded)
            self._report_unknown(encoded)
            if self.test_sets == ("val",) and not self.skips_test:
                rank_zero_print(
                    "the data have no test split: the model is tested on the validation split, which selects the "
                    f"checkpoint; set data.init_args.{self.test_setting}"
                )

    def training_batches(self, division: BatchDivision) -> TrainingSampler:
        """Return the sampler of training batches; raise UserError if there are too few examples for a batch."""
        examples = self.datasets["train"]
        if self.batch_size > len(examples):
            raise UserError(
                f"batch_size must be at most the {len(examples)} training examples, but is {self.batch_size}"
            )
        return LengthGroupedSampler(examples.lengths, self.batch_size, self.seed, division)

    def _loader_settings(self) -> dict[str, Any]:
        return {
            "batch_size": None,  # the sampler yields batches
            "num_workers": self.num_workers,
            "persistent_workers": self.num_workers > 0,
            "worker_init_fn": _ignore_signals,
            "pin_memory": self.trainer is not None and self.trainer.strategy.root_device.type == "cuda",
            # Otherwise, each iterator would draw from the generator of dropout.
            "generator": torch.Generator(),
        }

    @property
    def division(self) -> BatchDivision:
        """Return the micro-batches of this process: those of the strategy, or one for each process."""
        return BatchDivision.of(self.trainer and self.trainer.strategy)

    def train_dataloader(self) -> ResumableDataLoader:
        """Return the loader of all batches of the run, or of one epoch if `max_steps` is not set."""
        stream = self.training_batches(self.division)
        if self.trainer is not None and self.trainer.max_steps > 0:
            num_batches = self.trainer.max_steps * self.trainer.accumulate_grad_batches
        else:
            num_batches = len(stream.batches(0))
        return ResumableDataLoader(self.datasets["train"], stream, num_batches, **self._loader_settings())

    def _evaluation_loader(self, split: str) -> DataLoader[Any]:
        examples = self.datasets[split]
        batches = EvaluationSampler(len(examples), self._by_length(examples), self.eval_batch_size, self.division)
        return DataLoader(cast(Dataset[Any], examples), sampler=batches, **self._loader_settings())

    def _by_length(self, examples: Examples) -> Callable[[Tensor], Tensor]:
        """Return the function from positions (N) in the order by length to rows."""
        return examples.lengths.argsort(stable=True).__getitem__

    def val_dataloader(self) -> DataLoader[Any]:
        return self._evaluation_loader("val")

    def test_dataloader(self) -> list[DataLoader[Any]]:
        return [self._evaluation_loader(split) for split in self.test_sets]


def _check_open_files(num_workers: int) -> None:
    """Raise UserError if a process may not open the files of its workers, of which torch would start some."""
    if resource is None or not num_workers:
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = OWN_FILES + FILES_PER_WORKER * num_workers
    if limit != resource.RLIM_INFINITY and needed > limit:
        most = max(0, (limit - OWN_FILES) // FILES_PER_WORKER)
        raise UserError(
            f"data.num_workers must be at most {most} with at most {limit} open files, but is {num_workers}; lower it, "
            f"or allow more files with `ulimit -n {needed}`"
        )


def _ignore_signals(worker: int) -> None:
    """Ignore signals in a worker, since Ctrl-C reaches all processes and the main process stops its workers."""
    ignore_signals()
