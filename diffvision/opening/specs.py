"""The grammar of models: `find_model` decides what a model's string or path stands for, without PyTorch.

`open_model` lists the forms. A name wins over a path of the same spelling; `./` before it, or a `Path`, makes it one.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from diffvision.models.bundled import bundled
from diffvision.models.hub import HUB, HUGGING_FACE
from diffvision.models.names import names_by_library, unknown_model
from diffvision.models.weight_files import FOLDER, refuse_urls
from diffvision.opening.run_folders import find_run

SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".tar")
"""Of files of weights."""


class Spec(NamedTuple):
    """What a model's string stands for.

    Attributes:
        kind: of name, run, file, folder, hf-hub and hf.
        text: the name without its tag, the path as it was given, or what follows `hf-hub:` or `hf:`.
        library: of a name: open_clip, timm or language.
        tag: of a name: its pretrained weights, empty for new ones.
    """

    kind: Literal["name", "run", "file", "folder", "hf-hub", "hf"]
    text: str
    library: str = ""
    tag: str = ""

    @property
    def path(self) -> Path:
        """The path of a run, file or folder."""
        return Path(self.text)


def find_model(spec: str | Path) -> Spec:
    """Return what a model's string or path stands for.

    Raises:
        FileNotFoundError: the file or folder does not exist.
        ValueError: an unknown name or tag, a URL, or a folder with several runs.
    """
    text = str(spec)
    if not text:
        raise ValueError("the model is '': give a model's name, a file of weights or a folder")
    if text.startswith(FOLDER):
        raise ValueError(f"model must be a path without {FOLDER}, got {text!r}: give {text.removeprefix(FOLDER)}")
    if not isinstance(spec, Path):
        if "://" in text:
            refuse_urls(text, "model")
        if text.startswith(HUB):
            return Spec("hf-hub", text.removeprefix(HUB))
        if text.startswith(HUGGING_FACE):
            return Spec("hf", text.removeprefix(HUGGING_FACE))
        if name := _find_name(text):
            return name
        refuse_urls(text, "model")
    if run := find_run(spec):
        return Spec("run", str(run))
    if Path(spec).is_dir():
        return Spec("folder", text)
    if Path(spec).is_file():
        return Spec("file", text)
    raise _no_path(text) if isinstance(spec, Path) else _unknown(text)


def check_spec(spec: str | Path) -> None:
    """Raise what `open_model` would for a model that is not there, without building one: for several, before the first.

    Raises:
        FileNotFoundError, ValueError: no such name, file or folder, or transformers is needed and not installed.
    """
    if find_model(spec).kind == "hf":
        register_diffllama_v2(str(spec))


def is_name(spec: str | Path) -> bool:
    """Return whether a string is the name of a model, with or without a tag, or an id of the Hub after `hf-hub:`."""
    return not isinstance(spec, Path) and (spec.startswith(HUB) or _find_name(spec) is not None)


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
        if Path(rest).exists() or rest.startswith((HUB, HUGGING_FACE)) or is_name(rest):
            raise ValueError(f"the label {label!r} of {rest} has a {wrong[0]!r} in it: write it without / and :")
    last = Path(spec.removeprefix(FOLDER).removeprefix(HUB).removeprefix(HUGGING_FACE))
    return (last.stem if last.suffix == ".ckpt" else last.name) or "model", spec


def as_text(spec: str | Path) -> str:
    """Return a model or checkpoint as text for `open_model`, where a Path stays one, even if a model has its name."""
    is_bare = isinstance(spec, Path) and len(spec.parts) == 1
    return f"./{spec}" if is_bare else str(spec)


def register_diffllama_v2(path: str) -> None:
    """Register DIFF V2 with transformers' Auto classes; raise a ValueError where the package is missing."""
    try:
        import diffvision.models.language.modeling_diffllama_v2  # noqa: F401
    except ImportError as error:
        raise ValueError(f"{path} needs transformers 5.12 or later: pip install 'diffvision[hf]' ({error})") from error


def _find_name(text: str) -> Spec | None:
    """Return the model that a name with or without a tag stands for, None for other strings."""
    for library, names in names_by_library().items():
        if text in names or (library == "timm" and text.startswith("adapted_vit.")):  # a model's name follows it
            return Spec("name", text, library)
    for library, name, tag in _split_tag(text):
        if tag in tags_of(library, name):
            return Spec("name", name, library, tag)
    return None


def _split_tag(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield the library, name and tag of each known model whose name a string begins with, the rest being the tag.

    "vit_tiny_patch16_224.ckpt" is a file, ".augreg_in21k" a tag; OpenCLIP's names have points in them.
    """
    known = names_by_library()
    for library, (name, _, tag) in (
        ("open_clip", text.rpartition(".")),
        ("language", text.rpartition(".")),
        ("timm", text.partition(".")),
    ):
        if name in known[library]:
            yield library, name, tag


def tags_of(library: str, name: str) -> list[str]:
    """Return the tags of a model's pretrained weights."""
    if library == "open_clip":
        import open_clip

        return open_clip.list_pretrained_tags_by_model(name)
    if library == "timm":
        import timm

        return [full.partition(".")[2] for full in timm.list_models(f"{name}.*", pretrained=True)]
    return [*bundled(name)]


def _unknown(text: str) -> Exception:
    """Return the error for a string that is neither a known name nor an existing path."""
    if "/" in text or text.startswith(".") or Path(text).suffix in SUFFIXES:
        return _no_path(text)
    for library, name, tag in _split_tag(text):
        tags = ", ".join(tags_of(library, name))
        return ValueError(f"{name} has no pretrained weights {tag!r}: it has {tags or 'none'}")
    every = [one for names in names_by_library().values() for one in names]
    return unknown_model(text, "no such file or folder, and neither OpenCLIP, timm nor diffvision has a", every)


def _no_path(text: str) -> FileNotFoundError:
    return FileNotFoundError(
        f"no file or folder {text}: give a training checkpoint, the folder of a model, or a model's name "
        f"(on the Hugging Face Hub, hf:{text} or hf-hub:{text})"
    )
