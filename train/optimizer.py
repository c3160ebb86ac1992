"""Muon for the matrices inside the layers, and AdamW for everything else."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

MOMENTUM = 0.95
# Coefficients of the quintic whose iteration drives all singular values towards one (K. Jordan's).
QUINTIC = (3.4445, -4.7750, 2.0315)
SMALLEST_MATRIX = 64  # rows; fewer, such as the gates' projections, go to AdamW


@dataclass(frozen=True, slots=True)
class Rates:
    """Learning rates at the plateau."""

    matrices: float = 0.02
    others: float = 0.003


def orthogonalised(matrices: Tensor) -> Tensor:
    """Approximate `U V^T` of the singular value decomposition of each of `[G, m, n]`, in bf16."""
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.float().square().sum((-1, -2), keepdim=True).sqrt() + 1e-7).bfloat16()
    for _ in range(5):
        a, b, c = QUINTIC
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class _Matrices:
    """Parameters of one shape, updated together."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        rows, columns = parameters[0].shape
        self.parameters = parameters
        self.scale = max(1.0, rows / columns) ** 0.5
        self.momentum = torch.zeros(len(parameters), rows, columns, device=parameters[0].device)

    @torch.no_grad()
    def step(self, rate: float) -> None:
        gradients = torch.stack([p.grad for p in self.parameters if p.grad is not None])
        self.momentum.lerp_(gradients, 1.0 - MOMENTUM)
        updates = orthogonalised(gradients.lerp_(self.momentum, MOMENTUM)).float()
        torch._foreach_add_(tuple(self.parameters), updates.unbind(), alpha=-rate * self.scale)


class Optimizer:
    """Updates all parameters of a model. `factor` scales both rates."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], rates: Rates) -> None:
        self.rates = rates
        by_shape: dict[torch.Size, list[nn.Parameter]] = {}
        others: list[nn.Parameter] = []
        self._all: list[nn.Parameter] = []
        for name, parameter in named:
            self._all.append(parameter)
            is_matrix = parameter.dim() == 2 and min(parameter.shape) >= SMALLEST_MATRIX and "embed" not in name
            (by_shape.setdefault(parameter.shape, []) if is_matrix else others).append(parameter)
        self._matrices = [_Matrices(group) for group in by_shape.values()]
        fused = others[0].device.type == "cuda"
        self._others = torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0, fused=fused)

    def step(self, factor: float) -> None:
        """Clip the norm of the gradients to 1, update, and clear the gradients."""
        torch.nn.utils.clip_grad_norm_(self._all, 1.0)
        for group in self._matrices:
            group.step(self.rates.matrices * factor)
        for options in self._others.param_groups:
            options["lr"] = self.rates.others * factor
        self._others.step()
        for parameter in self._all:
            parameter.grad = None
