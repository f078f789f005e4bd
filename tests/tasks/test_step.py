"""Mathematics of a training step, compared with float64 on all tokens at once and with torch."""

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from lightning_tfm.data import BatchDivision, stable_hash
from lightning_tfm.distributed.signals import SignalExchange
from lightning_tfm.errors import UserError
from lightning_tfm.tasks.step import TrainingStep, seed_dropout

TOKENS, WIDTH, CLASSES = 48, 5, 7


def make_data(dtype=torch.float64):
    """Return the weights of a linear classifier, inputs and classes."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(WIDTH, CLASSES, dtype=dtype)
    return linear, torch.randn(TOKENS, WIDTH, dtype=dtype), torch.randint(CLASSES, (TOKENS,))


def expected_gradients():
    """Return the mean loss over all tokens and its gradients, in one batch."""
    linear, inputs, classes = make_data()
    loss = F.cross_entropy(linear(inputs), classes)
    return loss.detach(), torch.autograd.grad(loss, linear.parameters())


def simulated_step(processes, batches, num_micro_batches, monkeypatch, copies=1):
    """Return the steps of several processes, which have added all micro-batches and share the sum of their gradients.

    Args:
        processes: the number W of processes that read different data.
        batches: the number A of accumulated batches.
        num_micro_batches: the number of micro-batches of a batch.
        monkeypatch: the fixture that replaces the all-gather.
        copies: the number of processes that read the same data.
    """
    linear, inputs, classes = make_data()
    generator = torch.Generator().manual_seed(1)
    cuts = torch.randperm(TOKENS - 1, generator=generator)[: batches * num_micro_batches - 1].add(1).sort().values
    parts = zip(inputs.tensor_split(cuts), classes.tensor_split(cuts), strict=True)  # of unequal numbers of tokens
    micro_batches = [list(batch) for batch in zip(*[iter(parts)] * num_micro_batches, strict=True)]
    sent, steps, weights = [], [], dict(linear.named_parameters())

    def all_gather(gathered, values, async_op):
        sent.append(values)
        return SimpleNamespace(wait=lambda: [left.copy_(right) for left, right in zip(gathered, sent, strict=True)])

    monkeypatch.setattr(torch.distributed, "all_gather", all_gather)
    for rank in range(processes):
        for _ in range(copies):
            step = TrainingStep(weights, BatchDivision(rank, processes, num_micro_batches), processes * copies)
            for batch in micro_batches:
                for number in step.division.own:
                    assert step.micro_batch == number
                    own_inputs, own_classes = batch[number]
                    loss = F.cross_entropy(linear(own_inputs), own_classes, reduction="sum")
                    if not steps or steps[-1].division.rank != rank:
                        loss.backward()
                    step.add(loss, len(own_classes))
            step.gather()
            steps.append(step)
    return steps, linear


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize(("processes", "batches", "number"), [(1, 1, 1), (1, 4, 1), (1, 3, 4), (2, 3, 2), (2, 2, 4)])
def test_gradients_are_those_of_the_mean_over_all_tokens(processes, batches, number, copies, monkeypatch):
    """Gradients have been averaged over batches and processes, as by Lightning and DDP."""
    loss, gradients = expected_gradients()
    steps, linear = simulated_step(processes, batches, number, monkeypatch, copies)
    divisor = batches * processes
    torch._foreach_div_([weight.grad for weight in linear.parameters()], divisor)
    for step in steps:
        step.reduce(divisor)
        torch.testing.assert_close(step.loss, loss, rtol=1e-14, atol=0)
        torch.testing.assert_close(step.norms, torch.stack([g.norm() for g in gradients]), rtol=1e-13, atol=0)
    assert len({step.loss.item() for step in steps}) == 1, "all processes have the same bits"
    steps[0].divide_and_clip(None)
    for weight, gradient in zip(linear.parameters(), gradients, strict=True):
        torch.testing.assert_close(weight.grad, gradient, rtol=1e-12, atol=1e-14)


def test_an_unfinished_step_is_discarded():
    linear, inputs, classes = make_data()
    step = TrainingStep(dict(linear.named_parameters()))
    step.add(torch.tensor(100.0, dtype=torch.float64), 3)
    step.begin()
    loss = F.cross_entropy(linear(inputs), classes, reduction="sum")
    loss.backward()
    step.add(loss, torch.tensor(TOKENS))
    step.reduce(1)
    torch.testing.assert_close(step.loss, expected_gradients()[0])


def reduced_step(dtype=torch.float64):
    linear, inputs, classes = make_data(dtype)
    step = TrainingStep(dict(linear.named_parameters()))
    loss = F.cross_entropy(linear(inputs).float() if dtype == torch.bfloat16 else linear(inputs), classes)
    loss.backward()
    step.add(loss, 1)
    step.reduce(1)
    return step, linear


@pytest.mark.parametrize("limit", [1e-6, 0.1, 1e3])
@pytest.mark.parametrize("by_value", [False, True])
def test_clipping_is_that_of_torch(limit, by_value):
    step, linear = reduced_step()
    (_, expected), clip = (
        reduced_step(),
        torch.nn.utils.clip_grad_value_ if by_value else torch.nn.utils.clip_grad_norm_,
    )
    clip(expected.parameters(), limit)
    step.divide_and_clip(limit, by_value)
    for weight, other in zip(linear.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(weight.grad, other.grad, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norms_of_half_precision_are_computed_in_float32(dtype):
    step, linear = reduced_step(dtype)
    assert step.norms.dtype == torch.float32
    exact = torch.stack([weight.grad.double().norm() for weight in linear.parameters()])
    torch.testing.assert_close(step.norms.double(), exact, rtol=1e-6, atol=0)


def steps_with(loss, gradient, index):
    """Return a step after four steps, one of which has another loss or another gradient of the bias."""
    linear, inputs, _ = make_data()
    step = TrainingStep({f"network.{name}": weight for name, weight in linear.named_parameters()})
    for number in range(4):
        linear.zero_grad()
        linear(inputs).sum().backward()
        if number == index and gradient is not None:
            linear.bias.grad[3] = gradient
        step.add(torch.tensor(loss if number == index and loss is not None else 2.0, dtype=torch.float64), 1)
        step.reduce(1)
    return step


@pytest.mark.parametrize("index", [0, 2, 3])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_value_that_is_not_finite_is_named_with_its_step(value, index):
    with pytest.raises(UserError, match=f"at step {17 + index} the loss is {value:g}$"):
        steps_with(value, None, index).check_finite(20)
    with pytest.raises(
        UserError, match=rf"at step {17 + index} the loss is 2 and .* 1 weights .*\(first network.bias\)"
    ):
        steps_with(None, value, index).check_finite(20)


def test_steps_are_checked_once():
    step = steps_with(None, None, 0)
    assert step.check_finite(4) == 0
    assert step.check_finite(4) == 0
    assert TrainingStep({}).check_finite(0) == 0


def test_a_gradient_scaler_skips_overflows_but_not_a_loss_that_is_not_finite():
    assert steps_with(None, math.inf, 1).check_finite(20, skips_overflows=True) == 1
    with pytest.raises(UserError, match=r"at step 18 the loss is nan$"):
        steps_with(math.nan, math.inf, 1).check_finite(20, skips_overflows=True)


# Dropout


def test_dropout_depends_on_seed_batch_and_micro_batch_only():
    masks = set()
    for arguments in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)):
        for _ in range(2):
            torch.rand(3)
            seed_dropout(*arguments, torch.device("cpu"))
            masks.add(tuple(F.dropout(torch.ones(100)).tolist()))
    assert len(masks) == 4


@pytest.mark.parametrize("kind", ["cpu", "cuda", "mps", "xpu"])
def test_dropout_is_seeded_on_the_device(kind, monkeypatch):
    seeds = {}
    for other in ("cuda", "mps", "xpu"):
        monkeypatch.setattr(getattr(torch, other), "manual_seed", partial(seeds.__setitem__, other))
    seed_dropout(3, 5, 1, torch.device(kind))
    expected = stable_hash("3 5 1") >> 1
    assert torch.initial_seed() == expected
    assert seeds == ({} if kind == "cpu" else {kind: expected}), "seeding other devices would take time"


# Signals


def test_signals_are_read_one_step_late_without_waiting(monkeypatch):
    """The other process has received 15 after its second step."""
    waits, others = [], iter([0, 15, 15, 15])

    def all_reduce(value, operation, async_op=False):
        assert operation == torch.distributed.ReduceOp.MAX
        value.clamp_(min=next(others))
        return SimpleNamespace(wait=lambda: waits.append(1))

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    exchange, device = SignalExchange(), torch.device("cpu")
    assert [exchange.of_last_step(0, device) for _ in range(3)] == [0, 0, 15]
    assert len(waits) == 2, "not for the last one"
    assert exchange.now(2, device) == 15
