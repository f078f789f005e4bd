"""Downloads from a local server: a file is used only if it is complete and its checksum is right."""

from __future__ import annotations

import functools
import hashlib
import http.server
import re
import threading

import pytest

from lightning_tfm.data import Download, download, resolve_path
from lightning_tfm.errors import UserError

CONTENT = b"".join(b"line %d\n" % number for number in range(50_000))
SUM = hashlib.sha256(CONTENT).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    """Handler that serves CONTENT under any path, or the requested range; fails by the next of the `faults`."""

    def do_GET(self):
        self.server.requests.append((self.path, self.headers.get("Range")))
        fault = self.server.faults.pop(0) if self.server.faults else None
        if fault == "missing":
            self.send_error(404)
            return
        content = CONTENT[::-1] if fault == "another file" else CONTENT
        begin = 0
        if (requested := self.headers.get("Range")) and fault != "no ranges":
            begin = int(re.fullmatch(r"bytes=(\d+)-", requested)[1])
        if begin >= len(content):
            self.send_error(416)
            return
        assert "gzip" not in self.headers.get("Accept-Encoding", ""), "a compressed download cannot be resumed"
        self.send_response(206 if begin else 200)
        self.send_header("Content-Length", str(len(content) - begin))
        self.end_headers()
        self.wfile.write(content[begin : len(content) // 2] if fault == "breaks off" else content[begin:])

    def log_message(self, *_):
        """Log nothing."""


@pytest.fixture
def server(tmp_path, monkeypatch):
    """Start a server and use an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("LIGHTNING_TFM_DATA", raising=False)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.requests, server.faults = [], []
    server.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=functools.partial(server.serve_forever, poll_interval=0.01))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


NAME = "folder/file.txt"


def file(server):
    return Download(f"{server.address}/origin/file.txt", SUM)


def cached(tmp_path):
    return [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.suffix != ".lock"]


def test_a_file_is_downloaded_once(server, tmp_path):
    for _ in range(2):
        path = download(NAME, file(server))
        assert path.read_bytes() == CONTENT
    assert server.requests == [("/origin/file.txt", None)]
    assert cached(tmp_path) == ["file.txt"]
    assert resolve_path(NAME, {NAME: file(server)}) == path


@pytest.mark.parametrize("next_fault", [None, "no ranges"])
def test_an_interrupted_download_is_resumed_or_restarted(next_fault, server, tmp_path):
    server.faults = ["breaks off", next_fault]
    with pytest.raises(
        UserError, match=rf"'{NAME}' cannot .* http.*: the connection was interrupted; the part received"
    ):
        download(NAME, file(server))
    assert cached(tmp_path) == ["file.txt.part"]
    assert download(NAME, file(server)).read_bytes() == CONTENT
    assert 0 < int(server.requests[1][1].strip("bytes=-")) <= len(CONTENT) // 2
    assert cached(tmp_path) == ["file.txt"]


def test_a_file_with_another_checksum_is_neither_used_nor_kept(server, tmp_path):
    server.faults = ["another file"]
    with pytest.raises(UserError, match=rf"unexpected SHA-256 \(expected {SUM[:20]}\.\.\.\)"):
        download(NAME, file(server))
    assert cached(tmp_path) == []
    download(NAME, file(server)).write_bytes(CONTENT[:-1])
    assert download(NAME, file(server)).read_bytes() == CONTENT
    assert len(server.requests) == 3


@pytest.mark.parametrize("size", [1000, len(CONTENT) + 1])
def test_a_partial_download_of_another_file_is_discarded(size, server, tmp_path):
    """The mirror may have changed, so that the rest of the file does not fit what was received."""
    path = download(NAME, file(server))
    path.rename(f"{path}.part").write_bytes(b"x" * size)
    assert download(NAME, file(server)).read_bytes() == CONTENT
    assert server.requests[0][1] is server.requests[-1][1] is None
    assert cached(tmp_path) == ["file.txt"]


def test_errors_of_the_server_are_reported(server, tmp_path):
    """Also if a partial download is kept."""
    dead = Download("http://127.0.0.1:9/file.txt", SUM)
    for kept in ([], ["file.txt.part"]):
        server.faults = ["missing"]
        with pytest.raises(UserError, match=rf"'{NAME}' cannot be downloaded from http.*/origin/file.txt: Not Found"):
            download(NAME, file(server))
        with pytest.raises(UserError, match=r"does not respond. LIGHTNING_TFM_DATA may name a mirror"):
            download(NAME, dead)
        assert cached(tmp_path) == kept
        server.faults = ["breaks off"]
        with pytest.raises(UserError):
            download(NAME, file(server))


def test_an_unwritable_cache_is_reported(server, tmp_path):
    (tmp_path / "cache").write_text("a file, where a folder should be")
    with pytest.raises(UserError, match=rf"'{NAME}' cannot be kept in '.*cache.*': .*; free disk space, or set XDG"):
        download(NAME, file(server))


def test_a_mirror_may_be_a_url(server, monkeypatch):
    monkeypatch.setenv("LIGHTNING_TFM_DATA", f"{server.address}/mirror/")
    assert download(NAME, Download("http://127.0.0.1:9/file.txt", SUM)).read_bytes() == CONTENT
    assert server.requests == [(f"/mirror/{NAME}", None)]


def test_a_mirror_may_be_a_folder(server, tmp_path, monkeypatch):
    """A file has its name here or upstream."""
    monkeypatch.setenv("LIGHTNING_TFM_DATA", str(tmp_path))
    with pytest.raises(UserError, match=rf"LIGHTNING_TFM_DATA must name a folder that holds '{NAME}'"):
        download(NAME, file(server))
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / NAME, tmp_path / "file.txt"):
        path.write_bytes(CONTENT[:-1])
        with pytest.raises(UserError, match="unexpected SHA-256"):
            download(NAME, file(server))
        path.write_bytes(CONTENT)
        assert download(NAME, file(server)) == path
        path.unlink()
    assert server.requests == []


def test_an_unknown_file_name_is_refused(server):
    with pytest.raises(UserError, match="no file 'nothing', nor is it one of known"):
        resolve_path("nothing", {"known": file(server)})
