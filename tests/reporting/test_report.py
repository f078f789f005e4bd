"""Reports show the files of their runs, and work in a browser without a network."""

from __future__ import annotations

import base64
import itertools
import json
import math
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
import yaml

from lightning_tfm.commands.report import MAX_PAGE_SIZE, report
from lightning_tfm.data import Pair
from lightning_tfm.errors import UserError
from lightning_tfm.inference.loading import load
from lightning_tfm.plots.style import PALETTE
from lightning_tfm.reporting import collect
from lightning_tfm.reporting.charts import _by_interest, draw_charts
from lightning_tfm.reporting.collect import RunPage
from lightning_tfm.reporting.verdict import verdict
from lightning_tfm.runs.record import Run
from lightning_tfm.system.terminal import format_duration
from support.experiments import folder, trained_run
from support.pages import assert_fits_every_screen, open_page
from support.records import write_run

MARKUP = "<script>document.title='broken'</script><b>&amp;</b>"


@pytest.fixture(scope="module")
def two_runs(reference, tmp_path_factory) -> list[Path]:
    """Train two models; the first one has a prediction with markup."""
    folders = []
    for model in ("transformer", "gpt"):
        cwd = tmp_path_factory.mktemp("two_runs") / model
        shutil.copytree(reference(model), cwd)
        folders.append(folder(cwd, model))
    path = folders[0] / "predictions.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    with_markup = lines[0] | {"prediction": MARKUP, "correct": False, "nll": 1e6, "category": MARKUP}
    right = lines[1] | {
        "prediction": lines[1]["target"],
        "correct": True,
        "nll": 1e5,
    }  # its attention shows the gold one
    path.write_text("".join(json.dumps(line) + "\n" for line in [with_markup, right, *lines[2:]]))
    return folders


@pytest.fixture(scope="module")
def html(two_runs, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    assert report([*map(str, two_runs), "--output", str(path)]) == 0
    return path


def embedded(html: Path) -> dict:
    return json.loads(re.search(r'id="data">(.*?)</script>', html.read_text(), re.DOTALL)[1])


def charted(html: Path, id: str) -> list[dict]:
    """Return the data of a chart."""
    (spec,) = (chart["spec"] for chart in embedded(html)["charts"] if chart["id"] == id)
    return spec["data"]["values"]


def test_a_report_is_one_small_self_contained_file(html):
    text = html.read_text()
    assert len(text.encode()) <= MAX_PAGE_SIZE <= 5_000_000
    loads = []

    class Tags(HTMLParser):
        def handle_starttag(self, tag, attributes):
            loads.extend(value for name, value in attributes if name in ("src", "href"))

    Tags().feed(text)
    assert loads == ["data:,"]
    assert "@import" not in text
    assert MARKUP not in text
    assert text.count("</script>") == 3


def test_a_report_shows_the_files_of_its_runs(html, two_runs):
    runs = embedded(html)["runs"]
    assert len(runs) == 2
    for shown, left in zip(runs, two_runs, strict=True):
        assert shown["config"] == (left / "config.yaml").read_text()
        summary = json.loads((left / "summary.json").read_text())
        assert shown["facts"]["test/exact_match"] == f"{summary['test']['exact_match']:.4f}"
        lines = [json.loads(line) for line in (left / "predictions.jsonl").read_text().splitlines()]
        assert shown["tested"] == len(lines)
        assert shown["wrong"] == sum(not line["correct"] for line in lines)
        losses = [line["nll"] for line in shown["predictions"]]
        assert losses == sorted(losses, reverse=True)
        assert losses[0] == max(line["nll"] for line in lines)
        bars = [bar for bar in charted(html, "categories") if bar["run"] == shown["name"]]
        assert bars
        for bar in bars:
            of_kind = [line for line in lines if (line["split"], line["category"]) == (bar["split"], bar["category"])]
            assert bar["pairs"] == len(of_kind)
            assert bar["exact match"] == pytest.approx(sum(line["correct"] for line in of_kind) / len(of_kind))
            assert bar["loss"] == f"{sum(line['nll'] for line in of_kind) / len(of_kind):.4f}"
        assert shown["attention"]
        module = load(left / "checkpoints/best.ckpt")
        for example in shown["attention"]:
            found = {
                attention_map.layer: attention_map.cropped()
                for attention_map in module.attention(Pair(example["source"], example["prediction"])._asdict())
            }
            assert {layer["name"] for layer in example["layers"]} == set(found)
            for layer in example["layers"]:
                weights = torch.tensor(list(base64.b64decode(layer["weights"]))) / 255
                torch.testing.assert_close(weights, found[layer["name"]].weights.flatten(), atol=1 / 255, rtol=0)


def test_differing_settings_are_listed(html, two_runs):
    configs = [yaml.safe_load((left / "config.yaml").read_text()) for left in two_runs]
    differences = {line["setting"]: line["values"] for line in embedded(html)["differences"]}
    classes = [json.dumps(config["model"]["init_args"]["network"]["class_path"]) for config in configs]
    assert differences["model.init_args.network.class_path"] == classes
    assert "seed_everything" not in differences


def test_unknown_versions_and_test_sets_can_be_reported(tmp_path):
    prediction = {"category": "a"}
    run = write_run(tmp_path, start={"versions": {}}, summary={}, predictions=[prediction])
    path = tmp_path / "predictions.jsonl"
    path.write_text(path.read_text().replace('"split": "test", ', ""))
    page = collect.collect_run(run.folder, "new", 10, [])
    assert (page.facts["torch"], page.facts["lightning_tfm"][:7]) == ("unknown", "unknown")
    assert [(each["split"], each["category"]) for each in page.categories] == [("test", "a")]


def test_an_unfinished_run_can_be_reported(two_runs, tmp_path):
    young = tmp_path / "young"
    young.mkdir()
    shutil.copy(two_runs[0] / "config.yaml", young)
    assert report([str(young), "--output", str(tmp_path / "page.html")]) == 0


def test_invalid_paths_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the current folder may have a report.html
    with pytest.raises(UserError, match=r"RUN must be the folder of a run.*'nowhere' does not; try runs/NAME"):
        report(["nowhere"])
    (tmp_path / "config.yaml").write_text("{}")
    with pytest.raises(UserError, match="RUN must name each run once"):
        report([str(tmp_path), f"{tmp_path}/"])
    for missing in ("no/page.html", "no/"):
        with pytest.raises(UserError, match=r"--output must lie in a folder that exists, but '.*no' does not; create"):
            report([str(tmp_path), "--output", f"{tmp_path}/{missing}"])
    assert not (tmp_path / "no").exists()


def max_weights(browser):
    """Return the weights, relative to the largest one, that are shown in the map of a head."""
    script = "return [...document.querySelectorAll('#map td')].map(cell => cell.style.getPropertyValue('--w'))"
    return [float(weight) for weight in browser.execute_script(script) if weight]


def hover(browser, element):
    from selenium.webdriver import ActionChains

    ActionChains(browser).move_to_element(element).perform()


@pytest.mark.browser
def test_a_report_works_in_a_browser(html, browser):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.ui import Select

    open_page(browser, html)
    assert browser.title != "broken"
    charts = browser.find_elements(By.CSS_SELECTOR, ".chart svg")
    assert len(charts) == 3
    assert all(chart.find_elements(By.CSS_SELECTOR, "path") for chart in charts)
    hover(browser, browser.find_elements(By.CSS_SELECTOR, "#curves .mark-symbol path")[0])
    assert "value" in browser.find_element(By.ID, "vg-tooltip-element").text

    rows = browser.find_elements(By.CSS_SELECTOR, "#p-rows tr")
    assert MARKUP in rows[0].text
    search = browser.find_element(By.ID, "p-search")
    search.send_keys("broken")
    assert len(browser.find_elements(By.CSS_SELECTOR, "#p-rows tr")) == 1
    assert browser.find_element(By.ID, "p-count").text.startswith("1 of")
    search.clear()
    search.send_keys(Keys.SPACE, Keys.BACKSPACE)
    Select(browser.find_element(By.ID, "p-which")).select_by_value("correct")
    assert all("✓" in row.text for row in browser.find_elements(By.CSS_SELECTOR, "#p-rows tr"))

    examples = embedded(html)["runs"][0]["attention"]
    right = next(index for index, example in enumerate(examples) if any(layer["gold"] for layer in example["layers"]))
    Select(browser.find_element(By.ID, "a-example")).select_by_index(right)
    buttons = browser.find_elements(By.CSS_SELECTOR, "#a-queries button")
    description = browser.find_element(By.ID, "a-status")
    buttons[0].send_keys(Keys.ARROW_RIGHT)
    second = description.text
    assert f"“{buttons[1].text}” attends to" in second
    hover(browser, buttons[0])
    assert description.text.startswith(f"“{buttons[0].text}” attends to")
    weights = [
        float(browser.execute_script("return arguments[0].style.getPropertyValue('--w')", span))
        for span in browser.find_elements(By.CSS_SELECTOR, "#a-keys span")
    ]
    scale = float(browser.execute_script("return document.getElementById('a-view').dataset.scale"))
    assert sum(weights) * scale == pytest.approx(1, abs=0.05)
    assert max(max_weights(browser)) == pytest.approx(1, abs=1e-3), "the strongest color is that of the largest weight"
    assert browser.find_elements(By.CSS_SELECTOR, "#map .gold")
    assert [line for line in browser.get_log("browser") if line["level"] in ("SEVERE", "WARNING")] == []


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


def test_runs_with_several_seeds_are_compared(seeded, tmp_path):
    path = tmp_path / "page.html"
    assert report([*map(str, seeded), "--output", str(path)]) == 0
    page = path.read_text()
    assert page.count("Comparison over seeds") == 1
    header, _, rest = page.partition("</header>")
    assert "Too few seeds: with 2 seeds per group, p is at least 0.5" in header
    assert "Too few seeds: with 2 seeds per group, p is at least 0.5" in rest
    assert "needs several seeds" not in page
    assert "Difference from copy_transformer" in page
    assert report([str(seeded[0]), str(seeded[2]), "--output", str(tmp_path / "single.html")]) == 0
    assert "Comparison over seeds" not in (tmp_path / "single.html").read_text()


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
@pytest.mark.parametrize("name", ["one", "two", "seeds", "five"])
def test_a_report_fits_every_screen_and_has_no_violation_of_accessibility(name, pages, browser):
    assert_fits_every_screen(pages / f"{name}.html", browser)


@pytest.mark.browser
def test_a_report_has_a_dark_mode(html, browser):
    colors = {}
    for scheme in ("light", "dark"):
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        open_page(browser, html)
        colors[scheme] = [
            browser.execute_script("return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]", *of)
            for of in (("body", "backgroundColor"), ("body", "color"), ("#a-keys span", "backgroundColor"))
        ]
        labels = browser.execute_script("return getComputedStyle(document.querySelector('.chart svg text')).fill")
        colors[scheme].append(labels)
    for light, dark in zip(*colors.values(), strict=True):
        assert light != dark


@pytest.mark.browser
def test_a_report_supports_keyboards_and_screen_readers(html, browser):
    from selenium.webdriver.common.by import By

    open_page(browser, html)
    controls = browser.find_elements(By.CSS_SELECTOR, "select, input, button, summary, [tabindex='0']")
    shown = [control for control in controls if control.is_displayed()]
    assert len(shown) > 15
    assert [control.get_attribute("outerHTML") for control in shown if not control.accessible_name.strip()] == []
    for chart in browser.find_elements(By.CSS_SELECTOR, ".chart svg"):
        assert chart.get_attribute("aria-label") or chart.find_element(By.XPATH, "..").get_attribute("aria-label")
    assert browser.find_element(By.TAG_NAME, "html").get_attribute("lang") == "en"


@pytest.mark.browser
def test_a_page_of_500_examples_opens(two_runs, tmp_path, browser):
    """The median time of five attempts until it is drawn is printed."""
    lines = (two_runs[1] / "predictions.jsonl").read_text().splitlines()
    many = tmp_path / "many"
    shutil.copytree(two_runs[1], many)
    (many / "predictions.jsonl").write_text("\n".join((lines * 600)[:600]) + "\n")
    path = tmp_path / "page.html"
    assert report([str(many), "--output", str(path)]) == 0
    shown = []
    for _ in range(5):
        open_page(browser, path)
        assert browser.execute_script("return document.querySelectorAll('#p-rows tr').length") == 500
        shown.append(int(browser.execute_script("return document.documentElement.dataset.drawn")))
    print(f"\nopened and drawn in {sorted(shown)[2]} ms")


@pytest.mark.run
def test_an_oversized_page_shows_fewer_predictions(two_runs, tmp_path, monkeypatch, capsys):
    whole, cut, run = tmp_path / "whole.html", tmp_path / "cut.html", str(two_runs[0])
    assert report([run, "--output", str(whole)]) == 0
    monkeypatch.setattr("lightning_tfm.commands.report.MAX_PAGE_SIZE", whole.stat().st_size - 1)
    assert report([run, "--output", str(cut)]) == 0
    assert cut.stat().st_size < whole.stat().st_size
    before, after = (embedded(path)["runs"][0]["predictions"] for path in (whole, cut))
    assert after == before[: len(before) // 2], "the largest losses are kept"
    assert "it shows 1/2 of the predictions" in capsys.readouterr().err
    monkeypatch.setattr("lightning_tfm.commands.report.MAX_PAGE_SIZE", 1000)
    with pytest.raises(UserError, match="the page must be below"):
        report([run, "--output", str(tmp_path / "none.html")])


def test_unicode_line_separators_are_preserved(two_runs, tmp_path):
    odd = tmp_path / "odd"
    shutil.copytree(two_runs[0], odd)
    lines = [json.loads(line) for line in (odd / "predictions.jsonl").read_text().split("\n")[:-1]]
    lines[0]["source"] = "before\x85\u2028after"
    lines[0]["nll"] = 1e7
    (odd / "predictions.jsonl").write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    shutil.rmtree(odd / "checkpoints")
    assert report([str(odd), "--output", str(tmp_path / "odd.html")]) == 0
    assert embedded(tmp_path / "odd.html")["runs"][0]["predictions"][0]["source"] == "before\x85\u2028after"


def test_non_finite_values_are_written_as_null(two_runs, tmp_path):
    """JSON cannot represent such numbers."""
    odd = tmp_path / "odd"
    shutil.copytree(two_runs[1], odd)
    lines = [json.loads(line) for line in (odd / "predictions.jsonl").read_text().splitlines()]
    lines[0]["nll"] = float("inf")
    (odd / "predictions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    metrics = (odd / "metrics.csv").read_text().splitlines()
    place = metrics[0].split(",").index("val/loss")
    rows = [line.split(",") for line in metrics[1:]]
    next(row for row in rows if row[place])[place] = "nan"
    (odd / "metrics.csv").write_text("\n".join([metrics[0], *map(",".join, rows)]) + "\n")
    path = tmp_path / "page.html"
    assert report([str(odd), "--output", str(path)]) == 0
    (shown,) = embedded(path)["runs"]
    assert shown["predictions"][0]["nll"] is None
    assert "1 value of val/loss not finite" in path.read_text()
    assert "NaN" not in json.dumps(embedded(path))


def test_a_run_without_a_valid_checkpoint_is_shown_without_attention(two_runs, tmp_path, capsys):
    odd = tmp_path / "odd"
    shutil.copytree(two_runs[1], odd)
    (odd / "checkpoints/best.ckpt").write_bytes(b"none")
    path = tmp_path / "page.html"
    assert report([str(odd), "--output", str(path)]) == 0
    assert embedded(path)["runs"][0]["attention"] == []
    assert "cannot show the attention of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("config.yaml", "a: 1\nb: {\n", "RUN must name a valid YAML file, but line 3 of '.*/config.yaml' is not: "),
        ("predictions.jsonl", "{broken\n", "'.*/predictions.jsonl' .* is damaged"),
        ("summary.json", "{}", "'.*/summary.json' .* is damaged: steps"),
        ("provenance.json", '[{"hardware": {}}]', "'.*/provenance.json' .* is damaged"),
    ],
)
def test_a_damaged_file_of_a_run_is_named_in_the_error(name, text, message, two_runs, tmp_path):
    odd = tmp_path / "odd"
    shutil.copytree(two_runs[0], odd)
    (odd / name).write_text(text)
    with pytest.raises(UserError, match=message):
        report([str(odd), "--output", str(tmp_path / "page.html")])


@pytest.mark.parametrize("name", ["source", "prediction"])
def test_an_example_outside_the_vocabulary_is_shown_without_attention(name, two_runs, tmp_path, capsys):
    odd = tmp_path / "odd"
    shutil.copytree(two_runs[1], odd)
    lines = [json.loads(line) for line in (odd / "predictions.jsonl").read_text().splitlines()]
    lines[3] |= {name: "x", "nll": 1e6, "correct": False}
    (odd / "predictions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert report([str(odd), "--output", str(tmp_path / "page.html")]) == 0
    (run,) = embedded(tmp_path / "page.html")["runs"]
    assert run["predictions"][0][name] == "x"
    assert len(run["attention"]) == 11
    assert "cannot show the attention of an example: the vocabulary has no" in capsys.readouterr().err


def test_damaged_rows_of_metrics_csv_are_skipped(tmp_path, capsys):
    (tmp_path / "metrics.csv").write_text("step,val/loss\n1,2.5\n2,high\n3\n4,1.5\n")
    assert collect._curves(Run(tmp_path), 10)[0] == {"val/loss": [(2, 2.5), (5, 1.5)]}
    assert "skipping 2 damaged rows of " in capsys.readouterr().err


def test_the_best_run_is_named(two_runs, tmp_path):
    folders = []
    for number, (run, wrong) in enumerate(zip(two_runs, (4, 1), strict=True)):
        folders.append(tmp_path / f"run_{number}")
        shutil.copytree(run, folders[-1])
        lines = [{"split": "test", "source": str(n % 5), "target": "1", "prediction": "1"} for n in range(20)]
        lines = [
            line | {"correct": n >= wrong, "nll": 1.0, "category": None, "alignment": None}
            for n, line in enumerate(lines)
        ]
        (folders[-1] / "predictions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        summary = json.loads((run / "summary.json").read_text())
        summary["test"]["exact_match"] = 1 - wrong / 20
        (folders[-1] / "summary.json").write_text(json.dumps(summary))
    assert report([*map(str, folders), "--output", str(tmp_path / "page.html")]) == 0
    text = (tmp_path / "page.html").read_text()
    assert "exact match 0.8000 on 20 test examples" in text
    names = [f"{tmp_path.name}/run_{number}" for number in range(2)]
    assert f"{names[1]} has the best exact match: 0.9500, 0.1500 above {names[0]}." in text
    p = f"{2 * 0.5**3:.2g}"  # 3 of 3 are better
    assert (
        f"Of 20 shared examples, 3 are correct only in {names[1]} and 0 only in {names[0]} (sign test: p = {p})" in text
    )


@pytest.fixture
def run_with_result(tmp_path):
    """Return a function that writes a run, of whose 2,000 predictions a share is right, and returns its page."""

    def run_with_result(
        name, value, checkpoint=None, data="x", tokenizer="x", seed=1, correct=0, settings=None, **losses
    ):
        metrics = losses or {"exact_match": value}
        run = write_run(
            tmp_path / name,
            config={"seed_everything": seed, "name": name if seed == 1 else "a"},
            summary={
                "test": metrics,
                "higher_is_better": {metric: metric == "exact_match" for metric in metrics},
                "token_metrics": ["loss"],
                "seed": seed,
            },
            start={"data_fingerprint": {"test": data}, "tokenizer_fingerprint": tokenizer},
            predictions=[{"source": str(number), "correct": number < correct} for number in range(2000)],
        )
        return RunPage(name, run, checkpoint and Path(checkpoint))

    return run_with_result


def test_all_runs_that_are_equal_are_named(run_with_result):
    runs = [
        run_with_result("a", 0.5, correct=1),
        run_with_result("b", 0.5),
        run_with_result("c", 0.5),
        run_with_result("d", 0.25),
    ]
    assert verdict(runs[:2]).startswith("a and b are equal in exact match: 0.5000. Of 2,000 shared examples")
    assert verdict(runs) == "a, b and c are equal in exact match: 0.5000."
    runs[1] = run_with_result("b", 0.5, data="")
    assert re.fullmatch("a, b and c are equal in exact match: 0.5000. Note: whether b and a .* data.", verdict(runs))


def test_a_tiny_p_value_is_not_printed_as_zero(run_with_result):
    assert "(sign test: p < 0.001)" in verdict([run_with_result("a", 1.0, correct=2000), run_with_result("b", 0.0)])


def test_a_checkpoint_is_not_compared_with_itself(run_with_result):
    runs = [
        run_with_result("a", 0.5, "a.ckpt"),
        run_with_result("test_0", 0.5, "a.ckpt"),
        run_with_result("b", 0.25, "b.ckpt"),
    ]
    assert verdict(runs[:2]) == ""
    assert verdict(runs).startswith("a has the best exact match: 0.5000, 0.2500 above b.")


def test_runs_tested_on_different_data_are_not_ranked(run_with_result):
    runs = [run_with_result("a", 0.5), run_with_result("b", 0.25, data="y")]
    assert verdict(runs).startswith("The runs are not compared: the groups must be tested on the same data, but")
    unknown = verdict([run_with_result("a", 0.5), run_with_result("b", 0.25, data="")])
    assert unknown.startswith("a has the best exact match")
    assert "Note: whether b and a were tested on the same data is not known" in unknown


def test_runs_with_different_tokenizers_are_ranked_by_character(run_with_result):
    runs = [
        run_with_result("a", 1.5, loss=1.1417, loss_per_character=1.1417),
        run_with_result("b", 2.5, loss=2.5, loss_per_character=0.7356, tokenizer="y"),
    ]
    assert verdict(runs).startswith("b has the best loss per character: 0.7356, 0.4061 below a.")
    runs = [run_with_result("a", 1.5, loss=1.5), run_with_result("b", 2.5, loss=2.5, tokenizer="y")]
    assert verdict(runs).startswith("The runs are not compared: the metric must not be per token")


def test_runs_that_differ_in_the_seed_only_are_not_ranked(run_with_result):
    runs = [run_with_result("a", 0.5), run_with_result("b", 0.25, data="of seed 2", seed=2)]
    assert verdict(runs) == ""


def test_a_result_that_is_nan_is_not_the_best(run_with_result):
    runs = [run_with_result("a", math.nan), run_with_result("b", 0.25), run_with_result("c", 0.5)]
    assert verdict(runs).startswith("c has the best exact match: 0.5000, 0.2500 above b.")
    assert verdict(runs[:2]) == ""


def test_files_of_equal_names_are_different_tasks(two_runs, tmp_path):
    """Distinguished by the fingerprint of the test data."""
    folders = []
    for number, run in enumerate(two_runs):
        folders.append(tmp_path / f"run_{number}")
        shutil.copytree(run, folders[-1])
        config = yaml.safe_load((run / "config.yaml").read_text())
        config["data"]["init_args"]["test"] = f"{number}/input.txt"
        config["model"]["class_path"] = "Task"
        (folders[-1] / "config.yaml").write_text(yaml.safe_dump(config))
    arguments = [*map(str, folders), "--overwrite", "--output", str(tmp_path / "page.html")]
    assert report(arguments) == 0
    assert (tmp_path / "page.html").read_text().count("has the best") == 1
    starts = json.loads((folders[1] / "provenance.json").read_text())
    starts[-1]["data_fingerprint"]["test"] = "other"
    (folders[1] / "provenance.json").write_text(json.dumps(starts))
    assert report(arguments) == 0
    assert "has the best" not in (tmp_path / "page.html").read_text()


def page(name, **content):
    """Return the content of the page for a run without files."""
    return RunPage(name, Run(Path(name)), **content)


def test_the_first_metric_of_a_menu_is_one_that_all_runs_have():
    runs = [page("a", curves={"val/bleu": [], "val/loss": []}), page("b", curves={"val/accuracy": [], "val/loss": []})]
    assert _by_interest(runs, {"val/accuracy", "val/bleu", "val/loss"})[0] == "val/loss"
    assert _by_interest(runs[:1], {"val/bleu", "val/loss"})[0] == "val/bleu"


@pytest.mark.parametrize("number", [2, 2 * len(PALETTE) + 1])
def test_all_runs_of_a_chart_are_distinguishable(number):
    import vl_convert

    category = {"split": "test", "category": "any", "exact match": 0.5, "loss": "1.0", "pairs": 2}
    runs = [page(f"run_{n}", curves={"val/loss": [(1, n), (2, n)]}, categories=[category]) for n in range(number)]
    for chart, mark in zip(draw_charts(runs), ("line mark", "bar"), strict=True):
        paths = re.findall("<path[^>]*>", vl_convert.vegalite_to_svg(chart["spec"] | {"width": 400}))
        marks = [path for path in paths if f'aria-roledescription="{mark}"' in path]
        symbols = [path for path in paths if "aria-" not in path and 'stroke-width="1.5"' in path]
        for shown in (marks, symbols):
            styles = {tuple(re.findall(' (fill|stroke|stroke-dasharray)="(.*?)"', path)) for path in shown}
            assert len(styles) == len(shown) == number


def axis_values(chart):
    """Return the ticks of the x axis of a chart with layers."""
    return chart["spec"]["layer"][0]["encoding"]["x"]["axis"]["values"]


@pytest.mark.parametrize(
    ("lengths", "ticks"),
    [([9, 10], [9, 10]), ([20, 21, 22], [20, 21, 22]), (range(1, 15), [1, 2, 3, 4, 5, 7, 9, 12]), ([5], [5])],
)
def test_ticks_of_lengths_are_lengths(lengths, ticks):
    found = [
        {"category": f"{n:02} symbols", "split": "test", "exact match": 1.0, "loss": "1.0", "pairs": 1} for n in lengths
    ]
    run = page("a", categories=found)
    (chart,) = (chart for chart in draw_charts([run]) if chart["id"] == "lengths")
    assert axis_values(chart) == ticks


def test_exact_match_by_length_is_drawn_over_all_splits():
    def category(name, split, exact_match, pairs):
        return {"category": name, "split": split, "exact match": exact_match, "loss": "1.0", "pairs": pairs}

    found = [category("140 symbols", "x10", 0.25, 8), category("09 symbols", "test", 1.0, 5)]
    found += [category("28 symbols", "x2", 0.5, 6), category("28 symbols", "other", 1.0, 2)]
    run = page("a", categories=found)
    (chart,) = (chart for chart in draw_charts([run]) if chart["id"] == "lengths")
    points = [(point["symbols"], point["exact match"], point["pairs"]) for point in chart["spec"]["data"]["values"]]
    assert points == [(9, 1.0, 5), (28, 0.625, 8), (140, 0.25, 8)]
    assert chart["rows"][0] == ["a", 9, "1", 5]
    assert axis_values(chart) == [9, 28, 140]
    other = page("b", categories=[category("long", "test", 1.0, 3)])
    assert "lengths" not in {chart["id"] for chart in draw_charts([run, other])}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (119, "119 s"), (125, "2 min 5 s"), (7_100, "118 min 20 s"), (7_500, "2 h 5 min")],
)
def test_durations_are_readable(seconds, text):
    assert format_duration(seconds) == text


def test_an_input_is_shown_with_its_output(two_runs, tmp_path):
    path = tmp_path / "page.html"
    assert report([str(two_runs[1]), "--input", "3 1 2", "--input", "2", "--output", str(path)]) == 0
    (run,) = embedded(path)["runs"]
    module = load(two_runs[1] / "checkpoints/best.ckpt")
    outputs = [prediction.text for prediction in module.predict(["3 1 2", "2"])]
    assert run["inputs"] == [
        {"input": text, "output": output, "note": None} for text, output in zip(("3 1 2", "2"), outputs, strict=True)
    ]
    assert [example["title"].startswith("your input: ") for example in run["attention"][:3]] == [True, True, False]
    with pytest.raises(UserError, match=r"--input must be a text for which a run has an output: .*x"):
        report([str(two_runs[1]), "--input", "9 x", "--output", str(tmp_path / "other.html")])


def test_a_run_that_cannot_read_an_input_is_shown_with_the_reason(two_runs, tmp_path):
    without = tmp_path / "without_checkpoint"
    shutil.copytree(two_runs[1], without, ignore=shutil.ignore_patterns("checkpoints"))
    (without / "summary.json").unlink()
    path = tmp_path / "page.html"
    assert report([str(two_runs[1]), str(without), "--input", "2", "--input", "9 x", "--output", str(path)]) == 0
    first, second = ([row["note"] for row in run["inputs"]] for run in embedded(path)["runs"])
    assert first[0] is None
    assert "x" in first[1]
    assert second == ["no checkpoint can be loaded"] * 2


def test_the_attention_of_a_later_test_is_that_of_its_checkpoint(two_runs, tmp_path):
    test = tmp_path / "test_0"
    shutil.copytree(two_runs[1], test, ignore=shutil.ignore_patterns("checkpoints"))
    summary = json.loads((test / "summary.json").read_text())
    (test / "summary.json").write_text(json.dumps(summary | {"checkpoint": str(two_runs[1] / "checkpoints/best.ckpt")}))
    assert report([str(test), str(two_runs[1]), "--output", str(tmp_path / "page.html")]) == 0
    of_test, of_run = embedded(tmp_path / "page.html")["runs"]
    assert of_test["attention"] == of_run["attention"] != []
    assert of_test["facts"]["tested checkpoint"] == str(two_runs[1] / "checkpoints/best.ckpt")
    assert "tested checkpoint" not in of_run["facts"]
    assert "equal in exact match" not in (tmp_path / "page.html").read_text()


@pytest.mark.browser
def test_axes_label_whole_steps_only(two_runs, tmp_path, browser):
    short = tmp_path / "short"
    shutil.copytree(two_runs[1], short)
    (short / "metrics.csv").write_text("step,val/loss\n1,2.5\n3,1.5\n")
    assert report([str(short), "--output", str(tmp_path / "page.html")]) == 0
    open_page(browser, tmp_path / "page.html")
    script = "return [...document.querySelectorAll('#curves .role-axis-label text')].map(label => label.textContent)"
    labels = [label for label in browser.execute_script(script) if label]
    assert labels[:3] == ["2", "3", "4"]  # metrics.csv counts steps from 0


def test_a_confusion_matrix_is_shown(tmp_path_factory, tmp_path):
    run = trained_run("reviews_classifier", tmp_path_factory)
    assert report([str(run), "--output", str(tmp_path / "page.html")]) == 0
    lines = [json.loads(line) for line in (run / "predictions.jsonl").read_text().splitlines()]
    (spec,) = (chart["spec"] for chart in embedded(tmp_path / "page.html")["charts"] if chart["id"] == "confusion")
    counts = {(row["true"], row["predicted"]): row["count"] for row in spec["data"]["values"]}
    assert counts == {
        (true, other): sum((line["target"], line["prediction"]) == (true, other) for line in lines)
        for true in ("neg", "pos")
        for other in ("neg", "pos")
    }


@pytest.mark.parametrize("end", ["", "/"])
def test_the_output_may_be_a_folder_and_is_not_overwritten_unless_requested(end, two_runs, tmp_path):
    assert report([str(two_runs[0]), "--output", f"{tmp_path}{end}"]) == 0
    page = tmp_path / "report.html"
    page.write_text("mine")
    with pytest.raises(UserError, match=r"--output must be a new file, but '.*report.html' exists; .* --overwrite"):
        report([str(two_runs[0]), "--output", str(tmp_path)])
    assert page.read_text() == "mine"
    assert report([str(two_runs[0]), "--output", str(page), "--overwrite"]) == 0
    assert page.read_text() != "mine"
