"""Pages with embedded networks, which need no server."""

from __future__ import annotations

import base64
import copy
import gzip
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_tfm.errors import UserError
from lightning_tfm.explore.answers import CONTINUATION
from lightning_tfm.explore.explorer import Explorer
from lightning_tfm.explore.operators import supported_operators
from lightning_tfm.explore.page import html, script, style
from lightning_tfm.inference.decoding import DecodingOptions
from lightning_tfm.inference.onnx_pair import OnnxPair, convert
from lightning_tfm.runs.record import Run
from lightning_tfm.system.files import write_text

if TYPE_CHECKING:
    from onnx import ModelProto

QUESTIONS = ("answer", "beam", "sample")
"""Questions that a page answers."""

EXCLUDED = {
    "attributions": "needs the embeddings and gradients of the network; run lightning-tfm explore",
    "patch": "needs the states inside the network; run lightning-tfm explore",
    "neighbors": "needs the training data; run lightning-tfm explore",
    "worst": "needs the test data; run lightning-tfm explore",
}
"""Reasons why a page does not answer the other questions."""

POLICY = (
    "default-src 'none'; base-uri 'none'; form-action 'none'; script-src 'nonce-{0}'; style-src 'nonce-{0}'; "
    "img-src data: blob:"
)
"""Content-Security-Policy of a page, which loads nothing, with its nonce."""

SAMPLE = 500
"""Maximum number of texts of the test whose outputs must not depend on the precision of the weights."""

MAX_HALF = torch.finfo(torch.float16).max
"""Largest number in half precision."""


def write_page(explorers: Sequence[Explorer], path: Path) -> int:
    """Write a page with networks in it, and return its size in bytes.

    Args:
        explorers: the explorers of the models.
        path: the path of the file.

    Raises:
        UserError: see `page`.
    """
    text = page(explorers)
    write_text(path, text)
    return len(text.encode())


def page(explorers: Sequence[Explorer]) -> str:
    """Return a page with networks in it.

    The weights are in half precision if the outputs for texts of the test, or else for random ids, stay equal.

    Raises:
        UserError: if a network or a tokenizer is not supported in a page, or a package is missing.
    """
    models = json.dumps([_model(explorer) for explorer in explorers], ensure_ascii=False, allow_nan=False)
    program = f"globalThis.EXPLORER_MODELS = {models};\n{script('backend_file.js')}"
    nonce = hashlib.sha256(program.encode()).hexdigest()[:32]
    title = f"Explorer of {', '.join(explorer.name for explorer in explorers)}"
    return html(program, style(), nonce, POLICY.format(nonce), title)


def _model(explorer: Explorer) -> dict[str, Any]:
    """Return the entry of a model in the page, see backend_file.js."""
    predictor = explorer.predictor
    check_tokenizer(predictor.tokenizer.to_dict())
    pair = convert(predictor)
    graphs = {"encode": pair.encode} | ({} if pair.decode_step is None else {"decode_step": pair.decode_step})
    missing = {node.op_type for graph in graphs.values() for node in graph.graph.node} - supported_operators()
    if missing:
        raise UserError(
            f"a page does not support the operators {', '.join(sorted(missing))}, which {explorer.name} needs; "
            "run lightning-tfm explore without --output"
        )
    if keeps_outputs_in_half(explorer):
        for graph in graphs.values():
            halve(graph)
    return {
        "describe": _description(explorer, pair),
        "config": {
            **pair.description,
            "longest_source": predictor.longest_source,
            "shortest_source": predictor.shortest_source,
        },
        "files": {
            name: base64.b64encode(gzip.compress(graph.SerializeToString(), mtime=0)).decode()
            for name, graph in graphs.items()
        },
    }


def _description(explorer: Explorer, pair: OnnxPair) -> dict[str, Any]:
    """Return the description of a model with the questions and changes that a page supports."""
    description = explorer.describe()
    layers = {
        each["layer"]
        for each in pair.description["attention"]
        # The weights of linear attention are in the graph of the encoder only.
        if pair.decode_step is None or each["side"] == "encoder" or "decode_step" in each["graphs"]
    }
    excluded = {name: reason for name, reason in description["excluded"].items() if name not in ("neighbors", "worst")}
    path = explorer.path  # without its folder, which readers of the page need not know
    load = description["load"] if path is None else description["load"].replace(str(path), path.name)
    return {
        **description,
        "load": load,
        "data": "data",
        "attention": [each for each in description["attention"] if each["layer"] in layers],
        "drawable": [],
        "questions": [question for question in description["questions"] if question in QUESTIONS],
        "excluded": EXCLUDED | excluded,
        "changes": ["off_heads"],
    }


def check_tokenizer(values: Mapping[str, Any]) -> None:
    """Raise UserError if a page does not support the tokenizer with some values of `Tokenizer.to_dict`."""
    if values["type"] != "subwords":
        return
    from tokenizers.pre_tokenizers import ByteLevel

    content: dict[str, Any] = json.loads(values["model"])
    kinds = {
        "model": ("BPE",),
        "normalizer": (None, "NFC"),
        "pre_tokenizer": ("ByteLevel",),
        "post_processor": (None, "ByteLevel", "TemplateProcessing"),
        "decoder": ("ByteLevel",),
    }
    parts = {name: content[name] or {} for name in kinds}
    model, added = parts["model"], content["added_tokens"]
    affixes = ("continuing_subword_prefix", "end_of_word_suffix")
    options = [name for name in ("dropout", "unk_token", *affixes, "byte_fallback", "ignore_merges") if model.get(name)]
    options += ["trim_offsets"] if parts["post_processor"].get("trim_offsets") else []
    options += [name for name in ("single_word", "lstrip", "rstrip") if any(token[name] for token in added)]
    if not parts["pre_tokenizer"].get("use_regex", True):
        options.append("use_regex false")
    wrong = [
        f"the {part} {kind}" for part, supported in kinds.items() if (kind := parts[part].get("type")) not in supported
    ]
    wrong += [f"the option {option}" for option in options]
    if not wrong and not {*ByteLevel.alphabet()} <= model["vocab"].keys():
        wrong.append("a vocabulary without some bytes")
    if wrong:
        raise UserError(
            f"a page supports only byte-level BPE as in GPT-2, but the tokenizer has {wrong[0]}; "
            "run lightning-tfm explore without --output"
        )


# Half precision


def rounded(tensor: Tensor) -> Tensor:
    """Return a tensor rounded to half precision, or the same one if it holds no floats, or larger numbers."""
    is_float = tensor.is_floating_point() and bool((tensor.abs() <= MAX_HALF).all())
    return tensor.half().to(tensor.dtype) if is_float else tensor


@torch.no_grad()
def keeps_outputs_in_half(explorer: Explorer) -> bool:
    """Return whether the outputs of a model stay equal if its weights are rounded to half precision."""
    predictor, other = explorer.predictor, copy.deepcopy(explorer.predictor)
    for tensor in (*other.parameters(), *other.buffers()):
        tensor.copy_(rounded(tensor))
    if texts := _texts(explorer):
        options = DecodingOptions()
        if "temperature" in predictor.decoding_options:  # greedy
            options = DecodingOptions(temperature=0, max_tokens=CONTINUATION if predictor.outputs_are_long else None)
        outputs, others = ([line.text for line in each.predict(texts, options)] for each in (predictor, other))
        return outputs == others
    inputs = predictor.example_inputs(16, 8, torch.Generator().manual_seed(0))
    return torch.equal(*(each.network(**inputs).argmax(-1) for each in (predictor, other)))


def _texts(explorer: Explorer) -> list[str]:
    """Return texts of the test of a model's run, at most SAMPLE, evenly spaced; empty without a run."""
    run = None if explorer.path is None else Run.of(explorer.path)
    if run is None or not run.exists:
        return []
    examples = run.predictions or run.examples
    texts = [explorer.answers.question(each.get("source", each.get("text", ""))) for each in examples]
    texts = [text for text in texts if explorer.answers.can_answer(text)]
    return texts[:: max(1, -(-len(texts) // SAMPLE))]


def halve(model: ModelProto) -> None:
    """Store the weights of a graph in half precision, which the interpreter of pages widens.

    Note:
        Other programs cannot run the graph then, whose operators have inputs in single precision.
    """
    import numpy as np
    from onnx import TensorProto, numpy_helper

    for initializer in model.graph.initializer:
        if initializer.data_type == TensorProto.FLOAT:
            values = numpy_helper.to_array(initializer)
            if values.size > 1 and (np.abs(values) <= MAX_HALF).all():  # a number may be a tiny bound
                initializer.CopyFrom(numpy_helper.from_array(values.astype(np.float16), initializer.name))
