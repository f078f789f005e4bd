"""The widget of the explorer in a notebook."""

from __future__ import annotations

import sys

import pytest

from lightning_tfm.errors import UserError
from lightning_tfm.explore import Explorer, explore, messages
from lightning_tfm.inference.loading import load
from support.experiments import trained_run


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
    widget = explore(predictor, Explorer(predictor, "other"))
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
