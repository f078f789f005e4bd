"""Metrics, averaged weights and gradient norms in every precision of Lightning."""

import math
from copy import deepcopy
from functools import cache, partial
from itertools import count

import pytest
import sacrebleu
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision
from torchmetrics.functional.text import word_error_rate

from datamodules import Copy, Sentiment, Text
from lightning_tfm.callbacks import Checkpoints, WeightAveraging
from lightning_tfm.checkpoint import read
from lightning_tfm.checkpoint.plugin import VerifiedCheckpointIO
from lightning_tfm.data import Batch
from lightning_tfm.layers.attention import MAX_UNFUSED_KEYS, scaled_dot_product_attention
from lightning_tfm.networks import GPT, EncoderClassifier, MaskedEncoder
from lightning_tfm.optimizers import AdamW, LRSchedule
from lightning_tfm.tasks import Classifier, LanguageModel, MaskedLanguageModel, Seq2SeqModule, seq2seq
from lightning_tfm.tasks.alignment import AlignmentScores
from lightning_tfm.tasks.metrics import Mean, exact_sum
from lightning_tfm.tokenization import EOS, PAD
from support import training
from support.corpora import TEXT, reviews, write_lines
from support.networks import QWEN3, VOCAB_SIZE

PRECISIONS = ("64-true", "32-true", "bf16-true", "16-true", "bf16-mixed", "16-mixed")
"""Precisions without extra dependencies. Lightning replaces 16-mixed with bf16-mixed on a CPU; torch supports both."""


BATCHES = 200


def make_trainer(precision, **settings):
    plugins = [MixedPrecision("16-mixed", "cpu")] if precision == "16-mixed" else []
    settings = {"plugins": [*plugins, VerifiedCheckpointIO()], "max_steps": 60, "num_sanity_val_steps": 0} | settings
    return training.make_trainer(precision=None if plugins else precision, **settings)


def make_seq2seq(tmp_path):
    data = Copy(
        num_symbols=7, max_length=5, longer_max_length=6, train_size=500, val_size=2 * BATCHES, test_size=10,
        longer_size=10, batch_size=32, eval_batch_size=2,
    )  # fmt: skip
    network = GPT(data.vocab_size, 16, 2, 1, max_length=14)
    return data, Seq2SeqModule(
        network, data.tokenizer, data.max_target_length, partial(AdamW, lr=2e-2), text_metrics=["bleu", "chrf"]
    )


def make_language_model(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    data = Text(str(tmp_path / "text.txt"), val_fraction=0.5, max_length=7, batch_size=16, eval_batch_size=1)
    return data, LanguageModel(GPT(data.vocab_size, 16, 2, 1, max_length=7), data.tokenizer)


def make_masked_language_model(tmp_path):
    data, _ = make_language_model(tmp_path)
    network = MaskedEncoder(data.vocab_size, 16, 2, 1, max_length=7)
    return data, MaskedLanguageModel(network, data.tokenizer, mask_fraction=0.5)


def make_classifier(tmp_path, learning_rate=1e-3):
    table = write_lines(tmp_path / "reviews.tsv", map("\t".join, reviews(800)))
    more = write_lines(tmp_path / "more.tsv", map("\t".join, reviews(2 * BATCHES, seed=1)))
    data = Sentiment([table], [more], val_fraction=0, max_length=16, batch_size=16, eval_batch_size=2)
    network = EncoderClassifier(data.vocab_size, 2, 16, 16, 2, 1, 32, num_bigram_buckets=50)
    return data, Classifier(network, data.tokenizer, data.labels, partial(AdamW, lr=learning_rate))


TASKS = {
    "seq2seq": make_seq2seq,
    "language_model": make_language_model,
    "masked_language_model": make_masked_language_model,
    "classifier": make_classifier,
}


class Recorder(Callback):
    """Record the logits of each validation batch in float64, the batch and its outputs."""

    def __init__(self):
        self.logits, self.batches, self.outputs = [], [], []

    def on_validation_start(self, trainer, module):
        self.handle = module.network.register_forward_hook(
            lambda network, inputs, logits: self.logits.append(logits.double())
        )

    def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx, dataloader_idx=0):
        self.batches.append(batch)
        self.outputs.append(outputs)

    def on_validation_end(self, trainer, module):
        self.handle.remove()


def token_metrics(log_probs, targets):
    """Return the mean loss and the accuracy over all tokens but padding."""
    nll = right = tokens = 0
    for scores, target in zip(log_probs, targets, strict=True):
        real = target != PAD
        nll -= scores.gather(-1, target.unsqueeze(-1)).squeeze(-1)[real].sum().item()
        right += (scores.argmax(-1) == target)[real].sum().item()
        tokens += real.sum().item()
    return nll / tokens, right / tokens


def expected_metrics(task, recorder, data, module):
    """Compute the metrics by definition, in float64, from the logits of all batches."""
    log_probs = [logits.log_softmax(-1) for logits in recorder.logits]
    if task == "classifier":
        labels = torch.cat([batch.label for batch in recorder.batches])
        log_probs = torch.cat(log_probs)
        predicted, f1 = log_probs.argmax(-1), []
        for label in range(len(module.labels)):
            both = ((predicted == label) & (labels == label)).sum().item()
            f1.append(2 * both / ((predicted == label).sum().item() + (labels == label).sum().item()))
        return {
            "loss": -log_probs.gather(1, labels.unsqueeze(1)).mean().item(),
            "accuracy": (predicted == labels).double().mean().item(),
            "f1": sum(f1) / len(f1),
        }
    if task == "masked_language_model":
        targets = []
        for batch in recorder.batches:
            generators = [torch.Generator().manual_seed(int(row)) for row in batch.rows]
            draws = [torch.rand(3, batch.target_in.size(1), generator=generator) for generator in generators]
            targets.append(module._masked(batch.target_in, torch.stack(draws, dim=1))[1])
        loss, accuracy = token_metrics(log_probs, targets)
        return {"loss": loss, "perplexity": math.exp(loss), "accuracy": accuracy}
    loss, accuracy = token_metrics(log_probs, [batch.target_out for batch in recorder.batches])
    if task == "language_model":
        per_token = data.datasets["val"].characters_per_token
        return {"loss": loss, "perplexity": math.exp(loss), "loss_per_character": loss / per_token}
    decode = data.tokenizer.decode
    predictions = [line["prediction"] for outputs in recorder.outputs for line in outputs["predictions"]]
    targets = [decode(ids) for batch in recorder.batches for ids in batch.target_out.tolist()]
    assert 0 < sum(map(str.__eq__, predictions, targets)) < len(targets), "exact match must be neither 0 nor 1"
    return {
        "loss": loss,
        "perplexity": math.exp(loss),
        "token_accuracy": accuracy,
        "exact_match": sum(map(str.__eq__, predictions, targets)) / len(targets),
        "ser": word_error_rate(predictions, targets).item(),
        "bleu": sacrebleu.corpus_bleu(predictions, [targets], force=True).score,
        "chrf": sacrebleu.corpus_chrf(predictions, [targets]).score,
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a function that returns the data and a module of a task, trained once in float32."""

    @cache
    def weights(task, max_steps):
        torch.manual_seed(0)
        data, module = TASKS[task](tmp_path_factory.mktemp(task))
        make_trainer("32-true", max_steps=max_steps).fit(module, data)
        return module.state_dict()

    def trained(task, max_steps=60):
        data, module = TASKS[task](tmp_path_factory.mktemp(task))
        module.load_state_dict(weights(task, max_steps))
        return data, module

    return trained


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("task", TASKS)
def test_metrics_equal_float64_over_many_batches(task, precision, trained):
    data, module = trained(task)
    recorder = Recorder()
    trainer = make_trainer(precision, limit_val_batches=1.0, callbacks=[recorder])
    (logged,) = trainer.validate(module, data, verbose=False)
    assert len(recorder.logits) >= BATCHES
    expected = expected_metrics(task, recorder, data, module)
    assert {f"val/{name}" for name in expected} == {name for name in logged if "alignment" not in name}
    for name, value in expected.items():
        assert logged[f"val/{name}"] == pytest.approx(value, rel=1e-5), name


@pytest.mark.parametrize("precision", PRECISIONS)
def test_beam_search_runs_in_the_test_in_every_precision(precision, trained):
    scores = []
    for each in ("32-true", precision):
        data, module = trained("seq2seq", 200)
        module.beam_size = 2
        scores.append(make_trainer(each).test(module, data, verbose=False)[0]["test/exact_match"])
    assert scores[0] > 0
    assert scores[1] == pytest.approx(scores[0], abs=0.2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_alignment_scores_equal_float64_over_many_batches(dtype):
    score, entropies, symbols = AlignmentScores(), torch.zeros(2, dtype=torch.float64), 0
    for _ in range(BATCHES):
        ids = torch.tensor([[3, 4, 5, EOS], [4, 3, EOS, PAD]])
        weights = torch.randn(2, 2, 4, 4).softmax(-1).to(dtype)
        is_symbol = (ids != PAD) & (ids != EOS)
        gold, batch = torch.eye(4, dtype=torch.bool).expand(2, 4, 4), Batch(ids, ids, ids, torch.arange(len(ids)))
        score.update({"layer": weights}, gold, batch)
        entropies += (torch.special.entr(weights.double()).sum(-1) * is_symbol.unsqueeze(1)).sum((0, 2))
        symbols += is_symbol.sum()
    scores = score.compute()
    computed = torch.stack([scores[f"alignment/layer/head_{head}/entropy"] for head in range(2)])
    torch.testing.assert_close(computed.double(), entropies / symbols, rtol=1e-5, atol=0)


DTYPES = {
    "32-true": torch.float32,
    "bf16-true": torch.bfloat16,
    "16-true": torch.float16,
    "bf16-mixed": torch.bfloat16,
}
"""Type of the contexts of attention in each precision."""


@pytest.mark.parametrize("masking", ["no mask", "causal", "mask", "biases"])
@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("keys", [20, MAX_UNFUSED_KEYS + 1])
def test_attention_and_its_gradients_equal_float64(keys, precision, masking):
    torch.manual_seed(0)
    dtype = DTYPES[precision]
    is_mixed = precision == "bf16-mixed"
    stored = torch.float32 if is_mixed else dtype
    query, key, value = (torch.randn(2, 3, keys, 8).to(dtype).to(stored).requires_grad_() for _ in range(3))
    gradient = torch.randn(2, 3, keys, 8).to(dtype)
    hidden = torch.rand(2, 1, 1, keys) < 0.3
    hidden[..., 0] = False
    masks = {"mask": ~hidden, "biases": torch.randn(1, 3, keys, keys).to(dtype).to(stored)}
    with torch.autocast("cpu", torch.bfloat16, enabled=is_mixed):
        context = scaled_dot_product_attention(query, key, value, masks.get(masking), is_causal=masking == "causal")
    assert context.dtype == dtype
    context.backward(gradient)

    exact = [tensor.detach().double().requires_grad_() for tensor in (query, key, value)]
    scores = torch.einsum("bhtd,bhsd->bhts", exact[0], exact[1]) / 8**0.5
    if masking == "biases":
        scores = scores + masks["biases"].double()
    if masking in ("mask", "causal"):
        later = torch.arange(keys) > torch.arange(keys)[:, None]
        scores = scores - 1e9 * (hidden if masking == "mask" else later)
    exact_context = scores.softmax(-1) @ exact[2]
    exact_context.backward(gradient.double())
    pairs = [(context, exact_context), *((x.grad, y.grad) for x, y in zip((query, key, value), exact, strict=True))]
    for actual, reference in pairs:
        assert (actual.double() - reference).norm() <= 4 * torch.finfo(dtype).eps * reference.norm()


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_normalized_queries_and_keys_keep_their_type(precision):
    """The KV cache, too; the logits are those of float64 within the precision of bfloat16."""
    is_mixed = precision == "bf16-mixed"
    network = GPT(VOCAB_SIZE, 16, 4, 2, max_length=20, **QWEN3).eval()
    tokens = torch.randint(3, VOCAB_SIZE, (3, 9))
    exact = deepcopy(network).double()(tokens[:, :0], tokens)
    network = network if is_mixed else network.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=is_mixed):
        logits = network(tokens[:, :0], tokens)
        (caches, *_) = network.encode(tokens)
    assert {part.dtype for cache in caches for part in cache} == {torch.bfloat16}
    assert (logits.double() - exact).norm() <= 0.02 * exact.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("keys", [20, MAX_UNFUSED_KEYS + 1])
def test_a_query_that_may_attend_to_no_key_has_a_finite_context_and_gradient(keys, dtype):
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 3, keys, 8, dtype=dtype, requires_grad=True) for _ in range(3))
    mask = torch.ones(2, 1, keys, keys, dtype=torch.bool)
    mask[:, :, 0] = False
    context = scaled_dot_product_attention(query, key, value, mask)
    context.sum().backward()
    assert all(tensor.isfinite().all() for tensor in (context, query.grad, key.grad, value.grad))


def test_naive_bayes_is_the_same_in_half_precision(tmp_path):
    (data, module), (_, exact) = make_classifier(tmp_path), make_classifier(tmp_path)
    for other, precision in ((module, "bf16-true"), (exact, "32-true")):
        make_trainer(precision, max_steps=1).fit(other, data)
    actual, reference = (other.network.naive_bayes for other in (module, exact))
    assert int(reference.scores.max()) > 256, "bfloat16 would round such integers"
    assert actual.scores.equal(reference.scores)
    assert actual.prior.equal(reference.prior)
    words = torch.randint(4, data.vocab_size, (5, 8))
    torch.testing.assert_close(actual(words), reference(words), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float64, torch.float64)],
)
def test_a_mean_is_never_in_half_precision_and_propagates_nan(dtype, kept):
    mean = Mean()
    for value in (1.0, math.nan, 2.0):
        mean.update(torch.tensor(value), 1)
    assert mean.to(dtype).totals[0].dtype == kept
    assert math.isnan(mean.compute())


def test_exact_sums_do_not_depend_on_the_order():
    values = torch.randn(1000, 3) * 10.0 ** torch.randint(-6, 6, (1000, 1))
    total = exact_sum(values)
    for _ in range(5):
        assert exact_sum(values[torch.randperm(1000)]).equal(total)
    assert total.equal(values.double().sum(0).float())
    assert exact_sum(values[:, 0]).equal(total[0])
    for value in (math.nan, math.inf):
        assert not exact_sum(torch.tensor([1.0, value, -math.inf])).isfinite()


@pytest.mark.parametrize(
    ("value", "monitor", "mode"),
    [(math.nan, "val/loss", "min"), (math.inf, "val/loss", None), (math.nan, "val/exact_match", None)],
)
def test_weights_with_a_non_finite_loss_are_never_the_best(value, monitor, mode, tmp_path, monkeypatch, capsys):
    """The second of three improving validations has one batch with such a loss."""
    torch.manual_seed(0)
    data, module = make_seq2seq(tmp_path)
    sequence_nll, calls = seq2seq.sequence_nll, count()
    batches = 100  # with one call each
    monkeypatch.setattr(
        seq2seq, "sequence_nll", lambda *args: sequence_nll(*args) * (value if next(calls) == batches + 1 else 1.0)
    )
    checkpoints = Checkpoints(monitor=monitor, mode=mode, keep_last=3)
    saved = {}

    class Best(Callback):
        def on_train_batch_start(self, trainer, *_):
            if (path := tmp_path / "checkpoints/best.ckpt").exists():
                saved[trainer.global_step] = read(path)["global_step"]

    settings = {"limit_val_batches": batches, "val_check_interval": 20, "check_val_every_n_epoch": None}
    trainer = make_trainer(
        "32-true", default_root_dir=tmp_path, callbacks=[Best(), checkpoints], enable_checkpointing=True, **settings
    )
    trainer.fit(module, data)
    assert set(saved.values()) == {20}, "before the third validation"
    assert read(checkpoints.best_model_path)["global_step"] == 60
    assert f"val/loss is {value:g} at step 40; these weights are not saved as the best" in capsys.readouterr().err


class Weights(Callback):
    """Record the weights after each step in float64."""

    def __init__(self):
        self.steps = []

    def on_train_batch_end(self, trainer, module, *_):
        self.steps.append([weight.detach().double() for weight in module.parameters()])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_averaged_weights_equal_float64(precision, tmp_path):
    """Neither validations nor the checkpoint round the moving average."""
    data, module = make_classifier(tmp_path, learning_rate=1e-4)  # AdamW diverges in pure float16 at a higher rate
    averaging, weights = WeightAveraging(decay=0.9), Weights()
    trainer = make_trainer(
        precision, max_steps=40, callbacks=[weights, averaging], limit_val_batches=2, val_check_interval=5,
        check_val_every_n_epoch=None, gradient_clip_val=1.0,
    )  # fmt: skip
    trainer.fit(module, data)
    expected = weights.steps[0]
    for step, trained in enumerate(weights.steps[1:], start=1):
        share = max(3 / (step + 3), 0.1)
        expected = [(1 - share) * mean + share * weight for mean, weight in zip(expected, trained, strict=True)]
    for actual, mean in zip(averaging._average_model.module.parameters(), expected, strict=True):
        torch.testing.assert_close(actual.double(), mean, rtol=1e-4, atol=1e-6)
    trainer.save_checkpoint(tmp_path / "mean.ckpt")
    saved = read(tmp_path / "mean.ckpt")
    assert saved["state_dict"]["network.naive_bayes.scores"].equal(module.network.naive_bayes.scores)
    assert int(module.network.naive_bayes.scores.max()) > 0
    before = trainer.validate(module, data, verbose=False)
    other = make_classifier(tmp_path)[1]
    trainer = make_trainer(precision, limit_val_batches=2, callbacks=[WeightAveraging(decay=0.9)])
    assert trainer.validate(other, data, ckpt_path=tmp_path / "mean.ckpt", verbose=False) == before


class Interrupting(Callback):
    """Raise in the second validation."""

    def __init__(self):
        self.validations = 0

    def on_validation_batch_start(self, *_):
        self.validations += 1
        if self.validations == 2:
            raise RuntimeError("in the validation")


def test_a_failing_validation_restores_the_trained_weights(tmp_path):
    """A callback may then save the module, or another `fit` may follow."""
    data, module = make_classifier(tmp_path)
    averaging, weights = WeightAveraging(decay=0.9), Weights()
    trainer = make_trainer(
        "32-true", max_steps=20, callbacks=[weights, averaging, Interrupting()], limit_val_batches=1,
        val_check_interval=5, check_val_every_n_epoch=None,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="in the validation"):
        trainer.fit(module, data)
    for actual, trained in zip(module.parameters(), weights.steps[-1], strict=True):
        assert actual.double().equal(trained)


def test_steps_skipped_by_the_gradient_scaler_are_counted(tmp_path, capsys):
    data, module = make_seq2seq(tmp_path)
    module.lr_schedule = LRSchedule(decay="inverse_sqrt")  # does not depend on max_steps
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    plugins = [MixedPrecision("16-mixed", "cpu", scaler), VerifiedCheckpointIO()]
    weights = Weights()
    trainer = make_trainer(None, plugins=plugins, callbacks=[weights], max_steps=60, log_every_n_steps=1)
    trainer.fit(module, data)
    skipped = 40 - int(math.log2(scaler.get_scale()))
    assert 0 < skipped < 50
    assert module.skipped_steps == skipped
    unchanged = sum(all(map(torch.equal, *pair)) for pair in zip(weights.steps[:-1], weights.steps[1:], strict=True))
    assert unchanged == skipped - 1, "the first step has no predecessor to compare with"
    assert trainer.callback_metrics["train/skipped_steps"] == skipped
    assert f"{skipped} of 60 steps were skipped: their gradients overflowed float16" in capsys.readouterr().err
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    other = make_seq2seq(tmp_path)[1]
    other.lr_schedule = module.lr_schedule
    make_trainer(None, plugins=[MixedPrecision("16-mixed", "cpu"), VerifiedCheckpointIO()], max_steps=61).fit(
        other, data, ckpt_path=tmp_path / "a.ckpt"
    )
    assert other.skipped_steps == skipped, "the count is part of the run"


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_logged_norm_is_that_of_the_whole_gradient(precision, tmp_path):
    """Compare with the norm in float64 of the gradients before clipping."""
    data, module = make_seq2seq(tmp_path)
    norms = []

    class Norms(Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            squares = [weight.grad.double().square().sum() for weight in module.parameters()]
            norms.append(sum(squares).sqrt().item())

    settings = {"callbacks": [Norms()], "max_steps": 1, "log_every_n_steps": 1}
    if precision == "16-mixed":  # a small scale, so that the step is not skipped
        settings["plugins"] = [MixedPrecision(precision, "cpu", torch.amp.GradScaler("cpu", init_scale=64.0))]
    trainer = make_trainer(precision, **settings)
    batches = []
    module.on_train_batch_end = lambda outputs, batch, batch_idx: batches.append(batch)
    trainer.fit(module, data)
    assert not module.skipped_steps
    expected = norms[0] / batches[0].tokens.item()
    assert trainer.callback_metrics["trainer/gradient_norm"].item() == pytest.approx(expected, rel=1e-4)
