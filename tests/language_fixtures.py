"""Models whose answers are known by hand, and tokenizers of words and of characters."""

import random
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from diffvision.models import language
from diffvision.nn import build_attention


class Table(nn.Module):
    """The next token's probabilities depend on the token alone: a row of a table [vocabulary, vocabulary]."""

    def __init__(self, probabilities):
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(probabilities).log())

    def forward(self, tokens):
        assert not self.training
        return self.logits[tokens]


class Words:
    """A word with the space before it, a number's digits, or a mark is a token; ids are given out as they come."""

    def __init__(self):
        self.ids = {"<end>": 0}
        self.eos_id = 0
        self.vocab_size = 512

    def encode(self, text):
        return [self.ids.setdefault(piece, len(self.ids)) for piece in re.findall(r" ?\w+| ?[^\w ]| ", text)]

    def decode(self, ids):
        names = list(self.ids)
        return "".join(names[place] for place in ids)


class Copier(nn.Module):
    """Looks for the last two tokens in what came before, or else for the last one, and says what followed there: an
    oracle of retrieval. A blind one always says one token."""

    def __init__(self, vocabulary=512, blind=None):
        super().__init__()
        self.vocabulary, self.blind = vocabulary, blind

    def forward(self, tokens):
        said = torch.zeros_like(tokens) if self.blind is None else torch.full_like(tokens, self.blind)
        for row, own in enumerate(tokens.tolist() if self.blind is None else []):
            follower = {}
            for place in range(2, len(own)):
                follower.setdefault((own[place - 2], own[place - 1]), own[place])
                follower.setdefault(own[place - 1], own[place])
                last = own[place]
                said[row, place] = follower.get((own[place - 1], last), follower.get(last, 0))
        return F.one_hot(said, self.vocabulary).float()


class Tiny(nn.Module):
    """Two causal attention layers of a variant, with residuals, an embedding and a head."""

    def __init__(self, variant, vocabulary=512, dim=16):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(
            Block(build_attention(variant, dim, 2, 1, head_dim=4, rotary=10_000.0, depth=depth)) for depth in range(2)
        )
        self.head = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Block(nn.Module):
    def __init__(self, attn):
        super().__init__()
        self.attn = attn

    def forward(self, x):
        return x + 3 * self.attn(4 * x, is_causal=True)


def small_model(name, **overrides):
    """A model of 97 tokens with weights so large that its likeliest tokens differ from position to position."""
    torch.manual_seed(0)
    values = {"vocab_size": 97, "max_length": 256, "num_kv_heads": 1, **overrides}
    model = language.create(name, **values).eval()
    with torch.no_grad():
        model.embed.weight.normal_()
        for parameter in model.blocks.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.2)
    return model


def make_llama(name, **settings):
    """A small model of transformers, "Llama" or "DiffLlama"."""
    transformers = pytest.importorskip("transformers")
    sizes = {"intermediate_size": 24, "num_hidden_layers": 2, "initializer_range": 0.5, **settings}
    return getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**sizes)).eval()


@pytest.fixture(params=["Llama", "DiffLlama"])
def llama(request):
    """A model of transformers, plain and differential."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "max_position_embeddings": 64}
    return make_llama(request.param, **sizes, num_attention_heads=4, num_key_value_heads=2)


@pytest.fixture
def words():
    return Words()


@pytest.fixture(params=["standard", "v1", "v2", "v1_head", "v1_dint"])  # the kinds of maps and lambdas that there are
def tiny(request):
    return Tiny(request.param)


@pytest.fixture
def draw():
    return random.Random(0)
