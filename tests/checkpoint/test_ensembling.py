"""Checkpoints of ensembles: their content, what they refuse, and the commands that read them."""

import re
import sys

import pytest
import torch
import yaml

from lightning_tfm.checkpoint import FORMAT, join_checkpoints, read, write
from lightning_tfm.checkpoint.content import ENSEMBLE
from lightning_tfm.errors import UserError
from lightning_tfm.inference.decoding import DecodingOptions
from lightning_tfm.inference.loading import load
from lightning_tfm.networks import GPT, AttentionLSTM, Ensemble, Transformer
from lightning_tfm.runs.record import Run
from lightning_tfm.tokenization import SymbolTokenizer
from support.experiments import trained_run, write_task
from support.networks import joined, randomize
from support.processes import run

SIZES = {"vocab_size": 10, "max_length": 42, "d_model": 16, "num_heads": 2, "num_layers": 1}


def content(network, **parameters):
    """Return the content of a checkpoint, as `fit` writes it, except for the state of the training."""
    description = joined(network).hyper_parameters["members"][0]
    config = {"seed_everything": 1, "model": {"init_args": {"network": description, "beam_size": 1}}}
    return {
        "format_version": FORMAT,
        "global_step": 4,
        "state_dict": {f"network.{name}": weight for name, weight in network.state_dict().items()},
        "hyper_parameters": {
            "class_path": "lightning_tfm.tasks.seq2seq.Seq2SeqModule",
            "predictor": "lightning_tfm.inference.seq2seq.Seq2SeqPredictor",
            "network": description,
            "tokenizer": SymbolTokenizer("0123456").to_dict(),
            "max_target_length": 15,
            "optimizer": {},
            "lr_schedule": {},
            **parameters,
        },
        "experiment": {"name": "x", "config": yaml.safe_dump(config)},
        "data_fingerprint": {"train": "a", "val": "b", "test": "c"},
        "longest_source": 14,
        "shortest_source": 2,
        "alignment_head": None,
    }


@pytest.fixture
def members(tmp_path):
    """Write checkpoints of networks of three classes, and return their paths with the networks."""
    torch.manual_seed(0)
    networks = [randomize(make()) for make in (lambda: GPT(**SIZES), lambda: Transformer(**SIZES, d_ff=32))]
    networks += [randomize(AttentionLSTM(10, 16))]
    paths = [tmp_path / f"{number}.ckpt" for number in range(3)]
    for path, network in zip(paths, networks, strict=True):
        write(content(network.eval()), path)
    return paths, networks


def test_an_ensemble_has_the_networks_of_its_checkpoints(members, tmp_path):
    paths, networks = members
    write(
        content(networks[0]) | {"alignment_head": ("layers.0.self_attention", 1), "data_fingerprint": {"test": "c"}},
        paths[0],
    )
    write(join_checkpoints(paths, "trio"), tmp_path / "trio.ckpt")
    predictor, saved = load(tmp_path / "trio.ckpt"), read(tmp_path / "trio.ckpt")
    assert isinstance(predictor.network, Ensemble)
    source, target_in = torch.randint(3, 10, (4, 6)), torch.randint(3, 10, (4, 5))
    with torch.no_grad():
        expected = sum(network(source, target_in).softmax(-1) for network in networks) / 3
        torch.testing.assert_close(predictor.network(source, target_in).exp(), expected)
    assert predictor.alignment_head == ("members.0.layers.0.self_attention", 1)
    assert saved["members"] == [*map(str, paths)]
    assert saved["experiment"]["name"] == "trio"
    assert "optimizer_states" not in saved
    config = yaml.safe_load(saved["experiment"]["config"])
    network = config["model"]["init_args"].pop("network")
    assert config == {"seed_everything": 1, "model": {"init_args": {"beam_size": 1}}}
    assert network["class_path"] == ENSEMBLE
    assert network["init_args"]["members"] == predictor.network.hyper_parameters["members"]
    options = DecodingOptions(beam_size=2, n_best=2, alignments=True, scores=True, steps=True)
    (prediction,) = predictor.predict(["123"], options)
    assert len(prediction.outputs) == 2
    assert predictor.attention(predictor.example("123", prediction.text))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"hyper_parameters": {"tokenizer": SymbolTokenizer("abcdefg").to_dict()}},
            "the same tokenizer, .*0.*1.*differ",
        ),
        ({"hyper_parameters": {"max_target_length": 16}}, "the same max_target_length, .*0.*1.*differ"),
        ({"hyper_parameters": {"class_path": "my_tasks.Task"}}, "the same class_path, .*0.*1.*differ"),
        ({"data_fingerprint": {"train": "a", "test": "d"}}, "the same test data, .*0.*1.*differ"),
    ],
)
def test_checkpoints_that_differ_are_refused(changes, message, members):
    paths, networks = members
    other = content(networks[1])
    write(
        {**other, **changes, "hyper_parameters": other["hyper_parameters"] | changes.get("hyper_parameters", {})},
        paths[1],
    )
    with pytest.raises(UserError, match=f"all checkpoints must have {message}"):
        join_checkpoints(paths, "trio")


def test_other_tasks_and_ensembles_are_refused(members, tmp_path, command):
    paths, networks = members
    write(join_checkpoints(paths, "trio"), tmp_path / "trio.ckpt")
    with pytest.raises(UserError, match=r"must not be ensembles, but '.*trio.ckpt' is one"):
        join_checkpoints([paths[0], tmp_path / "trio.ckpt"], "more")
    other = content(networks[0], class_path="lightning_tfm.tasks.language_model.LanguageModel")
    del other["hyper_parameters"]["max_target_length"]
    write(other, paths[1])
    with pytest.raises(UserError, match=r"must map a source to a target, but '.*1.ckpt' is of a LanguageModel"):
        join_checkpoints(paths, "trio")
    assert "RUN must be given at least twice" in command("ensemble", paths[0], "--output", "a.ckpt", status=2).err
    again = command("ensemble", *paths[::2], "--output", tmp_path / "trio.ckpt", status=2).err
    assert "--output must be a new file" in again
    for name in ("inspect", "explore"):
        message = command(name, tmp_path / "trio.ckpt", "--output", "a", status=2).err
        assert "must have one network, but" in message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda members: members[1].update(class_path="os.path.Path"), "names 'os.path.Path'"),
        (lambda members: members[1].update(class_path="torch.nn.Linear"), "names 'torch.nn.Linear'"),
        (
            lambda members: members[1].update(class_path="lightning_tfm.networks.encoder_classifier.EncoderClassifier"),
            "must name a class",
        ),
        (lambda members: members[1]["init_args"].update(x={"class_path": "os.path.Path"}), "names 'os.path.Path'"),
        (lambda members: members[1].update(class_path=ENSEMBLE, init_args={}), "must fit its own hyper-parameters"),
        (lambda members: members[1]["init_args"].update(max_length=10**9), "must fit its own hyper-parameters"),
        (lambda members: members[1]["init_args"].update(num_layers=10**9), "must fit its own hyper-parameters"),
        (lambda members: members[1].pop("init_args"), "cannot be read"),
        (lambda members: members.append(3), "cannot be read"),
    ],
)
def test_members_are_trusted_and_bounded_like_a_network(change, message, members, tmp_path):
    paths, _ = members
    crafted = join_checkpoints(paths, "trio")
    change(crafted["hyper_parameters"]["network"]["init_args"]["members"])
    write(crafted, tmp_path / "crafted.ckpt")
    with pytest.raises(UserError, match=re.escape(message)):
        load(tmp_path / "crafted.ckpt")


@pytest.mark.parametrize(
    ("member", "message"),
    [
        ({"class_path": "this.That", "init_args": {}}, "must name only classes listed in .* but names 'this.That'"),
        ({"class_path": "lightning_tfm.networks.AttentionLSTM", "init_args": {"d_model": 8}}, "one output layer, but"),
        ({"class_path": "lightning_tfm.callbacks.WeightAveraging"}, "members must be networks"),
    ],
)
def test_settings_name_only_trusted_members_and_train_none(member, message, tmp_path, command):
    path = write_task("spelling_gpt", tmp_path)
    config = yaml.safe_load(path.read_text())
    network = {"class_path": "lightning_tfm.networks.Ensemble", "init_args": {"members": [member]}}
    config["model"]["init_args"]["network"] = network
    path.write_text(yaml.safe_dump(config))
    printed = command("fit", "--config", path, status=2).err
    assert re.search(f"lightning-tfm: error: .*{message}", printed.splitlines()[-1])
    assert "this" not in sys.modules
    assert not [*tmp_path.glob("runs/*/*")]


@pytest.mark.run
def test_an_ensemble_is_tested_and_compared_as_one_system(tmp_path_factory, tmp_path, command):
    folder = trained_run("spelling_gpt", tmp_path_factory)
    path = folder.parents[2] / "spelling_gpt.yaml"
    settings = ["--model.network=AttentionLSTM", "--model.network.d_model=16", "--seed_everything=2", "--name=other"]
    run("fit", "--config", path, *settings, cwd=tmp_path).finish()
    paths = [folder / "checkpoints/best.ckpt", tmp_path / "runs/other/version_0/checkpoints/best.ckpt"]
    printed = command("ensemble", *paths, "--output", "joined.ckpt").out
    assert printed == "joined.ckpt: an ensemble of 2 checkpoints\n"
    for vote in ("false", "true"):
        run("test", "joined.ckpt", f"--model.vote={vote}", "--model.beam_size=2", cwd=tmp_path).finish()
    tests = [Run(tmp_path / f"runs/joined/test_{number}") for number in range(2)]
    predictor = load("joined.ckpt")
    for test, vote in zip(tests, (False, True), strict=True):
        assert test.summary.members == [*map(str, paths)]
        assert test.config["model"]["init_args"]["vote"] is vote
        lines = [prediction["source"] for prediction in test.predictions]
        outputs = predictor.predict(lines, DecodingOptions(beam_size=2, vote=vote))
        assert [each["prediction"] for each in test.predictions] == [output.text for output in outputs]
        scores = predictor.score([f"{each['source']}\t{each['target']}" for each in test.predictions])
        nlls = [each["nll"] for each in test.predictions]
        assert nlls == pytest.approx([-score.log_probability for score in scores], abs=1e-3)
    printed = command("compare", folder, tests[0].folder, "--metric", "exact_match").out
    assert "joined is an ensemble of 2 checkpoints" in printed
    voted = command("generate", "joined.ckpt", "abc", "--vote", "--n-best", "3", "--scores").out
    assert len(voted.splitlines()) == 3
    run("validate", "joined.ckpt", cwd=tmp_path).finish()
    for form in ("safetensors", "onnx"):
        assert "the checkpoint's outputs" in command("export", "joined.ckpt", "--format", form, "--output", form).out
    command("report", tests[0].folder, "--output", "report.html")
    message = command("fit", "--config", path, "--ckpt_path", "joined.ckpt", status=2).err
    assert message.startswith("lightning-tfm: error: ")
