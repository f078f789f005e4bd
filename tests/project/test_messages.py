"""Commands and messages that are printed to a terminal."""

from __future__ import annotations

import io

import pytest

from lightning_tfm.errors import fit_terminal, format_command, shell_quote
from support.processes import shell_words


class Terminal(io.StringIO):
    def isatty(self):
        return True


WORDS = [
    *("lightning-tfm", "generate", "runs/date_attention_lstm/version_0", "Thu 19, Nov 2015"),
    *("--trust-package", "my_package", "--scores", "--beam-size=4", "--input", "a file"),
]


@pytest.mark.parametrize("columns", [30, 50, 80, 300])
def test_a_long_command_breaks_before_arguments(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    text = format_command(map(shell_quote, WORDS), Terminal())
    assert shell_words(text) == WORDS
    lines = text.splitlines()
    assert all(len(line) <= max(columns, len("    runs/date_attention_lstm/version_0 \\")) for line in lines)
    assert len(lines) == 1 or all(line.endswith(" \\") for line in lines[:-1])
    assert any("--trust-package my_package" in line for line in lines)
    assert format_command(map(shell_quote, WORDS), io.StringIO()).count("\n") == 0


def test_a_message_breaks_at_spaces_in_a_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    text = "--ckpt_path must name an unfinished run, but 'runs/date_attention_lstm/version_0' has finished"
    lines = fit_terminal(text, Terminal()).splitlines()
    assert " ".join(lines) == text
    assert max(map(len, lines)) <= 40
    assert fit_terminal(text, io.StringIO()) == fit_terminal(text, None) == text
