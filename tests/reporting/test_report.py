"""Reports show the files of their runs, and work in a browser without a network."""

from __future__ import annotations

import base64
import csv
import itertools
import json
import math
import re
import shutil
from collections import Counter
from html import unescape
from pathlib import Path

import pytest
import torch
import yaml

from lightning_tfm.commands.report import MAX_PAGE_SIZE, report
from lightning_tfm.data import Pair
from lightning_tfm.errors import UserError
from lightning_tfm.inference.decoding import DecodingOptions
from lightning_tfm.inference.loading import load
from lightning_tfm.plots.style import PALETTE
from lightning_tfm.reporting import collect
from lightning_tfm.reporting.charts import BINS, _by_interest, draw_charts
from lightning_tfm.reporting.collect import RunPage
from lightning_tfm.reporting.page import SHOWN_CATEGORIES
from lightning_tfm.reporting.verdict import compare_pages
from lightning_tfm.runs.record import Run
from lightning_tfm.system.terminal import format_duration
from lightning_tfm.tokenization import SymbolTokenizer, edit_distances
from support import records
from support.experiments import folder, trained_run
from support.marks import soak_except
from support.pages import assert_fits_every_screen, assert_self_contained, open_page, page_data

MARKUP = "<script>document.title='broken'</script><b>&amp;</b>"


def read_predictions(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "predictions.jsonl").read_text().split("\n")[:-1]]


def write_predictions(run: Path, lines: list[dict]) -> None:
    (run / "predictions.jsonl").write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


@pytest.fixture(scope="module")
def two_runs(reference, tmp_path_factory) -> list[Path]:
    """Train two models; the first one has a prediction with markup, and one whose attention shows the gold one."""
    folders = []
    for model in ("transformer", "gpt"):
        cwd = tmp_path_factory.mktemp("two_runs") / model
        shutil.copytree(reference(model), cwd)
        folders.append(folder(cwd, model))
    first, second, *others = read_predictions(folders[0])
    first |= {"prediction": MARKUP, "correct": False, "nll": 1e6, "category": MARKUP}
    second |= {"prediction": second["target"], "correct": True, "nll": 1e5}
    write_predictions(folders[0], [first, second, *others])
    return folders


@pytest.fixture
def copied(tmp_path):
    """Return a function that copies a run, updates its predictions by their number, and returns the folder."""

    def copied(run, name="copied", predictions=None):
        shutil.copytree(run, tmp_path / name)
        lines = read_predictions(run)
        for number, changes in (predictions or {}).items():
            lines[number] |= changes
        write_predictions(tmp_path / name, lines)
        return tmp_path / name

    return copied


@pytest.fixture
def reported(tmp_path):
    """Return a function that writes a report, and returns the text of the page and the data in it."""

    def reported(*arguments):
        path = tmp_path / "page.html"
        assert report([*map(str, arguments), "--overwrite", "--output", str(path)]) == 0
        return path.read_text(), page_data(path.read_text())

    return reported


@pytest.fixture(scope="module")
def html(two_runs, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    assert report([*map(str, two_runs), "--output", str(path)]) == 0
    return path


def table_rows(page: str, label: str) -> dict[str, list[str]]:
    """Return the cells of a table of a page, by the cells of its first column."""
    body = page.partition(f'aria-label="{label}"')[2].partition("<tbody>")[2].partition("</tbody>")[0]
    rows = [re.findall(r"<t[hd].*?>(.*?)</t[hd]>", row, re.DOTALL) for row in body.split("</tr>")[:-1]]
    return {unescape(first): list(map(unescape, cells)) for first, *cells in rows}


def test_report_is_self_contained(html):
    text = html.read_text()
    assert len(text.encode()) <= MAX_PAGE_SIZE <= 5_000_000
    assert_self_contained(text)
    assert MARKUP not in text
    assert text.count("</script>") == 3


def test_report_shows_files_of_runs(html, two_runs):
    runs = page_data(html.read_text())["runs"]
    summaries = [json.loads((path / "summary.json").read_text()) for path in two_runs]
    results = [f"{summary['test']['exact_match']:.4f}" for summary in summaries]
    assert table_rows(html.read_text(), "Table of results")["test/exact_match"] == results
    for run, path in zip(runs, two_runs, strict=True):
        assert (path / "config.yaml").read_text() in unescape(html.read_text())
        lines = read_predictions(path)
        assert run["tested"] == len(lines)
        assert run["wrong"] == sum(not line["correct"] for line in lines)
        losses = [line["nll"] for line in run["predictions"]]
        assert losses == sorted(losses, reverse=True)
        assert losses[0] == max(line["nll"] for line in lines)
        assert run["attention"]
        module = load(path / "checkpoints/best.ckpt")
        for example in run["attention"]:
            texts = {"output": example["prediction"], "target": example["target"]}
            assert example["layers"].keys() == ({"output"} if example["correct"] else texts.keys())
            for rows, layers in example["layers"].items():
                maps = module.attention(Pair(example["source"], texts[rows])._asdict())
                expected = {attention_map.layer: attention_map.cropped().weights.flatten() for attention_map in maps}
                assert {layer["layer"] for layer in layers} == set(expected)
                for layer in layers:
                    assert layer["predicts"] in ("", rows)
                    weights = torch.tensor(list(base64.b64decode(layer["weights"][0]))) / 255
                    torch.testing.assert_close(weights, expected[layer["layer"]], atol=1 / 255, rtol=0)


def category_rows(page: str) -> list[list[str]]:
    """Return the cells of the table of categories of a page, also of those that are folded."""
    bodies = re.findall(r'aria-label="Table of (?:further )?categories 1".*?<tbody>(.*?)</tbody>', page, re.DOTALL)
    rows = [row for body in bodies for row in body.split("</tr>")[:-1]]
    return [re.findall(r"<t[hd].*?>(.*?)</t[hd]>", row) for row in rows]


def test_the_worst_of_many_categories_are_first(tmp_path, reported):
    right = {name: (7 * place) % 12 for place, name in enumerate("abcdefghijkl")}
    lines = [
        {"source": f"{name}{n}", "category": name, "correct": n < number, "prediction": "b" if n < number else "c"}
        for name, number in right.items()
        for n in range(12)
    ]
    metrics = {"exact_match": 0.5} | {f"ser/{name}": 1 - number / 12 for name, number in right.items()}
    records.write_run(tmp_path, summary={"test": metrics}, predictions=lines)
    html, _ = reported(tmp_path)
    rows = category_rows(html)
    assert [row[0] for row in rows] == sorted(right, key=right.get)
    assert len(table_rows(html, "Table of categories 1")) == SHOWN_CATEGORIES
    assert "<summary>4 more categories</summary>" in html
    for name, pairs, exact_match, interval, ser, _ in rows:
        low, high = (float(bound) for bound in interval.removesuffix("%").split(" to "))
        share = 100 * right[name] / 12
        assert (pairs, exact_match, ser) == ("12", f"{share:.1f}%", f"{100 - share:.1f}%")
        assert 0 <= low <= share <= high <= 100
    few = [line for line in lines if line["category"] in "abc"]
    records.write_run(tmp_path, summary={"test": {"exact_match": 0.5}}, predictions=few)
    html, _ = reported(tmp_path)
    assert [row[0] for row in category_rows(html)] == ["a", "b", "c"]
    assert "Worst categories" not in html


def test_confused_symbols_are_the_edits_of_all_predictions():
    tokenizer = SymbolTokenizer(["a", "t\u0361s", "e"], "", " ")
    texts = [("a t\u0361s", "a e"), ("a t\u0361s e", "e e"), ("a", "a e"), ("e a", "e"), ("e", "e")]
    lines = [
        records.PREDICTION
        | {"source": str(number), "target": target, "prediction": output, "correct": target == output}
        for number, (target, output) in enumerate(texts)
    ]
    found = collect._confused(lines, tokenizer)
    assert [(each["edit"], each["target"], each["predicted"], each["count"]) for each in found] == [
        ("deletion", "a", "", 2),
        ("substitution", "t\u0361s", "e", 2),
        ("insertion", "", "e", 1),
    ]
    assert found[1]["example"]["source"] == "0", "the prediction with the fewest edits"
    distances = edit_distances(*([each[side].split() for each in lines] for side in ("prediction", "target")))
    assert sum(each["count"] for each in found) == distances.sum()
    for each in found:
        line = each["example"]
        assert each["target"] in line["target"]
        assert each["predicted"] in line["prediction"]


def test_categories_are_numbers(html, two_runs):
    rows = category_rows(html.read_text())
    predictions = [read_predictions(path) for path in two_runs]
    assert len(rows) == len({(line["split"], line["category"]) for lines in predictions for line in lines})
    for category, split, examples, *cells in rows:
        for lines, cell in zip(predictions, cells, strict=True):
            of_kind = [line for line in lines if (line["split"], line["category"]) == (split, unescape(category))]
            if cell:
                assert cell == f"{100 * sum(line['correct'] for line in of_kind) / len(of_kind):.1f}%"
            assert bool(cell) == bool(of_kind)
        assert int(examples) > 0


def test_symbols_have_the_probabilities_of_generate(two_runs, html):
    """The probabilities of wrong predictions are those of decoding, and multiply to that of the prediction."""
    run = page_data(html.read_text())["runs"][1]
    wrong = [line for line in run["predictions"] if "steps" in line]
    assert wrong
    assert [line for line in run["predictions"] if line["correct"] and "steps" in line] == []
    module = load(two_runs[1] / "checkpoints/best.ckpt")
    decoded = module.predict([line["source"] for line in wrong[:5]], DecodingOptions(steps=True))
    for line, prediction in zip(wrong, decoded, strict=False):
        (output,) = prediction.outputs
        assert output.text == line["prediction"]
        if len(output.steps) == len(line["steps"]):  # the decoder may stop at the maximum length
            for step, (symbol, probability, alternatives) in zip(output.steps, line["steps"], strict=True):
                assert (step.symbol, step.probability) == (symbol, pytest.approx(probability, abs=1e-3))
                assert all(value < 1 - probability + 1e-3 for _, value in alternatives)


@pytest.mark.parametrize(
    ("target", "prediction", "expected"),
    [
        ("1974-01-02", "1974-11-20", [["0", "2"], ["1", "2"]]),
        ("3 1 2", "3 2", [["1 "], []]),
        ("3 12", "3 1", [["12"], ["1"]]),
        ("pos", "neg", [["pos"], ["neg"]]),
        ("", "a", [[], ["a"]]),
        ("a", "a", [[], []]),
    ],
)
def test_differences(target, prediction, expected):
    spans = collect.differences(target, prediction)
    texts = [[text[slice(*span)] for span in each] for text, each in zip((target, prediction), spans, strict=True)]
    for text, each, found in zip((target, prediction), spans, texts, strict=True):
        assert all(0 <= start < end <= len(text) for start, end in each)
        assert len(found) == len(each)
    kept = []
    for text, each in zip((target, prediction), spans, strict=True):
        bounds = [0, *(place for span in each for place in span), len(text)]
        kept.append("".join(text[start:end] for start, end in zip(bounds[::2], bounds[1::2], strict=True)))
    assert kept[0] == kept[1], "the rest is equal"
    assert texts == expected


def test_report_lists_different_settings(html, two_runs):
    configs = [yaml.safe_load((run / "config.yaml").read_text()) for run in two_runs]
    differences = table_rows(html.read_text(), "Differing settings")
    classes = [json.dumps(config["model"]["init_args"]["network"]["class_path"]) for config in configs]
    assert differences["model.init_args.network.class_path"] == classes
    assert "seed_everything" not in differences


def test_report_of_unknown_versions_and_test_sets(tmp_path):
    run = records.write_run(tmp_path, start={"versions": {}}, summary={}, predictions=[{"category": "a"}])
    path = tmp_path / Run.PREDICTIONS
    path.write_text(path.read_text().replace('"split": "test", ', ""))
    page = collect.collect_run(run.folder, "new", 10, [])
    assert (page.facts["torch"], page.facts["lightning_tfm"][:7]) == ("unknown", "unknown")
    assert [(each["split"], each["category"]) for each in page.categories] == [("test", "a")]


def test_report_of_unfinished_run(two_runs, tmp_path, reported):
    (tmp_path / "young").mkdir()
    shutil.copy(two_runs[0] / "config.yaml", tmp_path / "young")
    _, data = reported(tmp_path / "young")
    assert data["runs"][0]["predictions"] == []


def test_invalid_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the current folder may have a report.html
    with pytest.raises(UserError, match="RUN must name a run or a checkpoint, but there is no run 'nowhere'"):
        report(["nowhere"])
    (tmp_path / "config.yaml").write_text("{}")
    with pytest.raises(UserError, match="RUN must name each run once"):
        report([str(tmp_path), f"{tmp_path}/"])
    (tmp_path / "config.yaml").write_text("a: 1\nb: {\n")
    with pytest.raises(UserError, match=r"RUN must name a valid YAML file, but line 3 of '.*/config.yaml' is not: "):
        report([str(tmp_path)])
    for missing in ("no/page.html", "no/"):
        with pytest.raises(UserError, match=r"--output must lie in a folder that exists, but '.*no' does not; create"):
            report([str(tmp_path), "--output", f"{tmp_path}/{missing}"])
    assert not (tmp_path / "no").exists()


def hover(browser, element):
    from selenium.webdriver import ActionChains

    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
    ActionChains(browser).move_to_element(element).perform()


@pytest.mark.browser
def test_report_in_browser(html, browser):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.ui import Select

    def all_of(selector):
        return browser.find_elements(By.CSS_SELECTOR, selector)

    open_page(browser, html)
    assert browser.title != "broken"
    charts = all_of(".plot svg")
    assert charts
    assert all(chart.find_elements(By.CSS_SELECTOR, "path") for chart in charts)
    hover(browser, all_of("#curves-0 .mark-symbol path")[0])
    assert "value" in browser.find_element(By.ID, "vg-tooltip-element").text

    assert MARKUP in all_of("#p-table tbody tr")[0].text
    search = browser.find_element(By.ID, "p-search")
    search.send_keys("broken")
    assert len(all_of("#p-table tbody tr")) == 1
    assert "; 1 of " in browser.find_element(By.ID, "p-count").text
    search.clear()
    search.send_keys(Keys.SPACE, Keys.BACKSPACE)
    Select(browser.find_element(By.ID, "p-which")).select_by_visible_text("correct")
    assert all("✓" in row.text for row in all_of("#p-table tbody tr"))

    examples = page_data(html.read_text())["runs"][0]["attention"]
    right = next(n for n, one in enumerate(examples) if any(layer["gold"] for layer in one["layers"]["output"]))
    Select(browser.find_element(By.ID, "attention-example")).select_by_index(right)
    layers = examples[right]["layers"]["output"]
    maps = all_of("#attention svg.map")
    assert len(maps) == sum(layer["heads"] for layer in layers), "all heads are shown"
    assert all_of("#attention .map .mark"), "the gold alignment is outlined"
    live = browser.find_element(By.CSS_SELECTOR, "#attention .live")
    maps[0].send_keys(Keys.ARROW_RIGHT)
    weights = torch.tensor(list(base64.b64decode(layers[0]["weights"][0]))) / 255
    assert f"{weights[1]:.2f}" in live.text
    assert "(row 1, column 2)" in live.text
    assert [line for line in browser.get_log("browser") if line["level"] in ("SEVERE", "WARNING")] == []


@pytest.mark.browser
def test_symbols_show_their_probabilities_with_the_keyboard(html, browser):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.ui import Select

    open_page(browser, html)
    Select(browser.find_element(By.ID, "p-run")).select_by_index(1)
    lines = page_data(html.read_text())["runs"][1]["predictions"]
    line = next(line for line in lines if "steps" in line and len(line["steps"]) > 2)
    rows = browser.find_elements(By.CSS_SELECTOR, "#p-table tbody tr")
    row = rows[[each for each in lines if not each["correct"]].index(line)]
    first, second, *_ = row.find_elements(By.CSS_SELECTOR, ".given")
    tip = browser.find_element(By.ID, "tip")
    assert not tip.is_displayed()
    first.send_keys(Keys.ARROW_RIGHT)
    assert browser.switch_to.active_element == second
    symbol, probability, alternatives = line["steps"][1]
    assert tip.text.startswith(symbol)
    assert all(other in tip.text for other, _ in alternatives)
    percent = re.search(r"(<?[\d.]+)%", tip.text)[1]
    assert float(percent.lstrip("<")) == pytest.approx(100 * probability, abs=0.6)
    second.send_keys(Keys.ESCAPE)
    assert not tip.is_displayed()
    hover(browser, first)
    assert tip.is_displayed()


@pytest.mark.browser
def test_rows_of_attention_can_be_those_of_the_target(html, browser):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import Select

    open_page(browser, html)
    Select(browser.find_element(By.ID, "attention-run")).select_by_index(1)
    examples = page_data(html.read_text())["runs"][1]["attention"]
    wrong = next(n for n, one in enumerate(examples) if "target" in one["layers"])
    Select(browser.find_element(By.ID, "attention-example")).select_by_index(wrong)

    def shown():
        view = browser.find_element(By.ID, "attention")
        labels = [label.text for label in view.find_elements(By.CSS_SELECTOR, "figure:first-child .row-label")]
        return view.find_element(By.CSS_SELECTOR, ".note").text, labels

    queries = {rows: layers[0]["queries"] for rows, layers in examples[wrong]["layers"].items()}
    assert queries["output"] != queries["target"]
    text, labels = shown()
    assert text.startswith("Rows are the model's own output.")
    assert labels == queries["output"]
    browser.find_element(By.CSS_SELECTOR, "#attention input[value=target]").click()
    text, labels = shown()
    assert text.startswith("Rows are the target.")
    assert labels == queries["target"]


@pytest.mark.browser
def test_slider_moves_through_the_training(html, two_runs, browser):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    open_page(browser, html)
    steps = Run(two_runs[0]).attention_history["steps"]
    assert len(steps) > 1
    slider = browser.find_element(By.ID, "history-validation")
    layers = page_data(html.read_text())["runs"][0]["history"][0]["layers"]["target"]
    layer = next(layer for layer in reversed(layers) if layer["gold"])
    assert len(layer["weights"]) == len(steps)
    for place, key in ((-1, Keys.END), (-2, Keys.ARROW_LEFT), (0, Keys.HOME)):
        slider.send_keys(key)
        assert slider.get_attribute("aria-valuetext") == f"step {steps[place]}"
        assert browser.find_element(By.ID, "history-at").text == f"Validation at step {steps[place]}"
        browser.find_element(By.CSS_SELECTOR, "#history .map").send_keys(Keys.HOME, Keys.ARROW_RIGHT)
        weight = base64.b64decode(layer["weights"][place])[1] / 255
        assert f" {weight:.2f} (row 1, column 2)" in browser.find_element(By.CSS_SELECTOR, "#history .live").text


@pytest.mark.browser
def test_csv_of_the_shown_predictions(html, browser):
    from selenium.webdriver.common.by import By

    open_page(browser, html)
    browser.execute_script(
        "URL.createObjectURL = blob => { blob.text().then(text => { window.csv = text; }); return '#'; }"
    )
    browser.find_element(By.ID, "p-search").send_keys("broken")
    browser.find_element(By.ID, "p-download").click()
    (row,) = csv.DictReader(browser.execute_script("return window.csv").splitlines())
    assert row["prediction"] == row["category"] == MARKUP
    assert row["correct"] == "false"


@pytest.fixture(scope="module")
def seeded(two_runs, tmp_path_factory) -> list[Path]:
    """Return copies of two runs with two seeds each."""
    copies = []
    for number, (original, seed) in enumerate(itertools.product(two_runs, (1, 2))):
        copy = tmp_path_factory.mktemp("seeded") / original.parent.name / f"version_{number}"
        shutil.copytree(original, copy)
        for name in ("config.yaml", "summary.json"):
            text = (copy / name).read_text()
            (copy / name).write_text(re.sub(r'(seed_everything|"seed"|\bseed): \d+', rf"\1: {seed}", text))
        copies.append(copy)
    return copies


def test_comparison_over_seeds(seeded, reported):
    page, _ = reported(*seeded)
    assert page.count("Comparison over seeds") == 1
    header, _, body = page.partition("</header>")
    lead = re.search(r'<p class="lead">(.*?)</p>', header)[1]
    number = r"[+-]\d+\.\d"
    pattern = rf"\S+ against copy_transformer: exact match {number} points( \(95% interval {number} to {number}\))?, "
    assert re.fullmatch(rf"{pattern}2 seeds each; a test needs 6 seeds each\.", lead)
    assert header.count('class="card"') == 2
    assert "mean over 2 seeds" in header
    assert "Too few seeds: with 2 seeds per group, p is at least 0.5" in body
    assert "needs several seeds" not in page
    assert "Difference from copy_transformer" in page
    assert "Comparison over seeds" not in reported(seeded[0], seeded[2])[0]


@pytest.fixture(scope="module")
def pages(two_runs, seeded, tmp_path_factory):
    """Write the reports of one run with an input, of two runs, of two seeds each, and of five runs of three tasks."""
    runs = [trained_run(name, tmp_path_factory) for name in ("reviews_classifier", "text_gpt", "spelling_gpt")]
    folder = tmp_path_factory.mktemp("pages")
    found = {"one": [two_runs[1], "--input", "3 1 2"], "two": two_runs, "seeds": seeded, "five": [*two_runs, *runs]}
    for name, arguments in found.items():
        assert report([*map(str, arguments), "--output", str(folder / f"{name}.html")]) == 0
    return folder


@pytest.mark.browser
@pytest.mark.parametrize("name", soak_except(("five",), ("one", "two", "seeds", "five")))
def test_layout_and_accessibility(name, pages, browser):
    assert_fits_every_screen(pages / f"{name}.html", browser)


@pytest.mark.browser
def test_dark_mode(html, browser):
    colors = {}
    for scheme in ("light", "dark"):
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        open_page(browser, html)
        colors[scheme] = [
            browser.execute_script("return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]", *of)
            for of in (("body", "backgroundColor"), ("body", "color"), ("#attention .map path", "fill"))
        ]
        labels = browser.execute_script("return getComputedStyle(document.querySelector('.plot svg text')).fill")
        colors[scheme].append(labels)
    for light, dark in zip(*colors.values(), strict=True):
        assert light != dark


@pytest.mark.browser
def test_keyboard_and_screen_reader(html, browser):
    from selenium.webdriver.common.by import By

    open_page(browser, html)
    controls = browser.find_elements(By.CSS_SELECTOR, "select, input, button, summary, [tabindex='0']")
    shown = [control for control in controls if control.is_displayed()]
    assert len(shown) > 15
    assert [control.get_attribute("outerHTML") for control in shown if not control.accessible_name.strip()] == []
    for chart in browser.find_elements(By.CSS_SELECTOR, ".plot svg"):
        assert chart.get_attribute("aria-label") or chart.find_element(By.XPATH, "..").get_attribute("aria-label")
    assert browser.find_element(By.TAG_NAME, "html").get_attribute("lang") == "en"


@pytest.mark.browser
def test_page_of_500_examples(two_runs, tmp_path, browser):
    many, path = tmp_path / "many", tmp_path / "page.html"
    shutil.copytree(two_runs[1], many)
    write_predictions(many, (read_predictions(many) * 600)[:600])
    assert report([str(many), "--output", str(path)]) == 0
    open_page(browser, path)
    rows = "return document.querySelectorAll('#p-table tbody tr').length"
    assert browser.execute_script(rows) < 50
    browser.execute_script("document.querySelector('#p-table > button').click()")
    shown = sum(not line["correct"] for line in page_data(path.read_text())["runs"][0]["predictions"])
    assert browser.execute_script(rows) == shown > 50


@pytest.mark.run
def test_page_size_limit(two_runs, tmp_path, monkeypatch, capsys):
    whole, cut, run = tmp_path / "whole.html", tmp_path / "cut.html", str(two_runs[0])
    assert report([run, "--output", str(whole)]) == 0
    monkeypatch.setattr("lightning_tfm.commands.report.MAX_PAGE_SIZE", whole.stat().st_size - 1)
    assert report([run, "--output", str(cut)]) == 0
    assert cut.stat().st_size < whole.stat().st_size
    before, after = (page_data(path.read_text())["runs"][0]["predictions"] for path in (whole, cut))
    assert after == before[: len(before) // 2], "the largest losses are kept"
    assert "it shows 1/2 of the predictions" in capsys.readouterr().err
    monkeypatch.setattr("lightning_tfm.commands.report.MAX_PAGE_SIZE", 1000)
    with pytest.raises(UserError, match="the page must be below"):
        report([run, "--output", str(tmp_path / "none.html")])


def test_unusual_predictions(two_runs, copied, reported, capsys):
    """JSON has no infinite numbers, and unknown symbols have no attention."""
    text = "before\x85\u2028after"
    changes = {0: {"source": text, "nll": 1e7}, 1: {"nll": math.inf}, 3: {"prediction": "x", "nll": 1e6}}
    odd = copied(two_runs[1], predictions=changes)
    metrics = (odd / "metrics.csv").read_text().splitlines()
    place = metrics[0].split(",").index("val/loss")
    rows = [line.split(",") for line in metrics[1:]]
    next(row for row in rows if row[place])[place] = "nan"
    (odd / "metrics.csv").write_text("\n".join([metrics[0], *map(",".join, rows)]) + "\n")
    page, data = reported(odd)
    (run,) = data["runs"]
    first, second, third = run["predictions"][:3]
    assert (first["nll"], second["source"], third["prediction"]) == (None, text, "x")
    assert "1 value of val/loss not finite" in page
    assert "NaN" not in json.dumps(data)
    assert len(run["attention"]) == 10
    assert capsys.readouterr().err.count("cannot show the attention of an example: the vocabulary has no") == 2


def test_damaged_checkpoint_has_no_attention(two_runs, copied, reported, capsys):
    odd = copied(two_runs[1])
    (odd / "checkpoints/best.ckpt").write_bytes(b"none")
    assert reported(odd)[1]["runs"][0]["attention"] == []
    assert "cannot show the attention of" in capsys.readouterr().err


def test_damaged_rows_of_metrics(tmp_path, capsys):
    (tmp_path / "metrics.csv").write_text("step,val/loss\n1,2.5\n2,high\n3\n4,1.5\n")
    assert collect._curves(Run(tmp_path), 10)[0] == {"val/loss": [(2, 2.5), (5, 1.5)]}
    assert "skipping 2 damaged rows of " in capsys.readouterr().err


def test_verdict_names_best_run(two_runs, copied, reported, tmp_path):
    folders = []
    for number, (run, wrong) in enumerate(zip(two_runs, (4, 1), strict=True)):
        folders.append(copied(run, f"run_{number}"))
        line = records.PREDICTION | {"target": "1", "prediction": "1"}
        lines = [line | {"source": str(n % 5), "correct": n >= wrong} for n in range(20)]
        write_predictions(folders[-1], lines)
        summary = json.loads((run / "summary.json").read_text())
        summary["test"]["exact_match"] = 1 - wrong / 20
        (folders[-1] / "summary.json").write_text(json.dumps(summary))
    text, _ = reported(*folders)
    worse, better = (f"{tmp_path.name}/run_{number}" for number in range(2))
    assert "exact match 0.8000 on 20 test examples" in text
    assert f"{better} has the best exact match: 0.9500, 0.1500 above {worse}." in text
    p = f"{2 * 0.5**3:.2g}"  # 3 of 3 are better
    assert f"3 are correct only in {better} and 0 only in {worse} (sign test: p = {p})" in text


A, B, NAN = {"exact_match": 0.5}, {"exact_match": 0.25}, {"exact_match": math.nan}
CHARACTERS, SUBWORDS = {"loss": 1.5}, {"loss": 2.5, "tokenizer": "y"}
UNKNOWN = r"Note: whether b and a were tested on the same data is not known.*"
VERDICTS = {
    "equal": ([A | {"correct": 1}, A], "a and b are equal in exact match: 0.5000. Of 2,000 shared examples.*"),
    "three equal": ([A, A, A, B], r"a, b and c are equal in exact match: 0.5000\."),
    "equal, unknown data": ([A, A | {"data": ""}, A, B], f"a, b and c are equal in exact match: 0.5000. {UNKNOWN}"),
    "small p": ([{"exact_match": 1.0, "correct": 2000}, {"exact_match": 0.0}], r".*\(sign test: p < 0\.001\).*"),
    "one checkpoint": ([A | {"checkpoint": "a.ckpt"}] * 2, ""),
    "tested again": (
        [*[A | {"checkpoint": "a.ckpt"}] * 2, B | {"checkpoint": "b.ckpt"}],
        "a has the best exact match: 0.5000, 0.2500 above c.*",
    ),
    "different data": ([A, B | {"data": "y"}], "The runs are not compared: .* must be tested on the same data, but.*"),
    "unknown data": ([A, B | {"data": ""}], f"a has the best exact match.*{UNKNOWN}"),
    "characters": (
        [CHARACTERS | {"loss_per_character": 1.1417}, SUBWORDS | {"loss_per_character": 0.7356}],
        "b has the best loss per character: 0.7356, 0.4061 below a.*",
    ),
    "tokens": ([CHARACTERS, SUBWORDS], "The runs are not compared: the metric must not be per token.*"),
    "seeds": ([A, B | {"data": "of seed 2", "seed": 2}], ""),
    "nan": ([NAN, B, A], "c has the best exact match: 0.5000, 0.2500 above b.*"),
    "one value": ([NAN, B], ""),
}
"""Runs, named a, b and so on, and a regular expression of their verdict."""


@pytest.mark.parametrize(("runs", "expected"), VERDICTS.values(), ids=VERDICTS)
def test_verdict(runs, expected, tmp_path):
    pages = [page_of(tmp_path / name, **run) for name, run in zip("abcd", runs, strict=False)]
    assert re.fullmatch(expected, compare_pages(pages)["verdict"])


def page_of(folder, data="x", tokenizer="x", seed=1, correct=0, checkpoint=None, **metrics):
    """Write a run, of whose 2,000 predictions a number is right, and return its page."""
    run = records.write_run(
        folder,
        config={"seed_everything": seed, "width": folder.name if seed == 1 else "a"},
        summary={
            "test": metrics,
            "higher_is_better": {metric: metric == "exact_match" for metric in metrics},
            "token_metrics": ["loss"],
            "seed": seed,
        },
        start={"data_fingerprint": {"test": data}, "tokenizer_fingerprint": tokenizer},
        predictions=[{"source": str(number), "correct": number < correct} for number in range(2000)],
    )
    return RunPage(folder.name, run, checkpoint and Path(checkpoint))


def page(name, **content):
    """Return the content of the page for a run without files."""
    return RunPage(name, Run(Path(name)), **content)


def category(name, split, exact_match, pairs):
    return {"category": name, "split": split, "exact match": exact_match, "loss": "1.0", "pairs": pairs}


def test_the_loss_is_the_first_curve():
    runs = [page("a", curves={"val/bleu": [], "val/loss": []}), page("b", curves={"val/accuracy": [], "val/loss": []})]
    assert _by_interest(runs, {"val/accuracy", "val/bleu", "val/loss"})[0] == "val/loss"
    assert _by_interest(runs[:1], {"val/bleu", "val/loss"}) == ["val/loss", "val/bleu"]


@pytest.mark.parametrize("number", [2, 2 * len(PALETTE) + 1])
def test_chart_marks_are_distinct(number):
    import vl_convert

    runs = [page(f"run_{n}", curves={"val/loss": [(1, n), (2, n)]}) for n in range(number)]
    (chart,) = draw_charts(runs)
    paths = re.findall("<path[^>]*>", vl_convert.vegalite_to_svg(chart["spec"] | {"width": 400}))
    marks = [path for path in paths if 'aria-roledescription="line mark"' in path]
    symbols = [path for path in paths if "aria-" not in path and 'stroke-width="1.5"' in path]
    for shown in (marks, symbols):
        styles = {tuple(re.findall(' (stroke|stroke-dasharray)="(.*?)"', path)) for path in shown}
        assert len(styles) == len(shown) == number


def test_runs_of_a_group_have_one_color():
    import vl_convert

    runs = [page(f"run_{n}", group="ab"[n // 2], curves={"val/loss": [(1, n), (2, n)]}) for n in range(4)]
    (chart,) = draw_charts(runs)
    svg = vl_convert.vegalite_to_svg(chart["spec"] | {"width": 400})
    lines = [path for path in re.findall("<path[^>]*>", svg) if 'aria-roledescription="line mark"' in path]
    assert Counter(re.search(' stroke="(.*?)"', line)[1] for line in lines) == dict.fromkeys(PALETTE[:2], 2)


def test_menus_of_one_option_and_charts_of_one_point_vanish():
    run = page("a", curves={"val/loss": [(1, 2.0)], "val/heads/a/head_0/induction": [(1, 0.1), (2, 0.2)]})
    (chart,) = draw_charts([run])
    assert chart["id"] == "head-scores"
    assert not any("bind" in each for each in chart["spec"]["params"])


def test_scores_of_heads_over_the_training():
    """They have a chart of their own, with one line for each head."""
    curves = {f"val/heads/layers.{n}.self_attention/head_{n}/induction": [(1, 0.1), (2, 0.1 + n)] for n in range(2)}
    run = page("a", curves=curves | {"val/loss": [(1, 2.0), (2, 1.0)]})
    charts = {chart["id"]: chart for chart in draw_charts([run])}
    assert charts.keys() == {"curves-0", "head-scores"}
    assert charts["curves-0"]["title"] == "val/loss"
    assert [row[2:] for row in charts["head-scores"]["rows"]] == [
        ["layers.0.self_attention", "0", "0.1"],
        ["layers.1.self_attention", "1", "1.1"],
    ]


def lengths_of(*runs):
    """Return the chart of lengths, and the ticks of its x axis."""
    (chart,) = (chart for chart in draw_charts(runs) if chart["id"] == "lengths")
    return chart, chart["spec"]["layer"][0]["encoding"]["x"]["axis"]["values"]


@pytest.mark.parametrize(
    ("lengths", "ticks"),
    [([9, 10], [9, 10]), ([20, 21, 22], [20, 21, 22]), (range(1, 15), [1, 2, 3, 5, 8, 12])],
)
def test_length_ticks(lengths, ticks):
    run = page("a", categories=[category(f"{n:02} symbols", "test", 1.0, 1) for n in lengths])
    assert lengths_of(run)[1] == ticks


def test_exact_match_by_length():
    categories = [category("140 symbols", "x10", 0.25, 8), category("09 symbols", "test", 1.0, 5)]
    categories += [category("28 symbols", "x2", 0.5, 6), category("28 symbols", "other", 1.0, 2)]
    run = page("a", categories=categories)
    chart, ticks = lengths_of(run)
    points = [(point["symbols"], point["exact match"], point["pairs"]) for point in chart["spec"]["data"]["values"]]
    assert points == [(9, 1.0, 5), (28, 0.625, 8), (140, 0.25, 8)]
    assert chart["rows"][0] == ["a", 9, "1", 5]
    assert ticks == [9, 28, 140]
    other = page("b", categories=[category("long", "test", 1.0, 3)])
    assert "lengths" not in {chart["id"] for chart in draw_charts([run, other])}


@pytest.mark.parametrize("lengths", [[1, 2], [3, 3, 3, 3, 3, 9], range(1, 40), [5] * 100 + [6, 7, 40]])
def test_every_source_is_in_one_bin_of_lengths(lengths):
    run = page("a", lengths=[(length, length % 3 > 0) for length in lengths])
    (chart,) = draw_charts([run])
    assert (chart["id"], len(chart["rows"]) <= BINS) == ("lengths", True)
    ranges = [[*map(int, row[1].split("\N{EN DASH}"))] for row in chart["rows"]]
    assert ranges == sorted(ranges)
    for (_, _, exact_match, pairs), bounds in zip(chart["rows"], ranges, strict=True):
        binned = [length for length in lengths if bounds[0] <= length <= bounds[-1]]
        assert pairs == len(binned) > 0
        assert float(exact_match) == pytest.approx(sum(length % 3 > 0 for length in binned) / pairs, abs=1e-4)
    assert sum(row[-1] for row in chart["rows"]) == len(lengths)


def test_sources_of_one_length_have_no_chart():
    assert draw_charts([page("a", lengths=[(3, True)] * 9)]) == []


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (119, "119 s"), (125, "2 min 5 s"), (7_100, "118 min 20 s"), (7_500, "2 h 5 min")],
)
def test_format_duration(seconds, text):
    assert format_duration(seconds) == text


def test_own_inputs(two_runs, reported):
    texts = ["3 1 2", "2"]
    page, data = reported(two_runs[1], "--input", texts[0], "--input", texts[1])
    (run,) = data["runs"]
    name = run["name"].replace("/", "/<wbr>")
    for text, prediction in zip(texts, load(two_runs[1] / "checkpoints/best.ckpt").predict(texts), strict=True):
        assert f'<th scope="row">{name}</th><td>{text}</td><td>{prediction.text}</td>' in page
    assert [example["title"].startswith("your input: ") for example in run["attention"][:3]] == [True, True, False]
    with pytest.raises(UserError, match=r"--input must be a text for which a run has an output: .*x"):
        reported(two_runs[1], "--input", "9 x")


def test_unreadable_inputs_are_noted(two_runs, copied, reported):
    without = copied(two_runs[1])
    shutil.rmtree(without / "checkpoints")
    (without / "summary.json").unlink()
    page, _ = reported(two_runs[1], without, "--input", "2", "--input", "9 x")
    assert page.count("<td>no output: ") == 3
    assert page.count("<td>no output: no checkpoint can be loaded</td>") == 2
    assert re.search("<td>9 x</td><td>no output: .*x.*</td>", page)


def test_attention_of_later_test(two_runs, copied, reported):
    test, checkpoint = copied(two_runs[1], "test_0"), str(two_runs[1] / "checkpoints/best.ckpt")
    shutil.rmtree(test / "checkpoints")
    summary = json.loads((test / "summary.json").read_text())
    (test / "summary.json").write_text(json.dumps(summary | {"checkpoint": checkpoint}))
    page, data = reported(test, two_runs[1])
    of_test, of_run = data["runs"]
    assert of_test["attention"] == of_run["attention"] != []
    assert table_rows(page, "Table of runs")["tested checkpoint"] == [checkpoint, ""]
    assert "equal in exact match" not in page


@pytest.mark.browser
def test_axis_labels_are_whole_steps(two_runs, tmp_path, browser):
    short = tmp_path / "short"
    shutil.copytree(two_runs[1], short)
    (short / "metrics.csv").write_text("step,val/loss\n1,2.5\n3,1.5\n")
    assert report([str(short), "--output", str(tmp_path / "page.html")]) == 0
    open_page(browser, tmp_path / "page.html")
    script = "return [...document.querySelectorAll('#curves-0 .role-axis-label text')].map(label => label.textContent)"
    labels = [label for label in browser.execute_script(script) if label]
    assert labels[:3] == ["2", "3", "4"]  # metrics.csv counts steps from 0


def test_confusion_matrix(tmp_path_factory, reported):
    run = trained_run("reviews_classifier", tmp_path_factory)
    (spec,) = (chart["spec"] for chart in reported(run)[1]["charts"] if chart["id"] == "confusion")
    counts = {(row["true"], row["predicted"]): row["count"] for row in spec["data"]["values"]}
    expected = Counter((line["target"], line["prediction"]) for line in read_predictions(run))
    assert counts == {pair: expected[pair] for pair in itertools.product(("neg", "pos"), repeat=2)}


def test_output_folder_and_overwrite(two_runs, copied):
    run = copied(two_runs[0])
    shutil.rmtree(run / "checkpoints")  # to draw no attention
    for number, end in enumerate(("", "/")):
        pages = run / f"pages_{number}"
        pages.mkdir()
        assert report([str(run), "--output", f"{pages}{end}"]) == 0
        page = pages / "report.html"
        page.write_text("mine")
        with pytest.raises(UserError, match=r"--output must be a new file, but '.*report.html' exists; .* --overwrite"):
            report([str(run), "--output", str(pages)])
        assert page.read_text() == "mine"
    assert report([str(run), "--output", str(page), "--overwrite"]) == 0
    assert page.read_text() != "mine"
