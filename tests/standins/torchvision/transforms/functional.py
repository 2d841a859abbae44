"""The functions of the transforms, and the interpolations by name, which timm keys a table by on import."""

import enum

from torchvision import absent as __getattr__

__all__ = ["InterpolationMode", "__getattr__"]


class InterpolationMode(enum.Enum):
    """The ways to interpolate, with the values that torchvision gives them."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"
