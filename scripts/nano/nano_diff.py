"""Differential attention in one file: plain, V1 and V2, in a vision transformer and in a language model.

    python nano_diff.py digits      train ViTs with each attention on handwritten digits
    python nano_diff.py text        train language models with each attention on Python's own manual

It needs torch, and for the digits scikit-learn. Read it from top to bottom: attention, the two models, data, training.
Shapes in comments: B batch, N tokens, C width of a token, H heads, D width of a head.
"""

import argparse
import math
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn

# ---- Attention -------------------------------------------------------------------------------------------------------
# The same three layers serve both models. With `causal` they are the language model's: a token attends to itself and
# those before it, queries and keys are rotated by their position, and no projection has a bias.


def softmax_maps(q, k, causal):
    """Return what each query attends to: [..., N, D] and [..., N, D] -> [..., N, N], whose rows sum to 1."""
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)  # [N, N], True above the diagonal
        scores = scores.masked_fill(future, -torch.inf)
    return scores.softmax(dim=-1)


def rotate(x):
    """Turn each pair of neighbours in D by an angle that grows with the position: [..., N, D] -> [..., N, D]."""
    N, D = x.shape[-2:]
    angles = torch.arange(N)[:, None] * 10_000 ** (-torch.arange(0, D, 2) / D)  # [N, D/2]
    even, odd = x[..., 0::2], x[..., 1::2]  # [..., N, D/2] each
    turned = even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()
    return torch.stack(turned, dim=-1).flatten(-2)


class PlainAttention(nn.Module):
    """softmax(q k') v, the baseline."""

    def __init__(self, dim, heads, layer, causal):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.q_proj = nn.Linear(dim, dim, bias=not causal)
        self.k_proj = nn.Linear(dim, dim, bias=not causal)
        self.v_proj = nn.Linear(dim, dim, bias=not causal)
        self.proj = nn.Linear(dim, dim, bias=not causal)

    def forward(self, x):  # [B, N, C]
        q = self.q_proj(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [B, H, N, D]
        k = self.k_proj(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [B, H, N, D]
        v = self.v_proj(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [B, H, N, D]
        if self.causal:
            q, k = rotate(q), rotate(k)
        out = softmax_maps(q, k, self.causal) @ v  # [B, H, N, D]
        return self.proj(out.transpose(1, 2).flatten(2))  # [B, N, C]


class DiffAttentionV1(PlainAttention):
    """(softmax(q1 k1') - lambda softmax(q2 k2')) v, with half of the heads, each twice as wide (arXiv 2410.05258).

    The projections are those of plain attention: plain heads 2i and 2i + 1 are the two maps of head i, and their values
    side by side are its values. So V1 has as many parameters, but for lambda and the norm of a head.
    """

    def __init__(self, dim, heads, layer, causal):
        super().__init__(dim, heads, layer, causal)
        self.heads, D = heads // 2, dim // heads  # the heads are halved, their width is not
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * layer)  # 0.2 in the first layer, towards 0.8 in deep ones
        self.lambda_q1 = nn.Parameter(0.1 * torch.randn(D))  # random, because zeros would get no gradient
        self.lambda_k1 = nn.Parameter(0.1 * torch.randn(D))
        self.lambda_q2 = nn.Parameter(0.1 * torch.randn(D))
        self.lambda_k2 = nn.Parameter(0.1 * torch.randn(D))
        self.head_norm = nn.RMSNorm(2 * D, eps=1e-5)  # a difference is small where the maps agree: this undoes it

    def forward(self, x):  # [B, N, C]
        q = self.q_proj(x).unflatten(-1, (self.heads, 2, -1)).permute(0, 2, 3, 1, 4)  # [B, H, 2, N, D]
        k = self.k_proj(x).unflatten(-1, (self.heads, 2, -1)).permute(0, 2, 3, 1, 4)  # [B, H, 2, N, D]
        v = self.v_proj(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [B, H, N, 2D]
        if self.causal:
            q, k = rotate(q), rotate(k)
        first, second = softmax_maps(q, k, self.causal).unbind(2)  # [B, H, N, N] each
        lam = (self.lambda_q1 @ self.lambda_k1).exp() - (self.lambda_q2 @ self.lambda_k2).exp() + self.lambda_init
        self.lam = lam.detach()  # to print: one number a layer
        out = (first - lam * second) @ v  # [B, H, N, 2D]: what both maps attend to cancels out
        out = self.head_norm(out) * (1 - self.lambda_init)
        return self.proj(out.transpose(1, 2).flatten(2))  # [B, N, C]


class DiffAttentionV2(PlainAttention):
    """(softmax(q1 k') - lambda softmax(q2 k')) v, with all of the heads (huggingface.co/blog/microsoft/diff-attn-v2).

    A head has two queries and one key and value. Lambda depends on the token and the head. There is no norm of a head.
    """

    def __init__(self, dim, heads, layer, causal):
        super().__init__(dim, heads, layer, causal)
        self.q_proj = nn.Linear(dim, 2 * dim, bias=not causal)  # the second queries: the MLP is narrower in return
        self.lambda_proj = nn.Linear(dim, heads, bias=False)

    def forward(self, x):  # [B, N, C]
        q = self.q_proj(x).unflatten(-1, (self.heads, 2, -1)).permute(0, 2, 3, 1, 4)  # [B, H, 2, N, D]
        k = self.k_proj(x).unflatten(-1, (self.heads, 1, -1)).permute(0, 2, 3, 1, 4)  # [B, H, 1, N, D]
        v = self.v_proj(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [B, H, N, D]
        if self.causal:
            q, k = rotate(q), rotate(k)
        first, second = softmax_maps(q, k, self.causal).unbind(2)  # [B, H, N, N] each
        lam = self.lambda_proj(x).sigmoid().transpose(1, 2).unsqueeze(-1)  # [B, H, N, 1], between 0 and 1
        self.lam = lam.detach()
        out = (first - lam * second) @ v  # [B, H, N, D]
        return self.proj(out.transpose(1, 2).flatten(2))  # [B, N, C]


ATTENTION = {"plain": PlainAttention, "v1": DiffAttentionV1, "v2": DiffAttentionV2}

# ---- Two models around it --------------------------------------------------------------------------------------------


class MLP(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x):  # [B, N, C]
        return self.fc2(F.gelu(self.fc1(x)))


class SwiGLU(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x):  # [B, N, C]
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and an MLP, each added to what it reads. V2's MLP is so much narrower that parameters match."""

    def __init__(self, attention, dim, heads, layer, causal):
        super().__init__()
        self.attn = ATTENTION[attention](dim, heads, layer, causal)
        if causal:  # as LLaMA
            spared = round((dim + heads) / 3) if attention == "v2" else 0  # a unit of SwiGLU has 3 C weights
            self.norm1, self.norm2 = nn.RMSNorm(dim, eps=1e-5), nn.RMSNorm(dim, eps=1e-5)
            self.mlp = SwiGLU(dim, 8 * dim // 3 - spared)
        else:  # as ViT
            spared = dim // 2 if attention == "v2" else 0  # a unit of the MLP has 2 C weights
            self.norm1, self.norm2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
            self.mlp = MLP(dim, 4 * dim - spared)

    def forward(self, x):  # [B, N, C]
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """Vision transformer: a picture's patches are its tokens, and a class token gathers what is to be known of them."""

    def __init__(self, attention, image=8, patch=2, channels=1, classes=10, dim=64, depth=4, heads=4):
        super().__init__()
        self.patch_embed = nn.Conv2d(channels, dim, kernel_size=patch, stride=patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, (image // patch) ** 2 + 1, dim))
        self.blocks = nn.ModuleList(Block(attention, dim, heads, layer, causal=False) for layer in range(depth))
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.head = nn.Linear(dim, classes)
        initialise(self, dim, depth)

    def forward(self, images):  # [B, channels, height, width]
        x = self.patch_embed(images).flatten(2).transpose(1, 2)  # [B, patches, C]
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.pos_embed  # [B, N, C], N = patches + 1
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))  # [B, classes]


class LanguageModel(nn.Module):
    """Decoder that predicts the next token, here the next byte of a text, from those before it."""

    def __init__(self, attention, vocabulary=256, dim=96, depth=4, heads=4):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(Block(attention, dim, heads, layer, causal=True) for layer in range(depth))
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        initialise(self, dim, depth)

    def forward(self, tokens):  # [B, N]
        x = self.embed(tokens)  # [B, N, C]
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.embed.weight.T  # [B, N, vocabulary]


def initialise(model, dim, depth):
    """Draw the matrices from a normal distribution; smaller ones where a block adds to its input."""
    std = math.sqrt(2 / (5 * dim))
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            adds = name.endswith(("attn.proj", "fc2", "down"))
            nn.init.normal_(module.weight, std=std / math.sqrt(2 * depth) if adds else std)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)


# ---- Data ------------------------------------------------------------------------------------------------------------


def load_digits():
    """Return 1,400 pictures [1400, 1, 8, 8] and labels [1400] to train on, and 397 to test on."""
    from sklearn.datasets import load_digits

    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    images = images.float().reshape(-1, 1, 8, 8) / 8 - 1  # from 0..16 to -1..1
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[:1400], order[1400:]
    return images[train], labels[train], images[test], labels[test]


def load_text():
    """Return the text of Python's `help()` as bytes, one number each: nine tenths to train on, the last to test on."""
    from pydoc_data.topics import topics

    text = torch.tensor(list("\n".join(topics.values()).encode()))
    return text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]


# ---- Training --------------------------------------------------------------------------------------------------------


def fit(model, batch, steps, lr):
    """Train with AdamW on what `batch()` returns: the rate rises for a tenth of the steps, then falls to 0."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]  # biases, norms and lambda do not decay
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98))
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(10 * step / steps, (1 + math.cos(math.pi * step / steps)) / 2)
        inputs, targets = batch()
        loss = F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % max(1, steps // 2) == 0:
            print(f"  step {step}, training loss {loss.item():.3f}", flush=True)


def train_on_digits(attention, seed, steps):
    """Return a trained ViT and the percentage of the test pictures that it classifies rightly."""
    images, labels, test_images, test_labels = load_digits()
    torch.manual_seed(seed)
    model, generator = ViT(attention), torch.Generator().manual_seed(seed)  # all attentions see the same batches

    def batch():
        chosen = torch.randint(len(images), (128,), generator=generator)
        return images[chosen], labels[chosen]

    fit(model, batch, steps, lr=2e-3)
    with torch.no_grad():
        return model, 100 * (model(test_images).argmax(1) == test_labels).float().mean().item()


def train_on_text(attention, seed, steps, length=128):
    """Return a trained language model and its loss on the test text, in bits a byte."""
    text, test = load_text()
    torch.manual_seed(seed)
    model, generator = LanguageModel(attention), torch.Generator().manual_seed(seed)

    def batch():
        starts = torch.randint(len(text) - length, (16, 1), generator=generator)
        windows = text[starts + torch.arange(length + 1)]  # [16, length + 1]
        return windows[:, :-1], windows[:, 1:]  # what is read, and what comes next

    fit(model, batch, steps, lr=4e-3)
    windows = test.unfold(0, length + 1, length)
    with torch.no_grad():
        losses = [F.cross_entropy(model(w[:, :-1]).flatten(0, 1), w[:, 1:].flatten()) for w in windows.split(64)]
    return model, torch.stack(losses).mean().item() / math.log(2)


# ---- The comparison --------------------------------------------------------------------------------------------------

TASKS = {"digits": (train_on_digits, "test accuracy, %"), "text": (train_on_text, "test loss, bits a byte")}
STUDENT_T = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}  # number of seeds -> factor of a 95% interval


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--seeds", type=int, default=1, choices=range(1, 6))
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    train, measure = TASKS[args.task]
    results = {attention: [] for attention in ATTENTION}
    for seed in range(args.seeds):
        for attention in ATTENTION:
            print(f"{attention}, seed {seed}", flush=True)
            start = time.perf_counter()
            model, result = train(attention, seed, args.steps)
            results[attention].append(result)
            print(f"  {sum(p.numel() for p in model.parameters()):,} parameters, {time.perf_counter() - start:.0f} s")
            if attention != "plain":
                print("  lambda by layer:", *(f"{block.attn.lam.mean():.2f}" for block in model.blocks))
    print(f"{measure}: mean of {args.seeds} seed(s), and difference to plain with its 95% interval")
    for attention, values in results.items():
        line = f"  {attention:6} {statistics.mean(values):6.2f}"
        if attention != "plain" and args.seeds > 1:
            differences = [one - plain for one, plain in zip(values, results["plain"], strict=True)]
            mean, spread = statistics.mean(differences), statistics.stdev(differences) / math.sqrt(args.seeds)
            half = STUDENT_T[args.seeds] * spread
            verdict = "no significant difference" if abs(mean) <= half else "significant"
            line += f"   {mean:+.2f} [{mean - half:+.2f}, {mean + half:+.2f}], {verdict}"
        print(line)


if __name__ == "__main__":
    main()
