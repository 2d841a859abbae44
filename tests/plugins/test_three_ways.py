"""One norm three ways on the same inputs: the function in onnxruntime, the CUDA kernel on the CPU, and float64."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from form_kit import SPECS, Site, assert_right, run, write
from kernel_build import library
from kernel_call import TYPES, Kernels, numpy_type, placed, problem_of

from rmsnorm_onnx.oracle import error_bound, reference


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    """The library, built here."""
    return Kernels(library())


def by_kernel(kernels: Kernels, site: Site) -> np.ndarray:
    """The site's result by the CUDA source, run on the CPU."""
    arrays = site.arrays()
    x = arrays["x"]
    kinds = {name: str(arrays.get(name, x).dtype) for name in ("gain", "bias")}
    problem = problem_of(site.spec, site.x_type, x.shape, kinds["gain"], kinds["bias"])
    arrays["y"] = np.full(x.shape, np.nan, numpy_type(site.spec.resolve(site.x_type).result_type))
    with contextlib.ExitStack() as stack:
        for name, array in list(arrays.items()):
            place = stack.enter_context(placed(array))
            setattr(problem, name, place.address)
            arrays[name] = place.array
        assert kernels.launch(problem) == "OK"
        return arrays["y"].copy()


@pytest.mark.parametrize("x_type", TYPES)
@pytest.mark.parametrize("name", [name for name in SPECS if name != "double statistic"])
def test_they_agree(kernels: Kernels, name: str, x_type: str) -> None:
    """Both are within the reference's bound of it, element by element, and so within twice that of one another."""
    site = Site(SPECS[name], x_type)
    arrays, spec = site.arrays(), site.spec
    model = write([site], "function", 18)
    assert_right(model, [site])
    (ours,) = run(model, [site])
    native = by_kernel(kernels, site).astype(np.float64)
    given = (spec, arrays["x"], arrays.get("gain"), arrays.get("bias"))
    expected, bound = reference(*given), error_bound(*given)
    held = np.isfinite(bound)
    assert held.mean() > 0.5
    zero_over_zero = (expected == 0) & (spec.epsilon == 0)  # NaN in onnxruntime, 0 in the kernel
    assert np.all((np.abs(native - expected) <= bound) | ~held)
    apart = np.abs(native - ours.astype(np.float64))
    assert np.all((apart <= 2 * bound) | ~held | zero_over_zero)
