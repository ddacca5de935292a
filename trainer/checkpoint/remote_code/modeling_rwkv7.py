"""RWKV-7 for transformers, in plain PyTorch: forward, state, generation, loss.

The recurrence is a loop over tokens, so that it runs anywhere. Where a GPU is there, the same folder loads
faster in flash-linear-attention.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.utils import ModelOutput

from .configuration_rwkv7 import RWKV7Config


class ReorderedState(tuple):
    """A state whose rows were put in the order of new beams."""


LayerState = tuple[Tensor, Tensor, Tensor]
"""Input of time mixing at the last token [B, C], of channel mixing [B, C], recurrent state [B, H, N_value, N_key]."""


@dataclass
class RWKV7Output(ModelOutput):
    """Result of `RWKV7Model`."""

    last_hidden_state: Tensor | None = None
    state: tuple[LayerState, ...] | None = None


@dataclass
class RWKV7CausalLMOutput(ModelOutput):
    """Result of `RWKV7ForCausalLM`."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    state: tuple[LayerState, ...] | None = None


def token_shift(x: Tensor, shift: Tensor) -> Tensor:
    """Difference to the previous token, x_{t-1} - x_t."""
    return torch.cat((shift.to(x.dtype)[:, None], x[:, :-1]), 1) - x


def wkv7(r: Tensor, log_w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """S = S diag(w) + (S a) b^T + v k^T and y = S r per token; all [B, T, H, N], the state [B, H, N_value, N_key]."""
    kind = r.dtype
    r, w, k, v, a, b = (x.to(state.dtype) for x in (r, log_w.to(state.dtype).exp(), k, v, a, b))
    outputs = []
    for t in range(r.shape[1]):
        removed = (state @ a[:, t, :, :, None]).squeeze(-1)
        state = (
            state * w[:, t, :, None, :]
            + removed[..., None] * b[:, t, :, None, :]
            + v[:, t, :, :, None] * k[:, t, :, None, :]
        )
        outputs.append((state @ r[:, t, :, :, None]).squeeze(-1))
    return torch.stack(outputs, 1).to(kind), state


class LowRank(nn.Module):
    """bias + activation(x A) B."""

    def __init__(self, width: int, rank: int, activation: nn.Module, bias: bool = True) -> None:
        super().__init__()
        self.lora = nn.Sequential(nn.Linear(width, rank, bias=False), activation, nn.Linear(rank, width, bias=bias))

    def forward(self, x: Tensor) -> Tensor:
        """Shape is kept."""
        # The bias is added to the product in its stored type, as the official model does.
        down, activation, up = self.lora
        y = F.linear(activation(down(x)), up.weight)
        return y if up.bias is None else up.bias + y


class RWKV7Attention(nn.Module):
    """Time mixing."""

    def __init__(self, config: RWKV7Config, layer: int) -> None:
        super().__init__()
        width, self.heads, self.size = config.hidden_size, config.num_heads, config.head_dim
        for mix in "rwkvag":
            setattr(self, f"x_{mix}", nn.Parameter(torch.zeros(1, 1, width)))
        self.k_k = nn.Parameter(torch.zeros(width))
        self.k_a = nn.Parameter(torch.zeros(width))
        self.r_k = nn.Parameter(torch.zeros(self.heads, self.size))
        for name in ("r_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(width, width, bias=False))
        self.w_lora = LowRank(width, config.decay_low_rank_dim, nn.Tanh())
        self.a_lora = LowRank(width, config.a_low_rank_dim, nn.Identity())
        if layer > 0:
            self.v_lora = LowRank(width, config.v_low_rank_dim, nn.Identity())
        self.g_lora = LowRank(width, config.gate_low_rank_dim, nn.Sigmoid(), bias=False)
        self.g_norm = nn.GroupNorm(self.heads, width, eps=config.head_dim * config.norm_eps)

    def forward(
        self, x: Tensor, v_first: Tensor | None, shift: Tensor, wkv: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Output [B, T, C], the value of layer 0, and the recurrent state."""
        dx = token_shift(x, shift)
        xr, xw, xk, xv, xa, xg = (x + dx * getattr(self, f"x_{mix}") for mix in "rwkvag")
        r, k, v = self.r_proj(xr), self.k_proj(xk), self.v_proj(xv)
        log_w = -math.exp(-0.5) * torch.sigmoid(self.w_lora(xw).to(wkv.dtype))
        rate, gate = torch.sigmoid(self.a_lora(xa)), self.g_lora(xg)
        if v_first is None:
            v_first = v
        else:
            v = v + (v_first - v) * torch.sigmoid(self.v_lora(xv))
        if mask is not None:
            v = v * mask
        by_head = (*x.shape[:2], self.heads, self.size)
        kk = F.normalize((k * self.k_k).view(by_head).to(wkv.dtype), dim=-1, eps=1e-12).to(x.dtype)
        k = k * (1 + (rate - 1) * self.k_a)
        r, log_w, k, v, rate = (tensor.view(by_head) for tensor in (r, log_w, k, v, rate))
        y, wkv = wkv7(r, log_w, k, v, -kk, kk * rate, wkv)
        y = self.g_norm(y.flatten(0, 1).flatten(1)).view(x.shape)
        y = y + ((r * k * self.r_k).sum(-1, keepdim=True) * v).view(x.shape)
        return self.o_proj(y * gate), v_first, wkv


class RWKV7FeedForward(nn.Module):
    """Channel mixing."""

    def __init__(self, config: RWKV7Config) -> None:
        super().__init__()
        self.x_k = nn.Parameter(torch.zeros(config.hidden_size))
        self.key = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.value = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        """Output [B, T, C]."""
        return self.value(torch.relu(self.key(x + token_shift(x, shift) * self.x_k)).square())


class RWKV7Block(nn.Module):
    """One residual block; that of layer 0 also holds the norm after the embedding."""

    def __init__(self, config: RWKV7Config, layer: int) -> None:
        super().__init__()
        if layer == 0:
            self.pre_norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.attn_norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.attn = RWKV7Attention(config, layer)
        self.ffn_norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.ffn = RWKV7FeedForward(config)

    def forward(
        self, x: Tensor, v_first: Tensor | None, state: LayerState, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, LayerState]:
        """Residual stream, the value of layer 0, and the state after the last token."""
        if v_first is None:
            x = self.pre_norm(x)
        seen = self.attn_norm(x) if mask is None else self.attn_norm(x) * mask
        mixed, v_first, wkv = self.attn(seen, v_first, state[0], state[2], mask)
        x = x + mixed
        then = self.ffn_norm(x) if mask is None else self.ffn_norm(x) * mask
        return x + self.ffn(then, state[1]), v_first, (seen[:, -1].clone(), then[:, -1].clone(), wkv)


class RWKV7PreTrainedModel(PreTrainedModel):
    """What both models share."""

    config_class = RWKV7Config
    base_model_prefix = "model"
    _no_split_modules = ["RWKV7Block"]
    _is_stateful = True

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False


class RWKV7Model(RWKV7PreTrainedModel):
    """The network without its head."""

    def __init__(self, config: RWKV7Config) -> None:
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(RWKV7Block(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        """The embedding."""
        return self.embeddings

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the embedding."""
        self.embeddings = value

    def zero_state(self, batch: int, like: Tensor) -> tuple[LayerState, ...]:
        """State before the first token."""
        config, wide = self.config, torch.float64 if like.dtype == torch.float64 else torch.float32
        shift = like.new_zeros(batch, config.hidden_size)
        wkv = like.new_zeros(batch, config.num_heads, config.head_dim, config.head_dim, dtype=wide)
        return tuple((shift, shift, wkv) for _ in range(config.num_hidden_layers))

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        state: tuple[LayerState, ...] | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> RWKV7Output | tuple:
        """Run T >= 1 tokens after `state`. An attention mask of 0 marks padding, on the left."""
        x = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        if state is None:
            state = self.zero_state(x.shape[0], x)
        mask = None
        if attention_mask is not None:
            mask = attention_mask[:, -x.shape[1] :, None].to(x.dtype)
        v_first, states = None, []
        for layer, layer_state in zip(self.layers, state, strict=True):
            x, v_first, new = layer(x, v_first, layer_state, mask)
            states.append(new)
        keep = self.config.use_cache if use_cache is None else use_cache
        result = RWKV7Output(last_hidden_state=self.norm(x), state=tuple(states) if keep else None)
        return result if return_dict is not False else result.to_tuple()


class RWKV7ForCausalLM(RWKV7PreTrainedModel, GenerationMixin):
    """The network with its head."""

    def __init__(self, config: RWKV7Config) -> None:
        super().__init__(config)
        self.model = RWKV7Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        """The embedding."""
        return self.model.embeddings

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the embedding."""
        self.model.embeddings = value

    def get_output_embeddings(self) -> nn.Linear:
        """The head."""
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        """Replace the head."""
        self.lm_head = new_embeddings

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        state: tuple[LayerState, ...] | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> RWKV7CausalLMOutput | tuple:
        """Logits [B, T, V] (of the last `logits_to_keep` tokens, if not 0), the state, and the loss for `labels`."""
        found = self.model(input_ids, attention_mask, inputs_embeds, state, use_cache)
        logits = self.lm_head(found.last_hidden_state[:, -logits_to_keep:])
        loss = None
        if labels is not None:
            # With several batches per step transformers' Trainer says how many targets all of them have.
            count = kwargs.get("num_items_in_batch")
            kind = "mean" if count is None else "sum"
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), reduction=kind)
            loss = loss if count is None else loss / count
        result = RWKV7CausalLMOutput(loss=loss, logits=logits, state=found.state)
        return result if return_dict is not False else result.to_tuple()

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        state: tuple[LayerState, ...] | None = None,
        past_key_values: tuple[LayerState, ...] | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """With a state only the newest token is read."""
        # The same state under two names: versions of transformers differ in which one they reorder for beams.
        if isinstance(past_key_values, ReorderedState):
            state = past_key_values
        inputs: dict[str, Any] = {"state": state, "use_cache": use_cache, "logits_to_keep": 1}
        if state is not None:
            inputs["input_ids"], attention_mask = input_ids[:, -1:], None
        elif inputs_embeds is not None and input_ids.shape[1] == 0:
            inputs["inputs_embeds"] = inputs_embeds
        else:
            inputs["input_ids"] = input_ids
        inputs["attention_mask"] = attention_mask
        return inputs

    def _update_model_kwargs_for_generation(
        self, outputs: Any, model_kwargs: dict[str, Any], is_encoder_decoder: bool = False, num_new_tokens: int = 1
    ) -> dict[str, Any]:
        model_kwargs = super()._update_model_kwargs_for_generation(
            outputs, model_kwargs, is_encoder_decoder, num_new_tokens
        )
        if outputs.get("state") is not None:
            model_kwargs["state"] = model_kwargs["past_key_values"] = outputs["state"]
        return model_kwargs

    @staticmethod
    def _reorder_cache(state: tuple[LayerState, ...], beam_idx: Tensor) -> tuple[LayerState, ...]:
        return ReorderedState(tuple(x.index_select(0, beam_idx.to(x.device)) for x in layer) for layer in state)
