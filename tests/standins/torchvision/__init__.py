"""A stand-in for torchvision, which has no build for the CPU build of torch that the tests run on.

timm imports torchvision when it is imported, for transforms, data sets and one layer that its ViT never uses. Here are
the names that it imports and nothing behind them: whoever makes or calls one gets a NotImplementedError. transformers
and diffusers take this for torchvision where it is in sight, and import names of their own: any name is here.
`tests/standin.py` puts it in sight while timm is imported; it is no part of the package.
"""

from __future__ import annotations

from typing import Any, NoReturn

__version__ = "0.0.0"


def absent(name: str) -> type:
    """A class of that name that cannot be made; what a module here gives for a name that it does not define."""
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(self: Any, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"torchvision's {name} is not in this stand-in; install torchvision")

    return type(name, (), {"__init__": refuse, "__doc__": f"torchvision's {name}, without anything behind it."})
