"""Shape profiles: the least, the usual and the largest shape of each dynamic input of a model."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import onnx_ir as ir

from rmsnorm_onnx.errors import UsageError
from rmsnorm_onnx.inference import declared

Shape: TypeAlias = tuple[int, ...]
Given: TypeAlias = Mapping[str, Shape | Sequence[Shape]]
"""By input its shape, or three: the least, the usual and the largest."""

_GUESS = (1, 8, 32)


@dataclasses.dataclass(frozen=True, slots=True)
class Profile:
    """The shapes that an engine takes for one input.

    Attributes:
        name: The input.
        least: Its smallest shape.
        usual: The shape that the engine is tuned for.
        most: Its largest shape.
    """

    name: str
    least: Shape
    usual: Shape
    most: Shape

    def to_json(self) -> dict[str, Any]:
        """The profile as JSON-ready data, in TensorRT's words."""
        return {"name": self.name, "min": list(self.least), "opt": list(self.usual), "max": list(self.most)}


def parse(text: str) -> tuple[str, tuple[Shape, ...]]:
    """A profile as the command line has it.

    >>> parse("x=1x3x8,4x3x8,8x3x8")
    ('x', ((1, 3, 8), (4, 3, 8), (8, 3, 8)))

    Raises:
        UsageError: it is none.
    """
    name, equals, shapes = text.rpartition("=")
    if not equals or not name or not re.fullmatch(r"\d+(x\d+)*(,\d+(x\d+)*)*", shapes):
        raise UsageError(f"{text!r} is no shape; write NAME=1x3x8, or NAME=MIN,OPT,MAX as in x=1x3x8,4x3x8,8x3x8")
    return name, tuple(tuple(map(int, shape.split("x"))) for shape in shapes.split(","))


def profiles(model: ir.Model, given: Given | None = None) -> tuple[tuple[Profile, ...], tuple[str, ...]]:
    """The profile of each dynamic input of a model.

    Args:
        model: The model.
        given: Shapes by input. A dimension of an input that is not named is taken as 1, 8 and 32.

    Returns:
        The profiles, in the order of the inputs, and what was guessed, each one sentence.

    Raises:
        UsageError: a name is no input's, or a shape does not fit.
    """
    wanted = {name: _three(name, shapes) for name, shapes in (given or {}).items()}
    stored = model.graph.initializers
    inputs = {v.name or "": declared(v) for v in model.graph.inputs if v.name not in stored}
    for name in wanted.keys() - inputs.keys():
        near = difflib.get_close_matches(name, inputs, n=1, cutoff=0.3)
        hint = f"; do you mean {near[0]}?" if near else ""
        raise UsageError(f"the model has no input {name!r}{hint} (its inputs are {', '.join(inputs)})")
    made: list[Profile] = []
    free: dict[str, None] = {}
    for name, dims in inputs.items():
        if name in wanted:
            made.append(_checked(name, wanted[name], dims))
        elif dims is None:
            raise UsageError(f"the rank of the input {name!r} is unknown; give its shapes: --shape {name}=MIN,OPT,MAX")
        elif not all(isinstance(d, int) for d in dims):
            made.append(Profile(name, *(tuple(d if isinstance(d, int) else n for d in dims) for n in _GUESS)))
            free |= dict.fromkeys(f"? of {name}" if d is None else str(d) for d in dims if not isinstance(d, int))
    dynamic = {name for name, dims in inputs.items() if dims is None or not all(isinstance(d, int) for d in dims)}
    guess = f"{', '.join(free)} was taken as 1, 8 and 32 (min, opt, max); name others with --shape"
    return tuple(p for p in made if p.name in dynamic), (guess,) if free else ()


def _three(name: str, shapes: Shape | Sequence[Shape]) -> tuple[Shape, Shape, Shape]:
    several = [tuple(shape) for shape in shapes if not isinstance(shape, int)]
    if not several:
        several = [tuple(size for size in shapes if isinstance(size, int))]
    if len(several) not in (1, 3):
        raise UsageError(f"the input {name!r} is given {len(several)} shapes; give one, or three: MIN,OPT,MAX")
    return several[0], several[len(several) // 2], several[-1]


def _checked(name: str, shapes: tuple[Shape, Shape, Shape], dims: Sequence[int | str | None] | None) -> Profile:
    known = [None] * len(shapes[0]) if dims is None else dims
    for shape in shapes:
        fixed = zip(shape, known, strict=False)
        if len(shape) != len(known) or any(isinstance(d, int) and d != n for n, d in fixed):
            raise UsageError(f"the shape {_shown(shape)} does not fit the input {name!r}, which is {_shown(known)}")
    if any(not a <= b <= c for a, b, c in zip(*shapes, strict=True)):
        raise UsageError(f"the shapes of {name!r} do not grow from min to opt to max: {', '.join(map(_shown, shapes))}")
    return Profile(name, *shapes)


def _shown(shape: Sequence[int | str | None]) -> str:
    return "x".join("?" if d is None else str(d) for d in shape)
