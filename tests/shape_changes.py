"""A way to damage a graph: another dimension where a shape is put together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kit import tensor

if TYPE_CHECKING:
    from damage import Site


def dimension_changed(site: Site) -> bool:
    """Another number in the target of a Reshape, or another dimension of the shape that it is taken from."""
    readers = [n for n in site.ancestors if n.op_type in ("Gather", "Concat", "Reshape", "Unsqueeze")]
    names = {name for n in readers for name in n.input}
    held = [(t, a) for t, a in site.constants(floats=False) if t.name in names and a.size]
    if not held:
        return False
    where, array = site.choose(held)
    changed = array.copy()
    at = site.random.randint(0, array.size - 1)
    changed.reshape(-1)[at] = site.choose([0, 1, 2, 3, 4, -1, int(changed.reshape(-1)[at - 1])])
    where.CopyFrom(tensor(where.name, changed))
    return True
