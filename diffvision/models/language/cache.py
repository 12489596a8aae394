"""Keys and values of past tokens, so that generation computes each token once.

The memory is allocated once, at the start. There are two ways of writing:

- `LayerCache.append` counts the tokens and returns those that are filled. Attention reads no more than that, and needs
  no mask but `causal`, which is aligned to the last key: for prefill, chunks and single tokens.
- `LayerCache.at(index)` writes at the positions of a tensor and returns the whole capacity, which the caller masks. No
  shape depends on how many tokens have passed, so a compiled step is compiled once.
"""

from collections.abc import Iterable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffvision.nn.attention import AttentionLayer


class LayerCache:
    """Past keys, with the rotary embedding applied, and values of one attention layer; no gradient passes.

    V1's values are kept once, 2D wide, for both of its maps; V2 keeps one key for both.

    Args:
        layer: the attention layer; the cache has its sizes and its device.
        batch: B.
        capacity: the most tokens that the cache holds.
        dtype: of the keys and values; the weights' if None. Under autocast they differ.

    Attributes:
        keys: [B, Hk, P, capacity, D].
        values: [B, Hk, capacity, V].
        length: tokens filled.

    Raises:
        ValueError: the variant needs more of past tokens than keys and values.
    """

    def __init__(self, layer: AttentionLayer, batch: int, capacity: int, *, dtype: torch.dtype | None = None) -> None:
        layer.check_cacheable()
        weight = layer.k_proj.weight
        heads, dtype = layer.num_kv_heads, weight.dtype if dtype is None else dtype
        # Zeros, because masked keys and values must be finite: kernels multiply them by a weight of zero.
        self.keys = torch.zeros(
            batch, heads, layer.key_maps, capacity, layer.head_dim, dtype=dtype, device=weight.device
        )
        self.values = torch.zeros(batch, heads, capacity, layer.value_dim, dtype=dtype, device=weight.device)
        self.length = 0

    @property
    def capacity(self) -> int:
        """The largest number of tokens that the cache holds."""
        return self.keys.shape[3]

    def positions(self, count: int) -> Int[Tensor, "N"]:
        """Return the positions of the next `count` tokens, which follow those that are filled."""
        return torch.arange(self.length, self.length + count, device=self.keys.device)

    @torch.no_grad()
    def append(
        self, k: Float[Tensor, "B Hk P N D"], v: Float[Tensor, "B Hk N V"]
    ) -> tuple[Float[Tensor, "B Hk P L D"], Float[Tensor, "B Hk L V"]]:
        """Store the keys and values of N further tokens, and return views of those of all L tokens so far.

        Raises:
            ValueError: the capacity is exceeded, or the batch size or dtype is another.
        """
        end = self.length + k.shape[3]
        if end > self.capacity:
            raise ValueError(
                f"{k.shape[3]} tokens after {self.length} make {end}, over the cache's capacity of {self.capacity}: "
                "make a larger cache, or crop or reset this one"
            )
        if k.shape[0] != self.keys.shape[0] or k.dtype != self.keys.dtype:
            raise ValueError(
                f"the cache is for a batch of {self.keys.shape[0]} in {self.keys.dtype}, got {k.shape[0]} in {k.dtype}"
            )
        self.keys[:, :, :, self.length : end] = k
        self.values[:, :, self.length : end] = v
        self.length = end
        return self.keys[:, :, :, :end], self.values[:, :, :end]

    def crop(self, length: int) -> None:
        """Drop all tokens but the first `length`.

        Raises:
            ValueError: there are fewer, or length is negative.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot crop a cache of {self.length} tokens to {length}: give 0 to {self.length}")
        self.length = length

    def at(self, index: Int[Tensor, "N"]) -> "IndexedCache":
        """Return a view of this cache that is written at `index` and read as a whole."""
        return IndexedCache(self, index)


class IndexedCache:
    """A `LayerCache` for one compiled step: `append` writes at the index and returns the whole capacity.

    The caller masks what is not filled, and updates `LayerCache.length`.
    """

    def __init__(self, cache: LayerCache, index: Int[Tensor, "N"]) -> None:
        self.keys, self.values, self.index = cache.keys, cache.values, index

    def positions(self, count: int) -> Tensor:
        """Return the index."""
        return self.index

    @torch.no_grad()
    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store the keys and values of the tokens at the index, and return those of the whole capacity."""
        return self.keys.index_copy_(3, self.index, k), self.values.index_copy_(2, self.index, v)


class KVCache:
    """The caches of a model's layers, which fill together.

    Args:
        layers: the model's attention layers, in order.
        batch: as in `LayerCache`, like the arguments below.
        capacity: the most tokens.
        dtype: of keys and values.
    """

    def __init__(
        self, layers: Iterable[AttentionLayer], batch: int, capacity: int, *, dtype: torch.dtype | None = None
    ) -> None:
        if batch < 1 or capacity < 1:
            raise ValueError(f"a cache needs a batch and a capacity of at least 1, got {batch} and {capacity}")
        self.layers = [LayerCache(layer, batch, capacity, dtype=dtype) for layer in layers]
        self.batch, self.capacity = batch, capacity

    @property
    def length(self) -> int:
        """Tokens filled."""
        return self.layers[0].length

    def crop(self, length: int) -> None:
        """Drop all tokens but the first `length` in every layer; as `LayerCache.crop`."""
        for layer in self.layers:
            layer.crop(length)

    def reset(self) -> None:
        """Drop all tokens."""
        self.crop(0)

    def advance(self, tokens: int) -> None:
        """Count tokens that compiled steps wrote through `LayerCache.at`."""
        for layer in self.layers:
            layer.length += tokens
