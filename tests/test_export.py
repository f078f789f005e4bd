"""A trained network outside the commands: in Python and in export formats."""

from __future__ import annotations

import json
import math

import pytest
import torch

import lightning_tfm
from lightning_tfm.commands.export import _exported, difference, example_inputs
from lightning_tfm.decoding import decode
from lightning_tfm.modules import Classifier, LanguageModel, Seq2SeqModule
from lightning_tfm.networks import GPT, EncoderClassifier, Transformer
from lightning_tfm.tokenization import EOS, UNKNOWN, SymbolTokenizer, tokenizer_from_dict
from runs import TASKS, in_process, trained_run

FORMATS = {"safetensors": "model.safetensors", "torch_export": "model.pt2", "onnx": "model.onnx"}


@pytest.fixture(scope="session", params=TASKS)
def checkpoint(request, tmp_path_factory):
    """Return the checkpoint of a short run of each task."""
    return trained_run(request.param, tmp_path_factory) / "checkpoints/best.ckpt"


def test_a_checkpoint_is_loaded_and_used_in_python(checkpoint):
    trained = lightning_tfm.load(checkpoint)
    assert not trained.network.training
    if isinstance(trained, Seq2SeqModule):
        source = torch.tensor([[*trained.tokenizer.encode("3 1 2"), EOS]])
        tokens = decode(trained.network.decode_step, trained.network.encode(source), trained.max_target_length)
        assert isinstance(trained.tokenizer.decode(tokens[0].tolist()), str)
    assert trained.network.hyper_parameters["vocab_size"] == trained.tokenizer.vocab_size
    with pytest.raises(AttributeError, match="no attribute 'lead'"):
        _ = lightning_tfm.lead


@pytest.mark.parametrize("format", FORMATS)
def test_an_exported_network_computes_the_same_logits(format, checkpoint, monkeypatch, tmp_path, capsys):
    if format == "onnx":
        pytest.importorskip("onnxscript")
    folder = tmp_path / "exported"
    network = lightning_tfm.load(checkpoint).network
    if format != "safetensors" and not network.is_traceable:
        assert in_process(monkeypatch, "export", checkpoint, "--format", format, "--output", folder) == 2
        assert f"--format must be safetensors or single for this {type(network).__name__}" in capsys.readouterr().err
        assert not folder.exists()
        return
    assert in_process(monkeypatch, "export", checkpoint, "--format", format, "--output", folder) == 0, (
        capsys.readouterr().err
    )
    assert {path.name for path in folder.iterdir()} == {FORMATS[format], "config.json"}
    assert capsys.readouterr().out.startswith(f"{folder / FORMATS[format]}: the checkpoint's logits, within ")
    trained = lightning_tfm.load(checkpoint)
    config = json.loads((folder / "config.json").read_text())
    assert config["class_path"].rpartition(".")[2] == type(trained).__name__
    assert tokenizer_from_dict(config["tokenizer"]).to_dict() == trained.tokenizer.to_dict()
    for rows, length in ((1, 1), (4, 7)):
        inputs = example_inputs(trained, rows, length)
        with torch.no_grad():
            expected = trained.network(**inputs)
        torch.testing.assert_close(run_exported(format, folder, config, trained, inputs), expected, rtol=0, atol=1e-4)


def run_exported(format, folder, config, trained, inputs):
    if format == "safetensors":
        from safetensors.torch import load_file

        network = type(trained.network)(**config["network"]["init_args"]).eval()
        missing, unexpected = network.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
        assert not unexpected
        weights = network.state_dict()
        stored = {weights[name].data_ptr() for name in weights if name not in missing}
        assert all(weights[name].data_ptr() in stored for name in missing), "only tied weights are stored once"
        with torch.no_grad():
            return network(**inputs)
    if format == "torch_export":
        return torch.export.load(folder / "model.pt2").module()(**inputs)
    import onnxruntime

    session = onnxruntime.InferenceSession(str(folder / "model.onnx"))
    names = {one.name for one in session.get_inputs()}
    (logits,) = session.run(None, {name: ids.numpy() for name, ids in inputs.items() if name in names})
    return torch.from_numpy(logits)


@pytest.mark.parametrize("task", ["seq2seq", "copying", "language modeling", "classification"])
def test_a_network_with_few_positions_is_exported(task):
    """Example inputs are no longer than its number of positions."""
    tokenizer = SymbolTokenizer([UNKNOWN, *"abc"])
    size, sizes = tokenizer.vocab_size, {"d_model": 16, "num_heads": 2, "num_layers": 1}
    module = {
        "seq2seq": lambda: Seq2SeqModule(Transformer(size, **sizes, max_length=4), tokenizer, 4),
        "copying": lambda: Seq2SeqModule(
            Transformer(size, **sizes, max_length=4, pointer_generator=True), tokenizer, 4
        ),
        "language modeling": lambda: LanguageModel(GPT(size, **sizes, max_length=4), tokenizer),
        "classification": lambda: Classifier(EncoderClassifier(size, 2, 4, **sizes), tokenizer, ("neg", "pos")),
    }[task]().eval()
    program = _exported(module).module()
    assert difference(module, lambda inputs: program(**inputs)) < 1e-4


def test_an_export_with_other_logits_is_not_written(checkpoint, monkeypatch, tmp_path, capsys):
    """The writer reports a difference, as if the format had lost a weight."""
    from lightning_tfm.commands import export

    monkeypatch.setitem(export.WRITERS, "safetensors", lambda trained, path: path.write_text("") or 0.5)
    assert in_process(monkeypatch, "export", checkpoint, "--output", tmp_path / "exported") == 2
    assert "must give the logits of the checkpoint within 0.0001, but differs by 0.5" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_nan_and_other_shapes_count_as_differences(checkpoint):
    trained = lightning_tfm.load(checkpoint)
    assert difference(trained, lambda inputs: trained.network(**inputs)) == 0
    assert difference(trained, lambda inputs: trained.network(**inputs)[..., :1]) == math.inf
    for some in (slice(None), slice(1)):  # all logits, or a single one

        def broken(inputs, some=some):
            logits = trained.network(**inputs).clone()
            logits.view(-1)[some] = torch.nan
            return logits

        assert math.isnan(difference(trained, broken))


def test_an_existing_folder_is_not_overwritten(checkpoint, monkeypatch, tmp_path, capsys):
    assert in_process(monkeypatch, "export", checkpoint, "--output", tmp_path) == 2
    assert "--output must be a new folder" in capsys.readouterr().err


def test_example_inputs_are_padded_like_batches(checkpoint):
    trained = lightning_tfm.load(checkpoint)
    for ids in example_inputs(trained, 3, 6).values():
        assert ((ids != 0).long().diff(dim=1) <= 0).all()
    assert isinstance(trained.network, EncoderClassifier) == isinstance(trained, Classifier)
