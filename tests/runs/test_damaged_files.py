"""Damaged files of a run that are skipped or copied."""

import errno
import os
import re

import pytest

from lightning_tfm.callbacks import provenance
from lightning_tfm.runs.metrics_writer import MetricsWriter
from lightning_tfm.runs.record import Run


def test_a_failed_rewrite_keeps_the_logged_rows(monkeypatch, tmp_path):
    """A new column changes the header, and so the whole file."""
    writer, path = MetricsWriter(str(tmp_path)), tmp_path / "metrics.csv"
    for step in range(2):
        writer.log_metrics({"train/loss": 0.5}, step)
        writer.save()
    before = path.read_bytes()
    writer.log_metrics({"val/loss": 0.3}, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(OSError, match=r"No space left on device: '.*/metrics\.csv'"):
            writer.save()
    assert path.read_bytes() == before
    writer.save()
    rows = [{"step": 0, "train/loss": 0.5}, {"step": 1, "train/loss": 0.5}, {"step": 1, "val/loss": 0.3}]
    assert Run(tmp_path).metrics() == rows
    assert [other.name for other in tmp_path.iterdir()] == ["metrics.csv"]


DAMAGES = {
    "NUL": b"0.5,3\0,,",
    "only NUL": bytes(512),
    "a stray quote": b'0.5,"3,,',
    "not UTF-8": b"0.5,\xff3,,",
    "a missing column": b"0.5,3,",
    "an additional column": b"0.5,3,,,",
    "no step": b"0.5,,,",
    "text": b"0.5,3,loss,",
    "two rows": b"0.5,3,0.5,3,,",
    "too long": b"0.5,3,," + b" " * 200_000,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_rows_are_skipped_and_kept_in_a_copy(damage, tmp_path, capsys):
    path = tmp_path / "metrics.csv"
    content = (
        b"epoch,step,train/loss,val/loss\r\n0,0,0.7,\r\n%s\r\n0,1,0.6,\r\n\r\n0,1,,0.8\r\n0,2,0.5,\r\n0,"
        % DAMAGES[damage]
    )
    path.write_bytes(content)
    rows, damaged = Run(tmp_path).read_rows()  # the last line may be incomplete
    assert [(row["step"], row["train/loss"]) for row in rows] == [("0", "0.7"), ("1", "0.6"), ("1", ""), ("2", "0.5")]
    assert damaged == 1
    MetricsWriter(str(tmp_path)).keep(2)
    assert [row["step"] for row in Run(tmp_path).read_rows()[0]] == ["0", "1", "1"]
    assert (tmp_path / "metrics.csv.damaged").read_bytes() == content
    assert "skipping 1 damaged row of " in capsys.readouterr().err


@pytest.mark.parametrize("content", ["{}", "[{}]", "[1]", "null", "{", "1", "[" * 5000])
def test_a_damaged_provenance_is_kept_in_a_copy(content, tmp_path, capsys):
    path = tmp_path / "provenance.json"
    path.write_text(content)
    assert Run(tmp_path).wandb_id is None
    assert provenance._earlier_starts(Run(tmp_path)) == []
    message = r"provenance.json' must be an intact file, but is damaged: .*it is kept as provenance.json.damaged"
    assert re.search(message, capsys.readouterr().err, re.DOTALL)
    assert path.with_name("provenance.json.damaged").read_text() == content
