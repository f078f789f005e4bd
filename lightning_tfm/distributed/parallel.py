"""Fully sharded data parallelism (FSDP2) and tensor parallelism of a network over a device mesh.

The mesh has the dimensions `data_parallel`, whose processes read different data and share the weights by FSDP2 (Zhao et
al. 2023), and `tensor_parallel`, whose processes read the same data and divide the heads and the hidden layers of each
Transformer layer (Shoeybi et al. 2019, 3).
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch.utils.checkpoint
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import Optimizer

from lightning_tfm.checkpoint.shards import INDEX, new_folder, part_major, rank_major, read_shards, write_shards
from lightning_tfm.distributed.tensors import full_tensor, local, mesh_of, shard
from lightning_tfm.errors import UserError
from lightning_tfm.layers import CrossAttention, FeedForward, Linear, SelfAttention, TransformerLayer
from lightning_tfm.networks import Network
from lightning_tfm.system import private

DATA, TENSOR = "data_parallel", "tensor_parallel"
"""Dimensions of a device mesh, named as Lightning does."""

ENTRIES = ("encode", "decode_step", "logits")
"""Methods of a network that are called instead of `forward`."""


def check_tensor_parallel(network: Network, size: int) -> None:
    """Raise UserError if the Transformer layers of a network cannot be divided among `size` processes."""
    if size == 1 or is_parallel(network):
        return
    layers = _transformer_layers(network)
    reasons = [str(module.UNDIVIDED) for module in network.modules() if hasattr(module, "UNDIVIDED")]
    if not layers:
        reasons = [f"{type(network).__name__}, whose layers cannot be divided"]
    if reasons:
        raise UserError(
            f"tensor_parallel_size must be 1 for {reasons[0]}, but is {size}; its weights can be sharded over all "
            "devices instead"
        )
    for layer in layers:
        attention, hidden = layer.self_attention, cast(Linear, layer.feed_forward[2]).in_features
        numbers = {"num_heads": attention.num_heads, "num_kv_heads": attention.num_kv_heads, "d_ff": hidden}
        for name, divided in numbers.items():
            if divided % size:
                raise UserError(
                    f"tensor_parallel_size must divide {name} ({divided}), but is {size}; try {math.gcd(divided, size)}"
                )


def check_activation_checkpointing(network: Network) -> None:
    """Raise UserError if a network has no layers whose activations can be computed again."""
    if not _transformer_layers(network):
        raise UserError(
            f"activation_checkpointing must be false for {type(network).__name__}, which has no Transformer layers, "
            "but is true"
        )


def broadcast_weights(module: nn.Module, device: torch.device) -> None:
    """Broadcast the weights of rank 0 to all processes, in place; the buffers are the same in all processes.

    Args:
        module: the module, which stays on its device.
        device: the device of this process. NCCL only supports tensors on GPUs, so each weight is copied there in turn.
    """
    for parameter in module.parameters():
        weight = parameter.detach()
        value = weight.to(device).contiguous()
        torch.distributed.broadcast(value, src=0)
        weight.copy_(value)


def parallelize(network: Network, mesh: DeviceMesh, activation_checkpointing: bool) -> None:
    """Divide a network, which has the same weights on all processes, over a mesh, in place."""
    data, tensor = mesh[DATA], mesh[TENSOR]
    layers = _transformer_layers(network)
    if tensor.size() > 1:
        check_tensor_parallel(network, tensor.size())
        for module, name, parts in _fused(network):
            weight = getattr(module, name)
            weight.data.copy_(rank_major(weight.data, parts, tensor.size()))
        for layer in layers:
            _divide(layer, tensor)
    if activation_checkpointing:
        for layer in (layer for layer in layers if "forward" not in vars(layer)):  # set by an earlier call
            # Unlike a wrapper module, this keeps the names of the weights.
            layer.forward = partial(torch.utils.checkpoint.checkpoint, layer.forward, use_reentrant=False)  # type: ignore[method-assign]
    if data.size() > 1:
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # it is not modified in place
        for layer in layers:
            if hasattr(layer, "cross_attention"):  # the encoder's output is projected outside of the layer's `forward`
                fully_shard(layer.cross_attention, mesh=data)
                for name in ("project_memory", "weights"):  # a pointer-generator is trained with its weights
                    register_fsdp_forward_method(layer.cross_attention, name)
            fully_shard(layer, mesh=data)
            register_fsdp_forward_method(layer, "step")
        fully_shard(network, mesh=data, reshard_after_forward=False)  # its weights are used at the end and at the start
        for name in ENTRIES:
            if hasattr(network, name):
                register_fsdp_forward_method(network, name)


def _divide(layer: TransformerLayer, mesh: DeviceMesh) -> None:
    """Divide the heads and the hidden layer of a Transformer layer."""
    names = {name for name, _ in layer.named_modules()}
    styles = dict.fromkeys(layer.COLUMNS, ColwiseParallel()) | dict.fromkeys(layer.ROWS, RowwiseParallel())
    parallelize_module(layer, mesh, {name: style for name, style in styles.items() if name in names})
    for module in layer.modules():
        if isinstance(module, SelfAttention | CrossAttention):
            module.num_heads //= mesh.size()
            module.head_group = mesh.get_group()
            if isinstance(module, SelfAttention):
                module.num_kv_heads //= mesh.size()
        elif isinstance(module, nn.ReLU):
            module.inplace = False  # its input is a view of a distributed tensor
        elif isinstance(module, Linear):
            module.SPLITS_MATRICES = False  # distributed matrices cannot be split


def _transformer_layers(network: nn.Module) -> list[TransformerLayer]:
    return [module for module in network.modules() if isinstance(module, TransformerLayer)]


def _fused(network: nn.Module) -> Iterator[tuple[nn.Module, str, tuple[int, ...]]]:
    """Yield the parameters of fused projections: the linear layer, the name of the parameter, the sizes of its parts.

    Linear layers of a single part need no other order of their rows.
    """
    for module in network.modules():
        if isinstance(module, SelfAttention | CrossAttention | FeedForward):
            name, parts = module.fused
            projection = getattr(module, name)
            for parameter in ("weight", "bias") if len(parts) > 1 else ():  # not those of LoRA, which is not divided
                if getattr(projection, parameter) is not None:
                    yield projection, parameter, parts


class Layout:
    """Conversion of checkpoints between a divided module and a single process.

    Args:
        module: the module.
        optimizers: its optimizers; empty outside training.
        mesh: the mesh over which the module is divided.
    """

    def __init__(self, module: nn.Module, optimizers: Sequence[Optimizer], mesh: DeviceMesh) -> None:
        self.tensor_parallel_size = mesh[TENSOR].size()
        self.by_name = dict(module.named_parameters(remove_duplicate=False))
        self.by_optimizer = [
            [parameter for group in optimizer.param_groups for parameter in group["params"]] for optimizer in optimizers
        ]
        self.parts = {id(getattr(projection, name)): parts for projection, name, parts in _fused(module)}

    def gather(self, checkpoint: dict[str, Any]) -> None:
        """Replace the shards in a checkpoint by whole tensors, in place; called by all processes.

        The process of rank 0 keeps them on the CPU; the others, which write nothing, drop them.
        """
        keeps = torch.distributed.get_rank() == 0
        for state, name, parameter, _ in self._tensors(checkpoint):
            value = full_tensor(state[name])
            value = value.cpu() if keeps else torch.empty_like(value, device="meta")
            state[name] = part_major(value, self._parts(parameter), self.tensor_parallel_size)

    def scatter(self, checkpoint: dict[str, Any]) -> None:
        """Replace the whole tensors in a checkpoint by the shards of this process, in place."""
        for state, name, parameter, _ in self._tensors(checkpoint):
            value = rank_major(state[name], self._parts(parameter), self.tensor_parallel_size)
            state[name] = shard(value.to(parameter.device), like=parameter)

    def write(self, checkpoint: dict[str, Any], path: Path) -> None:
        """Write the shards in a checkpoint to files beside its path, and replace them by tensors without data."""
        entries = list(self._tensors(checkpoint))
        folder = new_folder(path, checkpoint["global_step"])
        checkpoint[INDEX] = {
            "folder": folder.name,
            "files": write_shards({key: state[name] for state, name, _, key in entries}, folder),
            "tensor_parallel_size": self.tensor_parallel_size,
            "fused": {key: parts for *_, parameter, key in entries if len(parts := self._parts(parameter)) > 1},
        }
        for state, name, _, _ in entries:
            state[name] = torch.empty(state[name].shape, dtype=state[name].dtype, device="meta")

    def read(self, checkpoint: dict[str, Any], path: Path) -> None:
        """Replace the tensors without data in a checkpoint by the shards of this process, in place.

        The files may have been written by another number of processes.
        """
        index = checkpoint[INDEX]
        entries = [entry for entry in self._tensors(checkpoint) if entry[0][entry[1]].is_meta]
        tensors = {key: torch.empty_like(parameter, dtype=state[name].dtype) for state, name, parameter, key in entries}
        read_shards(tensors, path, index)
        for state, name, parameter, key in entries:
            state[name] = tensors[key]
            if len(self._parts(parameter)) > 1 and index["tensor_parallel_size"] != self.tensor_parallel_size:
                value = part_major(full_tensor(tensors[key]), self._parts(parameter), index["tensor_parallel_size"])
                state[name] = shard(rank_major(value, self._parts(parameter), self.tensor_parallel_size), parameter)

    def _parts(self, parameter: Tensor) -> tuple[int, ...]:
        """Return the relative sizes of the projections that are fused in a matrix."""
        return self.parts.get(id(parameter), (1,))

    def _tensors(self, checkpoint: Mapping[str, Any]) -> Iterator[tuple[dict[Any, Any], Any, DTensor, str]]:
        """Yield the tensors of the shapes of divided parameters: dictionary, key, parameter, and key in the shards."""
        for part in ("state_dict", "current_model_state"):  # the second one with averaged weights
            state = checkpoint.get(part, {})
            for name, parameter in self.by_name.items():
                if name in state and isinstance(parameter, DTensor):
                    yield state, name, parameter, f"{part}/{name}"
        optimizers = zip(self.by_optimizer, checkpoint.get("optimizer_states", ()), strict=False)
        for number, (parameters, saved) in enumerate(optimizers):
            for index, state in saved["state"].items():
                parameter = parameters[index]
                for name, value in state.items():
                    if isinstance(parameter, DTensor) and value.shape == parameter.shape:
                        yield state, name, parameter, f"optimizer_states/{number}/state/{index}/{name}"


def is_parallel(network: nn.Module) -> bool:
    """Return whether a network has been divided by `parallelize`."""
    return any(mesh_of(parameter) is not None for parameter in network.parameters())


def data_group(strategy: Strategy) -> ProcessGroup | None:
    """Return the processes that together read all data once; None for all processes."""
    mesh = getattr(strategy, "device_mesh", None)
    return None if mesh is None else mesh[DATA].get_group()


def norms(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the norm (N) of each of N tensors over all processes, with one all-reduce per group of processes."""
    values = torch.stack(private.norms([local(tensor) for tensor in tensors], dtype))
    groups: dict[ProcessGroup, list[int]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        if isinstance(tensor, DTensor):
            for dimension, placement in enumerate(tensor.placements):
                if not isinstance(placement, Replicate):
                    groups[tensor.device_mesh.get_group(dimension)].append(index)
    for group, indices in groups.items():
        squares = values[indices] ** 2
        torch.distributed.all_reduce(squares, group=group)
        values[indices] = squares.sqrt()
    return values


def keep_weights(network: nn.Module, whole: bool) -> None:
    """Keep the whole weights in each process after its next forward pass, or only the shards.

    Decoding calls the network once per token, and each process stops when its own rows have ended, so weights cannot be
    gathered in each call.
    """
    if not whole:
        reshard(network)
    for module in network.modules():
        if isinstance(module, FSDPModule) and module is not network:  # which keeps its weights in any case
            module.set_reshard_after_forward(not whole, recurse=False)


def reshard(network: nn.Module) -> None:
    """Free the whole weights that `keep_weights` keeps, until the next forward pass."""
    for module in network.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
