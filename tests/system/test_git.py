"""The state of a repository, in which no program of the repository is run."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from lightning_tfm.system import versions

PROGRAM = 'touch "$CANARY"'
ENVIRONMENT = (".env", "prod.env", ".env.d/key")


@pytest.fixture
def git(tmp_path, monkeypatch):
    """Return a function that runs git in the current folder, a repository with uncommitted changes."""

    def git(*arguments):
        names = ("-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "protocol.file.allow=always")
        return subprocess.run(["git", *names, *arguments], check=True, capture_output=True, text=True).stdout

    monkeypatch.setenv("CANARY", str(tmp_path / "canary"))
    (tmp_path / "repository").mkdir()
    monkeypatch.chdir(tmp_path / "repository")
    git("init", "-q")
    changed = ("mine.py", "filtered.py", *ENVIRONMENT)
    Path(".env.d").mkdir()
    for name in ("other.py", *changed):
        Path(name).write_text("one\n")
    Path(".gitattributes").write_text("mine.py diff=evil\nfiltered.py filter=a=b\n")
    git("add", "-A")
    git("commit", "-q", "-m", "first")
    for name in changed:
        Path(name).write_text("two\n")
    return git


def plant_hook(git):
    hook = Path(".git/hooks/post-index-change")
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\n{PROGRAM}\n")
    hook.chmod(0o755)
    os.utime("other.py", (1, 1))  # so that git would refresh the index


def plant_submodule(git):
    git("clone", "-q", ".", "sub")
    git("submodule", "add", "-q", "./sub", "sub")
    git("-C", "sub", "config", "core.fsmonitor", f"{PROGRAM}; false")


def plant_bare_repository(git):
    git("init", "-q", "--bare", "sub")
    os.chdir("sub")
    for setting in (("core.bare", "false"), ("core.worktree", "."), ("core.fsmonitor", f"{PROGRAM}; false")):
        git("config", *setting)


def plant_promisor(git):
    """Delete an object, which git would fetch from a remote whose address is a program."""
    git("config", "remote.origin.url", f"ext::sh -c {PROGRAM.replace(' ', '% ')}")
    for name, value in {
        "protocol.ext.allow": "always",
        "remote.origin.promisor": "true",
        "core.repositoryFormatVersion": "1",
        "extensions.partialClone": "origin",
    }.items():
        git("config", name, value)
    blob = git("rev-parse", "HEAD:mine.py").strip()
    Path(".git/objects", blob[:2], blob[2:]).unlink()


PROGRAMS = {
    "fsmonitor": lambda git: git("config", "core.fsmonitor", f"{PROGRAM}; false"),
    "hook": plant_hook,
    "text conversion": lambda git: git("config", "diff.evil.textconv", f"{PROGRAM}; cat"),
    "driver of diff": lambda git: git("config", "diff.evil.command", PROGRAM),
    "external diff": lambda git: git("config", "diff.external", PROGRAM),
    "filter": lambda git: git("config", "filter.a=b.clean", f"{PROGRAM}; cat"),
    "process of a filter": lambda git: git("config", "filter.a=b.process", PROGRAM),
    "required filter": lambda git: (
        git("config", "filter.a=b.clean", f"{PROGRAM}; cat"),
        git("config", "filter.a=b.required", "true"),
    ),
    "submodule": plant_submodule,
    "bare repository": plant_bare_repository,
    "partial clone": plant_promisor,
}
"""Ways in which a repository names a program that git runs when it is asked for the state of the files."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_of_a_repository_are_not_run(name, git, tmp_path):
    PROGRAMS[name](git)
    state, diff = versions.git(Path.cwd())
    assert not (tmp_path / "canary").exists()
    if name in ("bare repository", "partial clone"):
        assert state == {"commit": None, "dirty": None}
    else:
        assert "-one\n+two\n" in diff


def test_changes_of_environment_files_are_not_saved(git):
    Path("sub").mkdir()
    for folder in ("sub", "."):
        assert "mine.py" in versions.git(Path(folder))[1]
        assert ".env" not in versions.git(Path(folder))[1]


def test_files_with_a_filter_are_not_compared(git):
    """The working tree holds the content of a file of Git LFS, and the commit a pointer to it."""
    assert "filtered.py" not in versions.git(Path.cwd())[1]
    git("checkout", "-q", "mine.py", *ENVIRONMENT)
    copy = Path.cwd().with_name("copy")
    shutil.copytree(Path.cwd(), copy, copy_function=shutil.copyfile)
    assert versions.git(copy)[0]["dirty"] is False
