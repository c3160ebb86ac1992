"""transformers' models in float64, and operators that are compared with float64 one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from torch.overrides import TorchFunctionMode

from forkpoint.ops.table import OpTable
from tests.image_models import IMAGE, Part, processed

ROUNDING = 3e-7  # an fp32 operator's error, as a share of its row's root mean square; measured on these models


class InFloat64(TorchFunctionMode):
    """Compute in float64 where the code asks for float32.

    `noise` adds to each linear layer's output a random error of this share of the row's root mean square.
    """

    def __init__(self, noise: float = 0.0) -> None:
        super().__init__()
        self._noise = noise

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        given = [_wider(value) for value in args]
        found = func(*given, **{name: _wider(value) for name, value in (kwargs or {}).items()})
        if self._noise and func is F.linear:
            scale = found.square().mean(-1, keepdim=True).sqrt()
            found = found + self._noise * scale * torch.randn(found.shape, dtype=found.dtype)
        return found


def _wider(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


class Float64Oracle:
    """transformers' model of a multimodal folder in float64, whose routers choose the experts that they are told.

    `scores` are the routers' logits `[T, E]` of each layer of the last run. It is empty for a dense model.
    """

    def __init__(self, folder: Path) -> None:
        options = {"dtype": torch.float64, "experts_implementation": "eager"}
        self._model = transformers.AutoModelForImageTextToText.from_pretrained(folder, **options).eval()
        self.scores: list[Tensor] = []
        self._chosen: Sequence[Tensor] = ()
        for layer in self._model.model.language_model.layers:
            if hasattr(layer.mlp, "gate"):
                layer.mlp.gate.register_forward_hook(self._choose)

    def _choose(self, gate: Any, args: Any, found: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        ids = self._chosen[len(self.scores)].long()
        self.scores.append(found[0])
        shares = found[0].softmax(-1).gather(-1, ids)
        return found[0], shares / shares.sum(-1, keepdim=True), ids

    @torch.no_grad()
    def run(self, ids: Sequence[int], parts: Sequence[Part], chosen: Sequence[Tensor], noise: float = 0.0) -> Tensor:
        """Return the logits of `ids`, whose images are those of `parts`. `chosen` are each layer's experts."""
        pictures = [part for part in parts if not isinstance(part, list)]
        inputs: Mapping[str, Tensor] = processed(pictures) if pictures else {}
        wide = {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}
        x = torch.tensor([list(ids)])
        self.scores, self._chosen = [], chosen
        with InFloat64(noise):
            types = (x == IMAGE).int()
            logits: Tensor = self._model(input_ids=x, mm_token_type_ids=types, use_cache=False, **wide).logits[0]
        return logits


class _Packed:
    """A weight as each of two tables packs it."""

    def __init__(self, first: Any, second: Any) -> None:
        self.both = first, second


class Compared:
    """A table that runs `torch_ops` and notes how far its results and those of `others` are from float64.

    `errors[name]` are pairs of one operator's relative errors `[rows]`, those of `torch_ops` first.
    """

    def __init__(self, torch_ops: OpTable, others: OpTable, names: Sequence[str]) -> None:
        self.errors: dict[str, list[tuple[Tensor, Tensor]]] = {}
        replaced: dict[str, Any] = {
            name: self._pack(*_both(name, torch_ops, others)) for name in ("prepare_linear", "prepare_experts")
        }
        replaced |= {name: self._note(name, *_both(name, torch_ops, others)) for name in names}
        self.table = replace(torch_ops, **replaced)

    def _pack(self, first: Callable[..., Any], second: Callable[..., Any]) -> Callable[..., _Packed]:
        return lambda *args: _Packed(first(*args), second(*args))

    def _note(self, name: str, first: Callable[..., Any], second: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, out: Any = None, **named: Any) -> Any:
            with InFloat64():
                want = first(*_changed(args, 0, _double), **_changed(named, 0, _double))
            other = second(*_changed(args, 1, Tensor.clone), **_changed(named, 1, Tensor.clone))
            found = first(*_changed(args, 0, lambda x: x), **_changed(named, 0, lambda x: x))
            for exact, ours, theirs in zip(_floats(want), _floats(found), _floats(other), strict=True):
                pair = relative_error(ours, exact), relative_error(theirs, exact)
                self.errors.setdefault(name, []).append(pair)
            return found

        return run


def _both(name: str, *tables: OpTable) -> tuple[Callable[..., Any], Callable[..., Any]]:
    first, second = (getattr(table, name) for table in tables)
    return first, second


def relative_error(got: Tensor, want: Tensor) -> Tensor:
    """Return each row's error as a share of the row's length: `[rows, ...] -> [rows]`."""
    got, want = got.double().flatten(1), want.double().flatten(1)
    error: Tensor = (got - want).norm(dim=1) / want.norm(dim=1).clamp(min=1e-30)
    return error


def _double(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x.clone()


def _floats(found: Any) -> list[Tensor]:
    if isinstance(found, Tensor):
        return [found] if found.is_floating_point() else []
    return [each for part in found for each in _floats(part)]


def _changed(value: Any, table: int, change: Callable[[Tensor], Tensor]) -> Any:
    """Return arguments whose tensors are changed, and whose packed weights are those of table 0 or 1.

    The weights of table 1 stay as they are.
    """
    if isinstance(value, _Packed):
        packed = value.both[table]
        return packed if table else _changed(packed, table, change)
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {name: _changed(each, table, change) for name, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_changed(each, table, change) for each in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_changed(each, table, change) for each in value)
    if is_dataclass(value) and not isinstance(value, type):
        tensors = [field.name for field in fields(value) if isinstance(getattr(value, field.name), Tensor)]
        if any(getattr(value, name).is_floating_point() for name in tensors):  # constants; indexes stay as they are
            return replace(value, **{name: _changed(getattr(value, name), table, change) for name in tensors})
    return value
