"""The tests of RMSNormalization from onnx's own backend suite, through every form and back.

Each case is the operator's node, or its expansion into plain operators, with published inputs and outputs. The outputs
are held to the suite's own tolerance, and the numbers to the bound of the float64 reference.
"""

from __future__ import annotations

import functools
import itertools
import warnings

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from move_kit import assert_within
from onnx.backend.test.case.test_case import TestCase as Case

import rmsnorm_onnx
from rmsnorm_onnx.forms import FORMS
from rmsnorm_onnx.site import DeclineCode, Declined, Match

KINDS = {
    "4d": [f"4d_axis{i}" for i in range(4)] + [f"4d_axis_negative_{i}" for i in range(1, 5)],
    "2d": [f"2d_axis{i}" for i in range(2)] + [f"2d_axis_negative_{i}" for i in range(1, 3)],
    "3d": [f"3d_axis{i}_epsilon" for i in range(3)] + [f"3d_axis_negative_{i}_epsilon" for i in range(1, 4)],
    "default": ["default_axis"],
}
NAMES = [f"test_rms_normalization_{name}" for names in KINDS.values() for name in names]
FEW = ["test_rms_normalization_3d_axis1_epsilon", "test_rms_normalization_default_axis"]
FEW += [f"{name}_expanded" for name in FEW]
WAYS = [*itertools.permutations(FORMS, 2)]


@functools.cache
def cases() -> dict[str, Case]:
    """The suite's cases by name; its modules compute them when they are imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the cases of other operators divide by zero on purpose
        from onnx.backend.test.case.node import collect_testcases

        found = collect_testcases("RMSNormalization")
    return {case.name: case for case in found if case.name.startswith("test_rms_normalization")}


def holds(model: onnx.ModelProto, case: Case) -> Match:
    """Holds a model to the published outputs and to the reference; gives its one norm."""
    import onnxruntime as ort

    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    [norm] = rmsnorm_onnx.find_rms_norms(ir.from_proto(model))
    assert isinstance(norm, Match), norm
    for inputs, published in case.data_sets:
        got = session.run(None, dict(zip(("X", "W"), inputs, strict=True)))
        np.testing.assert_allclose(got[0], published[0], rtol=case.rtol, atol=case.atol)
        assert got[0].dtype == published[0].dtype
        assert_within(got[0], norm.spec, *inputs)
    return norm


def carry(case: Case, forms: tuple[str, ...]) -> None:
    """Takes a case through forms: the same norm in each, the same outputs, valid where the checker knows the form."""
    first = holds(case.model, case)
    model = case.model
    for form in forms:
        model, report = rmsnorm_onnx.fuse(model, form=form)
        assert [site.form for site in report.sites] == [form]
        if form != "contrib":
            onnx.checker.check_model(model, full_check=True)
        norm = holds(model, case)
        assert norm.form == form
        assert norm.spec.canonical("float32") == first.spec.canonical("float32")
        names = [[v.name for v in (*m.graph.input, *m.graph.output)] for m in (model, case.model)]
        assert names[0] == names[1]


def test_the_suite_has_these_cases() -> None:
    """Nineteen nodes and nineteen expansions: a case that a release of onnx adds is to be added here."""
    assert set(cases()) == {*NAMES, *(f"{name}_expanded" for name in NAMES)} and len(NAMES) == 19


def test_axis_and_epsilon_are_the_nodes() -> None:
    """A node and its expansion are the same norm: the axis, counted from the end, and every one after it."""
    for name in FEW[:2]:
        norms = [holds(cases()[case].model, cases()[case]) for case in (name, f"{name}_expanded")]
        axes, epsilon = ((-2, -1), 0.1) if "3d" in name else ((-1,), 1e-5)
        assert {norm.spec.axes for norm in norms} == {axes}
        assert {norm.spec.epsilon for norm in norms} == {float(np.float32(epsilon))}
        assert [norm.form for norm in norms] == ["onnx", "primitive"]


@pytest.mark.parametrize("name", FEW)
def test_a_case_goes_through_every_form_and_back(name: str) -> None:
    """Function, onnx, contrib, plugin, plain operators, and RMSNormalization again."""
    carry(cases()[name], (*FORMS, "onnx"))


@pytest.mark.full
@pytest.mark.parametrize("expanded", ["", "_expanded"])
@pytest.mark.parametrize("name", NAMES)
def test_all_cases_go_both_ways_between_all_forms(name: str, expanded: str) -> None:
    """Every case from every form to every other one and back."""
    for there, back in WAYS:
        carry(cases()[name + expanded], (there, back, there))


def expansion(**changed: int) -> ir.Model:
    """ONNX's body of a norm over the last of three axes, with another number in the place of some Constants."""
    model = ir.from_proto(cases()["test_rms_normalization_3d_axis2_epsilon_expanded"].model)
    for node in model.graph:
        name = (node.outputs[0].name or "").rpartition("_")[2]
        if name in changed:
            node.attributes["value"] = ir.AttrTensor("value", ir.tensor(np.array(changed[name], dtype=np.int64)))
    return model


@pytest.mark.parametrize(
    ("changed", "axes"), [({}, (-1,)), ({"Axis": 1}, (-2, -1)), ({"One": 2, "Axis": 0}, None), ({"One": 0}, None)]
)
def test_the_axes_are_what_the_range_gives(changed: dict[str, int], axes: tuple[int, ...] | None) -> None:
    """Every second axis, or a Range that never ends, is no norm over trailing axes."""
    [norm] = rmsnorm_onnx.find_rms_norms(expansion(**changed))
    assert axes == (norm.spec.axes if isinstance(norm, Match) else None)
    if isinstance(norm, Declined):
        assert norm.code is DeclineCode.AXES
