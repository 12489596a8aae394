"""Released weights by name: the tags that our OpenCLIP models have, and the conversion of what they download.

`open_clip.create_model("DiffCLIP-ViT-B-16", pretrained="cc12m")` downloads DiffCLIP's checkpoint as OpenCLIP downloads
its weights. The file is a pickle, of which only tensors are read, and it has other names: it is converted once, next to
huggingface_hub's cache.

Sources: the file and the id of cc12m are those of hammoudhasan/DiffCLIP's test_models.py, the file and the id of cc3m
those of its page on the Hub, which names no licence; the page of cc12m was not read. Neither were the files.

This module imports nothing that imports OpenCLIP, since it is itself imported while OpenCLIP's import ends.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diffvision.files import locked
from diffvision.models.bundled import bundled
from diffvision.models.names import DIFFCLIP_PREPROCESS

CONVERTED = "diffvision_layout"
"""In OpenCLIP's description of a tag: the layout that the downloaded file is converted from."""


def _diffclip(repository: str) -> dict[str, Any]:
    return {
        "hf_hub": f"{repository}/checkpoint_best.pt",
        "quick_gelu": True,
        CONVERTED: "diffclip",
        **DIFFCLIP_PREPROCESS,
    }


def _bundled(name: str) -> dict[str, Any]:
    # The normalisation of the recipe that they were trained by, clip/debug.yaml.
    about = {"quick_gelu": True, "mean": [0.33, 0.33, 0.33], "std": [0.27, 0.27, 0.27]}
    return {tag: {"file": str(file), **about} for tag, file in bundled(name).items()}


TAGS = {
    "CLIP-nano": _bundled("CLIP-nano"),
    "DiffCLIP-nano": _bundled("DiffCLIP-nano"),
    "DiffCLIP-ViT-B-16": {
        "cc3m": _diffclip("hammh0a/DiffCLIP_ViTB16_CC3M"),
        "cc12m": _diffclip("hammh0a/DiffCLIP_ViTB16_CC12M"),
    },
}
"""Name of one of our OpenCLIP models -> tag -> OpenCLIP's description of it."""


def wrap_download(download: Callable[..., str]) -> Callable[..., str]:
    """Return OpenCLIP's `download_pretrained`, which also converts the files of our tags."""

    @functools.wraps(download)
    def download_pretrained(cfg, prefer_hf_hub=True, cache_dir=None):
        if CONVERTED not in (cfg or {}):
            return download(cfg, prefer_hf_hub, cache_dir)
        try:
            file = download(cfg, prefer_hf_hub, cache_dir)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{error}: copy {cfg['hf_hub'].rpartition('/')[2]} from another machine, run `diffvision convert "
                "--to openclip`, and open it as local-dir:FOLDER"
            ) from error
        return str(converted(Path(file), cfg["hf_hub"].rpartition("/")[0], cache_dir))

    return download_pretrained


def converted(file: Path, repository: str, cache_dir: str | Path | None = None) -> Path:
    """Return OpenCLIP's weights of a DiffCLIP checkpoint in huggingface_hub's cache, converted at the first call.

    They lie among huggingface_hub's assets, or in `cache_dir`, in one OpenCLIP folder per revision. Processes that need
    them at the same time wait for the first; a conversion that fails or is stopped leaves nothing.

    Args:
        file: the checkpoint, in the folder of its revision.
        repository: its id on the Hub.
        cache_dir: OpenCLIP's argument of that name.

    Raises:
        ValueError: the file is no DiffCLIP checkpoint of a size that we have.
    """
    from huggingface_hub import cached_assets_path

    from diffvision.models.convert.files import write_openclip
    from diffvision.models.convert.layouts import WEIGHTS, recognise
    from diffvision.models.weight_files import written_whole

    folder = cached_assets_path("diffvision", repository, file.parent.name, assets_dir=cache_dir)
    target = folder / "openclip"
    with locked(folder / "openclip.lock"):
        if not target.is_dir():
            weights = recognise(file)
            if weights.layout != "diffclip":
                raise ValueError(f"{file} is of layout {weights.layout}: give a checkpoint of DiffCLIP's authors")
            with written_whole(target) as made:
                write_openclip(weights, made)
    return target / WEIGHTS
