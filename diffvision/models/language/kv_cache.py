"""Keys and values of past tokens, so that generation computes each token once.

The memory is allocated once, at the start. `LayerCache.append` counts the tokens and returns those that are filled, so
that attention reads no more and needs no mask but `causal`, which is aligned to the last key.

`KVCache.keep` drops tokens that are no longer worth their memory. Those that are left keep their rotary embedding, so
the next position is counted apart from the fill. Which tokens are kept is decided in
`diffvision.evaluation.language.pruning`.
"""

from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffvision.nn.attention import AttentionLayer
from diffvision.ops.autocast import product_dtype


class LayerCache:
    """Past keys, with the rotary embedding applied, and values of one attention layer; no gradient passes.

    V1's values are kept once, 2D wide, for both of its maps; V2 keeps one key for both.

    Args:
        layer: the attention layer; the cache has its sizes and its device.
        batch: B.
        capacity: the most tokens that the cache holds.

    Attributes:
        keys: [B, Hk, P, capacity, D], in the dtype of the projections' outputs: the weights', or autocast's.
        values: [B, Hk, capacity, V].
        length: tokens filled.
        dropped: tokens that `keep` dropped.

    Raises:
        ValueError: the variant needs more of past tokens than keys and values.
    """

    dropped = 0

    def __init__(self, layer: AttentionLayer, batch: int, capacity: int) -> None:
        layer.check_cacheable()
        weight = layer.k_proj.weight
        heads, dtype = layer.num_kv_heads, product_dtype(weight)
        # Zeros, because masked keys and values must be finite: kernels multiply them by a weight of zero.
        self.keys = torch.zeros(
            batch, heads, layer.key_maps, capacity, layer.head_dim, dtype=dtype, device=weight.device
        )
        self.values = torch.zeros(
            batch, heads, capacity, layer.v_proj.out_features // heads, dtype=dtype, device=weight.device
        )
        self.length = 0

    @property
    def capacity(self) -> int:
        """The largest number of tokens that the cache holds."""
        return self.keys.shape[3]

    @property
    def position(self) -> int:
        """The position of the next token: all tokens so far, those that were dropped included."""
        return self.length + self.dropped

    def positions(self, count: int) -> Int[Tensor, "N"]:
        """Return the positions of the next `count` tokens, which follow those so far."""
        return torch.arange(self.position, self.position + count, device=self.keys.device)

    @torch.no_grad()
    def append(
        self, k: Float[Tensor, "B Hk P N D"], v: Float[Tensor, "B Hk N V"]
    ) -> tuple[Float[Tensor, "B Hk P L D"], Float[Tensor, "B Hk L V"]]:
        """Store the keys and values of N further tokens, and return views of those of all L tokens so far.

        Raises:
            ValueError: the capacity is exceeded, or the batch size or dtype is another.
        """
        end = self.length + k.shape[3]
        if end > self.keys.shape[3]:
            raise ValueError(
                f"{k.shape[3]} tokens after {self.length} make {end}, over the cache's capacity of {self.capacity}: "
                "make a larger cache"
            )
        if k.shape[0] != self.keys.shape[0] or k.dtype != self.keys.dtype:
            raise ValueError(
                f"the cache is for a batch of {self.keys.shape[0]} in {self.keys.dtype}, got {k.shape[0]} in {k.dtype}"
                ": make it with this batch and dtype, or under the same autocast"
            )
        self.keys[:, :, :, self.length : end] = k
        self.values[:, :, self.length : end] = v
        self.length = end
        return self.keys[:, :, :, :end], self.values[:, :, :end]

    def keep(self, index: Int[Tensor, "B Hk K"], capacity: int) -> None:
        """Keep the tokens of an index alone, and make room for others behind them; the rest of the memory is freed.

        All heads and maps that read a key/value head keep the same tokens. Keys stay rotated by the positions that
        their tokens had, and the next token's position is unchanged.

        Args:
            index: of the tokens that are kept, in the order of the new slots, for each row and key/value head.
            capacity: the most tokens that the cache holds from now on.

        Raises:
            ValueError: the capacity is below the number of kept tokens.
        """
        count = index.shape[2]
        if capacity < count:
            raise ValueError(f"a capacity of {capacity} is below the {count} tokens that are kept: give more")
        wide = index[:, :, None, :, None].expand(-1, -1, *self.keys.shape[2:3], -1, self.keys.shape[4])
        keys, values = self.keys, self.values
        self.keys = keys.new_zeros(*keys.shape[:3], capacity, keys.shape[4])
        self.values = values.new_zeros(*values.shape[:2], capacity, values.shape[3])
        self.keys[:, :, :, :count] = keys.gather(3, wide)
        self.values[:, :, :count] = values.gather(2, index[..., None].expand(-1, -1, -1, values.shape[3]))
        self.dropped += self.length - count
        self.length = count


class KVCache:
    """The caches of a model's layers, which fill together.

    Args:
        layers: the model's attention layers, in order.
        batch: as in `LayerCache`, like the arguments below.
        capacity: the most tokens.

    Attributes:
        empty: [B] slots at the left of each row that hold no token, after `keep` in a batch with padding; else None.
    """

    empty: Tensor | None = None

    def __init__(self, layers: Iterable[AttentionLayer], batch: int, capacity: int) -> None:
        if batch < 1 or capacity < 1:
            raise ValueError(f"a cache needs a batch and a capacity of at least 1, got {batch} and {capacity}")
        self.layers = [LayerCache(layer, batch, capacity) for layer in layers]
        self.batch, self.capacity = batch, capacity

    @property
    def length(self) -> int:
        """Tokens filled."""
        return self.layers[0].length

    @property
    def position(self) -> int:
        """The position of the next token; above `length` by what `keep` dropped."""
        return self.layers[0].length + self.layers[0].dropped

    def keep(self, indices: Sequence[Int[Tensor, "B Hk K"]], capacity: int, empty: Int[Tensor, "B"] | None) -> None:
        """Keep only the tokens at each layer's indices; see `LayerCache.keep`.

        Args:
            indices: one tensor of token indices per layer, all of the same K.
            capacity: the most tokens that each layer holds from now on.
            empty: [B] number of padding slots at the start of each row; None if the batch was not padded.
        """
        for layer, index in zip(self.layers, indices, strict=True):
            layer.keep(index, capacity)
        self.capacity, self.empty = capacity, empty
