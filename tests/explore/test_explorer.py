"""Questions about the answers of networks of all kinds, against independent answers."""

from __future__ import annotations

import copy
import json
import math
import os
from dataclasses import asdict
from time import time

import pytest
import torch
import yaml

from lightning_tfm.errors import UserError
from lightning_tfm.explore import Changes, Drawn, Explorer, Patched
from lightning_tfm.explore.answers import CONTINUATION
from lightning_tfm.explore.explorer import QUESTIONS, ask, describe
from lightning_tfm.inference import (
    ClassifierPredictor,
    LanguageModelPredictor,
    MaskedLanguageModelPredictor,
    Predictor,
    Seq2SeqPredictor,
)
from lightning_tfm.inference.decoding import DecodingOptions, beam_search
from lightning_tfm.insight import components, heads_of, inspect_network, occlusion, parts_of, patching
from lightning_tfm.insight.texts import as_sample
from lightning_tfm.networks import (
    GPT,
    AttentionLSTM,
    CausalNetwork,
    EncoderClassifier,
    LinearTransformer,
    MaskedEncoder,
    Transformer,
)
from lightning_tfm.networks.naive_bayes import NaiveBayes
from lightning_tfm.runs.record import Run
from lightning_tfm.tokenization import BOS, EOS, PAD, SymbolTokenizer, train_tokenizer, train_word_tokenizer
from support.corpora import TEXT, reviews
from support.networks import VOCAB_SIZE, randomize, tiny

TOKENIZER = SymbolTokenizer("abcdefgh")
LABELS = ["good", "bad", "neutral"]
LENGTH = 7  # of an answer


@pytest.fixture
def explorer(network):
    return Explorer(Seq2SeqPredictor(network, TOKENIZER, LENGTH))


def classifier(tokenizer=TOKENIZER, **settings):
    network = EncoderClassifier(
        tokenizer.vocab_size, 3, max_length=20, d_model=16, num_heads=4, num_layers=2, d_ff=32, **settings
    )
    predictor = ClassifierPredictor(randomize(network), tokenizer, LABELS)
    for module in network.modules():
        if isinstance(module, NaiveBayes):
            module.scores.random_(-60_000, 60_000)
    return predictor


def words():
    return train_word_tokenizer((text for _, text in reviews()), 20, num_ngrams=40)


TASKS = {
    "language model": lambda: LanguageModelPredictor(randomize(tiny(GPT)()), TOKENIZER),
    "linear language model": lambda: LanguageModelPredictor(randomize(tiny(LinearTransformer)()), TOKENIZER),
    "masked language model": lambda: MaskedLanguageModelPredictor(randomize(tiny(MaskedEncoder)()), TOKENIZER),
    "classifier": classifier,
    "naive Bayes": lambda: classifier(num_bigram_buckets=40),
    "classifier of n-grams": lambda: classifier(words(), num_bigram_buckets=40),
}
"""Predictors of one text."""


@pytest.fixture(params=TASKS)
def text_explorer(request):
    torch.manual_seed(1)
    return Explorer(TASKS[request.param]())


def text_for(explorer):
    """Return a text and another one with as many tokens."""
    if explorer.predictor.task == "masked_language_model":
        return "ab[MASK]d[MASK]f", "hb[MASK]d[MASK]g"
    if explorer.predictor.tokenizer is not TOKENIZER:
        return "awful film", "great film"
    return "abcdef", "hbcdeg"


def greedy(predictor, text, number):
    """Return the text of the greedy output of a predictor."""
    is_language_model = isinstance(predictor, LanguageModelPredictor)
    options = DecodingOptions(temperature=0, max_tokens=number) if is_language_model else DecodingOptions()
    return predictor.predict([text], options)[0].text


def ids_of(answer):
    return [step["id"] for step in answer["steps"]]


def chances(answer):
    return torch.tensor([step["probability"] for step in answer["steps"]])


def is_greedy(answer):
    """Return whether each step that is not forced is the most probable one of the network that was run at once."""
    return all(step["forced"] or step["id"] == step["alternatives"][0]["id"] for step in answer["steps"])


def test_an_answer_is_the_prediction(explorer, network):
    predictor, text = explorer.predictor, "abcdabcd"
    answer = explorer.answer(text)
    json.dumps(answer, allow_nan=False)
    (prediction,) = predictor.predict([text], DecodingOptions(scores=True))
    assert answer["output"] == prediction.text
    assert answer["log_probability"] == pytest.approx(prediction.outputs[0].log_probability, abs=1e-4)
    ids = ids_of(answer)
    with torch.no_grad():
        logits = network(torch.tensor([[*TOKENIZER.encode(text), EOS]]), torch.tensor([[BOS, *ids[:-1]]]))[0]
    expected = logits.softmax(-1)
    torch.testing.assert_close(chances(answer), expected[range(len(ids)), ids])
    assert answer["source"] == [*text, "EOS"]
    assert [step["symbol"] for step in answer["steps"]] == [predictor.output_symbol(id) for id in ids]
    for step, row in zip(answer["steps"], expected, strict=True):
        row[[PAD, BOS]] = 0
        values, best = row.topk(5)
        assert [other["id"] for other in step["alternatives"]] == best.tolist()
        assert [other["probability"] for other in step["alternatives"]] == pytest.approx(values.tolist(), rel=1e-4)
        assert not step["forced"]


def test_attention_maps_are_those_of_the_output(explorer):
    answer = explorer.answer("abcdabcd")
    content = {"source": "abcdabcd", "target": "", "prediction": answer["output"], "alignment": None}
    maps = {attention["layer"]: attention for attention in answer["attention"]}
    S, T = len(answer["source"]), len(answer["steps"])
    output = [step["symbol"] for step in answer["steps"]]
    decoder = ["BOS", *output[:-1]]
    labels = {
        "encoder": (answer["source"], answer["source"], None),
        "source": (output, answer["source"], 0),
        "target": (decoder, decoder, 0),
        "sequence": ([*answer["source"], *decoder], [*answer["source"], *decoder], S),
    }
    described = {attention["layer"]: attention for attention in explorer.describe()["attention"]}
    assert maps.keys() == described.keys()
    for expected in explorer.predictor.attention(content):
        actual = maps[expected.layer]
        assert actual["side"] == described[expected.layer]["side"]
        weights = torch.tensor(actual["weights"])
        assert len(weights) == described[expected.layer]["heads"]
        torch.testing.assert_close(weights, expected.weights, rtol=0, atol=1e-4)
        assert (actual["queries"], actual["keys"], actual["first_step"]) == labels[actual["side"]]
        assert weights.shape[1:] == (len(actual["queries"]), len(actual["keys"]))
        assert len(output) == T


def test_a_prefix_is_forced(explorer, network):
    """The rest is greedy, as computed without a cache."""
    first = explorer.answer("abcd")
    prefix = [first["steps"][0]["alternatives"][2]["id"], TOKENIZER.encode("c")[0]]
    prefix = [TOKENIZER.encode("a")[0], prefix[1]] if EOS in prefix else prefix
    answer = explorer.answer("abcd", prefix)
    ids = ids_of(answer)
    source, expected = torch.tensor([[*TOKENIZER.encode("abcd"), EOS]]), [*prefix]
    while len(expected) < LENGTH and expected[-1] != EOS:
        with torch.no_grad():
            logits = network(source, torch.tensor([[BOS, *expected]]))[0, -1]
        logits[[PAD, BOS]] = -math.inf
        expected.append(int(logits.argmax()))
    assert ids == expected
    assert [step["forced"] for step in answer["steps"]] == [True, True, *[False] * (len(ids) - 2)]
    assert answer["log_probability"] == pytest.approx(chances(answer).log().sum().item(), abs=1e-4)
    for step in answer["steps"]:
        assert step["id"] in [other["id"] for other in step["alternatives"]]
        assert len(step["alternatives"]) == 5
        ordered = [other["probability"] for other in step["alternatives"]]
        assert ordered == sorted(ordered, reverse=True)
    ended = explorer.answer("abcd", [*prefix, EOS])
    assert ids_of(ended) == [*prefix, EOS]
    assert ended["output"] == TOKENIZER.decode(prefix)


def test_wrong_prefixes():
    explorer = Explorer(Seq2SeqPredictor(tiny(GPT)(), TOKENIZER, LENGTH))
    for prefix in ([BOS], [PAD], [EOS, 3], [VOCAB_SIZE], [-1]):
        with pytest.raises(UserError, match=f"prefix must have ids from 3 to {VOCAB_SIZE - 1}, but has "):
            explorer.answer("abcd", prefix)
    with pytest.raises(UserError, match=f"prefix must have at most {LENGTH} ids, but has {LENGTH + 1}"):
        explorer.answer("abcd", [3] * (LENGTH + 1))
    with pytest.raises(UserError, match="prefix must be empty for a Classifier, but is"):
        Explorer(classifier()).answer("abcd", [3])


def test_texts_without_an_answer():
    explorer = Explorer(Seq2SeqPredictor(tiny(GPT)(), TOKENIZER, LENGTH))
    for text, reason in {"": "the text is empty", "xyz": "no character 'x'", "\ud800": "not valid UTF-8"}.items():
        with pytest.raises(UserError, match=f"no answer to .*: .*{reason}"):
            explorer.answer(text)
    assert explorer.answer("  ab ")["source"] == ["a", "b", "EOS"]


def test_answers_of_other_tasks_are_predictions(text_explorer):
    predictor, (text, _) = text_explorer.predictor, text_for(text_explorer)
    answer = text_explorer.answer(text)
    json.dumps(answer, allow_nan=False)
    number = sum(not step["given"] for step in answer["steps"])
    assert answer["output"] == greedy(predictor, text, number)
    assert is_greedy(answer)
    assert answer["log_probability"] == pytest.approx(chances(answer).log().sum().item(), abs=1e-4)
    for attention in answer["attention"]:
        assert attention["side"] == "sequence"
        shape = torch.tensor(attention["weights"]).shape
        assert shape == (4, len(attention["queries"]), len(attention["keys"]))
    if isinstance(predictor, ClassifierPredictor):
        assert [other["symbol"] for other in answer["steps"][0]["alternatives"]].count(answer["output"]) == 1
        assert sum(other["probability"] for other in answer["steps"][0]["alternatives"]) == pytest.approx(1, abs=1e-5)
        assert answer["steps"][0]["probability"] == pytest.approx(
            predictor.predict([text])[0].outputs[0].probability, abs=1e-4
        )


def test_a_language_model_scores_and_continues_a_text():
    network = randomize(tiny(GPT)())
    predictor = LanguageModelPredictor(network, TOKENIZER)
    explorer = Explorer(predictor)
    answer = explorer.answer("abcdef")
    given = [step for step in answer["steps"] if step["given"]]
    assert [step["symbol"] for step in given] == [*"bcdef"]
    assert sum(math.log(step["probability"]) for step in given) == pytest.approx(
        predictor.score(["abcdef"])[0].log_probability, abs=1e-4
    )
    assert len(answer["steps"]) - len(given) == min(CONTINUATION, 20 - 6)
    forced = explorer.answer("abcdef", [4, 3])
    longer = explorer.answer("abcdefba")
    assert forced["output"] == longer["output"]
    torch.testing.assert_close(chances(forced), chances(longer))
    assert [step["given"] for step in forced["steps"]].count(True) == 5
    assert len(explorer.answer("abcdefgh" * 2 + "abcd")["steps"]) == 19
    long = explorer.answer("abcdefgh" * 3)
    assert long["note"] == "only the last 10 of 24 tokens are used"
    assert long["source"] == [*("abcdefgh" * 3)[-10:]]
    assert explorer.answer("a")["source"] == ["a"]


def test_masks_are_filled_with_the_most_probable_tokens():
    predictor = MaskedLanguageModelPredictor(randomize(tiny(MaskedEncoder)()).eval(), TOKENIZER)
    answer = Explorer(predictor).answer("ab[MASK]d[MASK]")
    with torch.no_grad():
        expected = predictor.network(torch.tensor([[3, 4, BOS, 6, BOS]]))[0].softmax(-1)
    torch.testing.assert_close(chances(answer), expected[[2, 4], ids_of(answer)])
    assert answer["source"] == ["a", "b", "[MASK]", "d", "[MASK]"]
    assert {attention["first_step"] for attention in answer["attention"]} == {2}


def without_columns(network, name, head):
    """Return a network whose projection does not read a head."""
    other = copy.deepcopy(network)
    layer = other.get_submodule(name)
    with torch.no_grad():
        layer.out_proj.weight.chunk(layer.num_heads, dim=1)[head].zero_()
    return other


def test_a_head_is_off_as_by_zero_columns_of_the_projection(explorer, network):
    for head in heads_of(network)[1::3]:
        if hasattr(network.get_submodule(head.name), "out_proj"):
            other = Explorer(Seq2SeqPredictor(without_columns(network, *head), TOKENIZER, LENGTH))
            expected, actual = other.answer("abcd"), explorer.answer("abcd", changes=Changes(off=[str(head)]))
            assert ids_of(actual) == ids_of(expected)
            torch.testing.assert_close(chances(actual), chances(expected))


def test_the_attention_of_a_recurrent_network_is_off_as_by_zero_columns():
    torch.manual_seed(1)
    network = randomize(tiny(AttentionLSTM)())
    other = copy.deepcopy(network)
    with torch.no_grad():
        other.decoder_state.weight[:, :32] = 0
        other.readout.weight[:, 16:] = 0
    actual = Explorer(Seq2SeqPredictor(network, TOKENIZER, LENGTH)).answer("abcd", changes=Changes(off=["attention"]))
    expected = Explorer(Seq2SeqPredictor(other, TOKENIZER, LENGTH)).answer("abcd")
    torch.testing.assert_close(chances(actual), chances(expected))


def test_a_layer_is_off_as_by_sublayers_that_write_nothing(text_explorer):
    """Also in the networks of other tasks."""
    text, _ = text_for(text_explorer)
    names = {component.name: component.kind for component in components(text_explorer.network)}
    for layer in [name for name, kind in names.items() if kind == "layer"]:
        other = copy.deepcopy(text_explorer.predictor)
        for name, kind in names.items():
            if name.startswith(f"{layer}.") and kind in ("attention", "feed_forward"):
                module = other.network.get_submodule(name)
                last = module.out_proj if kind == "attention" else module[-1]
                with torch.no_grad():
                    last.weight.zero_()
                    last.bias.zero_()
        actual = text_explorer.answer(text, changes=Changes(off=[layer]))
        expected = Explorer(other).answer(text)
        assert ids_of(actual) == ids_of(expected)
        torch.testing.assert_close(chances(actual), chances(expected))


def drawable(explorer):
    return explorer.describe()["drawable"]


def test_drawn_weights_are_those_of_the_map(explorer, network):
    """The steps before are unchanged, and decoding with a cache equals the network that is run at once."""
    assert bool(drawable(explorer)) == (not isinstance(network, LinearTransformer))
    before = explorer.answer("abcd")
    for layer in drawable(explorer):
        side = {attention["layer"]: attention["side"] for attention in before["attention"]}[layer]
        step = 1
        query = step + (len(before["source"]) if side == "sequence" else 0)
        answer = explorer.answer("abcd", [5, 5], Changes(drawn=[Drawn(layer, query, 0)]))
        (attention,) = (attention for attention in answer["attention"] if attention["layer"] == layer)
        row = torch.tensor(attention["weights"])[:, query]
        assert row.equal(torch.eye(row.size(1))[0].expand_as(row))
        assert is_greedy(answer)
        if side != "encoder":
            expected = explorer.answer("abcd", [5, 5])
            torch.testing.assert_close(chances(answer)[:step], chances(expected)[:step])
            same = [each for each in expected["attention"] if each["layer"] == layer]
            drawn, unchanged = (torch.tensor(each["weights"])[:, :query] for each in (attention, same[0]))
            keys = min(drawn.size(2), unchanged.size(2))  # the outputs may differ in length after the step
            torch.testing.assert_close(drawn[..., :keys], unchanged[..., :keys], rtol=0, atol=1e-4)
    heads = max(attention["heads"] for attention in explorer.describe()["attention"])
    for layer in drawable(explorer) if heads > 1 else []:
        answer = explorer.answer("abcd", [5, 5], Changes(drawn=[Drawn(layer, 0, 0, head=1), Drawn(layer, 1, 1, 2)]))
        (attention,) = (attention for attention in answer["attention"] if attention["layer"] == layer)
        assert attention["weights"][1][0][0] == 1
        assert attention["weights"][2][1][1] == 1
        assert is_greedy(answer)


def source_parts(network):
    """Return the names of components whose outputs for the source determine the answer."""
    names = [component.name for component in components(network)]
    if isinstance(network, CausalNetwork):
        return ["embedding"]
    return ["encoder_states"] if "encoder_states" in names else ["encoder.1"]


def test_patching_all_states_of_the_source_gives_the_other_answer(explorer, network):
    if getattr(network, "pointer", None) is not None:
        return  # it copies the tokens of its own source
    patched = [Patched(name, position) for name in source_parts(network) for position in range(5)]
    if isinstance(network, AttentionLSTM):
        patched.append(Patched("start", 0))
    answer = explorer.answer("abcd", changes=Changes(patched=patched), against="gcea")
    expected = explorer.answer("gcea")
    assert ids_of(answer) == ids_of(expected)
    torch.testing.assert_close(chances(answer), chances(expected))
    other = explorer.answer("abcd")
    assert ids_of(other) != ids_of(expected) or not torch.allclose(chances(other), chances(expected))


def test_changes_combine(explorer, network):
    """Patched states are those of the changed network, and decoding equals the network that is run at once."""
    off = [str(part) for part in parts_of(network)][:2]
    drawn = [Drawn(layer, 1, 0, 0) for layer in drawable(explorer)][-1:]
    patched = [Patched(name, 1) for name in source_parts(network)]
    changes = Changes(off, drawn, patched)
    answer = explorer.answer("abcd", changes=changes, against="gcea")
    assert is_greedy(answer)
    assert ask(explorer, "answer", {"text": "abcd", "changes": json_of(changes), "against": "gcea"}) == answer
    if not getattr(network, "pointer", None):
        everything = Changes(off, drawn, [Patched(name, i) for name in source_parts(network) for i in range(5)])
        if isinstance(network, AttentionLSTM):
            everything = Changes(off, drawn, [*everything.patched, Patched("start", 0)])
        actual = explorer.answer("abcd", changes=everything, against="gcea")
        expected = explorer.answer("gcea", changes=Changes(off, drawn))
        torch.testing.assert_close(chances(actual), chances(expected))
    assert explorer.answer("abcd") == explorer.answer("abcd"), "nothing stays changed"
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in network.modules())


def json_of(changes):
    return json.loads(json.dumps(asdict(changes)))


@pytest.mark.parametrize(
    ("changes", "against", "message"),
    [
        (Changes(off=["decoder.0.cross_attention.4"]), None, "the network has no 'decoder.0.cross_attention.4'"),
        (Changes(off=["source_embedding"]), None, "off must name heads, sub-layers or layers"),
        (Changes(off=["encoder.7"]), None, "the network has no 'encoder.7'; did you mean 'encoder.1'?"),
        (Changes(drawn=[Drawn("encoder.0", 0, 0)]), None, "no attention layer 'encoder.0'"),
        (Changes(drawn=[Drawn("decoder.0.cross_attention", 0, 5)]), None, "key must be from 0 to 4 for query 0"),
        (Changes(drawn=[Drawn("decoder.0.cross_attention", -1, 0)]), None, "query must be at least 0, but is -1"),
        (Changes(drawn=[Drawn("decoder.0.cross_attention", 0, 0, 4)]), None, "head must be from 0 to 3"),
        (
            Changes(patched=[Patched("encoder.0", 0)]),
            None,
            "against is missing; pass the text whose states to patch in",
        ),
        (Changes(patched=[Patched("encoder.0", 0)]), "abc", "against must have as many tokens as the text, 5, but"),
        (Changes(patched=[Patched("encoder.0", 5)]), "abce", "position must be from 0 to 4 for encoder.0"),
        (Changes(patched=[Patched("encoder.2", 0)]), "abce", "no component 'encoder.2'; did you mean"),
        (Changes(patched=[Patched("encoder.0", 0)]), "xyz", "no answer to 'xyz'"),
    ],
)
def test_wrong_changes(changes, against, message):
    explorer = Explorer(Seq2SeqPredictor(randomize(tiny(Transformer)()), TOKENIZER, LENGTH))
    with pytest.raises(UserError) as error:
        explorer.answer("abcd", changes=changes, against=against)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    explorer.answer("abcd")


def test_a_beam_is_that_of_the_search(explorer, network):
    tree = explorer.beam("abcd", beam_size=3)
    json.dumps(tree, allow_nan=False)
    with torch.no_grad():
        source = torch.tensor([[*TOKENIZER.encode("abcd"), EOS]])
        best, scores = beam_search(network.decode_step, network.encode(source), LENGTH, 3, n_best=3)
    nodes = {node["id"]: node for node in tree["nodes"]}

    def tokens_of(number):
        node = nodes[number]
        return [] if node["parent"] is None else [*tokens_of(node["parent"]), node["token"]]

    assert [tokens_of(output["node"]) for output in tree["outputs"]] == [
        [id for id in row if id != PAD] for row in best[0].tolist()
    ]
    assert [output["score"] for output in tree["outputs"]] == scores[0].tolist()
    for output in tree["outputs"]:
        ids = tokens_of(output["node"])
        assert output["text"] == TOKENIZER.decode(ids)
        assert output["log_probability"] == nodes[output["node"]]["log_probability"]
        assert output["score"] * len(ids) == pytest.approx(output["log_probability"], rel=1e-5)
        with torch.no_grad():
            logits = network(source, torch.tensor([[BOS, *ids[:-1]]]))[0].log_softmax(-1)
        assert logits[range(len(ids)), ids].sum().item() == pytest.approx(output["log_probability"], abs=1e-4)
    for number in range(1, LENGTH + 1):
        step = [node for node in tree["nodes"] if node["step"] == number]
        assert sum(node["status"] == "open" for node in step) <= 3
        assert [node["rank"] for node in step] == [*range(len(step))]
        values = [node["log_probability"] for node in step]
        assert values == sorted(values, reverse=True)
        for node in step:
            parent = nodes[node["parent"]]
            assert parent["status"] == "open"
            assert parent["step"] == number - 1
            assert node["symbol"] == explorer.predictor.output_symbol(node["token"])
            assert node["status"] != "finished" or node["token"] == EOS


def test_a_beam_of_one_is_greedy_also_with_changes(explorer, network):
    off = [str(part) for part in parts_of(network)][:1]
    changes = Changes(off, patched=[Patched(name, 0) for name in source_parts(network)])
    answer, tree = (method("abcd", changes=changes, against="gcea") for method in (explorer.answer, explorer.beam))
    assert tree["outputs"][0]["log_probability"] != 0
    (output, *_) = explorer.beam("abcd", beam_size=1, changes=changes, against="gcea")["outputs"]
    if EOS not in ids_of(answer):  # otherwise, the search goes on to a second sequence
        assert output["log_probability"] == pytest.approx(answer["log_probability"], abs=1e-4)


def test_attributions_are_those_of_the_output(explorer, network):
    result = explorer.attributions("abcd")
    json.dumps(result, allow_nan=False)
    forced = explorer.predictor.teacher_forced("abcd")
    torch.testing.assert_close(torch.tensor(result["values"]), occlusion(network, as_sample(forced)))
    assert result["inputs"] == forced.input_symbols
    assert result["targets"] == forced.target_symbols
    name = parts_of(network)[0] if parts_of(network) else None
    if name is not None:
        changed = explorer.attributions("abcd", changes=Changes(off=[str(name)]))
        assert changed["values"] != result["values"]


def test_attributions_with_changes_are_those_of_the_changed_network():
    torch.manual_seed(1)
    network = randomize(tiny(Transformer)())
    other = without_columns(network, "decoder.0.cross_attention", 1)
    explorers = [Explorer(Seq2SeqPredictor(each, TOKENIZER, LENGTH)) for each in (network, other)]
    for method in ("occlusion", "integrated_gradients"):
        changes = Changes(off=["decoder.0.cross_attention.1"])
        actual = explorers[0].attributions("abcd", [3, 4], method, changes)
        expected = explorers[1].attributions("abcd", [3, 4], method)
        assert actual["targets"] == expected["targets"]
        torch.testing.assert_close(
            torch.tensor(actual["values"]), torch.tensor(expected["values"]), rtol=1e-3, atol=1e-4
        )
    drawn = Changes(drawn=[Drawn("decoder.0.cross_attention", 0, 2), Drawn("decoder.1.cross_attention", 0, 2)])
    values = torch.tensor(explorers[0].attributions("abcd", changes=drawn)["values"])
    assert values.isfinite().all()


def test_attributions_of_other_tasks(text_explorer):
    text, _ = text_for(text_explorer)
    answer = text_explorer.answer(text)
    for method in ("occlusion", "integrated_gradients"):
        result = text_explorer.attributions(text, method=method)
        json.dumps(result, allow_nan=False)
        assert result["targets"] == [step["symbol"] for step in answer["steps"]]
        assert torch.tensor(result["values"]).shape == (len(result["targets"]), len(result["inputs"]))
        last = len(answer["steps"]) - 1
        one = text_explorer.attributions(text, method=method, step=last)
        torch.testing.assert_close(torch.tensor(one["values"]), torch.tensor(result["values"][-1:]))
        assert one["targets"] == result["targets"][-1:]
        with pytest.raises(UserError, match=f"step must be from 0 to {last}, but is {last + 1}"):
            text_explorer.attributions(text, method=method, step=last + 1)
        assert len(result["inputs"]) >= len(answer["source"])


def test_patching_keeps_the_target_of_the_other_text(explorer, monkeypatch):
    monkeypatch.setattr("lightning_tfm.insight.attribution.LEAST_DIFFERENCE", 0)
    result = explorer.patch("abcd", "gcea")
    forced, other = map(explorer.predictor.teacher_forced, ("abcd", "gcea"))
    expected = patching(explorer.network, (forced.inputs[0], other.inputs[1]), as_sample(other))
    for layer in result["layers"]:
        torch.testing.assert_close(torch.tensor(layer["effects"]), expected[layer["layer"]])
        assert len(layer["effects"]) == len(layer["symbols"])
    assert {layer["layer"] for layer in result["layers"]} == expected.keys() - {"start"}
    assert result["outputs"] == [explorer.answer(text)["output"] for text in ("abcd", "gcea")]
    one = isinstance(explorer.network, CausalNetwork)
    target = ["BOS", *[step["symbol"] for step in explorer.answer("gcea")["steps"]][:-1]]
    for layer in result["layers"]:
        symbols = target if layer["side"] == "decoder" else [*"abcd", "EOS", *(target if one else [])]
        assert layer["symbols"] == symbols


def test_patching_other_tasks(text_explorer, monkeypatch):
    monkeypatch.setattr("lightning_tfm.insight.attribution.LEAST_DIFFERENCE", 0)
    text, other = text_for(text_explorer)
    result = text_explorer.patch(text, other)
    json.dumps(result, allow_nan=False)
    assert [layer["layer"] for layer in result["layers"]] == [
        component.name for component in components(text_explorer.network) if component.kind == "layer"
    ]
    with pytest.raises(UserError, match="both inputs must have the same number of tokens"):
        text_explorer.patch(text, other + other[-1] if text_explorer.predictor.tokenizer is TOKENIZER else "great")


def test_tokenizers_of_several_kinds():
    """Tables with features, words, separated symbols and subwords."""
    sources = {
        "abc\tV;PST": SymbolTokenizer([*"abc", "[V]", "[PST]", " "], feature_separator=";"),
        "ein Hund läuft": train_tokenizer([TEXT], "word", 40),
        "ein Hund schläft groß": train_tokenizer([TEXT], "subword", 300),
        "a b c": SymbolTokenizer([*"abcd"], separator=" ", target_separator=""),
    }
    for text, tokenizer in sources.items():
        torch.manual_seed(0)
        network = randomize(Transformer(tokenizer.vocab_size, 16, 4, 1, 32, max_length=40))
        predictor = Seq2SeqPredictor(network, tokenizer, LENGTH)
        explorer = Explorer(predictor)
        answer = explorer.answer(text)
        assert answer["output"] == predictor.predict([text])[0].text
        assert len(answer["source"]) == len(tokenizer.encode(text)) + 1
        for attention in answer["attention"]:
            assert torch.tensor(attention["weights"]).shape[1:] == (len(attention["queries"]), len(attention["keys"]))
        forced = explorer.answer(text, [answer["steps"][0]["alternatives"][1]["id"]])
        assert forced["output"] != answer["output"] or len(forced["steps"]) < 3
        for question in ("beam", "attributions"):
            json.dumps(ask(explorer, question, {"text": text}), allow_nan=False)


def test_samples_with_one_candidate_are_greedy(explorer):
    answer, sampled = explorer.answer("abcd"), explorer.sample("abcd", top_k=1)
    assert sampled["text"] == answer["output"]
    assert [step["id"] for step in sampled["steps"]] == ids_of(answer)
    torch.testing.assert_close(torch.tensor([step["probability"] for step in sampled["steps"]]), chances(answer))
    assert sampled["given"] == 0
    for step in sampled["steps"]:
        assert step["surprise"] == pytest.approx(-math.log2(step["probability"]), abs=1e-5)
    assert explorer.sample("abcd", temperature=0)["text"] == answer["output"]
    json.dumps(explorer.sample("abcd", temperature=2.0, top_p=0.9, seed=3), allow_nan=False)


@pytest.mark.parametrize("cls", [GPT, LinearTransformer])
def test_samples_of_a_language_model_continue_the_text(cls):
    torch.manual_seed(1)
    predictor = LanguageModelPredictor(randomize(tiny(cls)()), TOKENIZER)
    explorer = Explorer(predictor)
    answer, sampled = explorer.answer("abcdef"), explorer.sample("abcdef", top_k=1, max_tokens=14)
    assert sampled["text"] == answer["output"]
    torch.testing.assert_close(torch.tensor([step["probability"] for step in sampled["steps"]]), chances(answer))
    assert sampled["given"] == 5
    long = explorer.sample("abcdef", seed=1, max_tokens=40)  # more than there are positions
    options = DecodingOptions(temperature=1.0, max_tokens=40, seed=1)
    assert long["text"] == predictor.predict(["abcdef"], options)[0].text
    assert len(long["steps"]) == 45
    assert explorer.sample("abcdef", seed=1, max_tokens=40) == long
    assert explorer.sample("abcdef", seed=2, max_tokens=40) != long
    assert len(explorer.sample("a", max_tokens=3)["steps"]) == 3


@pytest.mark.parametrize(
    ("question", "arguments", "message"),
    [
        ("answers", {}, "question must be one of answer, beam"),
        ("describe", {}, "question must be one of answer, beam"),
        ("answer", {}, "answer needs the argument text"),
        ("answer", {"text": "a", "prefixes": []}, "answer has no argument 'prefixes'; did you mean 'prefix'?"),
        ("answer", {"text": 3}, "text is wrong: input should be a valid string, but is '3'"),
        ("answer", {"text": "a", "prefix": ["b"]}, "prefix.0 is wrong: input should be a valid integer, but is 'b'"),
        ("answer", {"text": "a", "prefix": [True]}, "prefix.0 is wrong: input should be a valid integer"),
        ("answer", {"text": "a", "prefix": 3}, "prefix is wrong: input should be a valid"),
        ("answer", {"text": "a", "changes": []}, "changes is wrong: input should be an object"),
        ("answer", {"text": "a", "changes": {"of": []}}, "changes.of is wrong: unexpected keyword argument"),
        ("answer", {"text": "a", "changes": {"off": "b"}}, "changes.off is wrong: "),
        ("answer", {"text": "a", "changes": {"drawn": [{"layer": "b"}]}}, "changes.drawn.0.query is wrong"),
        ("answer", {"text": "a", "changes": {"patched": [{"layer": "b", "position": 1, "c": 2}]}}, "0.c is wrong"),
        ("answer", {"text": "\ud800"}, "text is wrong"),
        ("beam", {"text": "a", "beam_size": 0}, "beam_size must be from 1 to 50, but is 0"),
        ("beam", {"text": "a", "beam_size": 10**30}, "beam_size must be from 1 to 50"),
        ("attributions", {"text": "a", "method": "guess"}, "method is wrong: input should be 'occlusion' or"),
        ("neighbors", {"text": "a"}, "neighbors needs the training data of the checkpoint"),
        ("worst", {}, "worst needs the test data of the checkpoint"),
        ("sample", {"text": "a", "temperature": math.nan}, "temperature must be 0 or from 0.01 to 100, but is nan"),
        ("sample", {"text": "a", "top_p": 2}, "top_p must be above 0 and at most 1, but is 2"),
        ("sample", {"text": "a", "max_tokens": 1001}, "max_tokens must be from 1 to 1000, but is 1001"),
        ("sample", {"text": "a", "seed": -1}, "seed must be from 0 to"),
    ],
)
def test_wrong_questions(question, arguments, message):
    explorer = Explorer(Seq2SeqPredictor(tiny(GPT)(), TOKENIZER, LENGTH))
    with pytest.raises(UserError) as error:
        ask(explorer, question, arguments)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_questions_that_a_task_lacks(text_explorer):
    description = text_explorer.describe()
    assert {*description["questions"], *description["excluded"]} == {*QUESTIONS}
    for question, reason in description["excluded"].items():
        assert reason.startswith("needs ")
        arguments = {} if question == "worst" else {"text": text_for(text_explorer)[0]}
        with pytest.raises(UserError, match=f"{question} {reason}"):
            ask(text_explorer, question, arguments)
    assert "beam" in description["excluded"]
    assert "answer" in description["questions"]
    is_classifier = isinstance(text_explorer.predictor, ClassifierPredictor)
    assert description["labels"] == (LABELS if is_classifier else [])


def test_a_description_has_the_results_of_inspect(tmp_path, batch):
    predictor = Seq2SeqPredictor(randomize(tiny(Transformer)()).eval(), TOKENIZER, LENGTH)
    path = tmp_path / "checkpoints/best.ckpt"
    path.parent.mkdir()
    path.touch()
    run = Run(tmp_path)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({}))
    description = Explorer(predictor, path=path).describe()
    assert (description["example"], description["heads"], description["parts"]) == ("", [], [])
    prediction = {"target": "b", "prediction": "b", "correct": True, "nll": 0.0, "category": None, "alignment": None}
    run.write_predictions([{"source": "abca", **prediction}, {"source": "b", **prediction}])
    forced = predictor.teacher_forced("abcd")
    sample = as_sample(forced)
    record = inspect_network(predictor.network, sample.rows(torch.tensor([0, 0])))
    run.inspection_folder.mkdir()
    run.write_inspection({"checkpoint": "best.ckpt", "data": "test", "seed": 0, **record, "texts": []})
    (model,) = describe([Explorer(predictor, "first", path=path)])["models"]
    json.dumps(model, allow_nan=False)
    without_run = Explorer(predictor, inspection=record).describe()
    assert (without_run["heads"], without_run["parts"]) == (model["heads"], model["parts"])
    assert (model["name"], model["network"], model["task"]) == ("first", "Transformer", "seq2seq")
    assert model["example"] == "abca"
    assert model["load"] == f'load("{path}")'
    assert (model["max_source_length"], model["max_target_length"]) == (20, LENGTH)
    assert [head["name"] for head in model["heads"]] == [str(head) for head in heads_of(predictor.network)]
    for head, expected in zip(model["heads"], record["heads"], strict=True):
        assert head["loss_increase"] == pytest.approx(expected["without"]["mean"]["loss_increase"][0])
        assert head["scores"] == pytest.approx(expected["scores"])
    assert [part["name"] for part in model["parts"]] == [part["name"] for part in record["components"]]
    assert model["parameters"] == sum(parameter.numel() for parameter in predictor.network.parameters())
    (tmp_path / "checkpoints/last.ckpt").touch()
    last = Explorer(predictor, path=path.with_name("last.ckpt")).describe()
    assert last["heads"] == []
    os.utime(path, (later := time() + 60, later))  # trained again
    assert Explorer(predictor, path=path).describe()["heads"] == []
    switchable = {part["name"] for part in model["components"] if part["switchable"]}
    assert switchable == {part.name for part in parts_of(predictor.network)}


def test_an_example_of_a_text_can_be_answered(text_explorer, tmp_path):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({}))
    (tmp_path / "attention").mkdir()
    predictor, text = text_explorer.predictor, text_for(text_explorer)[0].replace("[MASK]", "c")
    Run(tmp_path).write_examples([{"text": text}])
    explorer = Explorer(predictor, path=tmp_path / "checkpoints/best.ckpt")
    example = explorer.describe()["example"]
    assert example[:2] == text[:2]
    assert not explorer.answer(example)["steps"][-1]["given"]
    Run(tmp_path).write_examples([{"text": ""}])
    assert explorer.describe()["example"] == ("[MASK]" if explorer.predictor.task == "masked_language_model" else "")


def test_predictors_of_other_tasks_are_refused():
    class OwnPredictor(Predictor):
        def encode_line(self, line): ...

        def predict_ids(self, sources, options, generator): ...

    with pytest.raises(UserError, match=r"the predictor must be one of Seq2SeqPredictor, .*, but is a OwnPredictor"):
        Explorer(OwnPredictor(tiny(GPT)(), TOKENIZER))
