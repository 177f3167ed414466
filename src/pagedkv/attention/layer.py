"""AttentionLayer: the parameters of one attention layer that are the same in every step.

Keys are identified by a group and a place in it, in the numbering of :class:`~pagedkv.device.KVStorage`. Several
layers may read the same keys. :mod:`pagedkv.attention.backend` has the parameters that change from step to
step.
"""

from dataclasses import dataclass

from pagedkv.contract.arguments import as_count
from pagedkv.errors import ConfigurationError

__all__ = ["AttentionLayer"]


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """One attention layer.

    A query at position q sees the keys at positions p <= q; with ``window`` only those with ``p > q - window``, and
    with ``chunk`` only those of its own chunk, ``p // chunk == q // chunk``.

    Args:
        group: the group whose block table locates its keys.
        index: the layer of that group whose keys it reads.
        num_heads: heads of its queries, a multiple of the key heads.
        scale: factor of the product of query and key.
        window, chunk: tokens; 0: none.
        num_sink_tokens: with a window, the first positions, which every query sees (StreamingLLM, 2023).
        soft_cap: scores become ``soft_cap * tanh(score / soft_cap)`` (Gemma 2); 0: no cap.
        has_sinks: whether each head has a learnt score without a value in its softmax (gpt-oss).
        is_latent: whether the group stores latents, from which the model unfolds keys and values (DeepSeek-V2, 2024).

    Raises:
        ConfigurationError: a value is out of range, there are both window and chunk, or sink tokens without a window.
    """

    group: int
    index: int
    num_heads: int
    scale: float
    window: int = 0
    chunk: int = 0
    soft_cap: float = 0.0
    has_sinks: bool = False
    is_latent: bool = False
    num_sink_tokens: int = 0

    def __post_init__(self) -> None:
        """Check the values."""
        for name in ("group", "index", "window", "chunk", "num_sink_tokens"):
            as_count(getattr(self, name), name)
        as_count(self.num_heads, "num_heads", least=1)
        if self.window and self.chunk:
            raise ConfigurationError(f"a layer has a window ({self.window}) or a chunk ({self.chunk}), not both")
        if self.num_sink_tokens and not self.window:
            raise ConfigurationError(f"num_sink_tokens ({self.num_sink_tokens}) needs a window, and window is 0")
        if self.soft_cap < 0:
            raise ConfigurationError(f"soft_cap must not be negative, got {self.soft_cap}")

    def first_seen(self, position: int) -> int:
        """Return the first position, without sink tokens, that a query at ``position`` sees."""
        if self.window:
            return max(0, position - self.window + 1)
        return position // self.chunk * self.chunk if self.chunk else 0
