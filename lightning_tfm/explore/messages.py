"""Responses of the server and the widget to the messages of a page."""

from __future__ import annotations

import math
import traceback
from collections.abc import Sequence
from typing import Any

from lightning_tfm.errors import UserError
from lightning_tfm.explore.explorer import Explorer, ask, describe


def respond(explorers: Sequence[Explorer], message: Any) -> tuple[int, dict[str, Any]]:
    """Return the HTTP status and the response, as values of JSON, to a message.

    Args:
        explorers: the explorers of the models of the page.
        message: `{"question": "describe"}`, or the number of a model, the name of a question and its arguments as
            `{"model": 0, "question": "answer", "arguments": {"text": "May 3, 1979"}}`.

    Returns:
        The status is 200, 400 for a UserError, or 500 for any other exception, whose traceback is printed to standard
        error.
    """
    try:
        return 200, {"result": _finite(_result(explorers, message))}
    except UserError as error:
        return 400, {"error": str(error)}
    except Exception as error:  # the page can still ask the next question
        traceback.print_exc()
        return 500, {"error": f"internal error ({type(error).__name__}); the traceback is in the terminal"}


def _result(explorers: Sequence[Explorer], message: Any) -> Any:
    if not isinstance(message, dict):
        raise UserError(f"a message must be an object, but is a {type(message).__name__}")
    question, model, arguments = message.get("question"), message.get("model"), message.get("arguments")
    if question == "describe":
        return describe(explorers)
    if not isinstance(question, str):
        raise UserError(f"question must be a name, but is {question!r}; try 'answer'")
    if type(model) is not int or not 0 <= model < len(explorers):
        raise UserError(f"model must be a number from 0 to {len(explorers) - 1}, but is {model!r}")
    if not isinstance(arguments, dict):
        raise UserError(f"arguments must be an object, but is {arguments!r}")
    return ask(explorers[model], question, arguments)


def _finite(value: Any) -> Any:
    """Return a result; raise UserError if it has a number that JSON cannot represent."""
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"the outputs of the network must be finite, but one is {value}; try an earlier checkpoint")
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        _finite(part)
    return value
