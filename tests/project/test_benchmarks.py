"""Foundations of the benchmarks: both sides do the same work, and figures are computed correctly. Nothing is timed."""

from __future__ import annotations

import dis
import json
import math
import os
import random
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import matplotlib
import pytest
import torch
import yaml
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import __main__ as bench
from benchmarks import convergence, decoding, framework, gpu, growth, history, limits, measure, peers, steps, tables
from benchmarks.__main__ import BENCHMARKS, COLUMNS, FOLDER, cells, machine, markdown, plot, publish, state
from benchmarks.framework import EXPERIMENTS
from datamodules import Date, Text, sentiment
from lightning_tfm.data import LabeledBatch
from lightning_tfm.errors import UserError
from lightning_tfm.layers import Dropout
from lightning_tfm.networks import GPT, AttentionLSTM, EncoderClassifier, Transformer
from lightning_tfm.optimizers import AdamW
from lightning_tfm.system import versions
from lightning_tfm.tokenization import PAD, UNKNOWN_ID


def test_the_interval_covers_the_median_at_its_nominal_rate():
    draw = random.Random(0)
    for count, wanted in ((8, 0.9297), (20, 0.9586)):  # from the binomial distribution
        covered = 0
        for _ in range(4000):
            low, high = measure.interval([draw.gauss(0, 1) for _ in range(count)])
            covered += low <= 0 <= high
        assert covered / 4000 == pytest.approx(wanted, abs=0.015)


def test_the_interval_of_few_values_is_their_range():
    assert measure.interval([3.0, 1.0, 2.0]) == (1.0, 3.0)


def test_a_row_holds_if_its_median_reaches_the_target():
    rounds = [(2.0, 1.0), (3.0, 1.0), (4.0, 1.0)]
    row = measure.ratio_row("ours / peer", "tokens/s", "≥ 3 x", rounds)
    assert (row.ratio, row.low, row.high, row.held) == (3.0, 2.0, 4.0, True)
    assert not measure.ratio_row("ours / peer", "tokens/s", "≥ 3.1 x", rounds).held
    assert measure.absolute_row("ours", "s", "≤ 4 s", [5.0, 4.0, 1.0]).held


def test_unmeasured_rows_are_marked():
    row = measure.Row("on a GPU", "tokens/s", "≥ 1 x")
    assert row.as_dict()["status"] == "not measured"
    assert "not measured" in cells(row)
    assert row.as_dict()["ratio"] is None


def test_expected_time_includes_seeds_that_miss_the_goal():
    seconds, reached = [2.0] * 6 + [3.0] * 2, [True] * 6 + [False] * 2
    row = measure.until_row("until 1.0", "≥ 4 x", seconds, reached, peer=[12.0] * 8)
    assert (row.ours, row.peer, row.ratio, row.held) == (3.0, 12.0, 4.0, True)
    assert row.low < row.ratio < row.high
    assert "6 of 8 seeds" in cells(row)[1]
    assert not measure.until_row("until 1.0", "≥ 4 x", seconds, [*reached[1:], False], peer=[12.0] * 8).held
    alone = measure.until_row("until 1.0", "≤ 3 s", seconds, reached)
    assert (alone.ours, alone.peer, alone.ratio, alone.held) == (3.0, None, None, True)
    assert (12 / alone.high, 12 / alone.low) == pytest.approx((row.low, row.high))


def test_a_goal_that_no_seed_reaches_has_infinite_expected_time():
    row = measure.until_row("until 1.0", "≥ 1 x", [2.0] * 8, [False] * 8, peer=[8.0] * 8)
    assert (row.ratio, row.low, row.held) == (0.0, 0.0, False)
    assert 0 < row.high < 4
    row = measure.until_row("until 1.0", "≤ 4 s", [2.0] * 8, [False] * 8)
    assert (row.ours, row.high, row.held) == (math.inf, math.inf, False)
    assert row.as_dict()["ours"] is None  # JSON has no infinity
    assert cells(measure.Row(**row.as_dict()))[5].endswith("to never")


def test_the_share_of_seeds_is_bounded_by_clopper_and_pearson():
    """With equal times, only the share varies; the bounds follow from the equations of the paper."""
    for k, bounds in ((8, (0.05 ** (1 / 8), 1.0)), (6, (0.4003, 0.9536)), (0, (0.0, 1 - 0.05 ** (1 / 8)))):
        row = measure.until_row("until 1.0", "", [1.0] * 8, [True] * k + [False] * (8 - k), peer=[1.0] * 8)
        assert (row.low, row.high) == pytest.approx(bounds, abs=2e-3)


@pytest.mark.parametrize("share", [1.0, 0.95, 0.75, 0.5])
def test_the_interval_covers_the_expected_time_at_its_nominal_rate(share, monkeypatch):
    monkeypatch.setattr(measure, "DRAWS", 2000)
    draw, covered = random.Random(0), 0
    for _ in range(500):
        ours, peer = ([draw.gauss(mean, 0.1 * mean) for _ in range(8)] for mean in (8, 48))
        row = measure.until_row("until 1.0", "", ours, [draw.random() < share for _ in range(8)], peer)
        covered += row.low <= 6 * share <= row.high
    assert covered / 500 >= 0.9


def test_the_report_lists_every_row_and_counts_the_targets_met():
    rows = [
        measure.ratio_row("a / b", "tokens/s", "≥ 1.5 x", [(3.0, 2.0)], checked="logits"),
        measure.absolute_row("c", "s", "≤ 4 s", [math.inf]),
        measure.ratio_row("limit: a", "tokens/s", "", [(1234.0, 1000.0)]),
        measure.Row("on a GPU", "tokens/s", "≥ 1 x", note="no GPU"),
    ]
    results = {"rows": [replace(row, machine="a CPU", commit="abc1234", torch="2.1").as_dict() for row in rows]}
    report = markdown(json.loads(json.dumps(results)))
    assert "1 of 2 measured targets met" in report
    on_cpu, origin = "a CPU", "abc1234 | 2.1"
    for row in (
        f"| a / b | 3 | 2 | tokens/s | 1.5 | 1.5 to 1.5 | ≥ 1.5 x | yes | {on_cpu} |  | logits | {origin} |  |",
        f"| limit: a | 1,234 | 1,000 | tokens/s | 1.23 | 1.23 to 1.23 |  |  | {on_cpu} |  |  | {origin} |  |",
        f"| on a GPU |  |  | tokens/s | not measured |  | ≥ 1 x |  | {on_cpu} |  |  | {origin} | no GPU |",
    ):
        assert row in report


def test_repeating_a_benchmark_replaces_only_its_own_rows(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.__main__.plot", lambda rows, path: None)

    folder = tmp_path / "benchmarks"
    folder.mkdir()

    def published(name, *values):
        rows = [measure.absolute_row(f"{name} {place}", "s", "≤ 4 s", [v]) for place, v in enumerate(values)]
        publish([replace(row, benchmark=name, commit="abc1234") for row in rows], folder)
        return shown()

    def shown():
        results = json.loads((folder / "results.json").read_text())
        assert (folder / "RESULTS.md").read_text() == markdown(results)
        return [(row["name"], row["ours"]) for row in results["rows"]]

    published("saving", 3.0)
    assert published("copying", 1.0, 2.0) == [("copying 0", 1.0), ("copying 1", 2.0), ("saving 0", 3.0)]
    assert published("copying", 5.0) == [("copying 0", 5.0), ("saving 0", 3.0)]
    publish([measure.Row("copying 0", "s", "≤ 4 s", benchmark="copying")], folder)  # not measured
    assert shown() == [("copying 0", 5.0), ("saving 0", 3.0)]
    publish([measure.Row("on a GPU", "s", "", benchmark="gpt2_124m")], folder)
    assert shown()[-1] == ("on a GPU", None)
    publish([measure.Row("renamed", "s", "", benchmark="gpt2_124m")], folder)
    assert shown()[-1] == ("renamed", None)
    content = (folder / "results.json").read_text()
    (folder / "results.json").write_text(content.replace('"saving"', '"a removed benchmark"'))
    assert published("copying", 6.0) == [("copying 0", 6.0), ("renamed", None)]


def test_a_ratio_is_a_share_of_its_measured_limit():
    named = {"step / a": 1.5, "step / a, same tensors": 1.2, "step / b": 1.0, "limit: step / a, products": 3.0}
    rows = [measure.Row(name, "s", "", ratio=ratio) for name, ratio in named.items()]
    assert all(bench.share_of_limit(row, rows) is None for row in rows)
    rows.append(measure.Row("limit: step / a, calls", "s", "", ratio=6.0))
    shares = [bench.share_of_limit(row, rows) for row in rows[:3]]
    assert shares == [pytest.approx(0.75), pytest.approx(0.6), None]  # the limit is 2


def test_each_step_of_transformer_and_gpt_has_a_limit(monkeypatch):
    for module in steps, limits:
        monkeypatch.setattr(module, "compare", lambda ours, peer, check: ([(3.0, 1.0)], ""))
    measured = [*steps.transformer_steps(False), *steps.gpt_steps(False)]
    shares = [bench.share_of_limit(row, [*measured, *limits.limits(False)]) for row in measured]
    assert shares == [pytest.approx(2.0)] * len(measured)  # products and calls alone reach 3, together 1.5


def test_rows_show_the_machine_they_were_measured_on():
    rows = [measure.Row(**row) for row in json.loads((FOLDER / "results.json").read_text())["rows"]]
    assert all(row.machine and cells(row)[COLUMNS.index("machine")] == row.machine for row in rows)
    assert f"{os.cpu_count()} cores" in machine()


def test_rows_record_the_commit_they_were_measured_at():
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=FOLDER, capture_output=True, text=True).stdout
    assert commit.startswith(state().removesuffix("+"))


def test_published_results_match_the_measurements():
    results = json.loads((FOLDER / "results.json").read_text())
    assert (FOLDER / "RESULTS.md").read_text() == markdown(results)


@pytest.mark.parametrize("network", [GPT, Transformer])
def test_both_precisions_are_measured_on_the_same_network(network, monkeypatch):
    monkeypatch.setattr(steps, "PRECISION_TOKENS", 40)
    size = {"vocab_size": 20, "d_model": 16, "num_heads": 2, "num_layers": 1, "max_length": 8, "dropout": 0.5}
    sides = [steps.build_precision(network, size, (4, 8), is_half) for is_half in (True, False)]
    losses = [side.facts["loss"] for side in sides]
    assert losses[0] != losses[1]
    assert "from the same weights" in steps.near_losses(*(side.facts for side in sides))
    assert all(side.work().amount == 2 * 4 * 8 for side in sides)  # two steps
    with pytest.raises(AssertionError, match="losses"):
        steps.near_losses({"loss": losses[0] + 0.02}, {"loss": losses[1]})


def test_nano_is_scored_on_the_whole_validation_split(monkeypatch):
    monkeypatch.setattr(Text, "_read", staticmethod(lambda path, encoding: "to be or not to be, " * 100))
    built = convergence.build_nano(steps=1)
    assert built.facts == {"fingerprint": convergence.shakespeare_data().fingerprint}
    assert 0 < built.work().amount < math.log(20)  # 13 characters and special symbols, after one step


@pytest.mark.parametrize(
    ("benchmark", "metric", "value", "reaches", "setting"),
    [
        (convergence.multi30k, "bleu", 42.5, True, "--data.init_args.test=null"),
        (convergence.multi30k, "bleu", 42.4, False, "--data.init_args.test=null"),
        (convergence.large_shakespeare, "loss", 1.4646, True, "--data.init_args.test_fraction=0"),
        (convergence.large_shakespeare, "loss", 1.4647, False, "--data.init_args.test_fraction=0"),
    ],
)
def test_single_runs_are_scored_on_the_validation_split(benchmark, metric, value, reaches, setting, monkeypatch):
    commands = []

    def trained(*arguments, steps=None):
        commands.append(arguments)
        return {"val": {metric: value}, "train_seconds": 1000.0}, []

    monkeypatch.setattr(convergence, "trained", trained)
    monkeypatch.setattr(convergence, "resolve_path", lambda name, files: None)
    (row,) = benchmark(False)
    assert all(setting in command for command in commands)
    assert (row.ours, row.held) == (1000.0 if reaches else math.inf, reaches)
    assert row.reached == ("1 of 1 seed" if reaches else "0 of 1 seed")
    assert row.low is None


@pytest.mark.parametrize(
    ("accuracies", "expected", "reached"),
    [([0.80] * 8, 9.0, "8 of 8 seeds"), ([0.81] * 6 + [0.7999] * 2, 12.0, "6 of 8 seeds")],
)
def test_polarity_is_scored_on_the_test_set(accuracies, expected, reached, monkeypatch):
    left = iter(accuracies)

    def trained(experiment, seed):
        return {"test": {"accuracy": next(left)}, "train_seconds": 9.0}, []

    monkeypatch.setattr(convergence, "trained", trained)
    monkeypatch.setattr(convergence, "resolve_path", lambda name, files: None)
    (row,) = convergence.polarity(False)
    assert (row.ours, row.held, row.reached) == (pytest.approx(expected), expected <= 10, reached)
    assert ("(those that miss it end at 0.7999, 0.7999)" in row.note) == (expected > 10)


def test_every_measured_ratio_with_a_target_is_plotted(tmp_path, monkeypatch):
    """Plot rows with missed targets too, and mark those whose peer was extrapolated."""
    labels = []
    monkeypatch.setattr(matplotlib.axes.Axes, "set_yticks", lambda axes, ticks, names, **_: labels.extend(names))
    rows = [measure.Row(**row) for row in json.loads((FOLDER / "results.json").read_text())["rows"]]
    plot(rows, tmp_path / "plot.png")
    ratios = [row for row in rows if row.target.endswith("x") and row.target[0] == "\N{GREATER-THAN OR EQUAL TO}"]
    shown = [f"{row.name} ({row.extrapolated})" if row.extrapolated else row.name for row in ratios if row.ratio]
    assert labels == shown[::-1]


SHORTENED = {
    convergence.dates_against_tutorial,
    convergence.shakespeare,
    decoding.key_value_cache,
    decoding.batched_dates,
}
"""Benchmarks that run less of the peer's work than they report."""


def test_rows_note_shortened_work_of_the_peer(monkeypatch):
    rows = [row for benchmark in SHORTENED for row in measured_as(benchmark, False, monkeypatch)[0]]
    assert len(rows) == 5
    for row in rows:
        assert row.extrapolated
        assert f"({row.extrapolated})" in cells(row)[2]
    published = [measure.Row(**row) for row in json.loads((FOLDER / "results.json").read_text())["rows"]]
    names = {benchmark.__name__ for benchmark in SHORTENED}
    assert [row.name for row in published if row.extrapolated] == [r.name for r in published if r.benchmark in names]


def test_only_these_benchmarks_are_shortened(monkeypatch):
    for benchmark in BENCHMARKS:
        reads_full = any(instruction.argval == "full" for instruction in dis.get_instructions(benchmark))
        assert reads_full == (benchmark in SHORTENED), benchmark.__name__
    for benchmark in SHORTENED:
        short, whole = (measured_as(benchmark, full, monkeypatch) for full in (False, True))
        assert short[1] != whole[1], "the full run measures more work"
        assert not any(row.extrapolated for row in whole[0])


def measured_as(benchmark, full, monkeypatch):
    """Return the rows of a benchmark, the sides it would measure, and the arguments of our trainings."""
    sides, trainings = [], []

    def compare(ours, peer, same):
        sides.extend((ours, peer))
        return [(40.0, 1.0)] * measure.ROUNDS, "the same"

    def started(side, warm):
        sides.append(side)
        return nullcontext(({"fingerprint": "data"}, lambda: measure.Block(1.5, 60.0)))

    def trained(*arguments, data=None, **_):
        trainings.append((arguments, data))
        summary = {"test": {"exact_match": 1.0}, "val": {"loss": 1.59}, "train_seconds": 50.0}
        return summary, [{"val/exact_match": "1.0"}]

    monkeypatch.setattr(decoding, "compare", compare)
    monkeypatch.setattr(convergence, "started", started)
    monkeypatch.setattr(convergence, "trained", trained)
    monkeypatch.setattr(convergence, "resolve_path", lambda name, files: None)
    monkeypatch.setattr(convergence, "shakespeare_data", lambda: SimpleNamespace(fingerprint="data"))
    monkeypatch.setattr(convergence, "dates_of", lambda seed: f"dates of {seed}")
    return list(benchmark(full)), sides, trainings


def test_same_data_is_claimed_only_if_it_is_checked(monkeypatch):
    benchmarks = convergence.dates_against_tutorial, convergence.dates_against_yoyodyne, convergence.shakespeare
    for benchmark in benchmarks:
        for full in (False, True):
            (row,), _, trainings = measured_as(benchmark, full, monkeypatch)
            assert len(trainings) == measure.ROUNDS
            assert (row.checked == convergence.SAME_DATA) == all(data is not None for _, data in trainings)


def test_shakespeare_is_scored_on_the_last_tenth(monkeypatch):
    """This is the split of nanoGPT, independent of the test split of the experiment."""
    _, _, trainings = measured_as(convergence.shakespeare, False, monkeypatch)
    assert all("--data.init_args.test_fraction=0" in arguments for arguments, _ in trainings)
    command = []
    monkeypatch.undo()
    monkeypatch.setattr(Text, "_read", staticmethod(lambda path, encoding: "to be or not to be, " * 100))
    data = convergence.shakespeare_data()
    assert [len(data.datasets[split].ids) for split in ("train", "val")] == [1800, 200]
    monkeypatch.setattr(convergence.subprocess, "run", lambda arguments, **_: command.extend(arguments))
    with pytest.raises(StopIteration):  # there is no summary to read
        convergence.trained("shakespeare_gpt", 1, "--data.init_args.test_fraction=0")
    assert command[-1] == "--data.init_args.test_fraction=0"


def test_each_side_trains_first_in_every_other_round():
    order = []
    ours = lambda: order.append("ours") or measure.Block(1.0, 2.0)  # noqa: E731
    peer = lambda: order.append("peer") or measure.Block(1.0, 3.0)  # noqa: E731
    pairs = [measure.in_turn(number, ours, peer) for number in range(3)]
    assert order == ["ours", "peer", "peer", "ours", "ours", "peer"]
    assert {(a.seconds, b.seconds) for a, b in pairs} == {(2.0, 3.0)}


def test_measurements_are_pinned_to_the_same_cores():
    before = os.sched_getaffinity(0)
    with measure.pinned() as is_pinned:
        assert is_pinned
        assert os.sched_getaffinity(0) == set(sorted(before)[: measure.THREADS])
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize("pins", [True, False])
def test_rows_note_systems_that_cannot_pin(pins, monkeypatch):
    def a_benchmark(full):
        yield measure.absolute_row("speed", "s", "", [1.0], note="of one thread")
        yield measure.absolute_row("memory", "MB", "", [1.0])
        yield measure.Row("a GPU", "s", "", note="there is none")

    published = []
    monkeypatch.setattr(bench, "BENCHMARKS", (a_benchmark,))
    monkeypatch.setattr(bench, "publish", published.extend)
    monkeypatch.setattr(sys, "argv", ["benchmarks"])
    if not pins:  # as on macOS and Windows
        monkeypatch.delattr(os, "sched_getaffinity")
        monkeypatch.delattr(os, "sched_setaffinity")
    with nullcontext() if pins else pytest.warns(UserWarning, match="cannot pin processes to cores"):
        bench.main()
    assert [row.note for row in published] == (
        ["of one thread", "", "there is none"]
        if pins
        else ["of one thread; not pinned to cores", "not pinned to cores", "there is none"]
    )
    assert {row.torch for row in published} == {torch.__version__}


def test_memory_of_saving_is_measured_on_linux_only(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    (row,) = framework.saving(False)
    assert (row.status, row.note) == ("not measured", "measured on Linux only")


def test_a_recorded_run_is_scaled_by_the_speed_of_the_machine(monkeypatch):
    recorded = {"seconds": 100.0, "samples_per_second": 50.0, "exact_match": 0.9}
    monkeypatch.setattr(convergence, "recorded_tutorial", lambda: recorded)
    blocks = [measure.Block(30.0, 1.0), measure.Block(30.0, 2.0)]  # 20 samples per second
    assert convergence.scaled(blocks) == (0.9, 250.0)


@pytest.mark.run
def test_training_on_other_data_than_the_peer_is_refused(monkeypatch):
    class Other:
        fingerprint = "other"

    settings = ["--data.init_args.train_size=100", "--data.init_args.val_size=10", "--data.init_args.test_size=10"]
    run = subprocess.run
    monkeypatch.setattr(convergence.subprocess, "run", lambda command, **how: run([*command, *settings], **how))
    with pytest.raises(AssertionError, match="the sides train on different data"):
        convergence.trained("date_attention_lstm", seed=3, steps=2, data=Other())


@pytest.mark.parametrize(("model", "batch_size"), [("post", 2), ("pre", 2), ("GPT", 12)])
@pytest.mark.run
def test_limits_are_measured_on_the_trained_model(model, batch_size):
    """Products run all linear layers, and calls run the same operations with almost no arithmetic."""
    whole = GPT(**steps.GPT_SIZE, bias=False) if model == "GPT" else Transformer(**steps.COPY, norm=model)
    products = limits.build_limit(model, "products", batch_size)
    calls = limits.build_limit(model, "calls", batch_size)
    assert products.facts["parameters"] == steps.parameters_of(whole)
    assert calls.facts["parameters"] < steps.parameters_of(whole) / 50
    assert products.work().amount == calls.work().amount > 0


def test_the_limit_of_the_attention_lstm_trains_without_attention(monkeypatch):
    data = Date(train_size=64, val_size=1, test_size=1, batch_size=32, seed=0)
    data.setup("fit")
    monkeypatch.setattr(steps, "date_data", lambda: data)
    assert limits.build_lstm_limit("without attention").work().amount == 40 * 32


@pytest.mark.parametrize("side", ["products", "embeddings"])
def test_limits_of_the_classifier_are_measured_on_its_experiment(side, tmp_path, monkeypatch):
    for label, word in (("neg", "dull"), ("pos", "fine")):
        (tmp_path / f"rt-polarity.{label}").write_text("".join(f"a {word} film in {n} scenes\n" for n in range(200)))
    monkeypatch.setattr(sentiment, "resolve_path", lambda name, files: tmp_path / Path(name).name)
    built = limits.build_polarity_limit(side)
    experiment = yaml.safe_load((EXPERIMENTS / "polarity_classifier.yaml").read_text())
    assert built.facts == {"steps": experiment["trainer"]["max_steps"]}
    assert built.work().amount == limits.POLARITY_BATCHES


def test_limits_of_the_classifier_are_the_seconds_of_a_whole_training(monkeypatch):
    work = nullcontext(({"steps": 600}, lambda: measure.Block(60, 0.5)))
    monkeypatch.setattr(limits, "started", lambda side: work)
    monkeypatch.setattr(convergence, "resolve_path", lambda name, files: None)
    assert [row.ours for row in limits.polarity_limits(False)] == [5.0, 5.0]


def test_limits_of_the_classifier_are_not_measured_without_its_data(monkeypatch):
    def resolve_path(name, files):
        raise UserError("no file")

    monkeypatch.setattr(convergence, "resolve_path", resolve_path)
    assert [(row.status, row.note) for row in limits.polarity_limits(False)] == [("not measured", "no file")] * 2


def test_the_embeddings_of_a_step_are_those_of_the_words_that_are_not_dropped():
    network = EncoderClassifier(vocab_size=20, num_classes=2, max_length=8, word_dropout=0.5)
    batch = LabeledBatch(torch.full((3, 8), 5), torch.zeros(3, dtype=torch.long), torch.arange(3))
    before = network.embedding.weight.detach().clone()
    limits.embeddings_of(network, batch, AdamW([network.embedding.weight], weight_decay=0.0))(None)
    changed = (network.embedding.weight != before).any(-1).nonzero().flatten().tolist()
    assert changed == [UNKNOWN_ID, 5]


@pytest.mark.parametrize("model", ["Transformer", "EncoderClassifier"])
def test_matrix_products_are_those_of_every_linear_layer(model):
    if model == "Transformer":
        network, batch = Transformer(**steps.COPY), steps.copy_batches(2, like_lengths=False)[0]
    else:
        network, text = EncoderClassifier(vocab_size=20, num_classes=2, max_length=8), torch.full((3, 8), 5)
        batch = LabeledBatch(text, torch.zeros(3, dtype=torch.long), torch.arange(3))
    step = limits.products_of(network, batch)
    with FlopCounterMode(display=False) as products:
        step(batch)
    linear = [layer for layer in network.modules() if isinstance(layer, torch.nn.Linear)]
    rows = {layer: [] for layer in linear}
    for layer in linear:
        layer.register_forward_hook(lambda layer, args, _: rows[layer].append(args[0].numel() // layer.in_features))
    network(*batch.inputs)
    expected = sum(3 * 2 * count * layer.weight.numel() for layer, counts in rows.items() for count in counts)
    assert products.get_total_flops() == expected


@pytest.mark.run
def test_sides_are_measured_in_separate_processes():
    rounds, checked = measure.compare(
        measure.Side(build_number, {"number": 3}), measure.Side(build_number, {"number": 2}), differ, rounds=2
    )
    assert rounds == [(3.0, 2.0), (3.0, 2.0)]
    assert checked == "3 and 2"


def build_number(number):
    return measure.Built({"number": number, "thread": torch.get_num_threads()}, lambda: measure.Block(number, 1.0))


def differ(ours, peer):
    assert ours == {"number": 3, "thread": measure.THREADS}
    assert peer == {"number": 2, "thread": measure.THREADS}
    return "3 and 2"


@pytest.mark.parametrize(("norm", "peer"), [("post", peers.TutorialTransformer), ("pre", peers.TorchTransformer)])
def test_transformers_of_both_sides_compute_the_same_function(norm, peer):
    """With our weights and without dropout, the peer computes our logits, including for padded sources."""
    torch.manual_seed(0)
    ours, theirs = Transformer(**steps.COPY, norm=norm).eval(), peer(**steps.COPY).eval()
    assert steps.parameters_of(ours) == steps.parameters_of(theirs)
    with torch.no_grad():
        for parameter in ours.parameters():  # so that no bias is 0 and no norm is the identity
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    theirs.take_weights_of(ours)
    batch = steps.copy_batches(8, like_lengths=False)[0]
    assert (batch.source == PAD).any()
    torch.testing.assert_close(theirs(*batch[:2]), ours(*batch[:2]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("ours", "peer"), [("post", "tutorial"), ("pre", "torch"), ("pre", "torch with our dropouts")])
def test_both_sides_of_a_transformer_step_do_the_same_work(ours, peer):
    facts = [steps.build_copy(side, 2, like_lengths=False, allocator=False).facts for side in (ours, peer)]
    assert "the same batches" in steps.same_tensors(*facts)


@pytest.mark.parametrize("bias", [False, True])
def test_nanogpt_with_our_weights_gives_our_logits(bias):
    torch.manual_seed(0)
    ours = GPT(65, d_model=32, num_heads=4, num_layers=2, max_length=16, bias=bias)
    theirs = peers.NanoGPT(65, 32, 4, 2, 16, bias)
    theirs.take_weights_of(ours)
    tokens = torch.randint(3, 65, (2, 16))
    expected = ours(tokens[:, :0], tokens)
    torch.testing.assert_close(theirs(tokens), expected)
    torch.testing.assert_close(theirs.next_logits(tokens), expected[:, -1])


def test_both_sides_read_the_same_dates():
    pairs = steps.Date(train_size=40, val_size=1, test_size=1, batch_size=1).pairs("train")
    source, target = next(iter(steps.tutorial_dates(pairs)))
    assert source.shape[0] == 32
    for row, pair in zip(source.tolist(), pairs, strict=False):
        assert "".join(map(chr, row)).rstrip("\0") == pair.source
    assert "".join(map(chr, target[0].tolist())) == pairs[0].target
    assert peers.TutorialDateLSTM()(source).shape == (32, 10, 128)


def test_lengths_vary_as_the_target_requires():
    facts = [framework.build_lengths(pool).facts for pool in (16, 1)]
    framework.vary(*facts)


@pytest.mark.parametrize("other", ["recomputed", "ctranslate2"])
def test_sampling_with_the_cache_equals_that_of_the_peers(other):
    if other == "ctranslate2":
        pytest.importorskip("ctranslate2")
    arguments = {"max_length": decoding.SAMPLED + 2, "whole": False}
    ours, peer = (decoding.build_sampler(side, **arguments).facts for side in ("ours", other))
    decoding.same_tokens(ours, peer)
    peer["tokens"][0, 0] += 1
    with pytest.raises(AssertionError):
        decoding.same_tokens(ours, peer)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_zeroes_with_its_probability_and_keeps_the_mean(p):
    torch.manual_seed(0)
    dropout, x = Dropout(p), torch.ones(1001, 999)  # not a multiple of the four values drawn together
    y = dropout(x)
    zeroed = (y == 0).double().mean().item()
    deviation = math.sqrt(p * (1 - p) / x.numel())
    assert zeroed == pytest.approx(p, abs=5 * deviation)
    assert y.unique().tolist() == pytest.approx([0, 1 / (1 - p)], rel=1e-4)
    # neighbors, which share 64 random bits, are independent
    together = ((y[:, 1:] == 0) & (y[:, :-1] == 0)).double().mean().item()
    assert together == pytest.approx(p * p, abs=5 * math.sqrt(p * p * (1 - p * p) / y[:, 1:].numel()) + 1e-3)
    torch.manual_seed(0)
    assert dropout(x).equal(y)
    assert not dropout(x).equal(y)
    assert dropout.eval()(x) is x


TINY = {"vocab_size": 70, "d_model": 32, "num_heads": 2, "num_layers": 2, "max_length": 16}


def test_gpt2_steps_of_both_sides_have_the_same_losses():
    arguments = {"size": TINY, "batch_size": 2, "accumulated": 3, "device": "cpu", "steps": 2, "compiled": False}
    ours, peer = (gpu.build_gpt2(side, **arguments) for side in ("ours", "nano"))
    gpu.same_training(ours.facts, peer.facts)
    assert ours.work().amount == 2 * 3 * 2 * 16


def test_flops_per_token_are_those_of_the_matrix_products():
    """Two operations for each weight and each pair of positions, in three passes."""
    network = GPT(**TINY, bias=False)
    D, T, layers = 32, 16, 2
    linear = sum(
        m.weight.numel() for m in network.modules() if isinstance(m, torch.nn.Linear)
    )  # the head is tied to the embedding
    attention = layers * 2 * T * D  # scores and contexts
    norms = (2 * layers + 1) * D
    flops = gpu.flops_per_token(TINY, steps.parameters_of(network))
    assert flops == 6 * (linear + attention + norms)


def test_a_text_is_trained_to_a_goal_and_scored_in_full(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 60)
    size = {"d_model": 32, "num_heads": 2, "num_layers": 1, "max_length": 16}
    arguments = {"path": path, "device": "cpu", "size": size, "most_steps": 40, "every": 20}
    assert gpu.build_shakespeare(**arguments, goal=3.3).work().amount <= 3.3  # uniform over 30 characters: ln 30 = 3.4
    missed = gpu.build_shakespeare(**arguments, goal=0.0).work()
    assert missed.amount > 0.0
    assert 0 < missed.seconds < math.inf


def test_the_whole_loss_is_the_mean_over_all_windows():
    torch.manual_seed(0)
    network, text = GPT(**TINY, bias=False), torch.randint(3, 70, (16 * 70 + 5,))
    losses = []
    for start in range(0, 16 * 70, 16):
        with torch.autocast("cpu", torch.bfloat16):
            logits = network(text[None, :0], text[None, start : start + 16])
        losses.append(torch.nn.functional.cross_entropy(logits[0].float(), text[start + 1 : start + 17]).item())
    assert gpu.whole_loss(network, text, 16, "cpu") == pytest.approx(sum(losses) / 70, rel=2e-3)


@pytest.mark.parametrize(("network", "keeps"), [(AttentionLSTM(70, 8), True), (GPT(**TINY), False)])
def test_only_states_that_keep_their_shapes_can_be_replayed(network, keeps):
    state = network.encode(torch.randint(3, 70, (2, 5)))
    _, following = network.decode_step(torch.tensor([1, 1]), state)
    assert gpu.same_shapes(state, following) == keeps
    assert gpu.same_shapes(state, gpu.clone(state))
    if keeps:
        target = gpu.clone(state)
        gpu.copy_into(target, following)
        torch.testing.assert_close(target, following, rtol=0, atol=0)


def test_gpu_rows_are_computed_from_the_measurements(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "has_gpu", lambda: True)
    monkeypatch.setattr(gpu, "compare", lambda ours, peer, same: ([(4e5, 3.2e5)] * measure.ROUNDS, "losses"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(gpu, "peak_flops", lambda device, half: 989e12)
    against, used = gpu.gpt2_124m(False)
    assert (against.ratio, against.held, against.checked) == (1.25, True, "losses")
    assert "16 accumulated batches" in against.note
    assert used.ours == pytest.approx(100 * 4e5 * (6 * 123_587_328 + 12 * 12 * 768 * 1024) / 989e12)  # without biases
    assert used.held == (used.ours >= 45)
    monkeypatch.setattr(gpu, "peak_flops", lambda device, half: None)
    _, unknown = gpu.gpt2_124m(False)
    assert (unknown.status, unknown.note) == ("not measured", "no peak is known for a GPU")
    (graphs,) = gpu.decoding_graphs(False)
    assert graphs.ratio == 1.25

    trainings = iter([measure.Block(1.46, 50.0)] * 7 + [measure.Block(1.6, 70.0)])
    monkeypatch.setattr(gpu, "started", lambda side, warm: nullcontext(({}, lambda: next(trainings))))
    monkeypatch.setattr(gpu, "resolve_path", lambda name, files: tmp_path)
    (row,) = gpu.tiny_shakespeare(False)
    assert (row.ours, row.reached, row.held) == (60.0, "7 of 8 seeds", True)
    assert "took 50.0 s" in row.note
    assert "1.4600, 1.6000" in row.note


def test_gpu_rows_are_marked_unmeasured_without_a_gpu(monkeypatch):
    monkeypatch.setattr(gpu, "has_gpu", lambda: False)
    rows = [row for benchmark in (gpu.gpt2_124m, gpu.tiny_shakespeare, gpu.decoding_graphs) for row in benchmark(False)]
    assert len(rows) == 4
    assert all(row.as_dict()["status"] == "not measured" for row in rows)


@pytest.mark.parametrize(
    ("same", "facts", "other"),
    [
        (steps.same_parameters, {"parameters": 1000}, {"parameters": 1001}),
        (steps.like_parameters, {"parameters": 1000}, {"parameters": 1020}),
        (steps.same_logits, {"parameters": 1, "logits": torch.ones(2)}, {"logits": torch.zeros(2)}),
        (steps.same_tensors, {"parameters": 1, "logits": torch.ones(2), "ids": torch.ones(2)}, {"ids": torch.zeros(2)}),
        (framework.vary, {"parameters": 1, "variation": 0.56}, {"variation": 0.4}),
        (framework.same_loss, {"loss": torch.tensor(1.0)}, {"loss": torch.tensor(1.01)}),
        (framework.same_rows, {"parameters": 1, "rows": 128}, {"rows": 64}),
        (decoding.same_tokens, {"tokens": torch.arange(20)}, {"tokens": torch.arange(20).flip(0)}),
        (decoding.same_outputs, {"outputs": torch.ones(2), "right": 1.0}, {"outputs": torch.zeros(2)}),
        (decoding.same_translations, {"texts": ["a", "b"], "bleu": 40.0}, {"texts": ["a", "c"]}),
        (decoding.near_outputs, {"outputs": torch.ones(2), "right": 0.9}, {"right": 0.95}),
        (decoding.near_translations, {"texts": ["a", "b"], "bleu": 40.0}, {"bleu": 42.0}),
        (decoding.near_logits, {"logits": torch.ones(2)}, {"logits": torch.tensor([1.0, 1.2])}),
        (gpu.same_training, {"parameters": 1, "losses": [1.0]}, {"losses": [1.1]}),
    ],
)
def test_checks_describe_themselves_and_refuse_differences(same, facts, other):
    assert same(facts, facts)
    with pytest.raises(AssertionError):
        same(facts, facts | other)


@pytest.mark.run
@pytest.mark.parametrize(
    ("settings", "batches"),
    [([], 3), (["--config", "elastic"], 3), (["--trainer.accumulate_grad_batches=2"], 9)],
)
def test_a_benchmark_times_the_command(settings, batches, tmp_path):
    program = f"""
from benchmarks import framework
framework.WARM, framework.LOGGED = 2, 5
framework.fit("date_attention_lstm", *{settings}, "--data.train_size=200", timed=3)
assert framework.Clock.seconds > 0
assert framework.Clock.amount == {batches} * 32 * 11, "batches of 32 dates, each with 10 characters and EOS"
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=FOLDER.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_history_shows_each_measurement_of_the_current_rows_once(tmp_path):
    machine = {"processor": "a CPU", "cores": 2}
    first = measure.Row(
        "speed / peer", "s", "≥ 1 x", 4.0, 2.0, 0.5, 0.4, 0.6, False, "measured", commit="1111111"
    ).as_dict()
    del first["machine"]  # as in the first versions, which have one machine for all rows
    second = first | {"ours": 2.0, "ratio": 1.0, "held": True, "commit": "2222222", "machine": "another CPU"}
    missing = measure.Row("limit", "s", "").as_dict()
    contents = [
        {"machine": machine, "rows": [first, first | {"name": "an earlier name"}]},
        {"machine": machine, "rows": [first | {"note": "explained later"}]},
        {"rows": [second, missing]},
    ]
    git = partial(versions.run_git, tmp_path, "-c", "user.name=a", "-c", "user.email=b")
    git("init", "--quiet")
    for content in contents:
        (tmp_path / "results.json").write_text(json.dumps(content))
        git("add", "results.json")
        git("commit", "--quiet", "--message", "results")
    (tmp_path / "results.json").write_text(json.dumps({"rows": [second, missing]}))  # not committed
    found = history.measurements(history.versions(tmp_path))
    assert [(row.commit, row.machine) for row in found.pop("speed / peer")] == [
        ("1111111", "a CPU, 2 cores"),
        ("2222222", "another CPU"),
    ]
    assert not found
    *_, one, other = history.markdown(history.measurements(contents)).splitlines()
    assert one == "| speed / peer | 1111111 |  | 4 | 2 | s | 0.5 | 0.4 to 0.6 | ≥ 1 x | no | a CPU, 2 cores |"
    assert other == "|  | 2222222 |  | 2 | 2 | s | 1 | 0.4 to 0.6 | ≥ 1 x | yes | another CPU |"


@pytest.mark.parametrize(
    ("name", "address"),
    [
        ("Jürgen Müller-Lüdenscheidt", "juergen.mueller-luedenscheidt@example.org"),
        ("Łukasz Żak", "lukasz.zak@example.org"),
        ("Anne-Marie O'Brien", "anne-marie.obrien@example.org"),
        ("María del Carmen Núñez", "maria.delcarmennunez@example.org"),
        ("Søren Åberg", "soeren.aaberg@example.org"),
    ],
)
def test_an_address_is_spelled_from_a_name(name, address):
    assert tables.email_address(name) == address


def test_the_tables_of_addresses_have_different_names_and_are_reproducible(tmp_path):
    sizes = (60, 20, 30)
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
        tables.write_addresses(folder, sizes)
    one, two = ([(folder / f"{split}.tsv").read_text() for split in tables.SPLITS] for folder in folders)
    assert one == two
    rows = [[line.split("\t") for line in text.splitlines()] for text in one]
    assert [len(part) for part in rows] == [*sizes]
    assert len({name for part in rows for name, _ in part}) == sum(sizes)
    assert all(tables.email_address(name) == address for part in rows for name, address in part)


@pytest.mark.run
def test_a_training_on_a_table_records_its_validations(tmp_path):
    tables.write_addresses(tmp_path, (64, 10, 10))
    block = tables.run_ours(replace(tables.ADDRESSES, epochs=3), tmp_path, seed=1)
    records = tables.read_record(tmp_path / "ours_1.jsonl")
    assert len(records) == 3
    seconds = [record["seconds"] for record in records]
    assert 0 < seconds[0] < seconds[1] < seconds[2] <= block.seconds
    assert 0 <= block.amount <= 1
    assert tables.until(tmp_path / "ours_1.jsonl", 0.0) == (seconds[0], True)
    assert tables.until(tmp_path / "ours_1.jsonl", 1.1) == (seconds[2], False)


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
def test_an_exponent_is_fitted_to_the_largest_values(power):
    values = [1, 10, 20, 40]
    costs = [1e6, *(3 * value**power for value in values[1:])]
    assert growth.exponent(values, costs) == pytest.approx(power, abs=1e-9)


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is measured on Linux only")
@pytest.mark.parametrize("is_ours", [True, False])
@pytest.mark.parametrize("family", growth.PEERS)
def test_blocks_measure_the_steps_of_all_sizes(family, is_ours, monkeypatch):
    monkeypatch.setattr(growth, "SECONDS", 0.0)  # one step in a block
    monkeypatch.setattr(growth, "keep_freed_memory", lambda: None)  # it lasts for the whole process
    sizes = [growth.Size(width=16, length=5, batch=3, vocabulary=20), growth.Size(width=64, vocabulary=50_000)]
    work = growth.build_steps(family, is_ours, sizes).work
    blocks = [[work() for _ in range(1 + 2 * growth.ROUNDS)] for _ in sizes]
    assert [block.amount for _, *timed in blocks for block in timed] == 2 * 2 * growth.ROUNDS * [1]
    assert 0 <= blocks[0][0].amount < blocks[1][0].amount
    assert blocks[1][0].amount > 4 * 50_000 * 64 * 4, "the weights, gradients and moments of the embeddings"
    with pytest.raises(StopIteration):
        work()


@pytest.mark.parametrize("axis", growth.AXES)
@pytest.mark.parametrize("family", ["Transformer", "GPT"])
def test_growing_networks_of_both_sides_have_the_same_size(family, axis):
    for value in growth.AXES[axis]:
        ours, peer = growth.sizes_of(growth.Point(family, axis, value, 1.0, 1.0, 1.0, 1.0))
        assert ours == peer


def test_measured_curves_replace_only_themselves(tmp_path):
    def curves(seconds, *families):
        return [
            growth.Point(family, axis, value, seconds * value, 2.0 * value, 1.23496e6 * value, 2e6 * value)
            for family in families
            for axis, values in ({"pairs": growth.PAIRS} if family == "data" else growth.AXES).items()
            for value in values
        ]

    growth.publish(curves(1.0, *growth.PEERS, "data"), tmp_path)
    growth.publish(curves(3.0, "GPT"), tmp_path)
    points = [growth.Point(**point) for point in json.loads((tmp_path / "growth.json").read_text(encoding="utf-8"))]
    wanted = [*curves(1.0, "Transformer"), *curves(3.0, "GPT"), *curves(1.0, "attention LSTM", "data")]
    assert points == [growth.rounded(point) for point in wanted]
    text = (tmp_path / "GROWTH.md").read_text(encoding="utf-8")
    assert text == growth.markdown(points)
    assert "| data | pairs | 100,000 to 10,000,000 | 1 | 1.00 | 1.00 | 1.00 | 1.00 |" in text
    assert {path.name for path in tmp_path.iterdir()} == {
        *("growth.json", "GROWTH.md", "growth_time.png", "growth_memory.png")
    }


def test_published_growth_matches_the_measurements():
    points = [growth.Point(**point) for point in json.loads((FOLDER / "growth.json").read_text(encoding="utf-8"))]
    assert (FOLDER / "GROWTH.md").read_text(encoding="utf-8") == growth.markdown(points)
    for (family, axis), curve in growth.by_curve(points).items():
        values = [point.value for point in curve]
        for cost in ("ours", "our_memory"):
            power = growth.exponent(values, [getattr(point, cost) for point in curve])
            assert power <= growth.BOUNDS[axis] + 0.1, f"{cost} of {family} grows with {axis} by {power:.2f}"
