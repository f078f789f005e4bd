"""Browsers of Debian, headless."""

import json
import shutil
import socket
import subprocess
import time
from contextlib import contextmanager
from types import SimpleNamespace
from urllib.parse import urlsplit

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
"""Name of the identifier of an element in the protocols of browsers."""


@contextmanager
def chromium(logs=("browser",)):
    """Start Chromium without background networking, with logs of some kinds."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for argument in ("headless=new", "no-sandbox", "disable-gpu", "disable-background-networking"):
        options.add_argument(f"--{argument}")
    options.add_argument("--window-size=1200,900")
    options.set_capability("goog:loggingPrefs", dict.fromkeys(logs, "ALL"))
    driver = webdriver.Chrome(options, Service(shutil.which("chromedriver")))
    try:
        yield driver
    finally:
        driver.quit()


def origin(address):
    """Return the scheme, host and port of an address."""
    return "{0.scheme}://{0.netloc}".format(urlsplit(address))


def requests(driver):
    """Return the origins of the requests since the last call, for a driver with the log "performance"."""
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    sent = [message["params"] for message in messages if message["method"] == "Network.requestWillBeSent"]
    addresses = [each["request"]["url"] for each in sent]
    return {origin(address) for address in addresses if not address.startswith(("data:", "blob:"))}


@contextmanager
def firefox(profile):
    """Start Firefox with a new profile, an empty folder."""
    (profile / "user.js").write_text('user_pref("marionette.port", 0);\n')  # a free one
    command = ["firefox-esr", "--headless", "--marionette", "--no-remote", "--profile", profile]
    port = profile / "MarionetteActivePort"
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not (port.exists() and port.read_text()):
            assert process.poll() is None, "Firefox has ended"
            time.sleep(0.05)
        connection = socket.create_connection(("127.0.0.1", int(port.read_text())), timeout=120)
        with connection, connection.makefile("rb") as messages:
            driver = Firefox(connection, messages)
            yield driver
            driver.send("Marionette:Quit", flags=["eForceQuit"])
        process.wait(60)
    finally:
        process.kill()
        process.wait()


class Firefox:
    """Client of Marionette, the protocol of Firefox, with some methods of Selenium's drivers.

    Selenium needs geckodriver for Firefox, which Debian lacks.
    """

    def __init__(self, connection, messages):
        self.connection, self.messages, self.number = connection, messages, 0
        self._receive()
        self.send("WebDriver:NewSession")

    def _receive(self):
        length = b"".join(iter(lambda: self.messages.read(1), b":"))
        return json.loads(self.messages.read(int(length)))

    def send(self, command, **parameters):
        """Return the result of a command."""
        self.number += 1
        message = json.dumps([0, self.number, command, parameters]).encode()
        self.connection.sendall(b"%d:%b" % (len(message), message))
        _, number, error, result = self._receive()
        assert (number, error) == (self.number, None), error
        return result

    def get(self, address):
        self.send("WebDriver:Navigate", url=address)

    def execute_script(self, script, *arguments):
        return self.send("WebDriver:ExecuteScript", script=script, args=arguments)["value"]

    def find_element(self, by, selector):
        id = self.send("WebDriver:FindElement", using=by, value=selector)["value"][ELEMENT]
        return SimpleNamespace(
            click=lambda: self.send("WebDriver:ElementClick", id=id),
            clear=lambda: self.send("WebDriver:ElementClear", id=id),
            send_keys=lambda text: self.send("WebDriver:ElementSendKeys", id=id, text=text),
        )
