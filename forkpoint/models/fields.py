"""Reads fields of a model folder's config.json and checks their types."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from importlib import import_module
from importlib.metadata import version
from typing import Any

from forkpoint.errors import ModelFolderError, UnsupportedModelError
from forkpoint.models.rotary import Rotary, frequencies, llama3, proportional, yarn, yarn_gain
from forkpoint.quick_imports import transformers_delayed

ROPE_THETA = 10000.0  # default if config.json has no rope_theta
# Bounds far above those of any published model. A config.json beyond them is broken, and would exhaust memory.
MOST_SIZE = 2**24
MOST = {
    "num_hidden_layers": 2**12,
    "num_experts": 2**16,
    "hc_count": 2**6,
    "hc_mult": 2**6,
    "hc_sinkhorn_iters": 2**10,
    "heads_per_ngram": 2**8,
    "ngram_size": 2**5,
    "ngram_vocab_size_base": 2**28,
    "seed": 2**63 - 1,
}
# The start of names inside a multimodal folder. transformers 5.4 and 5.5 save fine-tunes with three language_model.
_MULTIMODAL = re.compile(r"(?:model\.)?(?:language_model\.)+(?:model\.)?")
_OUTSIDE = ("lm_head.", "mtp.")  # starts of canonical names that do not follow "model."
# float16 is widened to float32, because its range is smaller than that of bfloat16, which the operators use.
_DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float32"}


def canonical_name(name: str, names: Sequence[tuple[str, str]] = ()) -> str:
    """Return the canonical name of a weight or module in a text model, also for one inside a multimodal folder.

    `names` are (family's name, canonical name) parts.
    """
    for theirs, ours in names:
        name = name.replace(theirs, ours)
    found = _MULTIMODAL.match(name)
    if found is None:
        return name
    name = name[found.end() :]
    return name if f"{name}.".startswith(_OUTSIDE) else f"model.{name}"


def class_defaults(place: str) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Return the default of each field of a transformers class, such as "llama.LlamaConfig", and its attribute map.

    A field without a default maps to None. The attribute map lists pairs of names that mean the same field. Raises
    UnsupportedModelError if the installed transformers does not have the class's module, or lacks a package itself.
    """
    module, name = place.split(".")
    path = f"transformers.models.{module}.configuration_{module}"
    try:
        with transformers_delayed():
            found = getattr(import_module(path), name)
    except ModuleNotFoundError as error:
        if error.name is None or not path.startswith(error.name):
            raise UnsupportedModelError(
                f"the installed transformers {version('transformers')} cannot be imported: {error}; install what it "
                "needs (pip install -U transformers)"
            ) from error
        raise UnsupportedModelError(
            f"the installed transformers {version('transformers')} has no {name}, whose defaults this model needs; "
            "install a newer one (pip install -U transformers)"
        ) from error
    defaults = {each.name: None if each.default is MISSING else each.default for each in fields(found)}
    return defaults, [*found.attribute_map.items()]


class RecordedValues(Mapping[str, Any]):
    """The values of a JSON object. `read` collects the names that were looked up, present or not."""

    def __init__(self, values: Mapping[str, Any], read: set[str]) -> None:
        self._values, self.read = values, read

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return self._values[name]

    def __contains__(self, name: object) -> bool:
        self.read.add(str(name))
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def unrecorded(self) -> dict[str, Any]:
        """Return the values as a plain dict, whose look-ups are not recorded."""
        return dict(self._values)

    def replaced(self, values: Mapping[str, Any]) -> RecordedValues:
        """Return these values updated with `values`. The look-ups in both are recorded in one set."""
        return RecordedValues({**self._values, **values}, self.read)


class Fields:
    """One object of a config.json. All methods raise ModelFolderError or UnsupportedModelError, naming the field.

    A null counts as absent. `values.read` has the names of all fields that were read, also through the results of
    `replaced` and `translated`.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values if isinstance(values, RecordedValues) else RecordedValues(values, set())
        self.where = where

    def replaced(self, values: Mapping[str, Any]) -> Fields:
        """Return the same object with other values for some fields."""
        return Fields(self.values.replaced(values), self.where)

    def translated(
        self, names: Mapping[str, str], defaults: Mapping[str, Any], pairs: Sequence[tuple[str, str]]
    ) -> Fields:
        """Return the fields under their common names; `names` maps others to them.

        A field's common name takes precedence over its other names. Both names of a pair are set. `defaults` apply to
        fields that are absent under all of their names.
        """

        def named(values: Mapping[str, Any]) -> dict[str, Any]:
            both = [(one, other) for pair in pairs for one, other in (pair, pair[::-1])]
            missing = {other: values[one] for one, other in both if one in values and other not in values}
            return missing | {ours: values[theirs] for theirs, ours in names.items() if theirs in values}

        given = {name: value for name, value in self.values.unrecorded().items() if value is not None}
        defaults = {name: value for name, value in defaults.items() if value is not None}
        return self.replaced({**defaults, **named(defaults), **self.values.unrecorded(), **named(given)})

    def _checked(self, name: str, default: Any, fits: Callable[[Any], bool], needed: str) -> Any:
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            raise ModelFolderError(f"{self.where} lacks {name!r}; {needed} is needed")
        if not fits(value):
            raise ModelFolderError(f"{self.where} has {name}={value!r}; {needed} is needed")
        return value

    def integer(self, name: str, default: int | None = None, low: int = 1) -> int:
        """Return an integer from `low` to the field's largest allowed value. Without a default it is required."""
        high = MOST.get(name, MOST_SIZE)
        needed = f"an integer from {low} to {high}"
        found: int = self._checked(name, default, lambda v: _is_id(v) and low <= v <= high, needed)
        return found

    def integer_or_auto(self, name: str, automatic: int) -> int:
        """Return a positive integer; `automatic` if the field is absent or "auto"."""
        if self.values.get(name, "auto") == "auto":
            return automatic
        return self.integer(name)

    def real(self, name: str, default: float | None = None) -> float:
        """Return a positive number. Without a default the field is required."""
        return float(self._checked(name, default, lambda v: _is_number(v) and v > 0, "a positive number"))

    def number(self, name: str, default: float) -> float:
        """Return a finite number of either sign."""
        return float(self._checked(name, default, _is_number, "a number"))

    def reals(self, name: str, count: int) -> list[float]:
        """Return `count` positive numbers; ones if the field is absent."""
        needed = f"a list of {count} positive numbers"
        found = self._checked(
            name, [1.0] * count, lambda v: _is_list(v, lambda by: _is_number(by) and by > 0) and len(v) == count, needed
        )
        return [float(by) for by in found]

    def limit_of_layer(self, name: str, layer: int) -> float:
        """Return entry `layer` of a list of numbers of 0 or more; 0 for an entry that is null or absent."""

        def is_limit(value: Any) -> bool:
            return value is None or (_is_number(value) and bool(value >= 0))

        found = self._checked(name, [], lambda v: _is_list(v, is_limit), "a list of numbers of 0 or more")
        return float(found[layer] or 0.0) if layer < len(found) else 0.0

    def indices(self, name: str) -> list[int] | None:
        """Return a list of non-negative integers; None if the field is absent."""
        if self.values.get(name) is None:
            return None
        found: list[int] = self._checked(name, None, lambda v: _is_list(v, _is_id), "a list of integers of 0 or more")
        return found

    def inner(self, name: str) -> Mapping[str, Any]:
        """Return an object; an empty one if the field is absent."""
        found: Mapping[str, Any] = self._checked(name, {}, lambda v: isinstance(v, dict), "an object")
        return found

    def limits(self, name: str) -> tuple[float, float]:
        """Return a lower and an upper bound, 0 <= lower <= upper; 0 and infinity if the field is absent.

        Infinity may be a string in an object, because JSON has no number for it.
        """
        given = self.values.get(name) or (0.0, float("inf"))
        try:
            low, high = (float(v["__float__"] if isinstance(v, dict) else v) for v in given)
        except (KeyError, OverflowError, TypeError, ValueError):
            low, high = 1.0, 0.0
        if not 0 <= low <= high:
            raise ModelFolderError(f"{self.where} has {name}={given!r}; a lower and an upper bound are needed")
        return low, high

    def flag(self, name: str, default: bool) -> bool:
        return bool(self._checked(name, default, lambda v: isinstance(v, bool), "true or false"))

    def multiple(self, name: str, of: int, what: str, default: int | None = None) -> int:
        """Return a positive integer that is a multiple of `of`, the number of the model's `what`."""
        value = self.integer(name, default)
        if value % of:
            raise ModelFolderError(f"{self.where} has {name}={value}, which is not a multiple of the {of} {what}")
        return value

    def require(self, name: str, *allowed: str) -> None:
        """Raise UnsupportedModelError unless the field is absent or has one of the `allowed` values."""
        value = self.values.get(name)
        if value is not None and value not in allowed:
            raise UnsupportedModelError(f"{self.where} has {name}={value!r}; forkpoint runs {', '.join(allowed)}")

    def refuse(self, *names: str) -> None:
        """Raise UnsupportedModelError if one of the fields is true."""
        for name in names:
            if self.flag(name, False):
                raise UnsupportedModelError(f"{self.where} has {name}=true; forkpoint runs this family without it")

    def dtype(self) -> str:
        """Return the dtype to run in, "float32" or "bfloat16": float16 is widened, and no dtype means "float32"."""
        name = "dtype" if self.values.get("dtype") else "torch_dtype"
        self.require(name, *_DTYPES)
        return _DTYPES[self.values.get(name) or "float32"]

    def token_ids(self, name: str) -> tuple[int, ...]:
        """Return a token id, or a list of them, as a tuple; empty if the field is absent."""
        needed = "a token id or a list of them"
        found = self._checked(name, [], lambda v: _is_id(v) or _is_list(v, _is_id), needed)
        if isinstance(found, list):
            return tuple(found)
        return (found,)

    def layer_types(self, kinds: Collection[str], default: Callable[[int], str]) -> list[str]:
        """Return the kind of each layer, one of `kinds`; `default(i)` for each layer i if there is no list."""
        # `kinds` may be a dict; listed values may be anything
        count, allowed = self.integer("num_hidden_layers"), tuple(kinds)
        given = self.values.get("layer_types") or [default(i) for i in range(count)]
        if not isinstance(given, list) or len(given) != count:
            raise ModelFolderError(f"{self.where}: layer_types must list {count} layers, it is {given!r}")
        unknown = sorted({str(kind) for kind in given if kind not in allowed})
        if unknown:
            raise UnsupportedModelError(
                f"{self.where} has layers of type {', '.join(unknown)}; forkpoint runs {', '.join(allowed)} there"
            )
        return given

    def rope(self, layer_kind: str = "") -> Fields:
        """Return these fields updated with those of the object for rotary positions.

        That has an object for each kind of layer if and only if `layer_kind` names one. Raises UnsupportedModelError if
        `rope_scaling`, the object's older name, holds something else than `rope_parameters`.
        """
        newer, older = self.inner("rope_parameters"), self.inner("rope_scaling")
        renamed = {"rope_type" if name == "type" else name: value for name, value in older.items()}
        if newer and not renamed.items() <= newer.items():
            raise UnsupportedModelError(
                f"{self.where} has rope_scaling={older} and rope_parameters={newer}, which contradict each other; "
                "write all values into rope_parameters, and remove rope_scaling"
            )
        rope = newer or older
        by_kind = [name for name, value in rope.items() if isinstance(value, dict)]
        if layer_kind:
            if layer_kind not in by_kind:
                raise ModelFolderError(f"{self.where}: rope_parameters has no object for {layer_kind!r}")
            self.values.read.add(layer_kind)
            rope = rope[layer_kind]
        elif by_kind:
            raise UnsupportedModelError(
                f"{self.where} has rotary positions of their own for {', '.join(by_kind)}; forkpoint runs one kind for "
                "all layers"
            )
        kind = rope.get("rope_type", rope.get("type"))
        theta = self.values.get("rope_theta", ROPE_THETA)
        return self.replaced({"rope_theta": theta, **rope, "rope_type": kind})

    def rotary_of_kind(self, head_dim: int, layer_kind: str) -> Rotary:
        """Return how layers of one kind rotate the dims of a head, where each kind has rotary positions of its own."""
        rope = self.rope(layer_kind)
        rope.require("rope_type", "default", "proportional")
        theta, share, factor = rope.real("rope_theta", ROPE_THETA), 1.0, 1.0
        if rope.values["rope_type"] == "proportional":
            share, factor = rope.real("partial_rotary_factor", 1.0), rope.real("factor", 1.0)
        if head_dim % 2 or share > 1:
            raise ModelFolderError(
                f"{self.where}: a head of {head_dim} dims cannot be rotated by partial_rotary_factor={share}; an even "
                "number of dims and a factor of at most 1 are needed"
            )
        return Rotary(tuple((proportional(head_dim, theta, share) / factor).tolist()))

    def rotary(self, head_dim: int, default_share: float | None = None) -> Rotary:
        """Return how the dims of a head are rotated: all, or with `default_share` the config's share of them."""
        rope, dim = self.rope(), head_dim
        rope.require("rope_type", "default", "linear", "llama3", "yarn")
        theta, kind = rope.real("rope_theta", ROPE_THETA), rope.values["rope_type"]
        if default_share is not None:
            dim = int(head_dim * rope.real("partial_rotary_factor", default_share))
        if dim % 2 or not 0 < dim <= head_dim:
            raise ModelFolderError(f"{self.where}: {dim} rotary dims of a head of {head_dim} cannot be paired")
        plain, gain, longest = frequencies(dim, theta), 1.0, 0
        if kind == "linear":
            plain = plain / rope.real("factor")
        elif kind in ("llama3", "yarn"):
            most, name = self.integer("max_position_embeddings"), "original_max_position_embeddings"
            length = self.integer(name, rope.integer(name, most))
            if kind == "llama3":
                low, high = rope.real("low_freq_factor"), rope.real("high_freq_factor")
                if low >= high:
                    raise ModelFolderError(f"{self.where} has low_freq_factor={low}, not below high_freq_factor={high}")
                plain = llama3(plain, rope.real("factor"), low, high, length)
            else:
                factor, whole = rope.real("factor", most / length), rope.flag("truncate", True)
                fast, slow = rope.real("beta_fast", 32.0), rope.real("beta_slow", 1.0)
                if theta <= 1 or not 1e-6 <= slow <= fast <= 1e6:
                    raise ModelFolderError(
                        f"{self.where} has rope_theta={theta}, beta_slow={slow} and beta_fast={fast}; yarn takes a "
                        "base above 1, and 1e-6 <= beta_slow <= beta_fast <= 1e6"
                    )
                if length * factor > MOST_SIZE:
                    raise ModelFolderError(
                        f"{self.where} has factor={factor}, by which {length} positions are more than {MOST_SIZE}"
                    )
                plain = yarn(plain, theta, factor, fast, slow, length, whole)
                made = yarn_gain(factor, rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0))
                gain, longest = rope.real("attention_factor", made), int(length * factor)
        return Rotary(tuple(plain.tolist()), gain, longest)


def _is_id(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _is_list(value: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(fits, value))
