"""The variants through torch's TorchScript exporter, at the older opsets that it writes."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from variant_kit import (
    beyond,
    bound_of,
    canonical,
    collect,
    declined,
    expected,
    expected_codes,
    is_unsaid,
    numpy_of,
    parameters,
)

import rmsnorm_onnx
from rmsnorm_onnx import modelio
from rmsnorm_onnx.models.variants import VARIANTS, variant
from rmsnorm_onnx.oracle import reference
from rmsnorm_onnx.passes import raise_statistic

UNKNOWN = ("torch", "torch, eps=None", "torch, no gain", "rms_norm", "rms_norm, two axes")
"""TorchScript has no symbol for torch's own operator."""
NAMES = [name for name in VARIANTS if name not in UNKNOWN]
PLAIN = (
    *("llama", "gemma", "t5, float32 gain", "power, no gain", "factor first", "bias", "prmsnorm", "normalize"),
    *("channels, rounded", "heads", "gate before", "modulated", "unbiased variance", "layer norm by hand", "sum"),
)


def write(module: torch.nn.Module, args: Sequence[torch.Tensor], opset: int, path: Path, *, fold: bool = True) -> None:
    """torch's older export, with a dynamic batch; by default it folds 1 + w into one constant."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        names = [f"x{i}" for i in range(len(args))]
        axes = {name: {0: f"batch{name}"} for name in names}
        torch.onnx.export(
            module,
            tuple(args),
            str(path),
            dynamo=False,
            opset_version=opset,
            input_names=names,
            dynamic_axes=axes,
            do_constant_folding=fold,
        )


def check(names: Sequence[str], dtype: str, opset: int, folder: Path, *, fold: bool = True) -> None:
    """Written by TorchScript, loaded, found as it is, rewritten; each norm within its bound, before and after.

    A folded 1 + w is a gain without an offset.
    """
    module, args, built = collect(names, dtype)
    write(module, args, opset, folder / "m.onnx", fold=fold)
    sites = rmsnorm_onnx.find_rms_norms(folder / "m.onnx")
    offset = {"gain_offset": 0.0} if fold else {}
    specs = [(x_type, spec.replace(**offset).canonical(x_type)) for x_type, spec in expected(built)]
    assert canonical(sites) == specs
    assert Counter(declined(sites)) == Counter(expected_codes(names))
    fused, report = rmsnorm_onnx.fuse(folder / "m.onnx")
    kept = sum(len(b.parts) for name, b in zip(names, built, strict=True) if is_unsaid(name, dtype))
    assert (report.found, report.kept) == (len(expected(built)), kept)
    modelio.save(fused, folder / "fused.onnx")
    onnx.checker.check_model(str(folder / "fused.onnx"), full_check=True)
    parity = rmsnorm_onnx.verify(fused, folder / "m.onnx")
    assert parity.ok and not parity.unrun
    session = ort.InferenceSession(str(folder / "fused.onnx"), providers=["CPUExecutionProvider"])
    feeds = {i.name: numpy_of(a) for i, a in zip(session.get_inputs(), args, strict=True)}
    results, at = session.run(None, feeds), 0
    for name, b, y in zip(names, built, results, strict=True):
        x, at = numpy_of(args[at]), at + len(b.args)
        if b.parts and not b.parts[0].name and not is_unsaid(name, dtype):
            spec = raise_statistic(b.parts[0].spec.resolve(dtype))
            bound = bound_of(spec, x, b.parts[0])
            assert beyond(y, reference(spec, x, *parameters(b.parts[0])), bound) == 0, name
        assert np.all(np.isfinite(y.astype(np.float64)))


def test_one_variant_of_each_kind_is_found(tmp_path: Path) -> None:
    """In float16 at opset 13, below which nothing that PyTorch writes today is."""
    check(PLAIN, "float16", 13, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize(("opset", "fold"), [(13, False), (17, True)])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_every_variant_is_found(dtype: str, opset: int, fold: bool, tmp_path: Path) -> None:
    """All that TorchScript can export, and all look-alikes, with constants folded and not."""
    check(NAMES, dtype, opset, tmp_path, fold=fold)


@pytest.mark.parametrize("name", UNKNOWN)
def test_torchs_own_operator_has_no_symbol(name: str, tmp_path: Path) -> None:
    """What is left out of these tests is what TorchScript refuses, by the operator's name."""
    built = variant(name)
    with pytest.raises(torch.onnx.errors.UnsupportedOperatorError, match=r"aten::rms_norm"):
        write(built.module, built.args, 17, tmp_path / "m.onnx")
