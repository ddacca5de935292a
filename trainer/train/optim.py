"""AdamW with float32 master weights and float32 gradient accumulation, whatever the weights' dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from trainer.checkpoint.pieces import MASTER, Piece
from trainer.config.schema import ModelConfig
from trainer.model.naming import optimizer_group
from trainer.ops.step_kernels import add_gradients

__all__ = [
    "MOMENTS",
    "MasterAdamW",
    "adam_state",
    "clip_by_global_norm",
    "num_updates",
    "parameter_groups",
    "set_num_updates",
]

MOMENTS = ("exp_avg", "exp_avg_sq")
"""What Adam keeps of every element."""

# Elements; keeps every parameter on a 128-byte boundary, as matrix products like it.
_ALIGN = 64
# Elements; smaller gradients wait for the end of the backward pass and are added together.
_SMALL = 1 << 20
_LR_SCALE = {"1x": 1.0, "2x": 2.0, "decay": 1.0}


def parameter_groups(named: Iterable[tuple[str, nn.Parameter]], model: ModelConfig) -> list[dict[str, Any]]:
    """The official optimizer groups [1x, 2x, decay], names sorted in each.

    Args:
        named: official names and parameters, as `RWKV7.named_parameters()` gives them.
        model: settings.

    Returns:
        Groups with params, names, lr, lr_scale and weight_decay, of parameters that are trained. Without weight decay the matrices of
        `decay` are in `1x`.
    """
    buckets: dict[str, list[tuple[str, nn.Parameter]]] = {"1x": [], "2x": [], "decay": []}
    for name, parameter in sorted(named, key=lambda pair: pair[0]):
        if not parameter.requires_grad:
            continue
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

    They also stay as they are if the norm is not finite, so that the cause can be found.

    Returns:
        The norm before clipping, a scalar on the gradients' device.
    """
    norm = torch.nn.utils.get_total_norm(gradients)
    if max_norm > 0:
        factor = torch.where(norm.isfinite(), (max_norm / (norm + 1e-6)).clamp(max=1.0), 1.0)
        torch._foreach_mul_(gradients, factor)
    return norm


class MasterAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` over flat float32 masters of all parameters, one flat tensor per group.

    Construction moves the parameters: their `data` become views of one flat tensor per group, in their own dtype.
    Their gradients are summed in float32 in a flat tensor beside the masters (in float64 for float64 parameters), of
    which each parameter's `main_grad` is its view. So neither many backwards per step nor small updates lose bits,
    and an update is a few launches whatever the number of tensors. Parameters in float32 or float64 are their own
    masters.

    Args:
        groups: from `parameter_groups`.
        model: betas and epsilon.
        initial: full-precision values by official name, from which masters start; names not in it start from
            the parameter.
    """

    def __init__(
        self, groups: list[dict[str, Any]], model: ModelConfig, initial: Mapping[str, Tensor] | None = None
    ) -> None:
        self._masters: dict[str, Tensor] = {}
        self._sums: dict[str, Tensor] = {}
        self._low: list[tuple[Tensor, nn.Parameter]] = []
        self._waiting: list[tuple[Tensor, Tensor]] = []
        owned = [self._owned(group, initial or {}) for group in groups]
        super().__init__(owned, lr=model.lr_init, betas=(model.beta1, model.beta2), eps=model.adam_eps, fused=True)

    def _owned(self, group: dict[str, Any], initial: Mapping[str, Tensor]) -> dict[str, Any]:
        sizes = (-(-parameter.numel() // _ALIGN) * _ALIGN for parameter in group["params"])
        *offsets, total = accumulate(sizes, initial=0)
        return {**group, "params": [self._flatten(group, initial, [*offsets, total])], "offsets": offsets}

    def _flatten(self, group: dict[str, Any], initial: Mapping[str, Tensor], offsets: list[int]) -> nn.Parameter:
        """Move a group's parameters into a flat tensor; returns their flat masters."""
        parameters: list[nn.Parameter] = group["params"]
        low, device = parameters[0].dtype, parameters[0].device
        wide = low if low in (torch.float32, torch.float64) else torch.float32
        masters = nn.Parameter(torch.zeros(offsets[-1], dtype=wide, device=device))
        masters.grad = torch.zeros_like(masters)
        values = masters.data if low == wide else torch.zeros(offsets[-1], dtype=low, device=device)
        for name, parameter, start in zip(group["names"], parameters, offsets, strict=False):
            part = slice(start, start + parameter.numel())
            self._masters[name] = masters.data[part].view(parameter.shape)
            # A parameter that is its own master holds the initial value already, in full precision.
            source = parameter.detach() if low == wide else initial.get(name, parameter.detach())
            self._masters[name].copy_(source.view(parameter.shape))
            if low != wide:
                values[part].copy_(parameter.detach().flatten())
            parameter.data = values[part].view(parameter.shape)
            self._sums[name] = parameter.main_grad = masters.grad[part].view(parameter.shape)  # type: ignore[attr-defined]
            parameter.register_post_accumulate_grad_hook(self._add_to_main_grad)  # type: ignore[no-untyped-call]
        if low != wide:
            self._low.append((values, masters))
        return masters

    def _add_to_main_grad(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        # Autograd calls this without a gradient for the head, whose gradient the loss has added by itself.
        if gradient is None:
            return
        parameter.grad = None
        total: Tensor = parameter.main_grad  # type: ignore[attr-defined]
        if not gradient.is_cuda or gradient.numel() > _SMALL:
            add_gradients([total], [gradient])
            return
        if not self._waiting:
            torch.autograd.Variable._execution_engine.queue_callback(self._add_waiting)
        self._waiting.append((total, gradient))

    def _add_waiting(self) -> None:
        """At the end of a backward pass."""
        waiting, self._waiting = self._waiting, []
        add_gradients(*zip(*waiting, strict=True))

    def gradients(self) -> dict[str, Tensor]:
        """Summed gradients by official name; zero for parameters that the model does not use."""
        return self._sums

    def flat_gradients(self) -> list[Tensor]:
        """The same as a few flat tensors."""
        flat = [group["params"][0].grad for group in self.param_groups]
        return [gradient for gradient in flat if gradient is not None]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the masters and round them into the parameters."""
        loss: float | None = super().step(closure)
        self._round()
        return loss

    def _round(self) -> None:
        for values, masters in self._low:
            values.copy_(masters.data)

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Zero the sums where they lie; they are never freed, since parameters and CUDA graphs point to them."""
        self._waiting.clear()
        for gradient in self.flat_gradients():
            gradient.zero_()

    def pieces(self) -> list[Piece]:
        """Masters (where they are not the parameters themselves) and moments of every parameter, as views."""
        found = []
        for group in self.param_groups:
            state = adam_state(self, group["params"][0])
            for name, start in zip(group["names"], group["offsets"], strict=True):
                master = self._masters[name]
                part = slice(start, start + master.numel())
                tensors = {kind: state[kind][part] for kind in MOMENTS}
                if self._low:
                    tensors[MASTER] = master.detach().view(-1)
                found.append(Piece(name, tuple(master.shape), 0, tensors))
        return found

    def state_dict(self) -> dict[str, Any]:
        """Number of updates done, and the state by parameter."""
        return {"updates": num_updates(self), "pieces": self.pieces()}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what a checkpoint has of any strategy; the parameters are set from the masters.

        Args:
            state_dict: `updates`, and `saved`: the checkpoint's `SavedPieces`.
        """
        state_dict["saved"].restore(self.pieces())
        set_num_updates(self, state_dict["updates"])
        self._round()


def adam_state(optimizer: torch.optim.Optimizer, flat: Tensor) -> dict[str, Tensor]:
    """Adam's state of one of its tensors, which is made here before the first update."""
    state: dict[str, Tensor] = optimizer.state[flat]
    if not state:
        # As AdamW itself does: a fused one counts where the tensor is.
        device = flat.device if optimizer.defaults.get("fused") else "cpu"
        state["step"] = torch.zeros((), dtype=torch.float32, device=device)
        state |= {kind: torch.zeros_like(flat.detach()) for kind in MOMENTS}
    return state


def num_updates(optimizer: torch.optim.Optimizer) -> int:
    """Updates that an AdamW has done; its bias correction depends on them."""
    return max((int(state["step"]) for state in optimizer.state.values()), default=0)


def set_num_updates(optimizer: torch.optim.Optimizer, updates: int) -> None:
    """Let an AdamW whose state exists go on after so many updates."""
    for state in optimizer.state.values():
        state["step"].fill_(updates)
