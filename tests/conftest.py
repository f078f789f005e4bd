"""Fixtures shared by all tests."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
from io import BufferedReader, BytesIO, TextIOWrapper

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: each worker of pytest-xdist has one core

import pytest
import torch
import wandb

from lightning_tfm.networks import Network
from lightning_tfm.tokenization import BOS, EOS, PAD
from support.data import DATA
from support.experiments import fit, made_once
from support.networks import NETWORKS, VOCAB_SIZE
from support.processes import in_process, run

# child processes inherit ignored signals: those of a job in the background, or of nohup
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Seed each test, and reset the precision of matrix products."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")


@pytest.fixture(params=NETWORKS)
def network(request: pytest.FixtureRequest) -> Network:
    """Return each network, untrained and in evaluation mode, with random biases."""
    torch.manual_seed(1)
    network = NETWORKS[request.param]()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return network.eval()


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
def command(monkeypatch, capsys):
    """Return a function that runs a command in this process, and returns what it writes to stdout and stderr.

    The function checks the exit status of the command, unless the expected status is None.
    """

    def command(*arguments: object, status: int | None = 0, stdin: bytes | None = None) -> tuple[str, str]:
        if stdin is not None:
            monkeypatch.setattr("sys.stdin", TextIOWrapper(BufferedReader(BytesIO(stdin))))
        capsys.readouterr()
        actual = in_process(monkeypatch, *arguments)
        out, err = capsys.readouterr()
        assert status in (None, actual), err
        return out, err

    return command


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
    """Return a function that trains an undisturbed run of a model, once per session."""

    def reference(model):
        def train(cwd):
            run(*fit(model), cwd=cwd).finish()

        return made_once(model, train, tmp_path_factory)

    return reference


@pytest.fixture
def browser():
    """Start the Chromium of Debian headless and without background networking."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for argument in ("headless=new", "no-sandbox", "disable-gpu", "disable-background-networking"):
        options.add_argument(f"--{argument}")
    options.add_argument("--window-size=1200,900")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, Service(shutil.which("chromedriver")))
    yield driver
    driver.quit()
