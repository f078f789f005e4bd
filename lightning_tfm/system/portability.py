"""Portable bits: one set of kernels on all x86 processors with AVX2."""

from __future__ import annotations

import os

from lightning_tfm.errors import UserError

VARIABLES = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "COMPATIBLE"}
"""Environment variables that fix the kernels of PyTorch, oneDNN and MKL, which read them once."""


class VariablesError(UserError):
    """Error of VARIABLES, which must be set before Python starts."""


def check_portable() -> None:
    """Check that the kernels are the same on all x86 processors with AVX2.

    Raises:
        VariablesError: if an environment variable is missing.
        UserError: if the processor has no AVX2.
    """
    import torch

    if any(os.environ.get(name) != value for name, value in VARIABLES.items()):
        raise VariablesError(
            f"portable must be false unless the environment has {' '.join(map('='.join, VARIABLES.items()))} when "
            "Python starts, but is true; set these variables"
        )
    if (found := torch.backends.cpu.get_cpu_capability()) != "AVX2":
        raise UserError(f"portable must be false on processors without AVX2, but is true; PyTorch uses {found}")
