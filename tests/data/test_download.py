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


def file(server, sha256=SUM):
    return Download(f"{server.address}/origin/file.txt", sha256)


def cached(tmp_path):
    return [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.suffix != ".lock"]


def test_a_file_is_downloaded_once(server, tmp_path):
    for _ in range(2):
        path = download("folder/file.txt", file(server))
        assert path.read_bytes() == CONTENT
    assert server.requests == [("/origin/file.txt", None)]
    assert cached(tmp_path) == [path]
    assert resolve_path("folder/file.txt", {"folder/file.txt": file(server)}) == path


def test_an_interrupted_download_is_resumed(server, tmp_path):
    server.faults = ["breaks off"]
    with pytest.raises(
        UserError,
        match=r"'file.txt' cannot be downloaded from http.*: the connection was interrupted; the part received",
    ):
        download("file.txt", file(server))
    (part,) = cached(tmp_path)
    assert part.name == "file.txt.part"
    assert 0 < part.stat().st_size <= len(CONTENT) // 2
    assert download("file.txt", file(server)).read_bytes() == CONTENT
    assert server.requests[1][1].startswith("bytes=")
    assert [path.name for path in cached(tmp_path)] == ["file.txt"]


def test_a_download_restarts_if_the_server_ignores_ranges(server):
    server.faults = ["breaks off", "no ranges"]
    with pytest.raises(UserError):
        download("file.txt", file(server))
    assert download("file.txt", file(server)).read_bytes() == CONTENT


def test_a_file_with_another_checksum_is_neither_used_nor_kept(server, tmp_path):
    server.faults = ["another file"]
    with pytest.raises(UserError, match=rf"has an unexpected SHA-256 \(expected {SUM[:20]}\.\.\.\) and is not used"):
        download("file.txt", file(server))
    assert cached(tmp_path) == []
    assert download("file.txt", file(server)).read_bytes() == CONTENT


def test_a_damaged_file_in_the_cache_is_downloaded_again(server):
    path = download("file.txt", file(server))
    path.write_bytes(CONTENT[:-1])
    assert download("file.txt", file(server)).read_bytes() == CONTENT
    assert len(server.requests) == 2


def test_a_partial_download_longer_than_the_file_is_discarded(server, tmp_path):
    folder = download("file.txt", file(server)).parent
    (folder / "file.txt").unlink()
    (folder / "file.txt.part").write_bytes(b"x" * len(CONTENT) + b"x")
    assert download("file.txt", file(server)).read_bytes() == CONTENT
    assert [path.name for path in cached(tmp_path)] == ["file.txt"]


def test_a_partial_download_of_another_file_is_discarded(server, tmp_path):
    """The mirror may have changed, so that the rest of the file does not fit what was received."""
    folder = download("file.txt", file(server)).parent
    (folder / "file.txt").unlink()
    (folder / "file.txt.part").write_bytes(b"x" * 1000)
    assert download("file.txt", file(server)).read_bytes() == CONTENT
    assert [requested for _, requested in server.requests] == [None, "bytes=1000-", None]


def test_the_error_is_reported_if_a_partial_download_is_kept(server, tmp_path):
    server.faults = ["breaks off", "missing"]
    with pytest.raises(UserError):
        download("file.txt", file(server))
    with pytest.raises(UserError, match="Not Found"):
        download("file.txt", file(server))
    with pytest.raises(UserError, match="the server does not respond"):
        download("file.txt", Download("http://127.0.0.1:9/file.txt", SUM))


def test_an_unwritable_cache_is_reported(server, tmp_path):
    (tmp_path / "cache").write_text("a file, where a folder should be")
    with pytest.raises(UserError, match=r"'file.txt' cannot be kept in '.*cache.*': .*; free disk space, or set XDG"):
        download("file.txt", file(server))


def test_a_file_missing_on_the_server_is_reported(server, tmp_path):
    server.faults = ["missing"]
    with pytest.raises(UserError, match=r"'file.txt' cannot be downloaded from http.*/origin/file.txt: Not Found. "):
        download("file.txt", file(server))
    assert cached(tmp_path) == []


def test_an_unreachable_server_is_reported(server, tmp_path):
    nobody = Download("http://127.0.0.1:9/file.txt", SUM)
    with pytest.raises(UserError, match=r"the server does not respond. LIGHTNING_TFM_DATA may name a mirror"):
        download("file.txt", nobody)
    assert cached(tmp_path) == []


def test_a_mirror_may_be_a_url(server, monkeypatch):
    monkeypatch.setenv("LIGHTNING_TFM_DATA", f"{server.address}/mirror/")
    assert download("folder/file.txt", Download("http://127.0.0.1:9/file.txt", SUM)).read_bytes() == CONTENT
    assert server.requests == [("/mirror/folder/file.txt", None)]


def test_a_mirror_may_be_a_folder(server, tmp_path, monkeypatch):
    monkeypatch.setenv("LIGHTNING_TFM_DATA", str(tmp_path))
    with pytest.raises(UserError, match=r"LIGHTNING_TFM_DATA must name a folder that holds 'folder/file.txt'"):
        download("folder/file.txt", file(server))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/file.txt").write_bytes(CONTENT)
    assert download("folder/file.txt", file(server)) == tmp_path / "folder/file.txt"
    (tmp_path / "folder/file.txt").write_bytes(CONTENT[:-1])
    with pytest.raises(UserError, match="has an unexpected SHA-256"):
        download("folder/file.txt", file(server))
    (tmp_path / "folder/file.txt").unlink()
    (tmp_path / "file.txt").write_bytes(CONTENT)  # its name upstream
    assert download("folder/file.txt", file(server)) == tmp_path / "file.txt"
    assert server.requests == []


def test_an_unknown_file_name_is_refused(server):
    with pytest.raises(UserError, match="there is no file 'nothing', nor is it one of known, which can be downloaded"):
        resolve_path("nothing", {"known": file(server)})
