"""Fault injection: signals, damaged files, non-finite losses, untrusted code and failures of W&B."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import itertools
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections import Counter
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path

import lightning
import pytest
import torch
import yaml
from filelock import FileLock
from lightning.pytorch.cli import LightningCLI

from lightning_tfm import __main__
from lightning_tfm.callbacks import Checkpoints
from lightning_tfm.checkpoint import FORMAT, read, verify_checksum, write
from lightning_tfm.checkpoint.archive import _comment
from lightning_tfm.checkpoint.plugin import VerifiedCheckpointIO
from lightning_tfm.errors import SIGNALS, Interrupted, UserError, handle_signals, interrupt
from lightning_tfm.fit import cli
from lightning_tfm.fit.arguments import SAVING, with_options
from lightning_tfm.fit.cli import TfmCLI
from lightning_tfm.inference.loading import load
from lightning_tfm.networks import GPT
from lightning_tfm.runs.record import Run
from lightning_tfm.tokenization import SymbolTokenizer, train_tokenizer
from support.corpora import TEXT
from support.equality import assert_same_files, assert_same_run, equal
from support.experiments import NETWORKS, fit, folder
from support.power_loss import crashes, record, restore
from support.processes import CONTEXT, EXPERIMENTS, in_process, in_terminal, run, start


def last_line(child):
    return child.err.read_text().splitlines()[-1]


# Signals


@pytest.mark.parametrize(("signum", "status"), [("SIGTERM", 143), ("SIGINT", 130)])
@pytest.mark.parametrize(
    ("moment", "call"),
    [
        ("in a training step", 7),
        ("before an update of the weights", 12),
        ("in a validation", 4),
        ("while a checkpoint is written", 10),
        ("in a training step", 60),
    ],
)
@pytest.mark.run
def test_a_signal_saves_a_checkpoint_and_prints_the_resume_command(signum, status, moment, call, reference, tmp_path):
    child = run(*fit("gpt"), cwd=tmp_path, fault=(moment, call, signum))
    assert child.wait() == status, child.err.read_text()
    message, command = child.err.read_text().splitlines()[-2:]
    step = read(folder(tmp_path, "gpt") / "checkpoints/last.ckpt")["global_step"]
    assert message == f"lightning-tfm: interrupted by {signum}, saved after step {step}; resume with:"
    if moment == "in a training step":
        assert step == call, "no step is lost"
    assert "Traceback" not in child.err.read_text()

    program, *arguments = shlex.split(command)
    assert program == "lightning-tfm"
    child = run(*arguments, cwd=tmp_path)
    assert child.wait() == 0, child.err.read_text()
    assert_same_run(tmp_path, reference("gpt"), "gpt")


@pytest.mark.parametrize(("signum", "status"), [("SIGTERM", 143), ("SIGINT", 130)])
@pytest.mark.run
def test_a_signal_in_the_test_ends_the_run_immediately(signum, status, tmp_path):
    child = run(*fit("gpt"), cwd=tmp_path, fault=("in the test", 1, signum))
    assert child.wait() == status
    message, command = child.err.read_text().splitlines()[-2:]
    assert message == f"lightning-tfm: interrupted by {signum}; resume with:"
    assert not (folder(tmp_path, "gpt") / "summary.json").exists()
    assert run(*shlex.split(command)[1:], cwd=tmp_path).wait() == 0
    assert (folder(tmp_path, "gpt") / "summary.json").exists()


def send_at_once(*signums):
    signal.pthread_sigmask(signal.SIG_BLOCK, signums)
    for signum in signums:
        signal.pthread_kill(threading.get_ident(), signum)  # another thread would receive them one by one
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signums)


def test_a_further_signal_does_not_replace_the_first(monkeypatch, capsys):
    def interrupted(arguments):
        handle_signals(interrupt)
        try:
            send_at_once(signal.SIGTERM, signal.SIGHUP)
        except Interrupted as error:
            with suppress(KeyError):
                try:
                    raise KeyError
                finally:
                    send_at_once(signal.SIGINT, signal.SIGUSR1)
            error.ckpt_path = "runs/a"
            raise

    def print_command(error):
        send_at_once(*SIGNALS)
        printed(error)

    printed = __main__._print_resume_command
    monkeypatch.setattr(__main__, "_print_resume_command", print_command)
    monkeypatch.setattr(cli, "run", interrupted)
    assert in_process(monkeypatch, "fit") == 129
    message, command = capsys.readouterr().err.splitlines()
    assert message == "lightning-tfm: interrupted by SIGHUP; resume with:"
    assert command == "  lightning-tfm fit --ckpt_path runs/a"


def test_training_stops_immediately_only_after_a_second_ctrl_c():
    checkpoints = Checkpoints()
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        checkpoints._on_signal(signum, None)
    assert checkpoints.signum == signal.SIGTERM
    with pytest.raises(Interrupted):
        checkpoints._on_signal(signal.SIGINT, None)
    try:
        raise Interrupted(signal.SIGINT)
    except Interrupted:
        checkpoints._on_signal(signal.SIGINT, None)


def shell_words(command):
    """Return the arguments into which bash splits a command."""
    shell = subprocess.run(["bash", "-c", f"printf '%s\\0' {command}"], capture_output=True, check=True)
    return os.fsdecode(shell.stdout).split("\0")[:-1]


@pytest.mark.parametrize(
    "given",
    [
        [],
        ["--ckpt_path", "last"],
        ["--ckpt_path", "my run/last.ckpt"],
        ["--ckpt_path=my run/last.ckpt"],
        ["--ckpt_path", 'it\'s "mine".ckpt'],
        ["--ckpt_path", "a\tb\nc.ckpt"],
        ["--ckpt_path", "a b.ckpt", "--ckpt_path=c d.ckpt", "--ckpt_path", "e.ckpt"],
    ],
)
@pytest.mark.parametrize(
    "other", ["plain", "two words", "it's", '"', "a\tb", "a\nb\\n'", "$HOME `ls` *", "\x1b[1m ü", "\udcff"]
)
def test_resume_command_is_valid_in_a_shell(other, given, monkeypatch, capsys):
    def interrupted(arguments):
        raise Interrupted(signal.SIGTERM, 7, "runs/a b/last.ckpt")

    monkeypatch.setattr(cli, "run", interrupted)
    assert in_process(monkeypatch, "fit", *given, "--config", other, "--trainer.logger", "") == 143
    *_, command = capsys.readouterr().err.splitlines()
    expected = ["lightning-tfm", "fit", "--config", other, "--trainer.logger", "", "--ckpt_path", "runs/a b/last.ckpt"]
    assert shell_words(command) == expected


@pytest.mark.run
def test_resume_command_with_quoted_paths_resumes(tmp_path):
    assert run(*fit("gpt"), cwd=tmp_path, fault=("in a training step", 33)).wait() == -9
    started = folder(tmp_path, "gpt").parent.rename(tmp_path / "it's my run")
    path = started / "version_0/checkpoints/last.ckpt"
    logger = "{class_path: lightning.pytorch.loggers.CSVLogger, init_args: {save_dir: runs, name: 'a\tb  c'}}"
    arguments = fit("gpt", "--ckpt_path", path.relative_to(tmp_path), "--trainer.logger", logger)
    child = run(*arguments, cwd=tmp_path, fault=("in a training step", 7, "SIGTERM"))
    assert child.wait() == 143, child.err.read_text()
    _, *words = shell_words(child.err.read_text().splitlines()[-1])
    child = run(*words, cwd=tmp_path)
    assert child.wait() == 0, child.err.read_text()
    assert [start["step"] for start in json.loads(next(tmp_path.glob("runs/*/*/provenance.json")).read_text())] == [
        30,
        37,
    ]


@pytest.mark.run
def test_an_active_run_is_locked(tmp_path):
    arguments = fit("gpt", "--ckpt_path=last", **{"trainer.max_steps": 100_000})
    first = start(*arguments, cwd=tmp_path)
    while not list(tmp_path.glob("runs/*/*/checkpoints/last.ckpt")):
        assert first.process.is_alive()
        time.sleep(0.1)
    (tmp_path / "second").mkdir()
    (tmp_path / "second/runs").symlink_to(tmp_path / "runs")
    second = run(*arguments, cwd=tmp_path / "second")
    assert second.wait() == 2
    assert "/version_0' is locked by another process; stop that process first" in last_line(second)
    first.process.terminate()
    assert first.wait() == 143


def hold_lock(folder, ready):
    """Lock a folder, fork a child that outlives this process, and wait to be killed."""
    lock = Run(folder).lock()
    child = os.fork()
    if child:
        ready.send((child, lock.is_locked))
    time.sleep(60)


def test_a_killed_process_releases_its_lock_even_if_a_child_survives(tmp_path):
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=hold_lock, args=(tmp_path, theirs))
    process.start()
    child, is_locked = ours.recv()
    assert is_locked
    try:
        with pytest.raises(UserError, match="is locked by another process; stop that process first"):
            Run(tmp_path).lock()
        process.kill()
        process.join()
        assert Run(tmp_path).lock().is_locked
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_lock_held_for_a_moment_is_awaited(monkeypatch, tmp_path):
    other = FileLock(tmp_path / ".lock")
    for wait in (Run(tmp_path).lock, Run(tmp_path).wait):
        other.acquire()
        monkeypatch.setattr(time, "sleep", lambda seconds: other.release())
        wait()
        assert not other.is_locked


@pytest.mark.parametrize("reason", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_tolerated(reason, monkeypatch, tmp_path):
    def refuse(file, operation):
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert not Run(tmp_path).lock().is_locked
    assert not Run(tmp_path).lock().is_locked


@pytest.mark.parametrize("kind", ["a symbolic link", "a folder"])
def test_a_lock_that_is_not_a_file_is_refused(kind, tmp_path):
    path = tmp_path / ".lock"
    if kind == "a folder":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"/\.lock' must be a file, to be locked, but is a link or a folder; delete"):
        Run(tmp_path).lock()


@pytest.mark.parametrize("reason", [errno.EACCES, errno.ENOSPC, errno.EROFS, errno.EMFILE])
def test_a_lock_that_cannot_be_created_raises_the_error(reason, monkeypatch, tmp_path):
    def refuse(*args):
        raise OSError(reason, os.strerror(reason), str(tmp_path / ".lock"))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(OSError, match=os.strerror(reason)):
        Run(tmp_path).lock()


# Files


def write_checkpoint(path):
    content = {
        "format_version": FORMAT,
        "global_step": 3,
        "state_dict": {"network.weight": torch.randn(40, 30)},
        "hyper_parameters": {"network": {"class_path": "none", "init_args": {}}},
        "extra": [1, "text", None, 2.5],
    }
    write(content, path)
    return content


def test_checkpoints_are_read_as_written(tmp_path):
    path = tmp_path / "some/where/a.ckpt"
    content = write_checkpoint(path)
    equal(read(path), content)
    equal(torch.load(path, weights_only=True), content)  # torch can read it, too
    assert [other.name for other in path.parent.iterdir()] == ["a.ckpt"]


@pytest.mark.parametrize("version", [None, FORMAT + 1])
def test_checkpoints_of_another_format_are_refused(version, tmp_path):
    content = write_checkpoint(tmp_path / "a.ckpt")
    write(content | {"format_version": version}, tmp_path / "b.ckpt")
    with pytest.raises(
        UserError, match=f"must have version {FORMAT} of the checkpoint format, but has version {version};"
    ):
        read(tmp_path / "b.ckpt")


BLOCK = 512


def corruptions(data, number):
    """Yield distinct damaged copies of a file, as disks and killed processes leave them, with the kind of damage."""
    draw = random.Random(0)

    def flipped(masks):
        damaged = bytearray(data)
        for place, mask in enumerate(masks, draw.randrange(len(data) - len(masks) + 1)):
            damaged[place] ^= mask
        return bytes(damaged)

    def pieces(*order):
        """Cut the file at three random positions, and join the pieces in the given order."""
        ends = [0, *sorted(draw.sample(range(1, len(data)), 3)), len(data)]
        return b"".join(data[ends[number] : ends[number + 1]] for number in order)

    def zeroed():
        start = draw.randrange(len(data) - BLOCK + 1)
        return data[:start] + bytes(BLOCK) + data[start + BLOCK :]

    kinds = {
        "cut": lambda: data[: draw.randrange(1, len(data))],
        "lengthened": lambda: data + draw.randbytes(draw.randint(1, BLOCK)),
        "a bit flipped": lambda: flipped([1 << draw.randrange(8)]),
        "a block flipped": lambda: flipped(draw.choices(range(1, 256), k=BLOCK)),
        "a block zeroed": zeroed,
        "a piece removed": lambda: pieces(0, 2, 3),
        "a piece repeated": lambda: pieces(0, 1, 1, 2, 3),
        "two pieces swapped": lambda: pieces(0, 2, 1, 3),
    }
    yield "empty", b""
    yield "zeroed", bytes(len(data))
    seen = {data, b"", bytes(len(data))}
    for name in itertools.islice(itertools.cycle(kinds), number - 2):
        while (damaged := kinds[name]()) in seen:
            pass
        seen.add(damaged)
        yield name, damaged


def check_corruptions(number, tmp_path):
    path = tmp_path / "a.ckpt"
    write_checkpoint(path)
    data = path.read_bytes()
    digests, kinds = {hashlib.sha256(data).digest()}, Counter()
    for name, damaged in corruptions(data, number):
        path.write_bytes(damaged)
        assert not verify_checksum(path), name
        with pytest.raises(
            UserError, match=r"'.*a\.ckpt' must be a checkpoint of lightning_tfm, but is damaged or not a checkpoint"
        ):
            read(path)
        digests.add(hashlib.sha256(damaged).digest())
        kinds[name] += 1
    assert len(digests) == number + 1, "all damaged copies differ from each other and from the file"
    print(f"distinct corruptions detected: {number} ({', '.join(f'{count} {name}' for name, count in kinds.items())})")


def test_damaged_checkpoints_are_detected(tmp_path):
    check_corruptions(30, tmp_path)


@pytest.mark.run
def test_many_damaged_checkpoints_are_detected(tmp_path):
    check_corruptions(3_000, tmp_path)


@pytest.mark.run
def test_averages_beside_the_checkpoints_are_ignored_and_kept(reference, tmp_path):
    """An average is newer, cannot be resumed from, and may have a name like theirs."""
    arguments = fit("gpt", **{"checkpoint.keep_last": 2})
    assert run(*arguments, cwd=tmp_path, fault=("in a training step", 33)).wait() == -9
    checkpoints = folder(tmp_path, "gpt") / "checkpoints"
    names = ["mean", "step_mean", "step_", "step_1.5", "step_-1", "step_012", "step_٣", "best_step_12", "step_99999"]
    steps = [checkpoints / f"step_{step}.ckpt" for step in (12, 24)]
    means = [checkpoints / f"{name}.ckpt" for name in names]
    for mean in means:
        assert run("average", *steps, "--output", mean, cwd=tmp_path).wait() == 0
    before = {mean: mean.read_bytes() for mean in means}
    child = run(*arguments, "--ckpt_path=last", cwd=tmp_path)
    assert child.wait() == 0, child.err.read_text()
    assert "damaged" not in child.err.read_text()
    assert {mean: mean.read_bytes() for mean in means} == before
    assert not any(step.exists() for step in steps), "old steps are deleted, in spite of the averages"
    assert_same_run(tmp_path, reference("gpt"), "gpt")


@pytest.mark.parametrize("damage", ["cut", "empty", "flipped"])
@pytest.mark.run
def test_last_falls_back_to_the_newest_intact_checkpoint(damage, reference, tmp_path):
    child = run(*fit("attention_lstm"), cwd=tmp_path, fault=("in a training step", 29))
    assert child.wait() == -9
    last = folder(tmp_path, "attention_lstm") / "checkpoints/last.ckpt"
    data = bytearray(last.read_bytes())
    if damage == "flipped":
        data[len(data) // 2] ^= 4
    last.write_bytes({"cut": data[:-1000], "empty": b""}.get(damage, data))
    child = run(*fit("attention_lstm", "--ckpt_path=last"), cwd=tmp_path)
    assert child.wait() == 0, child.err.read_text()
    lines = [line for line in child.err.read_text().splitlines() if "damaged" in line]
    assert len(lines) == 1
    assert "last.ckpt: it is damaged" in lines[0]
    starts = json.loads((folder(tmp_path, "attention_lstm") / "provenance.json").read_text())
    assert [start["step"] for start in starts] == [0, 24], "from best.ckpt"
    assert_same_run(tmp_path, reference("attention_lstm"), "attention_lstm")


def test_last_without_an_intact_checkpoint_is_refused(tmp_path):
    child = run(*fit("gpt"), cwd=tmp_path, fault=("in a training step", 8))
    assert child.wait() == -9
    last = folder(tmp_path, "gpt") / "checkpoints/last.ckpt"
    last.write_bytes(last.read_bytes()[:-1])
    child = run(*fit("gpt", "--ckpt_path=last"), cwd=tmp_path)
    assert child.wait() == 2
    assert "--ckpt_path needs an undamaged checkpoint below 'runs/copy_gpt', but there is none" in last_line(child)
    assert last.exists()


@pytest.mark.run
def test_a_full_disk_is_reported_and_the_previous_checkpoint_is_kept(reference, tmp_path):
    child = run(*fit("transformer"), cwd=tmp_path, fault=("in a training step", 18, "the disk is full"))
    assert child.wait() == 2
    assert re.match(
        r"lightning-tfm: error: the checkpoint 'runs/.*/last.ckpt' cannot be written: File too large; "
        "the one before it is kept; free disk space",
        last_line(child),
    )
    checkpoints = folder(tmp_path, "transformer") / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["best.ckpt", "last.ckpt"]
    assert read(checkpoints / "last.ckpt")["global_step"] == 15
    child = run(*fit("transformer", "--ckpt_path=last"), cwd=tmp_path)
    assert child.wait() == 0, child.err.read_text()
    assert_same_run(tmp_path, reference("transformer"), "transformer")


@pytest.mark.run
def test_a_full_disk_in_the_test_is_reported_and_the_run_resumes(tmp_path):
    arguments = fit("gpt", **{"trainer.max_steps": 12, "data.init_args.test_size": 300})
    child = run(*arguments, cwd=tmp_path, fault=("in the test", 1, "the disk is full"))
    assert child.wait() == 2
    assert last_line(child) == (
        "lightning-tfm: error: 'runs/copy_gpt/version_0/predictions.jsonl' cannot be written: File too large; "
        "free disk space, then resume with --ckpt_path runs/copy_gpt/version_0"
    )
    assert "Traceback" not in child.err.read_text()
    child = run(*arguments, "--ckpt_path=runs/copy_gpt/version_0", cwd=tmp_path)
    assert child.wait() == 0, child.err.read_text()
    assert len((folder(tmp_path, "gpt") / "predictions.jsonl").read_text().splitlines()) > 300


@pytest.mark.parametrize(("reason", "kind"), [(errno.ENOSPC, UserError), (errno.EACCES, PermissionError)])
def test_only_a_full_disk_is_answered_by_the_advice_to_free_space(reason, kind, monkeypatch, tmp_path):
    def fail(self, **settings):
        self.folder.path = tmp_path
        raise OSError(reason, os.strerror(reason), str(tmp_path / "metrics.csv"))

    monkeypatch.setattr(LightningCLI, "__init__", fail)
    with pytest.raises(kind, match="free disk space" if kind is UserError else "Permission denied"):
        TfmCLI("fit", [], VerifiedCheckpointIO())


def test_an_unwritable_folder_is_reported(tmp_path):
    with pytest.raises(UserError, match=r"'/sys/a.ckpt' cannot be written: .*; nothing was overwritten"):
        write({}, "/sys/a.ckpt")  # not even root can write there
    logger = "--trainer.logger={class_path: lightning.pytorch.loggers.CSVLogger, init_args: {save_dir: /sys/runs}}"
    child = run(*fit("gpt", logger), cwd=tmp_path)
    assert child.wait() != 0
    assert re.match(
        r"lightning-tfm: error: .*/sys/runs.*: (Operation not permitted|Permission denied|Read-only)", last_line(child)
    )
    assert "Traceback" not in child.err.read_text()


# Power loss

RUN = Path("runs/copy_gpt/version_0")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Return the folder of a short run, its arguments, and the distinct outcomes of a power loss in it.

    The outcomes in which all changes are lost are also returned, in their order.
    """
    whole = tmp_path_factory.mktemp("whole")
    settings = {"trainer.max_steps": 18, "trainer.val_check_interval": 7, "checkpoint.keep_last": 1}
    arguments = fit("gpt", "--ckpt_path=last", **settings)
    calls = record(*arguments, cwd=whole)
    lost, kept = (list(crashes(calls, whole.stat().st_ino, names_kept)) for names_kept in (False, True))
    outcomes = {frozenset((path, data) for path, (data, _) in files.items()): files for files in lost + kept}
    return whole, arguments, list(outcomes.values()), lost


def files_of(run):
    """Return the paths of the files of a run, relative to its folder, except those of a process that has ended."""
    paths = (path.relative_to(run) for path in run.rglob("*") if path.is_file())
    return {path for path in paths if path.suffix != ".part" and path.name != ".lock"}


@pytest.mark.run
def test_a_power_loss_damages_no_file_of_a_run(recorded, tmp_path):
    """Only the row of the last step can be lost, between its checkpoint and its row."""
    whole, _, outcomes, all_lost = recorded
    expected = Run(whole / RUN).read_rows()[0]
    lost_rows = Counter()
    for number, files in enumerate(outcomes):
        restore(files, tmp_path / str(number))
        run = tmp_path / str(number) / RUN
        paths = files_of(run)
        steps = [read(run / path)["global_step"] for path in paths if path.suffix == ".ckpt"]
        for path in paths:
            if path.suffix == ".yaml":
                assert yaml.safe_load((run / path).read_text()), path
            elif path.suffix != ".ckpt" and path.name != "metrics.csv":
                assert (run / path).read_bytes() == (whole / RUN / path).read_bytes(), path
        rows, damaged = Run(run).read_rows() if Path("metrics.csv") in paths else ([], 0)
        assert damaged == 0
        logged = [{name: value for name, value in row.items() if value} for row in rows]
        before = [row for row in expected if int(row["step"]) < max(steps, default=0)]
        lost = [row for row in before if {name: value for name, value in row.items() if value} not in logged]
        assert [int(row["step"]) for row in lost] in ([], [max(steps, default=0) - 1])
        if Path("summary.json") in paths:
            assert paths == files_of(whole / RUN)
            assert rows == expected
        lost_rows[len(lost)] += 1
    print(f"{len(outcomes)} outcomes of a power loss; without one row: {lost_rows[1]}")
    saved = [
        [
            torch.load(BytesIO(data), weights_only=True)["global_step"]
            for path, (data, _) in files.items()
            if path.suffix == ".ckpt"
        ]
        for files in all_lost
    ]
    assert sorted({max(steps, default=0) for steps in saved}) == [0, 5, 7, 10, 14, 15, 18]
    restore(all_lost[-1], tmp_path / "end")
    assert files_of(tmp_path / "end" / RUN) == files_of(whole / RUN)


@pytest.mark.parametrize("every", [10, pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.run
def test_a_run_resumes_after_a_power_loss(every, recorded, tmp_path):
    whole, arguments, outcomes, _ = recorded
    for number, files in enumerate(outcomes[::every]):
        cwd = tmp_path / str(number)
        restore(files, cwd)
        has_finished = RUN / "summary.json" in files
        child = run(*arguments, cwd=cwd)
        assert child.wait() == (2 if has_finished else 0), child.err.read_text()
        assert "Traceback" not in child.err.read_text()
        assert_same_files(folder(cwd, "gpt"), whole / RUN, rows_lost=1)
    print(f"resumed after {number + 1} power losses")


# NaN


@pytest.mark.parametrize(("moment", "loss"), [("in the loss", "nan"), ("in a training step", r"[12]\.\d+")])
@pytest.mark.parametrize("model", NETWORKS)
@pytest.mark.run
def test_nan_stops_training_and_earlier_checkpoints_are_kept(model, moment, loss, tmp_path):
    """NaN occurs in the loss and thus in the gradients, or in the gradients alone."""
    arguments = fit(model, **{"trainer.log_every_n_steps": 10, "checkpoint.every_n_train_steps": 7})
    child = run(*arguments, cwd=tmp_path, fault=(moment, 31, "nan"))
    assert child.wait() == 2
    line = last_line(child)
    assert re.search(rf"at step 31 the loss is {loss} and .* \d+ weights are not finite \(first network\.", line)
    assert "Traceback" not in child.err.read_text()
    checkpoints = folder(tmp_path, model) / "checkpoints"
    assert str(checkpoints.relative_to(tmp_path)) in line
    for name, step in (("last", 28), ("best", 24)):
        content = read(checkpoints / f"{name}.ckpt")
        assert content["global_step"] == step
        assert all(weight.isfinite().all() for weight in content["state_dict"].values())


def test_divergence_at_a_high_learning_rate_is_reported(tmp_path):
    arguments = fit("transformer", **{"model.init_args.optimizer.init_args.lr": 1e30})
    child = run(*arguments, cwd=tmp_path)
    assert child.wait() == 2
    assert re.search(r"loss and gradients must be finite, but at step \d .*\.lr\)", last_line(child))


# Code injection


class Malicious:
    def __reduce__(self):
        return (Path.touch, (Path("canary"),))


@pytest.fixture(scope="module")
def trained(reference):
    return folder(reference("gpt"), "gpt") / "checkpoints/best.ckpt"


PLANTED = "import pathlib\npathlib.Path('canary').touch()\nclass Evil:\n    pass\n"


def checkpoints_with_code(trained):
    """Yield checkpoints with a valid checksum that name code."""
    content = read(trained)
    yield "a pickle that calls", content | {"extra": Malicious()}
    for path in ("planted.Evil", "os.system", "pathlib.Path", "lightning_tfm.checkpoint.write"):
        hyper_parameters = content["hyper_parameters"]
        network = hyper_parameters["network"] | {"class_path": path}
        yield path, content | {"hyper_parameters": hyper_parameters | {"network": network}}
    arguments = content["hyper_parameters"]["network"]["init_args"]
    network = {
        "class_path": content["hyper_parameters"]["network"]["class_path"],
        "init_args": arguments | {"d_model": {"class_path": "planted.Evil"}},
    }
    yield "an argument", content | {"hyper_parameters": content["hyper_parameters"] | {"network": network}}
    yield (
        "a class of its own",
        content | {"hyper_parameters": content["hyper_parameters"] | {"_class_path": "planted.Evil"}},
    )


@pytest.fixture(scope="module")
def crafted():
    """Return the content of a checkpoint, as `fit` writes it, except for the state of the training."""
    arguments = {"vocab_size": 10, "max_length": 42, "d_model": 16, "num_heads": 2, "num_layers": 1}
    network = {"class_path": "lightning_tfm.networks.gpt.GPT", "init_args": arguments}
    loggers = [{"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "runs", "name": "x"}}]
    return {
        "format_version": FORMAT,
        "global_step": 4,
        "state_dict": {f"network.{name}": weight for name, weight in GPT(**arguments).state_dict().items()},
        "hyper_parameters": {
            "class_path": "lightning_tfm.tasks.seq2seq.Seq2SeqModule",
            "predictor": "lightning_tfm.inference.seq2seq.Seq2SeqPredictor",
            "network": network,
            "tokenizer": SymbolTokenizer("0123456").to_dict(),
            "max_target_length": 15,
            "optimizer": {},
            "lr_schedule": {},
        },
        "experiment": {"name": "x", "config": json.dumps({"trainer": {"logger": loggers, "callbacks": None}})},
        "longest_source": 14,
        "alignment_head": ("layers.0.self_attention", 1),
    }


@contextmanager
def recursion_limit(limit):
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(limit)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


def nested(levels, width=1, value="x"):
    """Return a list of `width` references to the same list of references, and so on."""
    for _ in range(levels):
        value = [value] * width
    return value


REPLACE = {"type": "Replace", "pattern": {"Regex": "."}, "content": "a" * 10}


def repeated(number, part=REPLACE, kind="normalizer"):
    """Return a subword tokenizer with a sequence of equal parts; REPLACE makes a text 10 times as long."""
    model = json.loads(train_tokenizer([TEXT], "subword", 290).to_dict()["model"])
    return {
        "type": "subwords",
        "model": json.dumps(model | {kind: {"type": "Sequence", f"{kind.replace('_', '')}s": [part] * number}}),
    }


def placed(content, value, *keys):
    """Return a copy of nested dictionaries with another value, at a key of a key and so on."""
    key, *rest = keys
    return {**content, key: placed(content[key], value, *rest) if rest else value}


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
ITSELF: dict[str, object] = {}
ITSELF["x"] = ITSELF
HEAD = "network.head.weight"
NETWORK = ("hyper_parameters", "network", "init_args")
CRAFTED = {
    "a list": lambda content: [content],
    "a value that contains itself": lambda content: content | {"x": ITSELF},
    "a value nested in many levels": lambda content: content | {"x": nested(200)},
    "a value of 10**12 references": lambda content: content | {"x": nested(12, width=10)},
    "arguments of 10**12 references": lambda content: placed(content, nested(12, width=10), *NETWORK, "bias"),
    "a weight of 10**12 elements": lambda content: placed(
        content, torch.zeros(1).expand(10**6, 10**6), "state_dict", HEAD
    ),
    "a weight without data": lambda content: placed(content, torch.empty(10, 16, device="meta"), "state_dict", HEAD),
    "a sparse weight": lambda content: placed(content, torch.eye(10, 16).to_sparse_coo(), "state_dict", HEAD),
    "a weight of another shape": lambda content: placed(content, torch.zeros(3), "state_dict", HEAD),
    "a weight that is not a tensor": lambda content: placed(content, 3.0, "state_dict", HEAD),
    "no weights": lambda content: content | {"state_dict": {}},
    "shards in another folder": lambda content: content | {"shards": {"folder": "../..", "files": {}}},
    "shards without files": lambda content: content | {"shards": {"folder": "x"}},
    "a tensor larger than its shards": lambda content: placed(
        content | {"shards": {"folder": "x", "files": {}, "fused": {}, "tensor_parallel_size": 1}},
        torch.empty(10**6, 10**6, device="meta"),
        *("state_dict", HEAD),
    ),
    "10**9 layers": lambda content: placed(content, 10**9, *NETWORK, "num_layers"),
    "a width of 10**5": lambda content: placed(content, 10**5, *NETWORK, "d_model"),
    "10**400 ids": lambda content: placed(content, 10**400, *NETWORK, "vocab_size"),
    "10**9 sinusoidal positions": lambda content: placed(
        content,
        {**content["hyper_parameters"]["network"]["init_args"], "max_length": 10**9, "positions": "sinusoidal"},
        *NETWORK,
    ),
    "no heads": lambda content: placed(content, 0, *NETWORK, "num_heads"),
    "an unknown argument": lambda content: placed(content, 3, *NETWORK, "x"),
    "no network": lambda content: placed(content, None, "hyper_parameters", "network"),
    "another predictor": lambda content: placed(
        content, "lightning_tfm.inference.classifier.ClassifierPredictor", "hyper_parameters", "predictor"
    ),
    "no tokenizer": lambda content: placed(content, None, "hyper_parameters", "tokenizer"),
    "an unknown tokenizer": lambda content: placed(content, ["x"], "hyper_parameters", "tokenizer", "type"),
    "symbols that are not strings": lambda content: placed(
        content, [1, 2, 3], "hyper_parameters", "tokenizer", "symbols"
    ),
    "too few symbols": lambda content: placed(content, ["0"], "hyper_parameters", "tokenizer", "symbols"),
    "a separator that is not a string": lambda content: placed(
        content, 5, "hyper_parameters", "tokenizer", "separator"
    ),
    "a damaged tokenizer": lambda content: placed(
        content, {"type": "subwords", "model": "x"}, "hyper_parameters", "tokenizer"
    ),
    "a normalizer of 10**12 characters": lambda content: placed(content, repeated(12), "hyper_parameters", "tokenizer"),
    "normalizers that double a text 20 times": lambda content: placed(
        content, repeated(20, BYTES), "hyper_parameters", "tokenizer"
    ),
    "pre-tokenizers that double a text 20 times": lambda content: placed(
        content, repeated(20, BYTES, "pre_tokenizer"), "hyper_parameters", "tokenizer"
    ),
    "a length that is not a number": lambda content: placed(content, "x", "hyper_parameters", "max_target_length"),
    "a longest source that is not a number": lambda content: content | {"longest_source": "x"},
    "an unknown head": lambda content: content | {"alignment_head": ("layers.0.self_attention", 2)},
    "a head that is not an integer": lambda content: content | {"alignment_head": ("layers.0.self_attention", 0.5)},
    "an unknown layer": lambda content: content | {"alignment_head": ("layers.7", 0)},
    "a layer without attention": lambda content: content | {"alignment_head": ("", 0)},
    "a step that is not a number": lambda content: content | {"global_step": "x"},
    "no step": lambda content: {name: value for name, value in content.items() if name != "global_step"},
    "callbacks that are not a mapping": lambda content: content | {"callbacks": [1]},
    "an experiment that is not a mapping": lambda content: content | {"experiment": "x"},
    "an empty experiment": lambda content: content | {"experiment": {}},
    "a name that is not a string": lambda content: placed(content, 3, "experiment", "name"),
    "a configuration that is not a string": lambda content: placed(content, 3, "experiment", "config"),
    "bytes": lambda content: content | {"x": bytearray(3)},
    "a set": lambda content: content | {"x": {3}},
}
"""Changes of the content of a checkpoint, by description."""


@pytest.mark.parametrize("case", CRAFTED)
def test_a_crafted_checkpoint_is_refused(case, crafted, tmp_path):
    with recursion_limit(20_000):  # of the pickler
        write(CRAFTED[case](crafted), tmp_path / "a.ckpt")
    with pytest.raises(UserError, match=r"a\.ckpt' must be a checkpoint|the weights of '.*a\.ckpt' must fit"):
        load(tmp_path / "a.ckpt")


@pytest.mark.parametrize(
    "path", [None, "os.system", "lightning_tfm.checkpoint.write", "lightning_tfm.inference.predictor.Predictor"]
)
def test_a_checkpoint_must_name_a_trusted_predictor(path, crafted, tmp_path):
    write(placed(crafted, path, "hyper_parameters", "predictor"), tmp_path / "a.ckpt")
    with pytest.raises(UserError, match=rf"a\.ckpt'.* names '{path}'"):
        load(tmp_path / "a.ckpt")


@pytest.mark.parametrize(("setting", "value"), [("num_layers", 10**9), ("d_model", 10**5), ("max_length", 10**9)])
def test_a_network_much_larger_than_the_weights_is_refused(setting, value, crafted, monkeypatch, capsys, tmp_path):
    config = yaml.safe_load((EXPERIMENTS / "copy_gpt.yaml").read_text())
    config["trainer"] |= {"logger": None, "callbacks": None}
    config["model"]["init_args"]["network"]["init_args"] |= {"num_heads": 1, setting: value}
    write(placed(crafted, yaml.safe_dump(config), "experiment", "config"), tmp_path / "a.ckpt")
    monkeypatch.chdir(tmp_path)
    assert in_process(monkeypatch, "test", "a.ckpt") == 2
    assert "the network must fit the weights of the checkpoint, but is larger" in capsys.readouterr().err


def test_the_unmodified_checkpoint_is_valid(crafted, tmp_path):
    write(crafted, tmp_path / "a.ckpt")
    assert load(tmp_path / "a.ckpt").alignment_head == ("layers.0.self_attention", 1)


def rewritten(path, compression=zipfile.ZIP_STORED, old_format=False, hidden=False):
    """Write the content of a checkpoint in another format, with a valid checksum."""
    content = io.BytesIO()
    if old_format:
        torch.save(read(path), content, _use_new_zipfile_serialization=False)
        content.write(b"\0\0")
    else:
        with zipfile.ZipFile(path) as source, zipfile.ZipFile(content, "w", compression) as target:
            for name in source.namelist():
                target.writestr(name, source.read(name))
    data = content.getvalue()[:-2]
    if hidden:  # ZipFile reads the directory before the end record, torch that at the offset in the end record
        rewritten(path)
        with zipfile.ZipFile(path) as source:
            end = path.read_bytes()[source.start_dir :]
        data = data[:-20] + end[: end.rindex(b"PK\5\6")] + data[-20:]
    path.write_bytes(data + _comment(hashlib.sha256(data)))


@pytest.mark.parametrize(
    "settings",
    [
        {"compression": zipfile.ZIP_DEFLATED},
        {"compression": zipfile.ZIP_LZMA},
        {"old_format": True},
        {"compression": zipfile.ZIP_DEFLATED, "hidden": True},
    ],
)
def test_an_archive_of_another_format_is_refused(settings, crafted, tmp_path):
    """Compressed, a small file could take all memory."""
    path = tmp_path / "a.ckpt"
    write(crafted, path)
    rewritten(path)
    load(path)
    rewritten(path, **settings)
    with pytest.raises(UserError, match="cannot be read as one"):
        load(path)


CONFIGS = {
    "not a mapping": "[1]",
    "invalid YAML": "trainer: [",
    "nested aliases": "a: &a [x, x]\n" + "".join(f"b{level}: &a [*a, *a, *a, *a]\n" for level in range(9)),
    "many levels": "[" * 200_000,
    "no trainer": "a: 1",
    "a trainer that is not a mapping": "trainer: x",
    "loggers that are not classes": "trainer: {logger: [3], callbacks: null}",
    "a class that is not a string": "trainer: {logger: [{class_path: 3}], callbacks: null}",
    "arguments that are not a mapping": "trainer: {logger: [{class_path: CSVLogger, init_args: []}], callbacks: null}",
    "callbacks that are not classes": "trainer: {logger: null, callbacks: [3]}",
    "a name that is not a string": "{trainer: {logger: null, callbacks: null}, 3: 4}",
    "a logger that is not in a list": "trainer: {logger: {class_path: CSVLogger}, callbacks: null}",
    "a logger as text": 'trainer: {logger: \'{"class_path": "CSVLogger"}\', callbacks: null}',
    "callbacks as text": 'trainer: {logger: null, callbacks: \'[{"class_path": "ModelCheckpoint"}]\'}',
    "a nested name": "{trainer: {logger: null, callbacks: null}, trainer.default_root_dir: /there}",
    "a nested name of a logger": "{trainer: {logger: null, callbacks: null}, trainer.logger: CSVLogger}",
    "a name to append to": "trainer: {logger: null, callbacks: null, callbacks+: [{class_path: ModelCheckpoint}]}",
    "a name in a logger": "trainer: {logger: {class_path: CSVLogger, init_args.save_dir: /there}, callbacks: null}",
    "characters that UTF-8 cannot encode": "trainer: {logger: null, callbacks: null, x: \udcff}",
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_crafted_configuration_in_a_checkpoint_is_refused(case, crafted, tmp_path):
    write(placed(crafted, CONFIGS[case], "experiment", "config"), tmp_path / "a.ckpt")
    with pytest.raises(UserError, match="must hold the configuration of its experiment, but it is damaged"):
        with_options(["test", str(tmp_path / "a.ckpt")], tmp_path)


@pytest.mark.parametrize("name", ["a\0b", "x" * 300, "\udcff"])
def test_a_crafted_name_in_a_checkpoint_is_refused(name, crafted, tmp_path):
    write(placed(crafted, name, "experiment", "name"), tmp_path / "a.ckpt")
    with pytest.raises(UserError, match="must hold the configuration of its experiment, but it is damaged"):
        with_options(["test", str(tmp_path / "a.ckpt")], tmp_path)


def test_a_checkpoint_names_no_place_to_write_to(crafted, tmp_path):
    loggers = [
        {
            "class_path": f"{package}.{name}",
            "init_args": {"save_dir": "/there", "name": "../../x", "version": "../../y"},
        }
        for package, name in (
            ("lightning.pytorch.loggers", "CSVLogger"),
            ("lightning_tfm.loggers", "TensorBoardLogger"),
            ("lightning_tfm.loggers", "WandbLogger"),
        )
    ]
    loggers[2]["init_args"] |= {"project": "mine", "entity": "theirs", "id": "there"}
    loggers[2]["dict_kwargs"] = {"entity": "there"}
    saving = [
        {"class_path": f"lightning.pytorch.callbacks.{name}", "init_args": {"dirpath": "/there"}} for name in SAVING
    ]
    profiler = {"class_path": "lightning.pytorch.profilers.AdvancedProfiler", "init_args": {"dirpath": "/there"}}
    trainer = {"logger": loggers, "callbacks": saving, "profiler": profiler, "default_root_dir": "/there"}
    config = json.dumps({"trainer": trainer})
    write(crafted | {"experiment": {"name": "../../x", "config": config}}, tmp_path / "a.ckpt")
    _, _, path, *_ = with_options(["test", str(tmp_path / "a.ckpt")], tmp_path)
    assert Path(path) == tmp_path / "x.yaml"
    text = Path(path).read_text()
    assert "there" not in text
    assert ".." not in text
    assert "project: mine" in text
    write(placed(crafted, "..", "experiment", "name"), tmp_path / "a.ckpt")
    assert with_options(["test", str(tmp_path / "a.ckpt")], tmp_path)[2] == str(tmp_path / "unnamed.yaml")


def test_lightning_migrates_no_checkpoint(crafted, tmp_path):
    """Its migrations fail if the content does not fit the version."""
    write(crafted | {"pytorch-lightning_version": "0.0.1"}, tmp_path / "a.ckpt")
    content = VerifiedCheckpointIO().load_checkpoint(tmp_path / "a.ckpt")
    assert content["pytorch-lightning_version"] == lightning.__version__


@pytest.mark.parametrize("command", ["generate", "test", "fit"])
@pytest.mark.parametrize("case", range(7))
@pytest.mark.run
def test_a_checkpoint_executes_no_code(case, command, trained, tmp_path):
    (tmp_path / "planted.py").write_text(PLANTED)
    name, content = list(checkpoints_with_code(trained))[case]
    write(content, tmp_path / "evil.ckpt")
    arguments = ("generate", "evil.ckpt", "1 2") if command == "generate" else fit("gpt", "--ckpt_path=evil.ckpt")
    if command == "test":
        arguments = ("test", *arguments[1:])
    child = run(*arguments, cwd=tmp_path)
    assert not (tmp_path / "canary").exists(), name
    assert child.wait() == 2, child.err.read_text()
    assert last_line(child).startswith("lightning-tfm: error: ")


NAMED = {
    "data": "data: planted.Evil",
    "data.class_path": "data:\n  class_path: planted.Evil",
    "model": "model: planted.Evil",
    "network": "model:\n  class_path: lightning_tfm.tasks.Seq2SeqModule\n  init_args:\n    network: planted.Evil",
    "network.class_path": "model:\n  class_path: lightning_tfm.tasks.Seq2SeqModule\n  init_args:\n"
    "    network:\n      class_path: planted.Evil",
    "a callback": "trainer:\n  callbacks:\n  - class_path: planted.Evil",
    "a logger": "trainer:\n  logger:\n  - class_path: planted.Evil",
    "a function": "trainer:\n  callbacks:\n  - class_path: os.system",
    "a plugin": "trainer:\n  plugins:\n  - class_path: planted.Evil",
    "an argument": "trainer:\n  max_steps:\n    class_path: planted.Evil",
    "an argument of any type": "trainer:\n  logger:\n  - class_path: lightning_tfm.loggers.WandbLogger\n"
    "    init_args:\n      experiment:\n        class_path: planted.Evil",
    "the text of an error as a value": """trainer:
  max_steps: "module 'planted' has no attribute 'x'"
""",
    "the text of another error as a value": """trainer:
  max_steps: "Problem with given class_path 'planted.Evil': does not accept option 'x'"
""",
    "a Python tag": "data: !!python/object/apply:os.system ['touch canary']",
    "trust_package in the YAML": "trust_package: planted\ndata: planted.Evil",
}


@pytest.mark.parametrize("case", NAMED)
@pytest.mark.run
def test_a_yaml_imports_no_untrusted_code(case, tmp_path):
    (tmp_path / "planted.py").write_text(PLANTED)
    (tmp_path / "evil.yaml").write_text(NAMED[case])
    child = run(
        *("fit", "--config", EXPERIMENTS / "copy_gpt.yaml", "--config", "evil.yaml"),
        cwd=tmp_path,
    )
    assert not (tmp_path / "canary").exists()
    assert child.wait() == 2, child.err.read_text()
    assert last_line(child).startswith("lightning-tfm: error: ")


def test_the_command_line_imports_no_untrusted_code(tmp_path):
    (tmp_path / "planted.py").write_text(PLANTED)
    for option in ("--data=planted.Evil", "--trainer.callbacks=planted.Evil", "--model.init_args.network=planted.Evil"):
        child = run(*fit("gpt", option), cwd=tmp_path)
        assert child.wait() == 2
        assert "planted.Evil" in last_line(child)
        assert "--trust-package planted" in last_line(child)
        assert not (tmp_path / "canary").exists()


@pytest.mark.run
def test_trusted_packages_are_imported(tmp_path):
    (tmp_path / "planted.py").write_text(PLANTED)
    child = run(*fit("gpt", "--data=planted.Evil", "--trust-package=planted"), cwd=tmp_path)
    assert child.wait() == 2, "Evil is not a data module"
    assert (tmp_path / "canary").exists(), "the tests above look for this file"
    (tmp_path / "mine.py").write_text("import datamodules\nclass Mine(datamodules.Copy):\n    pass\n")
    for count, option in enumerate(("--trust-package=mine", "--trust-package=other,mine")):
        child = run(*fit("gpt", "--data=mine.Mine", option), cwd=tmp_path)
        assert child.wait() == 0, child.err.read_text()
        assert len(list((tmp_path / "runs/copy_gpt").iterdir())) == count + 1


# Signals to all processes at once


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.run
def test_a_signal_to_all_processes_saves_a_checkpoint(signum, status, reference, tmp_path):
    """Ctrl-C in a terminal and SIGTERM from a scheduler also reach the data loader workers."""
    script = Path(sys.executable).with_name("lightning-tfm")
    command = [script, *map(str, fit("gpt", **{"data.init_args.num_workers": 2, "trainer.max_steps": 100_000}))]
    environment = {**os.environ, "WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1"}
    with (tmp_path / "stderr").open("w") as err:
        process = subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=err, stderr=err, start_new_session=True
        )
    while not list(tmp_path.glob("runs/*/*/checkpoints/best.ckpt")):  # so that the validation workers exist, too
        assert process.poll() is None, (tmp_path / "stderr").read_text()
        time.sleep(0.05)
    os.killpg(process.pid, signum)
    try:
        assert process.wait(60) == status
    finally:
        process.kill()
    printed = (tmp_path / "stderr").read_text()
    assert "saved after step" in printed
    assert "Traceback" not in printed


# W&B


@pytest.fixture
def server(request):
    """Start a server in place of W&B that responds with a status, or never (None)."""
    closing = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            if request.param is None:
                closing.wait(20)
            with suppress(OSError):  # the client may have given up
                self.send_response(request.param or 200)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    closing.set()
    server.shutdown()
    server.server_close()


LOGGED_IN = {"WANDB_MODE": None, "WANDB_API_KEY": "0" * 40}


def assert_unchanged(child, reference, cwd):
    assert child.wait() == 0, child.err.read_text()
    assert_same_run(cwd, reference("gpt"), "gpt")
    assert "Traceback" not in child.err.read_text()


@pytest.mark.parametrize("server", [401, 503, None], indirect=True)
@pytest.mark.run
def test_a_failing_wandb_server_does_not_change_the_run(server, reference, tmp_path):
    child = run(*fit("gpt"), cwd=tmp_path, **LOGGED_IN, WANDB_BASE_URL=server)
    assert_unchanged(child, reference, tmp_path)
    assert list((tmp_path / "runs/wandb").glob("offline-run-*"))


@pytest.mark.run
def test_a_missing_network_does_not_change_the_run(reference, tmp_path):
    child = run(*fit("gpt"), cwd=tmp_path, **LOGGED_IN, WANDB_BASE_URL="http://wandb.invalid")
    assert_unchanged(child, reference, tmp_path)
    assert "W&B cannot be reached at http://wandb.invalid, so the run is offline" in child.err.read_text()
    assert list((tmp_path / "runs/wandb").glob("offline-run-*"))


@pytest.mark.run
def test_a_terminal_shows_no_prompt_for_a_wandb_account(tmp_path):
    """A prompt would wait for input until the timeout."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    environment |= {"HOME": str(tmp_path), "NETRC": str(tmp_path / "none"), "OMP_NUM_THREADS": "1"}
    script = Path(sys.executable).with_name("lightning-tfm")
    command = [script, *map(str, fit("gpt", **{"trainer.max_steps": 3}))]
    status, printed = in_terminal(command, tmp_path, environment)
    assert status == 0, printed
    assert "The run is saved in" in printed


@pytest.mark.run
def test_a_missing_wandb_account_does_not_change_the_run(reference, tmp_path):
    child = run(*fit("gpt"), cwd=tmp_path, WANDB_MODE=None, HOME=str(tmp_path), NETRC=str(tmp_path / "none"))
    assert_unchanged(child, reference, tmp_path)
    assert list((tmp_path / "runs/wandb").glob("offline-run-*"))


@pytest.mark.parametrize("fault", ["W&B dies", "W&B cannot write"])
@pytest.mark.run
def test_a_failing_wandb_service_does_not_change_the_run(fault, reference, tmp_path):
    child = run(*fit("gpt"), cwd=tmp_path, fault=("in a training step", 20, fault), WANDB_MODE="offline")
    assert_unchanged(child, reference, tmp_path)


@pytest.mark.run
def test_an_unusable_wandb_folder_does_not_change_the_run(reference, tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/wandb").write_text("in its place")
    child = run(*fit("gpt"), cwd=tmp_path, WANDB_MODE="offline")
    assert_unchanged(child, reference, tmp_path)
