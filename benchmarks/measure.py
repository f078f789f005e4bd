"""Measuring two sides in turn: each in a process of its own, A B B A, as a ratio with its interval."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import socket
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

ROUNDS = 8
"""Of each pair. The narrowest interval between two of so many sorted ratios covers their median in 93 of 100."""

THREADS = 2


class Block(NamedTuple):
    """A piece of work: how much of the unit was done (of a whole training: what it came to), in how many seconds."""

    amount: float
    seconds: float


class Built(NamedTuple):
    """A side that is ready: what it is, for the other to be compared with, and its work, done anew at each call."""

    facts: dict[str, Any]
    work: Callable[[], Block]


@dataclass(frozen=True)
class Side:
    """What is done on one side.

    Args:
        build: called once, in the side's own process; from the top of a module.
        arguments: of `build`.
        threads: of torch, in each process.
        processes: started for it, as Lightning's own launcher would: each finds its number in LOCAL_RANK.
    """

    build: Callable[..., Built]
    arguments: dict[str, Any] = field(default_factory=dict)
    threads: int = THREADS
    processes: int = 1


@dataclass
class Row:
    """One line of the table.

    Attributes:
        name: what is measured, the peer included.
        ours, peer: in `unit`; medians, or expected times where `reached` is given.
        ratio: how many times faster ours is, the median over rounds (of a cost, whose target is a "≤": how many times
            as much); low and high are its 90 % interval. Where there is no peer, ratio is None, and low and high are
            of `ours`.
        target: what was asked for.
        held: whether `ratio` reaches it, or `ours` where there is no peer.
        status: "measured" or "not measured".
        reached: how many of our trainings reach the goal, where the row is a time to a goal.
        extrapolated: what the peer's figure is computed from, where its work was not done whole in each round.
        checked: what was checked to be the same on both sides.
        note: what a reader must know to believe it.
        benchmark: what has measured it.
        commit: at which it did; ends with + where files differed from it.
    """

    name: str
    unit: str
    target: str
    ours: float | None = None
    peer: float | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    held: bool | None = None
    status: str = "not measured"
    reached: str = ""
    extrapolated: str = ""
    checked: str = ""
    note: str = ""
    benchmark: str = ""
    commit: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For results.json: four significant digits, which is more than a shared machine can give; null for never."""
        return {name: _rounded(value) for name, value in asdict(self).items()}


def _rounded(value: Any) -> Any:
    if type(value) is not float:
        return value
    return float(f"{value:.4g}") if math.isfinite(value) else None


def interval(values: list[float]) -> tuple[float, float]:
    """The narrowest pair of sorted values that covers the median with 90 %, whatever the distribution.

    Of n values, the k-th smallest and k-th largest miss the median with twice the chance that fewer than k of n
    coins show heads. Six values at least can tell; of fewer, it is the whole range.
    """
    n, ordered, k = len(values), sorted(values), 0
    while 2 * sum(math.comb(n, heads) for heads in range(k + 1)) / 2**n <= 0.1:
        k += 1
    k = max(0, k - 1)
    return ordered[k], ordered[n - 1 - k]


def reaches(value: float, target: str) -> bool | None:
    """Whether a value is as its target says: '≥ 2.5 x', '≤ 4 s'; None where nothing was asked for."""
    if not target:
        return None
    sign, limit, *_ = target.split()
    return value >= float(limit) if sign == "≥" else value <= float(limit)


def ratio_row(name: str, unit: str, target: str, rounds: list[tuple[float, float]], **known: str) -> Row:
    """A row of rounds (ours, peer): rates, of which more is better, or a cost that a target bounds.

    Args:
        known: the row's note, and what else is known of it.
    """
    ratios = [ours / peer for ours, peer in rounds]
    low, high = interval(ratios)
    ratio = statistics.median(ratios)
    return Row(
        name,
        unit,
        target,
        ours=statistics.median(ours for ours, _ in rounds),
        peer=statistics.median(peer for _, peer in rounds),
        ratio=ratio,
        low=low,
        high=high,
        held=reaches(ratio, target),
        status="measured",
        **known,
    )


def absolute_row(name: str, unit: str, target: str, values: list[float], note: str = "") -> Row:
    """A row without a peer."""
    low, high = interval(values)
    ours = statistics.median(values)
    return Row(
        name, unit, target, ours=ours, low=low, high=high, held=reaches(ours, target), status="measured", note=note
    )


DRAWS = 100_000
"""Random draws that an interval is computed from."""


def until_row(
    name: str, target: str, seconds: list[float], reached: list[bool], peer: list[float] | None = None, **known: str
) -> Row:
    """Return a row of whole trainings, by the expected time until one reaches the goal.

    A training that misses the goal has to be repeated with another seed, so the expected time is the mean time of a
    training over the share that reaches the goal. The 90 % interval takes both from eight seeds: the error of the
    mean, or of the ratio of two means, has Student's distribution, and the share is bounded as by Clopper and Pearson
    (1934), who allow for misses even where every seed has reached the goal.

    Args:
        seconds: of each of our trainings, also of one that misses the goal.
        reached: whether it reaches the goal.
        peer: the seconds of the peer's trainings, round by round. Each counts as one that reaches the goal.
        known: the row's note, and what else is known of it.
    """
    ours, theirs = np.array(seconds), np.array(peer or [1.0] * len(seconds))
    n, k = len(ours), sum(reached)
    times = theirs.mean() / ours.mean()
    deviation = np.std(theirs / theirs.mean() - ours / ours.mean(), ddof=1) / math.sqrt(n)
    draw = np.random.default_rng(0)
    drawn = times * np.exp(deviation * draw.standard_t(n - 1, DRAWS))
    low = float(np.quantile(drawn * (draw.beta(k, n - k + 1, DRAWS) if k else 0), 0.05))
    high = float(np.quantile(drawn * (draw.beta(k + 1, n - k, DRAWS) if k < n else 1), 0.95))
    row = Row(name, "s", target, ours=sum(seconds) / k if k else math.inf, status="measured", **known)
    row.reached = f"{k} of {n} seeds"
    if peer is None:  # `times` is one second over ours
        row.low, row.high = 1 / high, 1 / low if low else math.inf
        row.held = reaches(row.ours, target)
    else:
        row.peer = statistics.mean(peer)
        row.ratio, row.low, row.high = row.peer / row.ours, low, high
        row.held = reaches(row.ratio, target)
    return row


@contextmanager
def pinned() -> Iterator[bool]:
    """Keep this process, and those that it starts, on the same THREADS cores; yield whether the system can do that."""
    if not hasattr(os, "sched_setaffinity"):  # macOS and Windows
        warnings.warn("this system cannot pin processes to cores: timings vary more", stacklevel=3)
        yield False
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[:THREADS])
    try:
        yield True
    finally:
        os.sched_setaffinity(0, cores)


def in_turn(number: int, ours: Callable[[], Block], peer: Callable[[], Block]) -> tuple[Block, Block]:
    """A whole training of each side, the peer's first in every other round."""
    if number % 2:
        theirs = peer()
        return ours(), theirs
    return ours(), peer()


@contextmanager
def started(side: Side, warm: bool = True) -> Iterator[tuple[dict[str, Any], Callable[[], Block]]]:
    """A side in processes of its own: its facts, and a function that does its work there once.

    To warm up, it works once: that pages in what the first allocations need.
    """
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    before = dict(os.environ)
    with socket.socket() as listener:  # a port that is free
        listener.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1])}
    os.environ |= {"OMP_NUM_THREADS": str(side.threads), "WANDB_MODE": "offline"}
    try:
        for rank in range(side.processes):
            ours, theirs = context.Pipe()
            if side.processes > 1:
                os.environ["LOCAL_RANK"] = str(rank)
            process = context.Process(target=_serve, args=(theirs, side.build, side.arguments, side.threads))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
    finally:
        os.environ.clear()
        os.environ |= before

    def work() -> Block:
        for pipe in pipes:
            pipe.send(True)
        blocks = [pipe.recv() for pipe in pipes]
        return Block(sum(block.amount for block in blocks), max(block.seconds for block in blocks))

    try:
        facts = [pipe.recv() for pipe in pipes]
        if warm:
            work()
        yield facts[0], work
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join(10)  # it ends by itself where it waits for work; killed, it would leave semaphores behind
            process.terminate()
            process.join()


def _serve(pipe: Any, build: Callable[..., Built], arguments: dict[str, Any], threads: int) -> None:
    torch.set_num_threads(threads)
    with quiet():
        facts, work = build(**arguments)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a run of ours has meant to save first
        pipe.send(facts)
        while True:
            try:
                pipe.recv()
            except EOFError:
                return
            block = work()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            pipe.send(block)


def compare(
    ours: Side, peer: Side, same: Callable[[dict, dict], str], rounds: int = ROUNDS
) -> tuple[list[tuple[float, float]], str]:
    """Return the rates of both sides, measured in the order ours, peer, peer, ours, and what they have in common.

    Args:
        same: returns what it has checked to be the same on both sides, from their facts; raises AssertionError where
            it is not.
    """
    with ExitStack() as stack:
        (our_facts, our_work), (peer_facts, peer_work) = (stack.enter_context(started(s)) for s in (ours, peer))
        checked = same(our_facts, peer_facts)
        rates = []
        for _ in range(rounds):
            blocks = [our_work(), peer_work(), peer_work(), our_work()]
            pairs = (blocks[0], blocks[3]), (blocks[1], blocks[2])
            rates.append(tuple(sum(b.amount for b in pair) / sum(b.seconds for b in pair) for pair in pairs))
    return rates, checked


def timed(work: Callable[[], float]) -> Block:
    """Does the work, which returns its amount."""
    begun = time.perf_counter()
    amount = work()
    return Block(amount, time.perf_counter() - begun)


@contextmanager
def quiet() -> Iterator[None]:
    """Nothing on the screen, whoever writes: Lightning, W&B, a worker."""
    nothing, kept = os.open(os.devnull, os.O_WRONLY), {stream: os.dup(stream) for stream in (1, 2)}
    try:
        for stream in kept:
            os.dup2(nothing, stream)
        yield
    finally:
        sys.stdout.flush()
        for stream, before in kept.items():
            os.dup2(before, stream)
            os.close(before)
        os.close(nothing)
