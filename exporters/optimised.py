"""Constant folding, after the norms are safe: nothing that it may do can reach an epsilon unseen."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import common

from rmsnorm_onnx.errors import ExportError
from rmsnorm_onnx.exporters.steps import step
from rmsnorm_onnx.find import find_rms_norms
from rmsnorm_onnx.site import Match
from rmsnorm_onnx.spec import RMSNormSpec


def optimised(model: ir.Model) -> ir.Model:
    """A model with constants folded and repeated or unused parts removed.

    Not onnxscript's whole optimiser: its rules delete an addition of 1e-8 or less, which is an epsilon where norms are
    plain operators.

    Raises:
        ExportError: a norm is not what it was.
    """
    from onnxscript import optimizer

    before = _norms(model)
    with step("optimisation"):
        work = model.clone()
        optimizer.fold_constants(work)
        for change in (
            common.IdentityEliminationPass(),
            common.CommonSubexpressionEliminationPass(),
            common.DeduplicateInitializersPass(),
            common.RemoveUnusedNodesPass(),
        ):
            change(work)
    after = _norms(work)
    if before != after:
        raise ExportError(
            f"optimisation failed: {len(before)} norms became {len(after)}, or other ones; leave optimize out"
        )
    return work


def _norms(model: ir.Model) -> list[tuple[str, RMSNormSpec, str]]:
    """The norms of a model, apart from their names."""
    sites = [site for site in find_rms_norms(model) if isinstance(site, Match)]
    return sorted(((site.form, site.spec, site.x_type) for site in sites), key=repr)
