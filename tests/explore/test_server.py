"""The server of the explorer, and `lightning-tfm explore`: who is answered, with what, and what is left."""

from __future__ import annotations

import http.client
import json
import re
import shlex
import shutil
import signal
import socket
import subprocess
import threading
from urllib.parse import parse_qs, urlsplit

import pytest

from lightning_tfm.commands.explore import model_names
from lightning_tfm.errors import UserError
from lightning_tfm.explore import messages, page
from lightning_tfm.explore.server import MAX_BODY, Server
from support.experiments import trained_run
from support.processes import ENVIRONMENT, SCRIPT, free_port

JSON = {"Content-Type": "application/json"}
QUESTION = {"model": 0, "question": "answer", "arguments": {"text": "abc"}}


class Asked(list):
    """Questions that were answered, and events with which a test delays them."""

    def __init__(self):
        super().__init__()
        self.begun, self.go = threading.Semaphore(0), threading.Event()
        self.go.set()


@pytest.fixture
def asked(monkeypatch):
    """Replace the questions by ones that return their arguments, or fail as their text says."""
    asked = Asked()
    errors = {"mistake": UserError("text must be known, but is 'mistake'; try abc"), "bug": IndexError("secret")}

    def ask(explorer, question, arguments):
        asked.append(arguments["text"])
        asked.begun.release()
        assert asked.go.wait(60)
        if arguments["text"] in errors:
            raise errors[arguments["text"]]
        return {"explorer": explorer, "thread": threading.get_ident(), "value": arguments.get("value")}

    monkeypatch.setattr(messages, "ask", ask)
    monkeypatch.setattr(messages, "describe", lambda explorers: {"models": explorers})
    return asked


@pytest.fixture
def server(asked):
    """Serve two explorers until the end of the test."""
    server = Server(["first", "second"])
    thread = threading.Thread(target=server.run)
    thread.start()
    yield server
    asked.go.set()
    server.close()
    thread.join(60)
    assert not thread.is_alive()
    with pytest.raises(ConnectionRefusedError):
        request(server, "GET", "/")


def request(server, method, path, body=None, headers=(), token=True):
    """Send a request as a page does; return its status, headers and content. A header None is omitted."""
    port = urlsplit(server.address).port
    values = {"Host": f"127.0.0.1:{port}"} | ({"X-Token": server.token} if token else {}) | dict(headers)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        body = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        if body is not None:
            values["Content-Length"] = len(body)
        for name, value in values.items():
            if value is not None:
                connection.putheader(name, value)
        connection.endheaders(body)
        response = connection.getresponse()
        return response.status, response.headers, response.read().decode()
    finally:
        connection.close()


def ask(server, message, headers=(), **settings):
    status, _, text = request(server, "POST", "/ask", message, JSON | dict(headers), **settings)
    return status, text


def query(server):
    return server.address.partition(f":{urlsplit(server.address).port}")[2]


def test_questions_are_answered(server):
    for model, explorer in enumerate(("first", "second")):
        status, text = ask(server, QUESTION | {"model": model})
        assert status == 200
        assert json.loads(text)["result"]["explorer"] == explorer
    status, headers, text = request(server, "GET", "/describe")
    assert (status, json.loads(text)) == (200, {"result": {"models": ["first", "second"]}})
    assert headers["Content-Type"] == "application/json"


def test_only_this_machine_can_connect(server):
    address = urlsplit(server.address)
    assert address.hostname == "127.0.0.1"
    assert server._socket.getsockname()[0] == "127.0.0.1"
    others = {found[4][0] for found in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    for other in others - {"127.0.0.1"}:
        with pytest.raises(OSError, match="refused"):
            socket.create_connection((other, address.port), timeout=5).close()


def assert_refused(answer, reason):
    status, text = answer[0], answer[-1]
    assert (status, len(text.splitlines())) == (403, 1)
    assert reason in text


def test_token_is_required(server, asked):
    wrong = server.token[:-1] + ("a" if server.token[-1] != "a" else "b")
    for token in (None, "", wrong, server.token + "a", "\N{LATIN SMALL LETTER E WITH ACUTE}"):
        assert_refused(ask(server, QUESTION, {"X-Token": token}), "wrong token")
        assert_refused(request(server, "GET", "/describe", headers={"X-Token": token}), "wrong token")
        assert_refused(request(server, "GET", "/unknown", headers={"X-Token": token}), "wrong token")
    for path in ("/", "/?token=", f"/?token={wrong}", "/?token=%C3%A9", "/?token=%FF"):  # the header does not count
        assert_refused(request(server, "GET", path), "wrong token")
    assert_refused(request(server, "GET", f"/describe{query(server)[1:]}", token=False), "wrong token")
    assert not asked


def test_tokens_differ():
    servers = [Server([]) for _ in range(3)]
    assert len({server.token for server in servers}) == 3
    assert all(len(server.token) >= 43 for server in servers)  # 256 bits in base64
    for server in servers:
        assert parse_qs(urlsplit(server.address).query) == {"token": [server.token]}
        server.close()
        server.run()


def test_host_is_checked(server, asked):
    """A name of another site may resolve to this address (DNS rebinding)."""
    port = urlsplit(server.address).port
    assert ask(server, QUESTION, {"Host": f"localhost:{port}"})[0] == 200
    asked.clear()
    others = ("attacker.example", f"attacker.example:{port}", "127.0.0.1", f"127.0.0.1:{port + 1}", f"[::1]:{port}", "")
    for host in others:
        assert_refused(ask(server, QUESTION, {"Host": host}), "Host must be 127.0.0.1:")
        assert_refused(request(server, "GET", query(server), headers={"Host": host}), "Host must be 127.0.0.1:")
    assert ask(server, QUESTION, {"Host": None})[0] == 400  # not HTTP/1.1
    assert not asked


def test_origin_is_checked(server, asked):
    port = urlsplit(server.address).port
    assert ask(server, QUESTION, {"Origin": f"http://127.0.0.1:{port}"})[0] == 200
    assert ask(server, QUESTION, {"Origin": f"http://localhost:{port}", "Host": f"localhost:{port}"})[0] == 200
    asked.clear()
    others = ("https://attacker.example", "null", f"https://127.0.0.1:{port}", f"http://127.0.0.1:{port + 1}", "")
    for origin in (*others, f"http://localhost:{port}"):
        assert_refused(ask(server, QUESTION, {"Origin": origin}), "Origin must be")
        assert_refused(request(server, "GET", query(server), headers={"Origin": origin}), "Origin must be")
    status, headers, _ = request(server, "OPTIONS", "/ask", headers={"Origin": "https://attacker.example"}, token=False)
    assert status == 403
    assert not [name for name in headers if name.startswith("Access-Control")]
    assert not asked


def test_only_questions_and_the_page_are_served(server, asked):
    for method, path, status in (
        ("GET", "/ask", 405),
        ("POST", query(server), 405),
        ("POST", "/describe", 405),
        ("PUT", "/ask", 405),
        ("GET", "/page/main.js", 404),
        ("GET", "/../pyproject.toml", 404),
        ("GET", "//127.0.0.1/", 404),
    ):
        assert request(server, method, path, b"", JSON)[0] == status
    assert not asked


def test_a_question_must_be_json(server, asked):
    """A form of another site can send only other content types without asking first."""
    for content in (None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=a"):
        assert ask(server, QUESTION, {"Content-Type": content})[0] == 415
    assert ask(server, QUESTION, {"Content-Type": "application/json; charset=utf-8"})[0] == 200
    asked.clear()
    for body in (b"", b"{", b"\xff", b"[" * 100_000):
        assert ask(server, body) == (400, '{"error":"a question must be valid JSON"}')
    for message in (
        b"null",
        "answer",
        [],
        {},
        QUESTION | {"model": 2},
        QUESTION | {"model": -1},
        QUESTION | {"model": True},
        QUESTION | {"model": "0"},
        QUESTION | {"question": 1},
        QUESTION | {"arguments": []},
    ):
        status, text = ask(server, message)
        assert status == 400
        assert " must be " in json.loads(text)["error"]
    assert not asked


@pytest.mark.parametrize("is_chunked", [False, True])
def test_the_size_of_a_question_is_limited(is_chunked, server, asked):
    largest = json.dumps(QUESTION).encode().ljust(MAX_BODY)

    def status(body):
        if not is_chunked:
            return ask(server, body)[0]
        headers = {"X-Token": server.token} | JSON
        connection = http.client.HTTPConnection("127.0.0.1", urlsplit(server.address).port, timeout=60)
        connection.request("POST", "/ask", iter([body[:1000], body[1000:]]), headers, encode_chunked=True)
        try:
            return connection.getresponse().status
        finally:
            connection.close()

    assert status(largest) == 200
    assert status(largest + b" ") == 413
    assert len(asked) == 1


def test_headers(server):
    responses = [
        request(server, "GET", query(server)),
        request(server, "GET", "/describe"),
        request(server, "GET", "/describe", token=False),
        request(server, "GET", "/unknown"),
        request(server, "POST", "/ask", {}, JSON),
    ]
    assert [response[0] for response in responses] == [200, 200, 403, 404, 400]
    for _, headers, _ in responses:
        assert headers["Cache-Control"] == "no-store"
        assert headers["Cross-Origin-Opener-Policy"] == headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Server"] is None
        policy = headers["Content-Security-Policy"].split("; ")
        assert {"default-src 'none'", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"} <= {*policy}


def test_the_policy_allows_the_page_only(server):
    nonces = set()
    for _ in range(2):
        _, headers, text = request(server, "GET", query(server))
        policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))
        (nonce,) = {*re.findall(r'nonce="([^"]+)"', text)}
        assert policy["script-src"] == policy["style-src"] == f"'nonce-{nonce}'"
        assert (policy["connect-src"], policy["img-src"]) == ("'self'", "data: blob:")
        assert len(re.findall(r"<(?:script|style)\b[^>]*nonce", text)) == 2
        nonces.add(nonce)
    assert len(nonces) == 2
    assert server.token not in text


def test_errors_are_one_line(server, capfd):
    status, text = ask(server, QUESTION | {"arguments": {"text": "mistake"}})
    assert (status, json.loads(text)) == (400, {"error": "text must be known, but is 'mistake'; try abc"})
    assert capfd.readouterr().err == ""
    status, text = ask(server, QUESTION | {"arguments": {"text": "bug"}})
    assert status == 500
    line = json.loads(text)["error"]
    assert "internal error (IndexError)" in line
    assert "secret" not in line
    assert "IndexError: secret" in capfd.readouterr().err
    status, text = ask(server, b'{"model": 0, "question": "answer", "arguments": {"text": "", "value": NaN}}')
    assert (status, "must be finite, but one is nan" in text) == (400, True)
    assert ask(server, QUESTION | {"arguments": {"text": "\ud800", "value": "\ud800\N{GRINNING FACE}"}})[0] == 200


def test_questions_of_two_tabs_wait_for_each_other(server, asked):
    asked.go.clear()
    answers = []
    tabs = [threading.Thread(target=lambda: answers.append(ask(server, QUESTION))) for _ in range(2)]
    for tab in tabs:
        tab.start()
    assert asked.begun.acquire(timeout=60)
    assert request(server, "GET", query(server))[0] == 200  # while a question is computed
    assert (len(asked), len(answers)) == (1, 0)
    asked.go.set()
    for tab in tabs:
        tab.join(60)
    assert [status for status, _ in answers] == [200, 200]
    assert len({json.loads(text)["result"]["thread"] for _, text in answers}) == 1


def test_questions_of_a_closed_tab(server, asked):
    asked.go.clear()
    body = json.dumps(QUESTION).encode()
    port = urlsplit(server.address).port
    tabs = []
    for _ in range(2):
        tab = http.client.HTTPConnection("127.0.0.1", port)
        tab.request("POST", "/ask", body, JSON | {"X-Token": server.token})
        tabs.append(tab)
    assert asked.begun.acquire(timeout=60)
    assert request(server, "GET", query(server))[0] == 200  # so that both requests were read
    for tab in tabs:
        tab.close()
    for _ in range(3):  # so that the ends of both connections were read
        assert request(server, "GET", query(server))[0] == 200
    asked.go.set()
    assert ask(server, QUESTION)[0] == 200
    assert len(asked) == 2, "the second question, whose answer nobody waits for, is dropped"


def test_the_page_is_opened_by_a_private_file(asked, monkeypatch, tmp_path):
    """Other users can read the arguments of a browser's process."""
    opened, is_open = [], threading.Event()

    def open_(address):
        path = tmp_path.joinpath(urlsplit(address).path)
        opened.append((address, path, path.read_text(), path.parent.stat().st_mode & 0o777))
        is_open.set()

    monkeypatch.setattr("webbrowser.open", open_)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    server = Server([])
    thread = threading.Thread(target=server.run, args=(True,))
    thread.start()
    assert is_open.wait(60)
    ((address, path, text, mode),) = opened
    assert address.startswith("file:")
    assert server.token not in address
    assert server.address in text
    assert mode == 0o700
    request(server, "GET", "/describe")
    assert not path.exists()
    assert not [*tmp_path.iterdir()]
    server.close()
    thread.join(60)


def test_html_escapes_what_ends_an_element():
    text = page.html('const a = "</script><!--";', "a{}</style>", "n", title="<b>")
    assert text.count("</script>") == text.count("</style>") == 1
    assert "<!--" not in text
    assert "<title>&lt;b&gt;</title>" in text
    assert r'const a = "\x3C/script>\x3C!--";' in text
    assert "Content-Security-Policy" not in text


MODULES = sorted(path.name for path in page.FOLDER.glob("*.js"))
BACKENDS = [name for name in MODULES if name.startswith("backend_")]


def test_modules_are_joined_after_those_that_they_import(tmp_path, monkeypatch):
    modules = {
        "a.js": 'import { b } from "./b.js";\nimport {\n  c,\n  d,\n} from "./c.js";\nexport async function a() {}\n',
        "b.js": 'import { c } from "./c.js";\nexport const b = "import";\n',
        "c.js": "export function c() {}\nexport class d {}\n",
    }
    for name, text in modules.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(page, "FOLDER", tmp_path)
    names = declared(page.script("a.js"))
    assert names == ["c", "d", "b", "a"]
    assert "export" not in page.script("a.js")
    assert page.script("b.js", "a.js").count("function c") == 1


def declared(text):
    """Return the names that a module declares outside functions."""
    return re.findall(r"^(?:export )?(?:async )?(?:function\*?|class|const|let|var) (\w+)", text, re.MULTILINE)


def test_names_of_modules_are_unique():
    names = [name for module in MODULES for name in declared((page.FOLDER / module).read_text())]
    assert len(names) > 100
    repeated = {name for name in names if names.count(name) > 1}
    assert repeated == set()


@pytest.mark.parametrize("backend", BACKENDS)
def test_scripts_parse(backend, tmp_path):
    path = tmp_path / "script.mjs"
    path.write_text(page.script(backend))
    assert not re.search(r"^(import|export)\b", path.read_text(), re.MULTILINE)
    done = subprocess.run(["node", "--check", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Copy the checkpoint of a small GPT out of its run."""
    run = trained_run("spelling_gpt", tmp_path_factory)
    return shutil.copy(run / "checkpoints/best.ckpt", tmp_path_factory.mktemp("folder") / "gpt.ckpt")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("none.ckpt",), "there is no checkpoint"),
        (("--port", "80"), "--port must be from 1024 to 65535, but is 80; try 8000"),
        (("--port", "65536"), "--port must be from 1024 to 65535, but is 65536"),
        (("--port", "a"), "--port must be of type int, but is 'a'"),
        (("--prot", "8000"), "prot"),
        (("--data.pth", "a"), "pth"),
        (("--output", "none/page.html"), "--output must lie in a folder that exists"),
        (("--output", "page.html", "--data.path", "a"), "--data.path must not be set with --output"),
    ],
)
def test_invalid_arguments(options, message, checkpoint, mistake):
    assert message in mistake("explore", checkpoint, *options, "--no-browser")


def test_the_port_must_be_free(checkpoint, mistake):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert f"port must be free, but {port} is not" in mistake("explore", checkpoint, "--port", port, "--no-browser")


def test_a_page_is_written_to_a_file(checkpoint, tmp_path, command):
    (tmp_path / "page.html").write_text("")
    arguments = ("explore", checkpoint, "--output", "page.html")
    assert "--output must be a new file" in command(*arguments, status=2).err
    printed = command(*arguments, "--overwrite").out
    size = (tmp_path / "page.html").stat().st_size
    assert printed == f"page.html: {size / 1e6:.1f} MB\n"
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")


@pytest.fixture
def start_command(checkpoint, tmp_path):
    """Return a function that starts `explore`, and returns its process and its server's address."""
    processes = []

    def start(*options):
        for name in ("temporary", "folder"):
            (tmp_path / name).mkdir(exist_ok=True)
        process = subprocess.Popen(
            [SCRIPT, "explore", checkpoint, "--no-browser", *map(str, options)],
            cwd=tmp_path / "folder",
            env=ENVIRONMENT | {"TMPDIR": str(tmp_path / "temporary"), "PYTHONUNBUFFERED": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        processes.append(process)
        line = process.stdout.readline()
        assert line, process.stderr.read()
        return process, re.search(r"http://\S+", line)[0]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


class Address:
    """Address that a command has printed, with the attributes of a server."""

    def __init__(self, address):
        self.address, self.token = address, parse_qs(urlsplit(address).query)["token"][0]


@pytest.mark.run
@pytest.mark.parametrize(
    ("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGKILL, -9)]
)
def test_nothing_is_left_of_a_command(signum, status, start_command, checkpoint, tmp_path):
    port = free_port()
    process, address = start_command("--port", port)
    server = Address(address)
    assert urlsplit(address).port == port
    loaded, _, page = request(server, "GET", query(server))
    assert loaded == 200
    assert f"explore {shlex.quote(str(checkpoint))} --no-browser --port {port}" in page
    answer, text = ask(server, {"model": 0, "question": "answer", "arguments": {"text": "abc"}})
    assert (answer, json.loads(text)["result"]["text"]) == (200, "abc")
    process.send_signal(signum)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (status, "", "")
    assert [path for path in tmp_path.rglob("*") if path.name not in ("temporary", "folder")] == []
    socket.create_server(("127.0.0.1", port)).close()


@pytest.mark.run
def test_data_are_loaded_by_the_first_question_about_them(start_command):
    """And signals end the command as before, although the data have handlers of their own."""
    process, address = start_command()
    status, text = ask(Address(address), {"model": 0, "question": "neighbors", "arguments": {"text": "abc"}})
    assert status == 200, text
    assert json.loads(text)["result"]["examples"]
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, "Traceback" in err, "interrupted" in err) == (130, False, False)


def test_names_of_models(tmp_path):
    best, last = (tmp_path / f"date_gpt/version_0/checkpoints/{name}.ckpt" for name in ("best", "last"))
    later = tmp_path / "date_gpt/version_1/checkpoints/best.ckpt"
    other = tmp_path / "date_transformer/version_0/checkpoints/best.ckpt"
    assert model_names([best]) == ["date_gpt"]
    assert model_names([best, other]) == ["date_gpt", "date_transformer"]
    assert model_names([best, later]) == ["date_gpt/version_0", "date_gpt/version_1"]
    assert model_names([best, last]) == ["date_gpt/version_0/best", "date_gpt/version_0/last"]
    assert model_names([tmp_path / "a/model.ckpt", tmp_path / "b/model.ckpt"]) == ["a/model", "b/model"]
    assert model_names([tmp_path / "a/model.ckpt"]) == ["model"]
