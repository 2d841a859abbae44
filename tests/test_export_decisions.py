"""What a module decides in Python: by values it is refused, by sizes it is noted; its buffers are left alone."""

from __future__ import annotations

import collections
import copy
import pickle
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import pytest
import torch
from export_kit import run
from torch import nn

from rmsnorm_onnx.errors import ExportError
from rmsnorm_onnx.exporters import export
from rmsnorm_onnx.exporters.steps import inference

Function = Callable[[torch.Tensor], torch.Tensor]


class By(nn.Module):
    """A module of one function."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._function(x)


def large(x: torch.Tensor) -> torch.Tensor:
    """Where a value is far from zero: an even function, which no change of sign shows."""
    return x.abs() > 20


READS: dict[str, Function] = {
    "in": lambda x: x * 0.5 if 7 in x.abs() else x,
    "equal": lambda x: x * 0.5 if torch.equal(x * x, x * x * 0 + 49) else x,
    "allclose": lambda x: x * 0.5 if torch.allclose(x * x, torch.full_like(x, 49.0)) else x,
    "is_nonzero": lambda x: x * 0.5 if torch.is_nonzero(large(x).any()) else x,
    "data": lambda x: x * (x.data * x.data),
    "data item": lambda x: x * 0.5 if x.data.abs().max().item() > 20 else x,
    "a tensor of tensors": lambda x: x * torch.tensor([x.abs().max()]),
    "as_tensor": lambda x: x * torch.as_tensor([x.abs().max()]),
    "tolist": lambda x: x * sum(x.abs().tolist()[0][0]),
    "numpy": lambda x: torch.from_numpy(np.abs(x.detach().numpy()) * 2),
    "asarray": lambda x: torch.from_numpy(np.abs(np.asarray(x.detach())) * 2),
    "dlpack": lambda x: torch.from_numpy(np.abs(np.from_dlpack(x.detach())) * 2),
    "deepcopy": lambda x: x + copy.deepcopy(x).abs(),
    "pickle": lambda x: x * pickle.loads(pickle.dumps(x)).abs().max(),
    "nonzero's size": lambda x: x * 0.5 if large(x).nonzero().shape[0] > 0 else x,
    "nonzero's length": lambda x: x * 0.5 if len(large(x).nonzero()) > 0 else x,
    "a mask's size": lambda x: x * 0.5 if x[large(x)].numel() > 0 else x,
    "max": lambda x: x * 0.5 if max(x.abs().flatten()) > 20 else x,
    "index": lambda x: [x, x * 2][int(large(x).any())],
}


@pytest.mark.parametrize("name", READS)
def test_no_trace_holds_what_python_reads(name: str) -> None:
    """However Python takes a value of the inputs, TorchScript's trace is refused, and the place is named."""
    with pytest.raises(ExportError, match=r"Python reads values of the inputs at (test_export_decisions|copy)\.py:\d+"):
        export(By(READS[name]), torch.randn(2, 3, 8).clamp(-3, 3), opset=17, route="torchscript")


@pytest.mark.full
@pytest.mark.parametrize("opset", [13, 18])
@pytest.mark.parametrize("name", READS)
def test_no_route_holds_what_python_reads(name: str, opset: int) -> None:
    """With any route allowed there is an error, or a file that is right where the example's answer is not."""
    module, other = By(READS[name]), torch.randn(2, 3, 8) * 30
    try:
        result = export(module, torch.randn(2, 3, 8).clamp(-3, 3), opset=opset, fuse=False)
    except ExportError:
        return
    [y] = run(result.model, other.numpy())
    np.testing.assert_allclose(y, module(other).numpy(), rtol=np.sqrt(np.finfo(np.float32).eps))


@torch.jit.script
def scripted(x: torch.Tensor):
    """A branch that is in the graph."""
    if bool((x.abs() > 20).any()):
        return x * 0.5
    return x


class Gated(nn.Module):
    """A branch on a weight, which is the same for all inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if self.gate.item() > 0 else x


IN_GRAPH: dict[str, nn.Module] = {
    "arange": By(lambda x: x + torch.arange(x.abs().max().long() + 1)[-1]),
    "slice": By(lambda x: x - x[:, : x[0, 0, 0].long().abs() + 1].sum()),
    "nonzero's size": By(lambda x: x * (x.abs() > 1).nonzero().shape[0]),
    "assignment": By(lambda x: torch.zeros(3).index_put((torch.tensor([1]),), x.sum()) + x[..., :3]),
    "scripted": By(scripted),
    "a weight": Gated(),
}


@pytest.mark.parametrize("name", IN_GRAPH)
def test_values_that_stay_in_the_graph_are_traced(name: str) -> None:
    """What hands a value from operator to operator is no read: the file is right for values that decide otherwise."""
    module, other = IN_GRAPH[name], torch.randn(2, 3, 8) * 30
    result = export(module, torch.randn(2, 3, 8), opset=17, route="torchscript", dynamic_shapes={})
    [y] = run(result.model, other.numpy())
    expected = module(other).detach().numpy()
    np.testing.assert_allclose(y, expected, atol=np.sqrt(np.finfo(np.float32).eps) * np.abs(expected).max())


@pytest.mark.parametrize("route", ["dynamo", "torchscript"])
def test_text_is_noted_and_tried(route: str) -> None:
    """A module that prints is exported with a note; one that decides by text is refused."""
    x = torch.ones(2, 3, 8)
    result = export(By(lambda x: (print(x), x * 2)[1]), x, opset=18, route=route)
    assert any("Python writes values of the inputs as text at test_export_decisions.py:" in n for n in result.notes)
    with pytest.raises(ExportError, match="values"):
        export(By(lambda x: x * 0.5 if "30." in str(x) or "size=" in str(x) else x), x, opset=18, route=route)


def test_an_address_is_noted_and_tried() -> None:
    """A module that reads past torch, through the address of its input, is refused by what its traces hold."""
    import ctypes

    def read(x: torch.Tensor) -> torch.Tensor:
        return x * abs(ctypes.cast(x.data_ptr(), ctypes.POINTER(ctypes.c_float))[0])

    with pytest.raises(ExportError, match="the trace depends on the values of the inputs"):
        export(By(read), torch.ones(2, 3, 8), opset=17)


@pytest.mark.parametrize(
    ("function", "note"),
    [
        (lambda x: x * 0.5 if x.shape[0] > 4 else x, "dimension 0 of input x is limited to sizes with x.shape[0] <= 4"),
        (
            lambda x: x * 0.5 if x.shape[1] % 4 else x,
            "dimension 1 of input x is limited to sizes with (x.shape[1] % 4)",
        ),
        (lambda x: x if x.shape[0] < x.shape[1] else -x, "with x.shape[0] < x.shape[1]: the module decides by it at"),
        (lambda x: sum(c.sum(1) for c in x.split(3, 1)), "== 3: the module decides by it how many parts there are"),
        (lambda x: x[:, :5], "dimension 1 of input x is limited to 5 and more: torch or the module asks for it"),
        (
            lambda x: x[:, : x.shape[1] // 2] + x[:, x.shape[1] // 2 :],
            "torch decides by it what is broadcast, and of 2 to 64 it holds for 2, 4, 6, 8, 10, 12, ...",
        ),
    ],
)
def test_a_limit_of_sizes_is_noted(function: Function, note: str) -> None:
    """A branch on a size, or a number of parts, is exported for the example's sizes, and the note says which."""
    assert any(note in said for said in export(By(function), torch.randn(2, 8, 8), opset=18).notes)


def test_an_unlimited_module_has_no_note() -> None:
    """Where any size will do nothing is said."""
    assert export(By(lambda x: x * x.shape[1]), torch.randn(2, 8, 8), opset=18).notes == ()


def test_a_dimension_that_was_asked_for_and_fixed_is_noted() -> None:
    """Dim.AUTO may become a number: the words are those of the default's."""
    shapes = {"x": {0: torch.export.Dim.AUTO, 1: torch.export.Dim("s")}}
    result = export(By(lambda x: sum(x.unbind(0))), torch.randn(3, 8, 8), opset=18, dynamic_shapes=shapes)
    assert result.notes == ("dimension 0 of input x is fixed at 3: torch or the module fixes it",)


class Running(nn.Module):
    """A count and an average that forward keeps, in place or anew, and that its output depends on."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.norm, self.how = nn.RMSNorm(8), how
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "in place":
            self.count += 1
            self.mean[:4] = x[0, 0, :4]
        elif self.how == "copy_":
            self.count.add_(1)
            self.mean.copy_(self.mean * 0.5 + x.mean((0, 1)))
        else:
            self.count = self.count + 1
            self.mean = self.mean * 0.5 + x.mean((0, 1))
        return self.norm(x) * self.count + self.mean


@pytest.mark.parametrize(
    ("how", "opset", "route"),
    [
        ("in place", 13, "torchscript"),
        ("in place", 18, "dynamo"),
        ("anew", 13, "torchscript"),
        ("anew", 18, "dynamo"),
        ("copy_", 13, None),
    ],
)
def test_buffers_are_left_alone_and_named(how: str, opset: int, route: str | None) -> None:
    """The module is as it was, each buffer is named, and the file computes the first call, now and later."""
    module, x = Running(how), torch.randn(2, 3, 8)
    before = {name: (id(tensor), tensor.clone()) for name, tensor in module.named_buffers()}
    result = export(module, x, opset=opset, route=route, form="primitive")
    for name, (identity, value) in before.items():
        assert id(getattr(module, name)) == identity and torch.equal(getattr(module, name), value)
        assert sum(f"forward changes the buffer {name}: " in note for note in result.notes) == 1
    expected = module(x).detach().numpy()  # changes the buffers; the file has its own
    [y] = run(result.model, x.numpy())
    np.testing.assert_allclose(y, expected, atol=np.sqrt(np.finfo(np.float32).eps) * np.abs(expected).max())


@pytest.mark.parametrize("how", ["in place", "copy_", "anew"])
def test_running_a_module_leaves_it(how: str) -> None:
    """What verify runs in inference mode has the buffers, objects and attributes of before."""
    module = Running(how)
    before = {name: (id(tensor), tensor.clone()) for name, tensor in module.named_buffers()}
    with inference(module), torch.no_grad():
        module(torch.randn(2, 3, 8))
        module.seen = True
    assert not hasattr(module, "seen") and module.training
    for name, (identity, value) in before.items():
        assert id(getattr(module, name)) == identity and torch.equal(getattr(module, name), value)


class Remembering(nn.Module):
    """State in a list, a nested dictionary, a set or a deque, or in a container of the class."""

    shared: ClassVar[dict[str, torch.Tensor]] = {}

    def __init__(self, how: str) -> None:
        super().__init__()
        self.norm, self.how = nn.RMSNorm(8), how
        self.calls: list[float] = []
        self.nested: dict[str, dict[str, torch.Tensor]] = {"first": {}}
        self.queue: collections.deque[int] = collections.deque([1], maxlen=3)
        self.seen: set[str] = set()
        self.tensors = [torch.ones(8)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "list":
            self.calls.append(1.0)
            return self.norm(x) + len(self.calls)
        if self.how == "deque":
            self.queue.append(5)
            return self.norm(x) + sum(self.queue)
        if self.how == "set":
            self.seen.add("once")
            return self.norm(x) * (1 + len(self.seen))
        if self.how == "tensor":
            self.tensors[0] += 1  # torch.export refuses it
            return self.norm(x) * self.tensors[0]
        place = self.nested["first"] if self.how == "dict" else Remembering.shared
        if "mean" not in place:
            place["mean"] = x.mean((0, 1)).detach()
        return self.norm(x - place["mean"])


@pytest.mark.parametrize("opset", [17, 18])
@pytest.mark.parametrize("how", ["list", "dict", "deque", "set", "class"])
def test_containers_are_left_alone_and_named(how: str, opset: int) -> None:
    """The file computes a first call on any values, the module holds what it held, and a note names the attribute."""
    module, x = Remembering(how), torch.randn(2, 3, 8)
    result = export(module, torch.zeros(2, 3, 8) + x * 0.1, opset=opset, form="primitive")
    name = {"list": "calls", "dict": "nested", "deque": "queue", "set": "seen", "class": "shared"}
    held = (module.calls, module.nested, list(module.queue), module.seen, Remembering.shared)
    assert held == ([], {"first": {}}, [1], set(), {})
    assert any(note.startswith("forward changes") and name[how] in note for note in result.notes)
    expected = module(x).detach().numpy()
    Remembering.shared.clear()
    [y] = run(result.model, x.numpy())
    np.testing.assert_allclose(y, expected, atol=np.sqrt(np.finfo(np.float32).eps) * np.abs(expected).max())


@pytest.mark.parametrize("opset", [17, 18])
def test_tensors_in_containers_are_left_alone(opset: int) -> None:
    """A tensor in a list that forward changes cannot be exported, and is as it was."""
    module = Remembering("tensor")
    with pytest.raises(ExportError, match="is mutated in the forward method"):
        export(module, torch.randn(2, 3, 8), opset=opset)
    assert torch.equal(module.tensors[0], torch.ones(8))
