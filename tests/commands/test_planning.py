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
from lightning_tfm.commands.step_cost import ddp, divide, fake_processes, largest_batch, replicate, step_cost
from lightning_tfm.data import Batch, MicroBatches
from lightning_tfm.distributed.parallel import DATA, TENSOR
from lightning_tfm.networks import GPT, AttentionLSTM
from lightning_tfm.tasks import LanguageModel, Seq2SeqModule
from lightning_tfm.tokenization import SymbolTokenizer
from support.experiments import write_task
from support.networks import LLAMA, QWEN3
from support.processes import CONTEXT, EXPERIMENTS

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


@pytest.mark.parametrize(
    "settings", [{}, {"d_head": 10}, {"window": 9}, LLAMA, QWEN3], ids=lambda each: ", ".join(each)
)
def test_flops_of_gpt(settings):
    network = make(**settings).network
    embeddings = [network.positions] + [network.embedding] * (network.head.weight is not network.embedding.weight)
    tables = sum(weight.numel() for table in embeddings for weight in table.parameters())
    matrices = sum(weight.numel() for weight in network.parameters() if weight.dim() > 1) - tables
    # A token attends to T keys: 2 products in the forward pass, 4 and one recomputed in the backward pass.
    width = network.layers[0].self_attention.out_proj.in_features
    attention = 7 * 2 * T * width * LAYERS
    assert step_cost(partial(make, **settings), texts()).flops == B * T * (6 * matrices + attention)


@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # by disabling the kernel
def test_flops_of_fused_lstm():
    with torch.backends.mkldnn.flags(enabled=False):
        expected = step_cost(make_lstm, pairs()).flops
    # The kernel also computes the gradient of the initial state.
    assert step_cost(make_lstm, pairs()).flops - expected == 2 * (2 * B * D * 4 * D)


@pytest.mark.parametrize("fused", [True, False])
def test_flops_of_lstm_decoder(fused, monkeypatch):
    monkeypatch.setattr(AttentionLSTM, "_is_fused", lambda network: fused)
    cost = step_cost(make_lstm, pairs())
    # Per token of 48: query, energies and contexts over 48 keys, and gates from context and hidden state.
    decoder = D * D + T * D + T * 2 * D + 3 * D * 4 * D
    encoder = 2 * (2 * D * 4 * D) + 2 * D * D  # two directions, and the keys
    others = D * 4 * D + 3 * D * D + D * V  # gates from the token, and output layers
    assert cost.flops == pytest.approx(6 * B * T * (decoder + encoder + others), rel=0.01)


@pytest.mark.parametrize("number", [1, 2, 4])
def test_state_and_traffic_of_strategies(number):
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


def test_state_and_traffic_of_fsdp2_with_tensor_parallelism():
    with fake_processes(2, tensor_parallel_size=2) as mesh:
        tensor = step_cost(make, texts(), divide, mesh)
    with fake_processes(4, tensor_parallel_size=2) as mesh:
        both = step_cost(make, texts(), divide, mesh)
    norms = 4 * 2 * LAYERS * D  # bytes; on each device
    layers = (4 * num_parameters(make().network.layers) - norms) / 2 + norms
    assert both.weights == both.gradients == tensor.weights / 2
    assert both.flops == tensor.flops
    assert both.sent == tensor.sent + 0.5 * (2 * tensor.weights + layers)


def test_traffic_of_accumulated_batches():
    with fake_processes(2) as mesh:
        one, three = (step_cost(make, texts(), ddp, mesh, accumulated=number) for number in (1, 3))
    assert three.flops == 3 * one.flops
    assert three.sent == one.sent


@pytest.mark.parametrize(("strategy", "number", "size"), [(replicate, 1, 1), (divide, 4, 2)])
def test_weights_are_not_allocated(strategy, number, size):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with fake_processes(number, size) as mesh:
        cost = step_cost(lambda: make(d_model=8192), texts(), strategy, mesh)
    unit = 1 if sys.platform == "darwin" else 1024
    allocated = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit
    assert number * cost.memory > 30e9
    assert allocated < 1e9


@pytest.fixture
def rows(command):
    """Return a function that plans a step on devices, and returns the words of each row by strategy and devices."""

    def rows(*arguments):
        lines = command("plan", "copy_gpt", *SMALL, "--devices", *arguments)[0].splitlines()
        return {(words[0], words[2]): words for words in map(str.split, lines) if words[1:2] == ["x"]}

    return rows


MODEL_PARALLEL = ["--config", EXPERIMENTS / "model_parallel.yaml"]
STRATEGY = "--trainer.strategy.init_args"


def test_plan_fits_80_columns(monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    lines = command("plan", "copy_gpt", "--devices", "1", "2", *SMALL, "--data.batch_size=40")[0].splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("GPT of 200,064 parameters")
    names = [" ".join(line.split()[: 3 if " x " in line else 2]) for line in lines[-6:]]
    assert names == ["one device", "elastic x 1", "ddp x 2", "elastic x 2", "fsdp x 2", "tensor x 2"]


def test_activation_checkpointing_lowers_memory(rows):
    options = [f"{STRATEGY}.tensor_parallel_size=2", f"{STRATEGY}.save_distributed_checkpoint=true"]
    kept, recomputed = (
        rows("2", *MODEL_PARALLEL, *options, f"{STRATEGY}.activation_checkpointing={value}")
        for value in ("false", "true")
    )
    for name in ("fsdp", "tensor"):
        assert float(recomputed[name, "2"][9]) < 0.95 * float(kept[name, "2"][9])


@pytest.mark.parametrize("size", [2, 4])
def test_tensor_parallel_size_is_planned(size, rows):
    settings = [*MODEL_PARALLEL, f"{STRATEGY}.tensor_parallel_size={size}"]
    row = rows("8", *settings)["fsdp+tp", "8"]
    with fake_processes(8, size) as mesh:
        cli = planned(["copy_gpt", *SMALL, *map(str, settings)])
        cost = step_cost(cli.make_module, largest_batch(cli.datamodule, 8 // size), divide, mesh)
    assert " ".join(row[3:]) == " ".join(_cells(cost))


ALIBI = ["--model.network.positions=alibi", "--model.network.max_length=282"]
"""Positions whose biases cannot be divided."""


@pytest.mark.parametrize(
    ("arguments", "planned"),
    [
        (["3", "4", "8"], {"fsdp+tp": ["4", "8"], "elastic": ["4", "8"]}),
        (["3", "8", "--config", EXPERIMENTS / "elastic.yaml", *ALIBI], {"fsdp+tp": [], "elastic": []}),
    ],
)
def test_strategies_that_divide_devices(arguments, planned, rows):
    """Elastic determinism has one micro-batch per device, or the number of the settings."""
    planned_rows = rows(*arguments)
    assert planned == {strategy: [n for name, n in planned_rows if name == strategy] for strategy in planned}


@pytest.mark.parametrize("setting", ["batch_size=1", "batch_tokens=70"])
def test_too_few_rows_for_elastic_plan(setting, tmp_path, command):
    task = write_task("translation_transformer", tmp_path)
    options = ["--data.batch_tokens=null"] if setting.startswith("batch_size") else []
    lines = command("plan", task, *options, f"--data.{setting}")[0].splitlines()
    assert lines[-1].startswith("one device")
    assert not any(line.startswith("elastic") for line in lines)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such_experiment"], "'no_such_experiment' must be a YAML file or the name of an experiment"),
        (["copy_gpt", "--devices", "0"], "--devices must be at least 1, but is 0; try 1"),
        (["copy_gpt", "--devices", "two"], "--devices must be of type int, but is 'two'"),
        (["copy_gpt", "--devices", "65"], "at least the number of processes or micro-batches (65), but is 16"),
        (
            ["copy_gpt", "--config", "elastic", "--data.batch_size", "1"],
            "at least the number of processes or micro-batches (2), but is 1",
        ),
        (["tsv_transformer"], "train.tsv"),
        (["copy_gpt", "--model.network.d_modell", "3"], "d_modell"),
        ([], "lightning-tfm plan needs the name of an experiment"),
    ],
)
def test_errors_are_one_line(arguments, message, command):
    _, error = command("plan", *arguments, status=2)
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
def test_peak_of_experiment_is_planned_within_10_percent(settings):
    results = CONTEXT.SimpleQueue()
    process = CONTEXT.Process(target=measure_experiment, args=(["--config", *settings], results))
    expected, actual = outcome(results, process)
    assert expected == pytest.approx(actual, rel=0.1)


@pytest.mark.run
@pytest.mark.parametrize(
    ("strategy", "number", "tensor_parallel_size"), [(ddp, 2, 1), (divide, 2, 1), (divide, 2, 2), (divide, 4, 2)]
)
def test_peak_of_processes_is_planned_within_10_percent(strategy, number, tensor_parallel_size, tmp_path):
    results = CONTEXT.SimpleQueue()
    rendezvous = Path(tmp_path, "rendezvous")
    arguments = [(rank, strategy, number, tensor_parallel_size, rendezvous, results) for rank in range(number)]
    expected, found = outcome(results, *(CONTEXT.Process(target=measure_strategy, args=each) for each in arguments))
    assert expected == pytest.approx(found, rel=0.1)
