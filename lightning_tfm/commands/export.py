"""`lightning-tfm export`: a trained network for other programs, compared with itself before it is believed."""

from __future__ import annotations

import json
import logging
import math
import shutil
import tempfile
import warnings
from argparse import Namespace
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import torch
from torch import Tensor

from lightning_tfm.checkpoint import Trained, load
from lightning_tfm.commands.parser import CommandParser
from lightning_tfm.errors import UserError
from lightning_tfm.networks import GPT, AttentionLSTM
from lightning_tfm.tokenizer import BOS, EOS, NUM_SPECIAL, PAD

TOLERANCE = 1e-4
"""Of the logits: what another program may sum in another order."""

FILES = {"safetensors": "model.safetensors", "torch_export": "model.pt2", "onnx": "model.onnx"}

Inputs = dict[str, Tensor]
"""Of a network's forward, by name."""


def export(arguments: list[str]) -> int:
    """Writes a folder: the network in a format, its tokenizer and its hyper-parameters."""
    options = _parse(arguments)
    trained = load(options.checkpoint, options.allow)
    path = Path(options.checkpoint)
    output = options.output or path.with_name(f"{path.stem}_{options.format}")
    if output.exists():
        raise UserError(f"--output must be a folder that is not there yet, but {str(output)!r} is; choose another")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=output.parent) as folder:
            path = Path(folder) / "export" / FILES[options.format]
            path.parent.mkdir()
            difference = WRITERS[options.format](trained, path)
            if not difference <= TOLERANCE:
                raise UserError(
                    f"the exported network must give the logits of the checkpoint within {TOLERANCE:g}, but differs by "
                    f"{difference:g}; nothing was written; try another --format"
                )
            settings = {
                "task": trained.task,
                "network": {
                    "class": type(trained.network).__name__,
                    "hyper_parameters": trained.network.hyper_parameters,
                },
                "tokenizer": trained.tokenizer.to_dict(),
                "max_target_length": trained.max_target_length,
                "labels": list(trained.labels),
                "pad": PAD,
                "bos": BOS,
                "eos": EOS,
            }
            config = json.dumps(settings, ensure_ascii=False, indent=2) + "\n"
            (path.parent / "config.json").write_text(config, encoding="utf-8")
            shutil.move(path.parent, output)
    except OSError as error:
        raise UserError(f"{str(output)!r} cannot be written: {error.strerror}; choose another --output") from None
    print(f"{output / FILES[options.format]}: the checkpoint's logits, within {difference:.1g}")
    return 0


def _parse(arguments: list[str]) -> Namespace:
    parser = CommandParser(
        "lightning-tfm export",
        description="Write a trained network for other programs, and compare what both compute.",
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a file that fit has written")
    parser.add_argument("--format", choices=sorted(FILES), default="safetensors", help="default: safetensors")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="default: beside the checkpoint")
    parser.add_allow()
    return parser.parse_args(arguments)


def inputs_of(trained: Trained, rows: int, length: int) -> Inputs:
    """Drawn inputs of a network's forward, padded on the right as batches are."""
    generator = torch.Generator().manual_seed(rows)
    size = trained.network.hyper_parameters["vocab_size"]

    def drawn(length: int) -> Tensor:
        ids = torch.randint(NUM_SPECIAL, size, (rows, length, trained.tokenizer.ids_per_token), generator=generator)
        lengths = torch.randint(1, length + 1, (rows, 1), generator=generator)
        padding = torch.arange(length) >= lengths.clamp(min=length if rows == 1 else 1)
        return ids.masked_fill(padding.unsqueeze(-1), PAD).squeeze(-1)

    if trained.task == "classification":
        return {"text": drawn(length)}
    source = drawn(length)[:, : 0 if trained.task == "language modelling" else None]
    return {"source": source, "target_in": drawn(length)}


def _longest(trained: Trained) -> int:
    """The most tokens of an input that is drawn."""
    return min(12, getattr(trained.network, "max_length", 24) // 2, trained.max_target_length or 12)


@torch.no_grad()
def difference(trained: Trained, other: Callable[[Inputs], Tensor]) -> float:
    """The largest difference of logits, over inputs of several sizes."""
    differences = []
    longest = _longest(trained)
    for rows, length in ((2, min(5, longest)), (1, 1), (3, longest)):
        inputs = inputs_of(trained, rows, length)
        ours, theirs = trained.network(**inputs), other(inputs)
        if ours.shape != theirs.shape:
            return math.inf
        differences.append((ours - theirs).abs().max())
    return torch.stack(differences).max().item()  # NaN, if any is


def _safetensors(trained: Trained, path: Path) -> float:
    from safetensors.torch import load_model, save_model

    save_model(trained.network, str(path))  # tied weights once
    again = type(trained.network)(**trained.network.hyper_parameters).eval()
    load_model(again, str(path))
    return difference(trained, lambda inputs: again(**inputs))


def _exported(trained: Trained) -> torch.export.ExportedProgram:
    """The network's forward, for any number of rows and any lengths that its positions reach.

    Raises:
        UserError: if torch cannot follow it.
    """
    if isinstance(trained.network, AttentionLSTM):
        raise UserError(
            "--format must be safetensors for an AttentionLSTM, whose decoder is a loop over its steps, which torch "
            "would write down for one number of them"
        )
    inputs = inputs_of(trained, 2, min(5, _longest(trained)))
    rows, longest = torch.export.Dim("rows", min=1), dict.fromkeys(inputs, getattr(trained.network, "max_length", None))
    if trained.task == "language modelling":
        del longest["source"]  # there is none
    elif isinstance(trained.network, GPT):  # which reads both as one sequence
        longest = {"source": longest["source"] - trained.max_target_length, "target_in": trained.max_target_length}
    shapes: dict[str, dict[int, torch.export.Dim]] = {name: {0: rows} for name in inputs}
    for name, most in longest.items():
        shapes[name][1] = torch.export.Dim(f"{name}_length", min=1, max=most)
    try:
        with warnings.catch_warnings(action="ignore"):
            return torch.export.export(
                trained.network,
                (),
                inputs,
                dynamic_shapes=shapes,
                prefer_deferred_runtime_asserts_over_guards=True,  # or one row, or one token, would be refused
            )
    except Exception as error:  # torch raises what it likes
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"torch cannot export {type(trained.network).__name__}: {reason}; try safetensors") from None


def _torch_export(trained: Trained, path: Path) -> float:
    torch.export.save(_exported(trained), path)
    program = torch.export.load(path).module()
    return difference(trained, lambda inputs: program(**inputs))


def _onnx(trained: Trained, path: Path) -> float:
    try:
        import onnxruntime
        import onnxscript  # noqa: F401, torch.onnx needs it
    except ImportError as error:
        raise UserError(f"--format onnx needs the package {error.name!r}; pip install onnxruntime onnxscript") from None
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it misses torchvision
    with warnings.catch_warnings(action="ignore"), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        torch.onnx.export(_exported(trained), f=str(path), dynamo=True, external_data=False)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = {one.name for one in session.get_inputs()}

    def logits(inputs: Inputs) -> Tensor:
        (found,) = session.run(None, {name: ids.numpy() for name, ids in inputs.items() if name in names})
        return torch.from_numpy(found)

    return difference(trained, logits)


WRITERS: dict[str, Callable[[Trained, Path], float]] = {
    "safetensors": _safetensors,
    "torch_export": _torch_export,
    "onnx": _onnx,
}
