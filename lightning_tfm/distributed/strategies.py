"""Strategies of the Trainer for several processes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from lightning_tfm.checkpoint import CheckpointReader, read_index
from lightning_tfm.checkpoint.shards import gather_shards, is_sharded
from lightning_tfm.data import MicroBatches
from lightning_tfm.distributed.parallel import (
    Layout,
    broadcast_weights,
    check_activation_checkpointing,
    check_tensor_parallel,
    keep_weights,
    reshard,
)
from lightning_tfm.errors import UserError
from lightning_tfm.networks import Network
from lightning_tfm.system.private import add_in_place, default_store, set_data_parallel_size

TIMEOUT = timedelta(minutes=10)
"""Maximum time that a process waits for the others; the default of Lightning is half an hour."""

STRATEGY_TIMEOUT = timedelta(seconds=10)
"""Maximum time that a process waits for another one to tell its strategy, after both have met."""


class Elastic(DDPStrategy):
    """Data parallelism whose results are the same, bit for bit, for any number of processes.

    Each batch is divided into `num_micro_batches` parts, whatever the number of processes. A micro-batch is a forward
    and backward pass of its own, with its own padding and its own dropout. The gradients of the micro-batches are added
    in a fixed binary tree: each process adds those of its own micro-batches, which are consecutive, and all processes
    together add the results, with the communication of an all-reduce.

    Args:
        num_micro_batches: number of micro-batches, a power of two and a multiple of the number of processes. Each batch
            must have at least one row per micro-batch.
        process_group_backend: the backend of torch.distributed; by default gloo on a CPU and NCCL on GPUs.

    Note:
        All processes need the same number of threads: the setting `num_threads` or, in Python, torch.set_num_threads.
        With accumulated batches, gradients are communicated after each batch, since an addition in a different order
        would give different bits.
    """

    def __init__(self, num_micro_batches: int = 2, process_group_backend: str | None = None) -> None:
        if num_micro_batches < 1 or num_micro_batches & (num_micro_batches - 1):
            lower = 1 << max(0, num_micro_batches.bit_length() - 1)
            raise UserError(f"num_micro_batches must be a power of two, but is {num_micro_batches}; try {lower}")
        super().__init__(process_group_backend=process_group_backend, timeout=TIMEOUT)
        self.num_micro_batches = num_micro_batches

    def check_processes(self, world_size: int) -> None:
        """Raise UserError if the micro-batches cannot be divided among the processes."""
        if self.num_micro_batches % world_size:
            mend = f"try {min(self.num_micro_batches, 1 << world_size.bit_length() - 1)}"
            if not world_size & (world_size - 1):
                mend += f", or set num_micro_batches to {world_size}"
            raise UserError(
                f"trainer.devices times trainer.num_nodes must divide num_micro_batches ({self.num_micro_batches}), "
                f"but is {world_size}; {mend}"
            )

    def configure_ddp(self) -> None:
        """Broadcast the weights of rank 0, as DDP does; this strategy reduces the gradients itself."""
        assert self.model is not None
        broadcast_weights(self.model, self.root_device)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss of the first micro-batch; `backward` computes the others, to keep one graph in memory."""
        self._micro_batches = batch if isinstance(batch, MicroBatches) else MicroBatches((batch,))
        self._batch_idx = batch_idx
        return cast(Tensor, super().training_step(self._micro_batches[0], batch_idx))

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Add the sum of the gradients of all micro-batches over all processes to the gradients of the weights."""
        module = self.lightning_module
        assert module is not None

        def backward_micro_batch(index: int) -> None:
            loss = closure_loss
            if index:  # divided as Lightning divides the first
                loss = cast(Tensor, super(Elastic, self).training_step(self._micro_batches[index], self._batch_idx))
                loss = loss / module.trainer.accumulate_grad_batches
            super(Elastic, self).backward(loss, optimizer, *args, **kwargs)

        weights: list[Tensor] = [weight for weight in module.parameters() if weight.requires_grad]
        add_gradients(weights, backward_micro_batch, len(self._micro_batches))
        return closure_loss


def add_gradients(weights: list[Tensor], backward: Callable[[int], None], num_micro_batches: int) -> None:
    """Add the sum of the gradients of all micro-batches over all processes to the gradients of the weights.

    Args:
        weights: the weights.
        backward: a function that computes the gradients of the micro-batch with an index in this process.
        num_micro_batches: number of micro-batches of this process.
    """
    accumulated = [weight.grad for weight in weights]  # of earlier batches of the step
    partial: list[tuple[int, list[Tensor]]] = []
    for index in range(num_micro_batches):
        for weight in weights:
            weight.grad = None
        backward(index)
        gradients = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in weights]
        add_to_tree(partial, gradients)
    ((_, total),) = partial
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        total = _sum_over_processes(total)
    for weight, gradient, earlier in zip(weights, total, accumulated, strict=True):
        weight.grad = gradient if earlier is None else earlier.add_(gradient)


def add_to_tree(partial: list[tuple[int, list[Tensor]]], values: list[Tensor]) -> None:
    """Add the next leaf of a sum in a binary tree, in place, which adds two partial sums as soon as both are complete.

    Args:
        partial: the height and the values of each complete subtree, from left to right; one entry after 2^n leaves.
        values: the values of the leaf.
    """
    height = 0
    while partial and partial[-1][0] == height:
        _, left = partial.pop()
        add_in_place(left, values)
        values, height = left, height + 1
    partial.append((height, values))


def _sum_over_processes(values: list[Tensor]) -> list[Tensor]:
    """Return the sums of tensors over all processes, added in a binary tree by rank.

    Each process adds one part of all values: the parts are exchanged before, and the sums after.
    """
    world_size = torch.distributed.get_world_size()
    flat = torch.cat([value.flatten() for value in values])
    flat = F.pad(flat, (0, -len(flat) % world_size))
    parts = torch.empty_like(flat)
    torch.distributed.all_to_all_single(parts, flat)
    partial: list[tuple[int, list[Tensor]]] = []
    for part in parts.chunk(world_size):
        add_to_tree(partial, [part])
    ((_, (own,)),) = partial
    torch.distributed.all_gather_into_tensor(flat, own)
    sizes = [value.numel() for value in values]
    return [
        part.view_as(value) for part, value in zip(flat.split([*sizes, len(flat) - sum(sizes)]), values, strict=False)
    ]


class ModelParallel(ModelParallelStrategy):
    """Fully sharded data parallelism (FSDP2), tensor parallelism, or both, with the checkpoints of a single process.

    The weights, their gradients and the optimizer's state are sharded over all devices that read different data.

    Args:
        tensor_parallel_size: number of devices that divide the heads and the hidden layers of each Transformer layer,
            and read the same data; must divide the number of devices. With 1, weights are only sharded.
        activation_checkpointing: whether the activations of Transformer layers are computed again in the backward pass,
            which saves memory and costs time.
        save_distributed_checkpoint: whether each process writes its shards to a file of its own, for networks that are
            too large for the memory of one process. All commands read such checkpoints; `lightning-tfm export --format
            single` writes them as one file.
        process_group_backend: the backend of torch.distributed; by default gloo on a CPU and NCCL on GPUs.

    Note:
        Gradients are reduced after each accumulated batch, since whole gradients might not fit into memory.
    """

    def __init__(
        self,
        tensor_parallel_size: int = 1,
        activation_checkpointing: bool = False,
        save_distributed_checkpoint: bool = False,
        process_group_backend: str | None = None,
    ) -> None:
        if tensor_parallel_size < 1:
            raise UserError(f"tensor_parallel_size must be at least 1, but is {tensor_parallel_size}; try 1")
        super().__init__(
            tensor_parallel_size=tensor_parallel_size,
            process_group_backend=process_group_backend,
            timeout=TIMEOUT,
        )
        self.tensor_parallel_size, self.activation_checkpointing = tensor_parallel_size, activation_checkpointing
        self.save_distributed_checkpoint = save_distributed_checkpoint

    def check_processes(self, world_size: int) -> None:
        """Raise UserError if the processes cannot be divided into groups, or exchange tensors."""
        if world_size > 1 and self.process_group_backend == "gloo" and isinstance(self.accelerator, CUDAAccelerator):
            raise UserError(
                "process_group_backend must be nccl on GPUs, since gloo cannot create the groups of a device mesh, but "
                "is gloo; leave it out, and give each process a GPU of its own"
            )
        if world_size % self.tensor_parallel_size:
            raise UserError(
                "trainer.devices times trainer.num_nodes must be a multiple of tensor_parallel_size "
                f"({self.tensor_parallel_size}), but is {world_size}; try {self.tensor_parallel_size}"
            )
        if world_size == 1 and self.save_distributed_checkpoint:
            raise UserError("save_distributed_checkpoint must be false for a single process, but is true")

    def check_network(self, network: Network) -> None:
        """Raise UserError unless a network can be divided as the arguments say."""
        check_tensor_parallel(network, self.tensor_parallel_size)
        if self.activation_checkpointing:
            check_activation_checkpointing(network)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Return the number of processes that read different data, and the rank of this one among them.

        Unlike Lightning's, both are known before the mesh exists.
        """
        size = self.num_nodes * self.num_processes // self.tensor_parallel_size
        return {"num_replicas": size, "rank": self.global_rank // self.tensor_parallel_size}

    def setup_environment(self) -> None:
        set_data_parallel_size(self, self.distributed_sampler_kwargs["num_replicas"])
        super().setup_environment()

    def _setup_distributed(self) -> None:
        """Check that all processes have this strategy, before they create a mesh, which would wait for the others."""
        super()._setup_distributed()
        store, keys = default_store(), []
        own = f"{type(self).__name__} with tensor_parallel_size {self.tensor_parallel_size}"
        with suppress(RuntimeError):  # rank 0, which has the store, has ended, as is found below
            run = store.add(f"runs of rank {self.global_rank}", 1)  # one store for all runs of a process
            keys = [f"strategy of rank {rank} in run {run}" for rank in range(self.world_size)]
            store.set(keys[self.global_rank], own)
        for rank in range(self.world_size):
            try:
                store.wait([keys[rank]], STRATEGY_TIMEOUT)
                other = store.get(keys[rank]).decode()
            except (RuntimeError, IndexError):
                other = "not answered, so it has another one or has ended"
            if other != own:
                raise UserError(
                    f"all processes of a run must have the same trainer.strategy, but rank {self.global_rank} has "
                    f"{own} and rank {rank} has {other}; start all of them with the same command"
                )

    def on_validation_start(self) -> None:
        """Keep the whole weights, since each process decodes for as long as its own rows need."""
        keep_weights(self._network, whole=True)

    def on_validation_end(self) -> None:
        keep_weights(self._network, whole=False)

    on_test_start, on_test_end = on_validation_start, on_validation_end

    @property
    def _network(self) -> nn.Module:
        return cast(nn.Module, cast(nn.Module, self.lightning_module).network)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.model is not None
        reshard(self.model)  # a checkpoint may be saved while a validation keeps the whole weights
        return self.model.state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        saved = optimizer.state_dict()
        return saved | {"state": {index: dict(state) for index, state in saved["state"].items()}}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self.save_distributed_checkpoint:
            self._layout().write(checkpoint, Path(filepath))
        else:
            self._layout().gather(checkpoint)
        Strategy.save_checkpoint(self, checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        plugin = self.checkpoint_io
        checkpoint = (
            plugin.take(checkpoint_path) if isinstance(plugin, CheckpointReader) else read_index(checkpoint_path)
        )
        if is_sharded(checkpoint):
            if not self.optimizers:
                del checkpoint["optimizer_states"]  # which would be read whole
            self._layout().read(checkpoint, Path(checkpoint_path))
            gather_shards(checkpoint, Path(checkpoint_path))
        else:
            self._layout().scatter(checkpoint)
        return checkpoint

    def _layout(self) -> Layout:
        assert self.model is not None
        return Layout(self.model, self.optimizers, self.device_mesh)

    lightning_restore_optimizer = True  # since `load_checkpoint` only shards the tensors
    load_model_state_dict = Strategy.load_model_state_dict
    load_optimizer_state_dict = Strategy.load_optimizer_state_dict
