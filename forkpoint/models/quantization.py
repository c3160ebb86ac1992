"""Reads what config.json says about quantised weights, before any weight is read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from forkpoint.checks import member, read_json
from forkpoint.errors import ModelFolderError, UnsupportedModelError
from forkpoint.models.fields import Fields, canonical_name
from forkpoint.ops.linear.scaled import BLOCK

SUPPORTED: Final = (
    "forkpoint runs models that are not quantised, and FP8 (e4m3) with dynamically scaled activations and a "
    f"scale for each {BLOCK}x{BLOCK} block (quant_method 'fp8', or compressed-tensors' strategy 'block') or each row "
    "(its strategy 'channel'); most models are also published as one of these"
)
MODELOPT_NAME: Final = "hf_quant_config.json"
# Small matrices that matter much for quality. Published FP8 models leave them unquantised.
KEPT_PLAIN: Final = ("lm_head", r"re:.*\.gate$", r"re:.*_gate$", r"re:.*\.(in_proj_(ba|b|a)|[ab]_proj)$")


@dataclass(frozen=True, slots=True)
class Fp8Format:
    """How a folder stores matrices in FP8. The scales of tensor `name` are called `name + scale_suffix`.

    `by_block`: one scale for each 128x128 block, otherwise for each row. `plain` names modules that are not in FP8, in
    the notation of config.json. `on_load`: the folder is not quantised, and its matrices are quantised when they are
    read.
    """

    scale_suffix: str = "_scale_inv"
    by_block: bool = True
    plain: tuple[str, ...] = KEPT_PLAIN
    on_load: bool = False

    def covers(self, name: str) -> bool:
        """Return whether the matrix with this canonical name (`model.layers.0...`) is in FP8."""
        module = name.removesuffix(".weight")
        return not any(_names(entry, module) for entry in self.plain)

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the scales of a matrix `[..., N, K]`."""
        *lead, rows, columns = shape
        if not self.by_block:
            return (*lead, rows, 1)
        return (*lead, -(-rows // BLOCK), -(-columns // BLOCK))


def read_quantization(fields: Fields) -> Fp8Format | None:
    """Read the quantisation of config.json; None if the weights are not quantised.

    Raises UnsupportedModelError, naming the unsupported format.
    """
    found = fields.values.get("quantization_config") or fields.values.get("compression_config")
    if found is None:
        return None
    if not isinstance(found, dict):
        raise ModelFolderError(f"{fields.where} has quantization_config={found!r}; a JSON object is needed")
    method = found.get("quant_method")
    if method == "fp8":
        return _read_fp8(found, fields.where)
    if method == "compressed-tensors":
        return _read_compressed(found, fields.where)
    details = [str(found[key]) for key in ("quant_algo", "quant_type") if key in found]
    if found.get("bits") or found.get("load_in_4bit"):
        details.append(f"{found.get('bits', 4)} bits")
    raise _refused(fields.where, " ".join([f"quant_method {method!r}", *details]))


def refuse_modelopt(folder: Path) -> None:
    """Refuse a folder whose quantisation is described in modelopt's own file. Raises UnsupportedModelError."""
    path = folder / MODELOPT_NAME
    if path.is_file():
        algorithm = member(read_json(path).get("quantization"), "quant_algo")
        raise _refused(str(path), f"modelopt's {algorithm or 'format'}")


def _read_fp8(found: Mapping[str, Any], where: str) -> Fp8Format:
    size = found.get("weight_block_size")
    if size != [BLOCK, BLOCK]:
        given = "one scale for a whole matrix (no weight_block_size)" if size is None else f"weight_block_size {size}"
        raise _refused(where, f"FP8 with {given}")
    allowed: dict[str, tuple[Any, ...]] = {
        "fmt": (None, "e4m3", "float8_e4m3fn"),
        "activation_scheme": (None, "dynamic"),
        "expert_dtype": (None, "fp8"),
        "modules_to_convert": (None, []),
    }
    for name, values in allowed.items():
        if found.get(name) not in values:
            raise _refused(where, f"FP8 with {name} {found[name]!r}")
    plain = _names_of(found, where, "modules_to_not_convert", "ignored_layers")
    return Fp8Format("_scale_inv", by_block=True, plain=plain)


def _read_compressed(found: Mapping[str, Any], where: str) -> Fp8Format:
    groups = found.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ModelFolderError(
            f"{where} has compressed-tensors without config_groups; an object with at least one group is needed"
        )
    if found.get("kv_cache_scheme"):
        raise _refused(where, "compressed-tensors with a kv_cache_scheme")
    strategies = {_strategy(group, found, where) for group in groups.values()}
    if len(strategies) > 1:
        raise _refused(where, f"compressed-tensors with scales by {' and '.join(sorted(strategies))} in one model")
    return Fp8Format("_scale", strategies == {"block"}, _names_of(found, where, "ignore"))


def _strategy(group: Any, found: Mapping[str, Any], where: str) -> str:
    """Return 'block' or 'channel' for a group whose weights are in FP8."""
    weights = member(group, "weights")
    if not isinstance(weights, dict):
        raise ModelFolderError(f"{where} has a group of compressed-tensors without a 'weights' object: {group!r}")
    form = group.get("format") or found.get("format")
    kind, bits, strategy = weights.get("type"), weights.get("num_bits"), str(weights.get("strategy"))
    if (kind, bits) != ("float", 8) or form not in ("float-quantized", "naive-quantized"):
        raise _refused(where, f"compressed-tensors' {form} ({bits}-bit {kind})")
    if strategy not in ("channel", "block"):
        raise _refused(where, f"compressed-tensors' FP8 with a scale for each {strategy}")
    if strategy == "block" and weights.get("block_structure") not in ([BLOCK, BLOCK], f"{BLOCK}x{BLOCK}"):
        raise _refused(where, f"compressed-tensors' FP8 in blocks of {weights.get('block_structure')}")
    inputs = group.get("input_activations")
    if isinstance(inputs, dict) and inputs.get("dynamic") is not True:
        raise _refused(where, "compressed-tensors' FP8 with fixed scales of activations")
    return strategy


def _names_of(found: Mapping[str, Any], where: str, *keys: str) -> tuple[str, ...]:
    key = next((key for key in keys if found.get(key) is not None), keys[0])
    names = found.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelFolderError(f"{where} has {key}={names!r}; a list of module names is needed")
    return tuple(names)


def _names(entry: str, module: str) -> bool:
    """Return whether an entry of a module list covers `module`: as a pattern, or as a run of components of its name."""
    if entry.startswith("re:"):
        inside = module.replace("model.", "model.language_model.", 1)  # the module's name inside a multimodal folder
        return any(re.match(entry[3:], name) for name in (module, inside))
    name = canonical_name(entry)
    return f".{module}.".find(f".{name}.") >= 0


def _refused(where: str, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{where} has weights in {what}; {SUPPORTED}")
