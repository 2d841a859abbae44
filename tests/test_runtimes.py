"""What has no kernel is named before anything is loaded, and onnxruntime agrees."""

import sys

import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from rmsnorm_onnx import runtimes
from rmsnorm_onnx.errors import MissingDependencyError, UsageError
from rmsnorm_onnx.kernels import Registry
from rmsnorm_onnx.runtimes import missing_kernels

FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)
VECTOR_INPUTS = ("RMSNormalization", "SimplifiedLayerNormalization", "LayerNormalization")
OPERATORS = [
    *[(op, 2) for op in ("Mul", "Add", "Div", "Pow", "MatMul", "CastLike", *VECTOR_INPUTS)],
    *[(op, 1) for op in ("Sqrt", "Reciprocal", "ReduceMean", "ReduceL2", "ReduceSumSquare", "Identity", "Transpose")],
    *[(op, 1) for op in ("Softmax", "Relu", "Gelu", "Elu", "HardSwish", "Mish", "Clip", "Tanh", "LpNormalization")],
    ("NoSuchOperator", 1),
]


def one(op: str, kind: int, count: int, opset: int) -> onnx.ModelProto:
    """A model of one operator on inputs of one type."""
    shapes = [[4] if i and op in VECTOR_INPUTS else [4, 4] for i in range(count)]
    names = [f"x{i}" for i in range(count)]
    inputs = [helper.make_tensor_value_info(n, kind, s) for n, s in zip(names, shapes, strict=True)]
    output = helper.make_tensor_value_info("y", kind, None)
    graph = helper.make_graph([helper.make_node(op, names, ["y"], name="n")], "g", inputs, [output])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def loads(proto: onnx.ModelProto) -> bool:
    """Whether onnxruntime's CPU provider loads a model."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception:  # onnxruntime's exceptions have no common base, and any of them means that it does not load
        return False
    return True


def gaps(proto: onnx.ModelProto) -> list[str]:
    """What is said to have no kernel."""
    return [str(gap) for gap in missing_kernels(ir.from_proto(proto))]


def parse(text: str) -> onnx.ModelProto:
    """A model from its text."""
    return onnx.parser.parse_model(text)


@pytest.mark.parametrize(
    "opset", [18, 23, pytest.param(24, marks=pytest.mark.full), pytest.param(28, marks=pytest.mark.full)]
)
@pytest.mark.parametrize(("op", "count"), OPERATORS)
def test_one_operator(op: str, count: int, opset: int) -> None:
    """For every float type, an operator is named if and only if onnxruntime does not load it."""
    for kind in FLOATS:
        proto = one(op, kind, count, opset)
        assert loads(proto) == (not gaps(proto)), (TensorProto.DataType.Name(kind), gaps(proto))


def test_bfloat16_norms() -> None:
    """In bfloat16 the contrib norm has a kernel, RMSNormalization and Mul have none, and the message says where."""
    assert gaps(one("SimplifiedLayerNormalization", TensorProto.BFLOAT16, 2, 18)) == []
    assert gaps(one("RMSNormalization", TensorProto.BFLOAT16, 2, 23)) == [
        "RMSNormalization(23) has no bfloat16 kernel in onnxruntime: node 'n'"
    ]
    assert gaps(one("NoSuchOperator", TensorProto.FLOAT, 1, 18)) == [
        "NoSuchOperator is not known in onnxruntime: node 'n'"
    ]


TEXTS = {
    "the two-rounding bfloat16 norm around a float32 Mul": (
        True,
        """<ir_version: 10, opset_import: ["" : 18]>
        g (bfloat16[2, 4] x, bfloat16[4] w) => (bfloat16[2, 4] y) {
            a = Cast<to = 1>(x)  b = ReduceSumSquare(a)  c = Div(a, b)  d = Cast<to = 16>(c)
            e = Cast<to = 1>(d)  f = Cast<to = 1>(w)  h = Mul(e, f)  y = Cast<to = 16>(h)
        }""",
    ),
    "a bfloat16 Mul behind casts, its type nowhere declared": (
        False,
        """<ir_version: 10, opset_import: ["" : 18]>
        g (float[2, 4] x, float[4] w) => (float[2, 4] y) {
            a = Cast<to = 16>(x)  b = Cast<to = 16>(w)  c = Mul(a, b)  d = Mul(c, b)  y = Cast<to = 1>(d)
        }""",
    ),
    "in a branch": (
        False,
        """<ir_version: 10, opset_import: ["" : 18]>
        g (bool b, bfloat16[4] x) => (bfloat16[4] y) {
            y = If(b) <then_branch = t () => (bfloat16[4] p) { p = Add(x, x) },
                       else_branch = e () => (bfloat16[4] q) { q = Identity(x) }>
        }""",
    ),
    "a local function, called with float32 and with bfloat16": (
        False,
        """<ir_version: 10, opset_import: ["" : 18, "own" : 1]>
        g (float[4] x, bfloat16[4] z) => (float[4] y, bfloat16[4] w) { y = own.F(x)  w = own.F(z) }
        <domain: "own", opset_import: ["" : 18]> F (a) => (b) { b = Mul(a, a) }""",
    ),
    "a local function, called with float32 alone": (
        True,
        """<ir_version: 10, opset_import: ["" : 18, "own" : 1]>
        g (float[4] x) => (float[4] y) { y = own.F(x) }
        <domain: "own", opset_import: ["" : 18]> F (a) => (b) { b = Mul(a, a) }""",
    ),
    "a local function that casts to the type that its node names": (
        False,
        """<ir_version: 10, opset_import: ["" : 18, "own" : 1]>
        g (float[4] x) => (bfloat16[4] y) { y = own.F<kind = 16>(x) }
        <domain: "own", opset_import: ["" : 18]> F <kind>(a) => (c) { b = Cast<to: int = @kind>(a)  c = Neg(b) }""",
    ),
    "a local function with a tensor attribute": (
        False,
        """<ir_version: 10, opset_import: ["" : 18, "own" : 1]>
        g (bfloat16[1] x) => (bfloat16[1] y) { y = own.F<k: tensor = bfloat16[1] {1}>(x) }
        <domain: "own", opset_import: ["" : 18]>
        F <k>(a) => (c) { b = Constant<value: tensor = @k>()  c = Add(a, b) }""",
    ),
    "a branch that yields bfloat16": (
        False,
        """<ir_version: 10, opset_import: ["" : 18]>
        g (bool b, float[4] x) => (float[4] y) {
            z = If(b) <then_branch = t () => (bfloat16[4] p) { p = Cast<to = 16>(x) },
                       else_branch = e () => (bfloat16[4] q) { q = Cast<to = 16>(x) }>
            w = Sqrt(z)
            y = Cast<to = 1>(w)
        }""",
    ),
    "constants and integers": (
        True,
        """<ir_version: 10, opset_import: ["" : 18]>
        g (float[2, 4] x) => (float[2, 4] y, int64[2] s) {
            i = Constant<value_ints = [1]>()  m = ReduceMean(x, i)  y = Sub(x, m)  s = Shape(y)
        }""",
    ),
}


@pytest.mark.parametrize("name", TEXTS)
def test_whole_models(name: str) -> None:
    """Types are followed through casts, branches and functions, and onnxruntime agrees."""
    runs, text = TEXTS[name]
    proto = parse(text)
    assert (gaps(proto) == []) is runs, gaps(proto)
    assert loads(proto) is runs


def test_overloads_are_told_apart() -> None:
    """Each call walks its own overload of a function, and a call counts each of its nodes."""
    proto = parse(TEXTS["a local function, called with float32 alone"][1])
    other = proto.functions.add()
    other.CopyFrom(proto.functions[0])
    other.overload = "half"
    other.node.insert(0, helper.make_node("Cast", ["a"], ["c"], to=TensorProto.BFLOAT16))
    other.node[1].input[:] = ["c", "c"]
    assert gaps(proto) == []
    proto.graph.node[0].overload = "half"
    assert [gap.count for gap in missing_kernels(ir.from_proto(proto))] == [1]


def test_the_number_of_nodes_and_the_first() -> None:
    """Nodes that agree are counted, and the first in graph order is named."""
    proto = parse(TEXTS["a bfloat16 Mul behind casts, its type nowhere declared"][1])
    (gap,) = missing_kernels(ir.from_proto(proto))
    assert (gap.op, gap.domain, gap.type, gap.node, gap.count) == ("Mul(14)", "", "bfloat16", "c", 2)
    assert str(gap) == "Mul(14) has no bfloat16 kernel in onnxruntime: 2 nodes, the first is 'c'"


def test_another_runtime_is_refused() -> None:
    """No other runtime lists its kernels."""
    with pytest.raises(UsageError, match="'tensorrt'; use 'onnxruntime'"):
        missing_kernels(ir.from_proto(one("Mul", TensorProto.FLOAT, 2, 18)), "tensorrt")


def test_without_onnxruntime(monkeypatch: pytest.MonkeyPatch) -> None:
    """The missing package is named with its pip command."""
    Registry.load.cache_clear()
    monkeypatch.setitem(sys.modules, "onnxruntime.capi", None)
    with pytest.raises(MissingDependencyError, match=r"listing kernels needs onnxruntime: pip install 'onnxruntime"):
        missing_kernels(ir.from_proto(one("Mul", TensorProto.FLOAT, 2, 18)))
    monkeypatch.undo()
    Registry.load.cache_clear()


def test_packages() -> None:
    """Installed packages have their versions, missing ones their pip command."""
    known = {p.name: p for p in runtimes.packages()}
    assert known["onnx"].version == onnx.__version__ and known["torch"].version
    assert known["tensorrt"].install.startswith("pip install 'tensorrt")
