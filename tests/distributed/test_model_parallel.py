"""FSDP2 and tensor parallelism: a divided network trains as in one process."""

import itertools
import re
from functools import partial

import pytest
import torch

from lightning_tfm.checkpoint import read
from lightning_tfm.errors import UserError
from lightning_tfm.runs.record import Run
from support import networks
from support.equality import equal
from support.experiments import AVERAGED, MUON, TASKS, fit, folder, new_folders, write_gpt2, write_task
from support.marks import soak_except
from support.processes import EXPERIMENTS, TWO_PROCESSES, ranks, start, start_elastic, start_parallel, start_two

pytestmark = pytest.mark.run


LAYOUTS = {
    "one process": start,
    "DDP": start_two,
    "DDP of four": partial(start_two, number=4),
    "FSDP2": partial(start_parallel, 2, 1),
    "FSDP2 of four": partial(start_parallel, 4, 1),
    "tensor parallel": partial(start_parallel, 2, 2),
    "tensor parallel of four": partial(start_parallel, 4, 4),
    "FSDP2 and tensor parallel": partial(start_parallel, 4, 2),
    "checkpointed activations": partial(start_parallel, 2, 1, activation_checkpointing=True),
    "elastic determinism": partial(start_elastic, 2),
}
"""Functions that start a run, by name of the layout."""


TOLERANCE = 1e-5


UNDIVIDED = {"model.init_args.network.init_args.dropout": 0.0, "trainer.max_steps": 24}
"""Settings of runs that are compared with one process; with data parallelism, each process has its own dropout."""


FOUR_HEADS = {"model.init_args.network.init_args.num_heads": 4}
TWO_HEADS = {"model.init_args.network.init_args.num_heads": 2}
LLAMA = {f"model.init_args.network.init_args.{name}": value for name, value in networks.LLAMA.items()} | FOUR_HEADS
DROPOUT = {"model.init_args.network.init_args.dropout": 0.2}
ACCUMULATED = {"trainer.accumulate_grad_batches": 3}
CLIPPED_BY_VALUE = {"trainer.gradient_clip_algorithm": "value", "trainer.gradient_clip_val": 0.01}
WIDE = {"model.init_args.network.init_args.d_model": 64}


VARIANTS = {
    "GPT, DDP": ("gpt", "DDP", TWO_HEADS),
    "Transformer, DDP of four, accumulated": ("transformer", "DDP of four", TWO_HEADS | ACCUMULATED),
    "attention LSTM, DDP of four": ("attention_lstm", "DDP of four", {}),
    "GPT, elastic determinism": ("gpt", "elastic determinism", TWO_HEADS),
    "Transformer, FSDP2 of four, Muon": ("transformer", "FSDP2 of four", TWO_HEADS | MUON),
    "Transformer, tensor parallel of four": ("transformer", "tensor parallel of four", FOUR_HEADS),
    "GPT, FSDP2": ("gpt", "FSDP2", TWO_HEADS),
    "GPT, tensor parallel, dropout": ("gpt", "tensor parallel", TWO_HEADS | DROPOUT),
    "GPT, checkpointed activations": ("gpt", "checkpointed activations", TWO_HEADS),
    "GPT, FSDP2, accumulated": ("gpt", "FSDP2", TWO_HEADS | ACCUMULATED),
    "GPT, FSDP2, Muon": ("gpt", "FSDP2", TWO_HEADS | MUON),
    "GPT of Llama, tensor parallel": ("gpt", "tensor parallel", LLAMA),
    "GPT of Llama, both, Muon": ("gpt", "FSDP2 and tensor parallel", LLAMA | MUON),
    "GPT, both, Muon": ("gpt", "FSDP2 and tensor parallel", TWO_HEADS | MUON),
    "Transformer, both, averaged": ("transformer", "FSDP2 and tensor parallel", TWO_HEADS | AVERAGED),
    "Transformer, tensor parallel, clipped by value": ("transformer", "tensor parallel", TWO_HEADS | CLIPPED_BY_VALUE),
    "attention LSTM, FSDP2": ("attention_lstm", "FSDP2", {}),
}
"""The network, the layout, and the settings of both runs."""

IN_TEST_ALL = {
    "Transformer, DDP of four, accumulated",
    "GPT, elastic determinism",
    "GPT, FSDP2, Muon",
    "GPT, tensor parallel, dropout",
    "GPT, checkpointed activations",
    "GPT of Llama, both, Muon",
    "attention LSTM, FSDP2",
}


@pytest.mark.parametrize("variant", soak_except(IN_TEST_ALL, VARIANTS))
def test_a_run_of_several_processes_equals_one_process(variant, reference, tmp_path):
    model, layout, settings = VARIANTS[variant]
    one = reference(model, **UNDIVIDED | settings)
    child = LAYOUTS[layout](*fit(model, **UNDIVIDED | settings), cwd=tmp_path).finish()
    # the network, the number of parameters and the device
    assert child.out.read_text().splitlines()[0] == (one / "stdout").read_text().splitlines()[0]
    assert_close_runs(folder(tmp_path, model), folder(one, model))


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("gpt", "FSDP2"),
        ("gpt", "tensor parallel"),
        pytest.param("transformer", "FSDP2 and tensor parallel", marks=pytest.mark.soak),
        ("attention_lstm", "FSDP2"),
    ],
)
def test_a_run_in_mixed_precision_is_close_to_one_process(model, layout, reference, tmp_path):
    settings = UNDIVIDED | {"trainer.precision": "bf16-mixed"} | (TWO_HEADS if model != "attention_lstm" else {})
    LAYOUTS[layout](*fit(model, **settings), cwd=tmp_path).finish()
    losses = []
    for cwd in (tmp_path, reference(model, **settings)):
        run = Run(folder(cwd, model))
        losses.append([row["train/loss"] for row in run.metrics() if "train/loss" in row])
        weights = read(run.checkpoint_folder / Run.LAST)["state_dict"].values()
        assert {weight.dtype for weight in weights} == {torch.float32}
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.parametrize(
    "layout",
    soak_except(
        ("DDP", "FSDP2"), ("DDP", "FSDP2", "tensor parallel", "FSDP2 and tensor parallel", "elastic determinism")
    ),
)
def test_nan_in_one_process_ends_all_and_earlier_checkpoints_are_kept(layout, tmp_path):
    fault = {"fault": ("in the loss", 21, "nan"), "faulty_rank": 1}
    child = LAYOUTS[layout](*fit("gpt", **UNDIVIDED | TWO_HEADS), cwd=tmp_path, **fault)
    child.refuse(r"gradients of \d+ weights are not finite")
    content = read(folder(tmp_path, "gpt") / "checkpoints/last.ckpt")
    assert content["global_step"] == (5 if layout == "elastic determinism" else 20)  # with four losses per step
    assert all(weight.isfinite().all() for weight in content["state_dict"].values())


@pytest.mark.parametrize("task", soak_except(("translation_transformer", "text_gpt", "masked_encoder"), TASKS))
def test_a_task_trains_as_in_one_process(task, tmp_path):
    path = write_task(task, tmp_path)
    one, divided = new_folders(tmp_path, "one", "divided")
    arguments = ["fit", "--config", path, "--model.init_args.network.init_args.dropout=0"]
    if "classifier" in task:
        arguments.append("--model.init_args.network.init_args.word_dropout=0")
    layout = {
        "translation_transformer": "FSDP2",
        "translation_attention_lstm": "FSDP2",
        "text_linear_transformer": "FSDP2",
        "masked_encoder": "tensor parallel",  # with data parallelism, each process masks other tokens
    }.get(task, "FSDP2 and tensor parallel")
    for cwd, name in ((one, "one process"), (divided, layout)):
        LAYOUTS[name](*arguments, cwd=cwd).finish()
    assert_close_runs(*(cwd / f"runs/{task}/version_0" for cwd in (divided, one)))


def test_lora_trains_as_in_one_process(tmp_path):
    """Frozen weights are divided, too, and the updates, whose rows are fewer than those of a projection."""
    settings = {"activation": "gelu_tanh", "text_only": True, "positions": "learned", "lora_rank": 2, "dropout": 0}
    settings = {f"model.network.{name}": value for name, value in settings.items()}
    gpt2 = write_gpt2(tmp_path / "gpt2")
    settings |= {"model.pretrained": gpt2, "data.tokenizer_file": gpt2 / "tokenizer.json", "trainer.max_steps": 20}
    arguments = [f"--{name}={str(value).lower()}" for name, value in settings.items()]
    path, (one, divided) = write_task("text_gpt", tmp_path), new_folders(tmp_path, "one", "divided")
    for cwd, layout in ((one, "one process"), (divided, "FSDP2")):
        LAYOUTS[layout]("fit", "--config", path, *arguments, cwd=cwd).finish()
    assert_close_runs(*(cwd / "runs/text_gpt/version_0" for cwd in (divided, one)))


def assert_close_runs(actual_run, expected_run):
    """Assert that two runs have the same weights, losses, predictions and test metrics, within the tolerance.

    Note:
        The keys' biases are left out: a softmax over keys does not depend on them, so their gradients are rounding
        errors, which AdamW scales to steps of the size of the learning rate.
    """
    for row, expected in zip(Run(actual_run).metrics(), Run(expected_run).metrics(), strict=True):
        for log in (row, expected):
            log.pop("trainer/tokens_per_second", None)
        assert row == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE)
    weights, reference = (read(path / "checkpoints/last.ckpt")["state_dict"] for path in (actual_run, expected_run))
    assert list(weights) == list(reference)
    for name, value in reference.items():
        compared = torch.ones_like(value, dtype=torch.bool)
        if name.endswith(("qkv_proj.bias", "kv_proj.bias")):
            parts = 3 if name.endswith("qkv_proj.bias") else 2
            compared.view(parts, -1)[parts - 2] = False
        difference = (weights[name] - value)[compared].abs()
        assert (difference <= TOLERANCE * (1 + value[compared].abs())).all(), (name, difference.max())
    tests = [Run(path).summary.test for path in (actual_run, expected_run)]
    assert tests[0].keys() == tests[1].keys()
    for name, value in tests[1].items():
        assert tests[0][name] == (pytest.approx(value, rel=TOLERANCE) if isinstance(value, float) else value)
    if (expected_run / "predictions.jsonl").is_file():
        for line, expected in zip(Run(actual_run).predictions, Run(expected_run).predictions, strict=True):
            assert line.pop("nll") == pytest.approx(expected.pop("nll"), rel=TOLERANCE)
            assert line == expected


ONE, DDP, FSDP, TENSOR = "one process", "DDP", "FSDP2", "tensor parallel"


CIRCUIT = [ONE, DDP, ONE, FSDP, ONE, TENSOR, DDP, FSDP, DDP, TENSOR, FSDP, TENSOR, ONE]
"""Layouts such that each of the four follows each other one once."""
assert sorted(itertools.pairwise(CIRCUIT)) == sorted(itertools.permutations((ONE, DDP, FSDP, TENSOR), 2))


start_sharded = partial(start_parallel, save_distributed_checkpoint=True)
SHARDED = [partial(start_sharded, *sizes) for sizes in ((2, 1), (4, 2), (2, 2))]
SHARDED += [start, partial(start_sharded, 2, 1), start_two]
"""Layouts of a run whose checkpoints are sharded if they can be."""

SHORT = UNDIVIDED | TWO_HEADS | {"trainer.max_steps": 12}


@pytest.mark.parametrize(
    ("starts", "settings"),
    [
        pytest.param([LAYOUTS[name] for name in CIRCUIT], {}, marks=pytest.mark.soak),
        pytest.param([LAYOUTS[name] for name in CIRCUIT], MUON, marks=pytest.mark.soak),
        (SHARDED, AVERAGED | LLAMA),
    ],
    ids=["AdamW", "Muon", "sharded checkpoints"],
)
def test_a_killed_run_resumes_in_any_other_layout(starts, settings, reference, tmp_path):
    settings = UNDIVIDED | TWO_HEADS | settings | {"trainer.max_steps": 5 * len(starts)}
    arguments = fit("gpt", "--ckpt_path=last", **settings)
    for begin in starts[:-1]:
        begin(*arguments, cwd=tmp_path, fault=("before an update of the weights", 7)).die()
    starts[-1](*arguments, cwd=tmp_path).finish()
    assert_close_runs(folder(tmp_path, "gpt"), folder(reference("gpt", **settings), "gpt"))


def test_a_sharded_checkpoint_is_read_by_all_commands(reference, tmp_path, command):
    one, (divided,) = reference("gpt", **SHORT), new_folders(tmp_path, "divided")
    start_sharded(4, 2, *fit("gpt", **SHORT), cwd=divided).finish()
    assert_close_runs(folder(divided, "gpt"), folder(one, "gpt"))
    saved = folder(divided, "gpt") / "checkpoints"
    names = sorted(path.name for path in saved.iterdir())
    assert names == ["best.ckpt", "best_step_12.shards", "last.ckpt", "last_step_12.shards"]
    assert len(list((saved / "last_step_12.shards").iterdir())) == 4
    assert (saved / "last.ckpt").stat().st_size < (folder(one, "gpt") / "checkpoints/last.ckpt").stat().st_size
    commands = [
        ("export", saved / "best.ckpt", "--format=single", "--output=exported"),
        ("generate", saved / "best.ckpt", "1 2 3"),
        ("generate", "exported/model.ckpt", "1 2 3"),
        ("generate", folder(one, "gpt") / "checkpoints/best.ckpt", "1 2 3"),
        ("runs", divided),
    ]
    _, *answers, _ = (command(*arguments).out.splitlines()[0] for arguments in commands)
    assert len(set(answers)) == 1
    equal(read(tmp_path / "exported/model.ckpt"), read(saved / "best.ckpt"))
    (shard, *_) = (saved / "best_step_12.shards").iterdir()
    shard.write_bytes(shard.read_bytes()[:-1] + b"!")
    with pytest.raises(UserError, match=r"must have all files of best_step_12\.shards, but one is missing or damaged"):
        read(saved / "best.ckpt")


def test_a_kill_while_shards_are_written_keeps_the_checkpoint_before(tmp_path):
    arguments = fit("gpt", "--ckpt_path=last", **SHORT)
    for number, call in enumerate((2, 1), start=1):  # the second start resumes at step 5
        start_sharded(2, 1, *arguments, cwd=tmp_path, fault=("while shards are written", call)).die()
        saved = folder(tmp_path, "gpt") / "checkpoints"
        assert read(saved / "last.ckpt")["global_step"] == 5
        assert len(list(saved.glob("last_step_10*.shards"))) == number, "the next one was begun"
    start_sharded(2, 1, *arguments, cwd=tmp_path).finish()
    assert sorted(path.name for path in saved.glob("*.shards")) == ["best_step_12.shards", "last_step_12.shards"]


@pytest.mark.parametrize(
    "faulty_rank", [pytest.param(None, marks=pytest.mark.soak), 1], ids=["all processes", "one process"]
)
def test_a_full_disk_while_shards_are_written_keeps_the_checkpoint_before(faulty_rank, tmp_path):
    settings, begin = SHORT | WIDE, partial(start_sharded, 2, 1, cwd=tmp_path)
    fault = {"fault": ("while shards are written", 2, "the disk is full"), "faulty_rank": faulty_rank}
    child = begin(*fit("gpt", **settings), **fault)
    child.refuse(
        r"shards 'runs/.*last_step_10\.shards' cannot be written: .*File too large.*; the checkpoint before is"
    )
    saved = folder(tmp_path, "gpt") / "checkpoints"
    assert read(saved / "last.ckpt")["global_step"] == 5
    assert [path.name for path in saved.glob("last*.shards")] == ["last_step_5.shards"]
    begin(*fit("gpt", "--ckpt_path=last", **settings)).finish()
    assert read(saved / "last.ckpt")["global_step"] == 12


@pytest.mark.parametrize("killed", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_a_process_that_is_killed_while_shards_are_written_ends_the_other(killed, tmp_path):
    settings, begin = SHORT, partial(start_sharded, 2, 1, cwd=tmp_path)
    child = begin(*fit("gpt", **settings), fault=("while shards are written", 2), faulty_rank=killed)
    child.wait()
    codes = [process.exitcode for process in (child.process, *child.others)]
    assert codes == ([-9, 1] if killed == 0 else [1, -9])
    printed = (tmp_path / ("stderr_1" if killed == 0 else "stderr")).read_text()
    assert re.match(f"lightning-tfm: error: lost rank {killed} on .*: no answer", printed.splitlines()[-1])
    assert "Traceback" not in printed
    saved = folder(tmp_path, "gpt") / "checkpoints"
    assert read(saved / "last.ckpt")["global_step"] == 5
    begin(*fit("gpt", "--ckpt_path=last", **settings)).finish()
    assert sorted(path.name for path in saved.glob("*.shards")) == ["best_step_12.shards", "last_step_12.shards"]


@pytest.mark.parametrize(
    ("settings", "layouts"),
    [
        pytest.param(FOUR_HEADS, LAYOUTS, marks=pytest.mark.soak),
        ({"model.init_args.network.init_args.cross_attention": "monotonic"}, ["FSDP2"]),  # trained with noise
    ],
)
def test_a_trained_model_is_tested_in_every_layout(settings, layouts, tmp_path):
    start(*fit("transformer", **settings | {"trainer.max_steps": 20}), cwd=tmp_path).finish()
    trained = folder(tmp_path, "transformer")
    _, *arguments = fit("transformer", **settings)
    for number, layout in enumerate(layouts):
        LAYOUTS[layout]("test", *arguments, "--ckpt_path", trained / "checkpoints/best.ckpt", cwd=tmp_path).finish()
        tested = Run(trained.parent / f"test_{number}")
        for line, expected in zip(tested.predictions, Run(trained).predictions, strict=True):
            assert line.pop("nll") == pytest.approx(expected.pop("nll"), rel=TOLERANCE)
            assert line == expected


@pytest.mark.parametrize(
    ("model", "number", "size", "message"),
    [
        ("transformer", 4, 4, "tensor_parallel_size must divide num_heads (2), but is 4; try 2"),
        ("attention_lstm", 2, 2, "tensor_parallel_size must be 1 for AttentionLSTM, whose layers cannot be divided"),
        ("gpt", 3, 2, "num_nodes must be a multiple of tensor_parallel_size (2), but is 3"),
        ("gpt", 1, 0, "tensor_parallel_size must be at least 1, but is 0; try 1"),
    ],
)
def test_a_mistake_ends_all_processes_with_one_line(model, number, size, message, tmp_path):
    start_parallel(number, size, *fit(model), cwd=tmp_path).refuse(message)
    assert not list(tmp_path.glob(f"runs/copy_{model}/*"))


SHARDED_BY_TWO = [
    *("--trainer.accelerator=cpu", "--trainer.devices=2"),
    *("--config", EXPERIMENTS / "model_parallel.yaml"),
]


@pytest.mark.parametrize(
    ("first_has", "named"),
    [
        pytest.param(TWO_PROCESSES, "must reach each other", marks=pytest.mark.soak),
        pytest.param(
            ["--trainer.devices=2", "--config", EXPERIMENTS / "elastic.yaml"],
            "must reach each other",
            marks=pytest.mark.soak,
        ),
        ([*SHARDED_BY_TWO, "--trainer.strategy.init_args.tensor_parallel_size=2"], "trainer.strategy, but rank 0"),
    ],
    ids=["DDP", "elastic determinism", "tensor parallel"],
)
def test_processes_with_different_strategies_are_refused(first_has, named, tmp_path):
    starts = [partial(start, *fit("gpt", *options), cwd=tmp_path) for options in (first_has, SHARDED_BY_TWO)]
    first, second = (begin(**rank) for begin, rank in zip(starts, ranks(), strict=True))
    first.refuse(named)
    second.refuse("the same trainer.strategy, but rank 1 has ModelParallel with tensor_parallel_size 1")
    assert not list(tmp_path.glob("runs/copy_gpt/*"))


def test_a_network_interface_that_does_not_exist_is_one_mistake(tmp_path):
    start_two(*fit("gpt"), cwd=tmp_path, GLOO_SOCKET_IFNAME="nosuch0").refuse("nosuch0")
