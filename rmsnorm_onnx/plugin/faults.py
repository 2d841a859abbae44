"""What a check of plugin nodes found, as data, as JSON and as text."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

VERSION = 1
"""Version of the JSON layout of a check's report."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """One thing about a node that TensorRT would refuse, or would silently take for something else.

    Attributes:
        node: The node's name, or its output's.
        field: The attribute, input or other part at fault: "epsilon", "gain", "domain", "op_type", "function".
        what: What is wrong, one sentence without a full stop.
        mend: What to do, in the imperative.
        scope: Where the node stands: "" for the main graph, else a path of branches and functions.
        op: The node's operator, with its domain.
    """

    node: str
    field: str
    what: str
    mend: str
    scope: str = ""
    op: str = ""

    def __str__(self) -> str:
        """One line: the node, the field, what is wrong and the mend."""
        where = f"{self.scope}/{self.node}" if self.scope else self.node
        return f"{where} ({self.op}): {self.field}: {self.what}; {self.mend}"

    def to_json(self) -> dict[str, Any]:
        """The fault as JSON-ready data."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, slots=True)
class CheckedNode:
    """A plugin node that was looked at.

    Attributes:
        name: The node's name, or its output's.
        op: Its operator, with its domain.
        scope: Where it stands, as in `Fault`.
        ours: Whether it is a node of this package's plugin; of others, less can be known.
    """

    name: str
    op: str
    scope: str
    ours: bool


@dataclasses.dataclass(frozen=True, slots=True)
class CheckReport:
    """What a check of a model's plugin nodes found.

    Attributes:
        nodes: The plugin nodes, in the order of the graph.
        faults: Everything that is wrong, in the order of the nodes.
        notes: What could not be checked, and why; each one sentence.
    """

    nodes: tuple[CheckedNode, ...]
    faults: tuple[Fault, ...]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether there is no fault."""
        return not self.faults

    def to_json(self) -> dict[str, Any]:
        """The report as JSON-ready data, with its version."""
        return {
            "version": VERSION,
            "kind": "plugin-check",
            "ok": self.ok,
            "nodes": [dataclasses.asdict(node) for node in self.nodes],
            "faults": [fault.to_json() for fault in self.faults],
            "notes": list(self.notes),
        }


def print_report(report: CheckReport, console: Console) -> None:
    """Print each fault and each note on a line, and the counts on the last."""
    for fault in report.faults:
        console.print(str(fault), markup=False, highlight=False)
    for note in report.notes:
        console.print(f"note: {note}", markup=False, highlight=False)
    ours = sum(node.ours for node in report.nodes)
    others = len(report.nodes) - ours
    counted = f"{_counted(ours, 'plugin node')} checked" + (f", {others} of other plugins" if others else "")
    console.print(f"{counted}, {_counted(len(report.faults), 'fault')}", style="bold", markup=False, highlight=False)


def _counted(number: int, thing: str) -> str:
    return f"{number} {thing}" + ("" if number == 1 else "s")
