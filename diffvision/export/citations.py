"""The papers that a model rests on, as BibTeX."""

from __future__ import annotations

from collections.abc import Iterable

_DIFF = """@inproceedings{ye2025differential,
  title = {Differential Transformer},
  author = {Ye, Tianzhu and Dong, Li and Xia, Yuqing and Sun, Yutao and Zhu, Yi and Huang, Gao and Wei, Furu},
  booktitle = {International Conference on Learning Representations},
  year = {2025},
  eprint = {2410.05258}
}"""
_V2 = """@misc{ye2026differential,
  title = {Differential Transformer {V2}},
  author = {Ye, Tianzhu and Dong, Li and Sun, Yutao and Wei, Furu},
  howpublished = {https://huggingface.co/blog/microsoft/diff-attn-v2},
  year = {2026}
}"""
_GROUPED = """@misc{lim2025grouped,
  title = {Grouped Differential Attention},
  author = {Lim, Junghwan and Lee, Sungmin and Kim, Dongseok and others},
  year = {2025},
  eprint = {2510.06949}
}"""
_DINT = """@misc{cang2025dint,
  title = {{DINT} Transformer},
  author = {Cang, Yueyang and Liu, Yuhang and Zhang, Xiaoteng and Zhao, Erlu and Shi, Li},
  year = {2025},
  eprint = {2501.17486}
}"""
_VCA = """@inproceedings{pu2025linear,
  title = {Linear Differential Vision Transformer: Learning Visual Contrasts via Pairwise Differentials},
  author = {Pu, Yifan and Ying, Jixuan and Li, Qixiu and Ye, Tianzhu and Han, Dongchen and others},
  booktitle = {Advances in Neural Information Processing Systems},
  year = {2025},
  eprint = {2511.00833}
}"""
_DEX = """@misc{kong2025understanding,
  title = {Understanding Differential Transformer Unchains Pretrained Self-Attentions},
  author = {Kong, Chaerin and Jang, Jiho and Kwak, Nojun},
  year = {2025},
  eprint = {2505.16333}
}"""
_DIFFCLIP = """@misc{hammoud2025diffclip,
  title = {{DiffCLIP}: Differential Attention Meets {CLIP}},
  author = {Hammoud, Hasan Abed Al Kader and Ghanem, Bernard},
  year = {2025},
  eprint = {2503.06626}
}"""
_CLIP = """@inproceedings{radford2021learning,
  title = {Learning Transferable Visual Models From Natural Language Supervision},
  author = {Radford, Alec and Kim, Jong Wook and Hallacy, Chris and others},
  booktitle = {International Conference on Machine Learning},
  year = {2021},
  eprint = {2103.00020}
}"""
_VIT = """@inproceedings{dosovitskiy2021image,
  title = {An Image is Worth 16x16 Words: Transformers for Image Recognition at Scale},
  author = {Dosovitskiy, Alexey and Beyer, Lucas and Kolesnikov, Alexander and others},
  booktitle = {International Conference on Learning Representations},
  year = {2021},
  eprint = {2010.11929}
}"""


_OF_VARIANT = {"v2": [_V2], "gda": [_GROUPED], "v1_dint": [_DINT], "vca": [_VCA], "dex": [_DEX]}


def bibtex(variants: Iterable[str], name: str, host: str) -> str:
    """Return the entries for a model.

    Args:
        variants: keys of `diffvision.nn.ATTENTION`, or "vca", that its layers are of.
        name: of the model at its host.
        host: open_clip, timm or language.
    """
    entries: dict[str, None] = {}
    for variant in variants:
        if variant != "standard":
            entries |= dict.fromkeys([_DIFF, *_OF_VARIANT.get(variant, [])])
    if host == "open_clip":
        entries |= dict.fromkeys([_DIFFCLIP] if entries and "diffclip" in name.lower() else []) | {_CLIP: None}
    if host == "timm" and "vit" in name:
        entries[_VIT] = None
    return "\n\n".join(entries)
