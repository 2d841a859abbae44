"""`python -m rmsnorm_onnx.models.table`: measures every tiny model and variant, and writes the page of models.

Each model is measured in processes of its own, two at a time. What was measured is kept in build/models.json as it
comes, so that a run that was stopped goes on where it was, and a part can be measured anew: what --model, --opset and
--dtype name always is. The page is written when all rows are there, or with --partial, when it names those that are
missing; whole or not at all.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import importlib.metadata
import itertools
import json
import os
import platform
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rmsnorm_onnx.models import page, tiny
from rmsnorm_onnx.models.peers import TOOLS, Finding
from rmsnorm_onnx.models.rows import OWN, Key, Request
from rmsnorm_onnx.models.variants import VARIANTS

COVER: Mapping[int, tuple[str, ...]] = MappingProxyType(
    {17: ("float32",), 18: ("float32",), 23: ("float16",), 24: ("bfloat16",)}
)
"""The types that each model is measured in, by opset: 17, which older runtimes take; 18, the oldest that torch writes
itself; 23, the first with RMSNormalization; 24, the one after it. An export takes seconds: each has one."""

UNLIKE: Mapping[tuple[str, int], tuple[str, ...]] = MappingProxyType({("x-transformers", 24): ("float16",)})
"""Where that cannot be: ONNX's Einsum, which x-transformers is written with, takes no bfloat16."""

OPSETS = tuple(COVER)
"""The opsets of the page."""

VARIANT_COVER: Mapping[int, tuple[str, ...]] = MappingProxyType({18: ("float16",)})
"""Variants are spellings, which one opset shows, and roundings, which float16 shows."""

VERSION = 1
"""Version of the cache."""

_SOURCES = ("torch", "transformers", "diffusers", "x-transformers", "timm", "keras")
PACKAGES = (*_SOURCES, "onnx", "onnx-ir", "onnxscript", "onnxruntime")
SECONDS = 600  # for one stage of one row, on a machine that does something else too

_STOPPED = "stopped:"
_PAGE = Path("models/README.md")
_CACHE = Path("build/models.json")


def all_keys() -> list[Key]:
    """Every row of the page, in its order."""
    tables = (("model", tiny.NAMES, COVER), ("variant", VARIANTS, VARIANT_COVER))
    return [
        Key(kind, name, dtype, opset)
        for kind, names, cover in tables
        for name in names
        for opset, types in cover.items()
        for dtype in UNLIKE.get((name, opset), types)
    ]


class Cache:
    """The rows that were measured, kept in a file.

    Args:
        path: The file; it need not be there.
        machine: The processor and the versions that its rows must be of; others are forgotten.
    """

    def __init__(self, path: Path, machine: dict[str, str]) -> None:
        """Reads the file."""
        self._path, self._machine, self._lock = path, machine, threading.Lock()
        self.rows: dict[Key, dict[str, Any]] = {}
        if path.exists():
            data = json.loads(path.read_text())
            if (data["version"], data["machine"]) == (VERSION, machine):
                self.rows = {Key(**item["key"]): item["row"] for item in data["rows"]}

    def put(self, key: Key, row: dict[str, Any]) -> None:
        """Keeps a row, on disk too."""
        with self._lock:
            self.rows[key] = row
            rows = [{"key": dataclasses.asdict(k), "row": r} for k, r in self.rows.items()]
            data = {"version": VERSION, "machine": self._machine, "rows": rows}
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write(self._path, json.dumps(data) + "\n")


def write(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def measure(keys: Iterable[Key], cache: Cache, workers: int = 2) -> None:
    """Measure rows, those of one model one after the other in one process, and keep each in the cache."""
    groups: dict[tuple[str, str], list[Key]] = {}
    for key in keys:
        groups.setdefault((key.kind, key.name), []).append(key)
    total, done = sum(map(len, groups.values())), itertools.count(1)

    def one(group: list[Key]) -> None:
        for key, row in measured(group):
            cache.put(key, row)
            words = row.get("failed") or f"{row['found']} of {row['expected']}"
            where = f"{key.name} {key.dtype} opset {key.opset}"
            print(f"[{next(done)}/{total}] {where}: {words}", file=sys.stderr, flush=True)

    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        for future in [pool.submit(one, group) for group in groups.values()]:
            future.result()


def measured(keys: Sequence[Key], seconds: int = SECONDS) -> Iterator[tuple[Key, dict[str, Any]]]:
    """Rows of one model, each as soon as it is whole; what crashes or hangs is said in its place.

    A process that dies, or tells nothing for `seconds`, is replaced by one that goes on after what it was at.
    """
    left = [Request(key) for key in keys]
    rows: dict[Key, dict[str, Any]] = {key: {} for key in keys}
    while left:
        at: tuple[Key, str] | None = None
        ended = ""
        for event in _events(left, seconds):
            if "ended" in event:
                ended = event["ended"]
                break
            key = Key(**event["key"])
            at = (key, event["begin"]) if "begin" in event else at
            _take(rows[key], event)
            if _is_whole(rows[key]):
                left = [request for request in left if request.key != key]
                yield key, rows[key]
        if not left:
            return
        key, stage = at or (left[0].key, OWN)
        words = ended or "stopped without a word"
        if stage != OWN and words.startswith(_STOPPED):  # a tool's own exceptions are findings: this one is ours
            raise RuntimeError(f"measuring {stage} on {key.name} {key.dtype} opset {key.opset}: {words}")
        _take(rows[key], {"own": {"failed": words}} if stage == OWN else _lost(stage, words))
        if _is_whole(rows[key]):
            left = [request for request in left if request.key != key]
            yield key, rows[key]
        else:  # its export is paid for again, with the stages that are left
            missing = tuple(tool for tool in TOOLS if tool not in rows[key].get("peers", {}))
            left = [Request(key, missing) if request.key == key else request for request in left]


def _lost(stage: str, words: str) -> dict[str, Any]:
    return {"peer": stage, "finding": Finding(None, "crashes" if "signal" in words else "fails", words).to_json()}


def _take(row: dict[str, Any], event: dict[str, Any]) -> None:
    if "own" in event:
        row.update(event["own"])
    elif "peer" in event:
        row.setdefault("peers", {})[event["peer"]] = event["finding"]


def _is_whole(row: dict[str, Any]) -> bool:
    return "failed" in row or ("found" in row and len(row.get("peers", {})) == len(TOOLS))


def _events(requests: Sequence[Request], seconds: int) -> Iterator[dict[str, Any]]:
    """What a process that measures tells, and how it ended."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as words:
        text = json.dumps([dataclasses.asdict(request) for request in requests])
        command = [sys.executable, "-W", "ignore", "-m", "rmsnorm_onnx.models.rows", folder, text]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=words, text=True)
        told: queue.Queue[str | None] = queue.Queue()
        reader = threading.Thread(target=_read, args=(process, told), daemon=True)
        reader.start()
        try:
            while True:
                line = told.get(timeout=seconds)
                if line is None:
                    break
                yield json.loads(line)
            code = process.wait()
            words.seek(0)
            last = words.read().decode(errors="replace").strip().splitlines()[-1:]
            yield {"ended": f"ended by signal {-code}" if code < 0 else " ".join([_STOPPED, *last])[:300]}
        except queue.Empty:
            yield {"ended": f"took over {seconds} s"}
        finally:
            process.kill()
            process.wait()
            reader.join()


def _read(process: subprocess.Popen[str], told: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        told.put(line)
    told.put(None)


def machine() -> dict[str, str]:
    """The processor and the versions that the numbers are of."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"processor": _processor(), "Python": platform.python_version(), **versions}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing or asked for, and write the page when nothing is missing.

    Returns:
        0 when the page was written or the rows asked for were measured; 2 for a name that does not exist.
    """
    parser = argparse.ArgumentParser(prog="python -m rmsnorm_onnx.models.table", description=__doc__)
    names = (*tiny.NAMES, *VARIANTS)
    parser.add_argument("--model", action="append", choices=names, metavar="NAME", help="of a model or variant")
    parser.add_argument("--opset", action="append", type=int, choices=OPSETS, help="only this one")
    parser.add_argument("--dtype", action="append", choices=tiny.DTYPES, help="only this one")
    parser.add_argument("--page-only", action="store_true", help="measure nothing")
    parser.add_argument("--partial", action="store_true", help="write the page although rows are missing")
    parser.add_argument("-o", "--output", type=Path, default=_PAGE, help="the page (default: %(default)s)")
    parser.add_argument("--cache", type=Path, default=_CACHE, help="measured rows (default: %(default)s)")
    options = parser.parse_args(arguments)

    facts = machine()
    cache = Cache(options.cache, facts)
    wanted = all_keys()
    if not options.page_only:
        measure(_chosen(wanted, options, cache), cache)
    missing = [key for key in wanted if key not in cache.rows]
    if missing and not options.partial:
        print(f"{len(missing)} rows are still to be measured, so the page was left as it was", file=sys.stderr)
        return 0
    write(options.output, page.render({key: cache.rows[key] for key in wanted if key in cache.rows}, facts, missing))
    print(f"written to {options.output}", file=sys.stderr)
    return 0


def _chosen(wanted: Sequence[Key], options: argparse.Namespace, cache: Cache) -> list[Key]:
    """The rows that were asked for; without any wish, those that are missing."""
    if not (options.model or options.opset or options.dtype):
        return [key for key in wanted if key not in cache.rows]
    picks = (options.model, options.opset, options.dtype)
    return [
        key
        for key in wanted
        if all(not pick or part in pick for pick, part in zip(picks, (key.name, key.opset, key.dtype), strict=True))
    ]


if __name__ == "__main__":
    sys.exit(main())
