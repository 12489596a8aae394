"""The image tower of the authors' tiny DiffCLIP checkpoint as a timm model: OpenCLIP cannot size one from JSON."""

import timm
import torch
from timm.models import register_model

TOWER = "golden_vit_patch8_clip_32"


@register_model
def golden_vit_patch8_clip_32(pretrained: bool = False, **settings) -> torch.nn.Module:
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 2}
    return timm.create_model("diff_vit_debug_clip", **{**sizes, **settings})
