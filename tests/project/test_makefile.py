"""The installation by `make`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_make_install_refuses_an_old_python(tmp_path):
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    python = tmp_path / "python"
    program = "import sys; sys.version_info = (3, 9, 2); exec(sys.argv[1])"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{program}" "$2"\n', encoding="utf-8")
    python.chmod(0o755)
    command = ["make", "install", f"PYTHON={python}"]
    child = subprocess.run(command, cwd=tmp_path, capture_output=True, encoding="utf-8", timeout=60)
    assert child.returncode == 2
    mistake = f"error: Python must be 3.11 or newer, but {python} is 3.9; try: make install PYTHON=python3.12"
    assert child.stderr.splitlines()[0] == mistake
    assert not (tmp_path / ".venv").exists()


def test_modules_are_compiled_once():
    """Some images of containers set the variable, with which each process compiles all modules that it imports."""
    command = ["make", "--no-print-directory", "--eval", "show: ; @echo $${PYTHONDONTWRITEBYTECODE-unset}", "show"]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    child = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, encoding="utf-8", timeout=60)
    assert child.stdout == "unset\n"
