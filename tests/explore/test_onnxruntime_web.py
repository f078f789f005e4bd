"""The ONNX interpreter of pages against onnxruntime-web, both in one page of a browser."""

from __future__ import annotations

import inspect
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from benchmarks.onnxruntime_web import LIMIT, PACKAGE, ROOT
from lightning_tfm.inference import ClassifierPredictor, MaskedLanguageModelPredictor, Seq2SeqPredictor, onnx_pair
from lightning_tfm.networks import EncoderClassifier, MaskedEncoder, Network, Seq2SeqNetwork
from lightning_tfm.tokenization import UNKNOWN, SymbolTokenizer
from support.browser import chromium, origin, requests
from support.marks import soak_except
from support.networks import CLASSES, SIZES, randomize, tiny

pytestmark = pytest.mark.browser

FAMILIES = {cls.__name__: cls for cls in CLASSES if cls is not Network and not inspect.isabstract(cls)}
SCRIPT = """
const [inputs, done] = arguments;
const read = async (name) => new Uint8Array(await (await fetch(name)).arrayBuffer());
(async () => {
  const ort = await import("./onnxruntime-web/dist/ort.wasm.min.mjs");
  const { compareNetwork } = await import("./benchmarks/onnxruntime_web.mjs");
  const config = JSON.parse(new TextDecoder().decode(await read("model.json")));
  const names = config.max_target_length === null ? ["encode"] : ["encode", "decode_step"];
  const files = await Promise.all(names.map(async (name) => [name, await read(`${name}.onnx`)]));
  return compareNetwork(ort, config, Object.fromEntries(files), inputs);
})().then(done, (error) => done(String(error)));
"""


def make_predictor(cls):
    """Return the predictor of a network with random weights, and positions for sources of 40 symbols."""
    settings = {"num_classes": 3} if cls is EncoderClassifier else {}
    if "max_length" in inspect.signature(cls).parameters:
        settings["max_length"] = 3 * SIZES["max_length"]
    torch.manual_seed(1)
    network = randomize(tiny(cls, **settings)()).eval()
    tokenizer = SymbolTokenizer([UNKNOWN, *"abcdefg"])
    if cls is EncoderClassifier:
        return ClassifierPredictor(network, tokenizer, ["low", "middle", "high"])
    if cls is MaskedEncoder:
        return MaskedLanguageModelPredictor(network, tokenizer)
    return Seq2SeqPredictor(network, tokenizer, max_target_length=12)


class Handler(SimpleHTTPRequestHandler):
    """Server of files that logs nothing."""

    def log_message(self, *_):
        pass


@pytest.fixture
def site(tmp_path):
    """Return the folder and the address of a server of the interpreter and onnxruntime-web."""
    assert PACKAGE.exists(), "onnxruntime-web is missing; run make onnxruntime-web"
    for target in (PACKAGE, ROOT / "benchmarks", ROOT / "lightning_tfm"):
        (tmp_path / target.name).symlink_to(target)
    (tmp_path / "index.html").write_text('<!doctype html><link rel="icon" href="data:,">')
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=tmp_path)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield tmp_path, "http://{}:{}/".format(*server.server_address)
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("name", soak_except(("Transformer", "GPT"), FAMILIES))
def test_interpreter_matches_onnxruntime_web(name, site):
    """Logits, attention weights and outputs for two inputs of each length from 1 to 40, one with heads off."""
    folder, address = site
    onnx_pair.convert(make_predictor(FAMILIES[name])).save(folder)
    with chromium(["performance"]) as driver:
        driver.set_script_timeout(600)
        driver.get(address)
        compared = driver.execute_async_script(SCRIPT, 80)
        assert isinstance(compared, dict), compared
        assert requests(driver) == {origin(address)}
    assert compared["difference"] <= LIMIT
    assert compared["greedy"] == compared["inputs"] == 80
    assert compared["beam"] == (80 if issubclass(FAMILIES[name], Seq2SeqNetwork) else None)
