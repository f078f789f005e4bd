"""Planned costs of a step against measured memory and independent counts."""

from __future__ import annotations

import resource
import sys
from functools import partial
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

from lightning_tfm.commands.plan import _cells, costs, planned
from lightning_tfm.commands.step_cost import (
    ddp,
    divide,
    fake_processes,
    largest_batch,
    replicate,
    step_cost,
)
from lightning_tfm.data import Batch, MicroBatches
from lightning_tfm.distributed.parallel import DATA, TENSOR
from lightning_tfm.networks import GPT, AttentionLSTM
from lightning_tfm.tasks import LanguageModel, Seq2SeqModule
from lightning_tfm.tokenization import SymbolTokenizer
from support.experiments import write_task
from support.processes import CONTEXT, EXPERIMENTS, in_process

TOKENIZER = SymbolTokenizer("abcdefghijklmnopqrstuvwxyz012")
V, D, LAYERS, B, T = 32, 64, 3, 8, 48
SMALL = [f"--data.{name}_size=40" for name in ("train", "val", "test", "longer")]


def make(**settings):
    network = GPT(V, **{"d_model": D, "num_layers": LAYERS, "max_length": T, "bias": False, **settings})
    return LanguageModel(network, TOKENIZER)


def texts(rows=B):
    ids = torch.randint(3, V, (rows, T), generator=torch.Generator().manual_seed(1))
    return Batch(ids[:, :0], ids, ids, torch.arange(rows))


def make_lstm():
    return Seq2SeqModule(AttentionLSTM(V, D), TOKENIZER, max_target_length=T)


def pairs():
    ids = texts()
    return Batch(ids.target_in, *ids[1:])


def num_parameters(module):
    return sum(weight.numel() for weight in module.parameters())


def test_flops_of_gpt_are_6nd_and_attention():
    module = make()
    matrices = num_parameters(module) - module.network.positions.weight.numel() - (2 * LAYERS + 1) * D  # norms
    # A token attends to T keys: 2 products in the forward pass, 4 and one recomputed in the backward pass.
    attention = 7 * 2 * T * D * LAYERS
    assert step_cost(make, texts()).flops == B * T * (6 * matrices + attention)


@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # by disabling the kernel
def test_flops_of_an_lstm_are_those_without_its_fused_kernel():
    with torch.backends.mkldnn.flags(enabled=False):
        expected = step_cost(make_lstm, pairs()).flops
    # The kernel also computes the gradient of the initial state.
    assert step_cost(make_lstm, pairs()).flops - expected == 2 * (2 * B * D * 4 * D)


@pytest.mark.parametrize("fused", [True, False])
def test_flops_of_an_lstm_decoder_are_those_of_its_products(fused, monkeypatch):
    monkeypatch.setattr(AttentionLSTM, "_is_fused", lambda network: fused)
    cost = step_cost(make_lstm, pairs())
    # Per token of 48: query, energies and contexts over 48 keys, and gates from context and hidden state.
    decoder = D * D + T * D + T * 2 * D + 3 * D * 4 * D
    encoder = 2 * (2 * D * 4 * D) + 2 * D * D  # two directions, and the keys
    others = D * 4 * D + 3 * D * D + D * V  # gates from the token, and output layers
    assert cost.flops == pytest.approx(6 * B * T * (decoder + encoder + others), rel=0.01)


@pytest.mark.parametrize("number", [1, 2, 4])
def test_state_and_traffic_are_those_of_the_strategy(number):
    size = 4 * num_parameters(make())
    layers = 4 * num_parameters(make().network.layers)
    with fake_processes(number) as mesh:
        copied, sharded = (step_cost(make, texts(), strategy, mesh) for strategy in (ddp, divide))
        elastic = step_cost(make, MicroBatches([texts(2), texts(2)]), mesh=mesh)
    ring = (number - 1) / number
    for cost in (copied, elastic):
        assert (cost.weights, cost.gradients) == (size, size)
        assert cost.optimizer == pytest.approx(2 * size, rel=1e-3)  # two moments, and the step of each weight
        assert cost.sent == 2 * ring * size
    assert sharded.weights == sharded.gradients == size / number
    # The root is gathered once, since it stays gathered until the backward pass; layers are gathered twice.
    assert sharded.sent == ring * (2 * size + layers)
    assert sharded.flops == copied.flops


def test_fsdp2_and_tensor_parallelism_together_share_the_divided_weights():
    with fake_processes(2, tensor_parallel_size=2) as mesh:
        tensor = step_cost(make, texts(), divide, mesh)
    with fake_processes(4, tensor_parallel_size=2) as mesh:
        both = step_cost(make, texts(), divide, mesh)
    norms = 4 * 2 * LAYERS * D  # bytes; on each device
    layers = (4 * num_parameters(make().network.layers) - norms) / 2 + norms
    assert both.weights == both.gradients == tensor.weights / 2
    assert both.flops == tensor.flops
    assert both.sent == tensor.sent + 0.5 * (2 * tensor.weights + layers)


def test_accumulated_batches_are_communicated_once():
    with fake_processes(2) as mesh:
        one, three = (step_cost(make, texts(), ddp, mesh, accumulated=number) for number in (1, 3))
    assert three.flops == 3 * one.flops
    assert three.sent == one.sent


@pytest.mark.parametrize(("strategy", "number", "size"), [(replicate, 1, 1), (divide, 4, 2)])
def test_weights_are_not_allocated(strategy, number, size):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with fake_processes(number, size) as mesh:
        cost = step_cost(lambda: make(d_model=8192), texts(), strategy, mesh)
    allocated = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * (
        1 if sys.platform == "darwin" else 1024
    )
    assert number * cost.memory > 30e9
    assert allocated < 1e9


def test_the_plan_fits_80_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    sizes = [f"--data.{name}=40" for name in ("train_size", "val_size", "test_size", "longer_size", "batch_size")]
    assert in_process(monkeypatch, "plan", "copy_gpt", "--devices", "1", "2", *sizes) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("GPT of 200,064 parameters")
    names = [" ".join(line.split()[: 3 if " x " in line else 2]) for line in lines[-6:]]
    assert names == ["one device", "elastic x 1", "ddp x 2", "elastic x 2", "fsdp x 2", "tensor x 2"]


def test_a_plan_uses_the_settings_of_model_parallelism(monkeypatch, capsys):
    settings = [
        "copy_gpt",
        "--devices",
        "2",
        *SMALL,
    ]
    settings += ["--config", EXPERIMENTS / "model_parallel.yaml"]
    strategy = "--trainer.strategy.init_args"
    activations = {}
    for is_recomputed in ("false", "true"):
        options = [f"{strategy}.tensor_parallel_size=2", f"{strategy}.save_distributed_checkpoint=true"]
        options.append(f"{strategy}.activation_checkpointing={is_recomputed}")
        assert in_process(monkeypatch, "plan", *settings, *options) == 0
        rows = {line[:10]: line.split() for line in capsys.readouterr().out.splitlines()[-4:]}
        activations[is_recomputed] = {name: float(rows[name][9]) for name in ("fsdp x 2  ", "tensor x 2")}
    for name, recomputed in activations["true"].items():
        assert recomputed < 0.95 * activations["false"][name]


@pytest.mark.parametrize("size", [2, 4])
def test_a_plan_of_fsdp2_and_tensor_parallelism_uses_the_number_of_the_settings(size, monkeypatch, capsys):
    settings = ["--config", EXPERIMENTS / "model_parallel.yaml"]
    settings += [f"--trainer.strategy.init_args.tensor_parallel_size={size}"]
    assert in_process(monkeypatch, "plan", "copy_gpt", "--devices", "8", *SMALL, *settings) == 0
    (shown,) = (line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("fsdp+tp x 8"))
    with fake_processes(8, size) as mesh:
        cli = planned(["copy_gpt", *SMALL, *map(str, settings)])
        cost = step_cost(cli.make_module, largest_batch(cli.datamodule, 8 // size), divide, mesh)
    assert " ".join(shown[3:]) == " ".join(_cells(cost))


def test_fsdp2_and_tensor_parallelism_are_planned_where_they_divide_the_devices(monkeypatch, capsys):
    alibi = ["--model.network.positions=alibi", "--model.network.max_length=282"]  # its biases cannot be divided
    for settings in ([], alibi):
        assert in_process(monkeypatch, "plan", "copy_gpt", "--devices", "2", "3", "4", *SMALL, *settings) == 0
        rows = [line.split()[2] for line in capsys.readouterr().out.splitlines() if line.startswith("fsdp+tp")]
        assert rows == ([] if settings else ["4"])


def test_elastic_determinism_is_planned_with_one_micro_batch_per_device_or_those_of_the_overlay(monkeypatch, capsys):
    for settings, planned_for in (([], ["8"]), (["--config", EXPERIMENTS / "elastic.yaml"], [])):
        assert in_process(monkeypatch, "plan", "copy_gpt", "--devices", "3", "8", *SMALL, *settings) == 0
        rows = [line.split()[2] for line in capsys.readouterr().out.splitlines() if line.startswith("elastic")]
        assert rows == planned_for


@pytest.mark.parametrize("setting", ["batch_size=1", "batch_tokens=70"])
def test_a_batch_of_fewer_rows_than_micro_batches_is_planned_without_elastic_determinism(
    setting, tmp_path, monkeypatch, capsys
):
    task = write_task("translation_transformer", tmp_path)
    options = ["--data.batch_tokens=null"] if setting.startswith("batch_size") else []
    assert in_process(monkeypatch, "plan", task, *options, f"--data.{setting}") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("one device")
    assert not any(line.startswith("elastic") for line in lines)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such_experiment"], "'no_such_experiment' must be a YAML file or the name of an experiment"),
        (["copy_gpt", "--devices", "0"], "--devices must be at least 1, but is 0; try 1"),
        (["copy_gpt", "--devices", "two"], "argument --devices: invalid int value: 'two'"),
        (
            ["copy_gpt", "--devices", "65"],
            "at least the number of processes or micro-batches (65), but is 16",
        ),
        (
            ["copy_gpt", "--config", "elastic", "--data.batch_size", "1"],
            "at least the number of processes or micro-batches (2), but is 1",
        ),
        (["tsv_transformer"], "train.tsv"),
        (["copy_gpt", "--model.network.d_modell", "3"], "d_modell"),
        ([], "lightning-tfm plan needs the name of an experiment"),
    ],
)
def test_a_mistake_is_reported_in_one_line(arguments, message, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert in_process(monkeypatch, "plan", *arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def peak(profiler):
    """Return the largest sum of the allocations that torch has recorded, in bytes."""
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


def recorded():
    return profile(activities=[ProfilerActivity.CPU], profile_memory=True)


def measure_experiment(settings, results):
    """Send the planned and the measured peak of three steps of `fit` on the largest batch."""
    torch.set_num_threads(1)
    torch.cuda.is_available = lambda: False  # the memory of a CPU is measured
    cli = planned([*settings, "--trainer.max_steps=3", "--trainer.limit_val_batches=0"])
    by_strategy = dict(costs(cli, [1]))
    cost = by_strategy["elastic x 1" if hasattr(cli.trainer.strategy, "num_micro_batches") else "one device"]
    data = cli.datamodule
    stream, rows = data.training_batches, largest_batch(data).rows

    def repeated(division):
        batches = stream(division)
        batches.batches = lambda number: [rows]
        return batches

    data.training_batches = repeated
    with recorded() as profiler:
        cli.trainer.fit(cli.make_module(), datamodule=data)
    results.put((cost.memory, peak(profiler)))


def measure_strategy(rank, strategy, number, tensor_parallel_size, rendezvous, results):
    """Send the planned and the measured peak of three steps with a strategy on several processes."""
    torch.set_num_threads(1)
    deep = partial(make, num_layers=6)  # the buffers that gloo has not freed yet are a small part then
    if rank == 0:
        with fake_processes(number, tensor_parallel_size) as mesh:
            cost = step_cost(deep, texts(64), strategy, mesh)
    torch.distributed.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=number)
    shape = (number // tensor_parallel_size, tensor_parallel_size)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=(DATA, TENSOR))
    with recorded() as profiler:
        module = deep()
        step = strategy(module, mesh)
        optimizer = module.new_optimizer("32-true")
        for _ in range(3):
            loss = step(texts(64))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if rank == 0:
        results.put((cost.memory, peak(profiler)))
    torch.distributed.destroy_process_group()


def outcome(results, *processes):
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    return results.get()


def measured_experiment(*settings):
    results = CONTEXT.SimpleQueue()
    return outcome(results, CONTEXT.Process(target=measure_experiment, args=(settings, results)))


@pytest.mark.run
@pytest.mark.parametrize(
    "settings",
    [
        ["copy_transformer"],
        ["date_gpt"],
        ["date_gpt", "--config", "elastic"],
        ["date_gpt", "--trainer.precision=bf16-mixed"],
        ["date_attention_lstm"],
    ],
    ids=" ".join,
)
def test_the_peak_of_an_experiment_is_planned_within_10_percent(settings):
    expected, found = measured_experiment("--config", *settings)
    assert expected == pytest.approx(found, rel=0.1)


@pytest.mark.run
@pytest.mark.parametrize(
    ("strategy", "number", "tensor_parallel_size"), [(ddp, 2, 1), (divide, 2, 1), (divide, 2, 2), (divide, 4, 2)]
)
def test_the_peak_of_several_processes_is_planned_within_10_percent(strategy, number, tensor_parallel_size, tmp_path):
    results = CONTEXT.SimpleQueue()
    rendezvous = Path(tmp_path, "rendezvous")
    arguments = [(rank, strategy, number, tensor_parallel_size, rendezvous, results) for rank in range(number)]
    expected, found = outcome(results, *(CONTEXT.Process(target=measure_strategy, args=each) for each in arguments))
    assert expected == pytest.approx(found, rel=0.1)
