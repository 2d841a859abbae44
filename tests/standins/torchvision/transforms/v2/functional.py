"""Its functions."""

from torchvision import absent as __getattr__

__all__ = ["__getattr__"]
