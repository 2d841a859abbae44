"""What the plugin takes and refuses, as tables: fields, specs, and tensors beside them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np
from kernel_call import TYPES, numpy_type
from plugin_call import CHW2, Field, Tensor, field, fields_of

from rmsnorm_onnx.forms.plugin import FIELDS
from rmsnorm_onnx.spec import RMSNormSpec

PLAIN = RMSNormSpec(epsilon=1e-6)
INTS, FLOATS = ("axes", "leading", "has_gain", "has_bias"), ("epsilon", "gain_offset")
STRINGS = tuple(name for name in FIELDS if name not in (*INTS, *FLOATS))
TYPE_FIELDS = tuple(name for name in FIELDS if name.endswith("_type"))
GAIN = np.arange(16, dtype=np.float32)


def int64(*values: int) -> Field:
    """Integers as INT64."""
    return Field(np.array(values, np.int64).tobytes(), "INT64", len(values))


def bad_fields() -> Iterator[tuple[str, Mapping[str, Field | None], str]]:
    """A field, the change to good fields, and the words that its one line must have beside the field's name."""
    for name in FIELDS:
        yield name, {name: None}, "it is missing; write it as"
        good = fields_of(PLAIN)[name]
        yield name, {name: dataclasses.replace(good, data=None)}, "it has no data"
        wrong = field(1.5) if name not in FLOATS else field(1)
        yield name, {name: wrong}, f"it is {wrong.type}[1]; write it as"
    for name in (*FLOATS, *(n for n in INTS if n != "axes")):
        twice = field(np.array([1, 1], np.float32)) if name in FLOATS else field([1, 1])
        yield name, {name: twice}, f"it is {twice.type}[2]; write it as one"
    for name in STRINGS:
        yield name, {name: Field(b"", "CHAR", 0)}, "it is CHAR[0]; write it as"
        yield name, {name: field("")}, 'it is "", and it must be'
        yield name, {name: field("float8")}, 'it is "float8", and it must be'
    yield "axes", {"axes": Field(b"", "INT32", 0)}, "it is empty"
    yield "axes", {"axes": Field(b"", "INT32", -1)}, "it is INT32[-1]"
    for axes, word in (([0], "0"), ([1], "1"), ([-9], "-9"), ([-2, 0], "0")):
        yield "axes", {"axes": field(axes)}, f"it holds {word}, and axes are counted from the last: write -1 to -8"
    for axes in ([-1, -2], [-3, -2], [-1, -1], [-3, -1]):
        yield "axes", {"axes": field(axes)}, "it must be trailing axes in ascending order, or one inner axis"
    for value in (-1e-6, float("nan"), float("inf")):
        yield "epsilon", {"epsilon": field(value)}, "it must be finite and not negative"
    for value in (float("nan"), float("inf")):
        yield "gain_offset", {"gain_offset": field(value)}, "it must be finite"
    offset = {"has_gain": field(0), "gain_offset": field(1.0)}
    yield "gain_offset", offset, "there is no gain to add it to"
    for value in (int64(-1), int64(2**31), field(-1)):
        yield "leading", {"leading": value}, "it must be a number of elements, or 0"
    for axes in ([-2], [-2, -1]):
        yield "leading", {"leading": field(4), "axes": field(axes)}, "it goes with the last axis alone"
    for name in ("has_gain", "has_bias"):
        for value in (2, -1):
            yield name, {name: field(value)}, f"it is {value}, and it must be 0 or 1"
    for name in TYPE_FIELDS:
        yield name, {name: field("float64")}, "TensorRT has no float64 plugins"
    for value in ("float16", "bfloat16"):
        yield "statistic_type", {"statistic_type": field(value)}, "the statistic is taken in float32: write float32"
    yield "gain", {"gain": field(GAIN), "has_gain": field(0)}, "it is given, and has_gain is 0"
    for wrong in (field(GAIN.astype(np.float64)), field([1, 2]), field("float32")):
        yield "gain", {"gain": wrong}, f"it is {wrong.type}[{wrong.length}]; write it as a tensor of float32"
    yield "gain", {"gain": Field(b"", "FLOAT32", 0)}, "it has no elements"
    yield "gain", {"gain": Field(None, "FLOAT32", 4)}, "it has no elements"
    yield "gain", {"gain": Field(b"", "FLOAT32", -4)}, "it has no elements"
    yield "eps", {"eps": field(1.0)}, "it is unknown; the fields are axes, epsilon,"
    yield "axis", {"axis": field(-1)}, "it is unknown"


def variants() -> Iterator[tuple[str, RMSNormSpec, np.ndarray | None]]:
    """Specs of which each differs from the plain one in one field, by that field's name; and gains."""
    changes: dict[str, tuple[object, ...]] = {
        "axes": ((-2,), (-2, -1), (-3, -2, -1)),
        "epsilon": (0.0, float(np.nextafter(np.float32(1e-6), np.float32(1))), 1e-5),
        "epsilon_placement": ("outside", "clamp"),
        "leading": (1, 5),
        "gain_offset": (1.0, -0.5),
        "has_bias": (True,),
        "statistic_type": ("x",),
        **{name: TYPES for name in ("factor_type", "gain_type", "result_type", "normalized_type")},
    }
    for name, values in changes.items():
        for value in values:
            if value != getattr(PLAIN, name):
                yield name, PLAIN.replace(**{name: value}), None
    yield "has_gain", PLAIN.replace(has_gain=False), None
    for dtype in TYPES:
        yield "gain", PLAIN, GAIN.astype(numpy_type(dtype))
    yield "gain", PLAIN, GAIN[:8]
    yield "gain", PLAIN, GAIN + 1
    yield "", PLAIN, None


@dataclasses.dataclass(frozen=True)
class Fit:
    """A plugin beside tensors: x, and what its fields ask for, then y. `words`: why it is refused; "" where it fits."""

    words: str
    spec: RMSNormSpec
    tensors: tuple[Tensor, ...]
    gain: np.ndarray | None = None
    outputs: int = 1
    later: bool = False  # only the launch's sizes show it


def fits() -> Iterator[Fit]:
    """Good and bad tensors."""
    for dtype in TYPES:
        x, w = Tensor((2, 3, 16), dtype), Tensor((16,), dtype)
        wide = Tensor((16,), "float32")
        yield Fit("", PLAIN, (x, w, x))
        yield Fit("", PLAIN, (x, wide, x))
        yield Fit("", PLAIN.replace(has_gain=False), (x, x))
        yield Fit("", PLAIN.replace(has_bias=True), (x, w, wide, x))
        yield Fit("", PLAIN.replace(has_bias=True, has_gain=False), (x, w, x))
        for result in TYPES:
            yield Fit("", PLAIN.replace(result_type=result), (x, w, Tensor(x.shape, result)))
            wrong = Tensor(x.shape, next(t for t in TYPES if t != result))
            yield Fit(
                f"y is {wrong.type}, and its fields ask for {result}", PLAIN.replace(result_type=result), (x, w, wrong)
            )
        yield Fit("", PLAIN, (x, x), gain=GAIN)
        yield Fit("", PLAIN.replace(has_bias=True), (x, w, x), gain=GAIN.astype(numpy_type(dtype)))
        for stored in TYPES:
            if stored not in (dtype, "float32"):
                yield Fit(
                    f"field gain: it is {stored} for x in {dtype}, and it must be of x's type or float32",
                    PLAIN,
                    (x, x),
                    gain=GAIN.astype(numpy_type(stored)),
                )
    yield from _shapes()
    yield from _wrong_types()


def _shapes() -> Iterator[Fit]:
    def of(
        x: tuple[int, ...], *vectors: tuple[int, ...], spec: RMSNormSpec = PLAIN, words: str = "", **more: object
    ) -> Fit:
        tensors = (Tensor(x, "float16"), *(Tensor(v, "float16") for v in vectors), Tensor(x, "float16"))
        return Fit(words, spec, tensors, **more)  # type: ignore[arg-type]

    two, inner = PLAIN.replace(axes=(-2, -1)), PLAIN.replace(axes=(-3,))
    image = (2, 16, 4, 5)
    yield of((16,), (16,))
    yield of((1, 1, 1, 2, 1, 2, 3, 16), (16,))
    yield of((2, 3, 16), (1, 16))
    yield of((2, 3, 16), (1, 1, 16))
    yield of((-1, 3, 16), (16,))
    yield of((-1, -1, -1), (16,))
    yield of((2, 3, 16), (-1,))
    yield of((2, 3, 4), (3, 4), spec=two)
    yield of((3, 4), (3, 4), spec=two)
    yield of(image, (16, 1, 1), spec=inner)
    yield of(image, (1, 16, 1, 1), spec=inner)
    yield of((-1, 16, -1, -1), (16, 1, 1), spec=inner)
    yield of((2, 3, 16), (16,), spec=PLAIN.replace(leading=16))
    yield of((2, 3, 4), spec=two, gain=GAIN[:12])
    yield of(image, spec=inner, gain=GAIN)

    one = "and it must have one value for each element along the normalised axes"
    for vector in ((1,), (8,), (), (3, 16), (2, 1, 16), (1, 1, 1, 16), (16, 1)):
        yield of(
            (2, 3, 16), vector, words=f"gain has the shape [{', '.join(map(str, vector))}] for x of [2, 3, 16], {one}"
        )
    for vector in ((4,), (1, 4), (3, 1)):
        yield of((2, 3, 4), vector, spec=two, words=one)
    for vector in ((16,), (16, 1), (16, 4, 1), (2, 16, 1, 1)):
        yield of(image, vector, spec=inner, words=one)
    yield of((2, 3, 16), (16,), (8,), spec=PLAIN.replace(has_bias=True), words="bias has the shape [8]")
    yield of((16,), (16, 16), spec=two, words="field axes: it begins with -2, and x has 1 axis")
    yield of((), (16,), words="field axes: it begins with -1, and x has 0 axes")
    count = "one for each normalised element"
    yield of(
        (2, 3, 16),
        gain=GAIN[:8],
        words=f"field gain: it has 8 elements for x of [2, 3, 16], and it must have 16, {count}",
    )
    yield of((2, 3, 4), spec=two, gain=GAIN, words=count)
    yield of((2, 3, 16), (16,), spec=PLAIN.replace(leading=17), words="field leading: it is 17 for x of [2, 3, 16]")
    for y in ((1, 16), (4, 8), (4, 16, 1), (16,), (), (-1, 8)):
        words = f"y has the shape [{', '.join(map(str, y))}] for x of [4, 16], and it must have x's"
        yield Fit(words, PLAIN, (Tensor((4, 16), "float16"), Tensor((16,), "float16"), Tensor(y, "float16")))
    unknown = "no size that an index can count"
    yield of((-1, 3, 16), (16,), later=True, words=unknown)
    yield of((2, 3, 16), (-1,), later=True, words=unknown)
    yield Fit(
        unknown, PLAIN, (Tensor((4, 16), "float16"), Tensor((16,), "float16"), Tensor((-1, 16), "float16")), later=True
    )
    yield of((2**40, 2**40, 16), (16,), later=True, words="no size that an index can count")
    yield of((2**40, 2**17, 16), (16,), later=True, words="too many bytes")


def _wrong_types() -> Iterator[Fit]:
    x, w = Tensor((2, 3, 16), "float16"), Tensor((16,), "float16")
    gain, bias = "it has {} and its fields ask for x, gain", PLAIN.replace(has_bias=True)
    yield Fit(gain.format("1 input,"), PLAIN, (x, x))
    yield Fit(gain.format("3 inputs,"), PLAIN, (x, w, w, x))
    yield Fit("its fields ask for x: has_gain", PLAIN, (x, w, x), gain=GAIN)
    yield Fit("its fields ask for x, gain, bias", bias, (x, w, x))
    yield Fit("its fields ask for x, bias", bias, (x, w, w, x), gain=GAIN)
    yield Fit("it has 2 outputs, and it must have one", PLAIN, (x, w, x, x), outputs=2)
    for name in ("int8", "int32", "fp8"):
        other = Tensor(x.shape, name)
        words = "and it must be float32, float16 or bfloat16"
        yield Fit(words, PLAIN, (other, Tensor((16,), "float32"), other))
    for name in ("bfloat16", "int8"):
        other = Tensor((16,), name)
        yield Fit("for x in float16, and it must be of x's type or float32", PLAIN, (x, other, x))
        yield Fit("bias is", bias, (x, w, other, x))
    single = Tensor(x.shape, "float32")
    yield Fit("gain is float16 for x in float32", PLAIN, (single, w, single))
    yield Fit("field statistic_type: it is x for x in float16", PLAIN.replace(statistic_type="x"), (x, w, x))
    odd = [dataclasses.replace(t, format=CHW2) for t in (x, w)]
    for name, tensors in (("x", (odd[0], w, x)), ("gain", (x, odd[1], x)), ("y", (x, w, odd[0]))):
        yield Fit(f"{name} is in TensorRT's format 1, and the plugin takes the linear one", PLAIN, tensors)
