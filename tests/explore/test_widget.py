"""The widget of the explorer in a notebook."""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from lightning_tfm import insight
from lightning_tfm.errors import UserError
from lightning_tfm.explore import Changes, Drawn, Explorer, explore, messages
from lightning_tfm.inference.loading import load
from support.browser import chromium
from support.experiments import trained_run
from support.explorer_page import SELECT_ALL, Page, assert_answer, assert_changes, cell


@pytest.fixture(scope="module")
def predictor(tmp_path_factory):
    return load(trained_run("spelling_gpt", tmp_path_factory) / "checkpoints/best.ckpt")


def answers(widget, *messages):
    """Return what a widget sends for messages of its page."""
    sent = []
    widget.send = sent.append
    for message in messages:
        widget._handle_custom_msg(message, [])
    return sent


def test_messages_are_answered(predictor):
    widget = insight.explore(predictor, Explorer(predictor, "other"))
    question = {"question": "answer", "model": 1, "arguments": {"text": "abc"}}
    described, answer, mistake = answers(
        widget, {"id": 1, "question": "describe"}, {"id": 2} | question, {"id": 3} | question | {"model": 2}
    )
    assert described["id"] == 1
    assert [model["name"] for model in described["result"]["models"]] == ["model 1", "other"]
    assert answer == {"id": 2, "result": Explorer(predictor).answer("abc")}
    assert mistake["id"] == 3
    assert mistake["error"].startswith("model must be a number from 0 to 1, but is 2")


def test_errors_of_the_program_are_named(predictor, monkeypatch, capsys):
    monkeypatch.setattr(messages, "ask", lambda *_: [][0])
    (answer,) = answers(explore(predictor), {"id": 1, "model": 0, "question": "answer", "arguments": {}})
    assert set(answer) == {"id", "error"}
    assert "IndexError" in answer["error"]
    assert "Traceback" in capsys.readouterr().err


def test_other_messages_are_ignored(predictor):
    assert answers(explore(predictor), {}, {"kind": "anywidget-command"}) == []


def test_the_script_is_a_module(predictor):
    widget = explore(predictor)
    assert widget._esm.count("export default { render };") == widget._esm.count("export ") == 1
    assert "\nfunction render(" in widget._esm or "\nasync function render(" in widget._esm
    assert widget._css


def test_a_missing_package_is_named(predictor, monkeypatch):
    monkeypatch.delitem(sys.modules, "lightning_tfm.explore.widget", raising=False)
    monkeypatch.setitem(sys.modules, "anywidget", None)
    with pytest.raises(UserError, match=r"pip install 'lightning_tfm\[notebook\]'"):
        explore(predictor)


HOST = """
<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,"><link rel="stylesheet" href="widget.css">
<style>html { overflow-y: scroll }</style>
<div id="cell"></div>
<script type="module">
import widget from "./widget.js";
const listeners = {};
const model = {
  on(name, listener) { listeners[name] = listener; },
  off(name) { delete listeners[name]; },
  send(message) {
    if (isEnded) throw new Error("the kernel has ended");
    globalThis.asked = message.arguments?.text;
    receiveAnswers(message);
  },
};
async function receiveAnswers(message) {
  const reply = await fetch("message", { method: "POST", body: JSON.stringify(message) });
  for (const answer of await reply.json()) listeners["msg:custom"]?.(answer);
}
let isEnded = false;
globalThis.endKernel = () => { isEnded = true; listeners.comm_live_update(); };
globalThis.countListeners = () => Object.keys(listeners).length;
globalThis.pressed = [];
document.addEventListener("keydown", ({ key }) => pressed.push(key));
globalThis.removeWidget = widget.render({ model, el: document.querySelector("#cell") });
</script>
"""
"""Page that shows a widget as anywidget does, with messages over HTTP instead of those of a kernel."""


@pytest.fixture
def address(predictor):
    """Return the address of a page with a widget."""
    widget = explore(predictor)
    files = {"/": HOST, "/widget.js": widget._esm, "/widget.css": widget._css}
    kinds = {"js": "text/javascript", "css": "text/css"}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.reply(files[self.path], kinds.get(self.path.rpartition(".")[2], "text/html"))

        def do_POST(self):
            message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.reply(json.dumps(answers(widget, message)), "application/json")

        def reply(self, text, kind):
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield "http://{}:{}/".format(*server.server_address)
    server.shutdown()
    server.server_close()
    thread.join()


class Cell(Page):
    """Page in the output of a cell, whose address holds no state."""

    @property
    def state(self):
        return {"step": self.labels(".chip", "aria-pressed").index("true")}

    def type(self, field, text):
        self.find(f"[data-key='{field}']").send_keys(f"{SELECT_ALL}{text}")
        self.wait(lambda: self.run("return asked") == text)
        self.settle()


@pytest.fixture
def page(address, predictor):
    with chromium() as driver:
        page = Cell(driver, address, [Explorer(predictor)])
        page.open()
        yield page
        assert [line for line in driver.get_log("browser") if line["level"] == "SEVERE"] == []


@pytest.mark.browser
def test_the_page_in_a_cell(page):
    (explorer,) = page.explorers
    page.type("text", "abcdd")
    assert_answer(page, explorer.answer("abcdd"))
    assert page.run("return pressed") == []  # which JupyterLab would read as commands
    page.run("endKernel()")
    page.find("[data-key=text]").send_keys("c")
    page.wait(lambda: page.texts(".answers .error") == ["the kernel has stopped; run the cell again"])
    page.run("removeWidget()")
    assert page.run("return countListeners()") == 0


@pytest.mark.browser
def test_changes_in_a_cell(page):
    (explorer,) = page.explorers
    assert_changes(page, explorer, "abcdd")
    page.click("[data-key=reset]")
    page.click("[data-key='tab attention']")
    page.click("[data-key='draw 0']")
    layer = page.run("return document.querySelector(\"[data-key='layer 0']\").value")
    attention = next(each for each in explorer.answer("abcdd")["attention"] if each["layer"] == layer)
    row, shape = attention["first_step"] + 1, (len(attention["queries"]), len(attention["keys"]))
    page.point(".map .frame", *cell(row, 1, *shape), click=True)
    assert_answer(page, explorer.answer("abcdd", changes=Changes(drawn=[Drawn(layer, row, 1)])))
    page.point(".map .frame", *cell(row, 1, *shape), click=True)
    assert_answer(page, explorer.answer("abcdd"))
