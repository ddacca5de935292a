"""AdamW with float32 master weights and float32 gradient accumulation, whatever the weights' dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainer.config.schema import ModelConfig
from trainer.model.naming import optimizer_group

__all__ = ["MasterAdamW", "clip_by_global_norm", "parameter_groups"]

_LR_SCALE = {"1x": 1.0, "2x": 2.0, "decay": 1.0}


def parameter_groups(named: Iterable[tuple[str, nn.Parameter]], model: ModelConfig) -> list[dict[str, Any]]:
    """The official optimizer groups [1x, 2x, decay], names sorted in each.

    Args:
        named: official names and parameters, as `RWKV7.named_parameters()` gives them.
        model: settings.

    Returns:
        Groups with params, names, lr, lr_scale and weight_decay. Without weight decay the matrices of
        `decay` are in `1x`.
    """
    buckets: dict[str, list[tuple[str, nn.Parameter]]] = {"1x": [], "2x": [], "decay": []}
    for name, parameter in sorted(named, key=lambda pair: pair[0]):
        # ZeRO-3 empties a parameter and keeps its shape apart.
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        group = optimizer_group(name, shape)
        buckets["1x" if group == "decay" and model.weight_decay == 0 else group].append((name, parameter))
    return [
        {
            "params": [parameter for _, parameter in members],
            "names": [name for name, _ in members],
            "lr": model.lr_init * _LR_SCALE[key],
            "lr_scale": _LR_SCALE[key],
            "weight_decay": model.weight_decay if key == "decay" else 0.0,
        }
        for key, members in buckets.items()
        if members
    ]


def clip_by_global_norm(gradients: list[Tensor], max_norm: float) -> Tensor:
    """Scale gradients in place so that their global L2 norm is at most `max_norm`; 0 = leave them.

    Returns:
        The norm before clipping, a scalar on the gradients' device.
    """
    norm = torch.nn.utils.get_total_norm(gradients)
    if max_norm > 0:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, factor)
    return norm


class MasterAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` over master copies of low-precision parameters.

    Parameters in float32 or float64 are their own masters. For others, each gradient is added to a
    float32 sum as soon as autograd has made it, and freed; `step` updates the masters and rounds them
    into the parameters. So neither many backwards per step nor small updates lose bits.

    Args:
        groups: from `parameter_groups`.
        model: betas and epsilon.
        initial: full-precision values by official name, from which masters start; names not in it
            start from the parameter.
    """

    def __init__(
        self, groups: list[dict[str, Any]], model: ModelConfig, initial: Mapping[str, Tensor] | None = None
    ) -> None:
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        self._names: list[str] = []
        owned = []
        for group in groups:
            masters = []
            for name, parameter in zip(group["names"], group["params"], strict=True):
                master = self._master(parameter, (initial or {}).get(name))
                masters.append(master)
                self._names.append(name)
            owned.append({**group, "params": masters})
        super().__init__(owned, lr=model.lr_init, betas=(model.beta1, model.beta2), eps=model.adam_eps, fused=True)

    def _master(self, parameter: nn.Parameter, initial: Tensor | None) -> nn.Parameter:
        if parameter.dtype in (torch.float32, torch.float64):
            self._pairs.append((parameter, parameter))
            return parameter
        source = parameter if initial is None else initial
        value = source.detach().to(parameter.device, torch.float32, copy=True).view(parameter.shape)
        master = nn.Parameter(value)
        self._pairs.append((parameter, master))
        parameter.register_post_accumulate_grad_hook(_add_to(master))
        return master

    def gradients(self) -> dict[str, Tensor]:
        """Accumulated gradients by official name; parameters without one are left out."""
        pairs = zip(self._names, self._pairs, strict=True)
        return {name: master.grad for name, (_, master) in pairs if master.grad is not None}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the masters and round them into the parameters."""
        loss = super().step(closure)
        self._round()
        return loss

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Zero the gradient sums where they lie: CUDA graphs have recorded their addresses."""
        gradients = list(self.gradients().values())
        if gradients and not set_to_none:
            torch._foreach_zero_(gradients)
        elif set_to_none:
            super().zero_grad(set_to_none=True)

    def _round(self) -> None:
        copies = [(p, m) for p, m in self._pairs if p is not m]
        if copies:
            torch._foreach_copy_([p.data for p, _ in copies], [m.data for _, m in copies])

    def state_dict(self) -> dict[str, Any]:
        """Moments, groups, and the masters that are not parameters themselves."""
        state = super().state_dict()
        state["masters"] = {n: m.detach() for n, (p, m) in zip(self._names, self._pairs, strict=True) if p is not m}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` gave; the parameters are set from the masters."""
        state = dict(state_dict)
        masters = state.pop("masters", {})
        super().load_state_dict(state)
        with torch.no_grad():
            for name, (parameter, master) in zip(self._names, self._pairs, strict=True):
                if parameter is not master:
                    master.copy_(masters[name])
        self._round()


def _add_to(master: nn.Parameter) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if master.grad is None:
            master.grad = parameter.grad.to(master.dtype)
        else:
            master.grad.add_(parameter.grad)
        parameter.grad = None

    return hook
