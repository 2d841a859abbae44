"""The ways to write a norm in ONNX, one module each: what is known of an operator stands in one place.

Every form has `NAME`, `refusal`, `rounding_change` and `write` (see `Form`). A form of a native operator has
`read(node, types)` too: its `Reading`, `Declined` for a node that the operator's own definition does not allow, None
for another operator. Function nodes are read from their bodies, which are plain operators: an attribute is no evidence.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from rmsnorm_onnx.forms import contrib, function, onnx, plugin, primitive
from rmsnorm_onnx.forms.reading import Form, Reading, TypeView

FORMS: Mapping[str, Form] = MappingProxyType(
    {"function": function, "onnx": onnx, "contrib": contrib, "plugin": plugin, "primitive": primitive}
)
"""Every form by its name."""

__all__ = ["FORMS", "Form", "Reading", "TypeView"]
