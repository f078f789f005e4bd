"""History of the results: `python -m benchmarks.history` writes HISTORY.md from the versions of results.json in git."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.__main__ import COLUMNS, FOLDER, cells, table_lines
from benchmarks.measure import Row
from lightning_tfm.system.files import write_text
from lightning_tfm.system.versions import run_git


def versions(folder: Path) -> list[dict[str, Any]]:
    """Return the contents of results.json in all commits, from the oldest, and the current one.

    Args:
        folder: the folder of results.json, in a git repository with its whole history.
    """
    commits = run_git(folder, "log", "--reverse", "--format=%H", "--", "results.json").split()
    texts = [run_git(folder, "show", f"{commit}:./results.json") for commit in commits]
    return [json.loads(text) for text in (*texts, (folder / "results.json").read_text(encoding="utf-8"))]


def measurements(contents: list[dict[str, Any]]) -> dict[str, list[Row]]:
    """Return the measurements of each row of the last version, from the oldest, each only once.

    Args:
        contents: the versions of results.json, from the oldest.
    """
    found: dict[str, dict[tuple[Any, ...], Row]] = {row["name"]: {} for row in contents[-1]["rows"]}
    for content in contents:
        for row in (Row(**row) for row in content["rows"]):
            if row.name in found and row.status == "measured":
                # the first versions name one machine for all rows
                row.machine = row.machine or "{processor}, {cores} cores".format_map(content["machine"])
                # the texts of a row may have changed since
                found[row.name].setdefault((row.commit, row.ours, row.peer), row)
    return {name: list(rows.values()) for name, rows in found.items() if rows}


def markdown(history: dict[str, list[Row]]) -> str:
    """Return the text of HISTORY.md.

    Args:
        history: the measurements of each row.
    """
    body = []
    for rows in history.values():
        for place, row in enumerate(rows):
            name, *figures = cells(row)
            body.append(("" if place else name, row.commit, row.torch, *figures))
    name, *others = COLUMNS
    lines = [
        "# History",
        "",
        "The measurements of each row of [RESULTS.md](RESULTS.md), oldest first. The history of a renamed row starts "
        "at its renaming. `python -m benchmarks.history` writes this page.",
        "",
        *table_lines((name, "commit", "torch", *others), body),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    write_text(FOLDER / "HISTORY.md", markdown(measurements(versions(FOLDER))))
    print("written: benchmarks/HISTORY.md")
