"""tiktoken's encodings as tokenizers of the `tokenizers` library, so that they are saved and compared as the others.

Both libraries do byte-pair encoding, but tiktoken joins any two neighbours whose union is a token, lowest rank first,
where the other library takes a list of pairs: every way to split a token in two becomes one, in order of rank. The
result is compared with tiktoken's encoding before it is used. transformers' `TikTokenConverter` does not serve: it
needs the file rather than the encoding, keeps expressions that the two libraries read differently, and gives special
tokens other ids.
"""

from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

TIKTOKENS = ("gpt2", "r50k_base", "p50k_base", "cl100k_base", "o200k_base")

_PROBES = (
    "The quick brown fox doesn't jump; it's 12345678 years old.\n\n\tIt'LL  rest   \r\n",
    "def f(x):\n        return [x**2 for _ in range(1000)]   # squares\n",
    "Größe, naïveté, 東京都, Привет, \U0001f600\U0001f680 e\u0301 \u00a0x\u2028y ",
    "<|endoftext|> is text, as are &amp; <s> and ____====!!!???",
)


def from_tiktoken(name: str) -> tokenizers.Tokenizer:
    """Return tiktoken's encoding of a name as a tokenizer.

    Raises:
        ValueError: tiktoken is not installed, or cannot get the file.
    """
    try:
        import tiktoken
    except ImportError:
        raise ValueError(
            f"tokenizer {name!r} needs the package tiktoken, which is not installed: pip install tiktoken, or give a "
            "tokenizer.json"
        ) from None
    try:
        encoding = tiktoken.get_encoding(name)
    except Exception as error:  # of requests, of the file system, of tiktoken
        raise ValueError(
            f"tiktoken cannot get {name!r} ({error}): copy it into TIKTOKEN_CACHE_DIR, or give a tokenizer.json"
        ) from error
    return convert_encoding(encoding)


def convert_encoding(encoding: Any) -> tokenizers.Tokenizer:
    """Convert a `tiktoken.Encoding` to a tokenizer of the `tokenizers` library.

    Raises:
        ValueError: the two do not agree on a few lines of difficult text.
    """
    ranks: dict[bytes, int] = encoding._mergeable_ranks
    names = _name_bytes()

    def word(token: bytes) -> str:
        return "".join(names[byte] for byte in token)

    pairs = [
        (rank, ranks[token[:cut]], ranks[token[cut:]], word(token[:cut]), word(token[cut:]))
        for token, rank in ranks.items()
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    merges = [(left, right) for *_, left, right in sorted(pairs)]
    vocabulary = {word(token): rank for token, rank in ranks.items()}
    result = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    # The library's expressions are Ruby's: there }+ repeats and $ ends a line, where tiktoken means no backtracking
    # and the end of the text.
    pattern = encoding._pat_str.replace("}+", "}").replace("$", r"\z")
    result.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    result.decoder = decoders.ByteLevel()
    _add_special(result, encoding._special_tokens)
    result.encode_special_tokens = True
    for probe in _PROBES:
        if result.encode(probe).ids != encoding.encode_ordinary(probe):
            raise ValueError(f"tiktoken's {encoding.name!r} cannot be converted exactly: give a tokenizer.json instead")
    return result


def _add_special(result: tokenizers.Tokenizer, special: dict[str, int]) -> None:
    """Add special tokens with their ids; the library numbers new ones in turn, so gaps before them are filled."""
    for name, number in sorted(special.items(), key=lambda entry: entry[1]):
        while (reached := result.get_vocab_size()) < number:
            result.add_special_tokens([AddedToken(f"<|unused{reached}|>", special=True)])
        result.add_special_tokens([AddedToken(name, special=True)])
        if result.token_to_id(name) != number:
            raise ValueError(f"special token {name!r} has id {number} of another token: give a free id")


def _name_bytes() -> list[str]:
    """Return the character for each byte in byte-level vocabularies: itself where printable, as in GPT-2."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]
