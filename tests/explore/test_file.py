"""Pages with networks in them answer like the networks, and need no process and no network."""

from __future__ import annotations

import json
import re
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_tfm.commands.report import report
from lightning_tfm.errors import UserError
from lightning_tfm.explore import Changes, Explorer, file
from lightning_tfm.explore.explorer import LIMITS, QUESTIONS, ask
from lightning_tfm.explore.file import halve, keeps_outputs_in_half, write_page
from lightning_tfm.inference import (
    ClassifierPredictor,
    LanguageModelPredictor,
    MaskedLanguageModelPredictor,
    Seq2SeqPredictor,
)
from lightning_tfm.inference.loading import load
from lightning_tfm.inference.onnx_pair import OnnxPair
from lightning_tfm.networks import GPT, AttentionLSTM, EncoderClassifier, LinearTransformer, MaskedEncoder, Transformer
from lightning_tfm.tokenization import (
    UNKNOWN,
    SymbolTokenizer,
    train_tokenizer,
    train_word_tokenizer,
)
from support.corpora import TEXT
from support.experiments import trained_run
from support.networks import randomize, tiny
from support.pages import assert_self_contained, open_page

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

CHARACTERS = SymbolTokenizer([UNKNOWN, *"abcdefg\u0301"])
FEATURES = SymbolTokenizer([UNKNOWN, *"abcde ", "[N]", "[PL]"], feature_separator=";")
SOURCES = SymbolTokenizer([UNKNOWN, *"abcde \t", "[N]", "[PL]"], feature_separator=";", num_sources=2)
SUBWORDS = train_tokenizer([TEXT], "subword", 280)
WORDS = train_word_tokenizer([TEXT], 60, num_ngrams=100)
SENTENCE = TEXT[:18]
PAIRS = ("abcab", "gg", " a\tb\u00e9c ", "aé" * 40, "")


def seq2seq(make, tokenizer=CHARACTERS):
    return Seq2SeqPredictor(make.func(tokenizer.vocab_size, **make.keywords), tokenizer, 9)


def classifier():
    network = tiny(EncoderClassifier, num_classes=3, num_bigram_buckets=50)
    network = network.func(WORDS.vocab_size, **network.keywords)
    network.naive_bayes.scores.random_(-100_000, 100_000)
    return ClassifierPredictor(network, WORDS, ["low", "middle", "high"])


CASES = {
    "Transformer": (lambda: seq2seq(tiny(Transformer)), PAIRS),
    "Transformer pointer_generator": (lambda: seq2seq(tiny(Transformer, pointer_generator=True)), PAIRS),
    "GPT": (lambda: seq2seq(tiny(GPT)), PAIRS),
    "GPT coupled": (lambda: seq2seq(tiny(GPT, positions="coupled")), PAIRS),
    "LinearTransformer": (lambda: seq2seq(tiny(LinearTransformer)), PAIRS),
    "AttentionLSTM": (lambda: seq2seq(tiny(AttentionLSTM)), PAIRS),
    "AttentionLSTM location_aware": (lambda: seq2seq(tiny(AttentionLSTM, attention="location_aware")), PAIRS),
    "AttentionLSTM hard_monotonic": (lambda: seq2seq(tiny(AttentionLSTM, attention="hard_monotonic")), PAIRS),
    "AttentionLSTM features": (
        lambda: seq2seq(tiny(AttentionLSTM), FEATURES),
        ("abc\tN;PL", "abc\tN; SG", "abc N;PL", "abc de", "ab", "ab\tN\tabs"),
    ),
    "AttentionLSTM sources": (
        lambda: seq2seq(tiny(AttentionLSTM), SOURCES),
        ("abc\tde\tN;PL", "abc\tde", "abc\tde N", "abc", "ab\tde\tN\tabs"),
    ),
    "language model": (
        lambda: LanguageModelPredictor(GPT(SUBWORDS.vocab_size, 16, 4, 2, max_length=20, text_only=True), SUBWORDS),
        (SENTENCE, "a", " \n", TEXT[:200], ""),
    ),
    "masked language model": (
        lambda: MaskedLanguageModelPredictor(MaskedEncoder(SUBWORDS.vocab_size, 16, 4, 2, max_length=20), SUBWORDS),
        (f"{SENTENCE} [MASK]er[MASK]", "[MASK]", f" {SENTENCE[:7]} [MASK] ", SENTENCE, "[MASK]" * 30, ""),
    ),
    "classifier": (classifier, (SENTENCE, "Unbekanntes Wort", "a\tb", TEXT[:400], " ")),
}
QUICK = ("Transformer", "language model", "masked language model", "classifier")
"""Cases of `make test`: an export takes ten seconds."""

IN_TEST_ALL = (*QUICK, "AttentionLSTM hard_monotonic", "AttentionLSTM sources")
"""Cases of `make test-all`; the others are in `make test-soak`."""

HALF = ("masked language model", "AttentionLSTM")
"""Cases in half precision."""

SCRIPT = f"""
import {{ readFileSync }} from "node:fs";
import {{ fileBackend }} from {json.dumps((Path(file.__file__).parent / "page/backend_file.js").as_uri())};
const {{ models, questions }} = JSON.parse(readFileSync(0, "utf-8"));
const backend = fileBackend(models);
const results = [];
for (const [question, values] of questions) {{
  results.push(await backend.ask(0, question, values).catch((error) => ({{ error: error.message }})));
}}
process.stdout.write(JSON.stringify(results));
"""


def models_of(page: str) -> list[dict]:
    """Return the models in the text of a page."""
    text = re.search(r"globalThis\.EXPLORER_MODELS = (.*);\n", page)[1]
    return json.loads(text.replace("\\x3C", "<"))


def ask_page(models: list[dict], questions: list) -> list[dict]:
    """Return the answers of the first model of a page in Node.js."""
    arguments = ["node", "--input-type=module", "--eval", SCRIPT]
    text = json.dumps({"models": models, "questions": questions})
    return json.loads(subprocess.run(arguments, input=text, capture_output=True, text=True, check=True).stdout)


def make_explorer(name):
    torch.manual_seed(1)
    predictor = CASES[name][0]()
    randomize(predictor.network)
    predictor.longest_source, predictor.shortest_source = 6, 3
    return Explorer(predictor, name)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            name, marks=[pytest.mark.run] * (name not in QUICK) + [pytest.mark.soak] * (name not in IN_TEST_ALL)
        )
        for name in CASES
    ],
)
def written(request, tmp_path_factory):
    """Return an explorer of each network, with random weights, the texts to ask it, and its page."""
    explorer, path = make_explorer(request.param), tmp_path_factory.mktemp("file") / "page.html"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file, "keeps_outputs_in_half", lambda explorer: request.param in HALF)
        assert write_page([explorer], path) == path.stat().st_size
    if request.param in HALF:
        round_weights(explorer)
    return explorer, CASES[request.param][1], path.read_text(encoding="utf-8")


@torch.no_grad()
def round_weights(explorer):
    for tensor in (*explorer.predictor.parameters(), *explorer.predictor.buffers()):
        if tensor.is_floating_point():
            tensor.copy_(tensor.half())


def assert_equal(actual, expected, place="result"):
    """Assert that two JSON values are equal, numbers nearly."""
    if isinstance(expected, float):
        assert actual == pytest.approx(expected, abs=2e-4), place
    elif isinstance(expected, dict):
        assert actual.keys() == expected.keys(), place
        for name in expected:
            assert_equal(actual[name], expected[name], f"{place}.{name}")
    elif isinstance(expected, list):
        assert len(actual) == len(expected), place
        for number, values in enumerate(zip(actual, expected, strict=True)):
            assert_equal(*values, f"{place}[{number}]")
    else:
        assert actual == expected, place


def test_pages_answer_like_the_network(written):
    explorer, texts, page = written
    (model,) = models_of(page)
    description = model["describe"]
    maps = {each["layer"] for each in description["attention"]}
    heads = [f"{each['name']}.{h}" for each in explorer.describe()["components"] for h in range(each["heads"])
             if each["kind"] == "attention"]  # fmt: skip
    questions = []
    for text in texts:
        questions.append(("answer", {"text": text}))
        questions.append(("answer", {"text": text, "changes": {"off": heads[:3:2]}}))
        if "sample" in description["questions"]:
            questions.append(("answer", {"text": text, "prefix": [5, 3]}))
            numbers = 30, LIMITS["max_tokens"] + 1
            questions += [("sample", {"text": text, "temperature": 0, "max_tokens": number}) for number in numbers]
        if "beam" in description["questions"]:
            sizes = 1, 3, LIMITS["beam_size"] + 1
            questions += [("beam", {"text": text, "beam_size": size}) for size in sizes]
    answers = ask_page([model], questions)
    for (question, values), actual in zip(questions, answers, strict=True):
        try:
            expected = ask(explorer, question, values)
        except UserError as error:
            expected = {"error": str(error)}
        if "attention" in actual and "attention" in expected:
            by_name = {each["layer"]: each for each in expected["attention"] if each["layer"] in maps}
            assert {each["layer"] for each in actual["attention"]} == by_name.keys()
            expected["attention"] = [by_name[each["layer"]] for each in actual["attention"]]
        assert_equal(actual, expected, f"{question} {values}")


def test_descriptions_of_pages(written):
    """A page describes each question as one that it answers, or gives the reason why not."""
    explorer, _, page = written
    (model,) = models_of(page)
    description, full = model["describe"], explorer.describe()
    assert {*description["questions"], *description["excluded"]} == {*QUESTIONS}
    assert {*description["questions"]} <= {"answer", "beam", "sample"} & {*full["questions"]}
    assert description["changes"] == ["off_heads"]
    assert description["components"] == full["components"]
    (refused,) = ask_page([model], [("neighbors", {"text": "a"})])
    assert refused["error"] == "neighbors needs the training data; run lightning-tfm explore"


def test_pages_load_nothing(written):
    """The policy of a page allows its own script and style only, and the script is valid."""
    _, _, page = written
    assert_self_contained(page)
    policy = re.search(r'http-equiv="Content-Security-Policy" content="(.*?)"', page)[1].split("; ")
    assert policy[0] == "default-src 'none'"
    (nonce,) = {part.partition(" ")[2] for part in policy[1:3]}
    for tag in ("script", "style"):
        assert re.findall(rf"<{tag}(.*?)>", page.split("globalThis.EXPLORER_MODELS")[0])[-1].endswith(
            nonce.strip("'")[6:] + '"'
        )
    script = page.partition('<script type="module"')[2].partition(">")[2].rpartition("</script>")[0]
    subprocess.run(["node", "--input-type=module", "--check", "-"], input=script, text=True, check=True)


def test_weights_are_halved_if_outputs_stay_equal():
    explorer = make_explorer("classifier")
    network = explorer.network
    with torch.no_grad():
        network.naive_bayes.scores.zero_()
        network.head.weight.zero_()
        network.head.bias.copy_(torch.tensor([1, 1.5, 2]))
        assert keeps_outputs_in_half(explorer)
        network.head.bias.copy_(torch.tensor([1, 1.0001, 1.0002]))  # equal if rounded
        assert not keeps_outputs_in_half(explorer)
    assert network.head.bias[1] > 1, "the weights of the explorer stay"


def test_large_numbers_are_not_halved():
    from onnx import helper, numpy_helper

    arrays = {"small": np.float32([0.1, -65504]), "large": np.float32([1, 1e38]), "ids": np.int64([3])}
    tensors = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    model = helper.make_model(helper.make_graph([], "graph", [], [], tensors))
    halve(model)
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    assert {name: array.dtype for name, array in stored.items()} == {"small": "f2", "large": "f4", "ids": "i8"}
    assert stored["small"].tolist() == [np.float16(0.1), -65504]


def test_missing_operators_are_named(monkeypatch, tmp_path):
    from onnx import helper

    nodes = [helper.make_node(name, ["x"], ["y"]) for name in ("Relu", "Unheard", "Imagined", "Unheard")]
    model = helper.make_model(helper.make_graph(nodes, "graph", [], []))
    monkeypatch.setattr(file, "convert", lambda predictor: OnnxPair(model, None, {}))
    with pytest.raises(UserError, match="does not support the operators Imagined, Unheard, which Transformer needs"):
        write_page([make_explorer("Transformer")], tmp_path / "page.html")
    assert not [*tmp_path.iterdir()]


def wait_for(browser, expected, address=""):
    """Wait until the page shows some outputs, and its address ends with some text."""
    script = "return [...document.querySelectorAll('.output')].map(each => each.textContent).concat(location.hash)"
    expected, shown = [*(output or "(empty)" for output in expected), address], None
    end = time.monotonic() + 60
    while shown != expected and time.monotonic() < end:
        *outputs, hash = browser.execute_script(script)
        shown = [*outputs, hash[-len(address) :] if address else ""]
        time.sleep(0.05)
    assert shown == expected


def click(browser, selector, name):
    """Click on the first element whose text or label begins with a name."""
    for element in browser.find_elements("css selector", selector):
        if (element.get_attribute("aria-label") or element.text).startswith(name):
            return browser.execute_script("arguments[0].click()", element)
    raise AssertionError(name)


@pytest.mark.browser
def test_page_in_browser(tmp_path, browser):
    """A page that is opened from the disk answers, and its changes show, without a request or a message."""
    explorers = [make_explorer(name) for name in ("Transformer", "AttentionLSTM")]
    first, second = explorers
    write_page(explorers, tmp_path / "page.html")
    browser.get((tmp_path / "page.html").as_uri() + "#text=abcab")
    wait_for(browser, [explorer.answer("abcab")["output"] for explorer in explorers])

    browser.find_element("css selector", "input[type=text]").send_keys("g")
    answer = first.answer("abcabg")
    wait_for(browser, [answer["output"], second.answer("abcabg")["output"]], "text=abcabg")

    other = next(each for each in answer["steps"][0]["alternatives"][1:] if each["symbol"] in "abcdefg")
    click(browser, "button.choice", f"Force {other['symbol']},")
    wait_for(
        browser, [each.answer("abcabg", prefix=[other["id"]])["output"] for each in explorers], f"prefix={other['id']}"
    )

    off = "encoder.0.self_attention.0"
    click(browser, "[role=tab]", "Heads")
    click(browser, "button.toggle", off)
    changed = first.answer("abcabg", prefix=[other["id"]], changes=Changes(off=[off]))
    wait_for(browser, [changed["output"], second.answer("abcabg", prefix=[other["id"]])["output"]])

    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert browser.get_log("browser") == []


@pytest.mark.browser
def test_live_report_in_browser(tmp_path, tmp_path_factory, browser):
    run = trained_run("spelling_gpt", tmp_path_factory)
    assert report([str(run), "--live", "--output", str(tmp_path / "report.html")]) == 0
    open_page(browser, tmp_path / "report.html")
    frame = browser.find_element("css selector", "iframe[title]")
    browser.execute_script("arguments[0].scrollIntoView()", frame)
    browser.switch_to.frame(frame)
    explorer = Explorer(load(run / "checkpoints/best.ckpt"), path=run / "checkpoints/best.ckpt")
    wait_for(browser, [explorer.answer(explorer.describe()["example"])["output"]])
    assert browser.get_log("browser") == []


def test_live_report_needs_a_checkpoint(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text("seed_everything: 1\n")
    with pytest.raises(UserError, match="--live needs a run with a checkpoint"):
        report([str(tmp_path / "run"), "--live", "--output", str(tmp_path / "report.html")])
