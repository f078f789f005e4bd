"""The ONNX interpreter of pages against onnxruntime."""

import base64
import json
import subprocess
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from lightning_tfm.explore.operators import supported_operators
from lightning_tfm.inference import MaskedLanguageModelPredictor, Seq2SeqPredictor, onnx_pair
from lightning_tfm.networks import AttentionLSTM, MaskedEncoder, Transformer
from lightning_tfm.tokenization import BOS, PAD, UNKNOWN, SymbolTokenizer
from support.marks import soak_except
from support.networks import NETWORKS, randomize, tiny

PAGE = resources.files("lightning_tfm.explore") / "page"
SHAPES = [((3, 4), (3, 4)), ((2, 3, 4), (4,)), ((2, 3, 4), (2, 1, 4)), ((2, 1, 4), (3, 1)), ((), (2, 3)), ((5,), ())]
SHAPES += [((0, 3), (3,)), ((2, 0, 3), (1, 1, 3)), ((0,), (1,)), ((2, 1, 3, 1), (1, 4, 1, 5))]
END, BEGINNING = 2**63 - 1, -(2**63)
rng = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def seed():
    """Make the random numbers of a test independent of other tests."""
    rng.bit_generator.state = np.random.default_rng(0).bit_generator.state


def floats(*shape, scale=1.0):
    return (scale * rng.standard_normal(shape)).astype(np.float32)


def positive(*shape):
    return rng.uniform(0.1, 3, shape).astype(np.float32)


def ints(*shape, low=-9, high=10, dtype=np.int64):
    return rng.integers(low, high, shape, dtype)


def nonzero(*shape, dtype=np.int64):
    return ints(*shape, low=1, high=6, dtype=dtype) * rng.choice([-1, 1], shape).astype(dtype)


def bools(*shape):
    return rng.random(shape) < 0.5


def vector(*values):
    return np.array(values, np.int64)


def model(operator, inputs, outputs, attributes, domain=""):
    """Return a model of one node; a missing input is None."""
    names = ["" if value is None else f"input_{i}" for i, value in enumerate(inputs)]
    node = helper.make_node(operator, names, [f"output_{i}" for i in range(outputs)], domain=domain, **attributes)
    declared = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in zip(names, inputs, strict=True)
        if name
    ]
    results = [onnx.ValueInfoProto(name=name) for name in node.output]
    return make_model(helper.make_graph([node], "graph", declared, results))


def make_model(graph):
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


class Case(NamedTuple):
    """One node with inputs."""

    operator: str
    model: onnx.ModelProto
    feeds: dict[str, np.ndarray]


def case(operator, *inputs, outputs=1, **attributes):
    arrays = [value if value is None else np.asarray(value) for value in inputs]
    feeds = {f"input_{i}": value for i, value in enumerate(arrays) if value is not None}
    return Case(operator, model(operator, arrays, outputs, attributes), feeds)


def elementwise_cases():
    special = np.array([-np.inf, np.inf, np.nan, 0.0, -0.5, 1.5], np.float32)
    for shapes in SHAPES:
        for operator in ("Add", "Sub", "Mul", "Div", "Max", "Min"):
            yield case(operator, *(floats(*shape) for shape in shapes))
        for operator in ("Add", "Sub", "Mul", "Max", "Min"):
            yield case(operator, *(ints(*shape) for shape in shapes))
        for operator in ("Div", "Mod"):
            yield case(operator, ints(*shapes[0]), nonzero(*shapes[1]))
            yield case(operator, ints(*shapes[0], dtype=np.int32), nonzero(*shapes[1], dtype=np.int32))
        yield case("Mod", floats(*shapes[0]), positive(*shapes[1]), fmod=1)
        yield case("Mod", ints(*shapes[0]), nonzero(*shapes[1]), fmod=1)
        yield case("Pow", positive(*shapes[0]), floats(*shapes[1]))
        yield case("Pow", ints(*shapes[0]), ints(*shapes[1], low=0, high=4))
        for operator in ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"):
            yield case(operator, ints(*shapes[0], low=0, high=3), ints(*shapes[1], low=0, high=3))
            yield case(operator, floats(*shapes[0]).round(), floats(*shapes[1]).round())
        for operator in ("And", "Or", "Xor", "Equal"):
            yield case(operator, *(bools(*shape) for shape in shapes))
        yield case("Where", bools(*shapes[0]), floats(*shapes[1]), floats(*shapes[0]))
        yield case("Where", bools(*shapes[1]), ints(), ints(*shapes[0]))
        yield case("Expand", floats(*shapes[0]), vector(*shapes[1]))
    yield case("Mul", ints(9, low=0, high=2**17), np.int64(2**31 + 5))
    yield case("Mod", ints(9, low=0, high=2**50), np.int64(2**31 - 1))
    yield case("Div", ints(9, low=-(2**50), high=2**50), np.int64(-7))
    for dtype in (np.float64, np.int32):
        for operator in ("Add", "Sub", "Mul", "Div"):
            yield case(operator, ints(3, 4).astype(dtype), nonzero(4).astype(dtype))
    yield case("Max", floats(3, 1), floats(4), floats(2, 1, 1))
    yield case("Min", ints(3, 1), ints(4), ints(2, 1, 1))
    yield case("Max", floats(3))
    yield case("Max", special, floats(1))
    for shape in ((), (7,), (2, 3, 5), (0, 2)):
        for operator in (
            "Abs",
            "Ceil",
            "Cos",
            "Elu",
            "Erf",
            "Exp",
            "Floor",
            "Gelu",
            "Neg",
            "Reciprocal",
            "Relu",
        ):
            yield case(operator, floats(*shape, scale=2))
        for operator in ("Sigmoid", "Sign", "Sin", "Tanh", "Identity"):
            yield case(operator, floats(*shape, scale=2))
        for operator in ("Log", "Sqrt"):
            yield case(operator, positive(*shape))
        for operator in ("Abs", "Neg", "Sign", "Identity"):
            yield case(operator, ints(*shape))
        yield case("Not", bools(*shape))
        yield case("Gelu", floats(*shape, scale=2), approximate="tanh")
        yield case("Elu", floats(*shape), alpha=0.5)
        yield case("Clip", floats(*shape), np.float32(-0.5), np.float32(0.5))
        yield case("Clip", floats(*shape), None, np.float32(0.5))
        yield case("Clip", ints(*shape), np.int64(-2))
        for source in (floats(*shape, scale=9), ints(*shape), ints(*shape, dtype=np.int32), bools(*shape)):
            for target in (
                TensorProto.FLOAT,
                TensorProto.DOUBLE,
                TensorProto.INT32,
                TensorProto.INT64,
                TensorProto.BOOL,
            ):
                yield case("Cast", source, to=target)
            yield case("CastLike", source, ints(1))
        yield case("Shape", floats(*shape))
        yield case("Size", floats(*shape))
    for operator in (
        "IsNaN",
        "Exp",
        "Sigmoid",
        "Tanh",
        "Erf",
        "Abs",
        "Sqrt",
        "Log",
        "Sign",
        "Reciprocal",
    ):
        yield case(operator, special)
    yield case("Erf", np.linspace(-6, 6, 401, dtype=np.float32))
    yield case("Gelu", np.linspace(-9, 9, 401, dtype=np.float32))


def shape_cases():
    for x, shape, attributes in [
        (floats(2, 3, 4), (6, 4), {}),
        (floats(2, 3, 4), (0, -1), {}),
        (floats(2, 3, 4), (-1, 0, 2, 2), {}),
        (floats(1), (), {}),
        (floats(0, 4), (-1, 2), {}),
        (floats(0, 4), (4, 0), {"allowzero": 1}),
        (ints(6), (2, 3), {}),
    ]:
        yield case("Reshape", x, vector(*shape), **attributes)
    for axes in ((0,), (-1,), (3, 1), (0, 1, -1)):
        yield case("Unsqueeze", floats(2, 3), vector(*axes))
    yield case("Unsqueeze", floats(), vector(0, 1))
    yield case("Squeeze", floats(1, 2, 1, 3, 1))
    for axes in ((0,), (-1, 2)):
        yield case("Squeeze", floats(1, 2, 1, 3, 1), vector(*axes))
    yield case("Transpose", floats(2, 3, 4))
    for perm in ((0, 2, 1), (1, 0, 2), (2, 0, 1), (0, 1, 2)):
        yield case("Transpose", floats(2, 3, 4), perm=perm)
        yield case("Transpose", bools(2, 0, 4), perm=perm)
    yield case("Transpose", floats(2, 3, 4, 40), perm=(0, 2, 1, 3))
    for attributes in ({"start": 1}, {"end": -1}, {"start": -2, "end": 5}, {"start": 3}):
        yield case("Shape", floats(2, 3, 4), **attributes)
    yield case("Constant", value=numpy_helper.from_array(floats(2, 3)))
    yield case("Constant", value_float=1.5)
    yield case("Constant", value_floats=[1.5, -2.5])
    yield case("Constant", value_int=-3)
    yield case("Constant", value_ints=[-3, 2**40])
    yield case("ConstantOfShape", vector(2, 3))
    yield case("ConstantOfShape", vector(), value=numpy_helper.from_array(vector(-4)))
    yield case("ConstantOfShape", vector(0, 3), value=numpy_helper.from_array(np.array([True])))
    for start, limit, delta in ((0, 5, 1), (2, 11, 3), (5, -6, -2), (3, 3, 1), (3, 1, 1)):
        yield case("Range", np.int64(start), np.int64(limit), np.int64(delta))
    yield case("Range", np.float32(0.5), np.float32(3), np.float32(0.7))
    for starts, ends, axes, steps in [
        ((1,), (3,), (0,), None),
        ((0, -2), (END, END), (0, 2), None),
        ((-3, 1), (-1, 100), (-1, 0), (1, 2)),
        ((-1,), (BEGINNING,), (1,), (-1,)),
        ((3, 10), (0, -6), (0, 1), (-2, -3)),
        ((2,), (2,), (0,), None),
        ((-100,), (-2,), (2,), (2,)),
        ((-100,), (BEGINNING,), (1,), (-1,)),
        ((-2,), (-4,), (1,), (-1,)),
        ((4, 1, 0), (0, 3, 3), None, None),
    ]:
        values = [vector(*starts), vector(*ends), axes and vector(*axes), steps and vector(*steps)]
        while values[-1] is None:
            values.pop()
        yield case("Slice", floats(4, 5, 3), *values)
        yield case("Slice", ints(4, 0, 3), *values)
    for axis in (0, 1, -1):
        yield case("Concat", floats(2, 3, 4), floats(2, 3, 4), floats(2, 3, 4), axis=axis)
    yield case("Concat", floats(2, 0, 4), floats(2, 3, 4), axis=1)
    yield case("Concat", ints(3), axis=0)
    yield case("Concat", floats(0, 3), floats(0, 2), axis=1)
    yield case("Split", floats(7, 3), outputs=3, axis=0, num_outputs=3)
    yield case("Split", floats(2, 7), outputs=4, axis=-1, num_outputs=4)
    yield case("Split", floats(2, 6), vector(1, 0, 5), outputs=3, axis=1)
    yield case("Split", ints(6), outputs=2, num_outputs=2)
    yield case("Pad", floats(3, 4), vector(1, 0, 2, 3))
    yield case("Pad", floats(3, 4), vector(1, -1, -2, 3), np.float32(7))
    yield case("Pad", ints(3, 4), vector(2, -1), np.int64(-1), vector(-1))
    yield case("Pad", floats(0, 4), vector(1, 0, 1, 0))
    yield case("Pad", bools(2, 3), vector(0, 1, 0, 1), np.bool_(True))


def indexing_cases():
    for axis in (0, 1, -1):
        for indices in (vector(0, 2, -1), ints(2, 2, low=-3, high=3), np.int64(-2), ints(0, 3)):
            yield case("Gather", floats(3, 3, 3), indices, axis=axis)
    yield case("Gather", ints(5), ints(2, 1, low=-5, high=5, dtype=np.int32))
    yield case("Gather", bools(4, 3), vector(1, 0))
    for axis in (0, 1, -1):
        yield case("GatherElements", floats(3, 4, 5), ints(2, 3, 4, low=-3, high=3), axis=axis)
    yield case("GatherElements", ints(4), ints(6, low=-4, high=4))
    yield case("GatherElements", floats(3, 4), ints(0, 4))
    for reduction in ("none", "add"):
        x, indices = floats(3, 4, 5), rng.permuted(np.tile(np.arange(3), (2, 2, 1)), axis=2).transpose(2, 1, 0)
        yield case("ScatterElements", x, indices, floats(*indices.shape), axis=0, reduction=reduction)
    yield case("ScatterElements", floats(2, 5), vector(1, -2, 1)[None], floats(1, 3), axis=-1, reduction="add")
    yield case("ScatterElements", ints(2, 5), vector(1, -2)[None], ints(1, 2), axis=1)
    for upper in (0, 1):
        for shape in ((3, 5), (2, 4, 3), (0, 3)):
            yield case("Trilu", floats(*shape), upper=upper)
            yield case("Trilu", floats(*shape), np.int64(1), upper=upper)
            yield case("Trilu", ints(*shape), np.int64(-2), upper=upper)
    yield case("Trilu", bools(4, 4))


def reduction_cases():
    for name in ("LogSumExp", "Max", "Mean", "Min", "Prod", "Sum"):
        operator = f"Reduce{name}"
        for axes in ((0,), (-1,), (1, 2), (0, 2), (2, 0, 1)):
            yield case(operator, floats(2, 3, 4), vector(*axes), keepdims=len(axes) % 2)
        yield case(operator, floats(2, 3))
        yield case(operator, floats(2, 3), keepdims=0)
        yield case(operator, floats(2, 3), noop_with_empty_axes=1)
        yield case(operator, floats(0, 3), vector(1))
    for operator in ("ReduceMax", "ReduceMin", "ReduceProd", "ReduceSum"):
        yield case(operator, ints(3, 4, low=1), vector(1))
    yield case("ReduceSum", floats(3, 0), vector(1))
    yield case("ReduceProd", floats(3, 0), vector(1))
    yield case("ReduceLogSumExp", np.array([[-np.inf, -np.inf], [-np.inf, 1], [200, 201]], np.float32), vector(1))
    for operator in ("Softmax", "LogSoftmax"):
        for axis in (0, 1, -1):
            yield case(operator, floats(3, 4, 5, scale=5), axis=axis)
            yield case(operator, floats(2, 0, 5), axis=axis)
        yield case(operator, np.array([[-np.inf, 1, 2], [1e4, -1e4, 0], [-np.inf, 0, -np.inf]], np.float32))
    yield case("LayerNormalization", floats(2, 3, 8), floats(8), floats(8))
    yield case("LayerNormalization", floats(2, 3, 8, scale=1e-3), floats(8), epsilon=1e-3)
    yield case("LayerNormalization", floats(2, 3, 4), floats(3, 4), floats(3, 4), axis=1)
    yield case("LayerNormalization", floats(2, 0, 4), floats(4), axis=-1)
    for axis in (0, 1, -1):
        for exclusive in (0, 1):
            for reverse in (0, 1):
                yield case("CumSum", floats(3, 4, 2), np.int64(axis), exclusive=exclusive, reverse=reverse)
    yield case("CumSum", ints(5), np.int32(0))
    yield case("CumSum", floats(2, 0), np.int64(1))
    for axis in (0, -1):
        for largest in (0, 1):
            yield case("TopK", floats(4, 5), vector(3), outputs=2, axis=axis, largest=largest)
    yield case("TopK", vector(1, 3, 3, 2, 3), vector(3), outputs=2)
    yield case("TopK", floats(2, 3), vector(0), outputs=2)


def product_cases():
    for shapes in [
        ((3, 4), (4, 5)),
        ((1, 9), (9, 7)),
        ((5, 30), (30, 33)),
        ((2, 3, 4), (4, 5)),
        ((2, 3, 4), (2, 4, 6)),
        ((2, 1, 5, 4), (3, 4, 2)),
        ((5, 4), (3, 4, 1)),
        ((1, 5, 4), (3, 4, 2)),
        ((4,), (4, 5)),
        ((2, 3, 4), (4,)),
        ((4,), (4,)),
        ((4,), (2, 4, 3)),
        ((0, 4), (4, 5)),
        ((3, 0), (0, 5)),
        ((2, 3, 4), (2, 4, 0)),
    ]:
        yield case("MatMul", *(floats(*shape) for shape in shapes))
    yield case("Gemm", floats(3, 4), floats(4, 5))
    yield case("Gemm", floats(3, 4), floats(5, 4), floats(5), transB=1)
    yield case("Gemm", floats(4, 3), floats(4, 5), floats(3, 1), transA=1, alpha=0.5, beta=2.0)
    yield case("Gemm", floats(4, 3), floats(5, 4), floats(3, 5), transA=1, transB=1, beta=0.5)
    yield case("Gemm", floats(0, 3), floats(3, 2), floats())
    yield case("Conv", floats(2, 3, 7), floats(4, 3, 3), floats(4), pads=[1, 1])
    yield case("Conv", floats(2, 1, 5), floats(2, 1, 5), pads=[4, 0], kernel_shape=[5])
    yield case("Conv", floats(1, 2, 4), floats(3, 2, 1), dilations=[1], group=1, strides=[1], auto_pad="NOTSET")


def recurrent_cases():
    for operator, gates in (("LSTM", 4), ("GRU", 3)):
        attributes = {"linear_before_reset": 1} if operator == "GRU" else {}
        for direction, D, T in (("forward", 1, 5), ("reverse", 1, 4), ("bidirectional", 2, 3), ("forward", 1, 1)):
            H, B, width = 6, 3, 5
            weights = [floats(D, gates * H, width), floats(D, gates * H, H), floats(D, 2 * gates * H)]
            states = [floats(D, B, H) for _ in range(2 if operator == "LSTM" else 1)]
            settings = {"hidden_size": H, "direction": direction, "outputs": len(states) + 1, **attributes}
            yield case(operator, floats(T, B, width), *weights, None, *states, **settings)
            yield case(operator, floats(T, B, width), *weights[:2], **settings)


def packed(x):
    data = base64.b64encode(np.asarray(x, np.float64).tobytes()).decode()
    return {"type": x.dtype.name, "dims": x.shape, "data": data}


def unpacked(tensor):
    data = np.frombuffer(base64.b64decode(tensor["data"]), np.float64)
    return data.reshape(tensor["dims"]).astype(tensor["type"])


def run_in_node(requests, folder):
    """Return the outputs of the interpreter, or its error message, for pairs of a model's path and its inputs."""
    requested, results = folder / "requests.json", folder / "results.json"
    rows = [{"model": str(path), "feeds": {name: packed(x) for name, x in feeds.items()}} for path, feeds in requests]
    requested.write_text(json.dumps(rows))
    script = Path(__file__).with_name("run_graph.mjs")
    subprocess.run(["node", script, str(PAGE / "onnx.js"), requested, results], check=True)
    answers = json.loads(results.read_text())
    return [
        answer["error"] if "error" in answer else {name: unpacked(tensor) for name, tensor in answer.items()}
        for answer in answers
    ]


def saved(proto, folder, name):
    onnx.save(proto, folder / f"{name}.onnx")
    return folder / f"{name}.onnx"


def reference(path, feeds):
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, feeds), strict=True))


def assert_equal(actual, expected, tolerance=1e-5):
    """Compare outputs: floats within a tolerance, absolute up to 1 and relative above; all else exactly."""
    assert not isinstance(actual, str), actual
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert (actual[name].dtype, actual[name].shape) == (value.dtype, value.shape), name
        exact = value.dtype.kind != "f"
        np.testing.assert_allclose(actual[name], value, *((0, 0) if exact else (tolerance, tolerance)), err_msg=name)


@pytest.fixture(scope="session")
def computed(tmp_path_factory):
    """Return the model, the inputs and the interpreter's outputs of all cases by operator, computed in one process."""
    folder = tmp_path_factory.mktemp("operators")
    groups = (elementwise_cases, shape_cases, indexing_cases, reduction_cases, product_cases, recurrent_cases)
    cases = [case for group in groups for case in group()]
    requests = [(saved(case.model, folder, f"{i}"), case.feeds) for i, case in enumerate(cases)]
    results = {case.operator: [] for case in cases}
    for case, request, outputs in zip(cases, requests, run_in_node(requests, folder), strict=True):
        results[case.operator].append((*request, outputs))
    return results


@pytest.mark.parametrize("operator", sorted(supported_operators()))
def test_operator_matches_onnxruntime(computed, operator):
    for path, feeds, outputs in computed[operator]:
        assert_equal(outputs, reference(path, feeds))


def test_supported_operators_are_those_of_the_interpreter():
    script = "import(process.argv[1]).then(({ OPERATORS }) => console.log(JSON.stringify(Object.keys(OPERATORS))))"
    printed = subprocess.run(["node", "--eval", script, str(PAGE / "onnx.js")], check=True, capture_output=True)
    assert sorted(json.loads(printed.stdout)) == sorted(supported_operators())


REFUSED = {
    "Hardmax": model("Hardmax", [floats(2)], 1, {}),
    "com.microsoft.Gelu": model("Gelu", [floats(2)], 1, {}, domain="com.microsoft"),
    "toString": model("toString", [floats(2)], 1, {}),
    "Pad with mode reflect": model("Pad", [floats(3), vector(1, 1)], 1, {"mode": "reflect"}),
    "Cast with to 16": model("Cast", [floats(2)], 1, {"to": TensorProto.BFLOAT16}),
    "ScatterElements with reduction max": model(
        "ScatterElements", [floats(2), ints(2), floats(2)], 1, {"reduction": "max"}
    ),
    "ReduceSum with axes": model("ReduceSum", [floats(2)], 1, {"axes": [0]}),
    "LSTM with layout 1": model("LSTM", [floats(1, 1, 1), floats(1, 4, 1), floats(1, 4, 1)], 1, {"layout": 1}),
    "GRU with linear_before_reset 0": model("GRU", [floats(1, 1, 1)], 1, {"linear_before_reset": 0}),
}


def test_unsupported_operators_are_named(tmp_path):
    requests = [(saved(proto, tmp_path, name), {}) for name, proto in REFUSED.items()]
    for name, message in zip(REFUSED, run_in_node(requests, tmp_path), strict=True):
        assert message == f"ONNX operators that are not supported: {name}"


def test_all_unsupported_operators_of_a_graph_are_named(tmp_path):
    nodes = [
        helper.make_node(operator, ["x"], [f"y{i}"]) for i, operator in enumerate(("Tan", "Sqrt", "Hardmax", "Tan"))
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, (1,))
    path = saved(make_model(helper.make_graph(nodes, "graph", [x], [])), tmp_path, "graph")
    (message,) = run_in_node([(path, {"x": floats(1)})], tmp_path)
    assert message == "ONNX operators that are not supported: Tan; Hardmax"


def test_missing_inputs_and_wrong_indices_are_errors(tmp_path):
    feeds = case("Gather", floats(3), vector(0, 3)).feeds
    path = saved(case("Gather", floats(3), vector(0, 3)).model, tmp_path, "gather")
    missing, wrong = run_in_node([(path, {"input_0": feeds["input_0"]}), (path, feeds)], tmp_path)
    assert missing == "the input input_1 of the network is missing"
    assert wrong == "Gather: index 3 of 3 elements"


def test_graph_with_constants_of_all_encodings(tmp_path):
    halves = np.array([1.5, -2.25, -6e-8, 65504, -np.inf, 2**-14, -0.0], np.float16)
    constants = {
        "raw": floats(7),
        "flags": np.array([1, 0, 1, 1, 0, 0, 1], bool),
        "halves": halves,
        "shape": vector(1, -1),
        "axes": vector(0),
        "two_axes": vector(1, 2),
        "w": floats(1, 12, 1),
        "r": floats(1, 12, 3),
        "unused": floats(3),
    }
    initializers = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    initializers += [
        helper.make_tensor("listed", TensorProto.FLOAT, [7], floats(7).tolist()),
        helper.make_tensor("listed_halves", TensorProto.FLOAT16, [7], halves),
        helper.make_tensor("numbers", TensorProto.INT64, [2], [-(2**63), 2**63 - 1]),
        helper.make_tensor("indices", TensorProto.INT32, [2], [6, -7]),
        helper.make_tensor("listed_flags", TensorProto.BOOL, [7], [0, 1, 1, 0, 0, 1, 0]),
    ]
    nodes = [
        helper.make_node("Cast", ["halves"], ["widened"], to=TensorProto.FLOAT),
        helper.make_node("Cast", ["listed_halves"], ["widened_too"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["raw", "listed"], ["sum"]),
        helper.make_node("And", ["flags", "listed_flags"], ["both"]),
        helper.make_node("Where", ["both", "sum", "x"], ["chosen"]),
        helper.make_node("Split", ["chosen"], ["first", "unused_part", "last"], num_outputs=3),
        helper.make_node("Gather", ["chosen", "indices"], ["gathered"]),
        helper.make_node("Slice", ["chosen", "start", "end"], ["sliced"]),
        helper.make_node("Split", ["numbers"], ["start", "end"], num_outputs=2),
        helper.make_node("Reshape", ["sliced", "shape"], ["row"]),
        helper.make_node("Squeeze", ["row", "axes"], ["vector"]),
        helper.make_node("Identity", ["x"], ["copy"]),
        helper.make_node("Unsqueeze", ["x", "two_axes"], ["steps"]),
        helper.make_node("LSTM", ["steps", "w", "r"], ["", "", "cell"], hidden_size=3),
    ]
    nodes.insert(0, nodes.pop(8))  # of constants only: computed when the graph is read
    outputs = ["widened", "widened_too", "first", "last", "gathered", "chosen", "vector", "copy", "cell", "raw", "x"]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, (7,))
    results = [onnx.ValueInfoProto(name=name) for name in outputs[:-2]]
    results += [helper.make_tensor_value_info(name, TensorProto.FLOAT, (7,)) for name in outputs[-2:]]
    path = saved(make_model(helper.make_graph(nodes, "graph", [x], results, initializers)), tmp_path, "graph")
    requests = [(path, {"x": floats(7)}) for _ in range(2)]
    for (_, feeds), answer in zip(requests, run_in_node(requests, tmp_path), strict=True):
        assert list(answer) == outputs
        assert_equal(answer, reference(path, feeds))


def make_predictor(network):
    """Return the predictor of a network with random weights."""
    tokenizer = SymbolTokenizer([UNKNOWN, *"abcdefg"])
    torch.manual_seed(0)
    randomize(network).eval()
    if isinstance(network, MaskedEncoder):
        return MaskedLanguageModelPredictor(network, tokenizer)
    return Seq2SeqPredictor(network, tokenizer, 20)


class Recorder:
    """Inputs and outputs of graphs in onnxruntime."""

    def __init__(self):
        self.requests, self.expected = [], []

    def run(self, path, feeds):
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        self.requests.append((path, {value.name: feeds[value.name] for value in session.get_inputs()}))
        self.expected.append(reference(*self.requests[-1]))
        return self.expected[-1]


EXPORTED = {
    "AttentionLSTM": tiny(AttentionLSTM, pointer_generator=True),
    "AttentionLSTM gru hard_monotonic": NETWORKS["AttentionLSTM gru hard_monotonic"],
    "GPT coupled": NETWORKS["GPT coupled"],
    "GPT qwen3": NETWORKS["GPT qwen3"],
    "GPT window logit_cap relu_squared": NETWORKS["GPT window logit_cap relu_squared"],
    "LinearTransformer": NETWORKS["LinearTransformer"],
    "MaskedEncoder": tiny(MaskedEncoder),
    "Transformer monotonic": tiny(Transformer, cross_attention="monotonic", pointer_generator=True, positions="alibi"),
}


@pytest.mark.run
@pytest.mark.parametrize(
    "name", soak_except(("Transformer monotonic", "GPT qwen3", "AttentionLSTM gru hard_monotonic"), EXPORTED)
)
def test_exported_network_matches_onnxruntime(name, tmp_path):
    predictor = make_predictor(EXPORTED[name]())
    pair = onnx_pair.convert(predictor)
    pair.save(tmp_path)
    operators = {node.op_type for graph in pair[:2] if graph for node in graph.graph.node}
    assert operators <= supported_operators()

    mask_shape = [len(pair.description["attention"]), max(layer["heads"] for layer in pair.description["attention"])]
    recorder = Recorder()
    for rows, length in ((1, 1), (1, 8), (3, 5)):
        ids = ints(rows, length, low=3, high=predictor.tokenizer.vocab_size)
        if rows > 1:
            ids[1, length // 2 :] = PAD
        feeds = {"source": ids, "text": ids, "head_mask": bools(*mask_shape).astype(np.float32)}
        outputs = recorder.run(tmp_path / "encode.onnx", feeds)
        state = {name: outputs[name] for name in pair.description["state"]}
        feeds["token"] = np.full(rows, BOS)
        for _ in range(5 if state else 0):
            outputs = recorder.run(tmp_path / "decode_step.onnx", feeds | state)
            state |= {name: outputs[new] for name, new in pair.description["state"].items() if new}
            feeds["token"] = outputs["logits"].argmax(-1)
    for actual, expected in zip(run_in_node(recorder.requests, tmp_path), recorder.expected, strict=True):
        assert_equal(actual, expected)
