"""The command `generate`."""

from __future__ import annotations

import re

import pytest

from support.experiments import INPUTS, OUTPUTS


@pytest.mark.parametrize(
    "options", [[], ["--beam-size", "4"], ["--temperature", "0.1", "--top-k", "3", "--top-p", "0.9"]]
)
def test_generate_normalizes_typed_dates(options, checkpoint, command):
    out, err = command("generate", checkpoint, *INPUTS, *options)
    assert out.splitlines() == OUTPUTS
    assert err == ""
    assert command("generate", checkpoint, *options, INPUTS[0]).out.splitlines() == OUTPUTS[:1]


def test_a_very_long_line_does_not_affect_the_others(checkpoint, tmp_path, command):
    lines = [INPUTS[0], "1/" * 20_000, INPUTS[1]]
    (tmp_path / "input").write_text("\n".join(lines))
    outputs = command("generate", checkpoint, "--input", tmp_path / "input").out.splitlines()
    assert len(outputs) == 3
    assert [outputs[0], outputs[2]] == OUTPUTS[:2]


def test_generate_reads_lines_as_training_does(checkpoint, tmp_path, command):
    """Surrounding blanks are stripped, and only line feeds end a line, so that outputs stay aligned."""
    content = b"\xef\xbb\xbf 31/12/1999\t\r\n29/02/2000\r\n3 M\xff 1979\r\n3 May\r1979\n29/02/2000 \n"
    (tmp_path / "input").write_bytes(content)
    out, err = command("generate", checkpoint, "--input", tmp_path / "input", status=1)
    assert out.split("\n") == ["1999-12-31", "2000-02-29", "", "", "2000-02-29", ""]
    assert "line 3: it is not valid UTF-8; save" in err
    assert r"line 4: the vocabulary has no character '\r' (position 6" in err


def test_generate_reads_and_writes_files(checkpoint, tmp_path, command):
    """Outputs of several batches are in the order of the lines."""
    lines = [f"{day:02}/{month:02}/{year}" for year in range(1990, 2010) for month in (1, 11) for day in range(10, 28)]
    (tmp_path / "input").write_text("\n".join(lines))
    options = ["--input", tmp_path / "input", "--output", tmp_path / "output"]
    assert command("generate", checkpoint, *options).out == ""
    outputs = (tmp_path / "output").read_text().splitlines()
    assert len(outputs) == len(lines) == 720
    right = sum(output.split("-")[::-1] == line.split("/") for output, line in zip(outputs, lines, strict=True))
    assert right / len(lines) > 0.9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--beam-size", "0"], "beam_size must be at least 1, but is 0"),
        (["--beam-size", "many"], "--beam-size"),
        (["--temperature", "-1"], "temperature must be 0 or from 0.01 to 100, but is -1.0"),
        (["--temperature", "nan"], "temperature must be 0 or from 0.01 to 100, but is nan"),
        (["--temperature", "1", "--top-k", "0"], "top_k must be at least 1, but is 0"),
        (["--temperature", "1", "--top-p", "2"], "top_p must be above 0 and at most 1, but is 2.0"),
        (["--top-k", "3"], "need a temperature above 0"),
        (["--beam-size", "2", "--temperature", "1"], "mutually exclusive"),
        (["--input", "none.txt"], "--input must be a file, but 'none.txt' cannot be opened: No such file or directory"),
        (["--output", "no/such/folder"], "--output must be a file, but 'no/such/folder' cannot be opened"),
        (["--seed", "-1"], "seed must be from 0 to 4294967295, but is -1; try 1"),
        (["--seed", str(2**70)], "seed must be from 0 to 4294967295, but is 1180591620717411303424; try 1"),
        (["--input", __file__, "--output", __file__], "--output must be another file than --input"),
        (["--beem-size", "3"], "there is no option '--beem-size'; did you mean 'beam-size'?"),
    ],
)
def test_a_mistake_in_generate_is_reported_in_one_line(options, message, checkpoint, mistake):
    texts = [] if "--input" in options else ["3 May 1979"]
    assert message in mistake("generate", checkpoint, *texts, *options)


def test_a_file_in_another_encoding_is_refused(checkpoint, tmp_path, mistake):
    for content, message in (
        (bytes(range(256)), "--input must be a text in UTF-8, but '.*input' has zero bytes"),
        ("a\n".encode("utf-16"), "in UTF-16 do; save it in UTF-8"),
    ):
        (tmp_path / "input").write_bytes(content)
        assert re.search(message, mistake("generate", checkpoint, "--input", tmp_path / "input"))


def test_generate_warns_of_a_text_longer_than_any_in_training(checkpoint, command):
    _, err = command("generate", checkpoint, "Thursday, May 3, 1979" * 3)
    assert re.fullmatch(r"lightning-tfm: line 1: it has 63 tokens, more than any training text \(\d+\)\n", err)
