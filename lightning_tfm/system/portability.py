"""Portable bits: one set of kernels on all x86 processors with AVX2."""

from __future__ import annotations

import os
from collections.abc import Mapping

from lightning_tfm.errors import UserError

VARIABLES = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "COMPATIBLE"}
"""Environment variables that fix the kernels of PyTorch, oneDNN and MKL, which read them once."""


class VariablesError(UserError):
    """Error of environment variables that must be set before Python starts.

    Attributes:
        variables: the variables.
    """

    def __init__(self, variables: Mapping[str, str]) -> None:
        super().__init__(
            f"portable must be false unless the environment has {' '.join(f'{k}={v}' for k, v in variables.items())} "
            "when Python starts, but is true; set these variables"
        )
        self.variables = variables


def check_portable() -> None:
    """Check that the kernels are the same on all x86 processors with AVX2.

    Raises:
        VariablesError: if an environment variable is missing.
        UserError: if the processor has no AVX2.
    """
    import torch

    if any(os.environ.get(name) != value for name, value in VARIABLES.items()):
        raise VariablesError(VARIABLES)
    if (found := torch.backends.cpu.get_cpu_capability()) != "AVX2":
        raise UserError(f"portable must be false on processors without AVX2, but is true; PyTorch uses {found}")
