"""ONNX graphs of all networks against the networks."""

from __future__ import annotations

import copy
import json
import random
from contextlib import ExitStack

import numpy as np
import pytest
import torch

from lightning_tfm.errors import UserError
from lightning_tfm.inference import (
    ClassifierPredictor,
    LanguageModelPredictor,
    MaskedLanguageModelPredictor,
    Seq2SeqPredictor,
    onnx_pair,
)
from lightning_tfm.inference.decoding import decode
from lightning_tfm.insight.interventions import interventions
from lightning_tfm.layers import HardMonotonicAttention, attention_layers, attention_maps
from lightning_tfm.networks import (
    GPT,
    AttentionLSTM,
    CausalNetwork,
    EncoderClassifier,
    LinearTransformer,
    MaskedEncoder,
    Seq2SeqNetwork,
    Transformer,
)
from lightning_tfm.tokenization import BOS, EOS, PAD, UNKNOWN, SymbolTokenizer, WordTokenizer
from support.networks import NETWORKS, VOCAB_SIZE, randomize, tiny
from support.onnx_runtime import Runtime

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

TOLERANCE = 1e-4
MAX_LENGTH = 96
MAX_TARGET_LENGTH = 40
TOKENIZER = SymbolTokenizer([UNKNOWN, *"abcdefg"])
LABELS = ["low", "middle", "high"]

DECODERS = NETWORKS | {
    "Transformer monotonic pointer_generator alibi": tiny(
        Transformer, cross_attention="monotonic", pointer_generator=True, positions="alibi"
    ),
    "GPT text_only gelu_tanh": tiny(GPT, text_only=True, activation="gelu_tanh"),
    "LinearTransformer sinusoidal": tiny(LinearTransformer, positions="sinusoidal"),
    "AttentionLSTM gru location_aware": tiny(AttentionLSTM, cell="gru", attention="location_aware"),
    "AttentionLSTM gru pointer_generator": tiny(AttentionLSTM, cell="gru", pointer_generator=True),
    "AttentionLSTM monotonic pointer_generator": tiny(AttentionLSTM, attention="monotonic", pointer_generator=True),
    "AttentionLSTM location_aware pointer_generator": tiny(
        AttentionLSTM, attention="location_aware", pointer_generator=True
    ),
}
OTHERS = {
    "MaskedEncoder": tiny(MaskedEncoder),
    "MaskedEncoder post": tiny(MaskedEncoder, norm="post"),
    "EncoderClassifier": tiny(EncoderClassifier, num_classes=3),
    "EncoderClassifier pre": tiny(EncoderClassifier, num_classes=3, norm="pre"),
    "EncoderClassifier naive_bayes": tiny(EncoderClassifier, num_classes=3, num_bigram_buckets=50),
    "EncoderClassifier n-grams": tiny(EncoderClassifier, num_classes=3, num_bigram_buckets=50),
}
QUICK = ("AttentionLSTM gru monotonic", "GPT coupled", "EncoderClassifier n-grams")
"""Networks that are tested in `make test`: an export takes ten seconds."""

IN_TEST_ALL = {
    *QUICK,
    "Transformer",
    "Transformer monotonic pointer_generator alibi",
    "GPT",
    "GPT qwen3",
    "LinearTransformer",
    "AttentionLSTM lstm hard_monotonic",
    "AttentionLSTM additive features_encoder",
    "AttentionLSTM location_aware pointer_generator",
    "MaskedEncoder",
}
"""Networks that are tested in `make test-all`; the others are tested in `make test-soak`."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            name, marks=[pytest.mark.run] * (name not in QUICK) + [pytest.mark.soak] * (name not in IN_TEST_ALL)
        )
        for name in sorted(DECODERS | OTHERS)
    ],
)
def converted(request):
    """Return the predictor of each network, with random weights and more positions, and its pair of graphs.

    Networks with other settings than the default have one layer, which halves the time of their export.
    """
    return convert(request.param)


def convert(name):
    torch.manual_seed(1)
    make = (DECODERS | OTHERS)[name]
    tokenizer = WordTokenizer([*"abcdefgh"], 20) if name.endswith("n-grams") else TOKENIZER
    settings = {"max_length": MAX_LENGTH, "num_layers": 1 if " " in name else 2}
    changed = {setting: settings[setting] for setting in settings.keys() & make.keywords}
    network = randomize(make.func(tokenizer.vocab_size, **make.keywords | changed)).eval()
    if isinstance(network, EncoderClassifier):
        if network.naive_bayes is not None:
            network.naive_bayes.scores.random_(-100_000, 100_000)
        predictor = ClassifierPredictor(network, tokenizer, LABELS)
    elif isinstance(network, MaskedEncoder):
        predictor = MaskedLanguageModelPredictor(network, tokenizer)
    else:
        predictor = Seq2SeqPredictor(network, tokenizer, MAX_TARGET_LENGTH)
    return predictor, onnx_pair.convert(predictor)


def graphs(pair):
    return [graph for graph in (pair.encode, pair.decode_step) if graph is not None]


def make_runtime(pair):
    encode, decode_step = (graph and graph.SerializeToString() for graph in pair[:2])
    return Runtime(encode, decode_step, pair.description)


def maximum(errors):
    """Return the maximum of errors, NaN if any is NaN."""
    return np.max([error.abs().max().item() if error.numel() else 0.0 for error in errors])


def errors_of_maps(maps, outputs):
    recorded = {name.removeprefix("weights."): x for name, x in outputs.items() if name.startswith("weights.")}
    assert recorded.keys() == maps.keys()
    return [recorded[name] - maps[name] for name in maps]


def scale_heads(touch, network, head_mask):
    """Multiply the contexts of the heads of all layers of a network in torch."""
    for (name, layer), row in zip(attention_layers(network).items(), head_mask, strict=True):
        if not isinstance(layer, HardMonotonicAttention):  # which has no context
            for head in range(layer.num_heads):
                touch.scale(name, row[head].item(), head)


def decoding_error(network, runtime, length, steps, seed):
    """Return the maximum error of logits and weights of decoding padded rows, every second time with heads off."""
    generator = torch.Generator().manual_seed(seed)
    rows = seed % 4 + 1
    source = network.random_ids(rows, length, generator) if length else torch.ones(rows, 0, dtype=torch.long)
    tokens = torch.randint(3, VOCAB_SIZE, (rows, steps), generator=generator)
    tokens[:, 0] = BOS
    head_mask = runtime.head_mask
    if seed % 2:
        head_mask = torch.randint(0, 2, head_mask.shape, generator=generator).float()
    errors = []
    with torch.no_grad(), interventions(network) as touch:
        scale_heads(touch, network, head_mask)
        with attention_maps(network) as maps:
            state = network.encode(source)
        outputs, onnx_state = runtime.encode(source, head_mask=head_mask)
        errors += errors_of_maps(maps, outputs)
        for token in tokens.unbind(1):
            with ExitStack() as recording:
                is_linear = isinstance(network, LinearTransformer)  # which has no weights in decode_step
                maps = {} if is_linear else recording.enter_context(attention_maps(network))
                logits, state = network.decode_step(token, state)
            outputs, onnx_state = runtime.decode_step(token, onnx_state, head_mask=head_mask)
            errors += [outputs["logits"] - logits, *errors_of_maps(maps, outputs)]
    return maximum(errors)


def forward_error(predictor, runtime, length, seed):
    """Return the maximum error of the logits and weights for padded texts, every second time with heads off."""
    network, generator = predictor.network, torch.Generator().manual_seed(seed)
    inputs = predictor.example_inputs(seed % 4 + 1, length, generator)
    head_mask = runtime.head_mask
    if seed % 2:
        head_mask = torch.randint(0, 2, head_mask.shape, generator=generator).float()
    with torch.no_grad(), interventions(network) as touch, attention_maps(network) as maps:
        scale_heads(touch, network, head_mask)
        logits = network(**inputs)
    outputs = runtime.run("encode", head_mask=head_mask, **inputs)
    return maximum([outputs["logits"] - logits, *errors_of_maps(maps, outputs)])


def max_error(predictor, runtime):
    """Return the maximum error over lengths from 1 to 40, and from 0 if source and target are one sequence."""
    network = predictor.network
    if not isinstance(network, Seq2SeqNetwork):
        return np.max([forward_error(predictor, runtime, length, seed) for length in range(1, 41) for seed in (0, 1)])
    first = 0 if isinstance(network, CausalNetwork) else 1
    errors = [decoding_error(network, runtime, length, 6, seed=length) for length in range(first, 41)]
    errors += [decoding_error(network, runtime, length, 40, seed) for seed, length in enumerate((first, 1, 7, 40))]
    return np.max(errors)


def test_parity(converted):
    """Logits and weights of padded batches, with all heads or some of them."""
    predictor, pair = converted
    assert max_error(predictor, make_runtime(pair)) <= TOLERANCE  # NaN is not


def lines_of(predictor):
    """Return random lines of 1 to 12 tokens for a predictor without a decoder."""
    draw, separator = random.Random(0), " " if isinstance(predictor.tokenizer, WordTokenizer) else ""
    lines = [separator.join(draw.choices("abcdefg", k=length)) for length in range(1, 13)]
    is_masked = isinstance(predictor, MaskedLanguageModelPredictor)
    return [line.replace(draw.choice(line), "[MASK]") for line in lines] if is_masked else lines


def test_greedy_outputs(converted):
    predictor, pair = converted
    network, runtime = predictor.network, make_runtime(pair)
    if pair.decode_step is None:
        lines, exported = lines_of(predictor), copy.deepcopy(predictor)
        exported.network.forward = lambda text: runtime.run("encode", text=text)["logits"]
        expected = [output.text for output in predictor.predict(lines)]
        assert [output.text for output in exported.predict(lines)] == expected
        has_one_label = isinstance(network, EncoderClassifier) and network.naive_bayes is None  # with random weights
        assert len({*expected}) > 1 or has_one_label
        return
    source = network.random_ids(8, 9, torch.Generator().manual_seed(0))

    def step(token, state):
        outputs, following = runtime.decode_step(token, dict(zip(names, state, strict=True)))
        return outputs["logits"], tuple(following.values())

    _, state = runtime.encode(source)
    names = [*state]
    with torch.no_grad():
        expected = decode(network.decode_step, network.encode(source), MAX_TARGET_LENGTH)
        assert decode(step, tuple(state.values()), MAX_TARGET_LENGTH).equal(expected)


def test_graphs_are_plain(converted):
    """Standard operators without loops, no paths of the machine, and each weight once."""
    predictor, pair = converted
    network = predictor.network
    size = sum(tensor.nbytes for tensor in (*network.parameters(), *network.buffers()))
    for graph in graphs(pair):
        onnx.checker.check_model(graph)
        assert [(opset.domain, opset.version) for opset in graph.opset_import] == [("", onnx_pair.OPSET)]
        assert not graph.functions
        assert all(
            attribute.type != onnx.AttributeProto.GRAPH for node in graph.graph.node for attribute in node.attribute
        )
        content = graph.SerializeToString()
        assert b".py" not in content
        assert b"lightning" not in content
        constants = 2_000  # masks, shapes and numbers
        assert sum(onnx.numpy_helper.to_array(value).nbytes for value in graph.graph.initializer) <= size + constants
        read = {name for node in graph.graph.node for name in node.input}
        assert {value.name for value in (*graph.graph.input, *graph.graph.initializer)} <= read


def test_description(converted, tmp_path):
    """It is stored as model.json, and names the inputs and outputs of the graphs."""
    predictor, pair = converted
    network, description = predictor.network, pair.description
    pair.save(tmp_path)
    assert json.loads((tmp_path / "model.json").read_text()) == description
    files = ["encode.onnx", "decode_step.onnx"][: len(graphs(pair))]
    assert {path.name for path in tmp_path.iterdir()} == {"model.json", *files}
    inputs, outputs = {}, {}
    for file in files:
        graph = onnx.load(tmp_path / file).graph
        name = file.removesuffix(".onnx")
        inputs[name], outputs[name] = (
            {value.name for value in side} - {"head_mask"} for side in (graph.input, graph.output)
        )
    weights = {
        graph: {f"weights.{layer['layer']}" for layer in description["attention"] if graph in layer["graphs"]}
        for graph in inputs
    }
    if pair.decode_step is None:
        assert inputs == {"encode": {"text"}}
        assert outputs == {"encode": {"logits"} | weights["encode"]}
    else:
        state = description["state"]
        assert inputs == {"encode": {"source"}, "decode_step": {"token", *state}}
        changing = {after for after in state.values() if after is not None}
        assert outputs == {
            "encode": {*state} | weights["encode"],
            "decode_step": {"logits"} | changing | weights["decode_step"],
        }
    layers = attention_layers(network)
    assert {layer["layer"]: layer["heads"] for layer in description["attention"]} == {
        layer: module.num_heads for layer, module in layers.items()
    }
    assert [layer["layer"] for layer in description["attention"]] == [*layers]
    assert (description["pad"], description["bos"], description["eos"]) == (PAD, BOS, EOS)
    assert description["network"] == type(network).__name__
    assert description["labels"] == (LABELS if isinstance(network, EncoderClassifier) else None)


def test_sides_of_attention():
    """Check the sides of a translation model, a language model and a classifier, without exporting graphs."""

    def sides(predictor, graphs):
        description = onnx_pair._description(predictor, graphs, {})
        return {layer["layer"]: layer["side"] for layer in description["attention"]}

    network = tiny(Transformer, num_layers=1)()
    encoder, *decoder = attention_layers(network)
    assert sides(Seq2SeqPredictor(network, TOKENIZER, 9), {"encode": [encoder], "decode_step": decoder}) == {
        "encoder.0.self_attention": "encoder",
        "decoder.0.self_attention": "target",
        "decoder.0.cross_attention": "source",
    }
    network = tiny(AttentionLSTM)()
    assert sides(Seq2SeqPredictor(network, TOKENIZER, 9), {"encode": [], "decode_step": ["attention"]}) == {
        "attention": "source"
    }
    for predictor in (
        LanguageModelPredictor(tiny(GPT, num_layers=1)(), TOKENIZER),
        ClassifierPredictor(tiny(EncoderClassifier, num_layers=1, num_classes=3)(), TOKENIZER, LABELS),
    ):
        layers = [*attention_layers(predictor.network)]
        assert sides(predictor, {"encode": layers, "decode_step": layers}) == dict.fromkeys(layers, "sequence")


@pytest.mark.parametrize(
    ("predictor", "task", "lengths"),
    [
        (Seq2SeqPredictor(tiny(GPT)(), TOKENIZER, 6), "seq2seq", (14, 6, 20)),
        (Seq2SeqPredictor(tiny(Transformer)(), TOKENIZER, 6), "seq2seq", (20, 6, 20)),
        (Seq2SeqPredictor(tiny(AttentionLSTM)(), TOKENIZER, 6), "seq2seq", (None, 6, None)),
        (LanguageModelPredictor(tiny(GPT)(), TOKENIZER), "language_model", (None, None, 20)),
        (MaskedLanguageModelPredictor(tiny(MaskedEncoder)(), TOKENIZER), "masked_language_model", (20, None, 20)),
        (
            ClassifierPredictor(tiny(EncoderClassifier, num_classes=3)(), TOKENIZER, LABELS),
            "classifier",
            (20, None, 20),
        ),
    ],
)
def test_tasks_and_lengths(predictor, task, lengths):
    description = onnx_pair._description(predictor, {"encode": []}, {})
    assert description["task"] == task
    assert tuple(description[f"max_{name}length"] for name in ("source_", "target_", "")) == lengths


def test_few_positions():
    """The examples of the exporter have more tokens than the network has positions."""
    network = randomize(GPT(VOCAB_SIZE, 8, 2, 1, max_length=1)).eval()
    runtime = make_runtime(onnx_pair.convert(LanguageModelPredictor(network, TOKENIZER)))
    assert decoding_error(network, runtime, length=0, steps=1, seed=1) <= TOLERANCE
    with pytest.raises(UserError, match="max_length"):
        network.check_lengths(2)


@pytest.mark.parametrize("package", onnx_pair.PACKAGES)
def test_missing_package(package, monkeypatch):
    monkeypatch.setattr(onnx_pair, "find_spec", lambda name: None if name == package else name)
    with pytest.raises(UserError, match=rf"needs the package '{package}'; pip install 'lightning_tfm\[onnx\]'"):
        onnx_pair.convert(LanguageModelPredictor(tiny(GPT)(), TOKENIZER))


class DataDependent(GPT):
    def encode(self, source):
        return super().encode(source if source.sum() > 0 else source[:, :1])


class Growing(GPT):
    def decode_step(self, token, state):
        logits, state = super().decode_step(token, state[:3])
        return logits, (*state, logits)


@pytest.mark.parametrize(("cls", "message"), [(DataDependent, ".*"), (Growing, ".* must have the same structure.*")])
def test_network_that_cannot_be_traced(cls, message):
    predictor = LanguageModelPredictor(cls(VOCAB_SIZE, 8, 2, 1, max_length=9), TOKENIZER)
    with pytest.raises(UserError, match=rf"^torch cannot export {cls.__name__}: {message}; try safetensors$"):
        onnx_pair.convert(predictor)
