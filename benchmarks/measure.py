"""Measurement of two sides in alternation (A B B A), each in its own process, as a ratio with an interval.

`torch.utils.benchmark` gives the clock. The alternation is ours: the speed of a shared machine drifts within minutes,
the ratio of two neighboring blocks does not.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import socket
import statistics
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.benchmark import timer

ROUNDS = 8
"""Number of rounds of each pair, for which the 90% `interval` has a coverage of 93%."""

THREADS = 2

Facts = dict[str, Any]
"""Properties of a side, to compare with those of the other side."""

Check = Callable[[Facts, Facts], str]
"""Comparison of the facts of both sides: returns what it checked, and raises AssertionError if they differ."""


class Block(NamedTuple):
    """A measured unit of work.

    Attributes:
        amount: the work done, in the unit of the row; for a complete training run, its result.
        seconds: the elapsed seconds.
    """

    amount: float
    seconds: float


class Built(NamedTuple):
    """A side that is ready to be measured: its facts, and a function that does the work once."""

    facts: Facts
    work: Callable[[], Block]


class Side:
    """One of the two sides of a comparison.

    Args:
        build: a module-level function, called once in each process of the side.
        arguments: positional arguments of `build`.
        threads: the number of torch threads in each process.
        processes: the number of processes, each with its rank in LOCAL_RANK as set by Lightning's launcher.
        settings: keyword arguments of `build`.
    """

    def __init__(
        self, build: Callable[..., Built], *arguments: Any, threads: int = THREADS, processes: int = 1, **settings: Any
    ) -> None:
        self.build: Callable[[], Built] = partial(build, *arguments, **settings)
        self.threads, self.processes = threads, processes


@dataclass
class Row:
    """One row of the table of results.

    Attributes:
        name: the name of the measurement, including the peer.
        unit: the unit of `ours` and `peer`.
        target: the bound for `ratio`, or for `ours` without a peer, such as "≥ 2.5 x" or "≤ 4 s"; empty if none.
        ours: our median, or our expected time if `reached` is given.
        peer: the peer's median, or its mean time if `reached` is given; None without a peer.
        ratio: our speed relative to the peer or, with a "≤" target, our cost relative to the peer; None without a peer.
        low: lower end of the 90% interval of `ratio`, or of `ours` without a peer.
        high: upper end of this interval.
        held: whether the target is met; None if there is no target or no measurement.
        reached: how many of our training runs reach the goal, if the row is a time to a goal.
        extrapolated: the source of the peer's figure, if its work was not done in full in each round.
        checked: the properties that were checked to be the same on both sides.
        note: the conditions of the measurement.
        benchmark: the name of the benchmark.
        machine: the machine of the measurement.
        commit: the commit of the measurement, followed by + if files differed from it.
        torch: the version of torch.
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
    reached: str = ""
    extrapolated: str = ""
    checked: str = ""
    note: str = ""
    benchmark: str = ""
    machine: str = ""
    commit: str = ""
    torch: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the row for results.json, with floats rounded to four significant digits, or None if not finite."""
        row = asdict(self)
        for name in ("ours", "peer", "ratio", "low", "high"):
            if row[name] is not None:
                row[name] = float(f"{row[name]:.4g}") if math.isfinite(row[name]) else None
        return row


def interval(values: list[float]) -> tuple[float, float]:
    """Return a distribution-free confidence interval of the median, with a coverage of at least 90%.

    The interval from the k-th smallest to the k-th largest of n values misses the median with twice the probability
    that a binomial variable (n, 1/2) is below k; the largest such k is chosen.

    Note:
        For up to seven values, the interval is their range, whose coverage is below 90% for fewer than five values.
    """
    n, ordered, k = len(values), sorted(values), 0
    while 2 * sum(math.comb(n, heads) for heads in range(k + 1)) / 2**n <= 0.1:
        k += 1
    k = max(0, k - 1)
    return ordered[k], ordered[n - 1 - k]


def reaches(value: float, target: str) -> bool | None:
    """Return whether a value meets a target such as "≥ 2.5 x" or "≤ 4 s"; None if the target is empty."""
    if not target:
        return None
    sign, limit, *_ = target.split()
    return value >= float(limit) if sign == "≥" else value <= float(limit)


def ratio_row(name: str, unit: str, target: str, rounds: list[tuple[float, float]], **fields: str) -> Row:
    """Return a row for the ratio of ours to the peer.

    Args:
        name: the name of the row.
        unit: the unit of the values.
        target: the bound for the ratio; empty if none.
        rounds: pairs (ours, peer) of rates or, with a "≤" target, of costs.
        fields: further fields of the row, such as its note.
    """
    ratios = [ours / peer for ours, peer in rounds]
    low, high = interval(ratios)
    ours, peer = map(statistics.median, zip(*rounds, strict=True))
    ratio = statistics.median(ratios)
    return Row(name, unit, target, ours, peer, ratio, low, high, reaches(ratio, target), **fields)


def absolute_row(name: str, unit: str, target: str, values: list[float], **fields: str) -> Row:
    """Return a row without a peer, for the median of the values of all rounds; see `ratio_row`."""
    low, high = interval(values)
    ours = statistics.median(values)
    return Row(name, unit, target, ours, None, None, low, high, reaches(ours, target), **fields)


DRAWS = 100_000
"""Number of simulated draws for an interval."""


def until_row(
    name: str, target: str, seconds: list[float], reached: list[bool], peer: list[float] | None = None, **fields: str
) -> Row:
    """Return a row for the expected training time until a run reaches the goal.

    A run that misses the goal must be repeated with a different seed, so the expected time is the mean time of a run
    divided by the fraction of runs that reach the goal. The 90% interval combines the errors of both by simulation:
    the error of the mean, or of the ratio of two means, follows Student's t distribution, and the bounds of the
    fraction follow Clopper and Pearson (1934), who allow for misses even if every run has reached the goal. A single
    run has no interval.

    Args:
        name: the name of the row.
        target: the bound for the ratio, or for the expected time without a peer.
        seconds: the seconds of each of our runs, including those that miss the goal.
        reached: whether each of our runs reaches the goal.
        peer: the seconds of the peer's runs, one per round, all of which count as reaching the goal.
        fields: further fields of the row, such as its note.
    """
    ours, theirs = np.array(seconds), np.array(peer or [1.0] * len(seconds))
    n, k = len(ours), sum(reached)
    row = Row(name, "s", target, ours=sum(seconds) / k if k else math.inf, **fields)
    row.reached = f"{k} of {n} seeds" if n > 1 else f"{k} of 1 seed"
    if peer is not None:
        row.peer = statistics.mean(peer)
        row.ratio = row.peer / row.ours
    row.held = reaches(row.ours if row.ratio is None else row.ratio, target)
    if n == 1:
        return row
    deviation = np.std(theirs / theirs.mean() - ours / ours.mean(), ddof=1) / math.sqrt(n)
    draw = np.random.default_rng(0)
    ratios = theirs.mean() / ours.mean() * np.exp(deviation * draw.standard_t(n - 1, DRAWS))
    low = float(np.quantile(ratios * (draw.beta(k, n - k + 1, DRAWS) if k else 0), 0.05))
    high = float(np.quantile(ratios * (draw.beta(k + 1, n - k, DRAWS) if k < n else 1), 0.95))
    if peer is None:  # the ratio is 1 s divided by our time
        low, high = 1 / high, 1 / low if low else math.inf
    row.low, row.high = low, high
    return row


@contextmanager
def pinned() -> Iterator[bool]:
    """Pin this process and its child processes to the same THREADS cores; yield whether the system supports it."""
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


@contextmanager
def started(side: Side, warm: bool = True) -> Iterator[tuple[Facts, Callable[[], Block]]]:
    """Start a side in its own processes; yield its facts and a function that runs its work there once.

    Args:
        side: the side.
        warm: whether to run the work once as a warm-up, which pages in the memory of the first allocations.
    """
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    before = dict(os.environ)
    with socket.socket() as listener:  # finds a free port
        listener.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1])}
    os.environ |= {"OMP_NUM_THREADS": str(side.threads), "WANDB_MODE": "offline"}
    try:
        for rank in range(side.processes):
            pipe, remote = context.Pipe()
            if side.processes > 1:
                os.environ["LOCAL_RANK"] = str(rank)
            process = context.Process(target=_serve, args=(remote, side.build, side.threads))
            process.start()
            remote.close()
            pipes.append(pipe)
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
            process.join(10)  # it exits once its pipe is closed; killing it would leak semaphores
            process.terminate()
            process.join()


def _serve(pipe: Any, build: Callable[[], Built], threads: int) -> None:
    torch.set_num_threads(threads)
    with quiet():
        facts, work = build()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # replaces the handler of our runs, which saves first
        pipe.send(facts)
        while True:
            try:
                pipe.recv()
            except EOFError:
                return
            block = work()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            pipe.send(block)


def in_turn(ours: Callable[[int], Block], peer: Side, seeds: Iterable[int]) -> tuple[Facts, list[Block], list[Block]]:
    """Train both sides once with each seed, the peer first in every other round.

    Returns the facts of the peer, which counts its seeds itself, and the blocks of ours and of the peer.
    """
    pairs = []
    with started(peer, warm=False) as (facts, work):
        for number, seed in enumerate(seeds):
            theirs = work() if number % 2 else None
            pairs.append((ours(seed), theirs or work()))
    our_blocks, peer_blocks = (list(side) for side in zip(*pairs, strict=True))
    return facts, our_blocks, peer_blocks


def compare(ours: Side, peer: Side, same: Check, rounds: int = ROUNDS) -> tuple[list[tuple[float, float]], str]:
    """Measure both sides in the order ours, peer, peer, ours.

    Args:
        ours: our side.
        peer: the peer.
        same: the check that both sides do the same work.
        rounds: the number of rounds.

    Returns:
        The rates (ours, peer) of each round, and the description of the check.
    """
    with ExitStack() as stack:
        (our_facts, our_work), (peer_facts, peer_work) = (stack.enter_context(started(s)) for s in (ours, peer))
        checked = same(our_facts, peer_facts)
        return [one_round(our_work, peer_work) for _ in range(rounds)], checked


def compared(name: str, unit: str, target: str, ours: Side, peer: Side, same: Check, **fields: str) -> Row:
    """Return a row for the ratio of the rates of two sides; see `compare` and `ratio_row`."""
    rounds, checked = compare(ours, peer, same)
    return ratio_row(name, unit, target, rounds, checked=checked, **fields)


def one_round(ours: Callable[[], Block], peer: Callable[[], Block]) -> tuple[float, float]:
    """Run the work of both sides in the order ours, peer, peer, ours, and return their rates."""
    first, second, third, fourth = ours(), peer(), peer(), ours()
    pairs = (first, fourth), (second, third)
    our_rate, peer_rate = (sum(b.amount for b in pair) / sum(b.seconds for b in pair) for pair in pairs)
    return our_rate, peer_rate


def timed(work: Callable[[], float]) -> Block:
    """Measure the time of a function that returns the amount of its work, until an accelerator has finished it."""
    begun = timer()
    amount = work()
    return Block(amount, timer() - begun)


@contextmanager
def quiet() -> Iterator[None]:
    """Discard all output to stdout and stderr, including output of child processes."""
    kept = {stream: os.dup(stream) for stream in (1, 2)}
    with open(os.devnull, "w", encoding="utf-8") as null:
        for stream in kept:
            os.dup2(null.fileno(), stream)
    try:
        yield
    finally:
        sys.stdout.flush()
        for stream, before in kept.items():
            os.dup2(before, stream)
            os.close(before)
