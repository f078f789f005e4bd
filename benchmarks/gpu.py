"""Benchmarks on one GPU.

Without a GPU, they raise UserError; the tests run the steps at a small size on a CPU.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain, repeat
from pathlib import Path

import torch
from lightning import Trainer
from torch import Tensor, nn

from benchmarks import peers
from benchmarks.convergence import SEEDS, SHAKESPEARE_FILES, goal_row, require, train_shakespeare
from benchmarks.framework import EXPERIMENTS, run_python
from benchmarks.measure import Built, Facts, Row, Side, absolute_row, compare, ratio_row
from benchmarks.steps import decay_groups, mean_loss, nano_loss, parameters_of, repeated, same_parameters, windows
from benchmarks.texts import BATCH_SIZE, LENGTH, READ, texts_of
from datamodules import Text
from lightning_tfm.callbacks.telemetry import peak_flops
from lightning_tfm.checkpoint import read
from lightning_tfm.comparison.tensors import tensor_difference
from lightning_tfm.data import Batch
from lightning_tfm.distributed.launch import free_address
from lightning_tfm.errors import UserError
from lightning_tfm.layers.losses import token_nll
from lightning_tfm.networks import GPT
from lightning_tfm.runs.record import Run

SHAKESPEARE = {"d_model": 384, "num_heads": 6, "num_layers": 6, "max_length": LENGTH}
GPT2_124M = {"vocab_size": 50_304, "d_model": 768, "num_heads": 12, "num_layers": 12, "max_length": 1024}


def require_gpu() -> None:
    """Raise UserError unless a CUDA GPU is available."""
    if not torch.cuda.is_available():
        raise UserError("there is no GPU")


def flops_per_token(size: dict[str, int], parameters: int) -> float:
    """Return the FLOPs of a training step per token: 6 N + 12 L D T (Chowdhery et al. 2022, appendix B)."""
    weights = parameters - size["max_length"] * size["d_model"]
    return 6 * weights + 12 * size["num_layers"] * size["d_model"] * size["max_length"]


def bf16_step(
    network: nn.Module, forward: Callable[[Batch], Tensor], device: str
) -> Callable[[Sequence[Batch]], Tensor]:
    """Return a training step under bf16 autocast with the fused AdamW.

    Returns:
        A function from the batches of a step, whose gradients are accumulated, to the mean of their losses.
    """
    optimizer = torch.optim.AdamW(decay_groups(network), lr=6e-4, betas=(0.9, 0.95), fused=True)

    def step(batches: Sequence[Batch]) -> Tensor:
        total = torch.zeros((), device=device)
        for batch in batches:
            with torch.autocast(device, torch.bfloat16):
                loss = forward(batch) / len(batches)
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def build_gpt2(
    side: str, size: dict[str, int], batch_size: int, accumulated: int, device: str, steps: int, compiled: bool
) -> Built:
    """Build one side of GPT-2's training step: our GPT, or nanoGPT's formulation with the same weights.

    Args:
        side: "ours" or "nano".
        size: the arguments of the network.
        batch_size: the number of rows of a batch.
        accumulated: the number of batches of a step.
        device: "cuda" or "cpu".
        steps: the number of steps in a block.
        compiled: whether the network and the loss are compiled.
    """
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    network: nn.Module = GPT(**size, bias=False)
    if side == "nano":
        ours, network = network, peers.NanoGPT(**size, bias=False)
        network.take_weights_of(ours)
    network = network.to(device)
    batches = windows(batch_size, size["max_length"], accumulated)
    batches = [Batch(*(part.to(device) for part in batch)) for batch in batches]

    def our_loss(batch: Batch) -> Tensor:
        return token_nll(network(batch.source, batch.target_in), batch.target_out) / batch.target_out.numel()

    forward = partial(nano_loss, network) if side == "nano" else our_loss
    if compiled:  # including the loss, as in nanoGPT
        forward = torch.compile(forward)
    step = bf16_step(network, forward, device)
    losses = [step(batches).item() for _ in range(3)]
    work = repeated(step, [batches], steps, lambda batches: sum(batch.target_in.numel() for batch in batches))
    return Built({"parameters": parameters_of(network), "losses": losses}, work)


def same_training(ours: Facts, peer: Facts) -> str:
    """Check for equal numbers of parameters, and for the same losses in the first steps, within 1% due to bf16."""
    checked = same_parameters(ours, peer)
    torch.testing.assert_close(torch.tensor(ours["losses"]), torch.tensor(peer["losses"]), rtol=1e-2, atol=0)
    return f"{checked}, the same losses in the first {len(ours['losses'])} steps"


def gpt2_124m(full: bool) -> Iterator[Row]:
    """Measure training GPT-2 124M in bf16 and compiled, with half a million tokens per step, as GPT-2 was."""
    require_gpu()
    peak = peak_flops(torch.device("cuda"), half=True)
    if peak is None:
        raise UserError(f"no peak is known for {torch.cuda.get_device_name()}")
    sides = (
        Side(build_gpt2, side, GPT2_124M, batch_size=32, accumulated=16, device="cuda", steps=1, compiled=True)
        for side in ("ours", "nano")
    )
    note = "16 accumulated batches of 32 x 1,024 tokens per step"
    rounds, checked = compare(*sides, same_training)
    name = "GPT-2 124M, bf16, compiled"
    yield ratio_row(f"{name} / nanoGPT's formulation", "tokens/s", "≥ 1 x", rounds, checked=checked, note=note)
    flops = flops_per_token(GPT2_124M, parameters_of(GPT(**GPT2_124M, bias=False)))
    values = [100 * ours * flops / peak for ours, _ in rounds]
    note = f"of {peak / 1e12:.0f} TFLOP/s dense; {note}"
    yield absolute_row(f"{name}: model FLOP utilization", "%", "≥ 45 %", values, note=note)


def tiny_shakespeare(full: bool) -> Iterator[Row]:
    """Measure the seconds until nanoGPT's validation loss on tiny Shakespeare, at the size of its GPU settings."""
    require_gpu()
    require(*SHAKESPEARE_FILES)
    goal, settings = 1.4697, {"steps": 700, "accelerator": "gpu"}
    runs = [train_shakespeare("shakespeare_gpt_gpu", seed, "bf16-mixed", **settings) for seed in SEEDS]
    note = f"700 steps; losses on the whole validation split: {', '.join(f'{run.amount:.4f}' for run in runs)}"
    yield goal_row(f"tiny Shakespeare, 6 x 384, until {goal}", "≤ 60 s", runs, goal, note, is_loss=True)


def build_text(
    side: str, path: Path, size: dict[str, int], batch_size: int, device: str, steps: int, compiled: bool
) -> Built:
    """Build training steps of GPT on batches of a text that are "loaded", or on the first one, "kept" on the device."""
    torch.set_float32_matmul_precision("high")
    trainer = Trainer(accelerator=device, devices=1, barebones=True)
    data = Text(str(path), max_length=size["max_length"], batch_size=batch_size)
    data.trainer = trainer  # pins the memory of batches for a GPU
    data.setup("fit")
    torch.manual_seed(0)
    network = GPT(data.vocab_size, **size, bias=False).to(device)
    forward = partial(mean_loss, network)
    step = bf16_step(network, torch.compile(forward) if compiled else forward, device)
    stream = chain.from_iterable(repeat(data.train_dataloader()))
    batches = ([trainer.strategy.batch_to_device(batch)] for batch in stream)
    first = next(batches)
    losses = [step(first).item() for _ in range(3)]
    work = repeated(step, batches if side == "loaded" else [first], steps, lambda batch: 1)
    return Built({"parameters": parameters_of(network), "losses": losses}, work)


def memory_mapped_text(full: bool) -> Iterator[Row]:
    """Measure steps on a text that is mapped into memory against steps on a batch that stays on the GPU."""
    require_gpu()
    with texts_of(READ) as (path,):
        sides = (
            Side(build_text, side, path, SHAKESPEARE, BATCH_SIZE, device="cuda", steps=100, compiled=True)
            for side in ("loaded", "kept")
        )
        rates, checked = compare(*sides, same_training)
    times = [(1000 / ours, 1000 / peer) for ours, peer in rates]
    name = "GPT on a memory-mapped text / on one batch on the GPU"
    note = f"100 MB, {BATCH_SIZE} windows of {LENGTH} tokens, 6 layers of 384, bf16, compiled"
    yield ratio_row(name, "ms a step", "≤ 1.05 x", times, checked=checked, note=note)


def elastic_weights(processes: int, device: str, *settings: str) -> dict[str, Tensor]:
    """Return the weights of date_gpt after `fit` with elastic determinism in processes that share a device.

    NCCL refuses a GPU that is shared, so each process is a node and communicates by gloo.
    """
    configs = [part for name in ("date_gpt", "elastic") for part in ("--config", str(EXPERIMENTS / f"{name}.yaml"))]
    trainer = [f"accelerator={device}", "devices=1", f"num_nodes={processes}", "deterministic=true"]
    trainer += ["strategy.init_args.process_group_backend=gloo"]
    command = "-m", "lightning_tfm", "fit", *configs, *(f"--trainer.{setting}" for setting in trainer), *settings
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(processes) as pool:
        fit = partial(run_python, Path(folder), *command, **free_address())
        for ended in [pool.submit(fit, NODE_RANK=str(rank)) for rank in range(processes)]:
            ended.result()
        (run,) = Run.below(Path(folder))
        return read(run.checkpoint_folder / Run.LAST)["state_dict"]


def count_different(ours: dict[str, Tensor], peer: dict[str, Tensor]) -> int:
    """Return the number of weights whose bits differ."""
    assert ours.keys() == peer.keys()
    found = [tensor_difference(ours[name], peer[name]) for name in ours]
    return sum(each["differing"] for each in found if each is not None)


def elastic_determinism(full: bool) -> Iterator[Row]:
    """Count the weights of a training on two processes that share the GPU that differ from those on one."""
    require_gpu()
    settings = ["--trainer.max_steps=100", "--trainer.val_check_interval=100", "--trainer.precision=bf16-mixed"]
    settings += ["--model.network.dropout=0.1", "--data.train_size=6000"]
    one, two = (elastic_weights(processes, "cuda", *settings) for processes in (1, 2))
    number = sum(map(torch.numel, one.values()))
    note = f"of {number:,} weights of date_gpt after 100 steps in bf16-mixed, with dropout; gloo"
    name = "elastic determinism, 2 processes on one GPU / 1: weights that differ"
    yield absolute_row(name, "weights", "≤ 0 weights", [count_different(one, two)], note=note)
