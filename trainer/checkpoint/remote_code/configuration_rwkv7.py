"""Settings of an RWKV-7 model for transformers."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig


class RWKV7Config(PretrainedConfig):
    """Sizes of the model; the names are those of flash-linear-attention."""

    model_type = "rwkv7"
    keys_to_ignore_at_inference = ["state"]

    def __init__(
        self,
        vocab_size: int = 65536,
        hidden_size: int = 768,
        num_hidden_layers: int = 12,
        head_dim: int = 64,
        intermediate_size: int | None = None,
        decay_low_rank_dim: int = 64,
        a_low_rank_dim: int = 64,
        v_low_rank_dim: int = 32,
        gate_low_rank_dim: int = 128,
        norm_eps: float = 1e-5,
        use_cache: bool = True,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.head_dim = head_dim
        self.num_heads = kwargs.pop("num_heads", None) or hidden_size // head_dim
        self.intermediate_size = intermediate_size or 4 * hidden_size
        self.decay_low_rank_dim = decay_low_rank_dim
        self.a_low_rank_dim = a_low_rank_dim
        self.v_low_rank_dim = v_low_rank_dim
        self.gate_low_rank_dim = gate_low_rank_dim
        self.norm_eps = norm_eps
        self.use_cache = use_cache
        # Other loaders' settings, such as attn_mode and fuse_norm, go along unread.
        super().__init__(**kwargs)
