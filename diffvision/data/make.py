"""The commands `data make`, `check`, `stats`, `tokenizer` and `tokenize`: they print what is computed elsewhere."""

import importlib
from pathlib import Path
from typing import Any

from diffvision.data.made import MADE
from diffvision.data.shards.sample import BadSource
from diffvision.mistakes import did_you_mean
from diffvision.progress import track
from diffvision.tables import show

_LEAST = {
    "copies": 1,
    "documents": 1,
    "words": 1,
    "scenes": 1,
    "evaluated": 1,
    "steps": 1,
    "distractors": 0,
    "highest": 1,
    "seed": 0,
    "per_shard": 1,
    "num_workers": 0,
}
"""The least value of each number that `make` takes; some datasets need more."""

__all__ = ["check", "make", "stats", "tokenize", "tokenizer", "write_manifest"]


def write_manifest(directory: str | Path) -> None:
    """Write the manifest of a directory of shards anew."""
    from diffvision.data.shards import writer

    writer.write_manifest(directory)


def make(
    name: str,
    directory: str,
    source: str | None = None,
    images: str | None = None,
    captions: str | None = None,
    columns: dict[str, str] | None = None,
    split: str | None = None,
    templates: list[str] | None = None,
    copies: int | None = None,
    documents: int | None = None,
    words: int | None = None,
    scenes: int | None = None,
    evaluated: int | None = None,
    steps: int | None = None,
    distractors: int | None = None,
    highest: int | None = None,
    seed: int | None = None,
    per_shard: int | None = None,
    num_workers: int | None = None,
) -> int:
    """Write a dataset as WebDataset shards with a manifest, or as JSON lines (arithmetic).

    Args:
        name: digits, digit-scenes, fashion, fashion-scenes, emoji, openclipart, tuxpaint (for tests only), stdlib
            (text: the running Python's library), text (English from packages), recall (synthetic text: needles and
            mappings to mix into training text), arithmetic (worded problems with distracting sentences, as prompts and
            responses to fine-tune on); folder to pack your images as training shards, or evaluation to pack
            them as an evaluation folder (zero-shot of those with labels, retrieval of those with captions); mmvp,
            sugarcrepe, aro, winoground, ohd-caps and pope: published evaluations, from the files that you have.
        directory: the folder to write; it must have no shards yet.
        source: for folder and evaluation: a folder of images (with x.txt next to x.jpg, or with a folder for each
            class), a table (.csv, .tsv, .jsonl, .parquet, COCO's or Karpathy's .json), a folder that Hugging Face
            datasets saved, or torchvision:NAME:ROOT. For text: a folder of unpacked packages, NAME=PATH for one of
            them, or NAME for one that is installed; several with commas (gcide=packages,python-doc,stdlib). For the
            others: the folder of the dataset's files.
        images: for a published evaluation: the folder of its images, where they are not in the source.
        captions: for folder and evaluation: the table of a folder of images, with captions or labels.
        columns: its columns image, caption and label, where they have other names: {image: file, label: kind}.
        split: for folder: train, validation or test, of a source that has splits; train by default.
        templates: for evaluation: zero-shot prompts with {c} where the class name belongs.
        copies: for digits and digit-scenes: images made of each training digit.
        documents: for recall: how many. For arithmetic: training problems; 100,000 by default.
        words: for recall: the most words of a document with needles.
        scenes: for fashion-scenes: training images; 55,000 by default.
        evaluated: for fashion-scenes: images of each split for evaluation; 2,000 by default. For arithmetic: test
            problems of each number of steps and distractors, and a tenth of the validation problems; 100 by default.
        steps: for arithmetic: the most lines of a solution in training; the test has up to 3 more. 5 by default.
        distractors: for arithmetic: the most distracting sentences in training; the test has up to four times as many.
            4 by default.
        highest: for arithmetic: the largest number; 999 by default.
        seed: determines all random choices in made datasets; 0 by default.
        per_shard: for folder and evaluation: samples a shard; 10,000 by default.
        num_workers: for folder and evaluation: processes; 2 by default.
    """
    settings: dict[str, Any] = {
        "source": source,
        "images": images,
        "captions": captions,
        "columns": columns,
        "split": split,
        "templates": templates,
        "copies": copies,
        "documents": documents,
        "words": words,
        "scenes": scenes,
        "evaluated": evaluated,
        "steps": steps,
        "distractors": distractors,
        "highest": highest,
        "seed": seed,
        "per_shard": per_shard,
        "num_workers": num_workers,
    }
    given = {setting: value for setting, value in settings.items() if value is not None}
    if name not in MADE:
        raise ValueError(f"no dataset is called {name!r}: there are {', '.join(MADE)}{did_you_mean(name, MADE)}")
    dataset = MADE[name]
    for setting in sorted(given.keys() & _LEAST.keys()):
        if given[setting] < _LEAST[setting]:
            raise ValueError(f"{setting} is {given[setting]}: it must be at least {_LEAST[setting]}")
    for setting in sorted(given.keys() - dataset.settings):
        others = ", ".join(other for other, made in MADE.items() if setting in made.settings)
        raise ValueError(f"make {name} has no setting {setting}: leave it out, or make one of {others}")
    if dataset.source and source is None:
        raise ValueError(f"make {name} needs --source: {dataset.source}")
    module, _, function = dataset.function.partition(":")
    try:
        made = getattr(importlib.import_module(module), function)(directory, **given)
    except BadSource as error:
        raise ValueError(f"{error}; make {name} takes as --source {dataset.source}" if source else error) from None
    except KeyboardInterrupt:
        incomplete = f"; {directory} is incomplete: remove it and make it again" if Path(directory).exists() else ""
        raise KeyboardInterrupt(f"interrupted{incomplete}") from None
    print(f"made {name} in {Path(directory)}" + (f": {made}" if made else ""))
    return 0


def pack_folder(
    directory: str,
    source: str,
    captions: str | None = None,
    columns: dict[str, str] | None = None,
    split: str | None = None,
    per_shard: int = 10_000,
    num_workers: int = 2,
) -> str:
    """Pack images as training shards, with the arguments of `make`; return what was packed."""
    from diffvision.data.images.packing import pack
    from diffvision.data.images.sources import find_images

    images = find_images(source, split, table=captions, columns=columns)
    packed = pack(
        images, directory, shuffle=images.labels is not None, per_shard=per_shard, num_workers=num_workers
    ).summary()
    packed += f"\n  of {images.described}"
    if images.caption_key != "txt":
        packed += f"\nseveral captions an image: train with --data.init_args.caption_key {images.caption_key}"
    return packed


def pack_evaluation(
    directory: str,
    source: str,
    captions: str | None = None,
    columns: dict[str, str] | None = None,
    templates: list[str] | None = None,
    per_shard: int = 10_000,
    num_workers: int = 2,
) -> str:
    """Pack images as an evaluation folder, with the arguments of `make`; return what was packed."""
    from diffvision.data.images import packing
    from diffvision.data.images.folders import ImageEvaluationFolder

    folder = ImageEvaluationFolder(source, table=captions, columns=columns)
    splits = packing.pack_evaluation(folder, directory, templates, per_shard=per_shard, num_workers=num_workers)
    return "\n".join([folder.task, *(f"{split}: {packed.summary()}" for split, packed in splits.items())])


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
    source: str | list[str],
    path: str,
    vocab_size: int = 4096,
    text_key: str = "txt",
    pattern: str | None = None,
    max_bad_fraction: float = 0.01,
) -> int:
    r"""Train a byte-level BPE tokenizer on the text of shards, or of conversations.

    Args:
        source: text shards, as for training; several as [a,b]; or a .jsonl file of conversations.
        path: the file to write, or a directory for tokenizer.json.
        vocab_size: tokens, with the 256 bytes and the end of a document among them.
        text_key: the member with the text: txt, json:FIELD, or jsonl:FIELD with a document in each line.
        pattern: a regular expression of what no token joins with the text around it: ' ?\d' for one digit a token.
        max_bad_fraction: documents that cannot be used are left out and counted; a larger share of them is an error.
    """
    from diffvision.data.shards.report import Limits
    from diffvision.data.shards.storage import ShardSet
    from diffvision.data.text.chat import MessageMember
    from diffvision.data.text.documents import DocumentAccount, JsonLines, TextMember
    from diffvision.data.text.tokenize import documents_of
    from diffvision.data.text.tokenizers import FILE, train_tokenizer

    target = Path(path) if Path(path).suffix == ".json" else Path(path) / FILE
    if target.exists():
        raise ValueError(f"{target} is there already: remove it, or choose another path")
    account = DocumentAccount()
    if isinstance(source, str) and source.endswith(".jsonl"):
        read: tuple[ShardSet | JsonLines, TextMember] = JsonLines(source), MessageMember()
    else:
        read = ShardSet(source), TextMember(text_key)
    documents = documents_of(*read, limits=Limits(max_bad_fraction), account=account)
    trained = train_tokenizer(track(documents, "reading"), vocab_size, pattern=pattern)
    trained.save(target)
    print(f"trained {target}: {trained.vocab_size:,} tokens, of {account.summary()}")
    if trained.vocab_size < vocab_size:
        print(f"  fewer than {vocab_size:,}: no other pair comes twice in the text")
    return 0


def tokenize(
    source: str,
    directory: str,
    tokenizer: str,
    text_key: str | None = None,
    chat: str | None = None,
    max_bad_fraction: float = 0.01,
    num_workers: int = 2,
) -> int:
    """Write text shards as token shards, for sequences of any length; or conversations, with what is learned of them.

    Args:
        source: text shards, as for training; for --chat also a .jsonl file.
        directory: the folder to write; it must not exist, or be empty.
        tokenizer: a tokenizer.json, a directory that holds one, or a tiktoken name.
        text_key: the member with the text: txt (by default), json:FIELD, or jsonl:FIELD with a document in each line.
            Of conversations: jsonl (by default) with a row in each line, or json.
        chat: how rows of conversations are written: chatml; question ("Question: ...", a line "Answer:" and the answer)
            or plain (one content directly after another), both with the end of a document after each answer; tokenizer,
            the template that came with it; or a file of Jinja. Rows have messages, conversations, prompt and response,
            or OpenThoughts' columns.
        max_bad_fraction: documents that cannot be used are left out and counted; a larger share of them is an error.
        num_workers: processes.
    """
    from diffvision.data.shards.report import Limits
    from diffvision.data.shards.storage import ShardSet
    from diffvision.data.text.chat import open_chat
    from diffvision.data.text.documents import JsonLines, RowMember, TextMember
    from diffvision.data.text.tokenize import tokenize_shards
    from diffvision.data.text.tokenizers import load_tokenizer

    lines = source.endswith(".jsonl")
    if lines and chat is None:
        raise ValueError(
            f"{source} is a file of rows: give --chat to say how conversations are written, or text shards"
        )
    if chat is not None and not lines and Path(source).is_file() and not source.endswith(".tar"):
        raise ValueError(
            f"{source} is neither shards (.tar) nor rows (.jsonl): write its rows as a JSON object in each line of a "
            "file with the name .jsonl"
        )
    loaded = load_tokenizer(tokenizer)
    turns = None if chat is None else open_chat(chat, loaded, tokenizer)
    if turns is not None:
        turns.check_training()
    account = tokenize_shards(
        JsonLines(source) if lines else ShardSet(source),
        directory,
        loaded,
        TextMember(text_key or "txt") if chat is None else RowMember(text_key or ("json" if lines else "jsonl")),
        chat=turns,
        num_workers=num_workers,
        limits=Limits(max_bad_fraction),
    )
    print(f"tokenised {source} in {Path(directory)}: {account.summary()}")
    return 0
