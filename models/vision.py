"""Tiny models of images and video: a ViT of timm, and blocks of diffusers with norms over channels."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rmsnorm_onnx.errors import MissingDependencyError
from rmsnorm_onnx.models.design import HIDDEN, Design, Inputs

if TYPE_CHECKING:
    import torch

_SIDE = 16


def _timm_vit() -> torch.nn.Module:
    """A ViT whose norms are RMSNorms, those of queries and keys too; the output is its normalised tokens."""
    try:
        from timm.layers import RmsNorm
        from timm.models.vision_transformer import VisionTransformer
    except ImportError as error:
        missing = (error.name or "timm").partition(".")[0]
        raise MissingDependencyError(missing, "building timm-vit", "timm") from error
    return VisionTransformer(
        img_size=_SIDE,
        patch_size=4,
        embed_dim=HIDDEN,
        depth=2,
        num_heads=4,
        mlp_ratio=2,
        qk_norm=True,
        norm_layer=RmsNorm,
        num_classes=0,
        global_pool="",
    )


def _images(draw: Inputs) -> tuple[torch.Tensor, ...]:
    return (draw.values(3, _SIDE, _SIDE),)


def _diffusers(purpose: str) -> Any:
    try:
        import diffusers
    except ImportError as error:
        raise MissingDependencyError("diffusers", f"building {purpose}", "diffusers") from error
    return diffusers


def _wan_block() -> torch.nn.Module:
    """The residual block of Wan's video autoencoder: F.normalize over axis 1, times sqrt(d), times the gain."""
    _diffusers("wan-block")
    from diffusers.models.autoencoders.autoencoder_kl_wan import WanResidualBlock

    return WanResidualBlock(HIDDEN, HIDDEN)


def _video(draw: Inputs) -> tuple[torch.Tensor, ...]:
    return (draw.values(HIDDEN, draw.sequence, 4, 4),)


def _diffusers_block() -> torch.nn.Module:
    """diffusers' RMSNorm: with a bias over the channels of a DC-AE block, and on the heads of an attention after it."""
    _diffusers("diffusers-block")
    import torch
    from diffusers.models.attention_processor import Attention
    from diffusers.models.autoencoders.autoencoder_dc import ResBlock

    class Block(torch.nn.Module):  # type: ignore[misc]  # torch is not followed
        def __init__(self) -> None:
            super().__init__()
            self.residual = ResBlock(HIDDEN, HIDDEN, norm_type="rms_norm", act_fn="silu")
            self.attention = Attention(HIDDEN, heads=4, dim_head=16, qk_norm="rms_norm")

        def forward(self, x: torch.Tensor) -> Any:
            return self.attention(self.residual(x).flatten(2).transpose(1, 2))

    return Block()


def _features(draw: Inputs) -> tuple[torch.Tensor, ...]:
    return (draw.values(HIDDEN, draw.sequence, 4),)


DESIGNS: Mapping[str, Design] = MappingProxyType(
    {
        "timm-vit": Design(
            source="timm.models.vision_transformer.VisionTransformer",
            make=_timm_vit,
            inputs=_images,
            dynamic=((0,),),
            trouble="the size of its images is fixed, and so is the number of its tokens",
        ),
        "wan-block": Design(
            source="diffusers.models.autoencoders.autoencoder_kl_wan.WanResidualBlock",
            make=_wan_block,
            inputs=_video,
            dynamic=((0, 2),),
            trouble="its channels are axis 1, which the weights fix; batch and frames are axes 0 and 2",
        ),
        "diffusers-block": Design(
            source="diffusers ResBlock of AutoencoderDC, then diffusers' Attention",
            make=_diffusers_block,
            inputs=_features,
            dynamic=((0, 2),),
            trouble="its channels are axis 1, which the weights fix; batch and height are axes 0 and 2",
        ),
    }
)
"""The models of images and video."""
