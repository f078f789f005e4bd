"""Data, tasks and networks that do not fit each other."""

import re
from typing import get_args

import pytest
import yaml
from lightning import Trainer

from lightning_tfm.errors import UserError
from lightning_tfm.layers import PositionScheme
from lightning_tfm.networks import GPT, CausalNetwork, EncoderClassifier, Seq2SeqNetwork
from lightning_tfm.tasks import Classifier, Seq2SeqModule
from lightning_tfm.tokenization import SymbolTokenizer, train_tokenizer
from support.experiments import network_names, write_task
from support.networks import joined


@pytest.mark.parametrize("members", [0, 2])
@pytest.mark.parametrize("positions", get_args(PositionScheme))
def test_a_network_is_tested_on_longer_texts_unless_its_positions_are_learned(positions, members):
    def module(max_length):
        network = GPT(11, 16, 2, 1, max_length=max_length, positions=positions)
        network = joined(*[network] * members) if members else network
        return Seq2SeqModule(network, SymbolTokenizer("abcdefgh"), max_target_length=8)

    trained, trainer = module(20), Trainer(accelerator="cpu", logger=False, barebones=True)
    checkpoint = {"hyper_parameters": dict(trained.hparams_initial), "state_dict": trained.state_dict()}
    module(20).check_checkpoint(checkpoint, "best.ckpt", trainer, resuming=False)
    if positions != "learned":
        module(30).check_checkpoint(checkpoint, "best.ckpt", trainer, resuming=False)
        return
    with pytest.raises(UserError, match=r"whose positions are learned \(max_length 20, not 30\); use its config.yaml"):
        module(30).check_checkpoint(checkpoint, "best.ckpt", trainer, resuming=False)


CAUSAL, SEQ2SEQ = network_names(CausalNetwork), network_names(Seq2SeqNetwork)


@pytest.mark.parametrize(
    ("name", "task", "network", "message"),
    [
        ("text_gpt", "Seq2SeqModule", "AttentionLSTM", "a text, the data of Text, .*; try .*LanguageModel"),
        ("text_gpt", None, "AttentionLSTM", f"model.network must be .*AttentionLSTM.*{CAUSAL}"),
        ("reviews_classifier", "LanguageModel", "GPT", "texts with labels, .* of Sentiment, .*; try .*Classifier"),
        ("spelling_gpt", "Classifier", "EncoderClassifier", "pairs .*, the data of Tsv, .*; try .*Seq2SeqModule"),
        ("reviews_classifier", None, "Transformer", "model.network must be .*Transformer.*: EncoderClassifier"),
        ("spelling_gpt", None, "EncoderClassifier", f"model.network .*EncoderClassifier.*{SEQ2SEQ}"),
    ],
)
def test_mismatched_components_are_refused_with_a_suggestion(name, task, network, message, tmp_path, mistake):
    path = write_task(name, tmp_path)
    config = yaml.safe_load(path.read_text())
    config["model"]["class_path"] = f"lightning_tfm.tasks.{task or config['model']['class_path'].rpartition('.')[2]}"
    config["model"]["init_args"]["network"] = {"class_path": f"lightning_tfm.networks.{network}"}
    path.write_text(yaml.safe_dump(config))
    assert re.search(message, mistake("fit", "--config", path))
    assert not (tmp_path / "runs").exists()


def test_empty_files_are_refused_before_training(task, tmp_path, mistake):
    path = write_task(task, tmp_path)
    for file in tmp_path.iterdir():
        if file != path:
            file.write_bytes(b"")
    line = mistake("fit", "--config", path)
    assert re.match(r"lightning-tfm: error: the file '.*' must hold text, but is empty", line)
    assert not (tmp_path / "runs").exists()


def test_an_oversized_batch_is_refused_before_training(task, tmp_path, command):
    size = "batch_tokens=null" if task.startswith("translation") else "batch_size=500"
    more = ["--data.init_args.batch_size=500"] if task.startswith("translation") else []
    path = write_task(task, tmp_path)
    _, err = command("fit", "--config", path, f"--data.init_args.{size}", *more, status=2)
    assert re.search(r"error: batch_size must be at most the \d+ ", err.splitlines()[-1])
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("setting", [{"word_dropout": 0.1}, {"num_bigram_buckets": 9}])
def test_settings_for_words_are_refused_with_subwords(setting):
    tokenizer = train_tokenizer(["a film"], "subword", 300)
    network = EncoderClassifier(tokenizer.vocab_size, 2, 9, **setting)
    with pytest.raises(UserError, match=f"{next(iter(setting))} must not be set for subwords"):
        Classifier(network, tokenizer, ["neg", "pos"])


def test_a_text_longer_than_the_models_positions_is_refused(tmp_path, command):
    path = write_task("text_gpt", tmp_path)
    _, err = command("fit", "--config", path, "--data.init_args.max_length=17", status=2)
    assert "max_length 16 positions; try max_length 17" in err
