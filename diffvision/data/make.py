"""The commands `data make`, `check`, `tokenizer` and `tokenize`: they print what is computed elsewhere."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diffvision.data.datasets import find_dataset, read_interface
from diffvision.data.shards.sample import BadSource, SampleSource
from diffvision.progress import track
from diffvision.tables import show

__all__ = ["check", "make", "tokenize", "tokenizer"]


def make(name: str, directory: str | Path, **options: Any) -> int:
    """Write a dataset as WebDataset shards with a manifest (`arithmetic`: as JSON lines), and print what it has.

    Args:
        name: of the dataset, in `diffvision.data.datasets.datasets()`.
        directory: the folder to write; it must have no shards yet.
        options: of the dataset; `diffvision data make NAME --help` has them.

    Raises:
        ValueError: there is no such dataset, or an option or the source cannot be used.
    """
    module, _, function = find_dataset(name).partition(":")
    try:
        written = getattr(importlib.import_module(module), function)(directory, **options)
    except BadSource as error:
        raise ValueError(f"{error}; see diffvision data make {name} --help for its source") from None
    except KeyboardInterrupt:
        incomplete = f"; {directory} is incomplete: remove it and make it again" if Path(directory).exists() else ""
        raise KeyboardInterrupt(f"interrupted{incomplete}") from None
    print(f"made {name} in {Path(directory)}" + (f": {written}" if written else ""))
    return 0


def make_command(name: str) -> Callable[..., int]:
    """Return `make` of one dataset, with the signature and the help of its function, whose module is not imported."""

    def command(directory: str | Path, **options: Any) -> int:
        return make(name, directory, **options)

    interface = read_interface(find_dataset(name))
    command.__doc__, vars(command)["__wrapped__"] = interface.__doc__, interface  # which `inspect.signature` follows
    return command


def check(
    source: str | list[str],
    num_workers: int = 2,
    image_key: str | list[str] | None = None,
    caption_key: str | None = None,
    label_key: str | None = None,
) -> int:
    """Verify shards and decode every sample of them as training does. Return 1 if there are problems.

    Args:
        source: shards as training takes them (several as [a,b]), or folders of shards at any depth.
        num_workers: processes.
        image_key: as in training: the member types that hold an image, jpg, jpeg, png and webp by default.
        caption_key: as in training: txt or json:FIELD. With no key given, what the samples of each folder have.
        label_key: as in training: cls or json:FIELD.
    """
    from diffvision.data.check import check_shards, check_tables
    from diffvision.data.images.samples import IMAGE_KEYS

    keys = {"caption_key": caption_key, "label_key": label_key}
    results = check_shards(source, num_workers, image_key=image_key or IMAGE_KEYS, **keys)
    checked = [{**vars(result), "ok": result.ok} for result in results]
    show(check_tables(results, source), data=checked)
    return 0 if all(result.ok for result in results) else 1


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
        source: text shards, as for training; several as [a,b]; or conversations, in shards or a .jsonl file.
        path: the file to write, or a directory for tokenizer.json.
        vocab_size: tokens, with the 256 bytes and the end of a document among them.
        text_key: the member with the text: txt, json:FIELD, or jsonl:FIELD with a document in each line; json for
            conversations.
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
        read: tuple[SampleSource, TextMember] = JsonLines(source), MessageMember()
    else:
        read = ShardSet(source), (MessageMember if text_key == "json" else TextMember)(text_key)
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
    """Tokenise text shards, for sequences of any length; or conversations, with which of their tokens are learned.

    Args:
        source: text shards, as for training; for --chat also a .jsonl file.
        directory: the folder to write; it must not exist, or be empty.
        tokenizer: a tokenizer.json, or a directory that holds one.
        text_key: the member with the text: txt (by default), json:FIELD, or jsonl:FIELD with a document in each line.
            Of conversations: jsonl (by default) with a row in each line, or json.
        chat: how rows of conversations are written: chatml; question ("Question: ...", a line "Answer:" and the answer)
            or plain (one content directly after another), both with the end of a document after each answer; tokenizer,
            the template that came with it; or a file of Jinja. Rows have messages, conversations, or prompt and
            response.
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
        raise ValueError(f"{source} is a file of rows: give --chat to say how conversations are written")
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
