"""Tables and sentences of an inspection, for the terminal, LaTeX and the report."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_tfm.inference.attention_maps import visible
from lightning_tfm.runs.inspection import AblationRecord, HeadRecord, Inspection, TextRecord
from lightning_tfm.system.tables import Table

SYMBOLS = 3
"""Number of alternatives, and of input symbols with the largest contributions, that are named for a symbol."""

LEAST_PROBABILITY = 0.0001
"""Least probability of an alternative that is named."""

INTERVAL = "95% interval"

WITHOUT = ("loss increase", INTERVAL, "exact match", "most errors at")
"""Columns of an ablation."""


def summary(inspection: Inspection) -> str:
    """Return what the network reaches on the inspected examples."""
    full = inspection["full"]
    return (
        f"{inspection['examples']} examples of {inspection['data']}: loss {full['loss']:.4f} nats per example, "
        f"exact match {full['exact_match']:.4f}. An ablated part is replaced by its mean."
    )


def tables(inspection: Inspection) -> list[Table]:
    """Return the tables that have rows."""
    heads = [(head["name"], _role(head), *_without(head["without"]["mean"])) for head in inspection["heads"]]
    others = [(part["name"], *_without(part["without"]["mean"])) for part in inspection["components"]]
    backups = [
        (" and ".join(pair["heads"]), _signed(pair["loss"][0]), _interval(pair["loss"]))
        for pair in inspection["backups"]
    ]
    direct = [(part, _signed(effect[0]), _interval(effect)) for part, effect in inspection["direct"].items()]
    lens = [
        (layer, f"{after['loss']:.4f}", f"{after['exact_match']:.4f}") for layer, after in inspection["lens"].items()
    ]
    every = [
        Table("Heads, ablated one at a time", ("head", "what it does", *WITHOUT), heads),
        Table("Feed-forward networks and layers, ablated one at a time", ("part", *WITHOUT), others),
        Table("Heads that back each other up", ("heads", "loss beyond the sum", INTERVAL), backups),
        Table("Direct logit attribution", ("part", "mean contribution", INTERVAL), direct),
        Table("Logit lens", ("if the network ended after", "loss", "exact match"), lens),
        *map(_text_table, inspection["texts"]),
    ]
    return [table for table in every if table.rows]


def sentences(inspection: Inspection) -> list[str]:
    """Return the smallest set of heads, if there are heads."""
    heads = inspection["smallest_set"]
    return [f"With these heads alone, at least 99% of the exact match remains: {', '.join(heads)}."] if heads else []


def _text_table(text: TextRecord) -> Table:
    """Return what each symbol of the output was chosen from, and which input symbols it comes from."""
    decided_after = text["decided_after"]
    header = ("output", "probability", "alternatives", *(["decided after"] if decided_after else []), "largest sources")
    rows = [
        (
            visible(symbol),
            f"{text['probabilities'][step]:.4f}",
            ", ".join(
                f"{visible(name)} {value:.4f}"
                for name, value in text["alternatives"][step][:SYMBOLS]
                if value >= LEAST_PROBABILITY
            ),
            *([decided_after[step] or ""] if decided_after else []),
            _contributions(text["input_symbols"], text["integrated_gradients"][step]),
        )
        for step, symbol in enumerate(text["target_symbols"])
        if text["is_target"][step]
    ]
    return Table(f"{text['input']} \N{RIGHTWARDS ARROW} {text['output']}", header, rows)


def _contributions(symbols: Sequence[str], values: Sequence[float]) -> str:
    """Return the input symbols with the largest contributions to the log probability, with their positions from 1."""
    largest = sorted(range(len(values)), key=lambda index: -abs(values[index]))[:SYMBOLS]
    contributions = {f"{visible(symbols[index])}@{index + 1}": _signed(values[index]) for index in largest}
    return ", ".join(f"{symbol} {value}" for symbol, value in contributions.items() if float(value))


def _role(head: HeadRecord) -> str:
    """Return what a head does with its main score, such as "previous token 0.98"; without a role, in parentheses."""
    name, role = head["main_score"], head["role"]
    if name is None:
        return ""
    score = f"{head['scores'][name]:.2f}"
    return f"{role} {score}" if role else f"({name} {score})"


def _without(ablation: AblationRecord) -> tuple[str, ...]:
    """Return the cells of an ablation, with the part, or the category, whose error rate increases most."""
    loss, increase = ablation["loss_increase"], ablation["errors_increase"]
    errors = increase["part"] or increase["category"]
    most = max(errors, key=lambda name: errors[name][0], default="")
    at = f"{most} {_signed(errors[most][0])}" if most and errors[most][1] > 0 else ""
    return _signed(loss[0]), _interval(loss), f"{ablation['exact_match']:.3f}", at


def _interval(effect: Sequence[float]) -> str:
    """Return the interval of a mean."""
    return f"{_signed(effect[1])} to {_signed(effect[2])}"


def _signed(value: float) -> str:
    text = f"{value:+.2f}"
    return text if float(text) else "0.00"
