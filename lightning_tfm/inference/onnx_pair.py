"""Conversion of networks to ONNX graphs without loops: `encode`, and `decode_step` with a cache.

Shapes: batch B, tokens T, width D, heads H, keys S. Masks are boolean.
"""

from __future__ import annotations

import copy
import gc
import json
import logging
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from importlib.util import find_spec
from io import StringIO
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_tfm.errors import UserError
from lightning_tfm.inference.predictor import Predictor
from lightning_tfm.layers import Attention, HardMonotonicAttention, attention_layers
from lightning_tfm.networks import Network, Seq2SeqNetwork
from lightning_tfm.networks.network import Memory, State
from lightning_tfm.tokenization import BOS, EOS, PAD

if TYPE_CHECKING:
    from onnx import ModelProto

OPSET = 20
"""Version of the ONNX operators."""

PACKAGES = ("onnx", "onnxruntime", "onnxscript")
"""Packages of the extra `onnx`."""


class OnnxPair(NamedTuple):
    """ONNX graphs of a network and their description.

    Attributes:
        encode: the graph of `encode`, or of `forward` if the network has no decoder.
        decode_step: the graph of `decode_step`; None if the network has no decoder.
        description: the content of model.json, see the guide on exporting.
    """

    encode: ModelProto
    decode_step: ModelProto | None
    description: dict[str, Any]

    def save(self, folder: Path) -> None:
        """Write encode.onnx, decode_step.onnx and model.json in an existing folder."""
        (folder / "encode.onnx").write_bytes(self.encode.SerializeToString())
        if self.decode_step is not None:
            (folder / "decode_step.onnx").write_bytes(self.decode_step.SerializeToString())
        text = json.dumps(self.description, ensure_ascii=False) + "\n"
        (folder / "model.json").write_text(text, encoding="utf-8")


def check_packages() -> None:
    """Raise UserError if a package of the extra `onnx` is missing."""
    for name in PACKAGES:
        if find_spec(name) is None:
            raise UserError(f"exporting to ONNX needs the package {name!r}; pip install 'lightning_tfm[onnx]'")


@torch.no_grad()
def convert(predictor: Predictor) -> OnnxPair:
    """Convert the network of a predictor to ONNX.

    Raises:
        UserError: if a package is missing, or torch cannot trace the network.
    """
    check_packages()
    network = copy.deepcopy(predictor.network)
    for module in network.modules():  # an ensemble consists of networks
        if isinstance(module, Network):
            module.check_lengths = lambda *_: None  # type: ignore[method-assign]  # examples may exceed max_length
    try:
        with warnings.catch_warnings(action="ignore"), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            return (_convert_decoder if isinstance(network, Seq2SeqNetwork) else _convert_forward)(predictor, network)
    except Exception as error:  # torch raises exceptions of many types
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"torch cannot export {type(network).__name__}: {reason}; try safetensors") from None


SIZES, STEPS = ((3, 5), (4, 7)), (2, 4)
"""Rows and lengths, and numbers of decoding steps, of two examples: axes whose sizes differ are dynamic."""


def _convert_forward(predictor: Predictor, network: Any) -> OnnxPair:
    examples = [predictor.example_inputs(*size, torch.Generator()) for size in SIZES]
    names = [*examples[0]]

    def forward(*inputs: Tensor) -> list[Tensor]:
        return [network(**dict(zip(names, inputs, strict=True)))]

    _replace_layers(network)
    model, layers = _trace(network, forward, [[*inputs.values()] for inputs in examples], names, ["logits"])
    return OnnxPair(model, None, _description(predictor, {"encode": layers}, {}))


def _convert_decoder(predictor: Predictor, network: Any) -> OnnxPair:
    abstract = copy.deepcopy(network).to("meta")  # computes shapes only
    sources = [torch.ones(size, dtype=torch.long, device="meta") for size in SIZES]
    tokens = [source[:, 0] for source in sources]
    states = [abstract.encode(source) for source in sources]
    number = len([*_leaves(states[0])])
    for example, steps in enumerate(STEPS):
        for _ in range(steps):
            _, states[example] = abstract.decode_step(tokens[example], states[example])
    leaves = [[tensor for tensor, _ in _leaves(state)] for state in states]
    if number != len(leaves[0]):
        raise ValueError("the states of encode and decode_step must have the same structure, but differ")
    _replace_layers(network)
    state = {
        f"state_{i}": None if is_memory else f"next_state_{i}" for i, (_, is_memory) in enumerate(_leaves(states[0]))
    }
    changing = [name for name in state.values() if name is not None]

    def step(token: Tensor, *tensors: Tensor) -> list[Tensor]:
        logits, after = network.decode_step(token, _rebuilt(states[0], iter(tensors)))
        return [logits, *(tensor for tensor, is_memory in _leaves(after) if not is_memory)]

    def encode(source: Tensor) -> list[Tensor]:
        return [tensor for tensor, _ in _leaves(network.encode(source))]

    examples = [[token, *tensors] for token, tensors in zip(tokens, leaves, strict=True)]
    decode_step, in_step = _trace(network, step, examples, ["token", *state], ["logits", *changing])
    model, in_encode = _trace(network, encode, [[source] for source in sources], ["source"], [*state])
    # Some attention layers do not read the previous weights, which are part of the state.
    read = {value.name for value in decode_step.graph.input}
    _prune(decode_step, {following for name, following in state.items() if following and name not in read})
    _prune(model, state.keys() - read)
    state = {name: following for name, following in state.items() if name in read}
    return OnnxPair(model, decode_step, _description(predictor, {"encode": in_encode, "decode_step": in_step}, state))


def _description(predictor: Predictor, graphs: dict[str, list[str]], state: dict[str, str | None]) -> dict[str, Any]:
    """Return the content of model.json, given the layers whose weights are outputs of each graph."""
    network = predictor.network
    longest = predictor.max_input_lengths()
    return {
        "network": type(network).__name__,
        "task": predictor.task,
        "vocab_size": predictor.tokenizer.vocab_size,
        "pad": PAD,
        "bos": BOS,
        "eos": EOS,
        "max_source_length": longest.get("source", longest.get("text")),
        "max_target_length": getattr(predictor, "max_target_length", None),
        "max_length": network.max_length,
        "state": state,
        "attention": [
            {
                "layer": name,
                "heads": layer.num_heads,
                "side": network.side(name),
                "graphs": [graph for graph, layers in graphs.items() if name in layers],
            }
            for name, layer in attention_layers(network).items()
        ],
        "tokenizer": predictor.tokenizer.to_dict(),
        "labels": getattr(predictor, "labels", None),
    }


def _replace_layers(network: nn.Module) -> None:
    """Replace layers that would be exported as loops, or for a fixed length."""
    for parent in [*network.modules()]:
        for name, child in parent.named_children():
            if isinstance(child, nn.LSTM | nn.GRU):
                setattr(parent, name, _Recurrent(child))
            elif isinstance(child, nn.RNN):
                raise ValueError("nn.RNN would be exported for a fixed length; use nn.GRU or nn.LSTM")
            elif isinstance(child, nn.EmbeddingBag):
                setattr(parent, name, _EmbeddingSum(child))


class _Recurrent(nn.Module):
    """`nn.LSTM` or `nn.GRU` of one layer and direction as an ONNX operator.

    Note:
        torch.export would unroll the layer to the number of steps of the example.
    """

    w: Tensor
    r: Tensor
    b: Tensor

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        if not layer.batch_first or not layer.bias or layer.num_layers > 1 or layer.bidirectional or layer.proj_size:
            raise ValueError(f"nn.{layer.mode} must have batch_first, biases, one layer and one direction")
        self.kind, self.d_hidden = layer.mode, layer.hidden_size
        # ONNX stores the gates of an LSTM as input, output, forget, cell, and those of a GRU as update, reset, hidden.
        gates = (0, 3, 1, 2) if self.kind == "LSTM" else (1, 0, 2)
        (weights,) = layer.all_weights
        parts = [torch.cat([part.chunk(len(gates))[gate] for gate in gates]).unsqueeze(0) for part in weights]
        self.register_buffer("w", parts[0])
        self.register_buffer("r", parts[1])
        self.register_buffer("b", torch.cat(parts[2:], dim=1))

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        B, T, _ = x.shape
        is_lstm = self.kind == "LSTM"
        attributes: dict[str, Any] = {"hidden_size": self.d_hidden}
        if not is_lstm:
            attributes["linear_before_reset"] = 1  # as in cuDNN and torch
        inputs: list[Tensor | None] = [x.transpose(0, 1), self.w, self.r, self.b]
        if state is not None:
            inputs += [None, *(state if is_lstm else (state,))]  # after the lengths of the rows, which are all T
        last = [(1, B, self.d_hidden)] * (2 if is_lstm else 1)
        y, *states = torch.onnx.ops.symbolic_multi_out(
            self.kind,
            inputs,
            attributes,
            dtypes=[x.dtype] * (1 + len(last)),
            shapes=[(T, 1, B, self.d_hidden), *last],
            version=OPSET,
        )
        return y.squeeze(1).transpose(0, 1), tuple(states) if is_lstm else states[0]


class _EmbeddingSum(nn.Module):
    """`nn.EmbeddingBag` of mode "sum", which would be exported as a loop over the bags."""

    def __init__(self, layer: nn.EmbeddingBag) -> None:
        super().__init__()
        if layer.mode != "sum" or layer.padding_idx is None:
            raise ValueError("nn.EmbeddingBag must have mode 'sum' and a padding_idx")
        self.weight, self.padding_idx = layer.weight, layer.padding_idx

    def forward(self, bags: Tensor) -> Tensor:
        """Return the sums (N, D) of the embeddings of bags (N, G), without padding."""
        return (F.embedding(bags, self.weight) * (bags != self.padding_idx).unsqueeze(-1)).sum(1)


def _leaves(state: State, is_memory: bool = False) -> Iterator[tuple[Tensor, bool]]:
    """Yield the tensors of a state, and whether they belong to its memory, which no step changes."""
    if isinstance(state, Tensor):
        yield state, is_memory
    else:
        for part in state:
            yield from _leaves(part, is_memory or isinstance(state, Memory))


def _rebuilt(state: State, tensors: Iterator[Tensor]) -> State:
    """Return a state of the same structure with other tensors."""
    return next(tensors) if isinstance(state, Tensor) else type(state)([_rebuilt(part, tensors) for part in state])


@contextmanager
def _observed(layers: dict[str, Attention], head_mask: Tensor) -> Iterator[dict[str, Tensor]]:
    """Record the weights of attention layers, and multiply the contexts of their heads by a mask (layers, heads).

    Yields:
        The weights (B, H, T, S) by layer name, except those of layers that cannot compute them.

    Note:
        The layers compute the contexts from these weights, since torch.export cannot trace the fused kernel.
    """
    maps: dict[str, Tensor] = {}

    def forward_of(name: str, layer: Attention) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            try:
                maps[name] = layer.weights(*args, **kwargs)
            except UserError:  # linear attention in decode_step
                return type(layer).forward(layer, *args, **kwargs)
            return layer.with_weights(maps[name], *args, **kwargs)

        return forward

    def masked(contexts: Tensor, row: int, heads: int) -> Tensor:
        return (contexts.unflatten(-1, (heads, -1)) * head_mask[row, :heads].unsqueeze(-1)).flatten(-2)

    with ExitStack() as changes:
        for row, (name, layer) in enumerate(layers.items()):
            vars(layer)["forward"] = forward_of(name, layer)
            changes.callback(vars(layer).pop, "forward")
            projection = getattr(layer, "out_proj", None)
            if isinstance(projection, nn.Module):
                hook = projection.register_forward_pre_hook(
                    lambda _, inputs, row=row, heads=layer.num_heads: masked(inputs[0], row, heads)
                )
                changes.callback(hook.remove)
            elif not isinstance(layer, HardMonotonicAttention):  # which has no context
                hook = layer.register_forward_hook(
                    lambda _, __, result, row=row: (masked(result[0], row, 1), *result[1:])
                )
                changes.callback(hook.remove)
        yield maps


class _Function(nn.Module):
    """Function that calls a network, as a module that torch.export can trace."""

    def __init__(self, network: nn.Module, call: Callable[..., list[Tensor]]) -> None:
        super().__init__()
        self.network, self.call = network, call

    def forward(self, head_mask: Tensor, inputs: list[Tensor]) -> list[Tensor]:
        return self.call(head_mask, *inputs)


def _trace(
    network: nn.Module,
    call: Callable[..., list[Tensor]],
    examples: Sequence[Sequence[Tensor]],
    inputs: list[str],
    outputs: list[str],
) -> tuple[ModelProto, list[str]]:
    """Return the graph of a function that calls a network, and the layers whose attention weights are outputs.

    Args:
        network: the network.
        call: the function.
        examples: the arguments in two examples, of which only the shapes are read.
        inputs: the names of the arguments.
        outputs: the names of the results.
    """
    layers = attention_layers(network)
    head_mask = torch.ones(max(1, len(layers)), max([layer.num_heads for layer in layers.values()], default=1))
    shapes = [
        {axis: torch.export.Dim.AUTO for axis, size in enumerate(a.shape) if size != b.size(axis)}
        for a, b in zip(*examples, strict=True)
    ]
    recorded: list[str] = []

    def observed(head_mask: Tensor, *inputs: Tensor) -> list[Tensor]:
        with _observed(layers, head_mask) as maps:
            outputs = call(*inputs)
        recorded[:] = maps
        return [*outputs, *maps.values()]

    arguments = (head_mask, [torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in examples[0]])
    program = trace(_Function(network, observed), arguments, {}, (None, shapes))
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns that torchvision is missing
    exported = torch.onnx.export(
        program,
        dynamo=True,
        opset_version=OPSET,
        input_names=["head_mask", *inputs],
        output_names=[*outputs, *(f"weights.{name}" for name in recorded)],
        verbose=False,
    )
    assert exported is not None
    model = exported.model_proto
    _remove_traces(model)
    _prune(model)
    _store_once(model)
    _name_sizes(model)
    return model, recorded


def trace(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any
) -> torch.export.ExportedProgram:
    """Return the program of a module for inputs of several lengths; see `torch.export.export` for the arguments."""
    program = torch.export.export(
        module,
        args,
        kwargs,
        dynamic_shapes=dynamic_shapes,
        prefer_deferred_runtime_asserts_over_guards=True,  # otherwise, one row or one token is rejected
    )
    gc.collect()  # tracing defines subclasses with the names of the networks, which would be ambiguous in a setting
    return program


def _remove_traces(model: ModelProto) -> None:
    """Remove the stack traces of the exporter, which contain local paths."""
    graph = model.graph
    for part in (model, graph, *graph.node, *graph.input, *graph.output, *graph.initializer):
        del part.metadata_props[:]
    del graph.value_info[:]


def _prune(model: ModelProto, dropped: Collection[str] = ()) -> None:
    """Remove outputs by name, and the nodes, inputs and initializers on which no other output depends."""
    graph = model.graph
    outputs = [value for value in graph.output if value.name not in dropped]
    needed, nodes = {value.name for value in outputs}, []
    for node in reversed(graph.node):
        if needed.intersection(node.output):
            needed.update(node.input)
            nodes.append(node)
    inputs = [value for value in graph.input if value.name in needed]
    initializers = [value for value in graph.initializer if value.name in needed]
    for field, parts in (
        (graph.output, outputs),
        (graph.node, nodes[::-1]),
        (graph.input, inputs),
        (graph.initializer, initializers),
    ):
        del field[:]
        field.extend(parts)


def _store_once(model: ModelProto) -> None:
    """Store a matrix and its transpose, such as those of tied embeddings, only once, with a Transpose node."""
    from onnx import helper, numpy_helper

    graph = model.graph
    matrices = {value.name: numpy_helper.to_array(value) for value in graph.initializer if len(value.dims) == 2}
    stored: dict[str, Any] = {}
    for name, matrix in matrices.items():
        twin = next((other for other in stored if np.array_equal(stored[other], matrix.T)), None)
        if twin is None:
            stored[name] = matrix
        else:
            graph.node.insert(0, helper.make_node("Transpose", [twin], [name], perm=[1, 0]))
    initializers = [value for value in graph.initializer if value.name not in matrices or value.name in stored]
    del graph.initializer[:]
    graph.initializer.extend(initializers)


def _name_sizes(model: ModelProto) -> None:
    """Name the variable sizes of inputs and outputs: "batch", if a first axis has the size, or "length", "length_2"."""
    names: dict[str, str] = {}
    inputs, outputs = (
        [value.type.tensor_type.shape.dim for value in values] for values in (model.graph.input, model.graph.output)
    )
    for axis, size in chain.from_iterable(map(enumerate, inputs)):
        if size.dim_param and size.dim_param not in names:
            names[size.dim_param] = "batch" if axis == 0 else "length" if len(names) < 2 else f"length_{len(names)}"
    for size in chain(*inputs, *outputs):
        if size.dim_param:  # such as "s20 + 1"
            size.dim_param = re.sub(r"\w+", lambda match: names.get(match[0], match[0]), size.dim_param)
