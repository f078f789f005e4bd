"""Linear layers, LSTMs and dropout for CPUs: fast paths, 8-bit weights, and precisions that torch lacks."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_tfm.errors import UserError
from lightning_tfm.system.private import has_cpu_bfloat16


def _reads_in_one_thread() -> bool:
    """Return whether BLAS computes matrix-vector products in one thread, as MKL does on CPUs not made by Intel."""
    cpuinfo = Path("/proc/cpuinfo")  # Linux only
    return torch.backends.mkl.is_available() and cpuinfo.exists() and b"GenuineIntel" not in cpuinfo.read_bytes()


class Linear(nn.Linear):
    """`torch.nn.Linear` with a fast path for a single row on a CPU, as in decoding one sequence.

    Attributes:
        CACHED: the number of weights below which the fast path is not used.
        SPLITS_MATRICES: whether this machine uses the fast path.

    Note:
        A matrix-vector product is bound by memory bandwidth. On Intel CPUs, MKL parallelizes it over threads, twice as
        fast as this fast path. On other CPUs, MKL reads the matrix in one thread, at a third of the bandwidth of a core
        (torch 2.13 on an AMD EPYC). There, the fast path splits the matrix into four: a batch of products runs on all
        threads, four times as fast on two cores. Small matrices stay in the cache and do not benefit.
    """

    CACHED = 2**17
    SPLITS_MATRICES = _reads_in_one_thread()

    def forward(self, x: Tensor) -> Tensor:
        is_fast = self.SPLITS_MATRICES and x.numel() == self.in_features and self.weight.numel() >= self.CACHED
        if not is_fast or x.is_cuda or self.out_features % 4 or torch.compiler.is_exporting():
            return F.linear(x, self.weight, self.bias)
        # The strides of view(-1, 1) would select the slow path of BLAS.
        column = x.reshape(1, -1).t().expand(4, -1, 1)
        y = torch.bmm(self.weight.unflatten(0, (4, -1)), column).view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias


class Int8Linear(nn.Module):
    """Linear layer with 8-bit weights, for inference on a CPU, by dynamic quantization of a float32 layer on the CPU.

    Weights and inputs are quantized by the affine scheme of Jacob et al. (2018, 2.1). The weights of each output have a
    scale of their own. The scale of the inputs is computed in each call.

    Note:
        All inputs of a call have one scale, so a result depends slightly on the other rows, on padding and, in a
        forward pass over all steps, on later tokens. On x86, inputs have 7 bits, since the 16-bit sums of two products
        of 8-bit integers saturate on CPUs without VNNI.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.out_features = layer.out_features
        weight = layer.weight.detach()
        scales = weight.abs().amax(1) / 127
        scales = scales.masked_fill(scales == 0, 1.0)  # rows of zeros
        zeros = torch.zeros_like(scales, dtype=torch.int64)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*quantized tensor creation functions")  # deprecated without a successor
            quantized = torch.quantize_per_channel(weight, scales, zeros, axis=0, dtype=torch.qint8)
        self.packed = torch.ops.quantized.linear_prepack(quantized, layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs (..., out_features) of the inputs (..., in_features), both in float32."""
        y: Tensor = torch.ops.quantized.linear_dynamic(x, self.packed, reduce_range=True)
        return y


def quantize(network: nn.Module) -> None:
    """Replace all layers of the class `Linear` by `Int8Linear`, in place; `torch.nn.Linear` stays as it is.

    The network must be in float32 on the CPU and in evaluation mode. Raise UserError if it has no such layers.
    """
    layers = [
        (parent, name, child)
        for parent in network.modules()
        for name, child in parent.named_children()
        if isinstance(child, Linear)
    ]
    if not layers:
        raise UserError(
            f"--int8 must not be set for {type(network).__name__}, which has no lightning_tfm.layers.Linear; leave it "
            "out, or use this class in the network"
        )
    for parent, name, layer in layers:
        setattr(parent, name, Int8Linear(layer))


class LSTM(nn.LSTM):
    """`torch.nn.LSTM` that also trains in bf16-mixed on CPUs without AVX-512.

    Attributes:
        HAS_BFLOAT16: whether oneDNN computes LSTMs in bfloat16 on this machine.

    Note:
        Under autocast, torch calls oneDNN on any CPU, which fails without AVX-512 (torch 2.13). There, this layer is
        computed in float32.
    """

    HAS_BFLOAT16 = has_cpu_bfloat16()

    def forward(  # type: ignore[override]  # no packed sequences
        self, x: Tensor, state: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        if self.HAS_BFLOAT16 or x.device.type != "cpu" or not torch.is_autocast_enabled("cpu"):
            return super().forward(x, state)
        with torch.autocast("cpu", enabled=False):
            return super().forward(x.float(), None if state is None else (state[0].float(), state[1].float()))


def check_dropout(name: str, p: float) -> None:
    """Raise UserError if a dropout probability is not in [0, 1)."""
    if not 0 <= p < 1:
        raise UserError(f"{name} must be at least 0 and below 1, but is {p}; try 0.1")


class Dropout(nn.Module):
    """Dropout (Srivastava et al. 2014) with a fast path for CPUs.

    In training, values are zeroed with probability p in [0, 1), and the others are scaled by 1 / (1 - p).

    Note:
        On a CPU, `torch.nn.Dropout` draws one random number per value sequentially, which takes longer than the
        preceding matrix product. Here, each 64-bit random number is used for four values: p is rounded to a multiple of
        2^-16, and to at most 1 - 2^-15, for which float16 can represent 1 / (1 - p).
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        check_dropout("dropout", p)
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """Apply dropout to a tensor of any shape."""
        if not self.training or self.p == 0:
            return x
        if x.device.type != "cpu":
            return F.dropout(x, self.p)
        zeroed = min(round(self.p * 2**16), 2**16 - 2)  # 16-bit values below this threshold zero an element
        bits = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None).view(torch.int16)
        kept = (bits[: x.numel()] >= zeroed - 2**15).view(x.shape)
        return x * kept.to(x.dtype).mul_(2**16 / (2**16 - zeroed))
