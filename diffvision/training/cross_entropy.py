"""Next-token cross entropy from hidden states, without the logits of all tokens at once.

`torch.nn.functional.linear_cross_entropy` cannot be used: torch 2.10, the oldest supported version, lacks it, and newer
versions have no z-loss, and so cannot return the cross entropy without it either.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from diffvision.ops.autocast import product_dtype

IGNORED = -100  # target of a token that is left out of the loss, as in torch


class SoftTargets(NamedTuple):
    """Distributions over K tokens, such as a teacher's, to train on in addition to the targets.

    Attributes:
        ids: token ids.
        probabilities: of these tokens; each row sums to 1.
        weight: weight of the cross entropy with the distributions; that with the targets has 1 - weight.
    """

    ids: Int[Tensor, "T K"]
    probabilities: Float[Tensor, "T K"]
    weight: float


def linear_cross_entropy(
    hidden: Float[Tensor, "T dim"],
    weight: Float[Tensor, "vocab dim"],
    targets: Int[Tensor, "T"],
    *,
    z_loss: float = 0.0,
    chunk: int = 1024,
    soft: SoftTargets | None = None,
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Return the sums over tokens of cross entropy + z_loss * log(Z)^2, and of the cross entropy alone, in nats.

    The logits `hidden @ weight.T` are computed for `chunk` tokens at a time, in float32 (as `LanguageModel.logits`
    does), and overwritten by their gradient. The full [T, vocab] logits are never stored, and no product is computed
    twice. Gradients are of the sum and are scaled in the backward pass, so that small ones do not underflow in float16.

    Args:
        hidden: inputs of the output projection; under autocast products are in autocast's dtype.
        weight: of the output projection, without bias.
        targets: ids, or IGNORED.
        z_loss: weight of the z-loss, log(Z)^2 of the softmax normaliser Z (1e-4 in arXiv 2204.02311 section 5).
        chunk: tokens whose logits are in memory together.
        soft: distributions that the first sum includes besides the targets.

    Returns:
        Both in float32 or better; only the first has a gradient, and only once.
    """
    needs_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    loss, nll = _LinearCrossEntropy.apply(hidden, weight, targets, z_loss, chunk, soft, needs_grad)
    return loss, nll


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        """Compute the loss in chunks of rows, and its gradients at once, so that all logits never exist."""
        hidden, weight, targets, z_loss, chunk, soft, needs_grad = args
        device, dtype = hidden.device.type, torch.promote_types(hidden.dtype, torch.float32)
        product = product_dtype(hidden)
        narrow = weight.to(product)  # once, rather than for every chunk
        loss, nll = torch.zeros(2, dtype=dtype, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if needs_grad else None
        # None for a frozen projection, as where a vision-language model's projector is trained alone.
        grad_weight = torch.zeros_like(weight, dtype=dtype) if needs_grad and weight.requires_grad else None
        with torch.autocast(device, enabled=False):
            for start in range(0, len(hidden), chunk):
                rows = slice(start, start + chunk)
                h, target = hidden[rows].to(product), targets[rows]
                logits = F.linear(h, narrow).to(dtype)
                log_z = logits.logsumexp(dim=-1)
                valid = target != IGNORED
                labels = target.where(valid, 0)[:, None]
                cross_entropy = ((log_z - logits.gather(1, labels)[:, 0]) * valid).sum()
                nll += cross_entropy
                shares = torch.ones_like(labels, dtype=dtype)
                if soft is not None:
                    labels, shares = _join_targets(labels, soft, rows)
                    cross_entropy = ((log_z - (logits.gather(1, labels) * shares).sum(dim=1)) * valid).sum()
                loss += cross_entropy if not z_loss else cross_entropy + z_loss * (log_z.square() * valid).sum()
                if grad_hidden is not None:
                    grad = _logits_to_gradient(logits, log_z, labels, shares, valid, z_loss).to(product)
                    grad_hidden[rows] = grad @ narrow
                    if grad_weight is not None:
                        grad_weight += grad.T @ h
        if grad_hidden is not None:
            ctx.save_for_backward(grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype))
        ctx.mark_non_differentiable(nll)
        return loss, nll

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # In place: autograd refuses a second backward pass, which would scale them twice.
        grad_hidden, grad_weight = (None if saved is None else saved.mul_(grads[0]) for saved in ctx.saved_tensors)
        return grad_hidden, grad_weight, None, None, None, None, None


def _join_targets(labels: Tensor, soft: SoftTargets, rows: slice) -> tuple[Tensor, Tensor]:
    """Return targets and soft targets as one distribution: token ids and probabilities, both [C, 1 + K]."""
    probabilities = soft.probabilities[rows]
    hard = torch.full_like(probabilities[:, :1], 1 - soft.weight)
    return torch.cat([labels, soft.ids[rows]], dim=1), torch.cat([hard, soft.weight * probabilities], dim=1)


def _logits_to_gradient(
    logits: Tensor, log_z: Tensor, labels: Tensor, shares: Tensor, valid: Tensor, z_loss: float
) -> Tensor:
    """Turn logits [C, vocab] in place into the gradient of the sum: softmax * (1 + 2 z_loss log Z) - shares."""
    factor = (1 + 2 * z_loss * log_z) * valid
    softmax = logits.sub_(log_z[:, None]).exp_().mul_(factor[:, None])
    return softmax.scatter_add_(1, labels, -(shares * valid[:, None]).to(logits.dtype))
