"""Fits a device's shares of its ceilings to steps that `python -m benchmarks.step_times` measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from forkpoint.errors import ConfigError
from forkpoint.sim.cost import CostModel, StepLoad, StepParts


class MeasuredStep(NamedTuple):
    """A measured step: its load and its duration."""

    load: StepLoad
    seconds: float


def read_steps(path: Path) -> tuple[str, list[MeasuredStep]]:
    """Return (the model's name, its steps) from a file of `python -m benchmarks.step_times`. Raises ConfigError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        steps = [MeasuredStep(StepLoad(**line["load"]), float(line["seconds"])) for line in content["steps"]]
        return str(content["model"]), steps
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not a file of measured steps: {type(error).__name__}: {error}") from error


def calibrate(model: CostModel, steps: Sequence[MeasuredStep]) -> CostModel:
    """Return the cost model with the device's shares and step time fitted to measured steps.

    Minimises the squares of relative errors. Shares that would become negative are left out.
    """
    rows = [[*model.parts(step.load), 1.0] for step in steps]
    matrix = np.asarray(rows) / np.asarray([[step.seconds] for step in steps])
    prior = np.asarray([1 / getattr(model.device, name) for name in StepParts._fields] + [model.device.step_s])
    inverse = _fit_positive(matrix, prior)
    shares = dict(zip(StepParts._fields, (1 / inverse[:-1]).tolist(), strict=True))
    return CostModel(model.shape, replace(model.device, **shares, step_s=float(inverse[-1])))


FloatArray: TypeAlias = npt.NDArray[np.float64]


def _fit_positive(matrix: FloatArray, prior: FloatArray) -> FloatArray:
    """Minimise `|matrix @ x - 1|` near `prior`, with x >= prior / 10. `prior` pulls weakly, for what the steps do not
    show."""
    scale = prior.copy()
    pull = 0.02 * np.sqrt(len(matrix))
    full = np.vstack([matrix * scale, pull * np.eye(len(prior))])
    target = np.concatenate([np.ones(len(matrix)), np.full(len(prior), pull)])
    free = np.ones(len(prior), bool)
    x = np.ones(len(prior))
    while free.any():
        x[~free] = 0.1
        x[free] = np.linalg.lstsq(full[:, free], target - full[:, ~free] @ x[~free], rcond=None)[0]
        low = free & (x < 0.1)
        if not low.any():
            break
        free &= ~low
    fitted: FloatArray = np.maximum(x, 0.1) * scale
    return fitted
