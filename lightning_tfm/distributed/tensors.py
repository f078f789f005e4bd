"""Functions of tensors that may be sharded over a device mesh."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor, gathered along one dimension of its mesh after the other if it is sharded."""
    if not isinstance(tensor, DTensor):
        return tensor
    placements: list[Placement] = list(tensor.placements)
    for dimension in range(len(placements)):
        placements[dimension] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()


def shard(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a tensor, sharded like another one of its shape; all processes have the same tensor."""
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def mesh_of(tensor: Tensor) -> DeviceMesh | None:
    """Return the mesh over which a tensor is divided; None if it is not."""
    return tensor.device_mesh if isinstance(tensor, DTensor) else None


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor in this process."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
