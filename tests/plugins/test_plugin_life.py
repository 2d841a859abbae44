"""The TensorRT plugin's life on the CPU, through the entry points and methods that TensorRT calls."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import plugin_cases
import plugin_memory
import plugin_runs
import plugin_tables
import pytest
from kernel_build import SANITIZE, compiler
from plugin_build import harness, out_of_memory, plugin_on_cpu
from plugin_call import SILENT, VERSIONED, Library, fields_of

from rmsnorm_onnx.forms.plugin import FIELDS, NAMESPACE, OPERATOR, VERSION
from rmsnorm_onnx.spec import RMSNormSpec


@pytest.fixture(scope="module")
def library() -> Library:
    """The plugin for the CPU, built here."""
    return Library(harness(), plugin_on_cpu(), VERSIONED)


def test_it_is_the_plugin_that_fuse_writes_nodes_for(library: Library) -> None:
    """Name, version and namespace are the form's; the declared fields are the form's, and the gain."""
    plugin = library.create(fields_of(RMSNormSpec()))
    assert plugin is not None
    own = f"{OPERATOR} {VERSION} {NAMESPACE}"
    kinds = "PLUGIN_V3ONE_CORE PLUGIN_V3ONE_BUILD PLUGIN_V3ONE_RUNTIME"
    assert plugin.identity() == f"{own} {own} {kinds}"
    assert list(library.field_names()) == [*FIELDS, "gain"]


def test_bad_fields_are_refused_by_name(library: Library) -> None:
    """Missing, mistyped, out of range, unknown or doubled: no plugin, and one line with the field and the mend."""
    assert len(list(plugin_tables.bad_fields())) > 90
    assert list(plugin_cases.wrong_fields(library)) == []


def test_the_hosts_logger_gets_the_line(library: Library) -> None:
    """TensorRT 10's interfaces and 11's are told apart, and one that has no name is not called."""
    assert list(plugin_cases.wrong_finders(library)) == []


def test_without_a_logger_the_line_goes_to_stderr(library: Library, capfd: pytest.CaptureFixture[str]) -> None:
    """A host that has no logger at hand does not silence the plugin."""
    library.lend(SILENT)
    assert library.create({}) is None
    library.lend(VERSIONED)
    assert plugin_cases.one_line(capfd.readouterr().err, "norm: field axes: it is missing; write it as a list")


def test_fields_are_kept_and_told_apart(library: Library) -> None:
    """What an engine stores makes the same plugin again; every field changes the timing id; clones are equal."""
    changed = {name for name, _, _ in plugin_tables.variants()}
    assert changed >= {*FIELDS, "gain"}
    assert list(plugin_cases.wrong_variants(library)) == []


def test_types_and_shapes(library: Library) -> None:
    """Tensors that fit give y's type and x's shape; others are refused in one line, in each phase, before a launch."""
    found = list(plugin_tables.fits())
    assert sum(bool(fit.words) for fit in found) > 40 and sum(not fit.words for fit in found) > 40
    assert list(plugin_cases.wrong_fits(library)) == []


def test_refused_types_and_shapes_at_the_first_question(library: Library) -> None:
    """Already the questions for y's type and shape refuse what the fields do not ask for, with the reason."""
    plugin = library.create(fields_of(RMSNormSpec(axes=(-2, -1))))
    assert plugin is not None
    assert plugin.output_type("float16") is None
    assert plugin_cases.one_line(library.log(), "it has 1 input, and its fields ask for x, gain")
    assert plugin.output_type("int8", "int8") is None
    assert plugin_cases.one_line(library.log(), "x is TensorRT's type 2, and it must be float32")
    assert plugin.output_type("float32", "float32", outputs=2) is None
    assert plugin_cases.one_line(library.log(), "it has 2 outputs")
    assert plugin.output_shape((16,), (16,)) is None
    assert plugin_cases.one_line(library.log(), "field axes: it begins with -2, and x has 1 axis")
    assert plugin.output_shape((3, 16)) is None
    assert plugin_cases.one_line(library.log(), "its fields ask for x, gain")


def test_launches(library: Library) -> None:
    """Numbers within the oracle's bound, gains as inputs and as fields; what cannot be launched is an error and a line.

    A gain that is a field is copied once a device, when a context is made, also during a capture, and freed at the end.
    """
    assert list(plugin_runs.wrong_runs(library)) == []


def test_without_memory_a_call_fails_and_says_so() -> None:
    """Whichever allocation fails, the process goes on: the call fails with one line, and nothing stays allocated."""
    command = [sys.executable, str(Path(plugin_memory.__file__)), str(plugin_on_cpu()), str(harness())]
    environment = os.environ | {"LD_PRELOAD": str(out_of_memory())}
    checked = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr[-4000:]
    assert "all calls hold" in checked.stdout


@pytest.mark.full
def test_many_launches(library: Library) -> None:
    """More drawn specs."""
    assert list(plugin_runs.wrong_runs(library, 400)) == []


@pytest.mark.full
def test_under_the_sanitizers() -> None:
    """All checks again, with the address and undefined-behaviour sanitizers."""
    preload = []
    for name in ("libasan.so", "libstdc++.so"):  # exceptions are seen only where C++'s library is there from the start
        command = [compiler(), f"-print-file-name={name}"]
        preload.append(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())
    # A host's logger is called by its layout, under a class of our own: that is the point.
    built = plugin_on_cpu(flags=[*SANITIZE, "-fno-sanitize=vptr"])
    options = "detect_leaks=0:detect_stack_use_after_return=0:verify_asan_link_order=0"
    environment = os.environ | {"LD_PRELOAD": " ".join(preload), "ASAN_OPTIONS": options}
    command = [sys.executable, str(Path(plugin_cases.__file__)), str(built), str(harness())]
    checked = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr[-4000:]
    assert "all cases hold" in checked.stdout
