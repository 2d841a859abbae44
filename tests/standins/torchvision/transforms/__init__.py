"""The transforms."""

from torchvision import absent as __getattr__
from torchvision.transforms.functional import InterpolationMode

__all__ = ["InterpolationMode", "__getattr__"]
