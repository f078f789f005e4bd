"""History of the results: `python -m benchmarks.history` writes HISTORY.md from the versions of results.json in git."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.__main__ import FOLDER, number, table_lines
from lightning_tfm.callbacks import provenance
from lightning_tfm.files import write_text

COLUMNS = ("benchmark", "commit", "machine", "ours", "peer", "unit", "ratio", "90 % interval", "target", "met")

Measurement = dict[str, Any]
"""A measured row of results.json."""


def versions(folder: Path) -> list[dict[str, Any]]:
    """Return the contents of results.json in all commits, from the oldest, and the current one.

    Args:
        folder: the folder of results.json, in a git repository with its whole history.
    """
    commits = provenance.run_git(folder, "log", "--reverse", "--format=%H", "--", "results.json").split()
    texts = [provenance.run_git(folder, "show", f"{commit}:./results.json") for commit in commits]
    return [json.loads(text) for text in (*texts, (folder / "results.json").read_text(encoding="utf-8"))]


def measurements(contents: list[dict[str, Any]]) -> dict[str, list[Measurement]]:
    """Return the measurements of each row of the last version, from the oldest, each only once.

    Args:
        contents: the versions of results.json, from the oldest.
    """
    found: dict[str, dict[tuple[Any, ...], Measurement]] = {row["name"]: {} for row in contents[-1]["rows"]}
    for content in contents:
        for row in content["rows"]:
            if row["name"] in found and row["status"] == "measured":
                # the texts of a row may have changed since, and the first versions name one machine for all rows
                machine = row.get("machine") or "{processor}, {cores} cores".format_map(content["machine"])
                figures = row.get("commit", ""), row["ours"], row["peer"]
                found[row["name"]].setdefault(figures, row | {"machine": machine})
    return {name: list(rows.values()) for name, rows in found.items() if rows}


def markdown(history: dict[str, list[Measurement]]) -> str:
    """Return the text of HISTORY.md.

    Args:
        history: the measurements of each row.
    """
    lines = [
        "# History",
        "",
        "The measurements of each row of [RESULTS.md](RESULTS.md), from the oldest, with commit and machine. A row "
        "whose name has changed starts anew. `python -m benchmarks.history` writes this page.",
        "",
        *table_lines(
            COLUMNS,
            [
                cells(row, name if place == 0 else "")
                for name, rows in history.items()
                for place, row in enumerate(rows)
            ],
        ),
    ]
    return "\n".join(lines) + "\n"


def cells(row: Measurement, name: str) -> list[str]:
    """Return the table cells of a measurement.

    Args:
        row: the measurement.
        name: the name of the row; empty from its second measurement on.
    """
    ours, peer, ratio = (number(row[key]) for key in ("ours", "peer", "ratio"))
    around = f"{number(row['low'])} to {number(row['high']) or 'never'}"
    met = {True: "yes", False: "no", None: ""}[row["held"]]
    return [name, row.get("commit", ""), row["machine"], ours, peer, row["unit"], ratio, around, row["target"], met]


if __name__ == "__main__":
    write_text(FOLDER / "HISTORY.md", markdown(measurements(versions(FOLDER))))
    print("written: benchmarks/HISTORY.md")
