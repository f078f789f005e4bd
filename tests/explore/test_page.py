"""The page of the explorer in browsers: it shows what the explorers answer, to each interaction."""

from __future__ import annotations

import random
import re
import shutil
import threading
from ast import literal_eval
from functools import partial, wraps
from io import BytesIO
from itertools import takewhile
from math import exp, log2
from xml.etree import ElementTree

import pytest
import torch
from axe_core_python.selenium import Axe
from PIL import Image
from selenium.webdriver import ActionChains, Keys

from lightning_tfm.commands.inspect import inspect
from lightning_tfm.errors import UserError
from lightning_tfm.explore import Changes, Drawn, Explorer, Patched
from lightning_tfm.explore.file import EXCLUDED, write_page
from lightning_tfm.explore.server import Server
from lightning_tfm.fit.cli import data_of_checkpoint
from lightning_tfm.inference import ClassifierPredictor, Seq2SeqPredictor
from lightning_tfm.inference.loading import load
from lightning_tfm.networks import EncoderClassifier, Transformer
from lightning_tfm.tokenization import SymbolTokenizer, train_word_tokenizer
from support.browser import chromium, firefox, origin, requests
from support.experiments import folder, trained_run
from support.explorer_page import SELECT_ALL, Page, assert_answer, assert_changes, cell, number, percent, visible
from support.marks import soak_except
from support.networks import randomize

pytestmark = pytest.mark.browser

NETWORK = "model.init_args.network.init_args."
COPYING = {
    "data.init_args.max_length": 5,
    "data.init_args.train_size": 3000,
    "model.init_args.optimizer.init_args.lr": 0.01,
    "trainer.max_steps": 300,
    "trainer.val_check_interval": 300,
    "checkpoint.every_n_train_steps": 300,
    f"{NETWORK}d_model": 32,
    f"{NETWORK}dropout": 0.0,
}
"""Settings with which the Transformer copies short sequences."""

SITES = {
    "transformer": ["transformer"],
    "gpt": ["gpt"],
    "two": ["transformer", "gpt"],
    "language_model": ["text_gpt"],
    "masked": ["masked_encoder"],
    "classifier": ["reviews_classifier"],
}
"""Names of the models of each page."""

TEXT, OTHER = "3 1 2 0 4", "3 1 5 0 4"
SOURCE_LAYER = "decoder.0.cross_attention"


@pytest.fixture(scope="module")
def make_explorer(reference, tmp_path_factory):
    """Return a function that loads a trained model, the first of which has results of `inspect`."""
    paths = {}
    for name in ("transformer", "gpt"):
        layers = {f"{NETWORK}num_layers": 2} if name == "transformer" else {}
        run = tmp_path_factory.mktemp("inspected") / "version_0"
        shutil.copytree(folder(reference(name, **COPYING | layers), name), run)
        paths[name] = run / "checkpoints/best.ckpt"
    for name in ("text_gpt", "masked_encoder", "reviews_classifier"):
        paths[name] = trained_run(name, tmp_path_factory) / "checkpoints/best.ckpt"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_tfm.commands.inspect.draw", lambda *_: None)
        assert inspect([str(paths["transformer"]), "--examples", "8"]) == 0
    data = {name: data_of_checkpoint(str(path), []) for name, path in paths.items()}
    return lambda name: Explorer(load(paths[name]), name, partial(data.get, name), paths[name])


@pytest.fixture(scope="module")
def explorers(make_explorer):
    """Return explorers with the expected answers: those of the servers are used by other threads."""
    return {name: make_explorer(name) for name in {name for names in SITES.values() for name in names}}


@pytest.fixture(scope="module")
def serve():
    """Return a function that serves some explorers, and returns their server."""
    running = []

    def serve(*explorers):
        server = Server(explorers)
        thread = threading.Thread(target=server.run)
        thread.start()
        running.append((server, thread))
        return server

    yield serve
    for server, thread in running:
        server.close()
        thread.join(60)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def sites(make_explorer, explorers, serve):
    """Return the address and the explorers of each page."""
    return {
        site: (serve(*map(make_explorer, names)).address, [explorers[name] for name in names])
        for site, names in SITES.items()
    }


@pytest.fixture(scope="module")
def driver():
    with chromium(["browser", "performance"]) as driver:
        yield driver


@pytest.fixture
def open_address(driver):
    """Return a function that opens an address in a new tab; the page must not use the network."""
    start = driver.current_window_handle
    pages = []

    def open_address(address, explorers, **state):
        driver.switch_to.new_window("tab")
        driver.execute_cdp_cmd("Emulation.setFocusEmulationEnabled", {"enabled": True})
        pages.append(Page(driver, address, explorers))
        pages[-1].open(**state)
        return pages[-1]

    yield open_address
    for handle in driver.window_handles:
        if handle != start:
            driver.switch_to.window(handle)
            driver.close()
    driver.switch_to.window(start)
    assert requests(driver) <= {origin(page.address) for page in pages}
    logged = [line["message"] for line in driver.get_log("browser") if line["level"] in ("SEVERE", "WARNING")]
    assert [line for line in logged if not any(expected in line for expected in EXPECTED)] == []


EXPECTED = [
    f"/ask - Failed to load resource: {reason}"
    for reason in ("the server responded with a status of 400", "net::ERR_CONNECTION_REFUSED")
]
"""Messages that Chromium logs for a question with a mistake, and after the end of the server."""


@pytest.fixture
def open_page(open_address, sites):
    """Return a function that opens the page of a site in a new tab."""
    return lambda site, **state: open_address(*sites[site], **state)


def ids(steps):
    return [step["id"] for step in steps]


def test_a_typed_text_is_answered(open_page):
    page = open_page("transformer")
    (explorer,) = page.explorers
    example = explorer.describe()["example"]
    assert page.run("return document.querySelector('[data-key=text]').value") == example
    assert_answer(page, explorer.answer(example))
    page.type("text", TEXT)
    answer = explorer.answer(TEXT)
    assert_answer(page, answer)
    assert number(answer["log_probability"]) in page.text(".facts .muted")
    for step in range(len(answer["steps"])):
        page.click(f"[data-key='step 0 {step}']")
        pressed = [str(other == step).lower() for other in range(len(answer["steps"]))]
        assert page.labels(".chip", "aria-pressed") == pressed
        assert len(page.texts(".choice")) == 5
        assert_answer(page, answer)
    page.click(".question button")
    assert_answer(page, explorer.answer(example))


def test_a_symbol_is_forced(open_page):
    page = open_page("transformer", text=TEXT)
    (explorer,) = page.explorers
    first = explorer.answer(TEXT)
    page.click("[data-key='step 0 1']")
    prefix = [first["steps"][0]["id"], first["steps"][1]["alternatives"][2]["id"]]
    page.click(f"[data-key='choice 0 {prefix[1]}']")
    forced = explorer.answer(TEXT, prefix)
    rest, others = ([step["probability"] for step in answer["steps"][2:]] for answer in (forced, first))
    assert rest != pytest.approx(others, abs=0.005)
    assert_answer(page, forced)
    page.click("[data-key='step 0 3']")
    prefix = [*ids(forced["steps"])[:3], forced["steps"][3]["alternatives"][1]["id"]]
    page.click(f"[data-key='choice 0 {prefix[3]}']")
    assert_answer(page, explorer.answer(TEXT, prefix))
    assert page.state["prefix"] == ",".join(map(str, prefix))
    assert page.texts(".changes button") == ["4 steps forced ×", "Reset all"]
    assert_restored(page, open_page, "transformer")
    page.click("[data-key=reset]")
    assert_answer(page, first)
    assert page.texts(".changes") == []


def test_changes_of_the_network_stay_with_a_new_text(open_page):
    """Check that changes of another text are cleared, and that switched-off parts are kept."""
    part = "encoder.1.feed_forward"
    changes = {"prefix": "3,7", "off": part, "drawn": f"{SOURCE_LAYER}:1:4", "against": OTHER, "patched": "encoder.0:2"}
    page = open_page("transformer", text=TEXT, view="parts", step=3, **changes)
    (explorer,) = page.explorers
    page.type("text", "5 5 1")
    assert page.state == {"text": "5 5 1", "view": "parts", "off": part, "against": OTHER}
    assert_answer(page, explorer.answer("5 5 1", changes=Changes(off=[part])))


def head_weights(attention, head):
    weights = torch.tensor(attention["weights"])
    return weights.mean(0) if head == "mean" else weights[head]


def drawn_weights(page, selector, shape, shades):
    """Return the weights (T, S) that the colors of the cells of a map show."""
    script = """
    const drawing = document.querySelector(arguments[0]);
    const box = drawing.querySelector(".frame") ?? drawing;
    const [left, top, width] = box === drawing ? [0, 0, drawing.viewBox.baseVal.width]
      : ["x", "y", "width"].map((name) => Number(box.getAttribute(name)));
    const paths = [...drawing.querySelectorAll(":scope > path[fill-opacity]")];
    return [left, top, width, paths.map((path) => [path.getAttribute("fill-opacity"), path.getAttribute("d")])];
    """
    left, top, width, paths = page.run(script, selector)
    size, weights = width / shape[1], torch.zeros(shape)
    for opacity, path in paths:
        for x, y in re.findall(r"M([\d.]+) ([\d.]+)", path):
            weights[round((float(y) - top) / size), round((float(x) - left) / size)] = float(opacity)
    return weights


def test_attention_by_layer_and_head(open_page):
    page = open_page("transformer", text=TEXT)
    (explorer,) = page.explorers
    answer = explorer.answer(TEXT)
    draw = random.Random(0)
    assert page.run("return document.querySelector(\"[data-key='layer 0']\").value") == SOURCE_LAYER
    for attention in answer["attention"]:
        layer, queries, keys = attention["layer"], attention["queries"], attention["keys"]
        page.select("[data-key='layer 0']", layer)
        T, S = len(queries), len(keys)
        for head in ("mean", 0, 1):
            page.click(f"[data-key='head 0 {head}']")
            weights = head_weights(attention, head)
            torch.testing.assert_close(drawn_weights(page, ".map", (T, S), 50), weights, rtol=0, atol=0.5 / 50 + 1e-3)
            small = drawn_weights(page, f"[data-key='head 0 {head}'] svg", (T, S), 8)
            torch.testing.assert_close(small, weights, rtol=0, atol=0.5 / 8 + 6e-3)
            lines = sorted(float(opacity) for opacity in page.labels(".lines .line", "stroke-opacity"))
            assert (weights > 0.0101).sum() <= len(lines) <= (weights > 0.0099).sum()
            assert lines == pytest.approx(sorted(weights.flatten().tolist())[-len(lines) :], abs=0.006)
            for row, column in [(draw.randrange(T), draw.randrange(S)) for _ in range(2)]:
                page.point(".map .frame", *cell(row, column, T, S))
                shown = f"{queries[row]} ← {keys[column]}: {number(weights[row, column].item())}"
                assert page.texts(".attention .live")[1] == f"{shown} (row {row + 1}, column {column + 1})"


def test_attention_by_keyboard(open_page):
    page = open_page("transformer", text=TEXT, layer="encoder.1.self_attention", head=1, step=2)
    (explorer,) = page.explorers
    attention = next(one for one in explorer.answer(TEXT)["attention"] if one["layer"] == "encoder.1.self_attention")
    weights, symbols = attention["weights"][1], attention["keys"]
    page.focus(".map")
    for column, symbol in enumerate(symbols):
        assert page.texts(".attention .live")[1].startswith(f"{symbols[0]} ← {symbol}: {number(weights[0][column])} (")
        page.keys(Keys.ARROW_RIGHT)
    page.keys(Keys.ARROW_DOWN, Keys.HOME)
    assert page.texts(".attention .live")[1].startswith(f"{symbols[1]} ← {symbols[0]}: {number(weights[1][0])} (")
    page.focus(".lines")
    page.keys(Keys.HOME)
    assert page.texts(".attention .live")[0] == f"{symbols[0]} attends to {largest(weights[0], symbols)}"
    page.keys(Keys.ARROW_RIGHT, Keys.ARROW_UP)
    column = [row[1] for row in weights]
    assert page.texts(".attention .live")[0] == f"{symbols[1]} is attended to by {largest(column, symbols)}"


def largest(weights, symbols):
    """Return the five largest weights, as the page shows them."""
    ordered = sorted(zip(weights, symbols, strict=True), key=lambda pair: -pair[0])
    return ", ".join(f"{symbol} {number(weight)}" for weight, symbol in ordered[:5] if weight >= 0.01)


def test_scores_of_heads(open_page):
    page = open_page("transformer", text=TEXT)
    (explorer,) = page.explorers
    records = {record["name"]: record for record in explorer.describe()["heads"]}
    increases = [increase(records[f"{SOURCE_LAYER}.{head}"]) for head in (0, 1)]
    assert page.texts(".facts-of-head td.number") == increases
    for head in (0, 1):
        page.click(f"[data-key='head 0 {head}']")
        record = records[f"{SOURCE_LAYER}.{head}"]
        assert page.texts(".facts-of-head dt") == [name.replace("_", " ") for name in record["scores"]]
        assert page.texts(".facts-of-head dd") == [number(score) for score in record["scores"].values()]
        assert record["role"] in page.text(".facts-of-head h4")
        assert f"{number(abs(record['loss_increase']))} nats" in page.text(".facts-of-head p")


def increase(record):
    value = record["loss_increase"]
    return ("+" if value >= 0.005 else "") + number(value)


@pytest.mark.parametrize("site", ["transformer", "gpt"])
def test_weights_are_drawn(site, open_page):
    page = open_page(site, text=TEXT)
    (explorer,) = page.explorers
    first = explorer.answer(TEXT)
    attention = next((one for one in first["attention"] if one["side"] == "source"), first["attention"][0])
    T, S, layer = len(attention["queries"]), len(attention["keys"]), attention["layer"]
    row = attention["first_step"] + 1
    page.click("[data-key='draw 0']")
    drawn = []

    def assert_drawn(*cells):
        drawn[:] = cells
        assert_answer(page, explorer.answer(TEXT, changes=Changes(drawn=drawn)))
        assert page.state.get("drawn", "") == ",".join(f"{layer}:{one.query}:{one.key}" for one in drawn)

    page.point(".map .frame", *cell(row, 3, T, S), click=True)
    assert_drawn(Drawn(layer, row, 3))
    assert page.texts(".attention .live")[1].endswith(f": 1.00 (row {row + 1}, column 4, drawn)")
    page.keys(Keys.ARROW_DOWN, Keys.ARROW_LEFT, Keys.ENTER)
    assert_drawn(Drawn(layer, row, 3), Drawn(layer, row + 1, 2))
    page.keys(Keys.ARROW_LEFT, Keys.SPACE)
    assert_drawn(Drawn(layer, row, 3), Drawn(layer, row + 1, 1))
    assert page.labels(".changes button")[0] == (
        f"Undo: {layer}: row {row + 1} “{attention['queries'][row]}” reads column 4 “{attention['keys'][3]}”"
    )
    page.keys(Keys.ENTER)
    assert_drawn(Drawn(layer, row, 3))
    page.click(".changes button")
    assert_drawn()
    page.click("[data-key='head 0 1']")
    page.point(".map .frame", *cell(row, 1, T, S), click=True)
    assert page.state["drawn"] == f"{layer}:{row}:1:1"
    page.click("[data-key='draw 0']")
    assert_restored(page, open_page, site)
    page.click("[data-key='draw 0']")
    assert_answer(page, explorer.answer(TEXT, changes=Changes(drawn=[Drawn(layer, row, 1, 1)])))
    page.point(".map .frame", *cell(row, 1, T, S), click=True)
    assert_answer(page, first)


def test_weights_are_drawn_in_each_layer(open_page):
    page = open_page("transformer", text=TEXT)
    (explorer,) = page.explorers
    page.click("[data-key='draw 0']")
    for attention in explorer.answer(TEXT)["attention"]:
        page.select("[data-key='layer 0']", attention["layer"])
        T, S = len(attention["queries"]), len(attention["keys"])
        page.point(".map .frame", *cell(2, 0, T, S), click=True)
        assert_answer(page, explorer.answer(TEXT, changes=Changes(drawn=[Drawn(attention["layer"], 2, 0)])))
        page.click("[data-key=reset]")


@pytest.mark.parametrize("site", ["transformer", "gpt"])
def test_parts_are_switched_off_and_on(site, open_page):
    page = open_page(site, text=TEXT, view="parts")
    (explorer,) = page.explorers
    description, first = explorer.describe(), explorer.answer(TEXT)
    records = {record["name"]: record for record in description["heads"] + description["parts"]}
    assert bool(records) == (site == "transformer")  # which has been inspected
    switchable = [component for component in description["components"] if component["switchable"]]
    parts = [component["name"] for component in switchable]
    attention = [component for component in switchable if component["kind"] == "attention"]
    parts += [f"{component['name']}.{head}" for component in attention for head in range(component["heads"])]
    buttons = page.labels(".toggle", "title")
    assert sorted(buttons) == sorted(parts)
    shown = dict(zip(buttons, page.texts(".toggle"), strict=True))
    for part, record in records.items():
        assert shown[part].endswith(increase(record))
    outputs = set()
    for part in buttons:
        page.click(f".toggle[title='{part}']")
        answer = explorer.answer(TEXT, changes=Changes(off=[part]))
        outputs.add(answer["log_probability"])
        assert_answer(page, answer)
        assert page.labels(f".toggle[title='{part}']", "aria-pressed") == ["false"]
        assert page.texts(".changes button") == [f"{part} off ×", "Reset all"]
        page.click(f".toggle[title='{part}']")
    assert len(outputs) > len(parts) / 2
    assert_answer(page, first)
    for number_off, part in enumerate(parts[:4], start=1):
        page.click(f".toggle[title='{part}']")
        assert_answer(page, explorer.answer(TEXT, changes=Changes(off=parts[:number_off])))
    page.click(".changes button:nth-of-type(2)")
    assert_answer(page, explorer.answer(TEXT, changes=Changes(off=[parts[0], *parts[2:4]])))
    assert_restored(page, open_page, site)
    page.click("[data-key=reset]")
    assert_answer(page, first)


def test_heads_are_switched_off_beside_their_attention(open_page):
    page = open_page("transformer", text=TEXT)
    (explorer,) = page.explorers
    page.click("[data-key='head 0 0']")
    page.click("[data-key='switch 0']")
    assert_answer(page, explorer.answer(TEXT, changes=Changes(off=[f"{SOURCE_LAYER}.0"])))
    assert page.labels("[data-key^='head 0']") == ["Mean of the heads", "Head 0, off", "Head 1"]
    page.click("[data-key='switch 0']")
    assert_answer(page, explorer.answer(TEXT))


def tokens_to(nodes, node):
    """Return the tokens from the root of a beam to a node."""
    return [] if node["parent"] is None else [*tokens_to(nodes, nodes[node["parent"]]), node["token"]]


@pytest.mark.parametrize("site", ["transformer", "gpt"])
def test_beam(site, open_page):
    page = open_page(site, text=TEXT, view="beam")
    (explorer,) = page.explorers

    def assert_beam(**settings):
        result = explorer.beam(TEXT, **settings)
        rows = [
            [
                str(place),
                output["text"] or "(empty)",
                number(output["score"], 3),
                number(output["log_probability"]),
                percent(exp(output["log_probability"])),
            ]
            for place, output in enumerate(result["outputs"], start=1)
        ]
        assert page.texts("[data-panel=beam] tbody :is(th, td)") == [text for row in rows for text in row]
        drawn = page.labels(".beam .node[data-node]", "data-node")
        assert sorted(map(int, drawn)) == [node["id"] for node in result["nodes"][1:]]
        for status in ("open", "finished", "pruned"):
            shown = page.labels(f".beam .node[data-node].{status}", "data-node")
            assert sorted(map(int, shown)) == [node["id"] for node in result["nodes"][1:] if node["status"] == status]
        edges = [edge for edge in page.labels(".beam .edge", "d") if "C" in edge]
        assert len(edges) == len(result["nodes"]) - 1
        return result

    assert_beam()
    page.type("beamSize", "3")
    result = assert_beam(beam_size=3)
    nodes = result["nodes"]
    node = next(node for node in nodes if node["step"] == 2 and node["status"] == "pruned")
    page.point(f".beam [data-node='{node['id']}']", click=True)
    tokens = tokens_to(nodes, node)
    assert page.state["prefix"] == ",".join(map(str, tokens))
    assert number(node["log_probability"]) in page.text("[data-panel=beam] .live")
    assert_answer(page, explorer.answer(TEXT, tokens))
    assert_beam(beam_size=3)
    page.click("[data-key='output 0 1']")
    tokens = tokens_to(nodes, nodes[result["outputs"][1]["node"]])
    assert_answer(page, explorer.answer(TEXT, tokens))
    assert page.labels("[data-key^='output 0']", "aria-pressed") == ["false", "true", "false"]
    page.click("[data-key='output 0 1']")
    assert_answer(page, explorer.answer(TEXT))
    page.focus(".beam")
    page.keys(Keys.HOME, Keys.ARROW_RIGHT, Keys.ARROW_DOWN, Keys.ENTER)
    second = next(node for node in nodes if (node["step"], node["rank"]) == (1, 1))
    assert_answer(page, explorer.answer(TEXT, [second["token"]]))
    assert_restored(page, open_page, site)
    page.open(text=TEXT, view="beam", off="decoder.0.feed_forward")
    assert_beam(changes=Changes(off=["decoder.0.feed_forward"]) if site == "transformer" else Changes())


@pytest.mark.parametrize("site", ["transformer", "gpt"])
def test_second_text(site, open_page):
    page = open_page(site, text=TEXT, view="compare")
    (explorer,) = page.explorers
    page.type("against", OTHER)
    first, second = explorer.answer(TEXT), explorer.answer(OTHER)

    def symbols(answer):
        return [step["symbol"] for step in answer["steps"]]

    def equal(ours, theirs):
        """Return the number of equal first symbols."""
        return len([*takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False))])

    def marked(ours, theirs):
        """Return the symbols that differ; of sequences of different lengths, those between the equal ends."""
        if len(ours) == len(theirs):
            return [symbol for symbol, other in zip(ours, theirs, strict=True) if symbol != other]
        begin = equal(ours, theirs)
        end = equal(ours[begin:][::-1], theirs[begin:][::-1])
        return ours[begin : len(ours) - end]

    rows = [first["source"], symbols(first), second["source"], symbols(second)]
    assert ["".join(row) for row in rows] == page.texts(".compared .marked")
    expected = marked(second["source"], first["source"]) + marked(symbols(second), symbols(first))
    assert page.texts(".compared mark") == expected
    assert expected
    result = explorer.patch(TEXT, OTHER)
    draw = random.Random(0)
    for side in ("input", "decoder"):
        layers = [layer for layer in result["layers"] if layer["side"] == side]
        assert bool(layers) == (side == "input" or site == "transformer")
        if not layers:
            assert page.texts(f"[data-key='patch 0 {side}']") == []
            continue
        for _ in range(4):
            row, column = draw.randrange(len(layers)), draw.randrange(len(layers[0]["effects"]))
            place = cell(row, column, len(layers), len(layers[0]["effects"]))
            page.point(f"[data-key='patch 0 {side}'] .frame", *place)
            shown = [text for text in page.texts("[data-panel=compare] .live") if "restored" in text]
            assert len(shown) == 1
            assert shown[0].startswith(f"{layers[row]['layer']} at {column + 1}, ")
            assert shown[0].endswith(f": {number(100 * layers[row]['effects'][column], 1)}% restored")
    layers = [layer for layer in result["layers"] if layer["side"] == "input"]
    place = cell(0, 2, len(layers), len(layers[0]["effects"]))
    page.point("[data-key='patch 0 input'] .frame", *place, click=True)
    patched = Patched(layers[0]["layer"], 2)
    answer = explorer.answer(TEXT, changes=Changes(patched=[patched]), against=OTHER)
    assert_answer(page, answer)
    assert page.state["patched"] == f"{patched.layer}:2"
    assert page.texts(".compared .marked")[-1] == "".join(symbols(answer))
    page.keys(Keys.ARROW_RIGHT, Keys.ENTER)
    both = [patched, Patched(patched.layer, 3)]
    assert_answer(page, explorer.answer(TEXT, changes=Changes(patched=both), against=OTHER))
    assert_restored(page, open_page, site)
    page.click(f"[data-key='patched 0 {patched.layer} 2']")
    assert_answer(page, explorer.answer(TEXT, changes=Changes(patched=both[1:]), against=OTHER))
    page.click("[data-key='unpatch 0']")
    assert_answer(page, first)


def test_second_text_of_another_length(open_page):
    page = open_page("transformer", text=TEXT, view="compare", against="3 1")
    (explorer,) = page.explorers
    with pytest.raises(UserError) as error:
        explorer.patch(TEXT, "3 1")
    assert page.texts("[data-panel=compare] .error") == [str(error.value)]
    assert page.texts(".compared .marked")[2] == "31EOS"
    page.type("against", "3 x")
    with pytest.raises(UserError) as error:
        explorer.answer("3 x")
    assert page.texts("[data-panel=compare] .error") == [str(error.value)]
    page.find("[data-panel=compare] form button").click()
    page.settle()
    assert page.state["against"] == TEXT
    assert page.texts("[data-panel=compare] .error") == []


@pytest.mark.parametrize("site", ["transformer", "gpt"])
def test_contributions_by_occlusion(site, open_page):
    page = open_page(site, text=TEXT, view="contributions")
    (explorer,) = page.explorers
    result = explorer.attributions(TEXT)
    values, inputs, targets = result["values"], result["inputs"], result["targets"]
    assert page.texts(".value small") == [signed(value) for value in values[0]]
    assert page.texts(".value .symbol") == inputs
    for row, column in [(0, 0), (2, 3), (len(targets) - 1, len(inputs) - 1)]:
        place = cell(row, column, len(targets), len(inputs))
        page.point("[data-key='contributions 0'] .frame", *place)
        shown = f"{targets[row]} ← {inputs[column]} {signed(values[row][column])} nats"
        assert page.text("[data-panel=contributions] .live") == shown
        assert page.texts(".value small") == [signed(value) for value in values[row]]
    page.point("[data-key='contributions 0'] .frame", *cell(2, 0, len(targets), len(inputs)), click=True)
    assert page.state["step"] == "2"
    assert_answer(page, explorer.answer(TEXT))
    page.click("[data-key='step 0 1']")
    assert page.texts(".value small") == [signed(value) for value in values[1]]


@pytest.mark.parametrize("site", ["transformer", "gpt"])
def test_contributions_by_integrated_gradients(site, open_page):
    """They are computed for the selected step."""
    page = open_page(site, text=TEXT, view="contributions", step=1)
    (explorer,) = page.explorers
    page.select("[data-key=method]", "integrated_gradients")
    for step in (1, 3):
        page.click(f"[data-key='step 0 {step}']")
        result = explorer.attributions(TEXT, method="integrated_gradients", step=step)
        probability = explorer.answer(TEXT)["steps"][step]["probability"]
        title = f"Contributions to step {step + 1}, {result['targets'][0]} In nats, for a probability of "
        assert page.text("[data-panel=contributions] figcaption") == f"{title}{percent(probability)}."
        page.focus("[data-key='contributions 0']")
        page.keys(Keys.HOME)
        for symbol, value in zip(result["inputs"], result["values"][0], strict=True):
            assert page.text("[data-panel=contributions] .live") == f"{symbol} {signed(value)} nats"
            page.keys(Keys.ARROW_RIGHT)


def signed(value):
    return ("+" if value >= 0.005 else "") + number(value)


@pytest.mark.parametrize("site", ["transformer", "gpt", "language_model", "classifier"])
def test_nearest_examples(site, open_page):
    texts = {"transformer": {"text": TEXT}, "gpt": {"text": TEXT}}
    page = open_page(site, view="neighbors", **texts.get(site, {}))
    (explorer,) = page.explorers
    text = page.state["text"]

    def assert_nearest(**settings):
        examples = explorer.neighbors(text, **settings)["examples"]
        cells = page.texts("[data-panel=neighbors] .examples tbody td:nth-child(2)")
        assert len(cells) == len(examples) == 10
        similarities = [text for text in page.texts(".examples .with-bar") if text != "Similarity"]
        assert similarities == [number(example["similarity"], 3) for example in examples]
        for shown, example in zip(cells, examples, strict=True):
            assert shown.replace("␣", " ").replace("↵", "\n").replace("EOS", "") == example["source"]
        return examples

    examples = assert_nearest()
    if site != "classifier":
        page.select("[data-key=by]", "decoder")
        assert_nearest(by="decoder")
        page.click("[data-key='neighbor step 2']")
        nearest = assert_nearest(by="decoder", step=2)
        texts = [(example["target"] or example["source"], example["mark"]) for example in nearest]
        marked = [text[slice(*mark)] for text, mark in texts if mark is not None]
        assert marked
        assert page.texts(".examples mark") == [visible(symbol) or "EOS" for symbol in marked]
        page.select("[data-key=by]", "source")
    page.click(".worst button")
    worst = explorer.worst()
    assert f"{worst['nll']:.3g}" in page.texts(".worst dd")[-1]
    assert page.texts(".worst dd")[0] == worst["source"]
    page.click("[data-key='use worst 0']")
    assert page.state["text"] == worst["source"]
    page.open(view="neighbors", text=text)
    page.click("[data-key='use 0 3']")
    assert page.state["text"] == examples[3]["source"]


def test_language_model(open_page):
    page = open_page("language_model")
    (explorer,) = page.explorers
    text = "der Hund"
    page.type("text", text)
    answer = explorer.answer(text)
    assert_answer(page, answer)
    given = [step for step in answer["steps"] if step["given"]]
    assert page.labels(".answers button.given") == [
        f"{visible(step['symbol'])}: {number(-log2(step['probability']), 1)} bits, {percent(step['probability'])}"
        for step in given
    ]
    bits = sum(-log2(step["probability"]) for step in given) / len(given)
    assert f"text: {number(bits)} bits per symbol" in page.text(".facts")
    page.click("[data-key='step 0 9']")
    id = answer["steps"][9]["alternatives"][1]["id"]
    page.click(f"[data-key='choice 0 {id}']")
    assert_answer(page, explorer.answer(text, [*ids(answer["steps"])[7:9], id]))
    page.click("[data-key='step 0 2']")
    assert page.texts("button.choice") == []


@pytest.mark.parametrize("site", ["language_model", "transformer"])
def test_samples(site, open_page):
    page = open_page(site, view="samples")
    (explorer,) = page.explorers
    text = page.state["text"]
    answer = explorer.answer(text)
    start = answer["source"][:1] if site == "language_model" else []

    def assert_sample(**settings):
        sample = explorer.sample(text, **settings)
        symbols = start + [step["symbol"] for step in sample["steps"]]
        shown = page.texts("[data-key='sample 0'] .letter")
        assert [symbol.replace("␣", " ").replace("↵", "\n") for symbol in shown] == symbols
        sampled = [step["surprise"] for step in sample["steps"]][sample["given"] :]
        assert f"{number(sum(sampled) / len(sampled))} bits per" in page.text("[data-panel=samples] p strong")
        return sample

    samples = [assert_sample()]
    page.click("[data-panel=samples] .primary")
    samples.append(assert_sample(seed=1))
    assert samples[0]["text"] != samples[1]["text"] or site == "transformer"
    page.type("topK", "2")
    assert_sample(seed=1, top_k=2)
    page.type("maxTokens", "5")
    assert_sample(seed=1, top_k=2, max_tokens=5)
    page.type("temperature", "2.5")
    sample = assert_sample(seed=1, top_k=2, max_tokens=5, temperature=2.5)
    assert_restored(page, open_page, site)
    page.focus("[data-key='sample 0']")
    step = sample["steps"][sample["given"]]
    expected = f"{visible(step['symbol'])} {number(step['surprise'])} bits, {percent(step['probability'])}"
    assert page.text("[data-panel=samples] .live") == expected
    page.open(text=text, view="samples", topP=0.5, seed=3)
    assert_sample(top_p=0.5, seed=3)
    page.focus("input[type=range]")
    page.keys(Keys.ARROW_LEFT)
    page.wait(lambda: page.state.get("temperature") == "0.95")
    page.settle()
    assert_sample(top_p=0.5, seed=3, temperature=0.95)


def test_classifier(open_page):
    page = open_page("classifier")
    (explorer,) = page.explorers
    page.type("text", "the plot the Awful film")
    answer = explorer.answer("the plot the Awful film")
    assert page.texts(".labels > div") == [
        f"{one['symbol']}{percent(one['probability'])}" for one in answer["steps"][0]["alternatives"]
    ]
    assert page.text(".output") == answer["output"] == "neg"
    page.click("[data-key='tab contributions']")
    values = explorer.attributions("the plot the Awful film")["values"][0]
    page.focus("[data-key='contributions 0']")
    page.keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert page.text("[data-panel=contributions] .live") == f"awful {signed(values[3])} nats"
    assert {*explorer.excluded} == {"beam", "sample"}
    for view, line in explorer.excluded.items():
        page.click(f"[data-key='tab {'samples' if view == 'sample' else view}']")
        assert page.texts("[role=tabpanel]:not([hidden]) .note") == [f"This question {line}."]


def test_masked_language_model(open_page):
    page = open_page("masked")
    (explorer,) = page.explorers
    text = "der [MASK]ann [MASK]rot"
    page.type("text", text)
    answer = explorer.answer(text)
    assert_answer(page, answer)
    page.click("[data-key='step 0 1']")
    assert_answer(page, answer)
    assert page.texts(".answers .given") == [visible(symbol) for symbol in answer["source"] if symbol != "[MASK]"]
    page.type("text", "der Mann")
    with pytest.raises(UserError) as error:
        explorer.answer("der Mann")
    assert page.texts(".answers .error") == [str(error.value)]


def test_two_models_side_by_side(open_page):
    page = open_page("two", text=TEXT)
    answers = [explorer.answer(TEXT) for explorer in page.explorers]

    def assert_columns(*models, **settings):
        assert page.texts(".answers h3") == [page.explorers[model].name for model in models]
        for column, model in enumerate(models, start=1):
            assert_answer(page, page.explorers[model].answer(TEXT, **settings), column)

    assert_columns(0, 1)
    assert answers[0]["output"] != answers[1]["output"]
    checked = page.run("return [...document.querySelectorAll('.models input')].map((box) => box.checked)")
    assert checked == [True, True]
    for view in ("attention", "parts", "beam", "contributions", "samples"):
        page.click(f"[data-key='tab {view}']")
        assert page.texts(f"[data-panel={view}] .column > h3") == ["transformer", "gpt"]
        assert page.texts(".error") == []
    page.click(".models label:nth-of-type(1)")
    assert page.state["model"] == "1"
    assert_columns(1)
    page.click(".models label:nth-of-type(1)")
    assert_columns(0, 1)
    page.click("[data-key='tab parts']")
    page.click(".toggle[title='layers.0.self_attention.1']")
    part = "layers.0.self_attention.1"
    assert_answer(page, page.explorers[0].answer(TEXT), 1)
    assert_answer(page, page.explorers[1].answer(TEXT, changes=Changes(off=[part])), 2)
    page.click("[data-key=reset]")
    page.click("[data-key='step 1 1']")
    id = answers[1]["steps"][1]["alternatives"][1]["id"]
    page.click(f".answers .column:nth-child(2) [data-key='choice 1 {id}']")
    assert_columns(0, 1, prefix=[answers[1]["steps"][0]["id"], id])


CONTENT = """
const root = document.querySelector("#explorer").cloneNode(true);
root.querySelectorAll(".cursor, .live").forEach((element) => element.remove());
for (const chip of root.querySelectorAll(".chip")) {
  chip.classList.remove("changed"); // of the last change
  chip.removeAttribute("style");
}
const inputs = [...document.querySelectorAll("input, select, textarea")].map((input) => [input.value, input.checked]);
return [root.outerHTML, inputs];
"""

STATES = {
    "transformer": [
        {"text": TEXT, "prefix": "3,7", "step": 1, "off": "decoder.0.feed_forward,encoder.1.self_attention.0"},
        {"text": TEXT, "layer": "encoder.0.self_attention", "head": 1, "drawn": f"{SOURCE_LAYER}:1:4:0"},
        {"text": TEXT, "view": "beam", "beamSize": 3},
        {"text": TEXT, "view": "compare", "against": OTHER, "patched": "encoder.0:2,encoder.1:2"},
        {"text": TEXT, "view": "contributions", "method": "integrated_gradients", "step": 2},
        {"text": TEXT, "view": "neighbors", "by": "decoder", "step": 2},
        {"text": TEXT, "view": "samples", "temperature": 1.7, "topK": 3, "topP": 0.8, "seed": 4, "maxTokens": 9},
        {"text": "unknown + 100% & #", "view": "parts"},
    ],
    "two": [{"text": TEXT, "model": "1", "view": "parts"}],
    "language_model": [{"text": "ein\nKind spielt", "view": "samples"}],
}


def assert_restored(page, open_page, site):
    """Assert that the address of a page shows the same in a new tab, and return to the page."""
    tab, content = page.driver.current_window_handle, page.run(CONTENT)
    address = page.run("return location.href")
    other = open_page(site)
    other.driver.get("about:blank")
    other.driver.get(address)
    other.settle()
    assert other.run(CONTENT) == content
    other.driver.close()
    page.driver.switch_to.window(tab)


@pytest.mark.parametrize("site", STATES)
def test_an_address_restores_its_state(site, open_page):
    page = open_page(site)
    for state in STATES[site]:
        page.open(**state)
        assert page.state == {name: str(value) for name, value in state.items()}
        assert_restored(page, open_page, site)


def test_wrong_addresses(open_page):
    """Fields that are wrong have their defaults; names of no parts are ignored."""
    page = open_page("transformer", text=TEXT)
    content = page.run(CONTENT)
    wrong = {"model": "7", "prefix": "a", "off": "none.0", "drawn": "none:1:2", "patched": "x", "view": "none"}
    wrong |= {"layer": "none", "head": "9", "beamSize": "-1", "method": "none", "step": "99", "temperature": "x"}
    page.open(text=TEXT, **wrong, unknown="1", __proto__="2")
    page.click("[data-key='step 0 0']")
    page.focus("body")
    assert page.run(CONTENT) == content


def test_back_and_forward(open_page):
    page = open_page("transformer", text=TEXT)
    (explorer,) = page.explorers
    parts = ["encoder.0", "decoder.0.feed_forward"]
    page.click("[data-key='tab parts']")
    for part in parts:
        page.click(f".toggle[title='{part}']")
    page.type("text", "5 5 1")
    page.click("[data-key='step 0 1']")

    def go(steps, **state):
        page.run("history.go(arguments[0])", steps)
        page.wait(lambda: page.state == {name: str(value) for name, value in state.items()})
        page.settle()
        assert page.run("return document.querySelector('[data-key=text]').value") == state["text"]
        off = state.get("off", "").split(",") if "off" in state else []
        assert_answer(page, explorer.answer(state["text"], changes=Changes(off=off)))

    go(-1, text="5 5 1", view="parts", off=",".join(parts))
    go(-1, text=TEXT, view="parts", off=",".join(parts))
    go(-1, text=TEXT, view="parts", off=parts[0])
    go(-2, text=TEXT)
    go(4, text="5 5 1", view="parts", off=",".join(parts))
    page.driver.back()
    page.driver.back()
    go(0, text=TEXT, view="parts", off=parts[0])


def test_two_tabs(open_page):
    pages = [open_page("transformer", text=TEXT) for _ in range(2)]
    (explorer,) = pages[0].explorers
    tabs = pages[0].driver.window_handles[-2:]
    ask = """
    location.hash = "text=" + arguments[0].replaceAll(" ", "+");
    return true;
    """
    texts = ["1 1 2", "4 3"]
    for page, tab, text in zip(pages, tabs, texts, strict=True):
        page.driver.switch_to.window(tab)
        page.run(ask, text)
    for page, tab, text in zip(pages, tabs, texts, strict=True):
        page.driver.switch_to.window(tab)
        page.wait(lambda page=page, text=text: len(page.texts(".chip")) == len(explorer.answer(text)["steps"]))
        page.settle()
        assert_answer(page, explorer.answer(text))


def test_the_last_question_wins(open_page):
    """Answers that are overtaken by newer questions are not shown."""
    page = open_page("transformer", text=TEXT)
    (explorer,) = page.explorers
    page.run("for (const text of ['1', '2 2', '3 3 3', '4 4', '5+1']) location.hash = `text=${text}`")
    page.wait(lambda: page.state == {"text": "5 1"})
    page.wait(lambda: len(page.texts(".chip")) == 3)
    page.settle()
    assert_answer(page, explorer.answer("5 1"))


FIGURES = [
    ("transformer", {"text": TEXT, "head": 1, "step": 2}),
    ("transformer", {"text": TEXT, "view": "beam"}),
    ("transformer", {"text": TEXT, "view": "compare", "against": OTHER, "patched": "encoder.0:2"}),
    ("transformer", {"text": TEXT, "view": "contributions"}),
    ("language_model", {"text": "der Hund\nein", "view": "samples"}),
    ("classifier", {"view": "contributions"}),
]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(("site", "state"), FIGURES, ids=[f"{site} {state.get('view', '')}" for site, state in FIGURES])
def test_files_of_figures(site, state, open_page, tmp_path):
    """They are complete, refer to nothing, and are the same in light and dark mode."""
    page = open_page(site, **state)
    page.driver.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    figures = page.run("return document.querySelectorAll('[role=tabpanel]:not([hidden]) figure').length")
    assert figures > 0

    def download(figure, label):
        for old in tmp_path.iterdir():
            old.unlink()
        script = """
        const figure = document.querySelectorAll("[role=tabpanel]:not([hidden]) figure")[arguments[0]];
        [...figure.querySelectorAll("button")].find((button) => button.textContent === arguments[1]).click();
        const { width, height } = figure.querySelector("svg").viewBox.baseVal;
        const texts = [...figure.querySelectorAll("svg text")].map((text) => text.textContent);
        return [texts, width, height];
        """
        shown = page.run(script, figure, label)
        suffix = f".{label.lower()}"
        page.wait(lambda: [path.suffix for path in tmp_path.iterdir()] == [suffix])
        (path,) = tmp_path.iterdir()
        assert re.fullmatch(r"[a-z0-9_]+", path.stem)
        return path.read_bytes(), *shown

    drawings = {}
    for scheme in ("dark", "light"):
        emulate(page.driver, scheme=scheme)
        drawings[scheme] = []
        for figure in range(figures):
            content, texts, width, height = download(figure, "SVG")
            drawings[scheme].append(content)
    assert drawings["dark"] == drawings["light"]
    for figure, content in enumerate(drawings["light"]):
        root = ElementTree.fromstring(content)
        content, texts, width, height = download(figure, "PNG")
        assert root.tag == f"{SVG}svg"
        assert (float(root.get("width")), float(root.get("height"))) == (width, height)
        assert [element.text or "" for element in root.iter(f"{SVG}text")] == texts
        for element in root.iter():
            assert element.tag.removeprefix(SVG) in ("svg", "g", "text", "rect", "path", "circle")
            assert all("var(" not in value and "url(" not in value for value in element.attrib.values())
            assert {"href", "class", "style"}.isdisjoint(element.attrib)
        with Image.open(BytesIO(content)) as image:
            assert image.format == "PNG"
            assert image.size == (round(3 * width), round(3 * height))
            colors = image.convert("RGB").getcolors(maxcolors=100_000)
        assert len(colors) > 10
        assert max(colors)[1] == (255, 255, 255)


def emulate(driver, width=1200, scheme="light"):
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


LINES = [
    ("transformer", {"text": TEXT, "prefix": "3,7", "off": "encoder.0.feed_forward", "drawn": f"{SOURCE_LAYER}:1:4:0"}),
    ("transformer", {"text": TEXT, "view": "compare", "against": OTHER, "patched": "encoder.0:2,encoder.1:2"}),
    ("transformer", {"text": TEXT, "view": "beam", "beamSize": 3}),
    ("transformer", {"text": TEXT, "view": "contributions", "method": "integrated_gradients", "step": 2}),
    ("gpt", {"text": TEXT, "view": "neighbors", "by": "decoder", "step": 2, "prefix": "3,7"}),
    ("language_model", {"text": 'a"b\\\n', "view": "samples", "topK": 3, "topP": 0.8, "seed": 4, "maxTokens": 9}),
    ("classifier", {"view": "neighbors"}),
    ("masked", {"text": "der [MASK]ann"}),
]


@pytest.mark.parametrize(("site", "state"), LINES, ids=[f"{site} {state.get('view', '')}" for site, state in LINES])
def test_python_lines(site, state, open_page, capsys):
    """They print what the page has been answered."""
    page = open_page(site, **state)
    if state.get("view") == "neighbors":
        page.click(".worst button")
    results = []
    codes = page.texts(".answer pre, [role=tabpanel]:not([hidden]) pre")
    assert len(codes) > 1
    for code in dict.fromkeys(codes):
        capsys.readouterr()
        exec(code, {})
        results.append(literal_eval(capsys.readouterr().out))
        compile(code, "lines", "exec")
    answer = results[0]
    if site == "classifier":
        assert page.text(".output") == answer["output"]
    else:
        assert_answer(page, answer)
    view, panel = state.get("view"), page.text("[role=tabpanel]:not([hidden])")
    if view is None and site == "transformer":
        weights = torch.tensor(results[1]).mean(0)
        torch.testing.assert_close(drawn_weights(page, ".map", weights.shape, 50), weights, rtol=0, atol=0.011)
    elif view == "beam":
        assert all(number(output["score"], 3) in panel for output in results[1]["outputs"])
    elif view == "contributions":
        assert results[1]["targets"] == [answer["steps"][2]["symbol"]]
        page.focus("[data-key='contributions 0']")
        page.keys(Keys.HOME)
        assert signed(results[1]["values"][0][0]) in page.text("[data-panel=contributions] .live")
    elif view == "neighbors":
        assert all(number(one["similarity"], 3) in panel for one in results[1]["examples"])
        assert f"{results[2]['nll']:.3g}" in panel
    elif view == "samples":
        bits = [step["surprise"] for step in results[1]["steps"][results[1]["given"] :]]
        assert f"{number(sum(bits) / len(bits))} bits per" in panel
    elif view == "compare":
        assert {layer["side"] for layer in results[1]["layers"]} == {"input", "decoder"}


def test_python_lines_and_links_are_copied(open_page):
    page = open_page("transformer", text=TEXT, step=1)
    permissions = {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
    page.driver.execute_cdp_cmd("Browser.grantPermissions", permissions)
    code = ".answers .code"
    assert page.run("return document.querySelector(arguments[0]).hidden", code)
    page.click(".answers [aria-expanded]")
    assert page.labels(".answers [aria-expanded]", "aria-expanded") == ["true"]
    assert not page.run("return document.querySelector(arguments[0]).hidden", code)
    read = "navigator.clipboard.readText().then(arguments[0])"
    page.click(f"{code} button")
    page.wait(lambda: page.text(f"{code} button") == "Copied")
    assert page.driver.execute_async_script(read) == page.text(f"{code} pre")
    page.click(".answers .link")
    page.wait(lambda: page.text(".answers .link") == "Copied")
    assert page.driver.execute_async_script(read) == page.run("return location.href")
    page.wait(lambda: page.text(".answers .link") == "Link")


VIEWS = ["attention", "parts", "beam", "compare", "contributions", "neighbors", "samples"]

FOCUSED = """
const element = document.activeElement;
const { outlineStyle, outlineWidth } = getComputedStyle(element);
const cursor = element.querySelector(".cursor");
const { left, top, right, bottom } = element.getBoundingClientRect();
return {
  key: element === document.body ? null : element.dataset.key ?? `${element.tagName} ${element.textContent}`,
  name: element.getAttribute("aria-label") ?? element.labels?.[0]?.textContent ?? element.textContent,
  isMarked: (outlineStyle !== "none" && parseFloat(outlineWidth) >= 2)
    || (cursor !== null && cursor.getAttribute("visibility") === "visible"),
  isVisible: right > 0 && bottom > 0 && left < innerWidth && top < innerHeight,
};
"""

TABBABLE = """
const selector = "a[href], button, input, select, textarea, [tabindex]";
const elements = [...document.querySelectorAll(selector)].filter((element) => element.tabIndex >= 0
  && element.checkVisibility() && !element.disabled);
return elements.map((element) => element.dataset.key ?? `${element.tagName} ${element.textContent}`);
"""


@pytest.mark.parametrize(
    ("site", "view"),
    [*(("transformer", view) for view in VIEWS), ("two", "attention"), ("language_model", "samples"), ("masked", "")],
)
def test_every_control_is_reached_by_keyboard(site, view, open_page):
    state = {"text": TEXT, "against": OTHER, "off": "encoder.0", "by": "decoder"}
    page = open_page(site, view=view, **(state if site in ("transformer", "two") else {}))
    expected = page.run(TABBABLE)
    assert len(expected) > 10
    page.find("input, textarea").send_keys("")  # focuses the first control
    for keys, order in ((Keys.TAB, expected[1:]), (Keys.SHIFT + Keys.TAB, expected[-2::-1])):
        for key in order:
            page.driver.switch_to.active_element.send_keys(keys)
            focused = page.run(FOCUSED)
            assert focused["key"] == key
            assert focused["name"].strip(), focused
            assert focused["isMarked"], focused
            assert focused["isVisible"], focused


def reach(page, key):
    """Press Tab until the element with a key has the focus."""
    for _ in range(100):
        if page.run(FOCUSED)["key"] == key:
            return
        page.keys(Keys.TAB)
    raise AssertionError(f"{key} is not reached")


def test_the_page_is_used_by_keyboard_alone(open_page):
    """The focus stays at a control that is drawn again."""
    page = open_page("transformer")
    (explorer,) = page.explorers

    def press(*keys, focus):
        page.keys(*keys)
        assert page.run(FOCUSED)["key"] == focus
        assert page.run(FOCUSED)["isVisible"]

    reach(page, "text")
    page.driver.switch_to.active_element.send_keys(f"{SELECT_ALL}{TEXT}")
    page.wait(lambda: page.state["text"] == TEXT)
    page.settle()
    first = explorer.answer(TEXT)
    reach(page, "step 0 0")
    press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, focus="step 0 2")
    press(Keys.END, Keys.HOME, Keys.ARROW_LEFT, Keys.ARROW_RIGHT, focus="step 0 1")
    id = first["steps"][1]["alternatives"][2]["id"]
    reach(page, f"choice 0 {id}")
    press(Keys.ENTER, focus=f"choice 0 {id}")
    assert_answer(page, explorer.answer(TEXT, [first["steps"][0]["id"], id]))
    reach(page, "reset")
    page.keys(Keys.SPACE)
    assert_answer(page, first)
    page.keys(Keys.TAB)
    reach(page, "tab attention")
    press(Keys.ARROW_RIGHT, focus="tab parts")
    press(Keys.END, focus="tab samples")
    press(Keys.HOME, focus="tab attention")
    reach(page, "head 0 1")
    press(Keys.ENTER, focus="head 0 1")
    reach(page, "draw 0")
    press(Keys.SPACE, focus="draw 0")
    reach(page, f"map 0 {SOURCE_LAYER}")
    press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, focus=f"map 0 {SOURCE_LAYER}")
    press(Keys.ENTER, focus=f"map 0 {SOURCE_LAYER}")
    drawn = Changes(drawn=[Drawn(SOURCE_LAYER, 1, 2, 1)])
    assert_answer(page, explorer.answer(TEXT, changes=drawn))
    press(Keys.SPACE, focus=f"map 0 {SOURCE_LAYER}")
    assert_answer(page, first)
    page.open(text=TEXT, view="parts")
    reach(page, "part 0 encoder.1.self_attention.1")
    press(Keys.SPACE, focus="part 0 encoder.1.self_attention.1")
    assert_answer(page, explorer.answer(TEXT, changes=Changes(off=["encoder.1.self_attention.1"])))
    page.open(text=TEXT, view="beam")
    reach(page, "beamSize")
    page.driver.switch_to.active_element.send_keys(f"{SELECT_ALL}2")
    page.wait(lambda: page.state.get("beamSize") == "2")
    page.settle()
    reach(page, "beam 0")
    press(Keys.ARROW_RIGHT, Keys.ENTER, focus="beam 0")
    assert page.state["prefix"] == str(first["steps"][0]["id"])
    reach(page, "output 0 1")
    press(Keys.ENTER, focus="output 0 1")
    page.open(text=TEXT, view="compare", against=OTHER)
    reach(page, "patch 0 input")
    press(Keys.ARROW_DOWN, Keys.ARROW_RIGHT, Keys.SPACE, focus="patch 0 input")
    layer = explorer.patch(TEXT, OTHER)["layers"][1]["layer"]
    patched = Changes(patched=[Patched(layer, 1)])
    assert_answer(page, explorer.answer(TEXT, changes=patched, against=OTHER))
    page.open(text=TEXT, view="contributions")
    reach(page, "method")
    press("Int", focus="method")
    assert page.state["method"] == "integrated_gradients"
    page.open(text=TEXT, view="neighbors", by="decoder")
    reach(page, "neighbor step 0")
    press(Keys.ARROW_RIGHT, focus="neighbor step 1")
    reach(page, "use 0 2")
    page.keys(Keys.ENTER)
    assert page.state["text"] == explorer.neighbors(TEXT, by="decoder", step=1)["examples"][2]["source"]


CHANGED = {"text": TEXT, "prefix": "3", "off": "encoder.0.self_attention.1", "drawn": f"{SOURCE_LAYER}:1:2"}
CHANGED |= {"against": OTHER, "patched": "encoder.1:2", "head": 0, "by": "decoder"}
LAYOUTS = {
    "transformer": (CHANGED, VIEWS),
    "two": ({"text": TEXT}, ["attention", "parts", "beam"]),
    "gpt": ({"text": TEXT}, ["attention", "contributions"]),
    "language_model": ({}, ["attention", "samples"]),
    "masked": ({}, ["attention", "contributions"]),
    "classifier": ({}, ["contributions", "neighbors"]),
}
"""States and views of each page."""

SCREENS = [(360, "light"), (768, "dark"), (1280, "light"), (1280, "dark")]
"""Widths and color schemes, each combined with some of the other, as axe takes a second."""


@pytest.mark.parametrize("site", soak_except(LAYOUTS.keys() - {"two"}, LAYOUTS))
def test_layout_and_accessibility(site, open_page):
    state, views = LAYOUTS[site]
    page = open_page(site)
    for view in views:
        page.open(**state, view=view)
        if view == "neighbors":
            page.click(".worst button")
        page.run("document.querySelectorAll('[aria-expanded=false]').forEach((button) => button.click())")
        for width, scheme in SCREENS:
            resizes = page.run("return innerWidth") != width
            page.run("document.querySelector('.answers').firstChild.dataset.old = ''")
            emulate(page.driver, width, scheme)
            page.wait(lambda resizes=resizes: not resizes or page.labels("[data-old]") == [])
            page.settle()
            assert page.run("return document.documentElement.scrollWidth") <= width
            found = Axe().run(page.driver)
            described = [(entry["id"], entry["nodes"][0]["html"][:200]) for entry in found["violations"]]
            assert described == [], (view, width, scheme, described)


@pytest.mark.parametrize("view", ["attention", "compare"])
def test_a_drawing_stays_in_its_place(view, open_page):
    """A second click on the same place undoes the first one."""
    page = open_page("transformer", text=TEXT, view=view, against=OTHER)
    (explorer,) = page.explorers
    emulate(page.driver)
    selector = ".map .frame" if view == "attention" else "[data-key='patch 0 input'] .frame"
    if view == "attention":
        page.click("[data-key='draw 0']")
    top = "return document.querySelector(arguments[0]).getBoundingClientRect().top"
    place = 0.42, 0.2
    page.point(selector, *place)
    before = page.run(top, selector)
    page.point(selector, *place, click=True)
    assert {"drawn", "patched"} & page.state.keys()
    assert page.run(top, selector) == pytest.approx(before, abs=8)
    ActionChains(page.driver, duration=0).click().perform()
    page.settle()
    assert not {"drawn", "patched"} & page.state.keys()
    assert_answer(page, explorer.answer(TEXT))


MARKUP = ["<img/src=x/onerror=broken=1>", "<script>broken=1</script>", "</script><b>", "&lt;&#60;"]


@pytest.mark.parametrize("task", ["seq2seq", "classifier"])
def test_text_is_never_markup(task, open_address, serve):
    torch.manual_seed(0)
    if task == "seq2seq":
        tokenizer = SymbolTokenizer(MARKUP, separator=" ")
        predictor = Seq2SeqPredictor(Transformer(tokenizer.vocab_size, 16, 4, 1, max_length=20), tokenizer, 7)
    else:
        tokenizer = train_word_tokenizer([" ".join(MARKUP)], 60)
        network = EncoderClassifier(tokenizer.vocab_size, 4, max_length=99, d_model=16, num_heads=4, num_layers=1)
        predictor = ClassifierPredictor(network, tokenizer, MARKUP)
    randomize(predictor.network)
    explorer = Explorer(predictor, "<b>name</b><script>broken=1</script>")
    text, other = " ".join(MARKUP), " ".join(reversed(MARKUP))
    page = open_address(serve(explorer).address, [explorer], text=text, against=other)
    answer = explorer.answer(text)
    if task == "seq2seq":
        assert_answer(page, answer)
    else:
        labels = [label["symbol"] for label in answer["steps"][0]["alternatives"]]
        assert page.texts(".labels > div > span:first-child") == labels
    for view in VIEWS:
        page.click(f"[data-key='tab {view}']")
        assert page.texts(".answers .error") == []
        assert page.run("return document.querySelectorAll('img, b:empty, #explorer script').length") == 0
    page.click("[data-key='tab compare']")
    for symbol in explorer.answer(text)["source"]:
        assert symbol in page.text("[data-panel=compare]")
    page.type("text", f"{MARKUP[0]}? {MARKUP[1]}")
    if task == "seq2seq":
        assert MARKUP[0] in page.text(".answers .error")
    assert page.run("return document.querySelectorAll('img, script').length") == 1
    assert page.run("return typeof broken") == "undefined"


def test_the_page_of_a_server_that_has_ended(open_address, make_explorer):
    server = Server([make_explorer("transformer")], command="lightning-tfm explore 'my run'")
    thread = threading.Thread(target=server.run)
    thread.start()
    page = open_address(server.address, [], text=TEXT)
    server.close()
    thread.join(60)
    page.type("text", OTHER)
    page.driver.get_log("performance")
    for view in VIEWS:
        page.click(f"[data-key='tab {view}']")
        line = "The server has stopped; to start it again, run: lightning-tfm explore 'my run'"
        assert page.texts(".error") == [line]
    assert requests(page.driver) == set()


class Waiting(Explorer):
    """Explorer that answers when it is allowed."""

    begun, allowed = threading.Event(), threading.Event()

    @wraps(Explorer.answer)
    def answer(self, text, **settings):
        self.begun.set()
        assert self.allowed.wait(60)
        return super().answer(text, **settings)


def test_a_closed_tab(open_address, explorers, serve, make_explorer):
    """The next tab is answered."""
    explorer = make_explorer("transformer")
    waiting = Waiting(explorer.predictor)
    address = serve(waiting).address
    waiting.allowed.set()
    page = open_address(address, [explorers["transformer"]], text=TEXT)
    waiting.begun.clear()
    waiting.allowed.clear()
    page.find("[data-key=text]").send_keys(f"{SELECT_ALL}4 4")
    assert waiting.begun.wait(60)
    page.driver.close()
    page.driver.switch_to.window(page.driver.window_handles[0])
    waiting.allowed.set()
    other = open_address(address, [explorers["transformer"]], text=OTHER)
    assert_answer(other, explorers["transformer"].answer(OTHER))


@pytest.fixture(scope="module")
def files(explorers, tmp_path_factory):
    """Return the addresses of pages with networks in them."""
    paths = {name: tmp_path_factory.mktemp("files") / "page.html" for name in ("transformer", "text_gpt")}
    for name, path in paths.items():
        write_page([explorers[name]], path)
    return {name: path.as_uri() for name, path in paths.items()}


@pytest.fixture(scope="module")
def firefox_driver(tmp_path_factory):
    with firefox(tmp_path_factory.mktemp("firefox")) as driver:
        yield driver


@pytest.fixture(params=["chromium", "firefox"])
def open_anywhere(request):
    """Return a function that opens an address in each browser."""
    if request.param == "chromium":
        return request.getfixturevalue("open_address")

    def open_anywhere(address, explorers, **state):
        page = Page(request.getfixturevalue("firefox_driver"), address, explorers)
        page.open(**state)
        return page

    return open_anywhere


@pytest.fixture(params=["server", "file"])
def address_of(request):
    """Return a function that returns the address of a model's page, and the tolerance of its probabilities."""
    if request.param == "file":  # whose weights are in half precision
        return lambda name: (request.getfixturevalue("files")[name], 0.02)
    sites = {"transformer": "transformer", "text_gpt": "language_model"}
    return lambda name: (request.getfixturevalue("sites")[sites[name]][0], 0.0)


LOADED = "return performance.getEntriesByType('resource').map((entry) => entry.name)"


def assert_loads_nothing(page):
    assert {origin(name) for name in page.run(LOADED) if not name.startswith("data:")} <= {origin(page.address)}


def test_translation_in_each_browser(open_anywhere, address_of, explorers):
    address, tolerance = address_of("transformer")
    explorer = explorers["transformer"]
    page = open_anywhere(address, [explorer])
    assert_answer(page, explorer.answer(explorer.describe()["example"]), tolerance=tolerance)
    page.type("text", TEXT)
    first = explorer.answer(TEXT)
    for attention in first["attention"]:
        page.select("[data-key='layer 0']", attention["layer"])
        page.click("[data-key='head 0 1']")
        weights = head_weights(attention, 1)
        shown = drawn_weights(page, ".map", weights.shape, 50)
        torch.testing.assert_close(shown, weights, rtol=0, atol=0.011 + tolerance)
    assert_changes(page, explorer, TEXT, tolerance)
    page.click("[data-key='tab contributions']")
    notes = page.texts("[data-panel=contributions] .note")
    assert (f"This question {EXCLUDED['attributions']}." in notes) == bool(tolerance)
    page.type("text", "3 x")
    with pytest.raises(UserError) as error:
        explorer.answer("3 x")
    assert page.texts(".answers .error") == [str(error.value)]
    assert_loads_nothing(page)


def test_samples_in_each_browser(open_anywhere, address_of, explorers):
    address, tolerance = address_of("text_gpt")
    explorer = explorers["text_gpt"]
    page = open_anywhere(address, [explorer], text="der Hund", view="samples", topK=1, maxTokens=20)
    assert_answer(page, explorer.answer("der Hund"), tolerance=tolerance)
    sample = explorer.sample("der Hund", top_k=1, max_tokens=20)
    letters = "[data-key='sample 0'] .letter"
    assert "".join(page.texts(letters)).replace("↵", "\n") == sample["text"]
    page.open(text="der Hund", view="samples", temperature=1.5, maxTokens=20)
    texts = [page.texts(letters)]
    for _ in range(2):
        page.click("[data-panel=samples] .primary")
        texts.append(page.texts(letters))
    assert len({*map(tuple, texts)}) == 3
    assert page.state["seed"] == "2"
    page.open(text="der Hund", view="samples", temperature=1.5, maxTokens=20, seed=1)
    assert page.texts(letters) == texts[1]
    assert_loads_nothing(page)
