"""A trained network outside the commands: in Python and in export formats."""

from __future__ import annotations

import itertools
import json
import math

import pytest
import torch
import transformers

import lightning_tfm
from lightning_tfm.commands import export
from lightning_tfm.commands.export import WRITERS, _exported, difference, example_inputs
from lightning_tfm.errors import UserError
from lightning_tfm.inference import ClassifierPredictor, Seq2SeqPredictor, ctranslate, onnx_pair
from lightning_tfm.inference.decoding import decode
from lightning_tfm.networks import GPT, AttentionLSTM, EncoderClassifier, Seq2SeqNetwork, Transformer
from lightning_tfm.optimizers import class_path
from lightning_tfm.tasks import Classifier, LanguageModel, Seq2SeqModule
from lightning_tfm.tokenization import BOS, EOS, PAD, UNKNOWN, SymbolTokenizer, WordTokenizer, tokenizer_from_dict
from support.experiments import TASKS, trained_run
from support.networks import LLAMA, QWEN3, randomize
from support.onnx_runtime import Runtime

FORMATS = {
    "safetensors": ["model.safetensors"],
    "torch_export": ["model.pt2"],
    "onnx": ["encode.onnx", "decode_step.onnx", "model.json"],
    "onnx_sequence": ["model.onnx"],
}


@pytest.fixture(scope="session", params=TASKS)
def checkpoint(request, tmp_path_factory):
    """Return the checkpoint of a short run of each task."""
    return trained_run(request.param, tmp_path_factory) / "checkpoints/best.ckpt"


def test_load(checkpoint):
    trained = lightning_tfm.load(checkpoint)
    assert not trained.network.training
    if isinstance(trained, Seq2SeqPredictor):
        source = torch.tensor([[*trained.tokenizer.encode("3 1 2"), EOS]])
        tokens = decode(trained.network.decode_step, trained.network.encode(source), trained.max_target_length)
        assert isinstance(trained.tokenizer.decode(tokens[0].tolist()), str)
    assert trained.network.hyper_parameters["vocab_size"] == trained.tokenizer.vocab_size
    with pytest.raises(AttributeError, match="no attribute 'lead'"):
        _ = lightning_tfm.lead
    with pytest.raises(UserError, match=rf"{checkpoint.parent}' is a folder; try '{checkpoint}'"):
        lightning_tfm.load(checkpoint.parent)
    again = lightning_tfm.load(checkpoint.parents[1]).state_dict()
    assert all(torch.equal(weights, again[name]) for name, weights in trained.state_dict().items())


def test_exported_checkpoint_is_read_once(monkeypatch, tmp_path, tmp_path_factory, command):
    checkpoint = trained_run("text_gpt", tmp_path_factory) / "checkpoints/best.ckpt"
    read, load = [], torch.load
    monkeypatch.setattr(torch, "load", lambda path, **settings: read.append(path) or load(path, **settings))
    for format in ("single", "safetensors"):
        command("export", checkpoint, "--format", format, "--output", tmp_path / format)
        assert read.count(checkpoint) == 1
        read.clear()


QUICK = ("translation_attention_lstm", "reviews_classifier")
"""Tasks whose networks are exported to ONNX in `make test`: an export takes ten seconds."""


@pytest.mark.parametrize(
    ("format", "checkpoint"),
    [
        pytest.param(format, task, marks=[pytest.mark.run] if format.startswith("onnx") and task not in QUICK else [])
        for format in FORMATS
        for task in TASKS
    ],
    indirect=["checkpoint"],
)
def test_exported_logits(format, checkpoint, tmp_path, command):
    if format.startswith("onnx"):
        pytest.importorskip("onnxscript")
    folder = tmp_path / "exported"
    network = lightning_tfm.load(checkpoint).network
    arguments = ["export", checkpoint, "--format", format, "--output", folder]
    if format in ("torch_export", "onnx_sequence") and not network.is_traceable:
        _, err = command(*arguments, status=2)
        assert f"--format must be onnx, safetensors or single for this {type(network).__name__}" in err
        assert not folder.exists()
        return
    out, _ = command(*arguments)
    files = {"config.json", *FORMATS[format]}
    if not isinstance(network, Seq2SeqNetwork):
        files.discard("decode_step.onnx")
    assert {path.name for path in folder.iterdir()} == files
    assert out.startswith(f"{folder / FORMATS[format][0]}: the checkpoint's outputs, within ")
    cls = type(network)
    assert cls.__name__ not in {other.__name__ for other in cls.__subclasses__()}, "a name in a setting is ambiguous"
    trained = lightning_tfm.load(checkpoint)
    config = json.loads((folder / "config.json").read_text())
    assert config["predictor"] == class_path(type(trained))
    assert tokenizer_from_dict(config["tokenizer"]).to_dict() == trained.tokenizer.to_dict()
    for rows, length in ((1, 1), (4, 7)):
        inputs = example_inputs(trained, rows, length)
        assert all(((ids != PAD).long().diff(dim=1) <= 0).all() for ids in inputs.values()), "padded on the right"
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
    if format == "onnx":
        encode, decode_step, description = (folder / name for name in FORMATS[format])
        runtime = Runtime(encode, decode_step if decode_step.exists() else None, json.loads(description.read_text()))
        return runtime.forward(**inputs)
    import onnxruntime

    session = onnxruntime.InferenceSession(str(folder / "model.onnx"))
    names = {one.name for one in session.get_inputs()}
    (logits,) = session.run(None, {name: ids.numpy() for name, ids in inputs.items() if name in names})
    return torch.from_numpy(logits)


@pytest.mark.parametrize("format", ["onnx", "onnx_sequence"])
def test_export_without_onnx(format, monkeypatch, tmp_path, tmp_path_factory, command):
    checkpoint = trained_run("text_gpt", tmp_path_factory) / "checkpoints/best.ckpt"
    monkeypatch.setattr(onnx_pair, "find_spec", lambda name: None)
    (line,) = command(
        "export", checkpoint, "--format", format, "--output", tmp_path / "exported", status=2
    ).err.splitlines()
    assert "needs the package 'onnx'; pip install 'lightning_tfm[onnx]'" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("num_ngrams", [0, 20])
def test_exported_classifier_has_dynamic_lengths(num_ngrams):
    tokenizer = WordTokenizer(["good", "bad"], num_ngrams)
    network = EncoderClassifier(tokenizer.vocab_size, 2, max_length=12, num_bigram_buckets=50).eval()
    network.naive_bayes.scores.random_(-100_000, 100_000)
    predictor = ClassifierPredictor(network, tokenizer, ["neg", "pos"])
    program = _exported(predictor).module()
    for rows, length in itertools.product((1, 2, 3), range(1, 13)):
        inputs = example_inputs(predictor, rows, length)
        torch.testing.assert_close(program(**inputs), network(**inputs))


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (Transformer, {}),
        (Transformer, {"norm": "post"}),
        (Transformer, {"positions": "learned", "tie_embeddings": True}),
        (GPT, {"bias": False, "activation": "gelu_tanh"}),
        (GPT, {"positions": "rotary"}),
        (GPT, {"positions": "randomized"}),
        (GPT, {"positions": "sinusoidal"}),
        (GPT, {"text_only": True}),
        (GPT, {"d_ff": 24, "tie_embeddings": False}),
    ],
)
def test_ctranslate2_outputs(kind, settings, tmp_path):
    """Log probabilities and greedy answers are those of the network, whose weights are random and large."""
    ctranslate2 = pytest.importorskip("ctranslate2")
    torch.manual_seed(0)
    network = kind(30, 32, 4, 2, dropout=0.0, max_length=40, **settings).eval()
    for layer in network.modules():
        if isinstance(layer, torch.nn.Linear):
            torch.nn.init.normal_(layer.weight, std=0.3)
    source, target = (network.random_ids(20, 9, torch.Generator().manual_seed(seed)) for seed in (1, 2))
    folder = tmp_path / "model"
    ctranslate.convert(network, folder)
    assert ctranslate.difference(network, folder, source, target) < 1e-4
    with torch.no_grad():
        answers = decode(network.decode_step, network.encode(source), 12)
    sources, limits = [ctranslate.tokens(row) for row in source], {"beam_size": 1}
    if kind is Transformer:
        results = ctranslate2.Translator(str(folder)).translate_batch(sources, max_decoding_length=12, **limits)
        outputs = [result.hypotheses[0] for result in results]
    else:
        prompts, limits = [[*row, str(BOS)] for row in sources], limits | {"include_prompt_in_result": False}
        results = ctranslate2.Generator(str(folder)).generate_batch(prompts, max_length=12, **limits)
        outputs = [result.sequences[0] for result in results]
    assert outputs == [[token for token in ctranslate.tokens(row) if token != str(EOS)] for row in answers]
    parameters = sum(parameter.numel() for parameter in network.parameters())
    assert (folder / "model.bin").stat().st_size < 4 * parameters + 20_000, "tied weights are written once"
    with torch.no_grad():
        network.head.weight[5, 0] += 0.5
    assert ctranslate.difference(network, folder, source, target) > 1e-3


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (Transformer(11, 8, 2, max_length=8, positions="rotary"), "positions must be sinusoidal, learned for"),
        (Transformer(11, 8, 2, max_length=8, cross_attention="monotonic"), "cross_attention must be dot_product"),
        (Transformer(11, 8, 2, max_length=8, pointer_generator=True), "pointer_generator must be false"),
        (GPT(11, 8, 2, max_length=8, positions="alibi"), "positions must be sinusoidal, learned, rotary, randomized"),
        (Transformer(11, 8, 2, max_length=8, norm_type="rms"), "norm_type must be layer for .*, but is rms"),
        (Transformer(11, 8, 2, max_length=8, activation="swiglu"), "activation must be relu for .*, but is swiglu"),
        (GPT(11, 8, 2, max_length=8, activation="swiglu"), "activation must be gelu, gelu_tanh for .* is swiglu"),
        (GPT(11, 8, 2, max_length=8, window=3), "window must be null for --format ctranslate2, but is 3; try"),
        (GPT(11, 8, 2, max_length=8, num_kv_heads=1), "num_kv_heads must be null, 2 for .*, but is 1"),
        (GPT(11, 8, 2, max_length=8, d_head=6), "d_head must be null, 4 for .*, but is 6"),
        (GPT(11, 8, 2, max_length=8, qk_norm=True), "qk_norm must be false for .*, but is true"),
        (GPT(11, 8, 2, max_length=8, norm_eps=1e-6), "norm_eps must be 1e-05 for .*, but is 1e-06"),
        (GPT(11, 8, 2, max_length=8, logit_cap=30.0), "logit_cap must be null for .*, but is 30.0"),
        (
            GPT(11, 8, 2, max_length=8, positions="rotary", rotary_base=5e5),
            "rotary_base must be 10000 for .*, but is 500000.0",
        ),
        (AttentionLSTM(11, 8), "needs a Transformer or GPT, but the network is AttentionLSTM"),
    ],
)
def test_ctranslate2_unsupported_networks(network, message, tmp_path):
    pytest.importorskip("ctranslate2")
    with pytest.raises(UserError, match=message):
        ctranslate.convert(network, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_ctranslate2_command(checkpoint, tmp_path, command):
    pytest.importorskip("ctranslate2")
    folder = tmp_path / "exported"
    network = lightning_tfm.load(checkpoint).network
    supported = isinstance(network, GPT | Transformer) and getattr(network, "pointer", None) is None
    status = 0 if supported else 2
    out, err = command("export", checkpoint, "--format", "ctranslate2", "--output", folder, status=status)
    if supported:
        assert out.startswith(f"{folder / 'ctranslate2'}: the checkpoint's outputs, within ")
        assert {path.name for path in (folder / "ctranslate2").iterdir()} >= {"model.bin", "config.json"}
    else:
        assert "--format ctranslate2" in err
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("settings", [{}, LLAMA, QWEN3], ids=["GPT-2", "Llama", "Qwen 3"])
@pytest.mark.parametrize("is_text", [True, False], ids=["texts", "pairs"])
@torch.no_grad()
def test_huggingface_outputs(is_text, settings, tmp_path):
    """Ids of a model of texts begin after the special ids, and those of a model of pairs are the same."""
    tokenizer = SymbolTokenizer([UNKNOWN, *"abcdefg"])
    network = randomize(GPT(tokenizer.vocab_size, 16, 4, 2, max_length=20, **settings))
    module = LanguageModel(network, tokenizer) if is_text else Seq2SeqModule(network, tokenizer, 9)
    assert WRITERS["huggingface"](module.eval(), tmp_path / "model.safetensors") < 1e-5
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    first = 3 if is_text else 0
    ids = torch.randint(3, tokenizer.vocab_size, (2, 9))
    torch.testing.assert_close(model(ids - first).logits, network(ids[:, :0], ids)[..., first:], rtol=0, atol=1e-5)
    specials = model.config.pad_token_id, model.config.bos_token_id, model.config.eos_token_id
    assert specials == ((None, None, None) if is_text else (PAD, BOS, EOS))
    network.head.weight[5, 0] += 1
    assert export._difference_from_transformers(module, tmp_path, first) > 1e-3


def test_huggingface_command(checkpoint, tmp_path, command):
    folder, network = tmp_path / "exported", lightning_tfm.load(checkpoint).network
    is_gpt2 = isinstance(network, GPT) and network.hyper_parameters["positions"] == "learned"
    arguments = ["export", checkpoint, "--format", "huggingface", "--output", folder]
    out, err = command(*arguments, status=0 if is_gpt2 else 2)
    if is_gpt2:
        assert out.startswith(f"{folder / 'model.safetensors'}: the checkpoint's outputs, within ")
        assert not err
        assert {path.name for path in folder.iterdir()} == {"config.json", "lightning_tfm.json", "model.safetensors"}
        return
    assert list(tmp_path.iterdir()) == []
    if isinstance(network, GPT):
        assert "bias must be false for --format huggingface, as in llama, but is true; try --format safetensors" in err
    else:
        assert f"--format huggingface needs a GPT, but the network is {type(network).__name__}; try" in err


def test_export_without_transformers(monkeypatch, tmp_path, tmp_path_factory, command):
    checkpoint = trained_run("text_gpt", tmp_path_factory) / "checkpoints/best.ckpt"
    monkeypatch.setattr(export, "find_spec", lambda name: None)
    err = command("export", checkpoint, "--format", "huggingface", "--output", tmp_path / "exported", status=2).err
    assert "pip install 'lightning_tfm[huggingface]'" in err


@pytest.mark.parametrize("task", ["seq2seq", "copying", "language modeling", "classification"])
def test_export_with_few_positions(task):
    """Example inputs are no longer than its number of positions."""
    tokenizer = SymbolTokenizer([UNKNOWN, *"abc"])
    size, sizes = tokenizer.vocab_size, {"d_model": 16, "num_heads": 2, "num_layers": 1, "max_length": 4}
    module = {
        "seq2seq": lambda: Seq2SeqModule(Transformer(size, **sizes), tokenizer, 4),
        "copying": lambda: Seq2SeqModule(Transformer(size, **sizes, pointer_generator=True), tokenizer, 4),
        "language modeling": lambda: LanguageModel(GPT(size, **sizes), tokenizer),
        "classification": lambda: Classifier(EncoderClassifier(size, 2, **sizes), tokenizer, ("neg", "pos")),
    }[task]().eval()
    program = _exported(module).module()
    assert difference(module, program) < 1e-4


def test_neither_different_logits_nor_an_existing_folder_are_written(checkpoint, monkeypatch, tmp_path, command):
    """The writer reports a difference, as if the format had lost a weight."""
    monkeypatch.setitem(WRITERS, "safetensors", lambda trained, path: path.write_text("") or 0.5)
    _, err = command("export", checkpoint, "--output", tmp_path / "exported", status=2)
    assert "must give the outputs of the checkpoint within 0.0001, but differs by 0.5" in err
    assert list(tmp_path.iterdir()) == []
    assert "--output must be a new folder" in command("export", checkpoint, "--output", tmp_path, status=2).err


def test_difference_of_nan_and_shapes(checkpoint):
    trained = lightning_tfm.load(checkpoint)
    assert difference(trained, trained.network) == 0
    assert difference(trained, lambda **inputs: trained.network(**inputs)[..., :1]) == math.inf
    for some in (slice(None), slice(1)):  # all logits, or a single one

        def broken(some=some, **inputs):
            logits = trained.network(**inputs).clone()
            logits.view(-1)[some] = torch.nan
            return logits

        assert math.isnan(difference(trained, broken))
