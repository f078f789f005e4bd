"""Optimizers and schedules of the learning rate."""

import copy
import inspect
import math
from functools import partial

import pytest
import torch

from lightning_tfm import optimizers
from lightning_tfm.networks import GPT, EncoderClassifier
from lightning_tfm.optimizers import (
    HIDDEN_MATRICES,
    AdamW,
    LRSchedule,
    Muon,
    describe_optimizer,
    orthogonalize,
    parameter_groups,
)
from support.training import MODELS


@pytest.mark.parametrize("decay", ["linear", "cosine", "inverse_sqrt", "one_cycle"])
def test_only_the_inverse_square_root_needs_no_number_of_steps(decay):
    schedule = LRSchedule(warmup_steps=2, decay=decay)
    scales = [[schedule.scale(step, total) for step in range(8)] for total in (10, 100)]
    assert schedule.needs_max_steps == (scales[0] != scales[1])


@pytest.mark.parametrize("warmup_steps", [0, 1, 5])
def test_the_inverse_square_root_starts_at_the_peak(warmup_steps):
    schedule = LRSchedule(warmup_steps, "inverse_sqrt")
    assert schedule.scale(max(1, warmup_steps), 100) == 1
    assert schedule.scale(4 * max(1, warmup_steps), 100) == 0.5


def rates(lr, max_steps, number=None, **schedule):
    """Return the learning rates of some steps, by default of all."""
    optimizer = AdamW(torch.nn.Linear(2, 2).parameters(), lr)
    scheduler = LRSchedule(**schedule).scheduler(optimizer, max_steps)
    values = []
    for _ in range(number or max_steps):
        values.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return values


@pytest.mark.parametrize("decay", ["linear", "cosine", "inverse_sqrt", "one_cycle"])
def test_every_schedule_rises_to_its_peak_and_falls(decay):
    values = rates(0.5, 100, warmup_steps=10, decay=decay)
    top = values.index(max(values))
    assert 8 <= top <= 10
    assert max(values) == pytest.approx(0.5, rel=1e-3)
    assert len(rates(0.5, 5, warmup_steps=1, decay=decay)) == 5
    assert all(a < b for a, b in zip(values[:top], values[1 : top + 1], strict=True))
    assert all(a > b for a, b in zip(values[11:], values[12:], strict=False))


def test_schedules_equal_their_formulas():
    cosine = rates(1.0, 20, warmup_steps=4, decay="cosine")
    assert cosine[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert cosine[4:] == pytest.approx([0.5 + 0.5 * math.cos(math.pi * step / 16) for step in range(16)])
    linear = rates(1.0, 20, warmup_steps=4, decay="linear")
    assert linear == pytest.approx([0.25, 0.5, 0.75, 1.0, *(1 - step / 16 for step in range(16))])
    falling = rates(1.0, 100, warmup_steps=4, decay="inverse_sqrt")
    assert falling[4:] == pytest.approx([math.sqrt(4 / step) for step in range(4, 100)])
    assert rates(1.0, 10, decay="cosine")[0] == 1.0
    assert rates(1.0, 2, number=5, warmup_steps=3)[:3] == pytest.approx([1 / 3, 2 / 3, 1]), "ends in its warm-up"


@pytest.mark.parametrize("cls", [AdamW, Muon])
def test_checkpoints_record_all_settings_of_an_optimizer(cls):
    """A resumed run with other settings is refused only if they are recorded."""
    recorded = describe_optimizer(partial(cls, lr=0.5, weight_decay=0.25))["init_args"]
    settings = set(inspect.signature(cls).parameters) - {"params"}
    assert settings <= recorded.keys()
    assert (recorded["lr"], recorded["weight_decay"]) == (0.5, 0.25)


@pytest.mark.parametrize("cls", [AdamW, Muon, torch.optim.SGD])
def test_matrices_decay_and_vectors_do_not(cls):
    network = GPT(11, 8, 2, 1, max_length=8)
    optimizer = cls(parameter_groups(network, network.head), weight_decay=0.3)
    decay = {parameter: group["weight_decay"] for group in optimizer.param_groups for parameter in group["params"]}
    assert set(decay) == set(network.parameters())
    for name, parameter in network.named_parameters():
        assert decay[parameter] == (0.0 if "norm" in name or name.endswith("bias") else 0.3), name


@pytest.mark.parametrize("model", [*MODELS, "classifier"])
def test_muon_steps_are_orthogonal_for_hidden_matrices_and_adamw_otherwise(model):
    """The first step is orthogonal and scaled to that of AdamW (Liu et al. 2025, equation 4)."""
    torch.manual_seed(0)
    make = MODELS | {"classifier": lambda vocab_size: EncoderClassifier(vocab_size, 3, 24)}
    networks = {"muon": make[model](11)}
    networks["adamw"] = copy.deepcopy(networks["muon"])
    gradients = [torch.randn_like(parameter) for parameter in networks["muon"].parameters()]  # of full rank
    for name, network in networks.items():
        make = partial(Muon, muon_lr=0.03) if name == "muon" else AdamW
        optimizer = make(parameter_groups(network, network.head), lr=0.01, weight_decay=0.0)
        before = {name: parameter.clone() for name, parameter in network.named_parameters()}
        for parameter, gradient in zip(network.parameters(), gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
        steps = {name: (parameter - before[name]).detach() for name, parameter in network.named_parameters()}
        networks[name] = steps
    inner = {name for name, step in networks["muon"].items() if step.dim() == 2}
    inner -= {name for name in inner if "embedding" in name or "positions" in name or name.startswith("head")}
    assert inner
    for name, step in networks["muon"].items():
        if name not in inner:
            torch.testing.assert_close(step, networks["adamw"][name], msg=name)
            continue
        singular = torch.linalg.svdvals(step) / (0.03 * 0.2 * math.sqrt(max(step.shape)))
        assert singular.max() < 1.4, name  # after five iterations, most are between 0.7 and 1.2
        assert singular.median() > 0.5, name


def test_muon_matches_torch_within_bfloat16():
    """torch iterates in bfloat16, which has 8 bits of precision."""
    torch.manual_seed(0)
    start = torch.randn(24, 16)
    parameters = [torch.nn.Parameter(start.clone()) for _ in range(2)]
    settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.3}
    optimizers = [
        Muon([{"name": HIDDEN_MATRICES, "params": [parameters[0]]}], **settings),
        torch.optim.Muon([parameters[1]], adjust_lr_fn="match_rms_adamw", **settings),
    ]
    for _ in range(5):
        gradient = torch.randn_like(start)
        for parameter, optimizer in zip(parameters, optimizers, strict=True):
            parameter.grad = gradient.clone()
            optimizer.step()
    steps = [(parameter - start).detach() for parameter in parameters]
    assert (steps[0] - steps[1]).norm() < 0.02 * steps[1].norm()


def newton_schulz(matrix):
    """Iterate as Jordan et al. (2024), in float64."""
    x = matrix.double() / matrix.double().norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
    return x


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize("lowest", [1, 1e-3, 1e-6])
@pytest.mark.parametrize("shape", [(24, 16), (16, 24), (16, 16), (96, 128)])
def test_orthogonalize_equals_newton_schulz_in_float64(shape, lowest, dtype):
    torch.manual_seed(0)
    left, _, right = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    singular = torch.logspace(0, math.log10(lowest), min(shape))
    matrix = (left * singular @ right).to(dtype)
    exact = newton_schulz(matrix)
    atol = 1e-6 if lowest == 1 else 5e-4  # the Gram matrix has the squared condition number
    if dtype == torch.float64:
        atol = 1e-11
    orthogonal = orthogonalize([matrix[None]])[0][0].double()
    torch.testing.assert_close(orthogonal, exact, rtol=0, atol=atol)
    assert torch.linalg.svdvals(orthogonal).max() < 1.3
    symmetric = orthogonalize([matrix[None].double()])[0][0] @ matrix.double().T
    torch.testing.assert_close(symmetric.tril(), symmetric.T.tril())


@pytest.mark.parametrize("limit", [1, 300, optimizers.MAX_STACKED])
def test_muon_updates_each_matrix_as_if_it_were_the_only_one(limit, monkeypatch):
    monkeypatch.setattr(optimizers, "MAX_STACKED", limit)
    torch.manual_seed(0)
    starts = [torch.randn(shape) for shape in [(8, 16), (16, 8), (8, 16), (8, 8), (8, 24), (8, 16)]]
    gradients = [torch.randn_like(start) for start in starts]
    gradients[2] = None
    gradients[4] = torch.zeros(8, 24)

    def updated(numbers):
        matrices = [torch.nn.Parameter(starts[number].clone()) for number in numbers]
        optimizer = Muon([{"name": HIDDEN_MATRICES, "params": matrices}])
        for _ in range(2):
            for matrix, number in zip(matrices, numbers, strict=True):
                matrix.grad = gradients[number]
            optimizer.step()
        return matrices

    together = updated(range(6))
    for number, matrix in enumerate(together):
        torch.testing.assert_close(matrix, updated([number])[0])
    assert torch.equal(together[2], starts[2])
