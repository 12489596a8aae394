"""Differential attention in one file: plain, V1 and V2 attention, in a vision transformer and in a language model.

    python scripts/nano/nano_diff.py digits      a ViT with each attention, on handwritten digits
    python scripts/nano/nano_diff.py text        a language model with each attention, on the manual of Python

It prints the training loss, the parameter count, lambda in each layer, and last the test result of each attention. With
--seeds 3 it trains each model three times and adds the difference to plain attention with its 95% interval.
It needs torch, and scikit-learn for the digits. Top to bottom: attention, the two models, data, training, comparison.
Shapes in comments: B batch, N tokens, C width of a token, H heads, D width of a head.
"""

import argparse
import math
import time

import torch
import torch.nn.functional as F
from torch import nn

# ---- Attention -------------------------------------------------------------------------------------------------------
# Both models use the same three layers. The language model's are `causal`: a token attends to itself and to those
# before it, queries and keys are rotated by their position, and projections have no bias.


def rotate(x):  # [..., N, D] -> [..., N, D]
    """Rotary embedding: rotate each pair of neighbours in D by an angle proportional to the position."""
    N, D = x.shape[-2:]
    angles = torch.arange(N)[:, None] * 10_000 ** (-torch.arange(0, D, 2) / D)  # [N, D/2]
    even, odd = x[..., 0::2], x[..., 1::2]  # [..., N, D/2] each
    rotated = even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()
    return torch.stack(rotated, dim=-1).flatten(-2)


def softmax_maps(q, k, causal):
    """Return the attention map of queries and keys, both [..., N, D]: [..., N, N], whose rows sum to 1."""
    if causal:
        q, k = rotate(q), rotate(k)
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)  # [N, N], True above the diagonal
        scores = scores.masked_fill(future, -torch.inf)
    return scores.softmax(dim=-1)


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
        out = softmax_maps(q, k, self.causal) @ v  # [B, H, N, D]
        return self.proj(out.transpose(1, 2).flatten(2))  # [B, N, C]


class DiffAttentionV1(PlainAttention):
    """(softmax(q1 k1') - lambda softmax(q2 k2')) v, with half of the heads, each twice as wide (arXiv 2410.05258).

    The projections are those of plain attention: its heads 2i and 2i + 1 become the two maps of head i, and their
    values, concatenated, the values of head i. Only lambda and the head norm add parameters.
    """

    def __init__(self, dim, heads, layer, causal):
        super().__init__(dim, heads, layer, causal)
        self.heads, D = heads // 2, dim // heads  # the heads are halved, their width is not
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * layer)  # 0.2 in layer 0, rising towards 0.8
        self.lambda_q1 = nn.Parameter(0.1 * torch.randn(D))  # zeros would get no gradient
        self.lambda_k1 = nn.Parameter(0.1 * torch.randn(D))
        self.lambda_q2 = nn.Parameter(0.1 * torch.randn(D))
        self.lambda_k2 = nn.Parameter(0.1 * torch.randn(D))
        self.head_norm = nn.RMSNorm(2 * D, eps=1e-5)  # rescales: similar maps have a small difference

    def forward(self, x):  # [B, N, C]
        q = self.q_proj(x).unflatten(-1, (self.heads, 2, -1)).permute(0, 2, 3, 1, 4)  # [B, H, 2, N, D]
        k = self.k_proj(x).unflatten(-1, (self.heads, 2, -1)).permute(0, 2, 3, 1, 4)  # [B, H, 2, N, D]
        v = self.v_proj(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [B, H, N, 2D]
        first, second = softmax_maps(q, k, self.causal).unbind(2)  # [B, H, N, N] each
        lam = (self.lambda_q1 @ self.lambda_k1).exp() - (self.lambda_q2 @ self.lambda_k2).exp() + self.lambda_init
        self.lam = lam.detach()  # to print: one number per layer
        out = (first - lam * second) @ v  # [B, H, N, 2D]: attention common to both maps cancels out
        out = self.head_norm(out) * (1 - self.lambda_init)
        return self.proj(out.transpose(1, 2).flatten(2))  # [B, N, C]


class DiffAttentionV2(PlainAttention):
    """(softmax(q1 k') - lambda softmax(q2 k')) v, with all of the heads (huggingface.co/blog/microsoft/diff-attn-v2).

    A head has two queries, one key and one value. Lambda depends on the token and the head. There is no head norm.
    """

    def __init__(self, dim, heads, layer, causal):
        super().__init__(dim, heads, layer, causal)
        self.q_proj = nn.Linear(dim, 2 * dim, bias=not causal)  # two queries per head; Block narrows the MLP to match
        self.lambda_proj = nn.Linear(dim, heads, bias=False)

    def forward(self, x):  # [B, N, C]
        q = self.q_proj(x).unflatten(-1, (self.heads, 2, -1)).permute(0, 2, 3, 1, 4)  # [B, H, 2, N, D]
        k = self.k_proj(x).unflatten(-1, (self.heads, 1, -1)).permute(0, 2, 3, 1, 4)  # [B, H, 1, N, D]
        v = self.v_proj(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [B, H, N, D]
        first, second = softmax_maps(q, k, self.causal).unbind(2)  # [B, H, N, N] each
        lam = self.lambda_proj(x).sigmoid().transpose(1, 2).unsqueeze(-1)  # [B, H, N, 1], between 0 and 1
        self.lam = lam.detach()
        out = (first - lam * second) @ v  # [B, H, N, D]
        return self.proj(out.transpose(1, 2).flatten(2))  # [B, N, C]


ATTENTION = {"plain": PlainAttention, "v1": DiffAttentionV1, "v2": DiffAttentionV2}

# ---- Models ----------------------------------------------------------------------------------------------------------


class SwiGLU(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x):  # [B, N, C]
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and an MLP, each with a residual. V2's MLP is narrower, so that the parameter counts match."""

    def __init__(self, attention, dim, heads, layer, causal):
        super().__init__()
        self.attn = ATTENTION[attention](dim, heads, layer, causal)
        if causal:  # as LLaMA
            narrower = round((dim + heads) / 3) if attention == "v2" else 0  # a unit of SwiGLU has 3 C weights
            self.norm1, self.norm2 = nn.RMSNorm(dim, eps=1e-5), nn.RMSNorm(dim, eps=1e-5)
            self.mlp = SwiGLU(dim, 8 * dim // 3 - narrower)
        else:  # as ViT
            narrower = dim // 2 if attention == "v2" else 0  # a unit of the MLP has 2 C weights
            self.norm1, self.norm2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
            hidden = 4 * dim - narrower
            self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, x):  # [B, N, C]
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """Vision transformer: the tokens are a class token and the image's patches."""

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
    """Decoder that predicts the next token, here the next byte, from those before it."""

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
    """Draw weights from a normal distribution, narrower where a residual is added; biases are 0."""
    std = math.sqrt(2 / (5 * dim))
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            adds = name.endswith(("attn.proj", "mlp.2", "mlp.down"))
            nn.init.normal_(module.weight, std=std / math.sqrt(2 * depth) if adds else std)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)


# ---- Data ------------------------------------------------------------------------------------------------------------
# Each function returns inputs and targets to train on, then inputs and targets to test on.


def load_digits():
    """Load 1,797 digits, images [1, 8, 8] and labels, and keep 397 of them for the test."""
    from sklearn.datasets import load_digits

    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    images = images.float().reshape(-1, 1, 8, 8) / 8 - 1  # from 0..16 to -1..1
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[:1400], order[1400:]
    return images[train], labels[train], images[test], labels[test]


def load_text(length=128):
    """Load the text of Python's `help()` as bytes, and keep the last tenth for the test."""
    from pydoc_data.topics import topics

    text = torch.tensor(list("\n".join(topics.values()).encode()))
    train, test = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    train = train.unfold(0, length + 1, 1)  # [windows, length + 1], one from each byte on
    test = test.unfold(0, length + 1, length)  # [windows, length + 1], each byte predicted once
    return train[:, :-1], train[:, 1:], test[:, :-1], test[:, 1:]  # the targets are the next bytes


# ---- Training --------------------------------------------------------------------------------------------------------

TASKS = {  # model, data, batch size, learning rate
    "digits": (ViT, load_digits, 128, 2e-3),
    "text": (LanguageModel, load_text, 16, 4e-3),
}


def train(task, attention, seed, steps):
    """Train a model with AdamW; return it and its test result: accuracy in %, or loss in bits per byte."""
    model_class, load, batch_size, peak = TASKS[task]
    inputs, targets, test_inputs, test_targets = load()
    torch.manual_seed(seed)
    model = model_class(attention)
    batches = torch.Generator().manual_seed(seed)  # of its own, so that all attentions see the same batches
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]  # biases, norms and lambda: no weight decay
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98))
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:  # linear warmup for a tenth of the steps, cosine decay to 0
            group["lr"] = peak * min(10 * step / steps, (1 + math.cos(math.pi * step / steps)) / 2)
        chosen = torch.randint(len(inputs), (batch_size,), generator=batches)
        logits = model(inputs[chosen])  # [B, classes] or [B, N, vocabulary]
        loss = F.cross_entropy(logits.flatten(0, -2), targets[chosen].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % max(1, steps // 3) == 0:
            print(f"  step {step}, training loss {loss.item():.3f}", flush=True)
    with torch.no_grad():
        logits = torch.cat([model(some) for some in test_inputs.split(64)]).flatten(0, -2)
    if task == "digits":
        return model, 100 * (logits.argmax(-1) == test_targets).float().mean().item()
    return model, F.cross_entropy(logits, test_targets.flatten()).item() / math.log(2)


# ---- Comparison ------------------------------------------------------------------------------------------------------

STUDENT_T = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}  # number of seeds -> factor of the 95% interval


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--seeds", type=int, default=1, choices=range(1, 6))
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    results = {attention: [] for attention in ATTENTION}
    for seed in range(args.seeds):
        for attention in ATTENTION:
            print(f"{attention}, seed {seed}", flush=True)
            start = time.perf_counter()
            model, result = train(args.task, attention, seed, args.steps)
            results[attention].append(result)
            print(f"  {sum(p.numel() for p in model.parameters()):,} parameters, {time.perf_counter() - start:.0f} s")
            if attention != "plain":
                print("  lambda by layer:", *(f"{block.attn.lam.mean():.2f}" for block in model.blocks))
    print("test accuracy in %" if args.task == "digits" else "test loss in bits per byte")
    for attention, values in results.items():
        line = f"  {attention:6} {sum(values) / args.seeds:6.2f}"
        if attention != "plain" and args.seeds > 1:
            difference = torch.tensor(values) - torch.tensor(results["plain"])  # paired: equal seeds, equal batches
            half = STUDENT_T[args.seeds] * difference.std() / math.sqrt(args.seeds)
            line += f"   difference to plain {difference.mean():+.2f} ± {half:.2f} (95% interval)"
        print(line)


if __name__ == "__main__":
    main()
