"""GGUF files of a small Llama: against transformers' own reading of the same file, and damaged and foreign ones."""

import json
import struct
import time

import gguf
import numpy as np
import pytest
import torch
import transformers

from diffvision.cli import main
from diffvision.data.text.tokenizers import load_tokenizer, train_tokenizer
from diffvision.export.command import adapt_to_folder, export
from diffvision.models import language
from diffvision.models.convert import convert
from diffvision.models.convert.gguf_tokenizer import tokenizer_from_gguf
from diffvision.opening import open_model

DIM, HEADS, KV_HEADS, MLP, LAYERS = 64, 4, 2, 96, 2
TYPES = ["F32", "F16", "Q8_0", "Q4_0", "Q4_1"]
TEXT = "In 1984, 12345 naïve users drank café au lait.\n\n  x = 10 東京 🙂 it's"
CORPUS = [TEXT, "the cat sat on the mat and drank the milk of the other cat 1984", "users drank it and it was late"]


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    """A vocabulary and its merges, as GPT-2's kind of tokenizer has them."""
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(CORPUS, 400, pattern=r"\d").save(folder)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    tokens = [token for token, _ in sorted(fast.get_vocab().items(), key=lambda item: item[1])]
    return tokens, [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]


@pytest.fixture
def write(tmp_path, byte_level):
    """A function that writes a GGUF file with random weights."""

    def write(
        kind="F32",
        *,
        architecture="llama",
        pre="smollm",
        leave=(),
        template="{% for m in messages %}{{ m.content }}{% endfor %}",
        more=None,
        tensors=None,
        tied=False,
        words=(),
        infinite=False,
        rows=None,
        endianess=gguf.GGUFEndian.LITTLE,
    ):
        path = tmp_path / "model.gguf"
        tokens, merges = byte_level
        tokens = [*tokens, *words]
        writer = gguf.GGUFWriter(path, architecture, endianess=endianess)
        settings = {
            "embedding_length": DIM,
            "block_count": LAYERS,
            "feed_forward_length": MLP,
            "attention.head_count": HEADS,
            "attention.head_count_kv": KV_HEADS,
            "context_length": 128,
            "vocab_size": rows or len(tokens),
            "rope.dimension_count": DIM // HEADS,
        }
        for name, value in settings.items():
            if name not in leave:
                writer.add_uint32(f"{architecture}.{name}", value)
        writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
        writer.add_float32(f"{architecture}.rope.freq_base", 5000.0)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types([3] + [1] * (len(tokens) - 1))
        writer.add_token_merges(merges)
        writer.add_eos_token_id(0)
        writer.add_chat_template(template)
        for add, name, value in more or ():
            getattr(writer, add)(name, value)
        random = np.random.default_rng(0)
        for name, shape in shapes(rows or len(tokens), tied).items() | (tensors or {}).items():
            values = random.normal(1.0 if len(shape) == 1 else 0.0, 0.15, shape).astype(np.float32)
            values[..., 0] = np.inf if infinite else values[..., 0]
            type_ = gguf.GGMLQuantizationType[kind if len(shape) == 2 else "F32"]
            stored = values.astype(np.float16) if type_.name == "F16" else gguf.quants.quantize(values, type_)
            writer.add_tensor(name, stored, raw_dtype=type_)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def shapes(vocabulary, tied):
    """The tensors of the file, [out, in]."""
    made = {"token_embd.weight": (vocabulary, DIM), "output_norm.weight": (DIM,)}
    if not tied:
        made["output.weight"] = (vocabulary, DIM)
    narrow = DIM * KV_HEADS // HEADS
    block = {
        "attn_norm": (DIM,),
        "attn_q": (DIM, DIM),
        "attn_k": (narrow, DIM),
        "attn_v": (narrow, DIM),
        "attn_output": (DIM, DIM),
        "ffn_norm": (DIM,),
        "ffn_gate": (MLP, DIM),
        "ffn_up": (MLP, DIM),
        "ffn_down": (DIM, MLP),
    }
    return made | {f"blk.{i}.{name}.weight": shape for i in range(LAYERS) for name, shape in block.items()}


@pytest.mark.parametrize("kind", TYPES)
def test_logits_are_those_of_transformers_own_reading(kind, write, tmp_path):
    path = write(kind, tied=kind == "Q8_0")
    convert(str(path), str(tmp_path / "ours"), to="language")
    ours = language.load(tmp_path / "ours")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    tokens = torch.randint(1, ours.config.vocab_size, (2, 40))
    with torch.no_grad():
        expected = theirs.eval()(tokens).logits
        torch.testing.assert_close(ours(tokens), expected, rtol=0, atol=1e-3)
    assert expected.std() > 0.5
    rounded = f"tensors the file has rounded {15 if ours.config.tied else 16} to {kind}"
    assert (rounded in language.origin_of(tmp_path / "ours")) == ("Q" in kind)
    assert ours.config.tied == (kind == "Q8_0")


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe", "tekken"])
def test_the_tokenizer_is_the_files(pre, write, tmp_path):
    path = write(pre=pre)
    convert(str(path), str(tmp_path / "ours"), to="language")
    ours = load_tokenizer(tmp_path / "ours")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    ids = ours.encode(TEXT)
    assert ours.decode(ids) == TEXT
    assert ids == theirs(TEXT, add_special_tokens=False)["input_ids"]
    assert ours.eos == "<|endoftext|>"
    assert "m.content" in (tmp_path / "ours" / "tokenizer_config.json").read_text()


def test_a_file_is_known_by_its_first_bytes_and_another_tokenizer_is_taken(write, tmp_path):
    path, original = write(pre="qwen2"), tmp_path / "original"
    path = path.rename(tmp_path / "sha256-1a2b")
    with pytest.raises(ValueError, match="give the original model's"):
        convert(str(path), str(tmp_path / "ours"), to="language")
    original.mkdir()
    train_tokenizer(CORPUS, 270).save(original)
    convert(str(path), str(tmp_path / "ours"), to="language", tokenizer=str(original / "tokenizer.json"))
    assert load_tokenizer(tmp_path / "ours").vocab_size == load_tokenizer(original).vocab_size


def test_a_sentencepiece_tokenizer_is_that_of_transformers():
    words = ["▁", *"abcdehilmorstw", "he", "▁t", "▁the", "the", "at", "▁c", "▁cat", "cat", "▁m", "▁mat", "s", "▁s"]
    words = list(dict.fromkeys(words))
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    scores = [0.0] * 259 + [-float(i) for i in range(len(words))]
    types = [2, 3, 3] + [6] * 256 + [1] * len(words)
    metadata = {"model": "llama", "tokens": pieces, "scores": scores, "token_type": types, "unknown_token_id": 0}
    ours, _ = tokenizer_from_gguf({f"tokenizer.ggml.{name}": value for name, value in metadata.items()}, "file")
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    merges = transformers.tokenization_utils_base.generate_merges(vocabulary, dict(zip(pieces, scores, strict=True)))
    theirs = transformers.LlamaTokenizer(vocab=vocabulary, merges=merges)
    for text in ("the cat sat at the mats", "the  cat", "café 東京", ""):
        ids = ours.encode(text, add_special_tokens=False).ids
        assert ids == theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.decode(ids) == text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"architecture": "qwen2"}, "architecture 'qwen2'"),
        ({"leave": ["block_count"]}, "lacks llama.block_count"),
        ({"pre": "deepseek-llm"}, "'deepseek-llm', which is not known"),
        ({"more": [("add_uint32", "llama.expert_count", 8)]}, "expert_count=8"),
        ({"more": [("add_string", "llama.rope.scaling.type", "yarn")]}, "rope.scaling.type='yarn'"),
        ({"more": [("add_uint16", "split.count", 3)]}, "one of 3 files"),
        ({"tensors": {"blk.0.attn_q.bias": (DIM,)}}, "has the tensor blk.0.attn_q.bias"),
        ({"tensors": {"rope_freqs.weight": (8,)}}, "scaled rotary positions are not"),
        ({"more": [("add_float32", "llama.rope.scaling.factor", 4.0)]}, "rope.scaling.factor=4.0"),
        ({"more": [("add_float32", "llama.rope.scaling.attn_factor", 2.0)]}, "rope.scaling.attn_factor=2.0"),
        ({"more": [("add_bool", "llama.attention.causal", False)]}, "attention.causal=False"),
        ({"more": [("add_float32", "llama.logit_scale", 0.5)]}, "logit_scale=0.5"),
        ({"infinite": True}, "tensors of .* are not finite"),
        ({"rows": 100}, "tokenizer of .* tokens, embeddings of 100"),
        (
            {"leave": ["attention.head_count"], "more": [("add_string", "llama.attention.head_count", "4")]},
            "other types",
        ),
        ({"more": [("add_string", "split.count", "3")]}, "one of 3 files"),
        ({"more": [("add_string", "tokenizer.ggml.bos_token_id", "0")]}, "special tokens of other types"),
    ],
)
def test_what_is_no_llama_of_ours_is_refused(settings, message, write, tmp_path):
    path = write(**settings)
    with pytest.raises(ValueError, match=message):
        convert(str(path), str(tmp_path / "ours"), to="language")
    assert not (tmp_path / "ours").exists()


def test_whole_words_stay_whole_and_texts_begin_as_the_file_says(write, tmp_path):
    """Llama 3's vocabulary has words that no merges make."""
    path = write(pre="llama-bpe", more=[("add_uint32", "tokenizer.ggml.bos_token_id", 0)], words=["drank", "Ġdrank"])
    convert(str(path), str(tmp_path / "ours"), to="language")
    ours = load_tokenizer(tmp_path / "ours")
    vocabulary = ours.vocabulary()
    assert ours.encode("drank drank") == [vocabulary["drank"], vocabulary["Ġdrank"]]
    assert ours.start_id == 0
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert theirs("drank")["input_ids"] == [0, vocabulary["drank"]]


def test_what_begins_a_text_stays_through_adapting_and_exporting(write, tmp_path):
    more = [("add_uint32", "tokenizer.ggml.bos_token_id", 1), ("add_bool", "tokenizer.ggml.add_bos_token", True)]
    path = write(more=more, template="{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}")
    convert(str(path), str(tmp_path / "plain"), to="language")
    adapt_to_folder(str(tmp_path / "plain"), str(tmp_path / "v2"))
    export(str(tmp_path / "v2"), str(tmp_path / "exported"))
    convert(str(tmp_path / "v2"), str(tmp_path / "converted"), to="huggingface")
    convert(str(tmp_path / "converted"), str(tmp_path / "again"), to="language")
    ids = [1, *load_tokenizer(tmp_path / "plain").encode("cat")]
    for folder in ("plain", "v2", "exported", "converted", "again"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / folder)
        chat = [{"role": "user", "content": "cat"}]
        assert tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False) == ids, folder
        assert tokenizer("cat")["input_ids"] == ids, folder
        if folder not in ("exported", "converted"):
            assert load_tokenizer(tmp_path / folder).start_id == 1, folder
    for folder in ("exported", "converted"):
        assert json.loads((tmp_path / folder / "config.json").read_text())["bos_token_id"] == 1
    assert "model.gguf" in (tmp_path / "exported" / "README.md").read_text()


def test_a_gguf_file_is_opened_after_it_is_converted(write):
    with pytest.raises(ValueError, match=r"model.gguf is a GGUF file"):
        open_model(write())


def test_a_big_endian_file_is_refused(write, tmp_path):
    path = write(endianess=gguf.GGUFEndian.BIG)
    with pytest.raises(ValueError, match="is big-endian, which is not read"):
        convert(str(path), str(tmp_path / "ours"), to="language")


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.99])
def test_a_damaged_file_is_refused(share, write, tmp_path):
    path = write()
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(ValueError, match="damaged or no GGUF file"):
        convert(str(path), str(tmp_path / "ours"), to="language")


def text(words, size=None):
    return struct.pack("<Q", len(words) if size is None else size) + words


def head(tensors=0, keys=0, version=3):
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


def tensor(*shape, name=b"output.weight"):
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, 0)


def values(kind, count, name=b"k"):
    return text(name) + struct.pack("<IIQ", 9, kind, count)


HUGE = 1 << 60
DECLARED = {
    "a list of bytes": head(keys=1) + values(0, HUGE),
    "a list of texts": head(keys=1) + values(8, HUGE),
    "a list that wraps around": head(keys=1) + values(10, 1 << 61) + bytes(64),
    "a list of lists": head(keys=1) + values(9, 1) + struct.pack("<IQ", 0, HUGE),
    "lists in lists": head(keys=1) + values(9, 1) + struct.pack("<IQ", 9, 1) * 5000,
    "a list as long as its file": head(keys=1) + values(0, 3 << 20) + bytes(3 << 20),
    "a key": head(keys=1) + text(b"k", HUGE),
    "a value": head(keys=1) + text(b"k") + struct.pack("<I", 8) + text(b"", HUGE),
    "a text in a list": head(keys=1) + values(8, 2) + text(b"a") + text(b"b", HUGE),
    "keys": head(keys=HUGE) + bytes(64),
    "tensors": head(tensors=HUGE) + bytes(64),
    "a tensor": head(tensors=1) + tensor(1 << 40) + bytes(64),
    "a tensor that wraps around": head(tensors=1) + tensor(1 << 32, 1 << 32) + bytes(64),
    "tensors in one place": head(tensors=99) + b"".join(tensor(512, 512, name=b"%d" % n) for n in range(99))
    + bytes(1 << 20),
    "dimensions": head(tensors=1) + text(b"t") + struct.pack("<I", 0xFFFFFFFF) + bytes(64),
    "the other order of bytes": b"GGUF" + struct.pack(">IQQ", 3, 0, 1) + struct.pack(">Q", 1) + b"k"
    + struct.pack(">IIQ", 9, 0, HUGE),
}  # fmt: skip


@pytest.mark.parametrize("content", DECLARED.values(), ids=DECLARED)
def test_sizes_that_a_file_cannot_have_are_refused_at_once(content, tmp_path):
    path = tmp_path / "hostile.gguf"
    path.write_bytes(content)
    before = time.process_time()
    with pytest.raises(ValueError, match="damaged or no GGUF file"):
        convert(path, tmp_path / "out", to="language")
    assert time.process_time() - before < 3  # it would go on for ages


def test_a_file_of_49_bytes_ends_the_command(tmp_path, capsys):
    path = tmp_path / "hostile.gguf"
    path.write_bytes(DECLARED["a list of bytes"])
    assert path.stat().st_size == 49
    assert main(["convert", str(path), str(tmp_path / "out"), "--to", "language"]) == 1
    error = capsys.readouterr().err
    assert "hostile.gguf" in error
    assert len(error.strip().splitlines()) == 1


def test_a_token_of_a_million_characters_is_refused():
    model = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["a", "b" * 1_000_000]}
    with pytest.raises(ValueError, match="a token has 1,000,000 characters"):
        tokenizer_from_gguf(model | {"tokenizer.ggml.scores": [0.0, 0.0]}, "it")


@pytest.mark.parametrize("name", ["block_count", "vocab_size", "embedding_length", "feed_forward_length"])
def test_a_model_that_the_tensors_do_not_make_is_not_built(name, write, tmp_path):
    path = write(leave=[name], more=[("add_uint32", f"llama.{name}", 0xFFFFFF00)])
    with pytest.raises(ValueError, match="gguf"):
        convert(path, tmp_path / "out", to="language")


@pytest.mark.weights
def test_smollm2_is_read_as_transformers_reads_it(weights, tmp_path):
    path = weights(
        "SmolLM2-135M-Instruct.Q4_1.gguf", "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    )
    convert(str(path), str(tmp_path / "ours"), to="language")
    tokenizer = load_tokenizer(tmp_path / "ours")
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs.eval()(torch.tensor([ids])).logits
        torch.testing.assert_close(language.load(tmp_path / "ours")(torch.tensor([ids])), expected, rtol=0, atol=1e-3)
