"""Keras 3 models on the torch backend to ONNX: the layer's rounding points, its axes, its policies, its names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch

from rmsnorm_onnx import dtypes
from rmsnorm_onnx.errors import ExportError, UsageError
from rmsnorm_onnx.exporters import export_keras
from rmsnorm_onnx.exporters.keras import layer_spec, norm_layers
from rmsnorm_onnx.inputs import RowKinds
from rmsnorm_onnx.oracle import error_bound, reference
from rmsnorm_onnx.parity import verify

POLICIES = {"float32": "float32", "float16": "float16", "bfloat16": "bfloat16", "mixed_float16": "float16"}


@pytest.fixture(scope="module")
def keras() -> Any:
    """Keras on the torch backend, imported when the first test here runs."""
    os.environ["KERAS_BACKEND"] = "torch"
    import keras

    assert keras.backend.backend() == "torch"
    return keras


def spread(model: Any) -> Any:
    """Give every scale seeded values that no half type holds exactly."""
    rng = np.random.default_rng(0)
    for layer in norm_layers(model):
        layer.scale.assign(rng.uniform(0.5, 1.5, layer.scale.shape))
    return model


def block(keras: Any, policy: str = "float32") -> Any:
    """A Functional model with a residual, of two lengths that are not fixed."""
    layers = keras.layers
    x = keras.Input((None, 16), name="values")
    y = layers.RMSNormalization(epsilon=1e-5, dtype=policy, name="before")(x)
    y = layers.Dense(16, dtype=policy, name="dense")(y)
    y = layers.Add(dtype=policy)([x, y])
    return spread(keras.Model(x, layers.RMSNormalization(dtype=policy, name="after")(y), name="block"))


def run(model: ir.Model, folder: Path, *feeds: np.ndarray) -> list[np.ndarray]:
    """Check a model fully and run it."""
    path = folder / "model.onnx"
    ir.save(model, path)
    onnx.checker.check_model(str(path), full_check=True)
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(None, dict(zip([i.name for i in session.get_inputs()], feeds, strict=True)))


def test_functional_model(keras: Any, tmp_path: Path) -> None:
    """A Functional model keeps its dynamic dimensions and its names, and each norm its layer's spec and bound."""
    model = block(keras)
    result = export_keras(model)
    assert (result.report.found, result.report.rewritten, result.report.declined) == (2, 2, 0)
    specs = [site.spec.canonical("float32") for site in result.report.sites]
    assert [round(s.epsilon, 9) for s in specs] == [1e-5, 1e-6]
    meant = [layer_spec(layer).canonical("float32") for layer in norm_layers(model)]
    assert {s.replace(epsilon=0.0) for s in specs} == {s.replace(epsilon=0.0) for s in meant}
    [value], [output] = result.model.graph.inputs, result.model.graph.outputs
    assert (value.name, [str(d) for d in value.shape]) == ("values", ["batch", "values_dim_1", "16"])
    assert output.name == "after"
    names = set(result.model.graph.initializers)
    assert {variable.path for variable in model.variables} == {
        "before/scale",
        "dense/kernel",
        "dense/bias",
        "after/scale",
    }
    assert {variable.path for variable in model.variables} <= names
    x = np.random.default_rng(1).standard_normal((3, 5, 16)).astype(np.float32)
    with torch.no_grad():
        wanted = model(torch.from_numpy(x)).numpy()
    assert np.abs(run(result.model, tmp_path, x)[0] - wanted).max() <= 1e-5
    assert all(site.within for site in verify(result.model).sites)


def norm_alone(keras: Any, policy: str, shape: tuple[int | None, ...], axis: Any) -> Any:
    """One layer, behind float32 inputs and outputs; its scale is seeded."""
    x = keras.Input(shape)
    y = keras.layers.RMSNormalization(axis=axis, epsilon=1e-5, dtype=policy)(x)
    y = keras.layers.Activation("linear", dtype="float32")(y)
    return spread(keras.Model(x, y))


def check_rounding(keras: Any, policy: str, folder: Path, axis: Any = -1) -> None:
    """The graph's norm and Keras' own are the spec's: one rounding, to the compute type, of float32 numbers."""
    model = norm_alone(keras, policy, (None, 4, 8), axis)
    [layer] = norm_layers(model)
    dtype, spec = POLICIES[policy], layer_spec(layer)
    result = export_keras(model)
    [site] = result.report.sites
    assert site.action == "rewritten" and site.x_type == dtype
    assert site.spec.canonical(dtype) == spec.canonical(dtype)
    kind = dtypes.numpy_dtype(dtype)
    gain = layer.scale.value.detach().float().numpy().astype(kind)
    same = total = 0
    for x in RowKinds(spec, dtype, (2, 3, 4, 8)).batches(np.random.default_rng(0)):
        feed = x.astype(np.float32)
        with torch.no_grad():
            theirs = model(torch.from_numpy(feed)).float().numpy()
        exact, bound = reference(spec, x, gain), error_bound(spec, x, gain)
        for y in (run(result.model, folder, feed)[0], theirs):
            assert np.all((np.abs(y - exact) <= bound) | np.isinf(bound))
        same += int((theirs.astype(kind) == reference(spec, x, gain, rounded=True)).sum())
        total += x.size
    if dtype != "float32":
        assert same > 0.995 * total


def test_mixed_precision(keras: Any, tmp_path: Path) -> None:
    """Under mixed_float16 the scale is kept in float32, rounded to float16 before use, and the result rounded once."""
    check_rounding(keras, "mixed_float16", tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("axis", [-1, [-2, -1], [1, 2, 3]])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_and_axis(keras: Any, policy: str, axis: Any, tmp_path: Path) -> None:
    """The same for every dtype policy, over one, two and three trailing axes."""
    if axis == [1, 2, 3]:
        model = spread(keras.Sequential([keras.Input((3, 4, 8)), keras.layers.RMSNormalization(axis=axis)]))
        [site] = export_keras(model).report.sites
        assert site.action == "rewritten" and site.spec.axes == (-3, -2, -1)
    else:
        check_rounding(keras, policy, tmp_path, axis)


@pytest.mark.parametrize(("shape", "axis"), [((5, 6), 1), ((6, 6), 1), ((3, 4, 5), [1, 3])])
def test_axes_that_keras_gets_wrong(keras: Any, shape: tuple[int, ...], axis: Any) -> None:
    """Keras normalises the last axis for an inner one, in silence where the sizes agree: the export is refused."""
    x = keras.Input(shape)
    model = keras.Model(x, keras.layers.RMSNormalization(axis=axis)(x))
    if shape == (6, 6):
        values = torch.randn(2, *shape)
        last = values / torch.sqrt((values * values).mean(-1, keepdim=True) + 1e-6)
        assert torch.allclose(model(values), last)
    with pytest.raises(ExportError, match=r"normalises axes .* itself gets wrong .*put keras.layers.Permute around it"):
        export_keras(model)


@pytest.mark.full
def test_inner_axis_by_permuting(keras: Any, tmp_path: Path) -> None:
    """The way that the message names: Permute around the layer normalises channels that come first."""
    x = keras.Input((4, None))
    y = keras.layers.Permute((2, 1))(x)
    y = keras.layers.RMSNormalization()(y)
    model = spread(keras.Model(x, keras.layers.Permute((2, 1))(y)))
    result = export_keras(model)
    assert (result.report.found, result.report.declined) == (1, 0)
    values = np.random.default_rng(1).standard_normal((3, 4, 9)).astype(np.float32)
    gain = norm_layers(model)[0].scale.value.detach().numpy()
    spec = layer_spec(norm_layers(model)[0]).replace(axes=(-2,))
    [y] = run(result.model, tmp_path, values)
    assert np.all(np.abs(y - reference(spec, values, gain[:, None])) <= error_bound(spec, values, gain[:, None]))


@pytest.mark.full
def test_sequential_and_subclassed_models(keras: Any, tmp_path: Path) -> None:
    """A Sequential model needs no inputs; a subclassed one takes arrays, of which two dimensions are dynamic."""
    layers = keras.layers
    model = spread(keras.Sequential([keras.Input((7, 16), name="x"), layers.Dense(8), layers.RMSNormalization()]))
    result = export_keras(model)
    assert [str(d) for d in result.model.graph.inputs[0].shape] == ["batch", "7", "16"]
    assert (result.report.found, result.report.declined) == (1, 0)

    class Sub(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.inner = layers.RMSNormalization(epsilon=1e-4)

        def call(self, x: Any, y: Any) -> Any:
            return self.inner(x) + y

    sub, x = Sub(), np.random.default_rng(0).standard_normal((2, 7, 16)).astype(np.float32)
    with pytest.raises(UsageError, match="is not built; call it once, or give it an Input"):
        export_keras(sub, (x, x))
    sub(x, x)
    with pytest.raises(UsageError, match="declares no inputs; give example inputs"):
        export_keras(sub)
    result = export_keras(sub, (x, x))
    [site] = result.report.sites
    assert site.action == "rewritten" and np.float32(site.spec.epsilon) == np.float32(1e-4)
    x = np.random.default_rng(1).standard_normal((3, 5, 16)).astype(np.float32)
    assert np.abs(run(result.model, tmp_path, x, x)[0] - sub(x, x).detach().numpy()).max() <= 1e-5


def test_several_inputs_by_name(keras: Any) -> None:
    """A model of a dict of inputs keeps their names; whole numbers are example inputs too."""
    layers = keras.layers
    inputs = {"ids": keras.Input((None,), dtype="int32", name="ids"), "mix": keras.Input((None, 8), name="mix")}
    x = layers.Add()([layers.Embedding(10, 8)(inputs["ids"]), inputs["mix"]])
    result = export_keras(keras.Model(inputs, layers.RMSNormalization(name="out")(x)))
    assert [(v.name, v.dtype) for v in result.model.graph.inputs] == [
        ("ids", ir.DataType.INT32), ("mix", ir.DataType.FLOAT)
    ]  # fmt: skip
    assert (result.report.found, result.model.graph.outputs[0].name) == (1, "out")


def test_arguments_without_meaning(keras: Any, tmp_path: Path) -> None:
    """What is no Keras model, and a type that is not a policy, are usage errors; nothing is written."""
    with pytest.raises(UsageError, match="a Linear is no Keras model"):
        export_keras(torch.nn.Linear(2, 2))
    with pytest.raises(UsageError, match="types are its dtype policies'"):
        export_keras(block(keras), dtype="float16", output=tmp_path / "m.onnx")
    assert list(tmp_path.iterdir()) == []


def test_another_backend(keras: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On another backend than torch the error says how to choose it."""
    model = block(keras)
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(UsageError, match=r"Keras runs on jax here.*set KERAS_BACKEND=torch before keras is imported"):
        export_keras(model)


def test_missing_keras() -> None:
    """Without Keras the error names the pip command."""
    program = (
        "import importlib.util, sys; find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'keras' else find(name, *rest)\n"
        "import rmsnorm_onnx.exporters as e; from rmsnorm_onnx.errors import MissingDependencyError\n"
        "try: e.export_keras(object())\nexcept MissingDependencyError as error: print(error)"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "exporting a Keras model needs keras: pip install 'rmsnorm_onnx[keras]'" in ran.stdout
