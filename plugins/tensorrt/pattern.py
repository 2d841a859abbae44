"""The norms of a model for Polygraphy: `polygraphy plugin match | list | replace --plugin-dir plugins`.

Polygraphy looks for a file of this name in each folder of its `--plugin-dir`, and calls the three functions below. It
needs rmsnorm_onnx, which finds the norms whatever their spelling; `rmsnorm-onnx fuse --for tensorrt-plugin` does the
same without Polygraphy, in branches and functions too, and measures it.
"""

from __future__ import annotations

from typing import Any

NAME = "tensorrt"  # this folder's name: Polygraphy finds the file again by it


def get_plugin_metadata() -> dict[str, str]:
    """The folder's name, and the operator of the plugin's nodes."""
    from rmsnorm_onnx.forms.plugin import OPERATOR

    return {"name": NAME, "op": OPERATOR}


def get_matching_subgraphs(graph: Any) -> list[dict[str, Any]]:
    """The norms of a graph's top level that the plugin computes exactly.

    Args:
        graph: An onnx_graphsurgeon.Graph.

    Returns:
        For each norm the names of its inputs and of its output, and the plugin's fields.
    """
    import onnx_graphsurgeon as gs

    from rmsnorm_onnx import Match, find_rms_norms
    from rmsnorm_onnx.forms import plugin

    model = gs.export_onnx(graph, do_type_check=False)
    opset = graph.opset
    found = [site for site in find_rms_norms(model) if isinstance(site, Match)]
    return [
        {
            "inputs": [value.name for value in (site.x, site.gain, site.bias) if value is not None],
            "outputs": [site.output.name],
            "attributes": _fields(site.spec),
        }
        for site in found
        if _is_plain(site) and plugin.refusal(site, opset) is None
    ]


def replace_with_plugin(
    graph: Any, input_tensors: list[Any], output_tensors: list[Any], attrs: dict[str, Any] | None = None, op: str = ""
) -> bool:
    """Put the plugin's node in the place of a norm; Polygraphy's own way leaves the node without a domain.

    Args:
        graph: An onnx_graphsurgeon.Graph.
        input_tensors: x, and the gain and the bias where the norm has them.
        output_tensors: The norm's result.
        attrs: The plugin's fields.
        op: The plugin's operator.
    """
    import onnx_graphsurgeon as gs
    from onnx import helper

    from rmsnorm_onnx.functions import DOMAIN, VERSION

    for tensor in output_tensors:
        tensor.inputs.clear()
    name = f"{output_tensors[0].name}/{op}"
    node = gs.Node(op=op, name=name, attrs=attrs, inputs=input_tensors, outputs=output_tensors, domain=DOMAIN)
    graph.nodes.append(node)
    imports = list(graph.import_domains or [])
    if all(entry.domain != DOMAIN for entry in imports):
        graph.import_domains = [*imports, helper.make_opsetid(DOMAIN, VERSION)]
    graph.cleanup().toposort()
    if all("plugin_version" in node.attrs for node in graph.nodes if (node.domain, node.op) == (DOMAIN, op)):
        # A function that nobody calls any more would be taken for the body of the plugin's nodes.
        graph.functions = [f for f in graph.functions if (f.domain, f.name) != (DOMAIN, op)]
    return True


def _is_plain(site: Any) -> bool:
    """Whether a site is one of the top level, without a residual, a changed rounding or a gain in its node."""
    gain = site.gain is not None or not site.spec.has_gain
    return not site.scope and site.residual is None and not site.rounding_changes and gain


def _fields(spec: Any) -> dict[str, Any]:
    """The plugin's fields, as YAML holds them: text, and numbers of Python's own."""
    from rmsnorm_onnx.forms import plugin

    return {**plugin.fields(spec), "plugin_version": plugin.VERSION, "plugin_namespace": plugin.NAMESPACE}
