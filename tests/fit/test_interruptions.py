"""Signals within the process, and the command that resumes."""

import signal
import threading
from contextlib import suppress

import pytest

from lightning_tfm import __main__
from lightning_tfm.callbacks import Checkpoints
from lightning_tfm.errors import SIGNALS, Interrupted, handle_signals, interrupt
from lightning_tfm.fit import cli
from support.processes import shell_words


def send_at_once(*signums):
    signal.pthread_sigmask(signal.SIG_BLOCK, signums)
    for signum in signums:
        signal.pthread_kill(threading.get_ident(), signum)  # another thread would receive them one by one
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signums)


def test_a_further_signal_does_not_replace_the_first(monkeypatch, command):
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
    monkeypatch.setattr(__main__, "check_arguments", lambda *_: None)
    assert command("fit", status=129).err.splitlines() == [
        "lightning-tfm: interrupted by SIGHUP; resume with:",
        "  lightning-tfm fit --ckpt_path runs/a",
    ]


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
def test_resume_command_is_valid_in_a_shell(other, given, monkeypatch, command):
    def interrupted(arguments):
        raise Interrupted(signal.SIGTERM, 7, "runs/a b/last.ckpt")

    monkeypatch.setattr(cli, "run", interrupted)
    monkeypatch.setattr(__main__, "check_arguments", lambda *_: None)  # there is no such file
    *_, resume = command("fit", *given, "--config", other, "--trainer.logger", "", status=143).err.splitlines()
    assert "\t" not in resume, "a pasted tab would complete a name"
    expected = ["lightning-tfm", "fit", "--config", other, "--trainer.logger", "", "--ckpt_path", "runs/a b/last.ckpt"]
    assert shell_words(resume) == expected
