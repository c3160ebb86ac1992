"""Reads what config.json says about quantised weights, before any weight is read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, Literal

from forkpoint.checks import member, read_json
from forkpoint.errors import ModelFolderError, UnsupportedModelError
from forkpoint.models.fields import Fields, canonical_name
from forkpoint.ops.linear.scaled import BLOCK

SUPPORTED: Final = (
    "forkpoint runs models that are not quantised, and FP8 (e4m3) with a scale for each matrix, row or "
    f"{BLOCK}x{BLOCK} block (quant_method 'fp8', 'modelopt' or 'compressed-tensors'); most models are also published "
    "as one of these"
)
MODELOPT_NAME: Final = "hf_quant_config.json"
# Small matrices that matter much for quality. Published FP8 models leave them unquantised.
KEPT_PLAIN: Final = ("lm_head", r"re:.*\.gate$", r"re:.*_gate$", r"re:.*\.(in_proj_(ba|b|a)|[ab]_proj)$")
Scales = Literal["block", "row", "tensor"]
# modelopt's algorithm -> what shares a scale
MODELOPT_FP8: Final[Mapping[str, Scales]] = {
    "FP8": "tensor",
    "FP8_PER_CHANNEL_PER_TOKEN": "row",
    "FP8_PB_WO": "block",
}
COMPRESSED_FP8: Final[Mapping[str, Scales]] = {"tensor": "tensor", "channel": "row", "block": "block"}
# What modules are called inside other checkpoints of the same model.
_OTHER_ROOTS: Final = ("model.language_model.", "language_model.model.", "backbone.")


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How a folder stores its quantised matrices.

    `methods`: the values of --quantization that name this format. `scales`: what shares a scale of a matrix in FP8: a
    block of 128x128, a row or the whole matrix. `plain` names modules that are not quantised, in the notation of
    config.json. `on_load`: the folder is not quantised, and its matrices are quantised when they are read.
    """

    methods: tuple[str, ...] = ("fp8",)
    scales: Scales = "block"
    plain: tuple[str, ...] = KEPT_PLAIN
    on_load: bool = False

    @property
    def by_block(self) -> bool:
        """Whether matrices in FP8 have a scale for each block of 128x128."""
        return self.scales == "block"

    def covers(self, name: str) -> bool:
        """Return whether the matrix with this canonical name (`model.layers.0...`) is quantised."""
        module = name.removesuffix(".weight")
        return not any(_names(entry, module) for entry in self.plain)

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the stored scales of a matrix `[..., N, K]`."""
        *lead, rows, columns = shape
        if self.scales == "tensor":
            return (*lead, 1, 1)
        if self.scales == "row":
            return (*lead, rows, 1)
        return (*lead, -(-rows // BLOCK), -(-columns // BLOCK))


def read_format(fields: Fields, folder: Path, wanted: str | None) -> WeightFormat | None:
    """Return how a folder stores its matrices; None if they are not quantised.

    `wanted` is the value of --quantization. It names the folder's format, or is 'fp8' for a folder that is not
    quantised. Raises UnsupportedModelError, naming the unsupported format, or if `wanted` is another one.
    """
    found = fields.values.get("quantization_config") or fields.values.get("compression_config")
    where = fields.where
    if found is None and (folder / MODELOPT_NAME).is_file():
        where = str(folder / MODELOPT_NAME)
        found = {**read_json(folder / MODELOPT_NAME), "quant_method": "modelopt"}
    if found is not None and not isinstance(found, dict):
        raise ModelFolderError(f"{where} has quantization_config={found!r}; a JSON object is needed")
    stored = None if found is None else _read(found, where)
    if wanted is None or (stored is not None and wanted in stored.methods):
        return stored
    if stored is not None:
        raise UnsupportedModelError(
            f"quantization={wanted!r} is not the format of {where}; give {' or '.join(map(repr, stored.methods))}, or "
            "leave the option out"
        )
    if wanted != "fp8":
        raise UnsupportedModelError(
            f"quantization={wanted!r} is not possible for {where}, which names no quantised weights; give 'fp8' to "
            "quantise them as they load, or leave the option out"
        )
    return WeightFormat(on_load=True)


def _read(found: Mapping[str, Any], where: str) -> WeightFormat:
    method = found.get("quant_method")
    if method == "fp8":
        return _read_fp8(found, where)
    if method == "compressed-tensors":
        return _read_compressed(found, where)
    if str(method).startswith("modelopt") or (method is None and "quant_algo" in found):
        return _read_modelopt(found, where)
    details = [str(found[key]) for key in ("quant_algo", "quant_type") if key in found]
    if found.get("bits") or found.get("load_in_4bit"):
        details.append(f"{found.get('bits', 4)} bits")
    raise refused(where, " ".join([f"quant_method {method!r}", *details]))


def _read_fp8(found: Mapping[str, Any], where: str) -> WeightFormat:
    size = found.get("weight_block_size")
    if size not in ([BLOCK, BLOCK], None):
        raise refused(where, f"FP8 with weight_block_size {size}")
    allowed: dict[str, tuple[Any, ...]] = {
        "fmt": (None, "e4m3", "float8_e4m3fn"),
        "activation_scheme": (None, "dynamic", "static"),
        "expert_dtype": (None, "fp8"),
        "modules_to_convert": (None, []),
    }
    for name, values in allowed.items():
        if found.get(name) not in values:
            raise refused(where, f"FP8 with {name} {found[name]!r}")
    plain = names_of(found, where, "modules_to_not_convert", "ignored_layers")
    return WeightFormat(("fp8",), "tensor" if size is None else "block", plain)


def _read_modelopt(found: Mapping[str, Any], where: str) -> WeightFormat:
    """Read modelopt's format from config.json, or from a file of its own, where it is one level deeper."""
    inner = found.get("quantization")
    given = inner if isinstance(inner, dict) else found
    algorithm = str(given.get("quant_algo") or "format without a quant_algo")
    scales = MODELOPT_FP8.get(algorithm.upper())
    if scales is None:
        raise refused(where, f"modelopt's {algorithm}")
    return WeightFormat(("modelopt",), scales, names_of(given, where, "ignore", "exclude_modules"))


def _read_compressed(found: Mapping[str, Any], where: str) -> WeightFormat:
    groups = found.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ModelFolderError(
            f"{where} has compressed-tensors without config_groups; an object with at least one group is needed"
        )
    strategies = {_strategy(group, found, where) for group in groups.values()}
    if len(strategies) > 1:
        raise refused(where, f"compressed-tensors with scales by {' and '.join(sorted(strategies))} in one model")
    plain = names_of(found, where, "ignore")
    return WeightFormat(("compressed-tensors",), COMPRESSED_FP8[strategies.pop()], plain)


def _strategy(group: Any, found: Mapping[str, Any], where: str) -> str:
    """Return what shares a scale in a group whose weights are in FP8."""
    weights = member(group, "weights")
    if not isinstance(weights, dict):
        raise ModelFolderError(f"{where} has a group of compressed-tensors without a 'weights' object: {group!r}")
    form = group.get("format") or found.get("format")
    kind, bits, strategy = weights.get("type"), weights.get("num_bits"), str(weights.get("strategy"))
    if (kind, bits) != ("float", 8) or form not in ("float-quantized", "naive-quantized"):
        raise refused(where, f"compressed-tensors' {form} ({bits}-bit {kind})")
    if strategy not in COMPRESSED_FP8:
        raise refused(where, f"compressed-tensors' FP8 with a scale for each {strategy}")
    if strategy == "block" and weights.get("block_structure") not in ([BLOCK, BLOCK], f"{BLOCK}x{BLOCK}"):
        raise refused(where, f"compressed-tensors' FP8 in blocks of {weights.get('block_structure')}")
    return strategy


def names_of(found: Mapping[str, Any], where: str, *keys: str) -> tuple[str, ...]:
    """Return the module names in the first of `keys` that is given. Raises ModelFolderError."""
    key = next((key for key in keys if found.get(key) is not None), keys[0])
    names = found.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelFolderError(f"{where} has {key}={names!r}; a list of module names is needed")
    return tuple(names)


def _names(entry: str, module: str) -> bool:
    """Return whether an entry of a module list covers `module`.

    An entry is a regular expression after "re:", a pattern with wildcards, or a run of components of a module's name.
    """
    aliases = [module, *(module.replace("model.", root, 1) for root in _OTHER_ROOTS if module.startswith("model."))]
    if entry.startswith("re:"):
        return any(re.match(entry[3:], name) for name in aliases)
    if "*" in entry:
        return any(fnmatchcase(name, entry) for name in aliases)
    return any(f".{name}.".find(f".{canonical_name(entry)}.") >= 0 for name in aliases)


def refused(where: str, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{where} has weights in {what}; {SUPPORTED}")
