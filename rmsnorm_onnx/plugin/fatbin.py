"""Which GPUs a library has code for: read from the CUDA binaries in it, without CUDA's tools.

nvcc embeds "fatbins": a header, then entries, each with its kind (PTX or machine code) and its compute capability, as
`cuobjdump --list-elf --list-ptx` prints them.
"""

from __future__ import annotations

import dataclasses
import os
import struct
from collections.abc import Iterator
from pathlib import Path

_MAGIC = struct.pack("<IH", 0xBA55ED50, 1)  # with the version of the layout
_HEADER = struct.Struct("<IHHQ")  # magic, version, size of the header, size of the entries
_ENTRY = struct.Struct("<HHIQIIHHI")  # kind, -, size of its header, size of its code, -, -, -, -, compute capability
_PTX, _MACHINE = 1, 2


@dataclasses.dataclass(frozen=True, slots=True)
class Code:
    """The compute capabilities that a library has code for, 89 for 8.9, each in ascending order.

    Attributes:
        machine: Of machine code, which runs on that capability and on later ones of the same major number.
        ptx: Of PTX, which the driver compiles for that capability and for all later ones.
    """

    machine: tuple[int, ...]
    ptx: tuple[int, ...]

    def runs_on(self, capability: int) -> bool:
        """Whether a GPU of a compute capability can run the library.

        >>> Code((80, 120), (120,)).runs_on(89), Code((80, 120), (120,)).runs_on(90), Code((), (80,)).runs_on(121)
        (True, False, True)
        """
        native = any(code // 10 == capability // 10 and code <= capability for code in self.machine)
        return native or any(code <= capability for code in self.ptx)

    def __str__(self) -> str:
        """The capabilities in words."""
        return ", ".join([*map(str, self.machine), *(f"{code} (PTX)" for code in self.ptx)])


def code_of(library: str | os.PathLike[str]) -> Code | None:
    """The code of a library; None where it has no CUDA binary that can be read."""
    found = set(_entries(Path(library).read_bytes()))
    if not found:
        return None
    machine, ptx = (tuple(sorted(c for kind, c in found if kind == wanted)) for wanted in (_MACHINE, _PTX))
    return Code(machine, ptx)


def _entries(data: bytes) -> Iterator[tuple[int, int]]:
    """The kind and the compute capability of each entry of each fatbin."""
    start = data.find(_MAGIC)
    while start >= 0:
        at = end = start + 1
        if start + _HEADER.size <= len(data):
            _, _, header, size = _HEADER.unpack_from(data, start)
            at, end = start + header, min(start + header + size, len(data))
        while at + _ENTRY.size <= end:
            kind, _, header, size, *_, capability = _ENTRY.unpack_from(data, at)
            if header < _ENTRY.size or kind not in (_PTX, _MACHINE):
                break
            yield kind, capability
            at += header + size
        start = data.find(_MAGIC, start + 1)
