"""The LightningDataModule of language models: shards of text or token files in, packed sequences out.

Text is tokenised in `tokenize`; windows are read in `tokens`, those of whole conversations in `packing`.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from diffvision.data.shards.loader import EvaluationLoader, ShardLoader
from diffvision.data.shards.sources import split_shards
from diffvision.data.shards.storage import ShardSet
from diffvision.data.text.documents import TextMember
from diffvision.data.text.packing import PackedSequence, PackedWindows
from diffvision.data.text.tokenize import cached_tokens, check_limits
from diffvision.data.text.tokenizers import Tokenizer, load_tokenizer
from diffvision.data.text.tokens import TokenSequence, TokenWindows, find_token_folders, read_account
from diffvision.data.trainer import LoaderData

Source = str | Sequence[str]


class TextData(LoaderData):
    """Packed sequences for next-token prediction; validation sees each sequence exactly once.

    Shards of text are tokenised before the first epoch, on one process of each machine, into the user's cache.
    Conversations, which `diffvision data tokenize --chat` tokenises, are packed whole into sequences: attention stays
    inside of each, and batches say which tokens are learned.

    Args:
        train: shards of text (a directory, tar files, a brace pattern, URLs, or a list of these); or a folder of token
            files, or a list of such folders.
        batch_size: sequences of a global batch, over all ranks.
        length: tokens that the model reads of each sequence; a batch has one more, for the last to be predicted.
        evaluation: shards or token files to validate on.
        tokenizer: a tokenizer.json, or a directory that holds one; None: that of the LightningModule
            that is trained. Token files have theirs next to them.
        text_key: the member with the text: "txt", "json:FIELD", or "jsonl:FIELD" with a document in each line.
        documents: number each token's document, so that a model can keep attention inside of documents; of
            conversations always.
        settings: as of `LoaderData`; documents count as samples, and blocks of 16.8 million tokens as shards.
    """

    def __init__(
        self,
        train: Source,
        batch_size: int,
        length: int,
        evaluation: Source | None = None,
        tokenizer: str | None = None,
        *,
        text_key: str = "txt",
        documents: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(batch_size, **settings)
        self.train, self.length, self.evaluation, self.tokenizer = train, length, evaluation, tokenizer
        self.text, self.documents = TextMember(text_key), documents

    @cached_property
    def text_tokenizer(self) -> Tokenizer:
        """The tokenizer that is set, else the LightningModule's, else the one next to the token files.

        Raises:
            ValueError: there is none of these.
        """
        source = self.setting_or_model("tokenizer") or next(iter(find_token_folders(self.train)), None)
        if source is None:
            raise ValueError(f"{self.train} holds text: set tokenizer, a tokenizer.json or a directory that holds one")
        return load_tokenizer(source)

    @property
    def tokenizer_source(self) -> str | None:
        """Where the tokenizer is read from; of conversations, the folder that has their chat template with it."""
        tokenizer = self.setting_or_model("tokenizer")
        folders = find_token_folders(self.train)
        if folders and (tokenizer is None or read_account(folders[0]).chat is not None):
            return str(folders[0])
        return None if tokenizer is None else str(tokenizer)

    @property
    def vocab_size(self) -> int:
        """The bound of the ids in batches."""
        return self.text_tokenizer.vocab_size

    def prepare_data(self) -> None:
        """Tokenise the text shards; Lightning calls this on one process of each machine while the others wait."""
        self.setup()
        self._token_folders(self.train, "train")
        if self.evaluation is not None:
            self._token_folders(self.evaluation, "test")

    def setup(self, stage: str | None = None) -> None:
        """Check, before any work, that the model has an embedding for every id."""
        module = self.trainer.lightning_module if self.trainer is not None else None
        size = _vocabulary_of(module)
        if size is not None and size < self.vocab_size:
            raise ValueError(f"vocab_size of the model must be at least its tokenizer's {self.vocab_size}, got {size}")

    def train_dataloader(self) -> ShardLoader:
        """Return the training batches, `TokenBatch`es."""
        windows = self.token_windows(self.train, "train")
        return self.read_training(windows, self._kind(windows))

    def val_dataloader(self) -> EvaluationLoader | list:
        """Return the evaluation batches, or no loader where there is no evaluation."""
        if self.evaluation is None:
            return []
        windows = self.token_windows(self.evaluation, "test")
        return self.read_evaluation(windows, self._kind(windows))

    def token_windows(self, source: Source, split: str) -> TokenWindows:
        """Return the windows of `length` tokens of a split, "train" or "test", tokenised if need be.

        It warns of conversations that do not fit into a window.

        Raises:
            ValueError: token files of another tokenizer than the one that is set; see `TokenWindows`.
        """
        folders = self._token_folders(source, split)
        kind = TokenWindows if read_account(folders[0]).chat is None else PackedWindows
        windows = kind(folders, self.length)
        check_limits(windows.account, self.limits)
        if self.text_tokenizer.identity != windows.account.tokenizer:
            raise ValueError(
                f"{source} must be of the tokenizer of {self.tokenizer or self.train}: set the one next to the token "
                "files, or tokenise the text again"
            )
        if isinstance(windows, PackedWindows) and windows.long:
            rank_zero_warn(
                f"{windows.long:,} of {windows.account.documents:,} conversations are longer than {self.length + 1:,} "
                f"tokens and left out, the first is {windows.first_long}: raise data.length to hold them"
            )
        return windows

    def _token_folders(self, source: Source, split: str) -> list[Path]:
        """Return the folders of a split's token files; text is tokenised into the user's cache first."""
        if folders := find_token_folders(source, split):
            return folders
        shards, tokenizer = ShardSet(split_shards(source, split)), self.text_tokenizer
        return [cached_tokens(shards, tokenizer, self.text, num_workers=self.num_workers, limits=self.limits)]

    def _kind(self, windows: TokenWindows) -> TokenSequence:
        if isinstance(windows, PackedWindows):
            return PackedSequence(windows.account, self.length)
        return TokenSequence(windows.account, documents=self.documents)


def _vocabulary_of(module: Any) -> int | None:
    """Return `vocab_size` of a LightningModule, of its config, or of its model's; None where there is none."""
    model = getattr(module, "model", None)
    for owner in (module, getattr(module, "config", None), getattr(model, "config", None)):
        size = getattr(owner, "vocab_size", None)
        if isinstance(size, int):
            return size
    return None
