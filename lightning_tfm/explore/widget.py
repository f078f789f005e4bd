"""The page as a notebook widget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anywidget import AnyWidget

from lightning_tfm.explore.explorer import Explorer
from lightning_tfm.explore.messages import respond
from lightning_tfm.explore.page import script, style


class Widget(AnyWidget):
    """Widget that shows the page of some explorers.

    Its page sends the messages of `respond` with an id, and receives the answers with the same id.

    Args:
        explorers: the explorers.
    """

    _esm = f"{script('backend_widget.js')}\nexport default {{ render }};\n"
    _css = style()

    def __init__(self, explorers: Sequence[Explorer]) -> None:
        super().__init__()
        self.explorers = explorers
        self.on_msg(self._respond)

    def _respond(self, widget: AnyWidget, message: dict[str, Any], buffers: Sequence[bytes]) -> None:
        """Answer a message of the page."""
        if "question" in message:
            _, response = respond(self.explorers, message)
            self.send({"id": message.get("id"), **response})
