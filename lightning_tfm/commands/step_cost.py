"""Cost of a training step on each device: memory, FLOPs and traffic, without training.

A step runs on fake tensors, which have shapes but no memory, in one process of a fake process group; networks with
recurrent layers run on real tensors, since only the kernels of these layers know the memory that they need.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from math import prod
from typing import Any

import torch
from lightning.pytorch.plugins import Precision
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.flop_counter import FlopCounterMode

from lightning_tfm.data import BatchDivision, MicroBatches, TaskDataModule
from lightning_tfm.distributed.parallel import DATA, TENSOR, parallelize
from lightning_tfm.distributed.strategies import add_gradients
from lightning_tfm.distributed.tensors import local
from lightning_tfm.system.private import (
    cpu_attention_flops,
    fake_mode,
    memory_tracker,
    observe_operators,
    without_fake_mode,
)
from lightning_tfm.tasks import TaskModule

aten = torch.ops.aten

SAMPLE = 100
"""Number of batches at the beginning of a run of which the largest is planned."""

COLLECTIVES = ("allreduce", "reducescatter", "allgather", "alltoall", "broadcast")
"""Collectives that strategies use, as torch names them without underscores."""

Step = Callable[[Any], Tensor]
"""Function from a batch to its summed loss."""

Strategy = Callable[[TaskModule, DeviceMesh], Step]
"""Function that distributes a module over a mesh, before it has an optimizer, and returns its training step."""


@dataclass(frozen=True)
class StepCost:
    """Cost of a training step on the device with the most work.

    Attributes:
        weights: bytes of the weights, their average and the buffers.
        gradients: bytes of the gradients.
        optimizer: bytes of the state of the optimizer.
        activations: other bytes at the peak: activations, temporary tensors, communication buffers and the batch.
        flops: FLOPs of the matrix products.
        sent: bytes sent to other devices.
        collectives: the number of calls of each collective, by name.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    flops: int
    sent: int
    collectives: Mapping[str, int]

    @property
    def memory(self) -> int:
        """Return the peak memory in bytes."""
        return self.weights + self.gradients + self.optimizer + self.activations


@contextmanager
def fake_processes(number: int, tensor_parallel_size: int = 1) -> Iterator[DeviceMesh]:
    """Pretend that this process is the first of several, and yield the mesh of their devices.

    Args:
        number: the number of processes.
        tensor_parallel_size: the number of processes that divide the Transformer layers and read the same data.
    """
    torch.distributed.init_process_group("fake", rank=0, world_size=number)
    try:
        shape = (number // tensor_parallel_size, tensor_parallel_size)
        yield init_device_mesh("cpu", shape, mesh_dim_names=(DATA, TENSOR))  # not in fake mode, since it reads tensors
    finally:
        torch.distributed.destroy_process_group()


def replicate(module: TaskModule, mesh: DeviceMesh) -> Step:
    """Keep a copy of the module on each device and reduce nothing: one device, or elastic determinism."""
    return lambda batch: module.loss(batch)[0]


def ddp(module: TaskModule, mesh: DeviceMesh) -> Step:
    """Keep a copy of the module on each device, with DDP."""
    module.forward = replicate(module, mesh)  # type: ignore[method-assign]  # which DDP calls
    parallel = DistributedDataParallel(module, process_group=mesh[DATA].get_group(), init_sync=False)

    def reduce(bucket: Tensor) -> torch.futures.Future[Tensor]:  # as by default, but visible to dispatch modes
        torch.distributed.all_reduce(bucket, group=mesh[DATA].get_group())
        reduced: torch.futures.Future[Tensor] = torch.futures.Future()
        reduced.set_result(bucket)
        return reduced

    parallel.register_comm_hook(None, lambda state, bucket: reduce(bucket.buffer()))
    return parallel


def divide(module: TaskModule, mesh: DeviceMesh, activation_checkpointing: bool = False) -> Step:
    """Shard the weights with FSDP2, and divide the Transformer layers with tensor parallelism."""
    with without_fake_mode():  # the weights stay fake, but the mesh reads tensors of its own
        parallelize(module.network, mesh, activation_checkpointing)
    return lambda batch: module.loss(batch)[0]


def largest_batch(data: TaskDataModule, world_size: int = 1, num_micro_batches: int | None = None) -> Any:
    """Return the largest of the first SAMPLE training batches, as the process with the most elements receives it.

    Args:
        data: the data module, after `setup`.
        world_size: the number of processes.
        num_micro_batches: the number of micro-batches with elastic determinism; None without it.

    Returns:
        A batch; with elastic determinism, its micro-batches.
    """
    number = num_micro_batches or world_size
    check_rows(data, number)
    stream, examples = data.training_batches(BatchDivision()), data.datasets["train"]
    rows = max(islice(stream, SAMPLE), key=lambda rows: num_elements(examples[rows]))
    by_rank = (BatchDivision(rank, world_size, number).own for rank in range(world_size))
    parts = (MicroBatches(examples[rows[index::number]] for index in own) for own in by_rank)
    largest = max(parts, key=num_elements)
    return largest if num_micro_batches else largest[0]


def check_rows(data: TaskDataModule, number: int) -> None:
    """Raise UserError unless each training batch has a row for each of a number of processes or micro-batches."""
    data.check_micro_batches(number)
    data.training_batches(BatchDivision(0, number, number))  # checks batches of a number of tokens


def num_elements(batch: Any) -> int:
    """Return the number of elements of a batch, including padding."""
    return sum(value.numel() for value in _tensors(batch))


def _tensors(values: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists and dictionaries."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, tuple | list | dict):
        for value in values.values() if isinstance(values, dict) else values:
            yield from _tensors(value)


def step_cost(
    make: Callable[[], TaskModule],
    batch: Any,
    strategy: Strategy = replicate,
    mesh: DeviceMesh | None = None,
    precision: Precision = Precision(),
    accumulated: int = 1,
    averages: bool = False,
) -> StepCost:
    """Return the cost of a training step, with the optimizer's state of earlier steps.

    Args:
        make: a function that constructs the module.
        batch: the batch of a process; with elastic determinism, its micro-batches.
        strategy: the strategy: `replicate`, `ddp`, `divide` or another function.
        mesh: the mesh of the devices, see `fake_processes`; None for one device.
        precision: Lightning's plugin for the precision.
        accumulated: the number of batches of a step.
        averages: whether an average of the weights is kept.
    """
    if mesh is None:
        with fake_processes(1) as mesh:
            return step_cost(make, batch, strategy, mesh, precision, accumulated, averages)
    mode: Any = fake_mode(allow_non_fake_inputs=True)
    with mode:
        if make().network.is_recurrent:
            mode = nullcontext()
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", ".*all_gather_into_tensor. is deprecated")
        stack.enter_context(mode)
        with precision.module_init_context():
            modules = [make() for _ in range(1 + averages)]
        module = modules[0].train()
        move = getattr(mode, "from_tensor", lambda tensor: tensor)  # missing in nullcontext
        batch = apply_to_collection(batch, Tensor, move)
        step = strategy(module, mesh)
        optimizer = module.new_optimizer(str(precision.precision))
        weights: list[Tensor] = [weight for weight in module.parameters() if weight.requires_grad]
        for weight in weights:
            weight.grad = torch.zeros_like(weight)
        optimizer.step()  # creates the state
        tracker, traffic = memory_tracker(), _Traffic(mesh)
        observer = observe_operators(traffic.count)

        def forward(batch: Any) -> Tensor:
            with precision.forward_context():
                return step(batch)

        if any(isinstance(weight, DTensor) for weight in weights):
            # In their first call, operations on distributed tensors also run on whole fake tensors, to infer shapes.
            _accumulate(weights, forward, optimizer, batch)
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        tracker.track_external(*modules, optimizer, *_tensors(batch), *gradients)
        del gradients
        with FlopCounterMode(display=False, custom_mapping=KERNEL_FLOPS) as counter, tracker, observer:
            for index in range(accumulated):
                is_last = index == accumulated - 1
                with nullcontext() if is_last or not isinstance(step, DistributedDataParallel) else step.no_sync():
                    _accumulate(weights, forward, None if index else optimizer, batch)
            optimizer.step()
        state = {
            "weights": _bytes(*([*each.parameters(), *each.buffers()] for each in modules)),
            "gradients": _bytes([weight.grad for weight in weights]),
            "optimizer": _bytes(*(list(part.state.values()) for part in getattr(optimizer, "parts", [optimizer]))),
        }
        (peak,) = (snapshot["Total"] for snapshot in tracker.get_tracker_snapshot("peak").values())
        activations = peak - sum(state.values())
        flops = counter.get_total_flops()
    return StepCost(**state, activations=activations, flops=flops, sent=traffic.sent, collectives=traffic.calls)


def _accumulate(
    weights: list[Tensor], forward: Callable[[Any], Tensor], optimizer: Optimizer | None, batch: Any
) -> None:
    """Compute the gradients of a batch, in the order of Lightning and of `Elastic`.

    Args:
        weights: the weights that are trained.
        forward: a function that returns the loss of a batch.
        optimizer: the optimizer whose gradients are reset, which Lightning does after the forward pass; None to add to
            them.
        batch: the batch, or its micro-batches.
    """
    is_divided = isinstance(batch, MicroBatches)
    loss = forward(batch[0] if is_divided else batch)
    if optimizer is not None:
        optimizer.zero_grad()
    if is_divided:
        add_gradients(weights, lambda index: (forward(batch[index]) if index else loss).backward(), len(batch))
    else:
        loss.backward()


class _Traffic:
    """Collectives of this process.

    Attributes:
        sent: the bytes that it sends. In a ring of n processes, each sends 2 (n - 1) / n of the bytes of an all-reduce
            (Patarasuk & Yuan 2009), and (n - 1) / n of the larger of input and output of all other collectives.
        calls: the number of calls, by name.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        groups = [mesh.get_group(dimension) for dimension in range(mesh.ndim)]
        self.sizes: dict[str, int] = {group.group_name: group.size() for group in groups}
        self.sent = 0
        self.calls: Counter[str] = Counter()

    def count(self, operator: Any, args: Sequence[Any], result: Any) -> None:
        """Count an operator that has been called if it is a collective."""
        name = next((name for name in COLLECTIVES if name in operator.__name__.replace("_", "")), None)
        if "c10d" in operator.namespace and name:
            # The group is an object or, of functional collectives, a name.
            objects = (arg for arg in args if isinstance(arg, torch.ScriptObject | str))
            group = next(arg for arg in objects if not isinstance(arg, str) or arg in self.sizes)
            n = self.sizes[group] if isinstance(group, str) else ProcessGroup.unbox(group).size()
            size = max(sum(value.nbytes for value in _tensors(part)) for part in (*args, result))
            self.sent += (2 if name == "allreduce" else 1) * (n - 1) * size // n
            self.calls[name] += 1


def _recurrent_flops(input: Sequence[int], *weights: Sequence[int]) -> int:
    """Return the FLOPs of a recurrent layer, from the shapes of its input (..., D) and of its two weights."""
    return 2 * prod(input[:-1]) * sum(map(prod, weights))


KERNEL_FLOPS: dict[Any, Callable[..., int]] = {
    **cpu_attention_flops(),
    aten.mkldnn_rnn_layer: lambda input, *others, **_: _recurrent_flops(input, *others[:2]),
    aten.mkldnn_rnn_layer_backward: lambda input, *others, **_: 2 * _recurrent_flops(input, *others[:2]),
}
"""Formulas for kernels that FlopCounterMode does not know."""


def _bytes(*values: Any) -> int:
    """Return the bytes of tensors in nested values, of sharded tensors those on this device."""
    return sum(local(value).nbytes for value in _tensors(values))
