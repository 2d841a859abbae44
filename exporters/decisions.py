"""What Python takes from tensors in a trace: sizes, which other traces show, or values, which none can promise.

Two watches run over one trace. At the dispatcher each operator's results are marked as made of the inputs' values
where one of its arguments is; by storage, so that `x.data` is no way out. At Python's side each function of torch that
takes marked tensors must hand them to the trace: what it returns is a node that uses them, or Python has the value.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

_SIZES = ("aten::size", "aten::_shape_as_tensor", "aten::numel", "aten::dim", "prim::shape")
_TORCH = f"{os.sep}torch{os.sep}"
_INSIDE = (_TORCH, f"{os.sep}exporters{os.sep}")
_MEMORY = (
    *("tolist", "numpy", "__array__", "__dlpack__", "__deepcopy__", "__reduce_ex__", "__reduce__"),
    *("storage", "untyped_storage", "_typed_storage"),
)
"""What hands the numbers to Python past the dispatcher."""
_ADDRESSES = ("data_ptr", "__cuda_array_interface__")
"""What a check of alignment asks for, and what the numbers could be read through."""
_TEXTS = ("__repr__", "__str__", "__format__")
_NUMBERS = ("__bool__", "__int__", "__float__", "__index__", "__complex__", "item")
_FROM_DATA = ("tensor", "as_tensor", "asarray", "new_tensor", "scalar_tensor")
_BY_SIZE = ("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like")
_COUNTS = ("__len__", "__iter__", "unbind")


@dataclasses.dataclass(frozen=True)
class Reads:
    """Where Python read from a traced tensor, each as file:line.

    Attributes:
        values: The values of the inputs decide it.
        sizes: Sizes or weights alone decide it.
        texts: Python wrote values of the inputs as text, for a message or for a decision.
        addresses: Python asked where values of the inputs lie, for a check of alignment, or to read them.
    """

    values: list[str] = dataclasses.field(default_factory=list)
    sizes: list[str] = dataclasses.field(default_factory=list)
    texts: list[str] = dataclasses.field(default_factory=list)
    addresses: list[str] = dataclasses.field(default_factory=list)

    @property
    def doubts(self) -> tuple[str, ...]:
        """A note for each kind of read that may decide something, or nothing."""
        said = (
            (self.texts, "Python writes values of the inputs as text at {}: were text to decide anything, the file"),
            (self.addresses, "Python asks where the inputs' values lie at {}: were it to read them there, the file"),
        )
        return tuple(f"{text.format(', '.join(places))} holds the example's answer" for places, text in said if places)


@contextlib.contextmanager
def texts_watched() -> Iterator[Reads]:
    """Note where tensors are written as text in the block: torch.export's have no values, and give other text."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    found = Reads()

    def noting(method: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            if _TORCH not in sys._getframe(1).f_code.co_filename:  # torch writes messages of its own
                _add(found.texts)
            return method(*args, **kwargs)

        return noted

    held = [
        (kind, name, vars(kind)[name])
        for kind in (torch.Tensor, FakeTensor, FunctionalTensor)
        for name in _TEXTS
        if name in vars(kind)
    ]
    for kind, name, method in held:
        setattr(kind, name, noting(method))
    try:
        yield found
    finally:
        for kind, name, method in held:
            setattr(kind, name, method)


class Watch:
    """Watches one trace; `reads` says what Python took.

    Args:
        inputs: How many of the graph's first inputs are the module's; the others are weights, which do not change.
    """

    def __init__(self, inputs: int) -> None:
        self.reads = Reads()
        self._inputs = inputs
        self._made_of_values: dict[Any, Any] = {}
        self._sized_by_values: dict[Any, Any] = {}
        self._sized: set[int] = set()
        self._frames: list[list[bool]] = []  # of each running function: whether it read a value, and while tracing

    @contextlib.contextmanager
    def running(self, tensors: Sequence[Any]) -> Iterator[None]:
        """Watch what runs in the block, where a trace has begun and these are its inputs."""
        import torch
        from torch.overrides import TorchFunctionMode
        from torch.utils._python_dispatch import TorchDispatchMode

        watch = self
        for held in (self._made_of_values, self._sized_by_values, self._sized):
            held.clear()  # numbers of another trace's values
        for tensor in tensors:
            _put(self._made_of_values, tensor)

        class Functions(TorchFunctionMode):  # type: ignore[misc]
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                return watch._function(func, args, kwargs or {})

        class Operators(TorchDispatchMode):  # type: ignore[misc]
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                with torch._C.DisableTorchFunction():
                    result = func(*args, **(kwargs or {}))
                watch._operator(func, args, kwargs or {}, result)
                return result

        with Functions(), Operators():
            yield

    def _operator(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Mark the results of an operator, and note where it hands out a value."""
        import torch

        given = _tensors((args, kwargs))
        if not any(_in(self._made_of_values, tensor) for tensor in given):
            return
        name = func._schema.name.removeprefix("aten::")
        if torch.Tag.data_dependent_output in func.tags:
            tracing = torch._C._get_tracing_state() is not None
            if self._frames:
                self._frames[-1][0] = True
                self._frames[-1][1] |= tracing
            elif tracing:  # outside of any function; where the trace is paused, a scripted function is in the graph
                _add(self.reads.values)
            return
        if name in _BY_SIZE or name.startswith("new_"):
            return
        by_values = torch.Tag.dynamic_output_shape in func.tags and (
            name != "index" or any(tensor.dtype in (torch.bool, torch.uint8) for tensor in given[1:])
        )
        by_values = by_values or any(_in(self._sized_by_values, tensor) for tensor in given)
        written = [
            value
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        for tensor in _tensors((result, written, kwargs.get("out"))):
            _put(self._made_of_values, tensor)
            if by_values:
                _put(self._sized_by_values, tensor)

    def _function(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function of torch, and note what Python has from it."""
        import torch

        if torch._C._get_tracing_state() is None:
            return func(*args, **kwargs)
        name, given = _name(func), _tensors((args, kwargs))
        data = given[1:] if name == "new_tensor" else given
        marked = [tensor for tensor in data if _in(self._made_of_values, tensor)]
        before = {_traced(tensor).unique() for tensor in marked}
        counted = [tensor for tensor in marked if _in(self._sized_by_values, tensor)]
        self._sized |= {_traced(tensor).unique() for tensor in counted}
        place = self._place(func, args, kwargs, marked, counted)
        self._frames.append([False, False])
        try:
            result = func(*args, **kwargs)
        finally:
            read, while_tracing = self._frames.pop()
        if place is None and self._kept_by_python(func, result, before, read, while_tracing):
            place = self.reads.values
        if place is not None:
            _add(place)
        return result

    def _place(self, func: Any, args: Any, kwargs: Any, marked: list[Any], counted: list[Any]) -> list[str] | None:
        """The list that a call belongs to by its name alone."""
        import torch

        name = _name(func)
        if marked and name in _TEXTS:
            return self.reads.texts
        if marked and name in _ADDRESSES:
            return self.reads.addresses
        if marked and (name in _MEMORY or getattr(func, "__self__", None) is torch.Tensor.data):
            return self.reads.values
        if counted and name in _COUNTS:
            first = kwargs.get("dim", args[1] if len(args) > 1 else 0) == 0
            return self.reads.values if first else None
        if name in (*_NUMBERS, *_MEMORY) and args:
            return self._place_of_number(args[0])
        return None

    def _place_of_number(self, tensor: Any) -> list[str] | None:
        """The list that a read of this number belongs to; None where the running trace does not compute it."""
        import torch

        if not isinstance(tensor, torch.Tensor):
            return None
        graph = torch._C._get_tracing_state().graph()
        inputs = {value.unique() for value in list(graph.inputs())[: self._inputs]}
        pending, seen, sizes = [_traced(tensor)], set(), False
        while pending:
            current = pending.pop()
            number, node = current.unique(), current.node()
            if number in inputs:
                return self.reads.values
            if number in seen:
                continue
            seen.add(number)
            if node.kind() in _SIZES and self._sized.intersection(v.unique() for v in node.inputs()):
                return self.reads.values
            if node.kind() in _SIZES or node.kind() == "prim::Param":
                sizes = True
            else:
                pending.extend(node.inputs())
        return self.reads.sizes if sizes else None

    def _kept_by_python(self, func: Any, result: Any, before: set[int], read: bool, while_tracing: bool) -> bool:
        """Whether what a function returns is, or holds, a value that the trace does not compute."""
        if not before and not read:
            return False
        if read and while_tracing and isinstance(func, types.FunctionType):
            return True  # of torch's own Python: what it decides inside is in no operator
        tensors, others = _split(result)
        if read and any(isinstance(value, bool | int | float | complex) for value in others):
            return True
        new = _name(func) in _FROM_DATA or while_tracing
        return any((new or _in(self._made_of_values, tensor)) and not _uses(tensor, before) for tensor in tensors)


def _uses(tensor: Any, those: set[int]) -> bool:
    """Whether the trace computes a tensor from one of these values."""
    pending, seen = [_traced(tensor)], set()
    while pending:
        current = pending.pop()
        if current.unique() in those:
            return True
        if current.unique() not in seen:
            seen.add(current.unique())
            pending.extend(current.node().inputs())
    return False


def _traced(tensor: Any) -> Any:
    """The value of the running trace that stands for a tensor; one from outside becomes a constant."""
    import torch

    try:
        return torch._C._get_value_trace(tensor)
    except RuntimeError:  # a weight that was made outside and requires a gradient
        return torch._C._get_value_trace(tensor.detach())


def _split(values: Any) -> tuple[list[Any], list[Any]]:
    import torch
    from torch.utils import _pytree as pytree

    leaves = pytree.tree_leaves(values)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return tensors, [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]


def _tensors(values: Any) -> list[Any]:
    return _split(values)[0]


def _storage(tensor: Any) -> Any:
    """A tensor's storage; None of a subclass that wraps others and has none, for which torch raises either error."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def _put(held: dict[Any, Any], tensor: Any) -> None:
    """Remember a tensor's storage: a weak reference keeps its address from being given to another, not its memory."""
    from torch.multiprocessing.reductions import StorageWeakRef

    storage = _storage(tensor)
    if storage is None:
        held[id(tensor)] = tensor
    else:
        held.setdefault(storage._cdata, StorageWeakRef(storage))


def _in(held: dict[Any, Any], tensor: Any) -> bool:
    storage = _storage(tensor)
    return (id(tensor) if storage is None else storage._cdata) in held


def _name(func: Any) -> str:
    return str(getattr(func, "__name__", ""))


def _add(places: list[str]) -> None:
    place = _caller()
    if place not in places:
        places.append(place)


def _caller() -> str:
    """The innermost frame outside of torch and of this package's exporters."""
    frame = sys._getframe(1)
    while frame.f_back is not None and any(part in frame.f_code.co_filename for part in _INSIDE):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
