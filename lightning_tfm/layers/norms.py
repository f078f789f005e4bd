"""Norms of Transformer layers."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from lightning_tfm.errors import UserError

NormType = Literal["layer", "rms"]
"""Names of the norms, see `norm_layer`."""

Norm = nn.LayerNorm | nn.RMSNorm
"""Norm of the last dimension."""


def norm_layer(name: NormType, width: int, bias: bool = True, eps: float = 1e-5) -> Norm:
    """Return a norm of vectors x of a width, with a learned weight g.

    Args:
        name: "layer" for layer norm (Ba et al. 2016), g (x - mean(x)) / sqrt(var(x) + eps) + b; or "rms" for RMSNorm
            (Zhang & Sennrich 2019), g x / sqrt(mean(x^2) + eps), which never has a bias.
        width: the width of the vectors.
        bias: whether layer norm has a bias b.
        eps: the number that is added to the variance or the mean square.

    Raises:
        UserError: if there is no norm of this name, or eps is not positive.
    """
    if not eps > 0:
        raise UserError(f"norm_eps must be above 0, but is {eps}; try 1.0e-5")
    match name:
        case "layer":
            return nn.LayerNorm(width, eps, bias=bias)
        case "rms":
            return nn.RMSNorm(width, eps)
    raise UserError(f"norm_type must be layer or rms, but is {name!r}; try rms")


class HeadNorm(nn.RMSNorm):
    """RMSNorm of the queries or keys (B, H, T, d) of each head, with one weight (d) for all heads."""

    UNDIVIDED = "qk_norm, whose weights are shared by all heads"
    """Why tensor parallelism does not divide a network with this layer."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized x, with its type also under autocast, when that of the weight differs."""
        return super().forward(x.type_as(self.weight)).type_as(x)
