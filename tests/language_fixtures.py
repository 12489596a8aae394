"""Models whose answers are known by hand, and tokenizers of words and of characters."""

import random
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from diffvision.data.made.needle_text import FORMS
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


@pytest.fixture
def table():
    return Table


@pytest.fixture
def words():
    return Words()


@pytest.fixture
def copier():
    return Copier


@pytest.fixture(params=["standard", "v1", "v2", "v1_head", "v1_dint"])  # the kinds of maps and lambdas that there are
def tiny(request):
    return Tiny(request.param)


@pytest.fixture
def tiny_of():
    return Tiny


@pytest.fixture
def synthetic():
    return FORMS["synthetic"]


@pytest.fixture
def draw():
    return random.Random(0)
