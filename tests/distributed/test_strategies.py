"""Strategies: what they refuse, and the sum of micro-batches."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import yaml
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    XLAStrategy,
)

from lightning_tfm.checkpoint.shards import part_major, rank_major
from lightning_tfm.distributed.parallel import broadcast_weights, check_activation_checkpointing, check_tensor_parallel
from lightning_tfm.distributed.strategies import Elastic, ModelParallel, add_to_tree
from lightning_tfm.errors import UserError
from lightning_tfm.fit.cli import SettingsCLI, run
from lightning_tfm.networks import GPT, AttentionLSTM, LinearTransformer, Transformer
from lightning_tfm.tasks.checks import check_limits, check_strategy
from support.experiments import fit
from support.processes import CONTEXT, EXPERIMENTS


@pytest.mark.parametrize("leaves", [1, 2, 8, 16])
def test_a_tree_adds_neighbors_first(leaves):
    values = [torch.randn(5) for _ in range(leaves)]
    partial = []
    for value in values:
        add_to_tree(partial, [value.clone()])
    ((height, (total,)),) = partial
    assert 2**height == leaves

    def add(values):
        half = len(values) // 2
        return add(values[:half]) + add(values[half:]) if half else values[0]

    assert total.equal(add(values))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_micro_batches": 6}, "num_micro_batches must be a power of two, but is 6; try 4"),
        ({"num_micro_batches": 0}, "num_micro_batches must be a power of two, but is 0; try 1"),
    ],
)
def test_invalid_settings_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        Elastic(**settings)


def test_the_number_of_processes_must_divide_the_number_of_micro_batches():
    strategy = Elastic(num_micro_batches=8)
    for world_size in (1, 2, 4, 8):
        strategy.check_processes(world_size)
    for world_size, mend in ((3, "try 2"), (16, "try 8, or set num_micro_batches to 16")):
        with pytest.raises(UserError) as error:
            strategy.check_processes(world_size)
        problem = f"trainer.devices times trainer.num_nodes must divide num_micro_batches (8), but is {world_size}"
        assert str(error.value) == f"{problem}; {mend}"


@pytest.mark.parametrize("name", ["limit_val_batches", "limit_test_batches"])
def test_a_limit_that_depends_on_the_number_of_processes_is_refused(name):
    settings = dict.fromkeys(("limit_val_batches", "limit_test_batches"))
    for limit in (None, 0, 0.0, 1.0):
        check_limits(Elastic(2), SimpleNamespace(**settings | {name: limit}))
    for limit in (1, 3, 0.5):
        limited = SimpleNamespace(**settings | {name: limit})
        for strategy in (Elastic(1), "ddp"):
            check_limits(strategy, limited)
        with pytest.raises(UserError, match=rf"trainer.{name} must be 1.0 or 0 with .*, but is {limit}; leave it out"):
            check_limits(Elastic(2), limited)


def test_the_overlay_has_the_default_number_of_micro_batches():
    overlay = yaml.safe_load((EXPERIMENTS / "elastic.yaml").read_text())["trainer"]["strategy"]
    assert overlay["init_args"]["num_micro_batches"] == Elastic().num_micro_batches


UNKNOWN = [FSDPStrategy, ModelParallelStrategy, DeepSpeedStrategy, XLAStrategy]


def random_network(seed):
    torch.manual_seed(seed)
    return GPT(16, d_model=8, num_heads=2, num_layers=1, max_length=8)


def broadcast(rank, rendezvous, results):
    torch.distributed.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=2)
    network = random_network(rank)
    broadcast_weights(network, torch.device("cpu"))
    results.put({name: weight.tolist() for name, weight in network.named_parameters()})
    torch.distributed.destroy_process_group()


def test_all_processes_start_from_the_weights_of_the_first(tmp_path):
    results = CONTEXT.SimpleQueue()
    processes = [CONTEXT.Process(target=broadcast, args=(rank, tmp_path / "rendezvous", results)) for rank in range(2)]
    for process in processes:
        process.start()
    weights = [results.get() for _ in processes]
    for process in processes:
        process.join()
    expected = {name: weight.tolist() for name, weight in random_network(0).named_parameters()}
    assert weights == [expected, expected]


@pytest.mark.parametrize("network", [AttentionLSTM(11, 8), LinearTransformer(11, 8, 2, 1, max_length=8)])
def test_networks_without_transformer_layers_are_only_sharded(network):
    name = type(network).__name__
    check_tensor_parallel(network, 1)
    with pytest.raises(UserError, match=f"tensor_parallel_size must be 1 for {name}, whose layers cannot be divided"):
        check_tensor_parallel(network, 2)
    with pytest.raises(UserError, match=f"activation_checkpointing must be false for {name}"):
        check_activation_checkpointing(network)


@pytest.mark.parametrize(
    ("network", "setting"),
    [
        (GPT(11, 8, 2, 1, max_length=8, positions="alibi"), "positions alibi"),
        (GPT(11, 8, 2, 1, max_length=8, qk_norm=True), "qk_norm"),
        (Transformer(11, 8, 2, 1, 8, max_length=8, pointer_generator=True), "pointer_generator"),
        (Transformer(11, 8, 2, 1, 8, max_length=8, cross_attention="monotonic"), "cross_attention monotonic"),
    ],
)
def test_what_reads_all_heads_is_not_divided(network, setting):
    with pytest.raises(UserError, match=f"tensor_parallel_size must be 1 for {setting}"):
        check_tensor_parallel(network, 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_heads": 2}, r"num_heads \(2\), but is 4; try 2"),
        ({"num_kv_heads": 2}, r"num_kv_heads \(2\), but is 4; try 2"),
        ({"activation": "swiglu", "d_ff": 14}, r"d_ff \(14\), but is 4; try 2"),
    ],
)
def test_tensor_parallelism_divides_heads_and_hidden_layers(settings, message):
    network = GPT(11, **{"d_model": 8, "num_heads": 4, "num_layers": 1, "max_length": 8} | settings)
    check_tensor_parallel(network, 2)
    with pytest.raises(UserError, match=f"tensor_parallel_size must divide {message}"):
        check_tensor_parallel(network, 4)


@pytest.mark.parametrize("parts", [(1,), (1, 1), (1, 1, 1), (3, 1, 1)])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_each_process_has_its_heads_of_each_part(parts, size):
    """The rows are those of the same heads in the order of one process, in which part_major restores them."""
    heads = [(part, head) for part, number in enumerate(parts) for head in range(4 * number)]
    rows = torch.tensor([(*head, row) for head in heads for row in range(5)])
    divided = rank_major(rows, parts, size)
    for rank, own in enumerate(divided.chunk(size)):
        expected = [rows[rows[:, 0] == part].chunk(size)[rank] for part in range(len(parts))]
        assert own.equal(torch.cat(expected))
    assert part_major(divided, parts, size).equal(rows)


@pytest.mark.parametrize("strategy", ["ddp", "auto", "{class_path: lightning_tfm.distributed.strategies.Elastic}"])
def test_processes_wait_for_minutes(strategy, monkeypatch, tmp_path):
    """A process that is stopped, but not dead, does not keep the others for half an hour."""
    monkeypatch.chdir(tmp_path)
    options = ["--trainer.accelerator=cpu", "--trainer.devices=2", f"--trainer.strategy={strategy}"]
    cli = run([*map(str, fit("gpt", *options))], SettingsCLI)
    assert cli.trainer.strategy._timeout == timedelta(minutes=10)


def test_gloo_is_refused_on_gpus():
    strategy = ModelParallel(process_group_backend="gloo")
    strategy.accelerator = CUDAAccelerator()
    strategy.check_processes(1)
    with pytest.raises(UserError, match="process_group_backend must be nccl on GPUs"):
        strategy.check_processes(2)


@pytest.mark.parametrize(
    ("strategy", "problem"),
    [
        *((cls, f"trainer.strategy must be ddp, .* but is {cls.__name__}$") for cls in UNKNOWN),
        *((DDPStrategy(start_method=method), f"but ddp_{method} copies") for method in ("spawn", "fork")),
    ],
)
def test_an_unknown_strategy_or_one_that_copies_the_process_is_refused(strategy, problem):
    with pytest.raises(UserError, match=problem):
        # some need packages that are not installed
        check_strategy(object.__new__(strategy) if isinstance(strategy, type) else strategy)


@pytest.mark.parametrize("strategy", [DDPStrategy(), SingleDeviceStrategy()])
def test_a_known_strategy_is_accepted(strategy):
    check_strategy(strategy)
