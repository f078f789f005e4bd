"""Pages of HTML: their data, and how they look in a browser."""

import itertools
import json
import re


def page_data(page):
    """Return the data that are embedded in a page."""
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])


def assert_self_contained(page):
    """Assert that a page loads nothing over a network."""
    elements = re.sub(r"(<script[^>]*>).*?</script>", r"\1", page, flags=re.DOTALL)
    assert not re.search(r'<(script|link|img)\b[^>]+(src|href)="(?!data:)', elements)
    assert "@import" not in page


def open_page(browser, path):
    from selenium.webdriver.support.ui import WebDriverWait

    browser.get(path.as_uri())
    WebDriverWait(browser, 20).until(lambda b: b.execute_script("return document.documentElement.dataset.drawn"))


def assert_fits_every_screen(path, browser):
    """Assert that a page fits screens of 360 to 1,920 pixels, and has no violation of accessibility."""
    from axe_core_python.selenium import Axe

    for width, scheme in itertools.product((360, 768, 1280, 1920), ("light", "dark")):
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        open_page(browser, path)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        script = (
            "return [...document.querySelectorAll('.plot svg')].map(chart => chart.getBoundingClientRect().toJSON())"
        )
        charts = [box for box in browser.execute_script(script) if box["width"]]
        assert charts
        assert all(min(190, 0.5 * width) < box["width"] <= width for box in charts)
        assert max(box["right"] for box in charts) > 0.5 * width, "no half of the page is empty"
        if width not in (360, 1280):  # axe takes seconds, so it checks one narrow and one wide layout
            continue
        found = Axe().run(browser)
        described = [(entry["id"], entry["nodes"][0]["html"][:200]) for entry in found["violations"]]
        assert described == [], (width, scheme, described)
