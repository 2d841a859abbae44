"""The routes of the exporter: TorchScript says exactly what torch computes, holds at other sizes, and is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from export_kit import DTYPES, SHAPES, D, check, norm, run
from torch import nn

from rmsnorm_onnx.errors import ExportError, UsageError
from rmsnorm_onnx.exporters import export, sizes
from rmsnorm_onnx.find import find_rms_norms
from rmsnorm_onnx.models import tiny
from rmsnorm_onnx.oracle import error_bound, reference
from rmsnorm_onnx.site import SCOPES_KEY
from rmsnorm_onnx.spec import preset


@pytest.mark.parametrize(
    ("variant", "dtype", "opset"),
    [
        ("weight", "float16", 13),
        ("tiny_epsilon", "float32", 17),
        ("eps_none", "bfloat16", 15),
        ("two_dims", "float64", 20),
    ],
)
def test_traced_norm_is_torchs(variant: str, dtype: str, opset: int) -> None:
    """TorchScript writes torch.nn.RMSNorm with torch's epsilon and its one rounding, for any batch and sequence."""
    check(variant, dtype, opset, "torchscript")


@pytest.mark.full
@pytest.mark.parametrize("opset", [13, 14, 16, 17, 18, 20])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", SHAPES)
def test_traced_norm_matrix(variant: str, dtype: str, opset: int) -> None:
    """Every variant in every type at the opsets that TorchScript writes."""
    check(variant, dtype, opset, "torchscript")


class Block(nn.Module):
    """Norms in dictionaries in a list, one in a Sequential in a Sequential, one at the end."""

    def __init__(self, epsilon: float = 1e-12) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"pre": nn.RMSNorm(D, eps=e)}) for e in (epsilon, 2e-6))
        self.stack = nn.Sequential(nn.Linear(D, D), nn.Sequential(nn.ReLU(), nn.RMSNorm(D, eps=1e-6)))
        self.norm = nn.RMSNorm(D, eps=1e-5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.stack(self.layers[1]["pre"](self.layers[0]["pre"](x))))


NAMES = ["layers.0.pre", "layers.1.pre", "stack.1.1", "norm"]


def test_traced_norms_bear_their_modules() -> None:
    """Sites of a traced file are paired with their modules, by metadata, and by the nodes' names without it."""
    result = export(Block(), torch.randn(2, 3, D), opset=17)
    assert [(p.module, p.epsilon, p.same_epsilon) for p in result.norms] == list(
        zip(NAMES, (1e-12, 2e-6, 1e-6, 1e-5), [True] * 4, strict=True)
    )
    assert [s.module for s in result.report.sites] == NAMES and result.report.rewritten == 4
    plain = export(Block(), torch.randn(2, 3, D), opset=17, fuse=False).model
    for node in plain.graph:
        node.metadata_props.pop(SCOPES_KEY, None)
    assert [match.module for match in find_rms_norms(plain)] == NAMES


def test_traced_epsilon_survives() -> None:
    """An epsilon of 1e-12 is in the file, and a row of zeros stays zero."""
    result = export(Block(), torch.randn(2, 3, D), opset=13, output_names=["y"])
    assert result.norms[0].found.epsilon == float(np.float32(1e-12))
    [y] = run(result.model, np.zeros((1, 4, D), np.float32))
    assert np.isfinite(y).all()


@pytest.mark.parametrize("form", [None, "primitive"])
def test_optimising_comes_after_the_norms(form: str | None) -> None:
    """Constants are folded, and an epsilon of 1e-12 stays, even where the norm is plain operators."""
    x = torch.randn(2, 3, D)
    plain, folded = (export(Block(), x, opset=17, form=form, optimize=on).model for on in (False, True))
    counts = [sum(node.op_type == "Transpose" for node in model.graph) for model in (plain, folded)]
    assert counts == [1, 0]
    specs = [[match.spec for match in find_rms_norms(model)] for model in (plain, folded)]
    assert specs[0] == specs[1] and specs[1][0].epsilon == float(np.float32(1e-12))
    [y] = run(folded, np.zeros((1, 4, D), np.float32))
    assert np.isfinite(y).all()


class Structured(nn.Module):
    """Tensors in tuples, dictionaries, keywords and gathered keywords, in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8)

    def forward(self, x, pair, flag=None, *, more, **options):
        return {"a": self.norm(x) + pair[0], "none": None, "b": (more["k"] * pair[1], options["shift"])}


def test_traced_structures_and_names() -> None:
    """Inputs and outputs keep their order and bear the caller's names first, then those of forward's parameters."""
    x, p, q, k, shift = (torch.randn(*shape) for shape in ((2, 3, 8), (2, 3, 8), (2, 3), (2, 3), (2, 3)))
    result = export(
        Structured(),
        (x, (p, q)),
        kwargs={"more": {"k": k}, "shift": shift},
        opset=14,
        input_names=["first"],
        output_names=["sum"],
    )
    assert [i.name for i in result.model.graph.inputs] == ["first", "pair_0", "pair_1", "more_k", "shift"]
    assert [o.name for o in result.model.graph.outputs] == ["sum", "output_0", "output_1"]
    outputs = run(result.model, *(t.numpy() for t in (x, p, q, k, shift)))
    assert np.array_equal(outputs[1], (k * q).numpy()) and np.array_equal(outputs[2], shift.numpy())


@pytest.mark.parametrize(
    "names",
    [{"input_names": ["weight"]}, {"input_names": ["x", "y"]}, {"output_names": ["y", "z"]}],
)
def test_traced_names_that_cannot_be(names: dict[str, list[str]]) -> None:
    """Borne and surplus names are usage errors on this route too."""
    with pytest.raises(UsageError, match="name"):
        export(nn.RMSNorm(8), (torch.randn(2, 8),), opset=17, **names)


def exact_norm(module: nn.RMSNorm, x: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """A float32 norm in float64, and how far a runtime may be from it."""
    spec = preset("torch", epsilon=2.0**-23 if module.eps is None else module.eps)
    inputs = (x.numpy(), module.weight.detach().numpy())
    return reference(spec, *inputs), error_bound(spec, *inputs)


def assert_within(y: np.ndarray, exact: np.ndarray, bound: np.ndarray) -> None:
    """A float32 result of norms within their bound, and its own last rounding."""
    assert np.all(np.abs(y - exact) <= bound + np.spacing(np.abs(exact).astype(np.float32)))


class Baked(nn.Module):
    """A sequence length that leaves torch and comes back as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x) + torch.from_numpy(np.arange(int(x.shape[1]), dtype=np.float32))[None, :, None]


def test_a_size_that_the_trace_bakes_in_is_fixed_and_named() -> None:
    """The baked-in dimension is a number in the file and a note; the other one stays dynamic, and right."""
    module, x = Baked(), torch.randn(2, 3, 8)
    result = export(module, x, route="torchscript")
    batch, sequence, _ = result.model.graph.inputs[0].shape
    assert not isinstance(batch, int) and sequence == 3
    assert "dimension 1 of input x is fixed at 3: the tracer bakes it in" in result.notes
    assert any("test_export_routes.py" in note for note in result.notes)  # where Python read the size
    other = torch.randn(5, 3, 8)
    [y] = run(result.model, other.numpy())
    exact, bound = exact_norm(module.norm, other)
    assert_within(y, exact + np.arange(3)[None, :, None], bound)


def test_a_size_that_was_asked_to_be_dynamic_is_never_baked_in() -> None:
    """What the caller names dynamic is refused where the trace fixes it, and taken where it does not."""
    x, sequence, batch = torch.randn(2, 3, 8), {"x": {1: torch.export.Dim("s")}}, {"x": {0: torch.export.Dim("b")}}
    with pytest.raises(ExportError, match=r"dimension 1 of input x \(3\) would be baked in"):
        export(Baked(), x, route="torchscript", dynamic_shapes=sequence)
    result = export(Baked(), x, route="torchscript", dynamic_shapes=batch)
    assert [str(d) for d in result.model.graph.inputs[0].shape] == ["b", "3", "8"]
    static = export(Baked(), x, route="torchscript", dynamic_shapes={})
    assert list(static.model.graph.inputs[0].shape) == [2, 3, 8]


def test_a_wrong_file_is_caught_by_running_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were traces not compared, onnxruntime would still show at another size that the file is not the module."""
    monkeypatch.setattr(sizes, "_same", lambda one, other: True)
    with pytest.raises(ExportError, match=r"TorchScript's file (is wrong )?on inputs of shape \[5, 7, 8\]"):
        export(Baked(), torch.randn(2, 3, 8), route="torchscript")


class Counted(nn.Module):
    """A loop whose length is read from values: neither route can promise it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(int(x.sum().abs() * 0) + 2):
            x = self.norm(x)
        return x


class Aligned(nn.Module):
    """A check of memory, as custom kernels make it, which torch.export cannot take; the norm is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.data_ptr() % x.element_size() == 0
        return self.norm(self.norm(x))


def test_another_route_is_taken_and_named() -> None:
    """Where torch.export fails, TorchScript is tried; the route is named, and the notes keep the reason."""
    result = export(Aligned(), torch.randn(2, 3, 8), opset=18)
    assert result.route == "TorchScript, torch.onnx" and result.report.rewritten == 2
    assert any(note.startswith("the route dynamo failed: torch.export failed: ") for note in result.notes)


def test_a_trace_is_raised_beyond_what_torchscript_writes() -> None:
    """Above opset 20 the trace is converted, its norms written anew, both calls of the module paired with it."""
    result = export(Aligned(), torch.randn(2, 3, 8), opset=23, form="onnx")
    assert result.route == "TorchScript, torch.onnx at opset 20, raised to 23" and result.opset == 23
    assert [(p.module, p.same_epsilon) for p in result.norms] == [("norm", True)] * 2
    assert [node.op_type for node in result.model.graph].count("RMSNormalization") == 2


class Sized(nn.Module):
    """A length that torch.export keeps open, and a tracer bakes in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x) * (x.shape[1] if torch.compiler.is_exporting() else int(x.shape[1]))


class Differences(nn.Module):
    """An operator that TorchScript's exporter has no symbol for."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8, eps=1e-12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.diff(self.norm(x), dim=1)


@pytest.mark.parametrize(
    ("kind", "opset", "why"),
    [
        (Sized, 17, "not by TorchScript, torch.onnx: the tracer bakes in 1 of the dynamic dimensions"),
        (Differences, 13, "the route torchscript failed: TorchScript tracing failed: UnsupportedOperatorError"),
    ],
)
def test_an_old_opset_by_lowering(kind: type[nn.Module], opset: int, why: str) -> None:
    """Where tracing does not do, the symbolic trace is lowered: right at other sizes, its norm whole, epsilon kept."""
    module = kind()
    result = export(module, torch.randn(2, 3, 8), opset=opset)
    assert result.route == f"torch.export, torch.onnx at opset 18, lowered to {opset}"
    assert (result.opset, result.report.rewritten, result.norms[0].same_epsilon) == (opset, 1, True)
    assert any(note.startswith(why) for note in result.notes)
    x = torch.randn(4, 5, 8)
    [y] = run(result.model, x.numpy())
    exact, bound = exact_norm(module.norm, x)
    if kind is Sized:
        assert_within(y, 5 * exact, 5 * bound)
    else:
        assert_within(y, np.diff(exact, axis=1), bound[:, 1:] + bound[:, :-1])


@pytest.mark.full
@pytest.mark.parametrize(("name", "dtype", "opset"), [("llama", "float32", 17), ("gemma3", "float16", 13)])
def test_a_transformer_at_an_old_opset(name: str, dtype: str, opset: int) -> None:
    """Every norm of a small transformer is whole, and its module's, below torch.onnx's oldest opset."""
    model = tiny.build(name, dtype)
    result = export(model.module, model.args, opset=opset)
    assert result.opset == opset and result.report.rewritten == len(model.norms)
    assert sorted(p.module for p in result.norms) == sorted(n.name for n in model.norms)
    assert all(p.same_epsilon for p in result.norms)


def test_a_forced_route_is_the_only_one(tmp_path: Path) -> None:
    """A route that is asked for fails by itself and writes nothing; another word is a usage error."""
    with pytest.raises(ExportError, match=r"^torch\.export failed: (?!.*torchscript)"):
        export(Counted(), torch.randn(2, 3, 8), route="dynamo", output=tmp_path / "m.onnx")
    with pytest.raises(UsageError, match="no route 'jit'; there are dynamo, torchscript"):
        export(Counted(), torch.randn(2, 3, 8), route="jit")
    assert not list(tmp_path.iterdir())


class Numpy(nn.Module):
    """Values that leave torch: a trace holds the example's result."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(x.detach().numpy() * 2)


class Masked(nn.Module):
    """A mask that is left out where it masks nothing."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x if mask.all() else x * mask


@pytest.mark.parametrize(
    ("module", "inputs"),
    [
        (Numpy(), (torch.ones(2, 3),)),
        (Counted(), (torch.ones(2, 3, 8),)),
        (Masked(), (torch.ones(2, 3), torch.ones(2, 3, dtype=torch.int64))),
        (Masked(), (torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool))),
    ],
)
def test_a_trace_of_values_is_refused(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    """A trace that holds numbers of the example, or the branch that they take, is no model of the module."""
    with pytest.raises(ExportError, match=r"Python reads values of the inputs at test_export_routes\.py:\d+"):
        export(module, inputs, opset=17, route="torchscript")


def test_a_type_that_cannot_be_run_is_said() -> None:
    """A bfloat16 file is traced and rewritten; the note says that onnxruntime has not run it."""
    result = export(norm("weight", "float32"), torch.randn(2, 3, D), opset=17, dtype="bfloat16")
    assert result.model.graph.inputs[0].dtype == ir.DataType.BFLOAT16 and result.report.rewritten == 1
    assert "not run" in result.notes[0] and "is the same" in result.notes[0]


def test_tracing_leaves_torch_and_the_module_as_they_were(monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    """A user's symbolic function stays registered, none is left of ours, and nothing is printed."""
    from torch.onnx._internal.torchscript_exporter.registration import registry

    def mine(g, *inputs):
        return inputs[0]

    # torch keeps the empty group of a function that was unregistered, and fails at it.
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))
    module = norm("weight", "float32")
    export(module, torch.randn(2, 3, D), opset=17)
    assert registry.get_function_group("aten::rms_norm") is None
    torch.onnx.register_custom_op_symbolic("aten::rms_norm", mine, 17)
    export(module, torch.randn(2, 3, D), opset=17)
    with pytest.raises(ExportError):
        export(nn.Sequential(module, Numpy()), torch.randn(2, D), opset=17)
    assert registry.get_function_group("aten::rms_norm").get(17) is mine
    assert "forward" not in vars(module)
    assert capfd.readouterr() == ("", "")


def test_traced_weights_are_the_modules() -> None:
    """No copy of a weight is made, and tied weights are one."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.norm, self.head = nn.Embedding(11, 8), nn.RMSNorm(8), nn.Linear(8, 11, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.norm(self.embed(ids)))

    module = Tied()
    result = export(module, torch.randint(0, 11, (2, 3)), opset=17)
    held = result.model.graph.initializers
    assert sorted(held) == ["embed.weight", "norm.weight"]
    assert held["embed.weight"].const_value.raw.data_ptr() == module.embed.weight.data_ptr()


@pytest.mark.full
def test_weights_over_two_gib(tmp_path: Path) -> None:
    """Weights that protobuf cannot hold go into a data file, by TorchScript too."""
    rows = 2**31 // (2 * D) + 4096
    with torch.device("meta"):
        embed = nn.Embedding(rows, D, dtype=torch.float16)
    embed.weight = nn.Parameter(torch.zeros(rows, D, dtype=torch.float16))  # zeros are not touched until they are read
    module = nn.Sequential(embed, nn.RMSNorm(D, dtype=torch.float16))
    path = tmp_path / "large.onnx"
    result = export(module, torch.zeros(2, 3, dtype=torch.int64), opset=17, output=path)
    assert result.report.rewritten == 1
    assert path.stat().st_size < 2**20 and sum(f.stat().st_size for f in tmp_path.iterdir()) > 2**31
    onnx.checker.check_model(str(path))


@pytest.mark.parametrize("reads", [lambda x: 7 in x, lambda x: x.data.abs().max().item() > 20])
def test_what_values_decide_is_not_traced_instead(reads) -> None:
    """Where torch.export refuses Python that reads values, no trace with the example's answer takes its place."""

    class Deciding(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 0.5 if reads(x) else x

    with pytest.raises(ExportError, match=r"^torch\.export failed: "):
        export(Deciding(), torch.randn(2, 3, 8))
