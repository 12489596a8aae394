"""Visual-Contrast Attention against its equations written out, and what it refuses."""

import pytest
import torch

from diffvision.nn import VisualContrastAttention, depth_lambda_init


def normed(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def pooled(queries, height, width, size):
    """Means of the grid's cells [size^2, dim], as torch's adaptive pooling cuts them."""
    grid = queries.reshape(height, width, -1)
    cells = []
    for i in range(size):
        rows = slice(i * height // size, -(-(i + 1) * height // size))
        for j in range(size):
            columns = slice(j * width // size, -(-(j + 1) * width // size))
            cells.append(grid[rows, columns].flatten(0, 1).mean(0))
    return torch.stack(cells)


def convolved(values, height, width, kernel, bias):
    """A depthwise 3 x 3 convolution of [height * width, dim], zeros around the grid."""
    grid = torch.zeros(height + 2, width + 2, values.shape[-1], dtype=values.dtype)
    grid[1:-1, 1:-1] = values.reshape(height, width, -1)
    out = [
        bias + sum(grid[i + a, j + b] * kernel[:, 0, a, b] for a in range(3) for b in range(3))
        for i in range(height)
        for j in range(width)
    ]
    return torch.stack(out)


def transcribed(layer, x, height, width, prefix):
    """The equations for the tokens [N, dim] of one image."""
    heads, size, count = layer.num_heads, layer.head_dim, layer.contrast_size**2
    q, k, v = (p(x) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    lambdas = []
    for s in (1, 2):
        q1, k1, q2, k2 = (getattr(layer, f"lambda{s}_{name}") for name in ("q1", "k1", "q2", "k2"))
        lambdas.append(torch.exp(q1 @ k1) - torch.exp(q2 @ k2) + layer.lambda_init)
    tokens = pooled(q[prefix:], height, width, layer.contrast_size)
    positive, negative = tokens + layer.contrast_embed[0], tokens + layer.contrast_embed[1]
    outputs = []
    for head in range(heads):
        part = slice(head * size, (head + 1) * size)
        plus, minus = (t[:, part] @ k[:, part].T / size**0.5 for t in (positive, negative))
        contrast = (plus.softmax(-1) - lambdas[0] * minus.softmax(-1)) @ v[:, part]
        contrast = normed(contrast, layer.contrast_norm.weight) * (1 - layer.lambda_init)
        plus, minus = (q[:, part] @ t[:, part].T / size**0.5 for t in (positive, negative))
        if layer.joint:
            both = torch.cat([plus, minus], -1).softmax(-1)
            plus, minus = both[:, :count], both[:, count:]
        else:
            plus, minus = plus.softmax(-1), minus.softmax(-1)
        read = (plus - lambdas[1] * minus) @ contrast
        outputs.append(normed(read, layer.head_norm.weight) * (1 - layer.lambda_init))
    mixed = torch.cat(outputs, -1)
    local = convolved(v[prefix:], height, width, layer.local.weight, layer.local.bias)
    return layer.proj(mixed + torch.cat([torch.zeros(prefix, x.shape[-1], dtype=x.dtype), local]))


def scattered(height, width, prefix, **settings):
    layer = VisualContrastAttention(24, 3, depth=2, qkv_bias=True, dtype=torch.float64, **settings)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    layer.set_grid((height, width), prefix)
    return layer


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize(
    ("height", "width", "prefix", "size"), [(4, 4, 1, 2), (4, 6, 0, 2), (3, 5, 5, 2), (2, 2, 1, 3)]
)
def test_equals_the_equations(height, width, prefix, size, joint):
    layer = scattered(height, width, prefix, contrast_size=size, joint=joint)
    x = torch.randn(2, prefix + height * width, 24, dtype=torch.float64, requires_grad=True)
    expected = torch.stack([transcribed(layer, image, height, width, prefix) for image in x])
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-6)
    inputs = (x, *layer.parameters())
    grads = [torch.autograd.grad(out.square().sum(), inputs) for out in (layer(x), expected)]
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-3)  # lambda is computed in float32


def test_initial_values():
    layer = VisualContrastAttention(192, 3, depth=4)
    assert layer.contrast_embed.shape == (2, 49, 192)
    assert layer.contrast_embed.std().item() == pytest.approx(1.0, rel=0.05)
    vectors = torch.cat(layer._lambda_vectors())
    assert len(vectors) == 8 * 64
    assert vectors.std().item() == pytest.approx(0.1, rel=0.15)
    assert layer.lambda_init == depth_lambda_init(4)
    assert VisualContrastAttention(192, 3, lambda_init=0.5).lambda_init == 0.5


def test_bad_input_is_named():
    layer = VisualContrastAttention(32, 4, contrast_size=2)
    x = torch.randn(1, 16, 32)
    with pytest.raises(ValueError, match="does not know its grid"):
        layer(x)
    layer.set_grid((4, 4))
    with pytest.raises(ValueError, match="got 12 tokens, not 4"):
        layer(x[:, :12])
    for refused in ({"attn_mask": torch.ones(16, 16, dtype=torch.bool)}, {"is_causal": True}, {"maps": []}):
        with pytest.raises(ValueError, match="takes no mask, context, cache"):
            layer(x, **refused)
    with pytest.raises(ValueError, match="no map from tokens to tokens"):
        layer.attention_maps(x)
    with pytest.raises(ValueError, match="attn_drop"):
        VisualContrastAttention(32, 4, attn_drop=0.1)
    with pytest.raises(ValueError, match="contrast_size"):
        VisualContrastAttention(32, 4, contrast_size=0)
