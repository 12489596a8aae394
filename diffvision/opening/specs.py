"""Checks of a model's name or path that need no PyTorch: its label, and whether the model exists.

The whole grammar, and the opening of models, are in `grammar.py`.
"""

from pathlib import Path

from diffvision.models.bundled import bundled
from diffvision.models.hub import HUB, HUGGING_FACE
from diffvision.models.names import names_by_library, unknown_model
from diffvision.models.weight_files import FOLDER, refuse_urls

SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".tar")
"""Of files of weights."""


def check_spec(spec: str | Path) -> None:
    """Raise what `open_model` would for a model that is not there, without building one: for several, before the first.

    Raises:
        FileNotFoundError, ValueError: no such name, file or folder, or transformers is needed and not installed.
    """
    text = str(spec)
    if "://" in text or not text.startswith((FOLDER, HUB, HUGGING_FACE)):
        refuse_urls(text, "model")
    if text.startswith(HUGGING_FACE):
        register_diffllama_v2(text)
    elif not text.startswith((FOLDER, HUB)) and not Path(text).exists() and not is_name(text):
        raise unknown(text)


def split_label(spec: str) -> tuple[str, str]:
    """Split LABEL=SPEC into the model's label in tables and pictures, and the SPEC for `open_model`.

    Without a label it is the last part of the path, without `.ckpt`. Lightning's paths have = in them
    ("epoch=3-step=100.ckpt"): a path that exists is taken whole, and a label has neither `/` nor `:`.

    Raises:
        ValueError: a label with `/` or `:`, or one that is not a name.
    """
    label, given, rest = spec.partition("=")
    if given and not Path(spec).exists():
        wrong = [mark for mark in "/:" if mark in label]
        if label in ("", ".", ".."):  # labels name folders
            raise ValueError(f"label {label!r} before '=' is not a name: use LABEL={rest} or just {rest}")
        if not wrong:
            return label, rest
        if Path(rest).exists() or rest.startswith((FOLDER, HUB, HUGGING_FACE)) or is_name(rest):
            raise ValueError(f"the label {label!r} of {rest} has a {wrong[0]!r} in it: write it without / and :")
    last = Path(spec.removeprefix(FOLDER).removeprefix(HUB).removeprefix(HUGGING_FACE))
    return (last.stem if last.suffix == ".ckpt" else last.name) or "model", spec


def is_name(text: str | Path) -> bool:
    """Return whether a string is a name of OpenCLIP's, timm's (with or without a tag) or of our language models.

    A name wins over a file or folder of the same spelling; `./` before it, or a `Path`, makes it a path.
    """
    if isinstance(text, Path):
        return False
    known = names_by_library()
    if text.startswith(HUB) or text in known["open_clip"] or text in known["language"]:
        return True
    if split_tag(text)[1]:
        return True
    name, dot, _ = text.partition(".")
    # "vit_tiny_patch16_224.ckpt" is a file, ".augreg_in21k" a tag, and "adapted_vit." is followed by a model's name.
    if name not in known["timm"] or not dot or name == "adapted_vit":
        return name in known["timm"]
    import timm

    return timm.models.is_model_pretrained(text)


def as_text(spec: str | Path) -> str:
    """Return a model or checkpoint as text for `open_model`, where a Path stays one, even if a model has its name."""
    is_bare = isinstance(spec, Path) and len(spec.parts) == 1
    return f"./{spec}" if is_bare else str(spec)


def unknown(text: str) -> Exception:
    """Return the error for a string that is neither a known name nor an existing path."""
    path, (name, _, tag) = Path(text), text.partition(".")
    if "/" in text or text.startswith(".") or path.suffix in SUFFIXES:
        return no_path(text)
    known = names_by_library()
    base, dot, last = text.rpartition(".")
    if dot and base in (*known["open_clip"], *known["language"]):
        from diffvision.opening.weights import no_such_weights

        return no_such_weights(last, base, tags_of(base))
    if name in known["timm"]:
        from diffvision.opening.weights import no_such_weights

        return no_such_weights(tag, name, timm_tags(name))
    every = [one for names in known.values() for one in names]
    return unknown_model(text, "no such file or folder, and neither OpenCLIP, timm nor diffvision has a", every)


def no_path(text: str) -> FileNotFoundError:
    """Return the error for a path that does not exist."""
    return FileNotFoundError(
        f"no file or folder {text}: give a training checkpoint, the folder of a model, or a model's name "
        f"(on the Hugging Face Hub, hf:{text} or hf-hub:{text})"
    )


def split_tag(name: str) -> tuple[str, str]:
    """Return the name and the tag of NAME.TAG, for OpenCLIP and language models; other names whole, with no tag."""
    base, _, tag = name.rpartition(".")
    return (base, tag) if name not in names_by_library()["open_clip"] and tag in tags_of(base) else (name, "")


def tags_of(name: str) -> list[str]:
    """Return the tags of an OpenCLIP or language model's pretrained weights; none for other names."""
    known = names_by_library()
    if name in known["open_clip"]:
        import open_clip

        return open_clip.list_pretrained_tags_by_model(name)
    return [*bundled(name)] if name in known["language"] else []


def timm_tags(name: str) -> list[str]:
    """Return the tags of a model's pretrained weights."""
    import timm

    return [full.partition(".")[2] for full in timm.list_models(f"{name}.*", pretrained=True)]


def register_diffllama_v2(path: str) -> None:
    """Register DIFF V2 with transformers' Auto classes; raise a ValueError where the package is missing."""
    try:
        import diffvision.models.language.modeling_diffllama_v2  # noqa: F401
    except ImportError as error:
        raise ValueError(f"{path} needs transformers 5.12 or later: pip install 'diffvision[hf]' ({error})") from error
