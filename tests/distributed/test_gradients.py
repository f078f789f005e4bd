"""Gradients of several processes."""

import os
from functools import partial

import pytest
import torch

from lightning_tfm.distributed.strategies import Elastic, ModelParallel
from support.processes import CONTEXT, ranks
from support.training import MODELS, make_module, make_trainer, small_copy

pytestmark = pytest.mark.run


def join(*processes):
    """Start processes, which must succeed."""
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
        assert process.exitcode == 0


def train_and_test(model, path, environment, **settings):
    """Train for a step, test, and save gradients, weights and metrics."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    data = small_copy()
    torch.manual_seed(0)
    module = make_module(data, model).double()
    trainer = make_trainer(max_steps=1, limit_val_batches=None, precision="64-true", **settings)
    trainer.fit(module, data)
    gradients = [parameter.grad for parameter in module.network.parameters()]
    trainer.test(module, data, verbose=False)
    if trainer.is_global_zero:
        metrics = {name: value.item() for name, value in trainer.callback_metrics.items() if name.startswith("test")}
        torch.save((gradients, module.network.state_dict(), metrics), path)


@pytest.mark.parametrize("model", MODELS)
def test_two_processes_train_and_test_as_one(model, tmp_path):
    results = []
    for environments, settings in (([{}], {}), (ranks(), {"devices": 2, "strategy": "ddp"})):
        path = tmp_path / f"{len(environments)}.pt"
        arguments = ((model, path, environment) for environment in environments)
        join(*(CONTEXT.Process(target=train_and_test, args=args, kwargs=settings) for args in arguments))
        results.append(torch.load(path, weights_only=True))
    (gradients, weights, metrics), (their_gradients, their_weights, their_metrics) = results
    for actual, expected in zip(gradients, their_gradients, strict=True):
        torch.testing.assert_close(
            actual, expected, atol=1e-12, rtol=1e-10
        )  # 1 x 64 and 2 x 32 rows of unequal lengths
    for name, weight in weights.items():
        torch.testing.assert_close(weight, their_weights[name], atol=1e-9, rtol=1e-8)
    assert metrics == pytest.approx(their_metrics, abs=1e-5)
    assert {"test/exact_match", "test/longer/exact_match"} <= set(metrics)


def train_epochs(path, environment, settings):
    """Train for two epochs of 4 batches, and save the weights, the last loss and the number of steps."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    data = small_copy(batch_size=16)
    torch.manual_seed(0)
    module = make_module(data, optimizer=partial(torch.optim.SGD, lr=0.1))
    make_trainer(max_steps=-1, max_epochs=2, **settings).fit(module, data)
    whole = [getattr(weight, "full_tensor", lambda weight=weight: weight)() for weight in module.parameters()]
    torch.save(([weight.detach() for weight in whole], module.step.loss, module.global_step), path)


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"accumulate_grad_batches": 3}, 4),
        ({"accumulate_grad_batches": 2, "limit_train_batches": 1}, 2),
        ({"accumulate_grad_batches": 2, "limit_train_batches": 3}, 4),
    ],
    ids=["rest", "limit", "limited rest"],
)
@pytest.mark.parametrize("strategy", ["ddp", Elastic(4), ModelParallel()], ids=["DDP", "Elastic", "FSDP2"])
def test_processes_have_equal_weights_after_steps_of_fewer_batches(strategy, settings, steps, tmp_path):
    paths = [tmp_path / f"{rank}.pt" for rank in range(3)]
    runs = [({}, settings)]
    runs += [(environment, settings | {"devices": 2, "strategy": strategy}) for environment in ranks()]
    join(*(CONTEXT.Process(target=train_epochs, args=(path, *args)) for path, args in zip(paths, runs, strict=True)))
    one, first, second = (torch.load(path, weights_only=True) for path in paths)
    assert one[2] == first[2] == second[2] == steps
    assert all(map(torch.equal, first[0], second[0]))
    torch.testing.assert_close(first[:2], one[:2], atol=1e-6, rtol=1e-5)
