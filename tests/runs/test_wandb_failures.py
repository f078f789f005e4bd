"""Failures of W&B, none of which changes a run."""

import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from support.equality import assert_same_run
from support.experiments import fit
from support.processes import ENVIRONMENT, SCRIPT, in_terminal, run

pytestmark = pytest.mark.run


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


def assert_unchanged(child, reference, offline=False):
    cwd = child.finish().err.parent
    assert_same_run(cwd, reference("gpt"), "gpt")
    assert "Traceback" not in child.err.read_text()
    assert not offline or list((cwd / "runs/wandb").glob("offline-run-*"))


@pytest.mark.parametrize("server", [401, 503, None], indirect=True)
def test_a_failing_wandb_server_does_not_change_the_run(server, reference, tmp_path):
    assert_unchanged(run(*fit("gpt"), cwd=tmp_path, **LOGGED_IN, WANDB_BASE_URL=server), reference, offline=True)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            LOGGED_IN | {"WANDB_BASE_URL": "http://wandb.invalid"},
            "W&B, offline since http://wandb.invalid cannot be reached: the run is logged without examples",
        ),
        ({"WANDB_MODE": None, "HOME": ".", "NETRC": "none"}, ""),
    ],
    ids=["network", "account"],
)
def test_a_missing_network_or_account_does_not_change_the_run(environment, message, reference, tmp_path):
    child = run(*fit("gpt"), cwd=tmp_path, **environment)
    assert_unchanged(child, reference, offline=True)
    assert message in child.out.read_text()
    assert child.err.read_text() == ""


@pytest.mark.parametrize("fault", ["W&B dies", "W&B cannot write"])
def test_a_failing_wandb_service_does_not_change_the_run(fault, reference, tmp_path):
    child = run(*fit("gpt"), cwd=tmp_path, fault=("in a training step", 20, fault), WANDB_MODE="offline")
    assert_unchanged(child, reference)


def test_an_unusable_wandb_folder_does_not_change_the_run(reference, tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/wandb").write_text("in its place")
    assert_unchanged(run(*fit("gpt"), cwd=tmp_path, WANDB_MODE="offline"), reference)


def test_a_terminal_shows_no_prompt_for_a_wandb_account(tmp_path):
    """A prompt would wait for input until the timeout."""
    environment = {name: value for name, value in ENVIRONMENT.items() if not name.startswith("WANDB")}
    environment |= {"HOME": str(tmp_path), "NETRC": str(tmp_path / "none")}
    command = [SCRIPT, *map(str, fit("gpt", **{"trainer.max_steps": 3}))]
    status, printed = in_terminal(command, tmp_path, environment)
    assert status == 0, printed
    assert "The run is saved in" in printed
