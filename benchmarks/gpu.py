"""Benchmarks on one GPU.

Without a GPU, their rows have the status "not measured"; the tests run as much of them as possible on a CPU.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import peers
from benchmarks.measure import ROUNDS, Block, Built, Row, Side, absolute_row, compare, ratio_row, started, until_row
from benchmarks.steps import decay_groups, parameters_of, same_parameters, windows
from datamodules.text import FILES
from lightning_tfm.callbacks.telemetry import peak_flops
from lightning_tfm.data import Batch, resolve_path
from lightning_tfm.errors import UserError
from lightning_tfm.inference.decoding import State, Step
from lightning_tfm.layers.losses import token_nll
from lightning_tfm.networks import GPT, AttentionLSTM
from lightning_tfm.optimizers import LRSchedule, Muon, parameter_groups
from lightning_tfm.tokenization import BOS

GPT2_124M = {"vocab_size": 50_304, "d_model": 768, "num_heads": 12, "num_layers": 12, "max_length": 1024}
SHAKESPEARE = {"d_model": 384, "num_heads": 6, "num_layers": 6, "max_length": 256}


def has_gpu() -> bool:
    """Return whether a CUDA GPU is available, which the benchmarks of this module require."""
    return torch.cuda.is_available()


def flops_per_token(size: dict[str, int], parameters: int) -> float:
    """Return the FLOPs of a training step per token: 6 N + 12 L D T (Chowdhery et al. 2022, appendix B).

    Args:
        size: the arguments of the GPT, with num_layers L, d_model D and max_length T.
        parameters: the number of parameters; N excludes the positions.
    """
    weights = parameters - size["max_length"] * size["d_model"]
    return 6 * weights + 12 * size["num_layers"] * size["d_model"] * size["max_length"]


def synchronize(device: str) -> None:
    """Wait for all pending work of the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def bf16_step(
    network: nn.Module, forward: Callable[[Batch], Tensor], device: str
) -> Callable[[Sequence[Batch]], Tensor]:
    """Return a training step under bf16 autocast with the fused AdamW.

    Args:
        network: the network.
        forward: a function from a batch to the loss.
        device: "cuda" or "cpu".

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
        theirs = peers.NanoGPT(**size, bias=False)
        theirs.take_weights_of(network)
        network = theirs
    network = network.to(device)
    batches = windows(batch_size, size["max_length"], accumulated)
    batches = [Batch(*(part.to(device) for part in batch)) for batch in batches]

    def ours(batch: Batch) -> Tensor:
        return token_nll(network(batch.source, batch.target_in), batch.target_out) / batch.target_out.numel()

    def nano(batch: Batch) -> Tensor:
        logits = network(batch.target_in)
        return F.cross_entropy(logits.view(-1, logits.size(-1)), batch.target_out.reshape(-1), ignore_index=-1)

    forward = nano if side == "nano" else ours
    if compiled:  # including the loss, as in nanoGPT
        forward = torch.compile(forward)
    step = bf16_step(network, forward, device)
    losses = [step(batches).item() for _ in range(3)]

    def work() -> Block:
        synchronize(device)
        begun = time.perf_counter()
        for _ in range(steps):
            step(batches)
        synchronize(device)
        return Block(steps * accumulated * batches[0].target_in.numel(), time.perf_counter() - begun)

    return Built({"parameters": parameters_of(network), "losses": losses}, work)


def same_training(ours: dict[str, Any], peer: dict[str, Any]) -> str:
    """Check for equal numbers of parameters, and for the same losses in the first steps, within 1 % due to bf16."""
    checked = same_parameters(ours, peer)
    torch.testing.assert_close(torch.tensor(ours["losses"]), torch.tensor(peer["losses"]), rtol=1e-2, atol=0)
    return f"{checked}, the same losses in the first {len(ours['losses'])} steps"


def gpt2_124m(full: bool) -> Iterator[Row]:
    """Measure training GPT-2 124M in bf16 and compiled, with half a million tokens per step, as GPT-2 was."""
    name, target = "GPT-2 124M, bf16, compiled / nanoGPT's formulation", "≥ 1 x"
    used, share = "GPT-2 124M, bf16, compiled: model FLOP utilization", "≥ 45 %"
    if not has_gpu():
        yield Row(name, "tokens/s", target, note="no GPU")
        yield Row(used, "%", share, note="no GPU")
        return
    peak = peak_flops(torch.device("cuda"), half=True)
    arguments = {"size": GPT2_124M, "batch_size": 32, "accumulated": 16, "device": "cuda", "steps": 1, "compiled": True}
    note = "16 accumulated batches of 32 x 1,024 tokens per step"
    rounds, checked = compare(
        Side(build_gpt2, {"side": "ours", **arguments}), Side(build_gpt2, {"side": "nano", **arguments}), same_training
    )
    yield ratio_row(name, "tokens/s", target, rounds, checked=checked, note=note)
    if peak is None:
        yield Row(used, "%", share, note=f"no peak is known for {torch.cuda.get_device_name()}")
        return
    flops = flops_per_token(GPT2_124M, parameters_of(GPT(**GPT2_124M, bias=False)))
    values = [100 * ours * flops / peak for ours, _ in rounds]
    yield absolute_row(used, "%", share, values, f"of {peak / 1e12:.0f} TFLOP/s dense; {note}")


def text_windows(text: Tensor, length: int, batch_size: int, generator: torch.Generator) -> Batch:
    """Draw a batch of windows (B, T) of a text.

    Args:
        text: the ids of the text, (N).
        length: the length T of a window.
        batch_size: the number B of windows.
        generator: the random number generator.
    """
    starts = torch.randint(len(text) - length, (batch_size, 1), generator=generator).to(text.device)
    rows = text[starts + torch.arange(length + 1, device=text.device)]
    return Batch(rows.new_empty(batch_size, 0), rows[:, :-1], rows[:, 1:], torch.arange(batch_size))


@torch.no_grad()
def whole_loss(network: GPT, text: Tensor, length: int, device: str) -> float:
    """Return the mean loss per token of a text over consecutive windows, dropping an incomplete last window.

    Args:
        network: the network.
        text: the ids of the text, (N).
        length: the length of a window.
        device: "cuda" or "cpu".
    """
    network.eval()
    count = (len(text) - 1) // length
    inputs, targets = text[: count * length].view(count, length), text[1 : count * length + 1].view(count, length)
    total = 0.0
    for some, wanted in zip(inputs.split(64), targets.split(64), strict=True):
        with torch.autocast(device, torch.bfloat16):
            total += token_nll(network(some[:, :0], some), wanted).item()
    network.train()
    return total / targets.numel()


def build_shakespeare(path: Path, device: str, size: dict[str, int], goal: float, most_steps: int, every: int) -> Built:
    """Build runs that train a character-level GPT with Muon; each block uses the next seed.

    Args:
        path: the file of the text.
        device: "cuda" or "cpu".
        size: the arguments of the GPT.
        goal: the validation loss at which training stops.
        most_steps: the maximum number of steps.
        every: the number of steps between validations.
    """
    characters = sorted(set(text := path.read_text(encoding="utf-8")))
    ids = torch.tensor([3 + characters.index(character) for character in text], device=device)
    train, val = ids[: int(0.9 * len(ids))], ids[int(0.9 * len(ids)) :]
    seeds = iter(range(11, 1000))

    def work() -> Block:
        seed = next(seeds)
        torch.manual_seed(seed)
        generator = torch.Generator().manual_seed(seed)
        network = GPT(3 + len(characters), **size, dropout=0.2, bias=False, positions="rotary").to(device)
        if device == "cuda":
            network.compile()
        groups = parameter_groups(network, network.head)
        optimizer = Muon(groups, lr=4e-3, muon_lr=8e-3, weight_decay=0.3)
        schedule = LRSchedule(warmup_steps=50, decay="linear").scheduler(optimizer, most_steps)
        seconds, begun, best = 0.0, time.perf_counter(), math.inf
        for number in range(1, most_steps + 1):
            batch = text_windows(train, size["max_length"], 32, generator)
            with torch.autocast(device, torch.bfloat16):
                logits = network(batch.source, batch.target_in)
            (token_nll(logits, batch.target_out) / batch.target_out.numel()).backward()
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if number % every == 0:
                synchronize(device)
                seconds += time.perf_counter() - begun
                best = min(best, whole_loss(network, val, size["max_length"], device))
                if best <= goal:
                    return Block(best, seconds)
                begun = time.perf_counter()
        return Block(best, seconds)

    return Built({"characters": len(characters)}, work)


def tiny_shakespeare(full: bool) -> Iterator[Row]:
    """Measure the seconds until nanoGPT's validation loss on tiny Shakespeare, at the size of its GPU settings."""
    name, target, goal = "tiny Shakespeare, 6 x 384, until 1.4697", "≤ 60 s", 1.4697
    if not has_gpu():
        yield Row(name, "s", target, note="no GPU")
        return
    try:
        path = resolve_path("tinyshakespeare/input.txt", FILES)
    except UserError as error:
        yield Row(name, "s", target, note=str(error))
        return
    arguments = {"path": path, "device": "cuda", "size": SHAKESPEARE, "goal": goal, "most_steps": 700, "every": 50}
    with started(Side(build_shakespeare, arguments), warm=False) as (_, work):
        blocks = [work() for _ in range(ROUNDS)]
    note = f"training without validations; the first run, which compiles, took {blocks[0].seconds:.1f} s; "
    note += f"losses on the whole validation split: {', '.join(f'{block.amount:.4f}' for block in blocks)}"
    reached = [block.amount <= goal for block in blocks]
    yield until_row(name, target, [block.seconds for block in blocks], reached, note=note)


def same_shapes(state: State, other: State) -> bool:
    """Return whether all tensors of two states have the same shapes, which a CUDA graph requires."""
    if isinstance(state, Tensor):
        return state.shape == other.shape
    return len(state) == len(other) and all(map(same_shapes, state, other))


def copy_into(state: State, other: State) -> None:
    """Copy the tensors of the state `other` into `state`, in place."""
    if isinstance(state, Tensor):
        state.copy_(other)
    else:
        for mine, theirs in zip(state, other, strict=True):
            copy_into(mine, theirs)


def clone(state: State) -> State:
    """Return a copy of a state."""
    return state.clone() if isinstance(state, Tensor) else tuple(map(clone, state))


def graphed(step: Step, token: Tensor, state: State) -> Step:
    """Capture a decoding step as a CUDA graph, which launches all its kernels at once.

    Args:
        step: the step.
        token: example tokens (B).
        state: an example state.

    Raises:
        AssertionError: if the step changes the shapes of its state, as a growing KV cache does.
    """
    token, state = token.clone(), clone(state)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            logits, following = step(token, state)
    torch.cuda.current_stream().wait_stream(stream)
    assert same_shapes(state, following), "only a state that keeps its shapes can be replayed"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits, following = step(token, state)

    def replay(new_token: Tensor, new_state: State) -> tuple[Tensor, State]:
        token.copy_(new_token)
        copy_into(state, new_state)
        graph.replay()
        return logits, following

    return replay


def build_steps(side: str, device: str, steps: int) -> Built:
    """Build greedy decoding of 500 random sources with an attention LSTM of the date model's size.

    Args:
        side: "graph", replayed as a CUDA graph, or "eager", launched kernel by kernel.
        device: "cuda" or "cpu".
        steps: the number of decoding steps.
    """
    torch.manual_seed(0)
    network = AttentionLSTM(64, d_model=64).to(device).eval()
    source = torch.randint(3, 64, (500, 20), device=device)
    step = network.decode_step

    @torch.inference_mode()
    def decode_text() -> Tensor:
        state, token, tokens = network.encode(source), torch.full((500,), BOS, device=device), []
        for _ in range(steps):
            logits, state = step(token, state)
            token = logits.argmax(-1)
            tokens.append(token)
        return torch.stack(tokens)

    if side == "graph":
        with torch.inference_mode():
            step = graphed(network.decode_step, torch.full((500,), BOS, device=device), network.encode(source))

    def work() -> Block:
        synchronize(device)
        begun = time.perf_counter()
        decode_text()
        synchronize(device)
        return Block(steps, time.perf_counter() - begun)

    return Built({"tokens": decode_text().cpu()}, work)


def decoding_graphs(full: bool) -> Iterator[Row]:
    """Measure decoding steps of the attention LSTM on a GPU: as a CUDA graph against eager mode."""
    name = "attention LSTM decoding, CUDA graph / eager"
    if not has_gpu():
        yield Row(name, "steps/s", "", note="no GPU")
        return
    arguments = {"device": "cuda", "steps": 200}

    def same(ours: dict[str, Any], peer: dict[str, Any]) -> str:
        assert ours["tokens"].equal(peer["tokens"])
        return "the same tokens"

    rounds, checked = compare(
        Side(build_steps, {"side": "graph", **arguments}), Side(build_steps, {"side": "eager", **arguments}), same
    )
    yield ratio_row(name, "steps/s", "", rounds, checked=checked, note=torch.cuda.get_device_name())
