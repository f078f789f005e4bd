"""Elastic determinism: the same results, bit for bit, for any number of processes."""

import random
from functools import partial
from importlib.metadata import version

import pytest

from lightning_tfm.errors import UserError
from lightning_tfm.tasks import checks, run_settings
from support.equality import assert_same_run
from support.experiments import AVERAGED, MUON, NETWORKS, STOPPING, TASKS, fit, folder, new_folders, write_task
from support.marks import soak_except
from support.processes import TWO_PROCESSES, ranks, run, start, start_elastic

pytestmark = pytest.mark.run


CLIPPED = {"trainer.gradient_clip_val": 0.1}
ACCUMULATED = {"trainer.accumulate_grad_batches": 2}


VARIANTS = {
    **{model: (model, {}) for model in (*NETWORKS, *TASKS)},
    "accumulated": ("gpt", {"trainer.accumulate_grad_batches": 3}),
    "bfloat16": ("transformer", {"trainer.precision": "bf16-mixed"}),
}


def arguments_of(model, cwd, *options, **settings):
    """Return the arguments of a run of a network, or of a task, whose data are written."""
    if model in NETWORKS:
        return fit(model, *options, **settings)
    settings = {"data.batch_size": 20} | settings
    return ("fit", "--config", write_task(model, cwd), *(f"--{name}={settings[name]}" for name in settings), *options)


@pytest.mark.parametrize(
    "variant",
    soak_except(("gpt", "attention_lstm", "accumulated", "text_gpt", "masked_encoder", "reviews_classifier"), VARIANTS),
)
def test_the_run_is_the_same_for_any_number_of_processes(variant, tmp_path):
    model, settings = VARIANTS[variant]
    arguments = arguments_of(model, tmp_path, **settings)
    one, *others = new_folders(tmp_path, *("124" if model in NETWORKS else "12"))
    for cwd in (one, *others):
        start_elastic(int(cwd.name), *arguments, cwd=cwd).finish()
    for cwd in others:
        assert_same_run(cwd, one, model, same_processes=False)
        for path in (folder(one, model) / name for name in ("predictions.jsonl", "attention/examples.json")):
            if model in NETWORKS or path.exists():
                actual = folder(cwd, model) / path.relative_to(folder(one, model))
                assert actual.read_bytes() == path.read_bytes()


KILLED = {
    "in a training step": 60,
    "before an update of the weights": 15,
    "after an update of the weights": 15,
    "while a checkpoint is written": 300,  # of about 70 for each checkpoint
    "after a checkpoint is in its place": 6,
}
"""Moments of kills, and the most calls before one."""


OPTIMIZERS = {"AdamW": {}, "Muon": AVERAGED | CLIPPED | ACCUMULATED | MUON}
"""Settings of the runs that are killed, by name of the optimizer."""


IN_TEST_ALL = ("gpt", "AdamW")
"""The killed run of `make test-all`; the others are in `make test-soak`."""


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [
        pytest.param(model, optimizer, marks=() if (model, optimizer) == IN_TEST_ALL else pytest.mark.soak)
        for model in (*NETWORKS, "text_gpt")
        for optimizer in OPTIMIZERS
    ],
)
def test_a_killed_run_resumes_bitwise_on_another_number_of_processes(model, optimizer, tmp_path):
    """Kill a run of two processes, with dropout, at four moments, and resume it on one, two or four."""
    whole, killed = new_folders(tmp_path, "whole", "killed")
    settings = OPTIMIZERS[optimizer] | {"trainer.max_steps": 120}
    arguments = arguments_of(model, tmp_path, "--ckpt_path=last", **settings)
    moments = [moment for moment in KILLED if model in NETWORKS or moment != "in a training step"]  # of another module
    start_elastic(2, *arguments, cwd=whole).finish()
    draw = random.Random(f"{model} {settings}")
    for kill, moment in enumerate(draw.sample(moments, 4)):
        fault = (moment, draw.randint(1, KILLED[moment]))
        start_elastic(draw.choice((1, 4)) if kill % 2 else 2, *arguments, cwd=killed, fault=fault).die()
    start_elastic(4, *arguments, cwd=killed).finish()
    assert_same_run(killed, whole, model, rows_lost=4, same_processes=False)


def test_one_micro_batch_gives_the_bits_of_an_ordinary_run(reference, tmp_path):
    start_elastic(1, *fit("gpt"), cwd=tmp_path, num_micro_batches=1).finish()
    assert_same_run(tmp_path, reference("gpt"), "gpt")


def test_a_run_keeps_its_number_of_micro_batches(tmp_path):
    start_elastic(1, *fit("gpt"), cwd=tmp_path, fault=("before an update of the weights", 20)).die()
    arguments = fit("gpt", "--ckpt_path=last")
    for value, begin in {"4": partial(start_elastic, 1, num_micro_batches=4), "None": start}.items():
        begin(*arguments, cwd=tmp_path).refuse(f"(8), but is {value};")


def test_a_message_names_what_else_the_bits_depend_on(tmp_path):
    arguments = fit("gpt", "--ckpt_path=last")
    for number, threads, message in ((2, 1, ""), (1, 1, ""), (1, 2, "other threads (2, was 1): results may")):
        fault = ("before an update of the weights", 20)
        child = start_elastic(number, *arguments, f"--num_threads={threads}", cwd=tmp_path, fault=fault)
        assert child.wait() == -9
        printed = child.err.read_text()
        assert message in printed
        assert ("resumed with other" in printed) is bool(message)


@pytest.fixture
def rank_1(monkeypatch, command):
    """Start a run as rank 0, and return a function that starts it as rank 1, with options, and returns its error."""
    gathered = []

    def all_gather_list(values):
        gathered.extend(values)
        if len(gathered) == 1:
            raise UserError("rank 0 waits")
        return gathered

    monkeypatch.setattr(checks, "all_gather_list", all_gather_list)
    command(*fit("gpt"), status=2)
    return lambda *options: command(*fit("gpt", *options), status=2).err


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--seed_everything=2", "the same seed_everything, but rank 0 has 1 and rank 1 has 2"),
        ("--model.init_args.optimizer.init_args.lr=0.5", "lr, but rank 0 has 0.003 and rank 1 has 0.5"),
        ("--trainer.gradient_clip_val=0.5", "trainer.gradient_clip_val, but rank 0 has 1.0 and rank 1 has 0.5"),
        ("--data.init_args.train_size=290", "the same train data, but rank 0 has"),
        ("--data.init_args.batch_size=20", "the same batch_size, but rank 0 has 15 and rank 1 has 20"),
        ("--trainer.val_check_interval=6", "the same trainer.val_check_interval, but rank 0 has 12 and rank 1 has 6"),
        ("--checkpoint.every_n_train_steps=3", "the same checkpoint.every_n_train_steps, but rank 0 has 5 and rank 1"),
        (f"--trainer.callbacks={STOPPING % 'val/loss'}", 'but rank 0 has [] and rank 1 has ["EarlyStopping{'),
    ],
)
def test_processes_with_different_settings_are_refused(option, message, rank_1):
    assert message in rank_1(option)


@pytest.mark.parametrize("package", run_settings.PACKAGES)
def test_processes_with_different_versions_are_refused(package, rank_1, monkeypatch):
    monkeypatch.setattr(run_settings, "version", lambda name: "0.0.1" if name == package else version(name))
    assert f"the same version of {package}, but rank 0 has {version(package)} and rank 1 has 0.0.1" in rank_1()


@pytest.mark.parametrize(
    "strategy", soak_except(("ddp",), ("ddp", "{class_path: lightning_tfm.distributed.strategies.ModelParallel}"))
)
def test_a_process_without_the_checkpoint_of_the_others_is_refused(strategy, tmp_path):
    """The processes of two machines resume a run, whose folder is on only one of them."""
    folders = new_folders(tmp_path, "one", "other")
    run(*fit("gpt"), cwd=folders[0], fault=("after a validation", 2)).die()
    resumed = fit("gpt", *TWO_PROCESSES, f"--trainer.strategy={strategy}", "--ckpt_path=last")
    for child in [start(*resumed, cwd=cwd, **rank) for cwd, rank in zip(folders, ranks(), strict=True)]:
        child.refuse("the same step to resume, but rank 0 has 12 and rank 1 has None")


@pytest.mark.parametrize(
    ("number", "option", "message"),
    [
        (3, "--data.batch_size=15", "num_nodes must divide num_micro_batches (8), but is 3;"),
        (2, "--data.batch_size=7", "batch_size must be at least the number of processes or micro-batches (8)"),
        pytest.param(
            2,
            "--trainer.limit_val_batches=3",
            "trainer.limit_val_batches must be 1.0 or 0 with lightning_tfm.",
            marks=pytest.mark.soak,
        ),
        pytest.param(
            2,
            "--data.test_size=7",
            "test must hold at least one example for each of 8 processes or micro-batches",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_a_mistake_ends_all_processes_with_one_line(number, option, message, tmp_path):
    start_elastic(number, *fit("gpt", option), cwd=tmp_path).refuse(message)
    assert not list(tmp_path.glob("runs/copy_gpt/*"))
