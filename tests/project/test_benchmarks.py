"""Foundations of the benchmarks: both sides do the same work, and figures are computed correctly. Nothing is timed."""

from __future__ import annotations

import inspect
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
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import __main__ as bench
from benchmarks import convergence, decoding, framework, gpu, limits, measure, peers, steps, tables, texts
from benchmarks.__main__ import BENCHMARKS, COLUMNS, FOLDER, cells, machine, markdown, plot, publish, state
from benchmarks.measure import ROUNDS, Block, Row, Side, until_row
from datamodules import Date, text
from lightning_tfm.errors import UserError
from lightning_tfm.networks import GPT, Transformer
from lightning_tfm.tokenization import PAD
from support.corpora import text_file

PUBLISHED = [Row(**row) for row in json.loads((FOLDER / "results.json").read_text(encoding="utf-8"))["rows"]]
TINY = {"vocab_size": 70, "d_model": 32, "num_heads": 2, "num_layers": 2, "max_length": 16}


# Figures


def test_coverage_of_median_interval():
    draw = random.Random(0)
    for count, expected in ((8, 0.9297), (20, 0.9586)):  # from the binomial distribution
        covered = 0
        for _ in range(4000):
            low, high = measure.interval([draw.gauss(0, 1) for _ in range(count)])
            covered += low <= 0 <= high
        assert covered / 4000 == pytest.approx(expected, abs=0.015)
    assert measure.interval([3.0, 1.0, 2.0]) == (1.0, 3.0)


def test_target_of_median():
    rounds = [(2.0, 1.0), (3.0, 1.0), (4.0, 1.0)]
    row = measure.ratio_row("ours / peer", "tokens/s", "≥ 3 x", rounds)
    assert (row.ours, row.peer, row.ratio, row.low, row.high, row.held) == (3.0, 1.0, 3.0, 2.0, 4.0, True)
    assert not measure.ratio_row("ours / peer", "tokens/s", "≥ 3.1 x", rounds).held
    assert measure.absolute_row("ours", "s", "≤ 4 s", [5.0, 4.0, 1.0]).held


def test_expected_time_until_goal():
    seconds, reached = [2.0] * 6 + [3.0] * 2, [True] * 6 + [False] * 2
    row = until_row("until 1.0", "≥ 4 x", seconds, reached, peer=[12.0] * 8)
    assert (row.ours, row.peer, row.ratio, row.held) == (3.0, 12.0, 4.0, True)
    assert row.low < row.ratio < row.high
    assert "6 of 8 seeds" in cells(row)[1]
    assert not until_row("until 1.0", "≥ 4 x", seconds, [*reached[1:], False], peer=[12.0] * 8).held
    alone = until_row("until 1.0", "≤ 3 s", seconds, reached)
    assert (alone.ours, alone.peer, alone.ratio, alone.held) == (3.0, None, None, True)
    assert (12 / alone.high, 12 / alone.low) == pytest.approx((row.low, row.high))
    single = until_row("until 1.0", "≤ 3 s", [2.0], [True])
    assert (single.ours, single.held, single.low, single.reached) == (2.0, True, None, "1 of 1 seed")


def test_expected_time_of_missed_goal():
    row = until_row("until 1.0", "≥ 1 x", [2.0] * 8, [False] * 8, peer=[8.0] * 8)
    assert (row.ratio, row.low, row.held) == (0.0, 0.0, False)
    assert 0 < row.high < 4
    row = until_row("until 1.0", "≤ 4 s", [2.0] * 8, [False] * 8)
    assert (row.ours, row.high, row.held) == (math.inf, math.inf, False)
    assert row.as_dict()["ours"] is None  # JSON has no infinity
    assert cells(Row(**row.as_dict()))[5].endswith("to never")


@pytest.mark.parametrize(
    ("k", "bounds"), [(8, (0.05 ** (1 / 8), 1.0)), (6, (0.4003, 0.9536)), (0, (0.0, 1 - 0.05 ** (1 / 8)))]
)
def test_clopper_pearson_bounds(k, bounds):
    """With equal times, only the share varies; the bounds follow from the equations of the paper."""
    row = until_row("until 1.0", "", [1.0] * 8, [True] * k + [False] * (8 - k), peer=[1.0] * 8)
    assert (row.low, row.high) == pytest.approx(bounds, abs=2e-3)


@pytest.mark.parametrize("share", [1.0, 0.95, 0.75, 0.5])
def test_coverage_of_expected_time(share, monkeypatch):
    monkeypatch.setattr(measure, "DRAWS", 2000)
    draw, covered = random.Random(0), 0
    for _ in range(500):
        ours, peer = ([draw.gauss(mean, 0.1 * mean) for _ in range(8)] for mean in (8, 48))
        row = until_row("until 1.0", "", ours, [draw.random() < share for _ in range(8)], peer)
        covered += row.low <= 6 * share <= row.high
    assert covered / 500 >= 0.9


def test_share_of_limit():
    ratios = {"step / a": 1.5, "step / a, same tensors": 1.2, "step / b": 1.0, "limit: step / a, products": 3.0}
    rows = [Row(name, "s", "", ratio=ratio) for name, ratio in ratios.items()]
    assert all(bench.share_of_limit(row, rows) is None for row in rows)
    rows.append(Row("limit: step / a, calls", "s", "", ratio=6.0))
    shares = [bench.share_of_limit(row, rows) for row in rows[:3]]
    assert shares == [pytest.approx(0.75), pytest.approx(0.6), None]  # the limit is 2


def test_flops_per_token():
    """Two operations for each weight and each pair of positions, in three passes."""
    network = GPT(**TINY, bias=False)
    D, T, layers = 32, 16, 2
    # The head is tied to the embedding.
    linear = sum(m.weight.numel() for m in network.modules() if isinstance(m, torch.nn.Linear))
    attention = layers * 2 * T * D  # scores and contexts
    norms = (2 * layers + 1) * D
    assert gpu.flops_per_token(TINY, steps.parameters_of(network)) == 6 * (linear + attention + norms)


# Results


def test_report():
    rows = [
        measure.ratio_row("a / b", "tokens/s", "≥ 1.5 x", [(3.0, 2.0)], checked="logits"),
        measure.absolute_row("c", "s", "≤ 4 s", [math.inf]),
        measure.ratio_row("limit: a", "tokens/s", "", [(1234.0, 1000.0)]),
        Row("on a GPU", "tokens/s", "≥ 1 x"),
    ]
    results = {"rows": [replace(row, machine="a CPU", commit="abc1234", torch="2.1").as_dict() for row in rows]}
    report = markdown(json.loads(json.dumps(results)))
    assert "1 of 2 measured targets met" in report
    for row in (
        "| a / b | 3 | 2 | tokens/s | 1.5 | 1.5 to 1.5 | ≥ 1.5 x | yes | a CPU |  | logits | abc1234 | 2.1 |  |",
        "| limit: a | 1,234 | 1,000 | tokens/s | 1.23 | 1.23 to 1.23 |  |  | a CPU |  |  | abc1234 | 2.1 |  |",
        "| on a GPU |  |  | tokens/s | not measured |  | ≥ 1 x |  | a CPU |  |  | abc1234 | 2.1 |  |",
    ):
        assert row in report


def test_publishing_replaces_own_rows(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.__main__.plot", lambda rows, path: None)
    path = tmp_path / "results.json"

    def published(*rows):
        publish([*rows], tmp_path)
        results = json.loads(path.read_text())
        assert (tmp_path / "RESULTS.md").read_text() == markdown(results)
        return [(row["name"], row["ours"]) for row in results["rows"]]

    def measured(name, *values):
        rows = [measure.absolute_row(f"{name} {place}", "s", "≤ 4 s", [v]) for place, v in enumerate(values)]
        return [replace(row, benchmark=name) for row in rows]

    published(*measured("saving", 3.0))
    assert published(*measured("copying", 1.0, 2.0)) == [("copying 0", 1.0), ("copying 1", 2.0), ("saving 0", 3.0)]
    assert published(*measured("copying", 5.0)) == [("copying 0", 5.0), ("saving 0", 3.0)]
    path.write_text(path.read_text().replace('"saving"', '"a removed benchmark"'))
    assert published(*measured("copying", 6.0)) == [("copying 0", 6.0)]


def test_published_results_match_measurements():
    results = json.loads((FOLDER / "results.json").read_text(encoding="utf-8"))
    assert (FOLDER / "RESULTS.md").read_text(encoding="utf-8") == markdown(results)
    assert all(row.machine and cells(row)[COLUMNS.index("machine")] == row.machine for row in PUBLISHED)


def test_machine_and_commit():
    assert f"{os.cpu_count()} cores" in machine()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=FOLDER, capture_output=True, text=True).stdout
    assert commit.startswith(state().removesuffix("+"))


def test_plot(tmp_path, monkeypatch):
    """Plot rows with missed targets too, and mark those whose peer was extrapolated."""
    labels = []
    monkeypatch.setattr(matplotlib.axes.Axes, "set_yticks", lambda axes, ticks, names, **_: labels.extend(names))
    plot(PUBLISHED, tmp_path / "plot.png")
    rows = [row for row in PUBLISHED if row.target.startswith("≥") and row.target.endswith("x") and row.ratio]
    assert labels == [f"{row.name} ({row.extrapolated})" if row.extrapolated else row.name for row in rows[::-1]]


@pytest.mark.parametrize("pins", [True, False])
def test_pinned_cores(pins, monkeypatch):
    before, cores = os.sched_getaffinity(0), []

    def a_benchmark(full):
        cores.append(os.sched_getaffinity(0) if pins else None)
        yield measure.absolute_row("speed", "s", "", [1.0], note="of one thread")
        yield measure.absolute_row("memory", "MB", "", [1.0])

    published = []
    monkeypatch.setattr(bench, "BENCHMARKS", (a_benchmark,))
    monkeypatch.setattr(bench, "publish", published.extend)
    monkeypatch.setattr(sys, "argv", ["benchmarks"])
    if not pins:  # as on macOS and Windows
        monkeypatch.delattr(os, "sched_getaffinity")
        monkeypatch.delattr(os, "sched_setaffinity")
    with nullcontext() if pins else pytest.warns(UserWarning, match="cannot pin processes to cores"):
        bench.main()
    monkeypatch.undo()
    notes = ["of one thread", ""] if pins else ["of one thread; not pinned to cores", "not pinned to cores"]
    assert [row.note for row in published] == notes
    assert {row.torch for row in published} == {torch.__version__}
    assert cores == [set(sorted(before)[: measure.THREADS]) if pins else None]
    assert os.sched_getaffinity(0) == before


# Rows


@pytest.fixture
def measured(monkeypatch):
    """Return a function that runs a benchmark without its work: its rows, sides and trainings."""

    def run(benchmark, full=False, value=1.0):
        sides, trainings = [], []

        def compare(ours, peer, same, rounds=ROUNDS):
            sides.extend((ours, peer))
            return [(40.0, 1.0)] * rounds, "the same"

        def started(side, warm=True):
            sides.append(side)
            return nullcontext(({"fingerprint": "data", "state": 2**20}, lambda: Block(1.5, 60.0)))

        def train(*arguments, data=None, **_):
            trainings.append((arguments, data))
            return Block(value, 50.0)

        def train_on_table(table, folder, seed):
            for side in "ours", "peer":
                record = {"seconds": 1.0, "exact_match": 1.0, "parameters": 1000}
                (folder / f"{side}_{seed}.jsonl").write_text(json.dumps(record) + "\n")
            return Block(value, 50.0)

        for module in measure, framework, gpu:
            monkeypatch.setattr(module, "compare", compare)
        for module in measure, framework:
            monkeypatch.setattr(module, "started", started)
        for module in convergence, decoding, gpu:
            monkeypatch.setattr(module, "require", lambda *names: None)
        monkeypatch.setattr(convergence, "train", train)
        monkeypatch.setattr(convergence, "shakespeare_data", lambda: SimpleNamespace(fingerprint="data"))
        monkeypatch.setattr(convergence, "dates_of", lambda seed: f"dates of {seed}")
        monkeypatch.setattr(decoding, "train_translator", lambda folder: None)
        monkeypatch.setattr(tables, "write_table", lambda table, folder: None)
        monkeypatch.setattr(tables, "run_ours", train_on_table)
        monkeypatch.setattr(framework, "run_start", lambda *arguments: 1.0)
        for module in texts, gpu:
            monkeypatch.setattr(module, "texts_of", lambda *sizes: nullcontext([Path("text.txt") for _ in sizes]))
        monkeypatch.setattr(texts, "start", lambda path: 1.0)
        monkeypatch.setattr(texts, "sampled", lambda *arguments: (5.0, 300.0))
        monkeypatch.setenv(texts.LITDATA, sys.executable)
        monkeypatch.setattr(gpu, "require_gpu", lambda: None)
        monkeypatch.setattr(gpu, "elastic_weights", lambda *arguments: {"weight": torch.ones(3)})
        monkeypatch.setattr(gpu, "peak_flops", lambda device, half: 989e12)
        return list(benchmark(full)), sides, trainings

    return run


SHORTENED = {
    convergence.dates_against_tutorial,
    convergence.shakespeare,
    decoding.key_value_cache,
    decoding.batched_dates,
}
"""Benchmarks that run less of the peer's work than they report."""


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda benchmark: benchmark.__name__)
def test_published_rows(benchmark, measured):
    """Rows note the work of the peer that is shortened unless the benchmark is run in full."""
    published = [row for row in PUBLISHED if row.benchmark == benchmark.__name__]
    (short, sides, _), (whole, whole_sides, _) = measured(benchmark), measured(benchmark, full=True)
    assert [(r.name, r.unit, r.target) for r in short] == [(r.name, r.unit, r.target) for r in published]
    assert all(row.ours is not None for row in short)
    assert not any(row.extrapolated for row in whole)
    if benchmark in SHORTENED:
        assert all(row.extrapolated and f"({row.extrapolated})" in cells(row)[2] for row in short)
        work, whole_work = ([(side.build.args, side.build.keywords) for side in each] for each in (sides, whole_sides))
        assert work != whole_work
    else:
        assert short == whole


@pytest.mark.parametrize(
    "benchmark", [convergence.dates_against_tutorial, convergence.dates_against_yoyodyne, convergence.shakespeare]
)
def test_sides_train_on_equal_data(benchmark, measured):
    (row,), _, trainings = measured(benchmark)
    text = SimpleNamespace(fingerprint="data") if benchmark is convergence.shakespeare else None
    assert [data for _, data in trainings] == [text or f"dates of {arguments[1]}" for arguments, _ in trainings]
    assert (len(trainings), row.checked) == (ROUNDS, convergence.SAME_DATA)


@pytest.mark.parametrize(
    ("benchmark", "metric", "goal", "is_lower", "setting"),
    [
        (convergence.multi30k, "val/bleu", 42.5, False, "--data.init_args.test=null"),
        (convergence.large_shakespeare, "val/loss", 1.4646, True, "--data.init_args.test_fraction=0"),
        (convergence.shakespeare, "val/loss", 1.6, True, "--data.init_args.test_fraction=0"),
        (gpu.tiny_shakespeare, "val/loss", 1.4697, True, "--data.init_args.test_fraction=0"),
        (convergence.polarity, "test/accuracy", 0.8, False, "polarity_classifier"),
        (convergence.copying, "test/exact_match", 0.999, False, "copy_transformer"),
        (convergence.dates_against_yoyodyne, "val/exact_match", 1.0, False, "--model.init_args.label_smoothing=0.2"),
    ],
)
def test_goals(benchmark, metric, goal, is_lower, setting, measured):
    for value in (goal, goal + (1e-4 if is_lower else -1e-4)):
        (row,), _, trainings = measured(benchmark, value=value)
        assert all(metric in arguments and setting in arguments for arguments, _ in trainings)
        assert (row.ours == 50.0) == (value == goal)
        assert (f"end at {value:.4f}" in row.note) == (value != goal)


def test_gpu_rows(measured, monkeypatch):
    against, used = measured(gpu.gpt2_124m)[0]
    assert (against.ratio, against.held, against.checked) == (40.0, True, "the same")
    assert used.ours == pytest.approx(100 * 40 * (6 * 123_587_328 + 12 * 12 * 768 * 1024) / 989e12)  # without biases
    monkeypatch.setattr(gpu, "peak_flops", lambda device, half: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    with pytest.raises(UserError, match="no peak is known for a GPU"):
        next(gpu.gpt2_124m(False))
    (text,), (elastic,) = measured(gpu.memory_mapped_text)[0], measured(gpu.elastic_determinism)[0]
    assert (text.ours, text.peer, text.ratio, text.held) == (25.0, 1000.0, 0.025, True)  # the rates are 40 and 1
    assert (elastic.ours, elastic.held, cells(elastic)[1]) == (0, True, "0")


@pytest.mark.run
def test_processes_that_share_a_device_train_as_one():
    settings = [f"--trainer.{name}=6" for name in ("max_steps", "val_check_interval")]
    settings += ["--model.network.dropout=0.1", "--data.train_size=200", "--data.val_size=8", "--data.test_size=8"]
    one, two = (gpu.elastic_weights(processes, "cpu", *settings) for processes in (1, 2))
    assert gpu.count_different(one, two) == 0
    name = "network.norm.weight"
    assert gpu.count_different(one, two | {name: two[name].neg()}) == two[name].numel()


def test_published_rows_stay_where_a_benchmark_cannot_run(monkeypatch, tmp_path, capsys):
    """Without a GPU, other systems than Linux, or files."""
    unmeasured = gpu.gpt2_124m, gpu.tiny_shakespeare, gpu.memory_mapped_text, gpu.elastic_determinism
    unmeasured += framework.saving, texts.large_texts
    unmeasured += convergence.polarity, tables.inflection, texts.texts, texts.texts_against_litdata
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setenv("LIGHTNING_TFM_DATA", str(tmp_path))
    monkeypatch.delenv("LITDATA_PYTHON", raising=False)
    monkeypatch.setattr(bench, "publish", lambda rows: pytest.fail("these rows were not measured"))
    monkeypatch.setattr(sys, "argv", ["benchmarks", *(benchmark.__name__ for benchmark in unmeasured)])
    bench.main()
    lines = capsys.readouterr().err.splitlines()
    missing = f"{str(tmp_path)!r} does not"
    reasons = *["no GPU"] * 4, "Linux only", "Linux only", missing, missing, missing, "with litdata"
    for benchmark, line, reason in zip(unmeasured, lines, reasons, strict=True):
        assert line.startswith(f"{benchmark.__name__} is not measured: ")
        assert reason in line


def test_steps_have_limits(measured):
    rows = [*measured(steps.transformer_steps)[0], *measured(steps.gpt_steps)[0]]
    shares = [bench.share_of_limit(row, [*rows, *measured(limits.limits)[0]]) for row in rows]
    assert shares == [pytest.approx(2.0)] * len(rows)  # products and calls alone reach 40, together 20


# Sides


@pytest.mark.run
def test_sides_run_in_separate_processes():
    sides = Side(build_number, number=3), Side(build_number, number=2)
    assert measure.compare(*sides, differ, rounds=2) == ([(3.0, 2.0), (3.0, 2.0)], "3 and 2")


def build_number(number):
    return measure.Built({"number": number, "thread": torch.get_num_threads()}, lambda: Block(number, 1.0))


def differ(ours, peer):
    assert ours == {"number": 3, "thread": measure.THREADS}
    assert peer == {"number": 2, "thread": measure.THREADS}
    return "3 and 2"


def test_sides_alternate(monkeypatch):
    order = []

    def trained(name, seconds):
        order.append(name)
        return Block(1.0, seconds)

    work = nullcontext(({"a": 1}, lambda: trained("peer", 3.0)))
    monkeypatch.setattr(measure, "started", lambda side, warm: work)
    facts, ours, theirs = measure.in_turn(lambda seed: trained(seed, 2.0), None, (11, 12, 13))
    assert order == [11, "peer", "peer", 12, 13, "peer"]
    assert ([block.seconds for block in ours], [block.seconds for block in theirs]) == ([2.0] * 3, [3.0] * 3)
    assert facts == {"a": 1}


COPY = partial(steps.build_copy, batch_size=2, like_lengths=False, allocator=False)
ON_CPU = {"batch_size": 2, "device": "cpu", "steps": 2, "compiled": False}
GPT2 = partial(gpu.build_gpt2, size=TINY, accumulated=3, **ON_CPU)
TEXT = partial(gpu.build_text, size={name: size for name, size in TINY.items() if name != "vocab_size"}, **ON_CPU)
SAMPLER = partial(decoding.build_sampler, max_length=decoding.SAMPLED + 2, whole=False)
LIMIT = partial(limits.build_limit, "post", batch_size=2)
GPT_STEP = partial(steps.build_gpt, allocator=False)
BOTH = {
    "Transformer / tutorial": (COPY, ("post", "tutorial"), steps.same_tensors),
    "Transformer / torch": (COPY, ("pre", "torch"), steps.same_tensors),
    "Transformer / torch, dropouts": (COPY, ("pre", "torch with our dropouts"), steps.same_tensors),
    "GPT / nanoGPT": (partial(GPT_STEP, bias=False), ("ours", "nano"), steps.same_logits),
    "GPT / Hugging Face": (partial(GPT_STEP, bias=True), ("ours as huggingface", "huggingface"), steps.same_logits),
    "GPT with a setting": (steps.build_gpt_with, ({"norm_type": "rms"}, {}), steps.both_sizes),
    "attention LSTM": (steps.build_dates, ("ours", "tutorial"), steps.like_parameters),
    "without attention": (limits.build_lstm_limit, ("without attention",) * 2, limits.unchecked),
    "products": (LIMIT, ("products", "products"), steps.same_parameters),
    "lengths": (framework.build_lengths, (16, 1), framework.vary),
    "GPT-2": (GPT2, ("ours", "nano"), gpu.same_training),
    "GPT on a text": (TEXT, ("loaded", "kept"), gpu.same_training),
    "cache": (SAMPLER, ("ours", "recomputed"), decoding.same_tokens),
    "GPT in CTranslate2": (SAMPLER, ("ours", "ctranslate2"), decoding.same_tokens),
    "characters": (texts.build_characters, ("ours", "nano"), texts.same_splits),
    "subwords": (texts.build_subwords, ("ours", "encode_batch"), texts.same_ids),
    "subwords, fast": (texts.build_subwords, ("ours", "encode_batch_fast"), texts.same_ids),
    "windows": (texts.build_batches, ("ours", "nano"), texts.same_windows),
}
"""Builders of both sides at a small size, their arguments, and the check of their facts."""


@pytest.mark.parametrize("pair", BOTH)
def test_sides_do_equal_work(pair, monkeypatch, tmp_path):
    if pair == "GPT in CTranslate2":
        pytest.importorskip("ctranslate2")
    data = Date(train_size=64, val_size=1, test_size=1, batch_size=32, seed=0)
    data.setup("fit")
    monkeypatch.setattr(steps, "date_data", lambda: data)
    monkeypatch.setattr(steps, "keep_freed_memory", lambda: None)  # it lasts for the whole process
    monkeypatch.setattr(steps, "steps_of", lambda batch_size: 2)
    monkeypatch.setattr(steps, "GPT_STEPS", 2)
    monkeypatch.setattr(steps, "DATE_STEPS", 2)
    monkeypatch.setattr(texts, "BATCHES", 2)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build, (ours, peer), same = BOTH[pair]
    if "path" in inspect.signature(build).parameters:
        build = partial(build, path=Path(text_file(tmp_path, "To be, or not to be: that is the question.\n\n" * 1000)))
    built = build(ours), build(peer)
    assert same(*(side.facts for side in built)) or same is limits.unchecked
    if pair != "lengths":  # whose block takes seconds
        assert all(side.work().amount > 0 for side in built)


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
        (texts.same_splits, {"splits": {"val": (100, "a")}}, {"splits": {"val": (100, "b")}}),
        (texts.same_number, {"tokens": 100}, {"tokens": 99}),
        (texts.same_ids, {"ids": torch.arange(3)}, {"ids": torch.tensor([0, 1, 3])}),
        (texts.same_windows, {"windows": torch.arange(3)}, {"windows": torch.tensor([0, 1, 3])}),
        (texts.same_text, {"first": "To be"}, {"first": "To go"}),
        (gpu.same_training, {"parameters": 1, "losses": [1.0]}, {"losses": [1.1]}),
    ],
)
def test_checks_refuse_differences(same, facts, other):
    assert same(facts, facts)
    with pytest.raises(AssertionError):
        same(facts, facts | other)


@pytest.mark.parametrize(("norm", "peer"), [("post", peers.TutorialTransformer), ("pre", peers.TorchTransformer)])
def test_transformer_logits_of_peers(norm, peer):
    """With our weights and without dropout, the peer computes our logits, including for padded sources."""
    ours, theirs = Transformer(**steps.COPY, norm=norm).eval(), peer(**steps.COPY).eval()
    with torch.no_grad():
        for parameter in ours.parameters():  # so that no bias is 0 and no norm is the identity
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    theirs.take_weights_of(ours)
    batch = steps.copy_batches(8, like_lengths=False)[0]
    assert (batch.source == PAD).any()
    torch.testing.assert_close(theirs(*batch[:2]), ours(*batch[:2]), rtol=1e-4, atol=1e-4)


def test_sides_read_equal_dates():
    pairs = Date(train_size=40, val_size=1, test_size=1, batch_size=1).pairs("train")
    source, target = next(iter(steps.tutorial_dates(pairs)))
    assert source.shape[0] == 32
    for row, pair in zip(source.tolist(), pairs, strict=False):
        assert "".join(map(chr, row)).rstrip("\0") == pair.source
    assert "".join(map(chr, target[0].tolist())) == pairs[0].target
    assert peers.TutorialDateLSTM()(source).shape == (32, 10, 128)


@pytest.mark.parametrize("side", ["one by one", "ctranslate2"])
def test_dates_decoded_in_batches(side, monkeypatch):
    if side == "ctranslate2":
        pytest.importorskip("ctranslate2")
    data = Date(train_size=1, val_size=1, test_size=40, batch_size=1, seed=0)
    data.setup("fit")
    longest = max(data.max_source_length, data.max_target_length)
    network = Transformer(data.vocab_size, 64, 4, 2, 256, dropout=0.0, max_length=longest).eval()
    trained = network, data.datasets["test"], data.max_target_length
    monkeypatch.setattr(decoding, "date_network", lambda kind: trained)
    ours, peer = (decoding.build_date_outputs(each, 20, "transformer") for each in ("ours", side))
    assert ours.facts["outputs"].equal(peer.facts["outputs"])
    assert (ours.work().amount, peer.work().amount) == (40, 20)


def test_products_of_linear_layers():
    network, batch = Transformer(**steps.COPY), steps.copy_batches(2, like_lengths=False)[0]
    step = limits.products_of(network, batch)
    with FlopCounterMode(display=False) as products:
        step(batch)
    flops = []
    for layer in network.modules():
        if isinstance(layer, torch.nn.Linear):  # three passes of two operations for each input and weight
            layer.register_forward_hook(lambda layer, args, _: flops.append(6 * args[0].numel() * layer.out_features))
    network(*batch.inputs)
    assert products.get_total_flops() == sum(flops)


@pytest.mark.parametrize("model", ["post", "pre", "GPT"])
def test_limits_of_trained_model(model, monkeypatch):
    """Products run all linear layers, and calls run the same operations with almost no arithmetic."""
    monkeypatch.setattr(limits, "keep_freed_memory", lambda: None)  # it lasts for the whole process
    network = GPT(**steps.GPT_SIZE, bias=False) if model == "GPT" else Transformer(**steps.COPY, norm=model)
    products, calls = (limits.build_limit(model, side, batch_size=2) for side in ("products", "calls"))
    assert products.facts["parameters"] == steps.parameters_of(network) > 50 * calls.facts["parameters"]


def test_texts_have_their_sizes(monkeypatch, tmp_path):
    speeches = text_file(tmp_path, "To be\n\nor not\n\nto be")
    monkeypatch.setattr(texts, "resolve_path", lambda name, downloads: Path(speeches))
    before, written = os.environ.get("XDG_CACHE_HOME"), []
    for _ in range(2):
        with texts.texts_of(10, 1000) as paths:
            written.append([path.read_text() for path in paths])
            assert os.environ["XDG_CACHE_HOME"] == str(paths[0].parent)
    assert not paths[0].exists()
    assert os.environ.get("XDG_CACHE_HOME") == before
    assert [len(each) for each in written[0]] == [10, 1000]
    assert written[0] == written[1], "the order depends on the seed alone"
    assert "not" in written[0][1]


@pytest.mark.run
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts anonymous memory")
def test_peak_of_sampled_memory():
    program = "import time\nblock = b'a' * {}\ntime.sleep(0.2)\ndel block\ntime.sleep(0.1)"
    peaks = [texts.sampled(program.format(size))[1] for size in (100_000_000, 300_000_000)]
    assert peaks[1] - peaks[0] == pytest.approx(200, abs=5)


# Trainings


def test_nano_validation_split(monkeypatch, tmp_path):
    """This is the split of nanoGPT, independent of the test split of the experiment."""
    monkeypatch.setattr(text, "resolve_path", lambda name, downloads: tmp_path / "text.txt")
    text_file(tmp_path, "to be or not to be, " * 100)
    data = convergence.shakespeare_data()
    assert [len(data.datasets[split].ids) for split in ("train", "val")] == [1800, 200]
    built = convergence.build_nano(steps=1)
    assert built.facts == {"fingerprint": data.fingerprint}
    assert 0 < built.work().amount < math.log(20)  # 13 characters and special symbols, after one step


@pytest.mark.parametrize("epochs", [1, 2])
def test_tutorial_is_scaled_to_all_epochs(epochs, monkeypatch):
    data = Date(train_size=64, val_size=1, test_size=32, batch_size=32, seed=0)
    data.setup("fit")
    monkeypatch.setattr(convergence, "dates_of", lambda seed: data)
    monkeypatch.setattr(convergence, "timed", lambda work: Block(work(), 3.0))
    assert convergence.build_tutorial(1.1, epochs).work().seconds == 3.0 * convergence.TUTORIAL_EPOCHS
    assert convergence.build_tutorial(0.0, epochs).work().seconds == 3.0, "the goal is reached in the first epoch"


@pytest.mark.run
def test_different_data_are_refused():
    sizes = [f"--data.init_args.{name}_size={size}" for name, size in (("train", 100), ("val", 10), ("test", 10))]
    train = partial(convergence.train, "date_attention_lstm", 3, "val/exact_match", *sizes, steps=2)
    block = train()
    assert 0 <= block.amount <= 1 < block.seconds * 1000
    with pytest.raises(AssertionError, match="the sides train on different data"):
        train(data=SimpleNamespace(fingerprint="other"))


@pytest.mark.run
def test_table_training_records_validations(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "EPOCHS", 3)
    for split, size in zip(tables.SPLITS, (64, 10, 10), strict=True):
        words = (f"{number * 7919:x}" for number in range(size))
        (tmp_path / f"{split}.tsv").write_text("".join(f"{word}\t{word.upper()}\n" for word in words))
    table = tables.Table("capitals", {}, {}, tables.network("monotonic"), "", 96)
    block = tables.run_ours(table, tmp_path, seed=1)
    seconds = [record["seconds"] for record in tables.read_record(tmp_path / "ours_1.jsonl")]
    assert 0 < seconds[0] < seconds[1] < seconds[2] <= block.seconds
    assert 0 <= block.amount <= 1
    assert tables.until(tmp_path / "ours_1.jsonl", 0.0) == (seconds[0], True)
    assert tables.until(tmp_path / "ours_1.jsonl", 1.1) == (seconds[2], False)


@pytest.mark.run
@pytest.mark.parametrize(
    ("build", "settings", "batches"),
    [
        ("build_fit", [], 3),
        ("build_fit", ["--config", "elastic"], 3),
        ("build_fit", ["--trainer.accumulate_grad_batches=2"], 9),
        ("build_bare", [], None),
        ("build_lightning", None, None),
    ],
)
def test_timed_command(build, settings, batches):
    """Batches have 32 dates, each with 10 characters and EOS."""
    arguments = "" if settings is None else ", ".join(["", *map(repr, [*settings, "--data.train_size=200"])])
    program = f"""
from benchmarks import framework
framework.WARM, framework.LOGGED, framework.TIMED = 2, 5, 3
built = framework.{build}("date_attention_lstm"{arguments}{", timed=3" if build == "build_fit" else ""})
block = built.work()
assert block.seconds > 0 and float(built.facts["loss"]) > 0
assert block.amount == {batches or 3} * {32 * 11 if batches else 1}, block
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=FOLDER.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
