"""End-to-end tests of all tasks on small files."""

from __future__ import annotations

import csv
import json
import math
import re
import unicodedata
from pathlib import Path
from typing import get_args

import pytest
import sacrebleu
import torch
import yaml
from lightning import Trainer

from lightning_tfm.callbacks.attention_logger import short_name
from lightning_tfm.checkpoint import read
from lightning_tfm.errors import UserError
from lightning_tfm.inference.loading import load
from lightning_tfm.layers import Attention, Positions, PositionScheme
from lightning_tfm.layers.losses import token_nll
from lightning_tfm.networks import GPT, CausalNetwork, EncoderClassifier, Seq2SeqNetwork
from lightning_tfm.networks.gpt2 import from_huggingface, start_from_gpt2
from lightning_tfm.reporting.collect import collect_run
from lightning_tfm.tasks import Classifier, Seq2SeqModule
from lightning_tfm.tokenization import NUM_SPECIAL, SymbolTokenizer, normalize_text, train_tokenizer
from support.corpora import TEXT, reviews, write_imdb, write_lines
from support.equality import assert_same_files, contents, equal
from support.experiments import TASKS, network_names, trained_run, write_gpt2, write_task
from support.processes import in_process, run, start, start_two


@pytest.fixture(params=TASKS)
def task(request):
    return request.param


@pytest.fixture
def trained(task, tmp_path_factory):
    return trained_run(task, tmp_path_factory)


def lines_of(folder):
    return [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]


def metrics_of(folder):
    return json.loads((folder / "summary.json").read_text())


def test_training_lowers_the_loss_and_reports_metrics(trained, task):
    rows = list(csv.DictReader((trained / "metrics.csv").read_text().splitlines()))
    losses = [float(row["val/loss"]) for row in rows if row["val/loss"]]
    # In so few steps, a masked language model learns only how frequent each character is.
    assert losses[-1] < (0.99 if task.startswith("masked") else 0.9) * losses[0]
    assert all(float(row["tokens_per_second"]) > 0 for row in rows if row["tokens_per_second"])
    expected = {
        "translation": {"loss", "perplexity", "token_accuracy", "exact_match", "ser", "bleu", "chrf"},
        "spelling": {"loss", "perplexity", "token_accuracy", "exact_match", "ser"},
        "text": {"loss", "loss_per_character", "perplexity"},
        "masked": {"loss", "perplexity", "accuracy"},
        "reviews": {"loss", "accuracy", "f1"},
    }
    summary = metrics_of(trained)
    assert set(summary["test"]) == expected[task.partition("_")[0]]
    assert summary["samples_per_second"] > 0


@pytest.mark.run
def test_a_killed_run_resumes_bitwise(task, trained, tmp_path):
    path = trained.parents[2] / f"{task}.yaml"
    for call in (7, 9, 23):
        child = run(
            "fit",
            "--config",
            path,
            "--ckpt_path=last",
            cwd=tmp_path,
            fault=("before an update of the weights", call),
        )
        assert child.wait() == -9, child.err.read_text()
    child = run("fit", "--config", path, "--ckpt_path=last", cwd=tmp_path)
    assert child.wait() == 0, child.err.read_text()
    assert_same_files(tmp_path / f"runs/{task}/version_0", trained)


@pytest.mark.run
def test_two_processes_reach_the_same_test_metrics(task, trained, tmp_path):
    """Each example is scored once; the weights hardly change, and sums in another order may round differently."""
    path = trained.parents[2] / f"{task}.yaml"
    arguments = ["fit", "--config", path, "--trainer.max_steps=1"]
    arguments.append("--model.init_args.optimizer.init_args.lr=1e-12")
    for name, begin in (("one", start), ("two", start_two)):
        (tmp_path / name).mkdir()
        child = begin(*arguments, cwd=tmp_path / name)
        assert child.wait() == 0, child.err.read_text()
    one, two = (metrics_of(tmp_path / name / f"runs/{task}/version_0")["test"] for name in ("one", "two"))
    assert two == pytest.approx(one, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("task", [task for task in TASKS if task.startswith("translation")], indirect=True)
def test_scores_and_signatures_equal_sacrebleu(task, trained):
    lines, summary = lines_of(trained), metrics_of(trained)
    predictions, references = [line["prediction"] for line in lines], [[line["target"] for line in lines]]
    for name, metric in (("bleu", sacrebleu.BLEU()), ("chrf", sacrebleu.CHRF())):
        assert summary["test"][name] == pytest.approx(metric.corpus_score(predictions, references).score, abs=1e-3)
        assert summary["signatures"][name] == str(metric.get_signature())


@pytest.mark.run
def test_a_checkpoint_is_tested_in_a_folder_of_its_own(task, trained, tmp_path):
    """Evaluate without a YAML, and leave the run unchanged."""
    before = contents(trained)
    for command, split in (("test", "test"), ("validate", "val"), ("test", "test")):
        child = run(command, trained / "checkpoints/best.ckpt", cwd=tmp_path)
        assert child.wait() == 0, child.err.read_text()
        printed = child.out.read_text()
        folder = max(tmp_path.glob(f"runs/{task}/{command}_*"))
        summary = metrics_of(folder)
        assert summary["checkpoint"] == str(trained / "checkpoints/best.ckpt")
        for name, value in summary[split].items():
            assert re.search(rf"^ *{name} +{value:.4f} *$", printed, re.MULTILINE)
        for name, signature in summary.get("signatures", {}).items():
            assert f"{name}: {signature}\n" in printed
        assert f"The results are saved in {folder.relative_to(tmp_path)}.\n" in printed
        (start,) = json.loads((folder / "provenance.json").read_text())
        assert start["checkpoint"] == summary["checkpoint"]
        assert (start["step"], start["changed_settings"]) == (summary["steps"], {})
        if command == "test":
            assert summary["test"] == metrics_of(trained)["test"]
            if (trained / "predictions.jsonl").exists():
                assert (folder / "predictions.jsonl").read_bytes() == (trained / "predictions.jsonl").read_bytes()
        elif (trained / "predictions.jsonl").exists():
            assert {line["split"] for line in lines_of(folder)} == {"val"}
    assert {path.name for path in tmp_path.glob(f"runs/{task}/*")} == {"test_0", "validate_0", "test_1"}
    assert contents(trained) == before
    child = run("runs", cwd=tmp_path)
    assert child.out.read_text().count("evaluated") == 3


@pytest.mark.parametrize("task", ["spelling_gpt", "text_gpt"])
def test_data_without_a_test_split_are_tested_on_the_validation_split(task, tmp_path):
    """Report the metrics as "val", with a message, and log them apart from the learning curve."""
    path = write_task(task, tmp_path)
    config = yaml.safe_load(path.read_text())
    for name in ("test", "test_fraction"):
        config["data"]["init_args"].pop(name, None)
    path.write_text(yaml.safe_dump(config))
    child = run("fit", "--config", path, "--trainer.max_steps=10", cwd=tmp_path)
    assert child.wait() == 0, child.err.read_text()
    assert "the data have no test split: the model is tested on the validation split" in child.err.read_text()
    folder = tmp_path / f"runs/{task}/version_0"
    summary = metrics_of(folder)
    assert "test" not in summary
    rows = list(csv.DictReader((folder / "metrics.csv").read_text().splitlines()))
    assert summary["val"]["loss"] == pytest.approx(float(rows[-1]["val/final/loss"]))
    assert float(rows[-1]["val/final/loss"]) == pytest.approx(min(float(r["val/loss"]) for r in rows if r["val/loss"]))
    assert not rows[-1]["val/loss"]
    assert not any(name.startswith("test") for name in rows[-1])
    curves = collect_run(folder, "run", 1_000, []).curves
    assert [step for step, _ in curves["val/loss"]] == [int(row["step"]) + 1 for row in rows if row["val/loss"]]
    assert not any(name.startswith("val/final") for name in curves)
    assert re.search(r"^ *val +$", child.out.read_text(), re.MULTILINE), "the heading of the table"
    child = run("runs", cwd=tmp_path)
    assert "val/" in child.out.read_text()


@pytest.mark.parametrize("task", ["translation_transformer", "spelling_gpt", "text_gpt", "reviews_classifier"])
@pytest.mark.run
def test_sources_that_also_occur_in_training_are_counted(task, tmp_path):
    path = write_task(task, tmp_path)
    config = yaml.safe_load(path.read_text())
    settings = config["data"]["init_args"]
    if "path" in settings:
        settings["path"] = write_lines(tmp_path / "lines.txt", 20 * ["the same long line, again and again, and again"])
    else:
        settings["val"] = settings["train"]
    path.write_text(yaml.safe_dump(config))
    child = run("fit", "--config", path, "--trainer.max_steps=1", cwd=tmp_path)
    assert child.wait() == 0, child.err.read_text()
    found = re.search(r"([\d,]+) of ([\d,]+) \w+ of val also occur in train", child.err.read_text())
    assert found[1] == found[2] or (task.startswith("reviews") and int(found[1]) > 100)  # some are held out of train


@pytest.mark.parametrize("task", [task for task in TASKS if task.startswith("reviews")], indirect=True)
def test_accuracy_and_f1_match_the_predictions(trained, task):
    lines, test = lines_of(trained), metrics_of(trained)["test"]
    assert test["accuracy"] == pytest.approx(sum(line["correct"] for line in lines) / len(lines))
    scores = []
    for label in ("neg", "pos"):
        hits = sum(line["prediction"] == line["target"] == label for line in lines)
        scores.append(2 * hits / sum((line["prediction"] == label) + (line["target"] == label) for line in lines))
    assert test["f1"] == pytest.approx(sum(scores) / 2)
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
    found = module.attention({"ids": ids})
    assert [attention_map.layer for attention_map in found] == [
        name for name, layer in network.named_modules() if isinstance(layer, Attention)
    ]
    for attention_map in found:
        assert attention_map.queries == attention_map.keys == symbols
        assert attention_map.weights.triu(1).eq(0).all()
        torch.testing.assert_close(attention_map.weights.sum(-1), torch.ones(attention_map.weights.shape[:2]))


@pytest.mark.parametrize("positions", get_args(PositionScheme))
def test_a_network_is_tested_on_longer_texts_unless_its_positions_are_learned(positions):
    def module(max_length):
        network = GPT(11, 16, 2, 1, max_length=max_length, positions=positions)
        return Seq2SeqModule(network, SymbolTokenizer("abcdefgh"), max_target_length=8)

    trained, trainer = module(20), Trainer(accelerator="cpu", logger=False, barebones=True)
    checkpoint = {"hyper_parameters": dict(trained.hparams_initial), "state_dict": trained.state_dict()}
    module(20).check_checkpoint(checkpoint, "best.ckpt", trainer, resuming=False)
    if positions != "learned":
        module(30).check_checkpoint(checkpoint, "best.ckpt", trainer, resuming=False)
        return
    with pytest.raises(UserError, match=r"whose positions are learned \(max_length 20, not 30\); use its config.yaml"):
        module(30).check_checkpoint(checkpoint, "best.ckpt", trainer, resuming=False)


# Predictions


def test_generate_writes_an_output_for_every_line(task, trained, monkeypatch, tmp_path, capsys):
    inputs = {
        "translation": ["der Hund schläft", "ein Kind"],
        "spelling": ["abc", "e"],
        "text": ["der", "ein Hu"],
        "masked": ["de[MASK] Hund", "[MASK]"],
        "reviews": ["GREAT! film", "the plot is Awful"],
    }[task.partition("_")[0]]
    checkpoint = trained / "checkpoints/best.ckpt"
    assert in_process(monkeypatch, "generate", checkpoint, *inputs) == 0
    out = capsys.readouterr().out
    if task.startswith("text"):
        texts = out.split("\n--------------------\n")
        assert [text[: len(prompt)] for text, prompt in zip(texts, inputs, strict=False)] == inputs
        assert [len(text.removesuffix("\n")) - len(inputs[i]) for i, text in enumerate(texts)] == [500, 500]
        return
    outputs = out.splitlines()
    assert len(outputs) == 2
    (tmp_path / "input").write_text("\n".join([*inputs, "", inputs[0]]) + "\n")
    files = ["--input", tmp_path / "input", "--output", tmp_path / "output"]
    assert in_process(monkeypatch, "generate", checkpoint, *files) == 1, "the blank line is an error"
    assert (tmp_path / "output").read_text().splitlines() == [*outputs, "", outputs[0]]
    if task.startswith("reviews"):
        module = load(checkpoint)
        for line, text in zip(outputs, inputs, strict=True):
            label, probability = line.split("\t")
            with torch.no_grad():
                probabilities = module.network(torch.tensor([module.tokenizer.encode(text)])).softmax(-1)[0]
            assert label == module.labels[probabilities.argmax()]
            assert float(probability) == pytest.approx(probabilities.max().item(), abs=1e-4)


def encoded(checkpoint, text):
    try:
        return load(checkpoint).encode_line(normalize_text(text))
    except UserError as error:
        return str(error)


def test_nfc_and_nfd_inputs_have_the_same_outputs(task, trained, monkeypatch, tmp_path, capsys):
    inputs = "schl\u00e4ft \ud55c" + task.startswith("masked") * "[MASK]"
    checkpoint, results = trained / "checkpoints/best.ckpt", []
    for form in ("NFC", "NFD"):
        text = unicodedata.normalize(form, inputs)
        (tmp_path / form).write_text(f"{text}\n")
        for arguments in ([text], ["--input", tmp_path / form]):
            status = in_process(monkeypatch, "generate", checkpoint, *arguments)
            results.append((status, *capsys.readouterr(), encoded(checkpoint, text)))
    assert results[0][0] == 0
    assert results[1:] == results[:1] * 3


def test_blank_lines_are_reported(task, trained, monkeypatch, tmp_path, capsys):
    """A language model continues a line of blanks; for the other tasks, it is empty."""
    blanks = [b"", b"\r"] if task.startswith("text") else [b"", b"\r", b"  ", b"\t", " \t\u3000".encode()]
    valid = {"reviews": b"the film", "masked": b"e[MASK]"}.get(task.partition("_")[0], b"e")
    (tmp_path / "input").write_bytes(b"\n".join([valid, *blanks, valid]) + b"\n")
    files = ["--input", tmp_path / "input", "--output", tmp_path / "output", "--max-tokens=3"]
    files = files[:-1] if task.startswith(("reviews", "masked")) else files
    assert in_process(monkeypatch, "generate", trained / "checkpoints/best.ckpt", *files) == 1
    notes = [f"lightning-tfm: line {number}: the text is empty" for number, _ in enumerate(blanks, start=2)]
    assert [line for line in capsys.readouterr().err.splitlines() if "unknown" not in line] == notes
    if not task.startswith("text"):
        first, *empty, last = (tmp_path / "output").read_text().splitlines()
        assert first == last
        assert empty == [""] * len(blanks)


def test_help_explains_the_temperature(monkeypatch, capsys):
    assert in_process(monkeypatch, "generate", "--help") == 0
    assert "lower is more conservative" in " ".join(capsys.readouterr().out.split())


def test_prompts_are_continued_as_typed(tmp_path_factory, monkeypatch, capsys):
    """Line feeds of an argument are kept, unknown symbols are reported, and an empty prompt has no continuation."""
    checkpoint = trained_run("text_gpt", tmp_path_factory) / "checkpoints/best.ckpt"
    assert in_process(monkeypatch, "generate", checkpoint, "der\n", "\n", "\u03a9der", "", "--max-tokens=5") == 1
    out, err = capsys.readouterr()
    texts = out.removesuffix("\n").split("\n--------------------\n")
    assert [text[:4] for text in texts] == ["der\n", texts[1][:4], "\ufffdder", ""]
    assert texts[1].startswith("\n")
    assert err.splitlines() == [
        "lightning-tfm: line 3: 1 of 4 tokens are not in the vocabulary",
        "lightning-tfm: line 4: the text is empty",
    ]


def test_a_line_that_is_not_utf8_is_reported(trained, monkeypatch, tmp_path, capsys):
    (tmp_path / "input").write_bytes(b"ein Hund\nein H\xfcnd\n")
    checkpoint = trained / "checkpoints/best.ckpt"
    assert in_process(monkeypatch, "generate", checkpoint, "--input", tmp_path / "input") == 1
    out, err = capsys.readouterr()
    assert "line 2: it is not valid UTF-8" in err
    assert out.endswith("\n\n"), "one line of output per line of input"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "reviews_classifier",
            ["--temperature", "1"],
            "temperature must not be set for a Classifier, which has no decoding options, but is 1.0; leave it out",
        ),
        ("reviews_classifier", ["--n-best", "2"], "n_best must not be set for a Classifier"),
        ("reviews_classifier", ["--show-attention"], "--show-attention must not be set for a Classifier"),
        (
            "text_gpt",
            ["--n-best", "2"],
            "n_best must not be set for a LanguageModel, which supports only temperature, top_k, top_p, "
            "max_tokens, but is 2",
        ),
        ("reviews_classifier", ["--max-tokens", "9"], "max_tokens must not be set for a Classifier"),
        ("text_gpt", ["--beam-size", "3"], "beam_size must not be set for a LanguageModel"),
        ("text_gpt", ["--max-tokens", "0"], "max_tokens must be at least 1, but is 0"),
        ("text_gpt", ["--temperature", "0", "--top-k", "3"], "top_k and top_p need a temperature above 0"),
    ],
)
def test_invalid_options_of_a_task_are_refused(name, options, message, tmp_path_factory, monkeypatch, capsys):
    checkpoint = trained_run(name, tmp_path_factory) / "checkpoints/best.ckpt"
    assert in_process(monkeypatch, "generate", checkpoint, "abc", *options) == 2
    assert message in capsys.readouterr().err


def test_continuations_are_determined_by_the_seed_or_greedy(tmp_path_factory, monkeypatch, capsys):
    checkpoint = trained_run("text_gpt", tmp_path_factory) / "checkpoints/best.ckpt"

    def generate_text(*options):
        assert in_process(monkeypatch, "generate", checkpoint, "der", "--max-tokens", "40", *options) == 0
        return capsys.readouterr().out

    assert (
        generate_text()
        == generate_text("--seed", "0")
        == generate_text("--temperature", "0.8")
        != generate_text("--seed", "1")
    )
    greedy = generate_text("--temperature", "0")
    module = load(checkpoint)
    network, tokenizer = module.network, module.tokenizer
    text = tokenizer.encode("der")
    while len(text) < 43:  # recompute each token from the whole text, while it fits
        if len(text) > network.max_length:
            break
        with torch.no_grad():
            logits = network(torch.empty(1, 0, dtype=torch.long), torch.tensor([text]))[0, -1]
        logits[:3] = -math.inf
        text.append(int(logits.argmax()))
    assert greedy.startswith(tokenizer.decode(text))
    assert len(greedy) == 43 + 1


def test_a_report_shows_every_task(task, trained, monkeypatch, tmp_path, capsys):
    page = tmp_path / "report.html"
    assert in_process(monkeypatch, "report", trained, "--output", page) == 0, capsys.readouterr().err
    html = page.read_text()
    assert "val/loss" in html
    (shown,) = json.loads(re.search(r'id="data">(.*?)</script>', html, re.DOTALL)[1])["runs"]
    assert shown["attention"]
    if task.startswith(("text", "masked")):
        assert shown["attention"][0]["title"][:30] in TEXT
    else:
        assert lines_of(trained)[0]["source"][:5] in html
    assert ("probability" in shown["predictions"][0] if shown["predictions"] else False) == task.startswith("reviews")


# Mismatched components


def change(path, **changes):
    config = yaml.safe_load(path.read_text())
    for name, value in changes.items():
        if name == "network":
            config["model"]["init_args"]["network"] = {"class_path": f"lightning_tfm.networks.{value}"}
        elif name == "module":
            config["model"]["class_path"] = f"lightning_tfm.tasks.{value}"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.mark.parametrize(
    ("name", "changes", "messages"),
    [
        (
            "text_gpt",
            {"module": "Seq2SeqModule", "network": "AttentionLSTM"},
            ["learn from a text, the data of Text, but Seq2SeqModule learns from pairs of source and target",
             "try lightning_tfm.tasks.LanguageModel"],
        ),
        (
            "text_gpt",
            {"network": "AttentionLSTM"},
            ["model.network must be", "AttentionLSTM", network_names(CausalNetwork)],
        ),
        (
            "reviews_classifier",
            {"module": "LanguageModel", "network": "GPT"},
            ["learn from texts with labels, the data of Sentiment", "try lightning_tfm.tasks.Classifier"],
        ),
        (
            "spelling_gpt",
            {"module": "Classifier", "network": "EncoderClassifier"},
            ["learn from pairs of source and target, the data of Tsv", "try lightning_tfm.tasks.Seq2SeqModule"],
        ),
        (
            "reviews_classifier",
            {"network": "Transformer"},
            ["model.network must be", "Transformer", "available: EncoderClassifier"],
        ),
        (
            "spelling_gpt",
            {"network": "EncoderClassifier"},
            ["model.network must be", "EncoderClassifier", network_names(Seq2SeqNetwork)],
        ),
    ],
)  # fmt: skip
def test_mismatched_components_are_refused_with_a_suggestion(name, changes, messages, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    path = change(write_task(name, tmp_path), **changes)
    assert in_process(monkeypatch, "fit", "--config", path) == 2
    (line,) = capsys.readouterr().err.splitlines()
    for message in messages:
        assert message in line
    assert not (tmp_path / "runs").exists()


def test_empty_files_are_refused_before_training(task, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    path = write_task(task, tmp_path)
    for file in tmp_path.iterdir():
        if file != path:
            file.write_bytes(b"")
    assert in_process(monkeypatch, "fit", "--config", path) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(r"lightning-tfm: error: the file '.*' must hold text, but is empty", line)
    assert not (tmp_path / "runs").exists()


def test_an_oversized_batch_is_refused_before_training(task, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    size = "batch_tokens=null" if task.startswith("translation") else "batch_size=500"
    more = ["--data.init_args.batch_size=500"] if task.startswith("translation") else []
    path = write_task(task, tmp_path)
    assert in_process(monkeypatch, "fit", "--config", path, f"--data.init_args.{size}", *more) == 2
    assert re.search(r"error: batch_size must be at most the \d+ ", capsys.readouterr().err.splitlines()[-1])
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("setting", [{"word_dropout": 0.1}, {"num_bigram_buckets": 9}])
def test_settings_for_words_are_refused_with_subwords(setting):
    tokenizer = train_tokenizer(["a film"], "subword", 300)
    network = EncoderClassifier(tokenizer.vocab_size, 2, 9, **setting)
    with pytest.raises(UserError, match=f"{next(iter(setting))} must not be set for subwords"):
        Classifier(network, tokenizer, ["neg", "pos"])


def test_an_archive_in_the_layout_of_imdb_is_learned_and_classified(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    write_imdb(tmp_path, reviews(300), reviews(60, seed=1))  # the experiment reads its archive from the current folder
    path = Path(__file__).parents[2] / "experiments/imdb_classifier.yaml"
    size = ["--trainer.max_steps=120", "--trainer.val_check_interval=40", "--trainer.accelerator=cpu"]
    size.append("--model.init_args.optimizer.init_args.lr=0.003")
    child = run("fit", "--config", path, *size, cwd=tmp_path)
    assert child.wait() == 0, child.err.read_text()
    folder = tmp_path / "runs/imdb_classifier/version_0"
    assert len(lines_of(folder)) == 60, "the test split of the archive is tested"
    assert metrics_of(folder)["test"]["accuracy"] > 0.9
    assert in_process(monkeypatch, "generate", folder / "checkpoints/best.ckpt", "the film Great! plot") == 0
    assert capsys.readouterr().out.startswith("pos")


def test_a_text_longer_than_the_models_positions_is_refused(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    path = write_task("text_gpt", tmp_path)
    assert in_process(monkeypatch, "fit", "--config", path, "--data.init_args.max_length=17") == 2
    assert "max_length 16 positions; try max_length 17" in capsys.readouterr().err


# Averaged weights


@pytest.mark.run
def test_averaged_weights_are_validated_tested_and_resumed(tmp_path):
    """The best checkpoint contains the average, and a killed run resumes it bit for bit."""
    path = write_task("reviews_classifier", tmp_path)
    averaging = "--trainer.callbacks+={class_path: lightning_tfm.callbacks.WeightAveraging, init_args: {decay: 0.8}}"
    arguments = ["fit", "--config", path, averaging, "--trainer.max_steps=10", "--checkpoint.every_n_train_steps=1"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for cwd in (whole, killed):
        cwd.mkdir()
    child = run(*arguments, cwd=whole)
    assert child.wait() == 0, child.err.read_text()
    for call in (4, 5):
        child = run(*arguments, "--ckpt_path=last", cwd=killed, fault=("before an update of the weights", call))
        assert child.wait() == -9, child.err.read_text()
    child = run(*arguments, "--ckpt_path=last", cwd=killed)
    assert child.wait() == 0, child.err.read_text()
    folders = [cwd / "runs/reviews_classifier/version_0" for cwd in (whole, killed)]
    assert_same_files(*folders)
    last = read(folders[0] / "checkpoints/last.ckpt")
    assert any(not weight.equal(last["current_model_state"][name]) for name, weight in last["state_dict"].items())
    child = run("test", "--config", path, "--ckpt_path", folders[0] / "checkpoints/best.ckpt", cwd=tmp_path)
    assert child.wait() == 0, child.err.read_text()
    accuracy = metrics_of(folders[0])["test"]["accuracy"]
    printed = float(re.search(r"^ *accuracy +([\d.]+)", child.out.read_text(), re.MULTILINE)[1])
    assert printed == pytest.approx(accuracy, abs=1e-4), "the average is tested"


def test_the_average_equals_its_definition(tmp_path):
    """The average covers about a third of the steps at first, and uses the configured decay from the fourth step."""
    path = write_task("reviews_classifier", tmp_path)
    averaging = "--trainer.callbacks+={class_path: lightning_tfm.callbacks.WeightAveraging, init_args: {decay: 0.45}}"
    expected = None
    for steps in range(1, 5):  # killed with equal max_steps, on which the schedule depends
        cwd = tmp_path / str(steps)
        cwd.mkdir()
        child = run(
            "fit", "--config", path, averaging, "--trainer.max_steps=4", "--checkpoint.every_n_train_steps=1",
            cwd=cwd, fault=("before an update of the weights", steps + 1),
        )  # fmt: skip
        assert child.wait() in (0, -9)
        last = read(cwd / "runs/reviews_classifier/version_0/checkpoints/last.ckpt")
        assert last["global_step"] == steps
        trained = last["current_model_state"]
        if expected is None:
            expected = {name: weight.double() for name, weight in trained.items()}
        else:
            share = {2: 3 / 4, 3: 3 / 5, 4: 0.55}[steps]
            expected = {name: (1 - share) * mean + share * trained[name].double() for name, mean in expected.items()}
        for name, mean in expected.items():
            torch.testing.assert_close(last["state_dict"][name].double(), mean, rtol=1e-4, atol=1e-6)


@pytest.mark.run
def test_adding_or_removing_weight_averaging_is_refused_on_resuming(tmp_path, monkeypatch, capsys):
    """The state of the optimizer would belong to other weights."""
    monkeypatch.chdir(tmp_path)
    path = write_task("spelling_gpt", tmp_path)
    averaging = "--trainer.callbacks+=lightning_tfm.callbacks.WeightAveraging"
    arguments = ["fit", "--config", path, "--trainer.max_steps=2"]
    for version, (before, now, message) in enumerate(
        (
            ([], [averaging], "must not contain WeightAveraging to resume from '.*', which was trained without it"),
            ([averaging], [], "must contain WeightAveraging to resume from '.*', which was trained with it"),
        )
    ):
        child = run(*arguments, *before, cwd=tmp_path)
        assert child.wait() == 0, child.err.read_text()
        last = f"--ckpt_path=runs/spelling_gpt/version_{version}/checkpoints/last.ckpt"
        assert in_process(monkeypatch, *arguments, *now, last) == 2
        assert re.search(message, capsys.readouterr().err)


def test_checkpoints_are_averaged(tmp_path_factory, monkeypatch, tmp_path, capsys):
    """A run can keep the checkpoints of its last validations to average them."""
    folder = trained_run("spelling_gpt", tmp_path_factory)
    child = run("fit", "--config", folder.parents[2] / "spelling_gpt.yaml", "--checkpoint.keep_last=3", cwd=tmp_path)
    assert child.wait() == 0
    checkpoints = tmp_path / "runs/spelling_gpt/version_0/checkpoints"
    paths = [checkpoints / f"step_{step}.ckpt" for step in (20, 30, 40)]
    assert sorted(checkpoints.glob("*.ckpt")) == sorted([*paths, checkpoints / "best.ckpt", checkpoints / "last.ckpt"])
    assert [read(path)["global_step"] for path in paths] == [20, 30, 40]
    equal(read(paths[2])["state_dict"], read(checkpoints / "last.ckpt")["state_dict"])
    mean = tmp_path / "mean.ckpt"
    assert in_process(monkeypatch, "average", *paths, "--output", mean) == 0, capsys.readouterr().err
    weights = [read(path)["state_dict"] for path in (*paths, mean)]
    for name, weight in weights[3].items():
        torch.testing.assert_close(weight, sum(other[name] for other in weights[:3]) / 3)
    assert in_process(monkeypatch, "generate", mean, "abc") == 0
    child = run("test", "--config", folder.parents[2] / "spelling_gpt.yaml", "--ckpt_path", mean, cwd=tmp_path)
    assert child.wait() == 0, child.err.read_text()
    other = trained_run("text_gpt", tmp_path_factory) / "checkpoints/best.ckpt"
    capsys.readouterr()
    assert in_process(monkeypatch, "average", paths[0], other, "--output", tmp_path / "none.ckpt") == 2
    message = capsys.readouterr().err
    assert "all checkpoints must have the same class_path" in message
    assert len(set(re.findall(r"'[^']+'", message))) == 2, "both files are named"
    assert in_process(monkeypatch, "average", paths[0], "--output", mean) == 2
    assert "--output must be a new file" in capsys.readouterr().err
    path = folder.parents[2] / "spelling_gpt.yaml"
    assert in_process(monkeypatch, "fit", "--config", path, "--ckpt_path", mean) == 2
    assert "mean.ckpt' must hold the optimizer's state to resume its run" in capsys.readouterr().err


# Fine-tuning


@pytest.fixture(params=[-55.0])
def gpt2_folder(tmp_path, request):
    """Save a small GPT-2 of Hugging Face with a tokenizer; the parameter shifts its logits."""
    return write_gpt2(tmp_path / "gpt2", request.param)


@pytest.mark.parametrize("gpt2_folder", [0.0, -55.0, -300.0, 55.0], indirect=True)
def test_gpt2_equals_hugging_face_over_the_whole_vocabulary(gpt2_folder, tmp_path):
    """PAD, BOS and EOS have zero probability for any shift of the logits."""
    from transformers import GPT2LMHeadModel

    theirs = GPT2LMHeadModel.from_pretrained(gpt2_folder).eval()
    network = from_huggingface(theirs, NUM_SPECIAL).eval()
    ids = torch.randint(287, (4, 16))
    tokens = ids + NUM_SPECIAL
    with torch.no_grad():
        expected = theirs(ids, labels=ids)
        ours = network(tokens[:, :0], tokens)
        stepwise, _ = network.decode_step(tokens[:, -1], network.encode(tokens[:, :-1]))
    probabilities = torch.nn.functional.pad(expected.logits.softmax(-1), (NUM_SPECIAL, 0))
    torch.testing.assert_close(ours.softmax(-1), probabilities, rtol=0, atol=1e-5)
    torch.testing.assert_close(stepwise.softmax(-1), probabilities[:, -1], rtol=0, atol=1e-5)
    loss = token_nll(ours[:, :-1], tokens[:, 1:]) / tokens[:, 1:].numel()
    assert loss.item() == pytest.approx(expected.loss.item(), abs=1e-5)
    assert all(weight.isfinite().all() for weight in network.state_dict().values())


def gpt2_settings(folder):
    return [
        f"--model.init_args.pretrained={folder}",
        "--model.init_args.network.init_args.activation=gelu_tanh",
        "--model.init_args.network.init_args.text_only=true",
        "--model.init_args.network.init_args.positions=learned",
        f"--data.init_args.tokenizer_file={folder / 'tokenizer.json'}",
    ]


def test_fine_tuning_lowers_the_loss_of_gpt2(gpt2_folder, tmp_path):
    path = write_task("text_gpt", tmp_path)
    validated = ["--trainer.val_check_interval=1", "--trainer.max_steps=30"]
    rate = ["--model.init_args.optimizer.init_args.lr=3e-3", "--model.init_args.lr_schedule.warmup_steps=0"]
    child = run("fit", "--config", path, *gpt2_settings(gpt2_folder), *validated, *rate, cwd=tmp_path)
    assert child.wait() == 0, child.err.read_text()
    with (tmp_path / "runs/text_gpt/version_0/metrics.csv").open() as file:
        losses = [float(row["val/loss"]) for row in csv.DictReader(file) if row.get("val/loss")]
    assert losses[0] == pytest.approx(math.log(287), abs=0.3), "a random model is uniform over the ids of GPT-2"
    assert losses[-1] < losses[0] - 0.3


def test_training_starts_from_the_weights_of_gpt2(gpt2_folder, tmp_path):
    from transformers import GPT2LMHeadModel

    path = write_task("text_gpt", tmp_path)
    settings = [
        *gpt2_settings(gpt2_folder),
        "--trainer.max_steps=1",
        "--model.init_args.optimizer.init_args.lr=1e-12",
    ]
    child = run("fit", "--config", path, *settings, cwd=tmp_path, fault=("after a validation", 2))
    assert child.wait() == -9, child.err.read_text()
    module = load(tmp_path / "runs/text_gpt/version_0/checkpoints/best.ckpt")
    network, tokenizer = module.network, module.tokenizer
    theirs = GPT2LMHeadModel.from_pretrained(gpt2_folder).eval()
    ids = torch.tensor([tokenizer.encode(TEXT[:30])[:12]])
    with torch.no_grad():
        ours = network(ids[:, :0], ids).softmax(-1)
        expected = torch.nn.functional.pad(theirs(ids - 3).logits.softmax(-1), (3, 0))
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)
    (Path(gpt2_folder) / "model.safetensors").unlink()  # a resumed run does not need it
    child = run("fit", "--config", path, *settings, "--ckpt_path=last", cwd=tmp_path)
    assert child.wait() == 0, child.err.read_text()


def test_rounded_weights_of_gpt2_are_reported(gpt2_folder, capsys):
    from transformers import GPT2LMHeadModel

    network = GPT(NUM_SPECIAL + 287, 16, 2, 1, max_length=16, activation="gelu_tanh", text_only=True)
    start_from_gpt2(network, str(gpt2_folder))
    assert "rounded" not in capsys.readouterr().err
    GPT2LMHeadModel.from_pretrained(gpt2_folder).double().save_pretrained(gpt2_folder)
    start_from_gpt2(network, str(gpt2_folder))
    assert "of torch.float64, are rounded to torch.float32" in capsys.readouterr().err


def truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


def remove_weights(folder):
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    weights = {name: weight for name, weight in load_file(path).items() if "c_attn" not in name}
    save_file(weights, path, {"format": "pt"})


def change_model_type(folder):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "bert"}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "gpt2' is not: "),
        (remove_weights, "gpt2' is not: it lacks transformer.h.0.attn.c_attn.bias"),
        (change_model_type, "gpt2' is not: it holds a model of type bert"),
    ],
)
def test_a_damaged_folder_of_gpt2_is_refused(damage, message, gpt2_folder, tmp_path, monkeypatch, capsys):
    """Missing weights would be random, and training would start from noise."""
    monkeypatch.chdir(tmp_path)
    arguments = [
        "--model.init_args.network.init_args.activation=gelu_tanh",
        f"--model.init_args.pretrained={gpt2_folder}",
    ]
    arguments.append(f"--data.init_args.tokenizer_file={gpt2_folder / 'tokenizer.json'}")
    damage(gpt2_folder)
    assert in_process(monkeypatch, "fit", "--config", write_task("text_gpt", tmp_path), *arguments) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 2}, r"num_layers must match '.*gpt2', but is 2; set it to 1"),
        ({"text_only": "false"}, r"text_only must match '.*gpt2', but is False; set it to True"),
        ({"activation": "gelu"}, r"activation must match '.*gpt2', but is gelu; set it to gelu_tanh"),
        ({"tokenizer_file": "null"}, r"tokenizer_file must be the tokenizer.json of '.*gpt2', which has 290 ids, but"),
        (
            {"folder": "none"},
            r"pretrained must be a folder with a Hugging Face GPT-2, but there is no none/config.json",
        ),
    ],
)
def test_mismatched_pretrained_weights_are_refused(change, message, gpt2_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = write_task("text_gpt", tmp_path)
    settings = {"activation": "gelu_tanh", "positions": "learned", "text_only": "true"}
    settings |= {n: value for n, value in change.items() if n not in ("folder", "tokenizer_file")}
    arguments = [f"--model.init_args.network.init_args.{name}={value}" for name, value in settings.items()]
    arguments.append(f"--model.init_args.pretrained={change.get('folder', gpt2_folder)}")
    file = change.get("tokenizer_file", gpt2_folder / "tokenizer.json")
    arguments.append(f"--data.init_args.tokenizer_file={file}")
    assert in_process(monkeypatch, "fit", "--config", path, *arguments) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "runs").exists(), "the run ends before training"
