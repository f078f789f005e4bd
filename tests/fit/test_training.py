"""Gradients, schedules and metrics of the LightningModule: accumulated, with two processes and in bf16."""

from __future__ import annotations

import copy
import csv
import inspect
import itertools
import math
import os
import random
import re
from collections import defaultdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from torchmetrics.functional.text import edit_distance
from tqdm import tqdm

from datamodules import Copy
from lightning_tfm import optimizers
from lightning_tfm.callbacks import progress
from lightning_tfm.callbacks.attention_logger import predicted_examples
from lightning_tfm.callbacks.predictions import Predictions
from lightning_tfm.callbacks.telemetry import Telemetry, peak_flops, step_flops
from lightning_tfm.data import Batch, LengthGroupedSampler, Pair, PairDataModule
from lightning_tfm.distributed.strategies import Elastic, ModelParallel
from lightning_tfm.errors import UserError
from lightning_tfm.layers.losses import token_nll
from lightning_tfm.networks import GPT, AttentionLSTM, EncoderClassifier, Seq2SeqNetwork, Transformer
from lightning_tfm.optimizers import (
    HIDDEN_MATRICES,
    AdamW,
    LRSchedule,
    Muon,
    describe_optimizer,
    orthogonalize,
    parameter_groups,
)
from lightning_tfm.tasks import Seq2SeqModule
from lightning_tfm.tasks.evaluation import test_prefix as prefix_of
from lightning_tfm.tasks.metrics import edit_distances
from lightning_tfm.tokenization import (
    EOS,
    NUM_SPECIAL,
    PAD,
    UNKNOWN,
    SubwordTokenizer,
    SymbolTokenizer,
    pad_sequences,
    train_tokenizer,
)
from support.data import DATA
from support.processes import CONTEXT, ranks

MODELS = {
    "transformer": lambda vocab_size: Transformer(vocab_size, 16, 2, 1, 32, dropout=0.0, max_length=24),
    "gpt": lambda vocab_size: GPT(vocab_size, 16, 2, 1, max_length=48),
    "attention_lstm": lambda vocab_size: AttentionLSTM(vocab_size, 16),
}


def small_copy(**settings):
    return Copy(**{"train_size": 64, "val_size": 10, "test_size": 10, "longer_size": 10, "batch_size": 64} | settings)


def make_module(data, model="transformer", **settings):
    return Seq2SeqModule(MODELS[model](data.vocab_size), data.tokenizer, data.max_target_length, **settings)


def make_trainer(**settings):
    return lightning.Trainer(
        **{
            "accelerator": "cpu",
            "max_steps": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "limit_val_batches": 0,
        }
        | settings
    )


def gradients_of_a_step(data, module, **settings):
    """Return the gradients that the optimizer used, which are zeroed before a step, not after it."""
    make_trainer(**settings).fit(module, data)
    return [parameter.grad for parameter in module.network.parameters()]


@pytest.mark.parametrize("model", MODELS)
def test_gradients_are_the_mean_over_tokens_for_any_accumulation(model):
    """One batch of 64 and 4 accumulated batches of 16 with unequal lengths equal the definition."""
    data = small_copy()
    torch.manual_seed(0)
    module = make_module(data, model).double()
    twin = copy.deepcopy(module)
    data.setup("fit")
    (batch,) = data.train_dataloader()
    logits = twin.network(batch.source, batch.target_in)
    tokens = (batch.target_out != PAD).sum()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.target_out.flatten(), reduction="none")
    expected = torch.autograd.grad(
        (loss * (batch.target_out != PAD).flatten()).sum() / tokens, twin.network.parameters()
    )

    whole = gradients_of_a_step(data, copy.deepcopy(module), precision="64-true")
    quarters = gradients_of_a_step(
        small_copy(batch_size=16), copy.deepcopy(module), precision="64-true", accumulate_grad_batches=4
    )
    for ours, cut, right in zip(whole, quarters, expected, strict=True):
        torch.testing.assert_close(ours, right, atol=1e-12, rtol=1e-10)
        torch.testing.assert_close(cut, right, atol=1e-12, rtol=1e-10)


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
@pytest.mark.run
def test_two_processes_train_and_test_as_one(model, tmp_path):
    results = []
    for environments, settings in (([{}], {}), (ranks(), {"devices": 2, "strategy": "ddp"})):
        path = tmp_path / f"{len(environments)}.pt"
        processes = [
            CONTEXT.Process(target=train_and_test, args=(model, path, environment), kwargs=settings)
            for environment in environments
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(240)
            assert process.exitcode == 0
        results.append(torch.load(path, weights_only=True))
    (gradients, weights, metrics), (their_gradients, their_weights, their_metrics) = results
    for ours, theirs in zip(gradients, their_gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-10)  # 1 x 64 and 2 x 32 rows of unequal lengths
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
@pytest.mark.run
def test_processes_have_equal_weights_after_steps_of_fewer_batches(strategy, settings, steps, tmp_path):
    paths = [tmp_path / f"{rank}.pt" for rank in range(3)]
    runs = [({}, settings)]
    runs += [(environment, settings | {"devices": 2, "strategy": strategy}) for environment in ranks()]
    processes = [
        CONTEXT.Process(target=train_epochs, args=(path, *arguments))
        for path, arguments in zip(paths, runs, strict=True)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
        assert process.exitcode == 0
    one, first, second = (torch.load(path, weights_only=True) for path in paths)
    assert one[2] == first[2] == second[2] == steps
    assert all(map(torch.equal, first[0], second[0]))
    torch.testing.assert_close(first[:2], one[:2], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("model", MODELS)
def test_bf16_mixed_trains_on_a_cpu(model):
    data = small_copy(train_size=1600, batch_size=16)
    torch.manual_seed(0)
    module = make_module(data, model, optimizer=partial(AdamW, lr=1e-2))
    trainer = make_trainer(precision="bf16-mixed", max_steps=100, gradient_clip_val=1.0, limit_val_batches=None)
    losses = []

    class Losses(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            losses.append(outputs["loss"].item() / (batch.target_out != PAD).sum().item())

    trainer.callbacks.append(Losses())
    trainer.fit(module, data)
    assert all(map(math.isfinite, losses))
    assert sum(losses[-5:]) < 0.92 * sum(losses[:5])
    assert all(parameter.dtype == torch.float32 for parameter in module.parameters())


def test_the_logged_loss_is_that_of_the_whole_step():
    """Compare with the mean over the tokens of 4 accumulated batches, with label smoothing."""
    data = small_copy(batch_size=16)
    module = make_module(data, label_smoothing=0.1)
    data.setup("fit")
    batches = list(data.train_dataloader())
    sums = [token_nll(module.network(b.source, b.target_in), b.target_out, 0.1).item() for b in batches]
    tokens = [(b.target_out != PAD).sum().item() for b in batches]
    trainer = make_trainer(accumulate_grad_batches=4, log_every_n_steps=1)
    trainer.fit(module, data)
    assert trainer.callback_metrics["train/loss"].item() == pytest.approx(sum(sums) / sum(tokens), rel=1e-5)


def test_a_run_reads_the_stream_across_epochs():
    data = small_copy(batch_size=24)
    seen = []

    class Sources(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            seen.append(batch.source)

    make_trainer(max_steps=7, callbacks=[Sources()]).fit(make_module(data), data)
    dataset = data.datasets["train"]
    stream = itertools.islice(LengthGroupedSampler(dataset.source_lengths, 24, seed=0), 7)
    assert all(source.equal(dataset[rows].source) for source, rows in zip(seen, stream, strict=True))


def test_step_settings_ignore_differences_in_notation():
    module = make_module(small_copy())

    def settings(**clipping):
        return module.step_settings(make_trainer(**clipping))

    assert settings(gradient_clip_val=1.0) == settings(gradient_clip_val=1.0, gradient_clip_algorithm="norm")
    assert settings(gradient_clip_val=1.0) != settings(gradient_clip_val=1.0, gradient_clip_algorithm="value")
    assert settings() == settings(gradient_clip_val=0.0) == settings(gradient_clip_algorithm="value")


def test_the_direction_of_a_logged_value_is_that_of_its_metric():
    data = small_copy()
    module = make_module(data)

    class Logging(Callback):
        def on_validation_epoch_end(self, trainer, module):
            module.log("val/bare", torch.tensor(1.0))
            module.log("val/set", torch.tensor(1.0), higher_is_better=True)

    make_trainer(callbacks=[Logging()], limit_val_batches=None).validate(module, data, verbose=False)
    scores = {name: better for name, better in module.higher_is_better.items() if "alignment" in name}
    assert scores == {name: name.endswith("accuracy") for name in scores}
    assert {name.rpartition("/")[2] for name in scores} == {"accuracy", "aer"}
    lower = {"val/loss", "val/perplexity", "val/ser"}
    higher = {"val/token_accuracy", "val/exact_match", "val/set"}
    assert module.higher_is_better == scores | dict.fromkeys(lower, False) | dict.fromkeys(higher, True)
    assert module.token_metrics == {"val/loss", "val/perplexity", "val/token_accuracy", "val/ser"}


def test_a_text_only_network_is_refused():
    data = small_copy()
    network = GPT(data.vocab_size, 16, 2, 1, max_length=48, text_only=True)
    with pytest.raises(UserError, match="text_only must be false"):
        Seq2SeqModule(network, data.tokenizer, data.max_target_length)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping_bounds_the_gradient(algorithm):
    data = small_copy()
    settings = {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": algorithm}
    gradients = torch.cat([gradient.flatten() for gradient in gradients_of_a_step(data, make_module(data), **settings)])
    bounded = gradients.norm() if algorithm == "norm" else gradients.abs().max()
    assert bounded.item() == pytest.approx(1e-3, rel=1e-3)
    assert (gradients.norm() > 2e-3) == (algorithm == "value")


@pytest.mark.parametrize(("every", "steps"), [(0, [1, 2, 3, 4, 5, 6]), (2, [2, 4, 6]), (5, [5])])
def test_metrics_are_logged_and_checked_every_few_steps(every, steps, monkeypatch, tmp_path):
    schedule = LRSchedule(warmup_steps=10)  # the rate is another one in each step
    data, module = small_copy(), make_module(small_copy(), optimizer=partial(AdamW, lr=1e-3), lr_schedule=schedule)
    checked, check = [], module.check_finite
    monkeypatch.setattr(module, "check_finite", lambda: checked.append(module.global_step) or check())
    logger = CSVLogger(tmp_path)
    make_trainer(max_steps=6, log_every_n_steps=every, logger=logger).fit(module, data)
    assert checked[:-1] == steps, "and once at the end"
    rows = list(csv.DictReader((Path(logger.log_dir) / "metrics.csv").read_text().splitlines())) if every else []
    logged = {int(row["step"]) + 1: float(row["train/learning_rate"]) for row in rows if row["train/learning_rate"]}
    assert logged == pytest.approx({step: step / 10 * 1e-3 for step in steps if every})


@pytest.mark.parametrize(("decay", "depends"), [("inverse_sqrt", False), ("linear", True), ("cosine", True)])
def test_the_number_of_steps_is_a_setting_if_the_schedule_depends_on_it(decay, depends):
    module = make_module(small_copy(), lr_schedule=LRSchedule(decay=decay))
    assert ("trainer.max_steps" in module.step_settings(make_trainer())) == depends
    assert "trainer.max_steps" not in module.step_settings(make_trainer(fast_dev_run=True))


def test_pretrained_weights_are_loaded_by_a_new_run_only(monkeypatch, tmp_path):
    data, calls, schedule = small_copy(), [], LRSchedule(decay="inverse_sqrt")
    module = make_module(data, lr_schedule=schedule)
    monkeypatch.setattr(type(module), "load_pretrained", lambda module: calls.append(module))
    trainer = make_trainer(max_steps=2)
    trainer.fit(module, data)
    assert calls == [module]
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    other = make_module(data, lr_schedule=schedule)
    make_trainer(max_steps=3).fit(other, data, ckpt_path=tmp_path / "two.ckpt", weights_only=True)
    assert calls == [module]


class Losses(Callback):
    """Callback that records the loss of each step."""

    def __init__(self):
        self.values = []

    def on_train_batch_end(self, trainer, *_):
        self.values.append(trainer.callback_metrics["train/loss"].item())


def test_the_progress_bar_shows_the_loss_of_each_step(monkeypatch, capsys):
    """Show it whether it is logged or not, but read it only when the bar is drawn."""
    monkeypatch.setattr("lightning_tfm.system.progress.tqdm", partial(tqdm, mininterval=0, miniters=1))
    for log_every_n_steps in (1, 100):
        lightning.seed_everything(1)
        data, losses = small_copy(), Losses()
        callbacks = [progress.ProgressBar(), *([losses] if log_every_n_steps == 1 else [])]
        settings = {"max_steps": 3, "enable_progress_bar": True, "log_every_n_steps": log_every_n_steps}
        make_trainer(callbacks=callbacks, **settings).fit(make_module(data), data)
        shown = dict(re.findall(r"step (\d)/3 [^\r\n]* loss ([\d.]+)", capsys.readouterr().out))
        if losses.values:
            expected = {str(step): f"{loss:.4f}" for step, loss in enumerate(losses.values, start=1)}
        assert shown == expected
    monkeypatch.setattr("lightning_tfm.system.progress.tqdm", partial(tqdm, mininterval=1_000))
    calls = []
    monkeypatch.setattr(progress, "_values", lambda *_: calls.append(1) or "")
    data = small_copy()
    make_trainer(callbacks=[progress.ProgressBar()], enable_progress_bar=True, max_steps=3).fit(make_module(data), data)
    assert len(calls) == 1, "at the end of the training"


@pytest.mark.parametrize("length", [80, 81, 200])
def test_long_sources_are_cut_in_titles(length):
    prediction = {"source": "1" * length, "target": "2\t3", "prediction": "4", "nll": 1.0}
    (example,) = predicted_examples([(4, prediction)])
    assert example.row == 4
    assert example.title == f"{'1' * min(length, 80)}{'...' if length > 80 else ''}\ntrue: 2 3\npredicted: 4"


def test_a_schedule_may_end_before_its_warm_up():
    optimizer = AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = LRSchedule(warmup_steps=3).scheduler(optimizer, max_steps=2)
    rates = []
    for _ in range(5):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates[:3] == pytest.approx([1 / 3, 2 / 3, 1])


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


def test_flops_of_a_step_are_those_of_its_matrix_products():
    B, T, D, V, layers = 3, 20, 16, 11, 2
    network = GPT(V, D, 2, layers, max_length=T)
    tokens = torch.randint(3, V, (B, T))
    products = 2 * B * T * (layers * 12 * D**2 + D * V)  # 4 D^2 in attention, 8 D^2 in the feed-forward layer
    attention = layers * 2 * 2 * B * T**2 * D  # queries with keys, weights with values
    flops = step_flops(network, Batch(tokens[:, :0], tokens, tokens, torch.arange(len(tokens))))
    assert 3 * products <= flops <= 3 * (products + attention)


@pytest.mark.parametrize("model", MODELS)
def test_utilization_is_achieved_over_peak_flops(model, monkeypatch):
    """The device performs a thousand operations per second."""
    monkeypatch.setattr("lightning_tfm.callbacks.telemetry.peak_flops", lambda device, half: 1000.0)
    data = small_copy(batch_size=16)
    module = make_module(data, model)
    telemetry = Telemetry()
    trainer = make_trainer(max_steps=4, log_every_n_steps=4, callbacks=[telemetry])
    trainer.fit(module, data)
    metrics = trainer.callback_metrics
    assert metrics["samples"].item() == 64
    if model == "attention_lstm":  # torch does not count the operations of its kernels
        assert "mfu" not in metrics
    else:
        used = metrics["tokens_per_second"].item() * telemetry.flops_per_token / 1000
        assert metrics["mfu"].item() == pytest.approx(used, rel=1e-4)
        assert (
            telemetry.flops_per_token > 2 * 3 * sum(p.numel() for p in module.network.parameters() if p.dim() > 1) / 4
        )


def test_gpu_memory_is_logged(monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * 2**30)
    logged = {}
    module = SimpleNamespace(device=torch.device("cuda"), log_dict=logged.update)
    strategy, loader = SimpleNamespace(reduce=lambda value, group, reduce_op: value), SimpleNamespace(samples=10)
    trainer = SimpleNamespace(global_step=50, log_every_n_steps=50, strategy=strategy, train_dataloader=loader)
    telemetry = Telemetry()
    telemetry.peak = None
    telemetry._begin(0)
    telemetry.on_train_batch_end(trainer, module, None, SimpleNamespace(tokens=torch.tensor(7)), 49)
    assert set(logged) == {"samples", "tokens_per_second", "gpu_memory_gib"}
    assert logged["gpu_memory_gib"] == 3.0


def test_peak_flops_are_those_of_dense_matrix_products(monkeypatch):
    """For an H200 it is that of the data sheet, for other devices that of Lightning."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    device = torch.device("cuda")
    assert peak_flops(device, half=True) == 989e12
    assert peak_flops(device, half=False) == 67e12
    torch.set_float32_matmul_precision("high")
    assert peak_flops(device, half=False) == 495e12
    assert peak_flops(torch.device("cpu"), half=True) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "another")
    known = {torch.bfloat16: 2.0, torch.float32: 1.0}
    monkeypatch.setattr("lightning_tfm.callbacks.telemetry.get_available_flops", lambda device, dtype: known[dtype])
    assert (peak_flops(device, half=True), peak_flops(device, half=False)) == (2.0, 1.0)


# Optimization


def rates(lr, max_steps, **schedule):
    optimizer = AdamW(torch.nn.Linear(2, 2).parameters(), lr)
    scheduler = LRSchedule(**schedule).scheduler(optimizer, max_steps)
    values = []
    for _ in range(max_steps):
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
    found = orthogonalize([matrix[None]])[0][0].double()
    torch.testing.assert_close(found, exact, rtol=0, atol=atol)
    assert torch.linalg.svdvals(found).max() < 1.3
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


def test_muon_resumes_from_its_state():
    torch.manual_seed(0)
    networks = [MODELS["gpt"](11)]
    source, target = torch.randint(4, 11, (2, 6, 9))

    def configured(network):
        optimizer = Muon(parameter_groups(network, network.head), 0.01)
        return optimizer, LRSchedule(warmup_steps=3).scheduler(optimizer, 10)

    def step(network, optimizer, scheduler):
        network.zero_grad()
        token_nll(network(source, target), target).backward()
        optimizer.step()
        scheduler.step()

    whole = configured(networks[0])
    for _ in range(2):
        step(networks[0], *whole)
    networks.append(copy.deepcopy(networks[0]))
    resumed = configured(networks[1])
    for ours, theirs in zip(resumed, whole, strict=True):
        ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    for _ in range(3):
        step(networks[0], *whole)
        step(networks[1], *resumed)
    for ours, theirs in zip(*(network.parameters() for network in networks), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_module(small_copy(), optimizer=partial(AdamW, lr=0)), "lr must be above 0, but is 0"),
        (lambda: make_module(small_copy(), optimizer=partial(AdamW, lr=math.nan)), "lr must be above 0, but is nan"),
        (lambda: make_module(small_copy(), optimizer=partial(AdamW, lr=math.inf)), "lr must be finite, but is inf"),
        (
            lambda: make_module(small_copy(), optimizer=partial(AdamW, weight_decay=math.nan)),
            "weight_decay must be at least 0, but is nan",
        ),
        (
            lambda: make_module(small_copy(), optimizer=partial(AdamW, weight_decay=math.inf)),
            "weight_decay must be finite, but is inf",
        ),
        (
            lambda: make_module(small_copy(), optimizer=partial(Muon, muon_lr=-1.0)),
            "muon_lr must be above 0, but is -1",
        ),
        (
            lambda: make_module(small_copy(), optimizer=partial(torch.optim.SGD, lr=-1.0)),
            "optimizer must have valid settings, but those of SGD are not: Invalid learning rate: -1.0",
        ),
        (lambda: LRSchedule(warmup_steps=-1), "warmup_steps must be at least 0, but is -1"),
        (lambda: LRSchedule(warmup_steps=300).check_max_steps(-1), "max_steps must be at least 1.* is -1; try 3000"),
        (lambda: LRSchedule(warmup_steps=3).check_max_steps(0), "max_steps must be at least 1.* is 0; try 1000"),
        (lambda: AdamW([torch.nn.Parameter(torch.zeros(1))], lr=float("inf")), "lr must be finite, but is inf"),
        (
            lambda: Seq2SeqModule(MODELS["gpt"](5), SymbolTokenizer("ab"), 9, text_metrics=["bleu"]),
            "text_metrics must be empty unless the tokenizer is word-based",
        ),
        (
            lambda: small_copy(batch_size=3).check_micro_batches(4),
            r"at least the number of processes or micro-batches \(4\), but is 3",
        ),
        (lambda: make_module(small_copy(), label_smoothing=1.0), "label_smoothing must be at least 0 and below 1"),
    ],
)
def test_invalid_settings_are_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()


# Metrics


def test_the_symbol_error_rate_of_subwords_counts_characters():
    tokenizer = odd_data("subword").tokenizer
    generator = random.Random(0)
    texts = ["".join(generator.choices("ab ", k=generator.randint(0, 9))) for _ in range(200)]
    outputs, references = texts[:100], texts[100:]
    found = edit_distances(*([tokenizer.split_scored(text) for text in side] for side in (outputs, references)))
    assert found.sum() == edit_distance(outputs, references, reduction="sum")


class Scripted(Seq2SeqNetwork):
    """A network that decodes given ids for each source."""

    def __init__(self, vocab_size, outputs):
        super().__init__()
        self.head = torch.nn.Linear(1, vocab_size)
        self.vocab_size, self.outputs = vocab_size, outputs

    def check_lengths(self, source_length, target_length):
        pass

    def forward(self, source, target_in):
        return torch.zeros(*target_in.shape, self.vocab_size)

    def encode(self, source):
        outputs = [self.outputs[tuple(row[row != PAD].tolist())] for row in source]
        return pad_sequences(outputs)[0], torch.zeros(len(source), dtype=torch.long)

    def decode_step(self, token, state):
        outputs, step = state
        ids = outputs[torch.arange(len(outputs)), step.clamp(max=outputs.size(1) - 1)]
        return 50.0 * torch.nn.functional.one_hot(ids, self.vocab_size), (outputs, step + 1)


class Pairs(PairDataModule):
    """A data module with given pairs, which are the same in every split."""

    def __init__(self, pairs, tokenizer):
        super().__init__(tokenizer, 64, 64, batch_size=4, eval_batch_size=7, num_workers=0, seed=0)
        self.given = pairs

    def pairs(self, split):
        return self.given


ODD_TARGETS = ["a  b", " a b", "b\ta", "a b ", "a \ufffd", "a x b", "\u00fc x", "ab ab", "b", "a b a", "[a]", "a-b"]


def odd_data(tokens):
    """Return data with whitespace and symbols that not every tokenizer can decode."""
    tokenizers = {
        "character": train_tokenizer(["a b \u00fc [-]"], "character", 50),
        "word": train_tokenizer(["a b ab \u00fc"], "word", 50),
        "subword": train_tokenizer(["a b ab \u00fc a b ab"] * 9, "subword", 270),
        "features": SymbolTokenizer([*"ab -", "[a]", "[", "]", UNKNOWN], feature_separator=";"),
        "separated": SymbolTokenizer([UNKNOWN, *"ab"], target_separator="-"),
    }
    sources = (" ".join(f"{n:b}").translate({ord("0"): "a", ord("1"): "b"}) for n in itertools.count())
    pairs = [
        Pair(source, target, category=source[-1]) for source, target in zip(sources, ODD_TARGETS * 3, strict=False)
    ]
    return Pairs(pairs, tokenizers[tokens])


ALL_DATA = DATA | {name: partial(odd_data, name) for name in ("character", "word", "subword", "features", "separated")}


def encode_differently(tokenizer, text):
    """Encode the text by other ids, if the tokenizer has any."""
    if isinstance(tokenizer, SubwordTokenizer):
        pieces = [piece for piece, _ in tokenizer.model.pre_tokenizer.pre_tokenize_str(text)]
        return [tokenizer.model.token_to_id(byte) + NUM_SPECIAL for byte in "".join(pieces)]
    return tokenizer.encode_target(text)


@pytest.mark.parametrize("beam_size", [1, 2])
@pytest.mark.parametrize("make", ALL_DATA.values(), ids=ALL_DATA)
def test_exact_match_is_the_mean_of_correct_predictions(make, beam_size):
    data = make()
    data.setup("test")
    outputs = {}
    for examples in data.datasets.values():
        for row, pair in enumerate(examples.pairs):
            ids = [data.tokenizer.encode_target, partial(encode_differently, data.tokenizer)][row // 2 % 2](pair.target)
            wrong = [*ids[1:], ids[0]] if row % 5 == 0 else ids
            source = tuple(examples.sources[torch.tensor([row])][0].tolist())
            outputs[source] = [*wrong, EOS]
    assert len(outputs) == len({pair.source for examples in data.datasets.values() for pair in examples.pairs})
    network = Scripted(data.vocab_size, outputs)
    module = Seq2SeqModule(network, data.tokenizer, data.max_target_length, beam_size=beam_size)
    predictions = Predictions()
    trainer = make_trainer(callbacks=[predictions], limit_val_batches=None)
    trainer.test(module, data, verbose=False)
    by_name = defaultdict(list)
    for name, _, line in predictions.lines:
        assert line["correct"] == (line["prediction"] == line["target"])
        prefix = f"{prefix_of(name)}/exact_match"
        by_name[prefix].append(line["correct"])
        if line["category"] is not None:
            by_name[f"{prefix}/{line['category']}"].append(line["correct"])
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items() if "exact_match" in name}
    assert metrics == pytest.approx({name: sum(right) / len(right) for name, right in by_name.items()})
    assert 0 < metrics["test/exact_match"] < 1
    (validated,) = trainer.validate(module, data, verbose=False)
    if isinstance(data, Pairs):  # its splits are the same
        assert validated["val/exact_match"] == pytest.approx(metrics["test/exact_match"])
