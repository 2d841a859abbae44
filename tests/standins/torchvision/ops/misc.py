"""The layer that timm looks for in a model in order to replace it."""

import torch


class FrozenBatchNorm2d(torch.nn.Module):
    """Never made here: timm asks whether a module is one."""

    def __init__(self, num_features: int) -> None:
        raise NotImplementedError("torchvision's FrozenBatchNorm2d is not in this stand-in; install torchvision")
