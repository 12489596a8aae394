"""CLIP and DiffCLIP in one file: an image tower and a text tower with plain or differential attention.

    python scripts/nano/nano_clip.py

It paints handwritten digits in two colours, captions them ("a red seven on white"), and trains both on the pairs.
It prints the training loss, the parameter count, lambda in each layer, and last each model's zero-shot accuracy and
retrieval on new digits. With --seeds 3 it trains three times, and prints the differences with their 95% intervals.
It needs torch, and scikit-learn for the digits.
In comments: B batch, N tokens, C width of a token, H heads, D width of a head, E width of a feature.
"""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn

# ---- Attention -------------------------------------------------------------------------------------------------------
# Both towers use the same layers. In the text tower, which is `causal`, a token sees itself and those before it.


def softmax_maps(q, k, causal):  # [..., N, D] each -> [..., N, N], whose rows sum to 1
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1) > 0, -torch.inf)  # above the diagonal
    return scores.softmax(dim=-1)


class PlainAttention(nn.Module):  # softmax(q k') v
    def __init__(self, dim, heads, causal):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.q_proj, self.k_proj = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.v_proj, self.proj = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x):  # [B, N, C]
        projections = self.q_proj(x), self.k_proj(x), self.v_proj(x)  # [B, N, C] each
        q, k, v = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in projections)  # [B, H, N, D] each
        out = softmax_maps(q, k, self.causal) @ v  # [B, H, N, D]
        return self.proj(out.transpose(1, 2).flatten(2))  # [B, N, C]


class DiffAttention(PlainAttention):
    """(softmax(q1 k1') - lambda softmax(q2 k2')) v, DiffCLIP's (arXiv 2503.06626): half of the heads, twice as wide."""

    lambda_init = 0.8  # in all layers

    def __init__(self, dim, heads, causal):
        super().__init__(dim, heads, causal)
        self.heads, D = heads // 2, dim // heads  # the heads are halved, the width of a query is not
        self.lambda_q1, self.lambda_k1 = nn.Parameter(0.1 * torch.randn(D)), nn.Parameter(0.1 * torch.randn(D))
        self.lambda_q2, self.lambda_k2 = nn.Parameter(0.1 * torch.randn(D)), nn.Parameter(0.1 * torch.randn(D))
        self.head_norm = nn.RMSNorm(2 * D, eps=1e-5)  # rescales: similar maps have a small difference

    def forward(self, x):  # [B, N, C]
        q, k = (proj(x).unflatten(-1, (self.heads, 2, -1)) for proj in (self.q_proj, self.k_proj))  # [B, N, H, 2, D]
        v = self.v_proj(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [B, H, N, 2D]
        first, second = softmax_maps(q.permute(0, 2, 3, 1, 4), k.permute(0, 2, 3, 1, 4), self.causal).unbind(
            2
        )  # [B, H, N, N] each
        lam = (self.lambda_q1 @ self.lambda_k1).exp() - (self.lambda_q2 @ self.lambda_k2).exp() + self.lambda_init
        self.lam = lam.item()  # to print
        out = (first - lam * second) @ v  # [B, H, N, 2D]: attention common to both maps cancels out
        out = self.head_norm(out) * (1 - self.lambda_init)
        return self.proj(out.transpose(1, 2).flatten(2))  # [B, N, C]


# ---- Towers ----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention and an MLP, each with a residual. As in OpenAI's CLIP, the text tower approximates GELU."""

    def __init__(self, attention, dim, heads, causal):
        super().__init__()
        self.norm1, self.norm2, self.causal = nn.LayerNorm(dim), nn.LayerNorm(dim), causal
        self.attn = {"plain": PlainAttention, "diff": DiffAttention}[attention](dim, heads, causal)
        self.fc1, self.fc2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):  # [B, N, C]
        x = x + self.attn(self.norm1(x))
        hidden = self.fc1(self.norm2(x))  # [B, N, 4C]
        return x + self.fc2(hidden * torch.sigmoid(1.702 * hidden) if self.causal else F.gelu(hidden))


class Tower(nn.Module):  # blocks, a norm and the projection to features
    def __init__(self, attention, features, causal, depth, dim, heads=4):
        super().__init__()
        self.blocks = nn.ModuleList(Block(attention, dim, heads, causal) for _ in range(depth))
        self.norm, self.proj = nn.LayerNorm(dim), nn.Linear(dim, features, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)

    def encode(self, x, index):  # [B, N, C], [B] -> [B, E]
        for block in self.blocks:
            x = block(x)
        return self.proj(self.norm(x[torch.arange(len(x)), index]))


class ImageTower(Tower):
    """Vision transformer: the tokens are a class token, whose output is the feature, and the image's patches."""

    def __init__(self, attention, features, image=32, patch=8, dim=64):
        super().__init__(attention, features, causal=False, depth=4, dim=dim)
        self.patch_embed = nn.Conv2d(3, dim, kernel_size=patch, stride=patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, (image // patch) ** 2 + 1, dim))

    def forward(self, images):  # [B, 3, height, width]
        x = self.patch_embed(images).flatten(2).transpose(1, 2)  # [B, patches, C]
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.pos_embed  # [B, N, C], N = patches + 1
        return self.encode(x, 0)  # [B, E]


class TextTower(Tower):
    """Causal transformer. The feature is the output at the end token, the only one that has seen the whole caption."""

    def __init__(self, attention, features, vocabulary, length, dim=64):
        super().__init__(attention, features, causal=True, depth=2, dim=dim)
        self.embed = nn.Parameter(0.02 * torch.randn(vocabulary, dim))
        self.pos_embed = nn.Parameter(0.01 * torch.randn(length, dim))

    def forward(self, tokens):  # [B, N]
        x = self.embed[tokens] + self.pos_embed  # [B, N, C]
        return self.encode(x, tokens.argmax(dim=-1))  # [B, E]; the end token has the largest id


class CLIP(nn.Module):
    """Two towers, trained so that an image and its caption have similar features."""

    def __init__(self, attention, features=64):
        super().__init__()
        self.image = ImageTower(attention, features)
        self.text = TextTower(attention, features, vocabulary=len(WORDS), length=LENGTH)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, images, tokens):  # [B, 3, height, width], [B, N]
        image_features = F.normalize(self.image(images), dim=-1)  # [B, E]
        text_features = F.normalize(self.text(tokens), dim=-1)  # [B, E]
        return self.logit_scale.exp() * image_features @ text_features.T  # [B, B]: row i is image i's scores


# ---- Data ------------------------------------------------------------------------------------------------------------

DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
COLOURS = {"white": (1, 1, 1), "red": (1, 0, 0), "dark blue": (0, 0, 0.5), "light green": (0.5, 1, 0.5)}
PAIRS = [(ink, paper) for ink in COLOURS for paper in COLOURS if ink != paper]  # 12
WORDS = ["<pad>", "a", "on", *DIGITS, *dict.fromkeys(" ".join(COLOURS).split()), "<start>", "<end>"]  # id = index
LENGTH = 9  # of "<start> a light green seven on dark blue <end>"


def tokenize(labels, pairs):  # B digits, B (ink, paper) -> [B, N]
    captions = [f"a {ink} {DIGITS[label]} on {paper}" for label, (ink, paper) in zip(labels, pairs, strict=True)]
    ids = [[WORDS.index(word) for word in ["<start>", *caption.split(), "<end>"]] for caption in captions]
    return torch.tensor([row + [0] * (LENGTH - len(row)) for row in ids])


def paint(strengths, pairs):  # [B, 8, 8], B (ink, paper) -> [B, 3, 32, 32]
    ink, paper = (torch.tensor([COLOURS[pair[i]] for pair in pairs])[:, :, None, None] for i in (0, 1))  # [B, 3, 1, 1]
    images = paper + strengths[:, None] * (ink - paper)  # [B, 3, 8, 8]
    return images.repeat_interleave(4, dim=-1).repeat_interleave(4, dim=-2) * 2 - 1  # -1..1


def load_digits():
    """Load 1,797 digits as strengths of ink; return ten tensors [n, 8, 8] to train on, and ten with 397 to test on."""
    from sklearn.datasets import load_digits

    strengths, labels = map(torch.tensor, load_digits(return_X_y=True))
    strengths = strengths.float().reshape(-1, 8, 8) / 16  # 0..1
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return [[strengths[part][labels[part] == digit] for digit in range(10)] for part in (order[:1400], order[1400:])]


def draw_batch(digits, size, generator):
    """Draw images [B, 3, 32, 32] and tokens [B, N] of distinct captions: a caption must not fit two images."""
    chosen = torch.randperm(10 * len(PAIRS), generator=generator)[:size].tolist()
    labels, pairs = [i % 10 for i in chosen], [PAIRS[i // 10] for i in chosen]
    strengths = torch.stack([digits[d][torch.randint(len(digits[d]), (), generator=generator)] for d in labels])
    return paint(strengths, pairs), tokenize(labels, pairs)


# ---- Training and evaluation -----------------------------------------------------------------------------------------


def train(attention, seed, steps, digits, batch_size=64, peak=1e-3):
    torch.manual_seed(seed)
    model = CLIP(attention)
    print(f"{attention}, seed {seed}, {sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    batches = torch.Generator().manual_seed(seed)  # of its own, so that both attentions see the same batches
    matrices = {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1}
    vectors = {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}  # biases, norms, lambda
    optimizer = torch.optim.AdamW([matrices, vectors], betas=(0.9, 0.98))
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:  # linear warmup for a tenth of the steps, cosine decay to 0
            group["lr"] = peak * min(10 * step / steps, (1 + math.cos(math.pi * step / steps)) / 2)
        logits, own = model(*draw_batch(digits, batch_size, batches)), torch.arange(batch_size)  # [B, B], [B]
        loss = (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2  # find the caption, find the image
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.logit_scale.data.clamp_(max=math.log(100))
        if step % max(1, steps // 3) == 0:
            print(f"  step {step}, training loss {loss.item():.3f}", flush=True)
    return model


@torch.no_grad()
def evaluate(model, digits):
    """Return the zero-shot accuracy of digit names, and R@1 from image to caption and from caption to image, in %."""
    captions = tokenize([digit for digit in range(10) for _ in PAIRS], PAIRS * 10)  # [120, N]: all that there are
    names = F.normalize(model.text(captions), dim=-1).unflatten(0, (10, -1)).mean(1)  # [10, E]: mean over colours
    labels = torch.cat([torch.full((len(images),), digit) for digit, images in enumerate(digits)])  # [397]
    images = paint(torch.cat(digits), [PAIRS[i % len(PAIRS)] for i in range(len(labels))])
    zero_shot = (model.image(images) @ F.normalize(names, dim=-1).T).argmax(1) == labels  # [397]
    images = paint(torch.cat([images[: len(PAIRS)] for images in digits]), PAIRS * 10)  # [120, ...]: one per caption
    logits, own = model(images, captions), torch.arange(len(captions))  # [120, 120], [120]
    rights = zero_shot, logits.argmax(1) == own, logits.argmax(0) == own
    return torch.stack([100 * right.float().mean() for right in rights])  # [3]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=1, choices=range(1, 6))
    parser.add_argument("--steps", type=int, default=1200)
    args = parser.parse_args()
    digits, test_digits = load_digits()
    results = {"plain": [], "diff": []}
    for seed in range(args.seeds):
        for attention in results:
            model = train(attention, seed, args.steps, digits)
            results[attention].append(evaluate(model, test_digits))
            if attention == "diff":
                blocks = [*model.image.blocks, *model.text.blocks]
                print("  lambda by layer, image then text:", *(f"{block.attn.lam:.2f}" for block in blocks))
    plain, diff = torch.stack(results["plain"]), torch.stack(results["diff"])  # [seeds, 3] each
    for i, name in enumerate(("zero-shot accuracy", "image to text R@1", "text to image R@1")):
        line = f"{name:18}  plain {plain[:, i].mean():5.1f} %  diff {diff[:, i].mean():5.1f} %"
        if args.seeds > 1:
            difference = diff[:, i] - plain[:, i]  # paired: equal seeds, equal batches
            half = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}[args.seeds] * difference.std() / math.sqrt(args.seeds)
            line += f"  difference {difference.mean():+.1f} ± {half:.1f} (95% interval)"
        print(line)


if __name__ == "__main__":
    main()
