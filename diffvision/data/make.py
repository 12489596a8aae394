"""The commands `data make`, `check`, `stats`, `tokenizer` and `tokenize`: they print what is computed elsewhere."""

from pathlib import Path

from diffvision.progress import track
from diffvision.tables import show

__all__ = ["MADE", "check", "make", "stats", "tokenize", "tokenizer", "write_manifest"]

MADE = ("digits", "digit-scenes", "stdlib", "recall", "folder", "evaluation")
_SETTINGS = {"digits": {"copies"}, "digit-scenes": {"copies"}, "recall": {"documents", "words"}}


def write_manifest(directory: str | Path) -> None:
    """Write the manifest of a directory of shards anew."""
    from diffvision.data.shards import writer

    writer.write_manifest(directory)


def make(
    name: str,
    directory: str,
    source: str | None = None,
    captions: str | None = None,
    columns: dict[str, str] | None = None,
    split: str | None = None,
    templates: list[str] | None = None,
    copies: int | None = None,
    documents: int | None = None,
    words: int | None = None,
    seed: int = 0,
    per_shard: int = 10_000,
    num_workers: int = 2,
) -> int:
    """Write a dataset as WebDataset shards with a manifest.

    Args:
        name: digits, digit-scenes, stdlib (text: the running Python's library), recall (synthetic text: needles and
            mappings to mix into training text), folder to pack your images as training shards, or evaluation
            to pack them as an evaluation folder (zero-shot of those with labels, retrieval of those with captions).
        directory: the folder to write; it must have no shards yet.
        source: for folder and evaluation: a folder of images (with x.txt next to x.jpg, or with a folder for each
            class), a table (.csv, .tsv, .jsonl, .parquet, COCO's captions_*.json), a folder that Hugging Face datasets
            saved, or torchvision:NAME:ROOT.
        captions: for folder and evaluation: the table of a folder of images, with captions or labels.
        columns: its columns image, caption and label, where they have other names: {image: file, label: kind}.
        split: for folder: train, validation or test, of a source that has splits; train by default.
        templates: for evaluation: zero-shot prompts with {c} where the class name belongs.
        copies: for digits and digit-scenes: images made of each training digit.
        documents: for recall: how many.
        words: for recall: the most words of a document with needles.
        seed: determines all random choices in digits, digit-scenes and recall.
        per_shard: for folder and evaluation: samples a shard.
        num_workers: for folder and evaluation: processes.
    """
    made = f"made {name} in {Path(directory)}"
    options = {"copies": copies, "documents": documents, "words": words}
    settings: dict[str, int] = {setting: value for setting, value in options.items() if value is not None}
    if unknown := sorted(settings.keys() - _SETTINGS.get(name, set())):
        raise ValueError(f"make {name} has no setting {', '.join(unknown)}: leave it out")
    if name == "digits":
        from diffvision.data.made.digits import make_digits

        make_digits(directory, seed=seed, **settings)
    elif name == "digit-scenes":
        from diffvision.data.made.scenes import make_scenes

        make_scenes(directory, seed=seed, **settings)
    elif name == "stdlib":
        from diffvision.data.made.corpus import make_stdlib

        made = f"made stdlib in {Path(directory)}: {make_stdlib(directory).summary()}"
    elif name == "recall":
        from diffvision.data.made.recall import make_recall

        made += f": {make_recall(directory, seed=seed, **settings):,} characters"
    elif name in ("folder", "evaluation"):
        if source is None:
            raise ValueError(f"make {name} needs --source, such as a folder of images")
        made = _pack_images(
            name, directory, source, captions, columns, split, templates, per_shard=per_shard, num_workers=num_workers
        )
    else:
        raise ValueError(f"no dataset is called {name!r}: there are {', '.join(MADE)}")
    print(made)
    return 0


def _pack_images(
    name: str,
    directory: str,
    source: str,
    table: str | None,
    columns: dict[str, str] | None,
    split: str | None,
    templates: list[str] | None,
    **how: int,
) -> str:
    from diffvision.data.images.folders import ImageEvaluationFolder
    from diffvision.data.images.packing import pack, pack_evaluation
    from diffvision.data.images.sources import find_images

    if name == "folder":
        images = find_images(source, split, table=table, columns=columns)
        packed = pack(images, directory, shuffle=images.labels is not None, **how)
        made = f"packed {Path(directory)}: {packed.summary()}"
        if images.caption_key != "txt":
            made += f"\nseveral captions an image: train with --data.init_args.caption_key {images.caption_key}"
        return made
    folder = ImageEvaluationFolder(source, table=table, columns=columns)
    splits = pack_evaluation(folder, directory, templates, **how)
    lines = [f"{split}: {packed.summary()}" for split, packed in splits.items()]
    return "\n".join([f"made the {folder.task} evaluation {Path(directory)}", *lines])


def check(
    source: str | list[str],
    num_workers: int = 2,
    image_key: str | list[str] | None = None,
    caption_key: str | None = None,
    label_key: str | None = None,
    text_key: str | None = None,
) -> int:
    """Verify shards and decode every sample of them as training does. Return 1 if there are problems.

    Args:
        source: shards as training takes them (several as [a,b]), or folders of shards at any depth.
        num_workers: processes.
        image_key: as in training: the member types that hold an image, jpg, jpeg, png and webp by default.
        caption_key: as in training: txt or json:FIELD. With no key given, what the samples of each folder have.
        label_key: as in training: cls or json:FIELD.
        text_key: as in training on text: txt, json:FIELD or jsonl:FIELD.
    """
    from diffvision.data.check import Keys, check_shards, check_tables
    from diffvision.data.images.samples import IMAGE_KEYS

    keys = Keys(image_key or IMAGE_KEYS, caption_key, label_key, text_key)
    results = check_shards(source, num_workers, keys)
    checked = [{**vars(result), "ok": result.ok} for result in results]
    show(check_tables(results, source), data=checked)
    return 0 if all(result.ok for result in results) else 1


def stats(source: str | list[str], num_workers: int = 2) -> int:
    """Count and measure shards.

    Args:
        source: shards as training takes them (several as [a,b]), or folders of shards at any depth.
        num_workers: processes.
    """
    from diffvision.data.check import shard_stats, stats_data, stats_table

    measured = shard_stats(source, num_workers)
    show(stats_table(measured, source), data=stats_data(measured))
    return 0


def tokenizer(
    source: str | list[str], path: str, vocab_size: int = 4096, text_key: str = "txt", max_bad_fraction: float = 0.01
) -> int:
    """Train a byte-level BPE tokenizer on the text of shards.

    Args:
        source: text shards, as for training; several as [a,b].
        path: the file to write, or a directory for tokenizer.json.
        vocab_size: tokens, with the 256 bytes and the end of a document among them.
        text_key: the member with the text: txt, json:FIELD, or jsonl:FIELD with a document in each line.
        max_bad_fraction: documents that cannot be used are left out and counted; more of them than this are an error.
    """
    from diffvision.data.shards.report import Limits
    from diffvision.data.shards.storage import ShardSet
    from diffvision.data.text.documents import DocumentAccount, TextMember
    from diffvision.data.text.tokenize import documents_of
    from diffvision.data.text.tokenizers import FILE, train_tokenizer

    target = Path(path) if Path(path).suffix == ".json" else Path(path) / FILE
    if target.exists():
        raise ValueError(f"{target} is there already: remove it, or choose another path")
    account = DocumentAccount()
    documents = documents_of(ShardSet(source), TextMember(text_key), limits=Limits(max_bad_fraction), account=account)
    trained = train_tokenizer(track(documents, "reading"), vocab_size)
    trained.save(target)
    print(f"trained {target}: {trained.vocab_size:,} tokens, of {account.summary()}")
    if trained.vocab_size < vocab_size:
        print(f"  fewer than {vocab_size:,}: no other pair comes twice in the text")
    return 0


def tokenize(
    source: str,
    directory: str,
    tokenizer: str,
    text_key: str = "txt",
    max_bad_fraction: float = 0.01,
    num_workers: int = 2,
) -> int:
    """Write text shards as token shards, for sequences of any length.

    Args:
        source: text shards, as for training.
        directory: the folder to write; it must not exist, or be empty.
        tokenizer: a tokenizer.json, a directory that holds one, or a tiktoken name.
        text_key: the member with the text: txt, json:FIELD, or jsonl:FIELD with a document in each line.
        max_bad_fraction: documents that cannot be used are left out and counted; more of them than this are an error.
        num_workers: processes.
    """
    from diffvision.data.shards.report import Limits
    from diffvision.data.shards.storage import ShardSet
    from diffvision.data.text.documents import TextMember
    from diffvision.data.text.tokenize import tokenize_shards
    from diffvision.data.text.tokenizers import load_tokenizer

    account = tokenize_shards(
        ShardSet(source),
        directory,
        load_tokenizer(tokenizer),
        TextMember(text_key),
        num_workers=num_workers,
        limits=Limits(max_bad_fraction),
    )
    print(f"tokenised {source} in {Path(directory)}: {account.summary()}")
    return 0
