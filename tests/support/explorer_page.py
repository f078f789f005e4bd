"""The page of the explorer in a browser, with the answers that it shows."""

from urllib.parse import parse_qs, urlencode

import pytest
from selenium.webdriver import ActionChains
from selenium.webdriver.support.ui import WebDriverWait

from lightning_tfm.explore import Changes

SELECT_ALL = "\ue009a\ue000"
"""Ctrl+A, and its end, as keys of WebDriver."""

SETTLED = """
const root = document.querySelector(".explorer");
return Boolean(root?.querySelector(".answers > *, .page > .error")) && root.querySelector("[aria-busy]") === null;
"""


class Page:
    """Page in a browser, with the explorers of its models."""

    def __init__(self, driver, address, explorers):
        self.driver, self.address, self.explorers = driver, address, explorers

    def open(self, **state):
        """Open the page with a state; lists are written as in the address."""
        self.driver.get("about:blank")  # otherwise, only the part of the address after "#" may change
        self.driver.get(f"{self.address}#{urlencode(state)}")
        self.settle()

    def run(self, script, *arguments):
        return self.driver.execute_script(script, *arguments)

    def wait(self, condition):
        """Wait until a function without arguments returns a true value, and return it."""
        return WebDriverWait(self.driver, 60, poll_frequency=0.02).until(lambda _: condition())

    def settle(self):
        """Wait until no question is open."""
        self.wait(lambda: self.run(SETTLED))

    @property
    def state(self):
        """Return the fields in the address, as text."""
        fragment = self.run("return location.hash").removeprefix("#")
        return {name: value for name, (value,) in parse_qs(fragment, keep_blank_values=True).items()}

    def find(self, selector):
        return self.driver.find_element("css selector", selector)

    def click(self, selector):
        self.find(selector).click()
        self.settle()

    def type(self, field, text):
        """Replace the value of the input of a field of the state."""
        self.find(f"[data-key='{field}']").send_keys(SELECT_ALL)
        self.find(f"[data-key='{field}']").send_keys(text)
        self.wait(lambda: self.state.get(field) == text)
        self.settle()

    def select(self, selector, value):
        """Choose an option of a select element."""
        self.find(f"{selector} option[value='{value}']").click()
        self.settle()

    def texts(self, selector):
        """Return the texts of elements."""
        return self.run(
            "return [...document.querySelectorAll(arguments[0])].map((element) => element.textContent)", selector
        )

    def text(self, selector):
        (text,) = self.texts(selector)
        return text

    def labels(self, selector, name="aria-label"):
        """Return an attribute of elements."""
        script = "return [...document.querySelectorAll(arguments[0])].map((one) => one.getAttribute(arguments[1]))"
        return self.run(script, selector, name)

    def keys(self, *keys):
        """Press keys, sent to the element with the focus."""
        ActionChains(self.driver, duration=0).send_keys(*keys).perform()
        self.settle()

    def focus(self, selector):
        self.run("document.querySelector(arguments[0]).focus()", selector)

    def point(self, selector, x=0.5, y=0.5, click=False):
        """Move the pointer to a place in an element, in shares of its width and height, or click there."""
        script = """
        const element = document.querySelector(arguments[0]);
        element.scrollIntoView({ block: "center", inline: "center" });
        const { left, top, width, height } = element.getBoundingClientRect();
        return [left + arguments[1] * width, top + arguments[2] * height];
        """
        left, top = self.run(script, selector, x, y)
        actions = ActionChains(self.driver, duration=0)
        actions.w3c_actions.pointer_action.move_to_location(round(left), round(top))
        if click:
            actions.click()
        actions.perform()
        self.settle()


def visible(symbol):
    return symbol.translate({ord(" "): "␣", ord("\n"): "↵", ord("\t"): "⇥"})


def percent(probability):
    if 0 < probability < 0.0005:
        return "<0.1%"
    return f"{100 * probability:.{int(0 < probability < 0.0995)}f}%"


def number(value, digits=2):
    text = f"{value:.{digits}f}"
    return text.replace("-", "−" if float(text) else "")


def chance(text):
    return float(text.removeprefix("<").removesuffix("%")) / 100


def assert_answer(page, answer, column=1, tolerance=0.0):
    """Assert that the page shows an answer; the tolerance is that of probabilities, 0 for equal texts."""
    column = f".answers .column:nth-child({column})"
    first = sum(step["given"] for step in answer["steps"])
    labels = page.labels(f"{column} .chip")
    shown = [label.partition(": ")[2].removesuffix(", forced").rpartition(", ") for label in labels]
    steps = answer["steps"][first:]
    assert [symbol for symbol, *_ in shown] == [visible(step["symbol"]) for step in steps]
    assert [label.endswith(", forced") for label in labels] == [step["forced"] for step in steps]
    selected = answer["steps"][min(int(page.state.get("step", 0)), len(answer["steps"]) - 1)]
    numbers = [text for *_, text in shown] + page.texts(f"{column} .choice .number")
    probabilities = [step["probability"] for step in steps] + [one["probability"] for one in selected["alternatives"]]
    if tolerance:  # which may change the order of alternatives
        assert [chance(text) for text in numbers] == pytest.approx(probabilities, abs=tolerance)
    else:
        assert numbers == [percent(probability) for probability in probabilities]
        symbols = [visible(other["symbol"]) for other in selected["alternatives"]]
        assert page.texts(f"{column} .choice .symbol") == symbols
    output = [] if first else [answer["output"] or "(empty)"]  # a continuation is shown with its text
    assert page.texts(f"{column} .output") == output


def cell(row, column, rows, columns):
    """Return the place of a cell in a map, in shares of its width and height."""
    return (column + 0.5) / columns, (row + 0.5) / rows


def assert_changes(page, explorer, text, tolerance=0.0):
    """Assert that a page answers a typed text, a forced symbol, heads that are off, and a beam."""
    page.type("text", text)
    first = explorer.answer(text)
    assert_answer(page, first, tolerance=tolerance)
    page.click("[data-key='step 0 1']")
    prefix = [first["steps"][0]["id"], first["steps"][1]["alternatives"][1]["id"]]
    page.click(f"[data-key='choice 0 {prefix[1]}']")
    assert_answer(page, explorer.answer(text, prefix), tolerance=tolerance)
    page.click("[data-key=reset]")
    page.click("[data-key='tab parts']")
    off = []
    for number_off, attention in enumerate(first["attention"]):
        off.append(f"{attention['layer']}.{number_off % len(attention['weights'])}")
        page.click(f".toggle[title='{off[-1]}']")
        assert_answer(page, explorer.answer(text, changes=Changes(off=off)), tolerance=tolerance)
    page.click("[data-key=reset]")
    assert_answer(page, first, tolerance=tolerance)
    page.click("[data-key='tab beam']")
    outputs = explorer.beam(text)["outputs"]
    assert page.texts("[data-panel=beam] tbody button") == [output["text"] or "(empty)" for output in outputs]
    scores = [float(text.replace("−", "-")) for text in page.texts("[data-panel=beam] td.number:nth-child(3)")]
    assert scores == pytest.approx([output["score"] for output in outputs], abs=0.001 + 2 * tolerance)
    page.click("[data-key='output 0 1']")
    assert page.text(".output") == (outputs[1]["text"] or "(empty)")
