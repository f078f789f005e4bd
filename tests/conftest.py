"""Fixtures shared by all tests."""

import itertools
import os
import signal
from io import BufferedReader, BytesIO, TextIOWrapper
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: each worker of pytest-xdist has one core

import pytest
import torch
import wandb

from lightning_tfm.data import GeneratedDataModule, stable_hash
from lightning_tfm.networks import Network
from lightning_tfm.tokenization import BOS, EOS, PAD
from support.browser import chromium
from support.data import DATA
from support.experiments import fit, made_once, train_on_dates
from support.networks import NETWORKS, VOCAB_SIZE, randomize
from support.processes import in_process, start

# child processes inherit ignored signals: those of a job in the background, or of nohup
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """Use an empty cache, except for that of fonts, which takes seconds to build."""
    fonts = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "matplotlib"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MPLCONFIGDIR", os.environ.get("MPLCONFIGDIR", str(fonts)))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Seed each test, and reset the precision of matrix products."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")


@pytest.fixture(params=NETWORKS)
def network(request: pytest.FixtureRequest) -> Network:
    """Return each network, untrained and in evaluation mode, with random biases."""
    torch.manual_seed(1)
    return randomize(NETWORKS[request.param]()).eval()


@pytest.fixture(params=DATA)
def make_data(request: pytest.FixtureRequest):
    """Return a function that constructs a small data module, for each class."""
    return DATA[request.param]


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Return a source (5, 7) and target_in (5, 6) with rows of all lengths, right-padded."""
    symbols = itertools.cycle(range(3, VOCAB_SIZE))
    source = torch.full((5, 7), PAD)
    target_in = torch.full((5, 6), PAD)
    for row, (source_length, target_length) in enumerate([(6, 5), (1, 0), (4, 2), (2, 5), (0, 1)]):
        source[row, :source_length] = torch.tensor([next(symbols) for _ in range(source_length)])
        source[row, source_length] = EOS
        target_in[row, 0] = BOS
        target_in[row, 1 : target_length + 1] = torch.tensor([next(symbols) for _ in range(target_length)])
    return source, target_in


@pytest.fixture
def new_wandb():
    """Reset W&B to its initial state."""
    wandb.finish()
    wandb.teardown()
    yield
    wandb.finish()
    wandb.teardown()


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    """Return a function that makes an undisturbed run, once per session for all tests with equal settings."""

    def reference(model, begin=start, **settings):
        def train(cwd):
            begin(*fit(model, **settings), cwd=cwd).finish()

        return made_once(f"{model}_{stable_hash(f'{begin.__name__} {settings}')}", train, tmp_path_factory)

    return reference


@pytest.fixture
def browser():
    """Start the Chromium of Debian headless and without background networking."""
    with chromium() as driver:
        yield driver


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """Return a function that runs a command in a new folder, and returns what it writes to stdout and stderr.

    The function checks the exit status of the command, unless the expected status is None.
    """
    monkeypatch.chdir(tmp_path)

    def command(*arguments, status=0, stdin=None):
        if stdin is not None:
            monkeypatch.setattr("sys.stdin", TextIOWrapper(BufferedReader(BytesIO(stdin))))
        capsys.readouterr()
        actual = in_process(monkeypatch, *arguments)
        printed = capsys.readouterr()
        assert status in (None, actual), printed.err
        return printed

    return command


@pytest.fixture
def mistake(command, monkeypatch):
    """Return a function that runs a command that fails before data are generated, and returns its line of error."""

    def generated(self, split):
        raise AssertionError("data were generated")

    monkeypatch.setattr(GeneratedDataModule, "pairs", generated)

    def mistake(*arguments):
        (line,) = command(*arguments, status=2).err.splitlines()
        assert line.startswith("lightning-tfm: error: ")
        return line

    return mistake


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory):
    """Train briefly on dates by the console script, without a W&B login and without standard input."""
    return made_once("user", train_on_dates, tmp_path_factory) / "runs/date_attention_lstm/version_0"


@pytest.fixture
def checkpoint(run_folder):
    return run_folder / "checkpoints/best.ckpt"
