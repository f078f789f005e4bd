"""Versions of code, packages and hardware: the Git repository, the installed packages, and the machine."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import NotRequired

from typing_extensions import TypedDict

GIT_SETTINGS = ("core.fsmonitor=false", "core.hooksPath=/dev/null", "safe.bareRepository=explicit")
"""Settings with which git runs no program named by a repository; filters have names of their own, see `git`."""

UNSAVED = (".env*", ".env*/**", "*.env")
"""Patterns of the files, often with secrets, whose changes are not saved."""

UNFILTERED = ":(top,attr:!filter)"
"""Files without a filter, which is a program: compared without it, those of Git LFS would all have changed."""

PACKAGES = ("lightning_tfm", "torch", "lightning", "torchmetrics", "wandb", "faker", "babel", "tokenizers", "sacrebleu")


class Git(TypedDict):
    """State of a Git repository.

    Attributes:
        commit: the commit; null outside a repository.
        dirty: whether files differ from the commit; null outside a repository.
        untracked: the names of the untracked files; missing if no file differs from the commit.
    """

    commit: str | None
    dirty: bool | None
    untracked: NotRequired[list[str]]


class Hardware(TypedDict):
    """Machine of a process.

    Attributes:
        system: the operating system.
        processor: the model of the processor.
        cores: the number of cores that the process may use.
        instruction_set: the instruction set that torch uses.
        threads: the number of threads of torch.
        gpus: the names of the GPUs.
    """

    system: str
    processor: str
    cores: int
    instruction_set: str
    threads: int
    gpus: list[str]


def git(folder: Path) -> tuple[Git, str]:
    """Return the state of the Git repository that contains a folder, and the uncommitted changes.

    Returns:
        The state, and the difference from the commit, except in the files of UNSAVED; empty without a difference.

    Note:
        Files with a filter, such as those of Git LFS, are not compared.
    """
    try:
        commit = run_git(folder, "rev-parse", "HEAD").strip()
        names = run_git(folder, "config", "--list", "--name-only", "--null").split("\0")
        # Unlike -c, this option allows "=" in a name.
        filters = [f"--config-env={name}=EMPTY" for name in {*names} if name.startswith("filter.")]
        status = run_git(
            folder,
            *filters,
            *("status", "--porcelain", "--untracked-files=all", "--ignore-submodules=dirty", "--", UNFILTERED),
        ).splitlines()
        diff = run_git(
            folder,
            *filters,
            *("diff", "HEAD", "--no-color", "--no-ext-diff", "--no-textconv", "--binary"),
            *("--ignore-submodules=dirty", "--submodule=short", "--", UNFILTERED),
            *(f":(top,exclude,glob)**/{pattern}" for pattern in UNSAVED),
        )
    except (OSError, subprocess.CalledProcessError):
        return Git(commit=None, dirty=None), ""
    if not status:
        return Git(commit=commit, dirty=False), ""
    return Git(commit=commit, dirty=True, untracked=[line[3:] for line in status if line.startswith("??")]), diff


def head_commit(folder: Path) -> str | None:
    """Return the commit of the git repository that contains a folder; None outside a repository."""
    try:
        return run_git(folder, "rev-parse", "HEAD").strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def framework() -> tuple[Git, str]:
    """Return the state of the repository of this package, see `git`; the values are None for an installed wheel."""
    file = Path(__file__)
    try:
        run_git(file.parent, "ls-files", "--error-unmatch", file.name)  # a virtual environment may be in a repository
    except (OSError, subprocess.CalledProcessError):
        return Git(commit=None, dirty=None), ""
    return git(file.parents[2])


def run_git(folder: Path, *arguments: str) -> str:
    """Run a git command and return its output.

    Raises:
        OSError: if git is not installed.
        subprocess.CalledProcessError: if the command fails, for example outside a repository.

    Note:
        The repository may come from a stranger, so git runs no program that it names, and fetches nothing.
    """
    settings = [part for setting in GIT_SETTINGS for part in ("-c", setting)]
    command = ["git", "--no-optional-locks", "-C", str(folder), *settings, *arguments]
    environment = os.environ | {"EMPTY": "", "GIT_ALLOW_PROTOCOL": ""}
    return subprocess.run(
        command, capture_output=True, encoding="utf-8", errors="replace", check=True, env=environment
    ).stdout


def versions() -> dict[str, str]:
    """Return the versions of Python and of PACKAGES."""
    return {"python": platform.python_version(), **{package: version(package) for package in PACKAGES}}


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def hardware() -> Hardware:
    """Return the machine of this process."""
    import torch  # slow to import

    return {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": usable_cores(),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
