"""`lightning-tfm export`: export a trained network to other formats."""

from __future__ import annotations

import logging
import math
import shutil
import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from lightning_tfm.checkpoint import read, write
from lightning_tfm.commands.parser import CommandParser
from lightning_tfm.errors import UserError
from lightning_tfm.inference import LanguageModelPredictor, Predictor, ctranslate, onnx_pair
from lightning_tfm.inference.loading import load, restore
from lightning_tfm.networks import GPT, Transformer
from lightning_tfm.networks.huggingface import to_huggingface
from lightning_tfm.runs.names import HELP, named_checkpoint
from lightning_tfm.system.files import write_json
from lightning_tfm.tokenization import BOS, EOS, NUM_SPECIAL, PAD, SubwordTokenizer

TOLERANCE = 1e-4
"""Maximum difference of logits, since other programs may sum in a different order."""

FILES = {
    "single": "model.ckpt",
    "safetensors": "model.safetensors",
    "torch_export": "model.pt2",
    "onnx": "encode.onnx",
    "onnx_sequence": "model.onnx",
    "ctranslate2": "ctranslate2",
    "huggingface": "model.safetensors",
}

Inputs = dict[str, Tensor]
"""Arguments of a network's `forward` by name."""


def export(arguments: list[str]) -> int:
    """Write a folder with the network in the chosen format, and its tokenizer and hyper-parameters in a JSON file."""
    options = make_parser().parse_args(arguments)
    path = named_checkpoint(options.checkpoint)
    checkpoint = read(path)
    predictor = restore(checkpoint, path, options.trust_package)
    settings = {k: v for k, v in checkpoint["hyper_parameters"].items() if k not in ("optimizer", "lr_schedule")}
    # Not those of the checkpoint, since the updates of lora_rank are merged.
    settings["network"] = settings["network"] | {"init_args": predictor.network.hyper_parameters}
    settings |= {"pad": PAD, "bos": BOS, "eos": EOS}
    output = options.output or path.with_name(f"{path.stem}_{options.format}")
    if output.exists():
        raise UserError(f"--output must be a new folder, but {str(output)!r} exists; choose another")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=output.parent) as folder:
            path = Path(folder) / "export" / FILES[options.format]
            path.parent.mkdir()
            if options.format == "single":
                difference = _single(predictor, checkpoint, path, options.trust_package)
            else:
                checkpoint.clear()  # the training state is not needed
                difference = WRITERS[options.format](predictor, path)
            if not difference <= TOLERANCE:
                raise UserError(
                    f"the exported network must give the outputs of the checkpoint within {TOLERANCE:g}, but differs "
                    f"by {difference:g}; nothing was written; try another --format"
                )
            # A Hugging Face folder has another config.json.
            name = "lightning_tfm.json" if options.format == "huggingface" else "config.json"
            write_json(path.with_name(name), settings)
            shutil.move(path.parent, output)
    except OSError as error:
        raise UserError(f"{str(output)!r} cannot be written: {error.strerror}; choose another --output") from None
    print(f"{output / FILES[options.format]}: the checkpoint's outputs, within {difference:.1g}")
    return 0


def make_parser() -> CommandParser:
    """Return the parser of the command."""
    parser = CommandParser(
        "lightning-tfm export",
        description="Write a trained network for other programs, and compare its outputs with those of the checkpoint.",
    )
    parser.add_argument("checkpoint", metavar="RUN", help=HELP)
    parser.add_argument(
        "--format",
        choices=sorted(FILES),
        default="safetensors",
        metavar="FORMAT",
        help=f"{', '.join(sorted(FILES))}; single is a checkpoint in one file (default: safetensors)",
    )
    parser.add_argument(
        "--output", type=Path, metavar="FOLDER", help="folder to write (default: beside the checkpoint)"
    )
    parser.add_trust_package()
    return parser


def example_inputs(predictor: Predictor, rows: int, length: int) -> Inputs:
    """Draw random inputs of a network's `forward`, right-padded as in batches; the number of rows is also the seed."""
    return predictor.example_inputs(rows, length, torch.Generator().manual_seed(rows))


def sample_inputs(predictor: Predictor) -> list[Inputs]:
    """Return random inputs of several sizes, up to 12 tokens or half of the network's maximum length."""
    limits = [length for length in predictor.max_input_lengths().values() if length is not None]
    longest = min([12, *(max(1, length // 2) for length in limits)])
    return [example_inputs(predictor, *size) for size in ((2, min(5, longest)), (1, 1), (3, longest))]


@torch.no_grad()
def difference(predictor: Predictor, other: Callable[..., Tensor]) -> float:
    """Return the maximum absolute difference of logits over inputs of several sizes; infinite with other shapes."""
    differences = []
    for inputs in sample_inputs(predictor):
        expected, logits = predictor.network(**inputs), other(**inputs)
        if expected.shape != logits.shape:
            return math.inf
        differences.append((expected - logits).abs().max())
    return torch.stack(differences).max().item()  # NaN if any difference is


def _single(predictor: Predictor, checkpoint: dict[str, Any], path: Path, trust_packages: Sequence[str]) -> float:
    """Write a checkpoint, which may be sharded, as a single file with its training state."""
    write(checkpoint, path)
    return difference(predictor, load(path, trust_packages).network)


def _safetensors(predictor: Predictor, path: Path) -> float:
    from safetensors.torch import load_model, save_model

    save_model(predictor.network, str(path))  # writes tied weights once
    again = type(predictor.network)(**predictor.network.hyper_parameters).eval()
    load_model(again, str(path))
    return difference(predictor, again)


def _exported(predictor: Predictor) -> torch.export.ExportedProgram:
    """Trace the network's `forward` for any number of rows and any length up to its maximum."""
    if not predictor.network.is_traceable:
        raise UserError(
            f"--format must be onnx, safetensors or single for this {type(predictor.network).__name__}, whose forward "
            "loops over the tokens: torch would trace a single length"
        )
    inputs = sample_inputs(predictor)[0]
    rows = torch.export.Dim("rows", min=1)
    shapes: dict[str, dict[int, torch.export.Dim]] = {name: {0: rows} for name in inputs}
    for name, longest in predictor.max_input_lengths().items():
        shapes[name][1] = torch.export.Dim(f"{name}_length", min=1, max=longest)
    try:
        with warnings.catch_warnings(action="ignore"):
            return onnx_pair.trace(predictor.network, (), inputs, shapes)
    except Exception as error:  # torch raises exceptions of many types
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"torch cannot export {type(predictor.network).__name__}: {reason}; try safetensors") from None


def _torch_export(predictor: Predictor, path: Path) -> float:
    torch.export.save(_exported(predictor), path)
    return difference(predictor, torch.export.load(path).module())


def _onnx(predictor: Predictor, path: Path) -> float:
    """Write the graphs of `encode` and `decode_step`, and their description, see `onnx_pair`."""
    pair = onnx_pair.convert(predictor)
    pair.save(path.parent)
    graphs = [path, *([] if pair.decode_step is None else [path.with_name("decode_step.onnx")])]
    encode, *decode_step = [_session(graph) for graph in graphs]
    layers = pair.description["attention"]
    mask = {"head_mask": torch.ones(len(layers), max([layer["heads"] for layer in layers], default=1))}

    def logits(**inputs: Tensor) -> Tensor:
        values = mask | inputs
        values |= encode(values)
        if not decode_step:
            return values["logits"]
        steps = []
        for token in inputs["target_in"].unbind(1):
            values |= decode_step[0](values | {"token": token})
            values |= {name: values[following] for name, following in pair.description["state"].items() if following}
            steps.append(values["logits"])
        return torch.stack(steps, dim=1)

    return difference(predictor, logits)


def _onnx_sequence(predictor: Predictor, path: Path) -> float:
    """Write the graph of `forward`."""
    onnx_pair.check_packages()
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns that torchvision is missing
    with warnings.catch_warnings(action="ignore"), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        torch.onnx.export(_exported(predictor), f=str(path), dynamo=True, external_data=False)
    graph = _session(path)
    return difference(predictor, lambda **inputs: next(iter(graph(inputs).values())))


def _session(path: Path) -> Callable[[Inputs], dict[str, Tensor]]:
    """Return the function from the inputs of an ONNX graph, among others, to its outputs."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    inputs, outputs = ([value.name for value in values] for values in (session.get_inputs(), session.get_outputs()))

    def run(values: Inputs) -> dict[str, Tensor]:
        results = session.run(None, {name: values[name].numpy() for name in inputs})
        return dict(zip(outputs, map(torch.from_numpy, results), strict=True))

    return run


def _ctranslate2(predictor: Predictor, path: Path) -> float:
    """Write a folder for CTranslate2, and return the maximum difference of the log probabilities of random targets."""
    if find_spec("ctranslate2") is None:
        raise UserError(
            "--format ctranslate2 needs the package 'ctranslate2'; pip install 'lightning_tfm[ctranslate2]'"
        )
    ctranslate.convert(predictor.network, path)
    network = cast(Transformer | GPT, predictor.network)
    return max(
        ctranslate.difference(network, path, inputs["source"], inputs["target_in"])
        for inputs in sample_inputs(predictor)
    )


def _huggingface(predictor: Predictor, path: Path) -> float:
    """Write a folder for transformers, and return the maximum difference of logits.

    The ids of a model of texts are those of the network without PAD, BOS and EOS, unless documents end with EOS.
    """
    if not isinstance(predictor.network, GPT):
        raise UserError(
            f"--format huggingface needs a GPT, but the network is {type(predictor.network).__name__}; try --format "
            "safetensors"
        )
    if find_spec("transformers") is None:
        raise UserError(
            "--format huggingface needs the package 'transformers'; pip install 'lightning_tfm[huggingface]'"
        )
    from safetensors.torch import save_file

    first = NUM_SPECIAL if isinstance(predictor, LanguageModelPredictor) and not predictor.stop_at_eos else 0
    config, weights = to_huggingface(predictor.network, first)
    write_json(path.with_name("config.json"), config)
    save_file(weights, path, {"format": "pt"})
    if first and isinstance(predictor.tokenizer, SubwordTokenizer):
        path.with_name("tokenizer.json").write_text(predictor.tokenizer.model.to_str(pretty=True), encoding="utf-8")
        write_json(path.with_name("tokenizer_config.json"), {"tokenizer_class": "PreTrainedTokenizerFast"})
    return _difference_from_transformers(predictor, path.parent, first)


@torch.no_grad()
def _difference_from_transformers(predictor: Predictor, folder: Path, first: int) -> float:
    from transformers import AutoModelForCausalLM

    with redirect_stderr(StringIO()):  # of its progress
        model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
    differences = []
    for inputs in sample_inputs(predictor):
        source, target = inputs["source"], inputs["target_in"]
        expected = predictor.network(source, target)[..., first:]
        real = torch.cat((source != PAD, torch.ones_like(target, dtype=torch.bool)), dim=1)
        ids = (torch.cat((source, target), dim=1) - first).clamp(min=0)
        positions = (real.cumsum(1) - 1).clamp(min=0)
        logits = model(ids, attention_mask=real, position_ids=positions).logits[:, source.size(1) :]
        differences.append((expected - logits)[target != PAD].abs().max())
    return torch.stack(differences).max().item()


WRITERS: dict[str, Callable[[Predictor, Path], float]] = {
    "safetensors": _safetensors,
    "torch_export": _torch_export,
    "onnx": _onnx,
    "onnx_sequence": _onnx_sequence,
    "ctranslate2": _ctranslate2,
    "huggingface": _huggingface,
}
