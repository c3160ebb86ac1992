"""The cost model against measured steps, and its calibration to them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from forkpoint.sim.cost import H200, CostModel, StepLoad
from forkpoint.sim.shape import QWEN3_5_9B
from studies.calibration import MeasuredStep, calibrate, read_steps
from studies.simulate import main

STEPS = Path(__file__).parents[2] / "docs" / "benchmarks" / "simulator" / "steps_h200.json"


def measured_steps() -> list[MeasuredStep]:
    model, steps = read_steps(STEPS)
    assert model == "qwen3.5-9b"
    return steps


def errors_of(model: CostModel, steps: list[MeasuredStep]) -> list[float]:
    return [abs(model.step_s(step.load) / step.seconds - 1) for step in steps]


def test_measured_steps_are_met() -> None:
    """Every step within 10 %, half of them within 1.5 %."""
    steps = measured_steps()
    assert len(steps) > 100
    errors = errors_of(CostModel(QWEN3_5_9B, H200), steps)
    assert max(errors) < 0.1 and float(np.median(errors)) < 0.015


def test_steps_that_were_not_fitted_are_met_as_well() -> None:
    """Fitted to every fourth step, from shares that know nothing of this device."""
    blank = replace(H200, linear=0.8, attention=0.8, decode_attention=0.8, prefill_states=0.3, step_s=0.002)
    steps = measured_steps()
    fitted = calibrate(CostModel(QWEN3_5_9B, blank), steps[::4])
    errors = errors_of(fitted, [step for index, step in enumerate(steps) if index % 4])
    assert max(errors) < 0.12 and float(np.median(errors)) < 0.02


def test_calibration_finds_the_device_behind_the_steps() -> None:
    truth = replace(H200, linear=0.7, attention=0.5, decode_states=0.6, step_s=0.001)
    hidden = CostModel(QWEN3_5_9B, truth)
    loads = [StepLoad(n, n * n / 2, 1, 0, 0, 0, 1) for n in (512, 2048, 8192)]
    loads += [StepLoad(4096, 4096.0 * s, 1, 0, 0, 0, 1) for s in (20_000, 60_000)]
    loads += [StepLoad(0, 0, 0, n, n * k, 0, n) for n in (1, 32, 128, 256) for k in (300, 4000)]
    found = calibrate(CostModel(QWEN3_5_9B, H200), [MeasuredStep(load, hidden.step_s(load)) for load in loads])
    for load in loads:
        assert found.step_s(load) == pytest.approx(hidden.step_s(load), rel=0.05)


def test_the_command_fits_its_device(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["chat:sessions=2", "--memory", "4", "--jobs", "1", "--steps"]
    assert main([*arguments, str(STEPS)]) == 0
    assert "chat" in capsys.readouterr().out
    assert main([*arguments, "nothing.json"]) == 2
    assert "error: nothing.json is not a file of measured steps" in capsys.readouterr().err
