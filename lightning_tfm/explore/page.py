"""The page of the explorer: the modules of the folder `page`, joined into one script.

A module exports functions, classes and constants by `export` before their declaration, and imports names by
`import { name } from "./module.js";`. Names are unique over all modules, and no modules import each other.
"""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

IMPORT = re.compile(r'^import \{[^}]*\} from "\./([\w.]+)";\n', re.MULTILINE)
"""An import of another module."""

EXPORT = re.compile(r"^export (?=(?:async function|function|class|const|let)\b)", re.MULTILINE)
"""The export of a declaration."""

FOLDER = Path(__file__).with_name("page")
"""The modules and the style sheet."""

MARKUP = re.compile(r"<(?=/script|!--)", re.IGNORECASE)
"""Markup that would end a script element or hide its end; in a script, it occurs in strings and patterns only."""


def script(*backend: str) -> str:
    """Return a script of modules, each after those that it imports.

    Args:
        backend: the modules to begin with, such as "backend_server.js".
    """
    texts: dict[str, str] = {}

    def add(name: str) -> None:
        if name not in texts:
            text = (FOLDER / name).read_text(encoding="utf-8")
            for imported in IMPORT.findall(text):
                add(imported)
            texts[name] = EXPORT.sub("", IMPORT.sub("", text))

    for name in backend:
        add(name)
    return "\n".join(texts.values())


def style() -> str:
    """Return the style sheet."""
    return (FOLDER / "style.css").read_text(encoding="utf-8")


def html(script: str, style: str, nonce: str, policy: str = "", title: str = "lightning-tfm explore") -> str:
    """Return the document of a page without external resources.

    Args:
        script: the script, see `script`.
        style: the style sheet.
        nonce: the nonce of the Content-Security-Policy.
        policy: the Content-Security-Policy, unless it is a header of the page.
        title: the title.
    """
    attribute = f' nonce="{escape(nonce)}"'
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n' if policy else ""
    script, style = MARKUP.sub(r"\\x3C", script), style.replace("</", r"<\/")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
{meta}<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style{attribute}>
{style}
</style>
</head>
<body>
<main id="explorer"></main>
<script type="module"{attribute}>
{script}
</script>
</body>
</html>
"""
