"""Files from the internet, from a server on this machine: whole and right, or not used."""

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
    """Serves CONTENT as any file, and whatever part of it is asked for; fails as the server's `fault` says."""

    def do_GET(self):
        self.server.asked.append((self.path, self.headers.get("Range")))
        fault = self.server.faults.pop(0) if self.server.faults else None
        if fault == "missing":
            self.send_error(404)
            return
        content = CONTENT[::-1] if fault == "another file" else CONTENT
        begin = 0
        if (asked := self.headers.get("Range")) and fault != "no ranges":
            begin = int(re.fullmatch(r"bytes=(\d+)-", asked)[1])
        if begin >= len(content):
            self.send_error(416)
            return
        assert "gzip" not in self.headers.get("Accept-Encoding", ""), "a part of what is packed cannot be gone on with"
        self.send_response(206 if begin else 200)
        self.send_header("Content-Length", str(len(content) - begin))
        self.end_headers()
        self.wfile.write(content[begin : len(content) // 2] if fault == "breaks off" else content[begin:])

    def log_message(self, *_):
        """Nothing."""


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A server, and a cache of one's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("LIGHTNING_TFM_DATA", raising=False)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.asked, server.faults = [], []
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
    assert server.asked == [("/origin/file.txt", None)]
    assert cached(tmp_path) == [path]
    assert resolve_path("folder/file.txt", {"folder/file.txt": file(server)}) == path


def test_a_half_download_is_gone_on_with(server, tmp_path):
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
    assert server.asked[1][1].startswith("bytes=")
    assert [path.name for path in cached(tmp_path)] == ["file.txt"]


def test_a_server_without_ranges_begins_anew(server):
    server.faults = ["breaks off", "no ranges"]
    with pytest.raises(UserError):
        download("file.txt", file(server))
    assert download("file.txt", file(server)).read_bytes() == CONTENT


def test_another_file_is_not_used_and_not_kept(server, tmp_path):
    server.faults = ["another file"]
    with pytest.raises(
        UserError, match=f"must be the file of SHA-256 {SUM[:20]}..., but is another one, and is not used"
    ):
        download("file.txt", file(server))
    assert cached(tmp_path) == []
    assert download("file.txt", file(server)).read_bytes() == CONTENT


def test_what_was_damaged_in_the_cache_is_downloaded_again(server):
    path = download("file.txt", file(server))
    path.write_bytes(CONTENT[:-1])
    assert download("file.txt", file(server)).read_bytes() == CONTENT
    assert len(server.asked) == 2


def test_a_part_of_another_file_is_not_trusted(server, tmp_path):
    folder = download("file.txt", file(server)).parent
    (folder / "file.txt").unlink()
    (folder / "file.txt.part").write_bytes(b"x" * len(CONTENT) + b"x")
    assert download("file.txt", file(server)).read_bytes() == CONTENT
    assert [path.name for path in cached(tmp_path)] == ["file.txt"]


def test_what_was_kept_of_another_file_is_given_up(server, tmp_path):
    """Its mirror may have changed: the rest of a file that is right does not mend it."""
    folder = download("file.txt", file(server)).parent
    (folder / "file.txt").unlink()
    (folder / "file.txt.part").write_bytes(b"x" * 1000)
    assert download("file.txt", file(server)).read_bytes() == CONTENT
    assert [asked for _, asked in server.asked] == [None, "bytes=1000-", None]


def test_a_reason_is_told_as_it_is_where_a_part_is_kept(server, tmp_path):
    server.faults = ["breaks off", "missing"]
    with pytest.raises(UserError):
        download("file.txt", file(server))
    with pytest.raises(UserError, match="Not Found"):
        download("file.txt", file(server))
    with pytest.raises(UserError, match="the server does not answer"):
        download("file.txt", Download("http://127.0.0.1:9/file.txt", SUM))


def test_a_cache_that_cannot_be_written_is_named(server, tmp_path):
    (tmp_path / "cache").write_text("a file, where a folder should be")
    with pytest.raises(UserError, match=r"'file.txt' cannot be kept in '.*cache.*': .*; make room there, or let XDG"):
        download("file.txt", file(server))


def test_a_missing_file_is_named(server, tmp_path):
    server.faults = ["missing"]
    with pytest.raises(UserError, match=r"'file.txt' cannot be downloaded from http.*/origin/file.txt: Not Found. "):
        download("file.txt", file(server))
    assert cached(tmp_path) == []


def test_without_a_network_it_says_so(server, tmp_path):
    nobody = Download("http://127.0.0.1:9/file.txt", SUM)
    with pytest.raises(UserError, match=r"the server does not answer. LIGHTNING_TFM_DATA may name a mirror"):
        download("file.txt", nobody)
    assert cached(tmp_path) == []


def test_a_mirror_may_be_an_address(server, monkeypatch):
    monkeypatch.setenv("LIGHTNING_TFM_DATA", f"{server.address}/mirror/")
    assert download("folder/file.txt", Download("http://127.0.0.1:9/file.txt", SUM)).read_bytes() == CONTENT
    assert server.asked == [("/mirror/folder/file.txt", None)]


def test_a_mirror_may_be_a_folder(server, tmp_path, monkeypatch):
    monkeypatch.setenv("LIGHTNING_TFM_DATA", str(tmp_path))
    with pytest.raises(UserError, match=r"LIGHTNING_TFM_DATA must name a folder that holds 'folder/file.txt'"):
        download("folder/file.txt", file(server))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/file.txt").write_bytes(CONTENT)
    assert download("folder/file.txt", file(server)) == tmp_path / "folder/file.txt"
    (tmp_path / "folder/file.txt").write_bytes(CONTENT[:-1])
    with pytest.raises(UserError, match="but is another one, and is not used"):
        download("folder/file.txt", file(server))
    (tmp_path / "folder/file.txt").unlink()
    (tmp_path / "file.txt").write_bytes(CONTENT)  # as upstream names it
    assert download("folder/file.txt", file(server)) == tmp_path / "file.txt"
    assert server.asked == []


def test_a_name_that_is_neither_a_file_nor_known_is_refused(server):
    with pytest.raises(UserError, match="there is no file 'nothing', nor is it one of known, which can be downloaded"):
        resolve_path("nothing", {"known": file(server)})
