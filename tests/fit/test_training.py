"""Gradients, schedules and metrics of the LightningModule: accumulated, with two processes and in bf16."""

import copy
import csv
import itertools
import math
import re
from functools import partial
from pathlib import Path

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger

from lightning_tfm.callbacks import training_progress
from lightning_tfm.callbacks.attention_logger import predicted_examples
from lightning_tfm.data import LengthGroupedSampler
from lightning_tfm.errors import UserError
from lightning_tfm.layers.losses import token_nll
from lightning_tfm.networks import GPT
from lightning_tfm.optimizers import AdamW, LRSchedule, Muon
from lightning_tfm.system.progress import Bar
from lightning_tfm.tasks import Seq2SeqModule
from lightning_tfm.tokenization import PAD, SymbolTokenizer
from support.training import MODELS, make_module, make_trainer, small_copy


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
    for gradient, cut, right in zip(whole, quarters, expected, strict=True):
        torch.testing.assert_close(gradient, right, atol=1e-12, rtol=1e-10)
        torch.testing.assert_close(cut, right, atol=1e-12, rtol=1e-10)


class Losses(Callback):
    """Callback that records the loss of each step."""

    def __init__(self):
        self.values = []

    def on_train_batch_end(self, trainer, *_):
        self.values.append(trainer.callback_metrics["train/loss"].item())


@pytest.mark.parametrize("model", MODELS)
def test_bf16_mixed_trains_on_a_cpu(model):
    data, losses = small_copy(train_size=1600, batch_size=16), Losses()
    torch.manual_seed(0)
    module = make_module(data, model, optimizer=partial(AdamW, lr=1e-2))
    settings = {"max_steps": 100, "gradient_clip_val": 1.0, "limit_val_batches": None, "log_every_n_steps": 1}
    make_trainer(precision="bf16-mixed", callbacks=[losses], **settings).fit(module, data)
    assert all(map(math.isfinite, losses.values))
    assert sum(losses.values[-5:]) < 0.92 * sum(losses.values[:5])
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
    sources = []

    class Sources(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            sources.append(batch.source)

    make_trainer(max_steps=7, callbacks=[Sources()]).fit(make_module(data), data)
    dataset = data.datasets["train"]
    stream = itertools.islice(LengthGroupedSampler(dataset.source_lengths, 24, seed=0), 7)
    assert all(source.equal(dataset[rows].source) for source, rows in zip(sources, stream, strict=True))


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
    logged = {int(row["step"]) + 1: float(row["trainer/learning_rate"]) for row in rows if row["trainer/learning_rate"]}
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


def test_the_progress_bar_shows_the_loss_of_each_step(monkeypatch, capsys):
    """Show it whether it is logged or not, but read it only when the bar is drawn."""
    monkeypatch.setattr("lightning_tfm.system.progress.Bar", partial(Bar, mininterval=0, miniters=1))
    for log_every_n_steps in (1, 100):
        lightning.seed_everything(1)
        data, losses = small_copy(), Losses()
        callbacks = [training_progress.ProgressBar(), *([losses] if log_every_n_steps == 1 else [])]
        settings = {"max_steps": 3, "enable_progress_bar": True, "log_every_n_steps": log_every_n_steps}
        make_trainer(callbacks=callbacks, **settings).fit(make_module(data), data)
        printed = dict(re.findall(r"step (\d)/3 [^\r\n]* loss ([\d.]+)", capsys.readouterr().out))
        if losses.values:
            expected = {str(step): f"{loss:.4f}" for step, loss in enumerate(losses.values, start=1)}
        assert printed == expected
    monkeypatch.setattr("lightning_tfm.system.progress.Bar", partial(Bar, mininterval=1_000))
    calls = []
    monkeypatch.setattr(training_progress, "_values", lambda *_: calls.append(1) or "")
    data = small_copy()
    make_trainer(callbacks=[training_progress.ProgressBar()], enable_progress_bar=True, max_steps=3).fit(
        make_module(data), data
    )
    assert len(calls) == 1, "at the end of the training"


@pytest.mark.parametrize("length", [80, 81, 200])
def test_long_sources_are_cut_in_titles(length):
    prediction = {"source": "1" * length, "target": "2\t3", "prediction": "4", "nll": 1.0}
    (example,) = predicted_examples([(4, prediction)])
    assert (example.row, example.content) == (4, prediction)
    assert example.title == f"{'1' * min(length, 80)}{'...' if length > 80 else ''}\ntrue: 2 3\npredicted: 4"


def make(**settings):
    return make_module(small_copy(), **settings)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: LRSchedule(warmup_steps=-1), "warmup_steps must be at least 0, but is -1"),
        (lambda: LRSchedule(warmup_steps=300).check_max_steps(-1), "max_steps must be at least 1.* is -1; try 3000"),
        (lambda: LRSchedule(warmup_steps=3).check_max_steps(0), "max_steps must be at least 1.* is 0; try 1000"),
        (lambda: AdamW([torch.nn.Parameter(torch.zeros(1))], lr=math.inf), "lr must be finite, but is inf"),
        (
            lambda: Seq2SeqModule(GPT(5, max_length=48), SymbolTokenizer("ab"), 9, text_metrics=["bleu"]),
            "text_metrics must be empty or wer unless the tokenizer is word-based, but is bleu; leave out bleu",
        ),
        (
            lambda: Seq2SeqModule(GPT(5, max_length=48, text_only=True), SymbolTokenizer("ab"), 9),
            "text_only must be false",
        ),
        (lambda: small_copy(batch_size=3).check_micro_batches(4), r"processes or micro-batches \(4\), but is 3"),
        (lambda: make(label_smoothing=1.0), "label_smoothing must be at least 0 and below 1"),
        (lambda: make(optimizer=partial(AdamW, lr=0)), "lr must be above 0, but is 0"),
        (lambda: make(optimizer=partial(AdamW, lr=math.nan)), "lr must be above 0, but is nan"),
        (lambda: make(optimizer=partial(AdamW, lr=math.inf)), "lr must be finite, but is inf"),
        (lambda: make(optimizer=partial(AdamW, weight_decay=math.nan)), "weight_decay must be at least 0, but is nan"),
        (lambda: make(optimizer=partial(AdamW, weight_decay=math.inf)), "weight_decay must be finite, but is inf"),
        (lambda: make(optimizer=partial(Muon, muon_lr=-1.0)), "muon_lr must be above 0, but is -1"),
        (lambda: make(optimizer=partial(torch.optim.SGD, lr=-1.0)), "but those of SGD are not: .* -1.0"),
    ],
)
def test_invalid_settings_are_refused(call, message):
    with pytest.raises(UserError, match=message):
        call()
