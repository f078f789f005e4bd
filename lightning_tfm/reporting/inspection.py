"""Tables and sentences of an inspection, for the terminal, LaTeX and the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_tfm.inference.attention_maps import visible
from lightning_tfm.runs.inspection import AblationRecord, HeadRecord, Inspection, TextRecord
from lightning_tfm.system.tables import Table

SYMBOLS = 3
"""Maximum number of alternatives, and of attributions, in a cell."""

LEAST_PROBABILITY = 0.0001
"""Minimum probability of an alternative in a cell."""

INTERVAL = "95% interval"

SIMULTANEOUS = "simultaneous 95% interval"

WITHOUT = ("loss increase", INTERVAL, "exact match", "largest error increase")
"""Columns of an ablation."""

MIN_GROUP = 10
"""Minimum number of examples of the part or category with the largest error increase."""


def summary(inspection: Inspection) -> str:
    """Return a summary of the sample and of the outcome of the network."""
    full = inspection["full"]
    return (
        f"{inspection['checkpoint']} on {inspection['examples']} examples of {inspection['data']}, drawn with seed "
        f"{inspection['seed']}: loss {full['loss']:.4f} nats per token, exact match {full['exact_match']:.4f}. Ablated "
        "parts are replaced by their mean."
    )


def tables(inspection: Inspection) -> list[Table]:
    """Return the main tables that have rows."""
    sizes = inspection["group_sizes"]
    heads = [(head["name"], _role(head), *_without(head["without"], sizes)) for head in inspection["heads"]]
    others = [(part["name"], *_without(part["without"], sizes)) for part in inspection["components"]]
    backups = [
        (" and ".join(pair["heads"]), _signed(pair["errors_increase"][0]), _interval(pair["errors_increase"]))
        for pair in inspection["backups"]
    ]
    direct = [(part, _signed(effect[0]), _interval(effect)) for part, effect in inspection["direct"].items()]
    lens = [
        (layer, f"{after['loss']:.4f}", f"{after['exact_match']:.4f}") for layer, after in inspection["lens"].items()
    ]
    every = [
        Table("Ablation of heads", ("head", "role", *WITHOUT), heads),
        Table("Ablation of feed-forward networks and layers", ("part", *WITHOUT), others),
        Table("Heads that back each other up", ("heads", "interaction of error rates", SIMULTANEOUS), backups),
        Table("Direct logit attribution", ("part", "mean contribution", INTERVAL), direct),
        Table("Logit lens", ("after layer", "loss", "exact match"), lens),
        *map(_text_table, inspection["texts"]),
    ]
    return [table for table in every if table.rows]


def further_tables(inspection: Inspection) -> list[Table]:
    """Return the tables of all scores, and of patching, which are wide."""
    heads = inspection["heads"]
    names = [*dict.fromkeys(name for head in heads for name in head["scores"])]
    scores = [
        (head["name"], *(f"{head['scores'][name]:.2f}" if name in head["scores"] else "" for name in names))
        for head in heads
    ]
    patched = [_patching_table(text) for text in inspection["texts"] if text.get("patching")]
    return [table for table in (Table("Scores of the heads", ("head", *names), scores), *patched) if table.rows]


def sentences(inspection: Inspection) -> list[str]:
    """Return the sentences about the smallest set of heads, and about pairs that were not ablated."""
    texts = []
    if smallest := inspection["smallest_set"]:
        mean, low, high = smallest["exact_match"]
        heads = ", ".join(smallest["heads"]) or "none"
        texts.append(
            f"Smallest set of heads that keeps 99% of the exact match: {heads}. Exact match with these heads alone: "
            f"{mean:.3f} ({low:.3f} to {high:.3f})."
        )
    if len(inspection["heads"]) > 1 and not inspection["ablated_pairs"]:
        texts.append("Pairs of heads were not ablated, since there are too many.")
    return texts


def _text_table(text: TextRecord) -> Table:
    """Return the table of the probabilities, alternatives and attributions of each output symbol."""
    decided_after = text["decided_after"]
    header = (
        "output",
        "probability",
        "alternatives",
        *(["decided after"] if decided_after else []),
        "top attributions",
    )
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


def _patching_table(text: TextRecord) -> Table:
    """Return the table of the effects of patching by layer and position, of which layers have different numbers."""
    positions = max(len(each["effects"]) for each in text["patching"])
    rows = [
        (each["layer"], *map(_signed, each["effects"]), *[""] * (positions - len(each["effects"])))
        for each in text["patching"]
    ]
    title = f"Activation patching of {text['against']} into {text['input']}"
    return Table(title, ("layer", *map(str, range(1, positions + 1))), rows)


def _contributions(symbols: Sequence[str], values: Sequence[float]) -> str:
    """Return the input symbols with the largest contributions to the log probability, with their positions from 1."""
    largest = sorted(range(len(values)), key=lambda index: -abs(values[index]))[:SYMBOLS]
    contributions = {f"{visible(symbols[index])}@{index + 1}": _signed(values[index]) for index in largest}
    return ", ".join(f"{symbol} {value}" for symbol, value in contributions.items() if float(value))


def _role(head: HeadRecord) -> str:
    """Return the role of a head with its main score, such as "previous token 0.98"; without a role, in parentheses."""
    name, role = head["main_score"], head["role"]
    if name is None:
        return ""
    score = f"{head['scores'][name]:.2f}"
    return f"{role} {score}" if role else f"({name} {score})"


def _without(ablations: Mapping[str, AblationRecord], sizes: Mapping[str, Mapping[str, int]]) -> tuple[str, ...]:
    """Return the cells of an ablation, with the part, or the category, whose error rate increases most."""
    if not ablations:
        return ("",) * len(WITHOUT)
    ablation = ablations["mean"]
    by = "part" if ablation["errors_increase"]["part"] else "category"
    errors = {
        name: effect
        for name, effect in ablation["errors_increase"][by].items()
        if effect[1] > 0 and sizes[by][name] >= MIN_GROUP
    }
    most = max(errors, key=lambda name: errors[name][0], default="")
    at = f"{most} {_signed(errors[most][0])}" if most else ""
    loss = ablation["loss_increase"]
    return _signed(loss[0]), _interval(loss), f"{ablation['exact_match']:.3f}", at


def _interval(effect: Sequence[float]) -> str:
    """Return the interval of a mean."""
    return f"{_signed(effect[1])} to {_signed(effect[2])}"


def _signed(value: float) -> str:
    """Return a number with its sign and two significant digits, and at most four decimals."""
    text = f"{value:+.0f}" if abs(value) >= 10 else f"{value:+.{1 if abs(value) >= 1 else _decimals(value)}f}"
    return text if float(text) else "0"


def _decimals(value: float) -> int:
    """Return the number of decimals of two significant digits, at most four, of a number below 1."""
    return 4 if abs(value) < 0.01 else 3 if abs(value) < 0.1 else 2
