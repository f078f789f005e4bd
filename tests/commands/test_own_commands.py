"""A command is a single file of the package."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import lightning_tfm

COMMAND = '''"""`lightning-tfm greet`: greet a reader."""

from lightning_tfm.commands.parser import CommandParser


def greet(arguments):
    print(f"hello {make_parser().parse_args(arguments).name}")
    return 0


def make_parser():
    parser = CommandParser("lightning-tfm greet", description="Greet a reader.")
    parser.add_argument("name")
    return parser
'''

CODE = """
import runpy, sys
sys.argv = ["lightning-tfm", *sys.argv[1:]]
try:
    runpy.run_module("lightning_tfm", run_name="__main__")
finally:
    assert "torch" not in sys.modules
"""


def test_new_command_is_one_file(tmp_path):
    package = tmp_path / "lightning_tfm"
    shutil.copytree(Path(lightning_tfm.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "commands/greet.py").write_text(COMMAND)

    def output(*arguments):
        command = [sys.executable, "-c", CODE, *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    assert "\n  greet       greet a reader\n" in output("--help")
    assert output("greet", "you") == "hello you\n"
