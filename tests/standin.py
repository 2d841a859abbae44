"""The stand-in for torchvision that timm needs, in sight only while timm is imported."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from pathlib import Path

from rmsnorm_onnx.models import tiny

FOLDER = Path(__file__).parent / "standins"


def build(name: str, dtype: str = "float32") -> tiny.TinyModel:
    """A tiny model, the one of timm too."""
    if name == "timm-vit":
        import_timm()
    return tiny.build(name, dtype)


def import_timm() -> None:
    """Import timm's ViT; where there is no torchvision, with the stand-in, which is out of sight again afterwards.

    transformers and diffusers look for torchvision too, and would take it for whole.
    """
    if importlib.util.find_spec("torchvision") is None:
        with _in_sight():
            importlib.import_module("timm.models.vision_transformer")


@contextlib.contextmanager
def _in_sight():
    sys.path.insert(0, str(FOLDER))
    try:
        yield
    finally:
        sys.path.remove(str(FOLDER))
        for name in [n for n in sys.modules if n.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
