"""Differences between the records of two runs: settings, environment, logged metrics and test predictions."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from typing_extensions import TypedDict

from lightning_tfm.comparison.groups import differing
from lightning_tfm.runs.record import TELEMETRY, Run


class Difference(TypedDict):
    """Difference between two runs.

    Attributes:
        name: its name.
        values: the values in both runs; None in one that has none.
    """

    name: str
    values: Sequence[Any]


def different_settings(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[Difference]:
    """Return the settings, given by dotted name, that differ; of classes that differ, not their arguments.

    Names are written as on the command line, without `init_args`.
    """
    return [
        {
            "name": name.replace(".init_args", "").removesuffix(".class_path"),
            "values": _without_modules([settings.get(name) for settings in (first, second)]),
        }
        for name in differing([first, second])
    ]


def different_environments(first: Run, second: Run) -> list[Difference]:
    """Return the commits, uncommitted changes, versions, hardware and data that differ.

    A value that has changed at a resumption is given with the later ones.
    """
    records = [_environment(run) for run in (first, second)]
    return [
        {"name": name, "values": values}
        for name in dict.fromkeys(itertools.chain(*records))
        if len({*(values := [record.get(name) for record in records])}) > 1
    ]


def first_results(first: Run, second: Run) -> list[Difference]:
    """Return the first logged metric and the first test prediction that differ, at most one each.

    A value that only one run has is a difference if all others are equal. Metrics in `TELEMETRY` are not compared.
    """
    found = [_first_metric(first, second), _first_prediction(first, second)]
    return [difference for difference in found if difference is not None]


def rows_by_step(run: Run) -> dict[int, dict[str, str]]:
    """Return the logged metrics by step, counted from 0, as they are written in metrics.csv, without `TELEMETRY`."""
    steps: dict[int, dict[str, str]] = defaultdict(dict)
    for row in run.read_rows()[0]:
        values = {name: value for name, value in row.items() if value and not name.startswith(TELEMETRY)}
        steps[int(values.pop("step"))] |= values
    return steps


def _first_metric(first: Run, second: Run) -> Difference | None:
    logs = [rows_by_step(run) for run in (first, second)]
    for both in (True, False):
        for step in sorted({*logs[0], *logs[1]}):
            rows = [log.get(step, {}) for log in logs]
            for name in sorted({*rows[0], *rows[1]}):
                values = [row.get(name) for row in rows]
                if values[0] != values[1] and (None not in values) is both:
                    return {"name": f"{name} at step {step}", "values": values}
    return None


def _first_prediction(first: Run, second: Run) -> Difference | None:
    lines: list[Sequence[Any]] = [run.predictions for run in (first, second)]
    for key in ("split", "source", "target", "prediction", "nll"):  # outputs before their likelihoods
        for index, pair in enumerate(zip(*lines, strict=False)):
            values = [line.get(key) for line in pair]
            if values[0] != values[1]:
                of = f" for {pair[0]['source']!r}" if key in ("prediction", "nll") else ""
                return {"name": f"{key} of test example {index}{of}", "values": values}
    lengths = [*map(len, lines)]
    return {"name": "number of test examples", "values": lengths} if lengths[0] != lengths[1] else None


def _environment(run: Run) -> dict[str, str]:
    """Return what may change the results of a run, by name: the values over its starts, each once."""
    values: dict[str, dict[str, None]] = defaultdict(dict)
    for number, start in enumerate(run.starts):
        framework = start["framework"]
        facts = {
            "commit": (start["git"]["commit"] or "unknown")[:10],
            "uncommitted changes": _uncommitted(run, number, start["git"].get("untracked", [])),
            "commit of lightning_tfm": (framework["commit"] or "unknown")[:10]
            + (" with changes" if framework["dirty"] else ""),
            **{f"version of {name}": version for name, version in start["versions"].items()},
            **{name.replace("_", " "): value for name, value in start["hardware"].items()},
            "processes": start["processes"],
            **{f"{split} data": fingerprint for split, fingerprint in start["data_fingerprint"].items()},
            "tokenizer": start["tokenizer_fingerprint"],
        }
        for name, value in facts.items():
            values[name][shown(value)] = None
    return {name: ", then ".join(each) for name, each in values.items()}


def _uncommitted(run: Run, number: int, untracked: Sequence[str]) -> str:
    """Return a hash of the uncommitted changes at a start, and the names of the changed and the untracked files."""
    path = run.folder / run.DIFF.format(number)
    diff = path.read_bytes() if path.is_file() else b""
    changed = re.findall(r"^diff --git .* b/(.*)$", diff.decode(errors="replace"), re.MULTILINE)
    names = [*changed, *untracked]
    return f"{hashlib.sha256(diff).hexdigest()[:8]} {', '.join(names)}" if names else "none"


def _without_modules(values: list[Any]) -> list[Any]:
    """Return the values of a setting, with the names of classes in place of their paths if these are different."""
    is_path = all(isinstance(value, str) and re.fullmatch(r"(\w+\.)+[A-Z]\w*", value) for value in values)
    names = [value.rpartition(".")[2] for value in values] if is_path else values
    return names if names[0] != names[1] else values


def shown(value: Any) -> str:
    """Return a value as it is shown to a reader."""
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
