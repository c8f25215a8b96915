"""AdamW on the parameters that train, with float32 master weights where the model's own are coarser."""

from __future__ import annotations

from typing import Any

import torch

from cortex_training.local.engine.language_model import Weights
from cortex_training.local.tuning import AdamWSettings


class Optimizer:
    """`parameters` are updated in place from their `.grad`.

    bfloat16 keeps 8 bits of mantissa: an update of a thousandth of a weight would vanish in it. Such parameters are
    stepped in float32 and then rounded, as mixed-precision training does.
    """

    def __init__(self, parameters: dict[str, torch.nn.Parameter], settings: AdamWSettings) -> None:
        self._parameters = parameters
        self._masters: dict[str, torch.Tensor] = {
            name: parameter.detach().to(torch.float32).clone() if parameter.dtype != torch.float32 else parameter
            for name, parameter in parameters.items()
        }
        self._adamw = torch.optim.AdamW(
            list(self._masters.values()),
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )

    @property
    def learning_rate(self) -> float:
        return float(self._adamw.param_groups[0]["lr"])

    def set_learning_rate(self, learning_rate: float) -> None:
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate

    def step(self, clip_to: float | None) -> float:
        """Apply the accumulated gradients, clipped to a norm of `clip_to`, and clear them. Returns the norm before."""
        for name, parameter in self._parameters.items():
            master = self._masters[name]
            if master is not parameter:
                master.grad = None if parameter.grad is None else parameter.grad.to(torch.float32)
        gradients = [master.grad for master in self._masters.values() if master.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if clip_to is not None:
            torch.nn.utils.clip_grads_with_norm_(self._masters.values(), clip_to, norm)
        self._adamw.step()
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                master = self._masters[name]
                if master is not parameter:
                    parameter.copy_(master)
        self.clear_gradients()
        return float(norm)

    def clear_gradients(self) -> None:
        for name, parameter in self._parameters.items():
            parameter.grad = None
            self._masters[name].grad = None

    def take_weights(self) -> None:
        """Make the master weights those of the model, after the model's were replaced, and forget the moments."""
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                if self._masters[name] is not parameter:
                    self._masters[name].copy_(parameter)
        self._adamw.state.clear()

    def tensors(self) -> Weights:
        """Everything that the next step depends on besides the model's weights, by ``<parameter>/<quantity>``."""
        state: Weights = {}
        for name, master in self._masters.items():
            if master is not self._parameters[name]:
                state[f"{name}/master"] = master.detach().clone()
            for quantity, value in self._adamw.state.get(master, {}).items():
                state[f"{name}/{quantity}"] = value.detach().clone()
        return state

    def require_same_parameters(self, state: Weights) -> None:
        """Raises ValueError unless `state` is of the parameters that train here."""
        unknown = sorted({key.rpartition("/")[0] for key in state} - set(self._masters))
        if unknown:
            raise ValueError(
                f"the optimizer's state is of other parameters: {unknown[0]} does not train in this sub-job"
            )

    def restore(self, state: Weights, learning_rate: float) -> None:
        """Take what `tensors` gave. Raises ValueError when it belongs to other parameters."""
        self.require_same_parameters(state)
        by_parameter: dict[str, dict[str, Any]] = {}
        for key, tensor in state.items():
            name, _, quantity = key.rpartition("/")
            by_parameter.setdefault(name, {})[quantity] = tensor
        self._adamw.state.clear()
        with torch.no_grad():
            for name, quantities in by_parameter.items():
                master = self._masters[name]
                if "master" in quantities:
                    master.copy_(quantities.pop("master"))
                if quantities:
                    # AdamW keeps its step counter on the CPU wherever the weights are.
                    self._adamw.state[master] = {
                        quantity: value.clone() if quantity == "step" else value.to(master.device, copy=True)
                        for quantity, value in quantities.items()
                    }
        self.set_learning_rate(learning_rate)
