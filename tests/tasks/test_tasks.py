"""Results of all tasks on small files."""

import re

import pytest
import sacrebleu
import torch
import yaml

from lightning_tfm.callbacks.attention_logger import short_name
from lightning_tfm.inference.loading import load
from lightning_tfm.layers import Attention, Positions
from lightning_tfm.reporting.collect import collect_run
from lightning_tfm.runs.record import Run
from support.corpora import TEXT, reviews, write_imdb
from support.experiments import TASKS, write_task
from support.pages import page_data
from support.processes import run

ONE_OF_EACH = ["translation_transformer", "text_gpt", "masked_encoder", "reviews_classifier"]
"""A run of each task."""


def test_training_lowers_the_loss_and_reports_metrics(trained, task):
    rows = Run(trained).metrics()
    losses = [row["val/loss"] for row in rows if "val/loss" in row]
    # In so few steps, a masked language model learns only how frequent each character is.
    assert losses[-1] < (0.99 if task.startswith("masked") else 0.9) * losses[0]
    assert all(row.get("trainer/tokens_per_second", 1) > 0 for row in rows)
    expected = {
        "translation": {"loss", "perplexity", "token_accuracy", "exact_match", "ser", "bleu", "chrf"},
        "spelling": {"loss", "perplexity", "token_accuracy", "exact_match", "ser"},
        "text": {"loss", "loss_per_character", "perplexity"},
        "masked": {"loss", "perplexity", "accuracy"},
        "reviews": {"loss", "accuracy", "f1"},
    }
    summary = Run(trained).summary
    assert set(summary.test) == expected[task.partition("_")[0]]
    assert summary.samples_per_second > 0


@pytest.mark.parametrize("task", [task for task in TASKS if task.startswith("translation")], indirect=True)
def test_scores_and_signatures_equal_sacrebleu(task, trained):
    lines, summary = Run(trained).predictions, Run(trained).summary
    predictions, references = [line["prediction"] for line in lines], [[line["target"] for line in lines]]
    for name, metric in (("bleu", sacrebleu.BLEU()), ("chrf", sacrebleu.CHRF())):
        assert summary.test[name] == pytest.approx(metric.corpus_score(predictions, references).score, abs=1e-3)
        assert summary.signatures[name] == str(metric.get_signature())


@pytest.mark.parametrize("task", ["spelling_gpt", "text_gpt"])
def test_data_without_a_test_split_are_tested_on_the_validation_split(task, tmp_path):
    """Report the metrics as "val", with a message, and log them apart from the learning curve."""
    path = write_task(task, tmp_path)
    config = yaml.safe_load(path.read_text())
    for name in ("test", "test_fraction"):
        config["data"]["init_args"].pop(name, None)
    path.write_text(yaml.safe_dump(config))
    child = run("fit", "--config", path, "--trainer.max_steps=10", cwd=tmp_path).finish()
    assert "the data have no test split: the model is tested on the validation split" in child.err.read_text()
    folder = tmp_path / f"runs/{task}/version_0"
    summary = Run(folder).summary
    assert summary.test is None
    rows = Run(folder).metrics()
    validated = {row["step"] + 1: row["val/loss"] for row in rows if "val/loss" in row}
    assert summary.val["loss"] == pytest.approx(rows[-1]["val/final/loss"])
    assert summary.val["loss"] == pytest.approx(min(validated.values()))
    assert "val/loss" not in rows[-1]
    assert not any(name.startswith("test") for row in rows for name in row)
    curves = collect_run(folder, "run", 1_000, []).curves
    assert [step for step, _ in curves["val/loss"]] == list(validated)
    assert not any(name.startswith("val/final") for name in curves)
    assert re.search(r"^ *val +$", child.out.read_text(), re.MULTILINE), "the heading of the table"
    child = run("runs", cwd=tmp_path)
    assert "val/" in child.out.read_text()


@pytest.mark.parametrize("task", [task for task in TASKS if task.startswith("reviews")], indirect=True)
def test_the_accuracy_of_a_classifier_matches_its_predictions(trained, task):
    lines = Run(trained).predictions
    assert all(line["correct"] == (line["prediction"] == line["target"]) for line in lines)
    accuracy = sum(line["correct"] for line in lines) / len(lines)
    assert Run(trained).summary.test["accuracy"] == pytest.approx(accuracy)
    assert all(0.5 <= line["probability"] <= 1 for line in lines)
    assert (trained / "confusion.png").stat().st_size > 5_000


def test_attention_is_drawn_for_each_layer_of_a_few_examples(trained, task):
    network = load(trained / "checkpoints/best.ckpt").network
    layers = {name for name, module in network.named_modules() if isinstance(module, Attention)}
    pictures = [path.stem.split("_", 2) for path in (trained / "attention").glob("example_*.png")]
    assert {layer for *_, layer in pictures} == {short_name(layer) for layer in layers}
    assert len({layer for *_, layer in pictures}) == len(layers)
    assert 1 <= len({row for _, row, _ in pictures}) <= 4
    positions = {name for name, layer in network.named_modules() if isinstance(layer, Positions)}
    assert positions or "lstm" in task
    others = {path.stem for path in (trained / "attention").glob("*.png") if not path.stem.startswith("example_")}
    assert others == positions


@pytest.mark.parametrize("task", [task for task in TASKS if task.startswith("text")], indirect=True)
def test_the_attention_of_a_language_model_is_causal(trained, task):
    module = load(trained / "checkpoints/best.ckpt")
    network, ids = module.network, module.tokenizer.encode("ein Hund")
    symbols = [module.tokenizer.decode([number]) for number in ids]
    attention_maps = module.attention({"ids": ids})
    layers = [name for name, layer in network.named_modules() if isinstance(layer, Attention)]
    assert [attention_map.layer for attention_map in attention_maps] == layers
    for attention_map in attention_maps:
        assert attention_map.queries == attention_map.keys == symbols
        assert attention_map.weights.triu(1).eq(0).all()
        torch.testing.assert_close(attention_map.weights.sum(-1), torch.ones(attention_map.weights.shape[:2]))


@pytest.mark.parametrize("task", ONE_OF_EACH, indirect=True)
def test_a_report_shows_every_task(task, trained, tmp_path, command):
    page = tmp_path / "report.html"
    command("report", trained, "--output", page)
    html = page.read_text()
    assert "val/loss" in html
    (data,) = page_data(html)["runs"]
    assert data["attention"]
    if task.startswith(("text", "masked")):
        assert data["attention"][0]["title"][:30] in TEXT
    else:
        assert Run(trained).predictions[0]["source"][:5] in html
    assert ("probability" in data["predictions"][0] if data["predictions"] else False) == task.startswith("reviews")


@pytest.mark.parametrize("name", ["imdb_classifier", "imdb_classifier_keras"])
def test_an_archive_in_the_layout_of_imdb_is_learned_and_classified(name, tmp_path, command):
    write_imdb(tmp_path, reviews(300), reviews(60, seed=1))  # the experiment reads its archive from the current folder
    size = ["--trainer.max_steps=120", "--trainer.val_check_interval=40", "--trainer.accelerator=cpu"]
    run("fit", name, *size, "--model.optimizer.lr=0.003", cwd=tmp_path).finish()
    folder = tmp_path / f"runs/{name}/version_0"
    assert len(Run(folder).predictions) == 60, "the test split of the archive is tested"
    assert Run(folder).summary.test["accuracy"] > 0.9
    assert command("generate", folder / "checkpoints/best.ckpt", "the film Great! plot").out.startswith("pos")
