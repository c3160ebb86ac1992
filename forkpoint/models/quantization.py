"""Reads what config.json says about quantised weights, before any weight is read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import gcd
from pathlib import Path
from typing import Any, Final, Literal

import torch

from forkpoint.checks import member, read_json
from forkpoint.errors import ModelFolderError, UnsupportedModelError
from forkpoint.models.fields import Fields, canonical_name
from forkpoint.models.packings import Packing
from forkpoint.ops.linear.scaled import BLOCK

SUPPORTED: Final = (
    "forkpoint runs models that are not quantised, FP8 (e4m3) with a scale for each matrix, row or "
    f"{BLOCK}x{BLOCK} block (quant_method 'fp8', 'modelopt' or 'compressed-tensors'), and 4 bits as 'gptq', 'awq', "
    "'auto-round', 'compressed-tensors' (pack-quantized, nvfp4-pack-quantized) and 'modelopt' (NVFP4) pack them; most "
    "models are also published as one of these"
)
MODELOPT_NAME: Final = "hf_quant_config.json"
ASCEND_NAME: Final = "quant_model_description.json"  # msModelSlim writes it for Ascend NPUs
# Small matrices that matter much for quality. Published FP8 models leave them unquantised.
KEPT_PLAIN: Final = ("lm_head", r"re:.*\.gate$", r"re:.*_gate$", r"re:.*\.(in_proj_(ba|b|a)|[ab]_proj)$")
Scales = Literal["block", "row", "tensor"]
FINEST_FIRST: Final[tuple[Scales, ...]] = ("block", "row", "tensor")
Kind = Literal["fp8", "integer", "float"]
# modelopt's algorithm -> what shares a scale
MODELOPT_FP8: Final[Mapping[str, Scales]] = {
    "FP8": "tensor",
    "FP8_PER_CHANNEL_PER_TOKEN": "row",
    "FP8_PB_WO": "block",
}
UNQUANTIZED: Final = "UNQUANTIZED"  # modelopt's name for a layer that is left out
MODELOPT_FP4: Final = ("NVFP4", "W4A16_NVFP4")
# auto-round's packing_format -> the packing
AUTO_ROUND: Final[Mapping[str, Packing]] = {
    "auto_round": "gptq_v2",
    "auto_round:gptqmodel": "gptq_v2",
    "auto_round:auto_gptq": "gptq",
    "auto_round:auto_awq": "awq",
}
COMPRESSED_FP8: Final[Mapping[str, Scales]] = {"tensor": "tensor", "channel": "row", "block": "block"}
# What modules are called inside other checkpoints of the same model.
_OTHER_ROOTS: Final = ("model.language_model.", "language_model.model.", "backbone.")


@dataclass(frozen=True, slots=True)
class Form:
    """How a matrix is kept: in FP8, or in 4-bit integers or floats with a scale for each `group` columns.

    `order` are the bytes of the int64 columns in the order of their codes; None: their own order.
    """

    kind: Kind
    group: int = 0
    order: bytes | None = None

    def column_order(self, device: torch.device) -> torch.Tensor | None:
        """Return `order` as a tensor `[K]` int64, or None."""
        if self.order is None:
            return None
        return torch.frombuffer(bytearray(self.order), dtype=torch.int64).to(device)


FP8: Final = Form("fp8")


def common_form(forms: Iterable[Form | None]) -> Form | None:
    """Return the form that a matrix of parts in these forms can have; None if they differ or are not quantised."""
    given = list(forms)
    first = given[0]
    if first is None or any(each is None or (each.kind, each.order) != (first.kind, first.order) for each in given):
        return None
    return replace(first, group=gcd(*(each.group for each in given if each is not None)))


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How a folder stores its quantised matrices.

    `methods`: the values of --quantization that name this format. `scales`: what shares a scale of a matrix in FP8, if
    there are any: a block of 128x128, a row or the whole matrix. `coarser_scales`: what shares a scale in some other
    matrices of the folder. Those with one scale for the whole matrix are kept like the first kind, and those with a
    scale for each row are widened, if the first kind is blocks. `packing`: how matrices in 4 bits are packed, if there
    are any, with `group_size` columns for each scale (0: a whole row). `plain` names modules that are not quantised, in
    the notation of config.json. `on_load`: the folder is not quantised, and its matrices are quantised when they are
    read.
    """

    methods: tuple[str, ...] = ("fp8",)
    scales: Scales | None = "block"
    coarser_scales: tuple[Scales, ...] = ()
    packing: Packing | None = None
    group_size: int = 128
    plain: tuple[str, ...] = KEPT_PLAIN
    on_load: bool = False

    @property
    def by_block(self) -> bool:
        """Whether matrices in FP8 have a scale for each block of 128x128."""
        return self.scales == "block"

    @property
    def title(self) -> str:
        """What the log calls the format."""
        kinds = ["FP8"] * (self.scales is not None) + ["in 4 bits"] * (self.packing is not None)
        return " and ".join(kinds) if self.on_load else f"{' and '.join(kinds)} ({self.methods[0]})"

    def covers(self, name: str) -> bool:
        """Return whether the matrix with this canonical name (`model.layers.0...`) is quantised."""
        module = name.removesuffix(".weight")
        return not any(_names(entry, module) for entry in self.plain)

    def kind_of_scales(self, found: Sequence[int], shape: Sequence[int]) -> Scales | None:
        """Return what shares a scale in a matrix `[..., N, K]` in FP8 whose stored scales have the shape `found`.

        None: a shape that config.json does not name. Dims of 1 may be left out.
        """
        assert self.scales is not None, "the folder holds matrices in FP8"
        given = [size for size in found if size > 1]
        kinds = (self.scales, *self.coarser_scales)
        return next((kind for kind in kinds if given == [size for size in scale_shape(kind, shape) if size > 1]), None)


def scale_shape(kind: Scales, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the scales of a matrix `[..., N, K]` in FP8."""
    *lead, rows, columns = shape
    if kind == "tensor":
        return (*lead, 1, 1)
    if kind == "row":
        return (*lead, rows, 1)
    return (*lead, -(-rows // BLOCK), -(-columns // BLOCK))


def _scales_of(found: Iterable[Scales]) -> tuple[Scales | None, tuple[Scales, ...]]:
    """Return `scales` and `coarser_scales` of a format with these kinds of scales."""
    kinds = sorted(set(found), key=FINEST_FIRST.index)
    return (kinds[0] if kinds else None), tuple(kinds[1:])


def read_format(fields: Fields, folder: Path, wanted: str | None) -> WeightFormat | None:
    """Return how a folder stores its matrices; None if they are not quantised.

    `wanted` is the value of --quantization. It names the folder's format, or is 'fp8' for a folder that is not
    quantised. Raises UnsupportedModelError for an unsupported format, or if `wanted` is another one, and
    ModelFolderError for a broken description.
    """
    names = ("quantization_config", "compression_config", "quantization")  # the last in MLX's older folders
    found = next((value for value in map(fields.values.get, names) if value), None)
    where = fields.where
    if found is None and (folder / ASCEND_NAME).is_file():
        where = str(folder / ASCEND_NAME)
        raise refused(where, str(read_json(folder / ASCEND_NAME).get("model_quant_type") or "a format for Ascend"))
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
    given = found.get("quant_method") or ("modelopt" if "quant_algo" in found else None)
    if given is None and "group_size" in found:
        raise refused(where, f"MLX's {found.get('bits')} bits")
    method = str(given)
    readers: Mapping[str, Callable[[Mapping[str, Any], str], WeightFormat]] = {
        "fp8": _read_fp8,
        "compressed-tensors": _read_compressed,
        "modelopt": _read_modelopt,
        "gptq": _read_gptq,
        "awq": _read_awq,
        "auto-round": _read_auto_round,
    }
    reader = readers.get(method.partition("_")[0] if method.startswith("modelopt") else method.replace("_", "-"))
    if reader is not None:
        return reader(found, where)
    details = [found[key] for key in ("quant_algo", "quant_type") if isinstance(found.get(key), str)]
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
    return WeightFormat(("fp8",), "tensor" if size is None else "block", plain=plain)


def _read_modelopt(found: Mapping[str, Any], where: str) -> WeightFormat:
    """Read modelopt's format from config.json, or from a file of its own, where it is one level deeper."""
    inner = found.get("quantization")
    given = inner if isinstance(inner, dict) else found
    algorithm = str(given.get("quant_algo") or "format without a quant_algo").upper()
    named, own = {algorithm}, "modelopt_fp4"
    if algorithm == "MIXED_PRECISION":
        layers = given.get("quantized_layers")
        said = layers.values() if isinstance(layers, dict) else ()
        named = {str(member(layer, "quant_algo") or UNQUANTIZED).upper() for layer in said} - {UNQUANTIZED}
        named = named or {"FP8", "NVFP4"}
        own = "modelopt_mixed"
    scales, coarser = _scales_of(MODELOPT_FP8[each] for each in named if each in MODELOPT_FP8)
    other = sorted(named - MODELOPT_FP8.keys() - set(MODELOPT_FP4))
    if other:
        hint = ", which multiplies inputs by a pre_quant_scale (modelopt writes NVFP4 and FP8 without one)"
        raise refused(where, f"modelopt's {' and '.join(other)}" + hint * any("AWQ" in each for each in other))
    in_four = bool(named.intersection(MODELOPT_FP4))
    return WeightFormat(
        ("modelopt", own) if in_four else ("modelopt",),
        scales,
        coarser,
        packing="modelopt" if in_four else None,
        group_size=16,
        plain=names_of(given, where, "ignore", "exclude_modules"),
    )


def _read_gptq(found: Mapping[str, Any], where: str) -> WeightFormat:
    _require_four_bits(found, where, "gptq", "bits")
    form = found.get("checkpoint_format") or found.get("format") or "gptq"
    if form not in ("gptq", "gptq_v2") or found.get("pack_dtype") not in (None, "int32"):
        raise refused(
            where, f"quant_method 'gptq' of checkpoint_format {form!r}, pack_dtype {found.get('pack_dtype')!r}"
        )
    plain = list(names_of(found, where, "modules_to_not_convert"))
    dynamic = found.get("dynamic") or {}
    for pattern, change in dynamic.items() if isinstance(dynamic, dict) else ():
        if pattern.startswith("-:"):
            plain.append("re:" + pattern[2:])
        elif member(change, "bits") not in (None, 4):
            raise refused(where, f"quant_method 'gptq' of {member(change, 'bits')} bits in {pattern!r}")
    packing: Packing = "gptq_v2" if form == "gptq_v2" else "gptq"
    return WeightFormat(("gptq", "gptq_marlin"), None, (), packing, _group_size(found), tuple(plain))


def _read_awq(found: Mapping[str, Any], where: str) -> WeightFormat:
    _require_four_bits(found, where, "awq", "bits", "w_bit")
    version = str(found.get("version") or found.get("format") or "gemm").lower()
    if version != "gemm":
        raise refused(where, f"quant_method 'awq' of version {version!r}")
    plain = names_of(found, where, "modules_to_not_convert")
    return WeightFormat(("awq", "awq_marlin"), None, (), "awq", _group_size(found), plain)


def _read_auto_round(found: Mapping[str, Any], where: str) -> WeightFormat:
    _require_four_bits(found, where, "auto-round", "bits")
    form, kind = str(found.get("packing_format") or "auto_round:auto_gptq"), str(found.get("data_type") or "int")
    packing = AUTO_ROUND.get(form) if kind == "int" else None
    if form == "auto_round:llm_compressor" and kind == "nv_fp":
        packing = "floats"
    if packing is None:
        raise refused(where, f"quant_method 'auto-round' of packing_format {form!r}, data_type {kind!r}")
    plain, extra = [], found.get("extra_config") or {}
    for name, change in extra.items() if isinstance(extra, dict) else ():
        bits = member(change, "bits")
        if bits in (16, 32):
            plain.append(name)
        elif bits not in (None, 4):
            raise refused(where, f"quant_method 'auto-round' of {bits} bits in {name!r}")
    return WeightFormat(("auto-round", "inc"), None, (), packing, _group_size(found), tuple(plain))


def _require_four_bits(found: Mapping[str, Any], where: str, method: str, *keys: str) -> None:
    bits = next((found[key] for key in keys if key in found), 4)
    if bits != 4:
        raise refused(where, f"quant_method {method!r} of {bits} bits")


def _group_size(found: Mapping[str, Any]) -> int:
    """Return the columns that share a scale; 0 for a whole row. The default is 128."""
    size = next((found[key] for key in ("group_size", "q_group_size") if key in found), 128)
    return max(size, 0) if isinstance(size, int) else 128


def _read_compressed(found: Mapping[str, Any], where: str) -> WeightFormat:
    sparse = member(found.get("sparsity_config"), "format")
    if sparse not in (None, "dense"):
        raise refused(where, f"compressed-tensors' {sparse!r}")
    if found.get("transform_config"):
        raise refused(where, "compressed-tensors with transforms (transform_config)")
    groups = found.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ModelFolderError(
            f"{where} has compressed-tensors without config_groups; an object with at least one group is needed"
        )
    kinds = {_kind(group, found, where) for group in groups.values()}
    scales, coarser = _scales_of(COMPRESSED_FP8[kind] for kind in kinds if kind in COMPRESSED_FP8)
    packing: Packing | None = None
    if kinds - COMPRESSED_FP8.keys():  # the tensors themselves say which of the two they are
        packing = "floats" if "floats" in kinds else "integers"
    plain = names_of(found, where, "ignore")
    return WeightFormat(("compressed-tensors",), scales, coarser, packing, plain=plain)


def _kind(group: Any, found: Mapping[str, Any], where: str) -> str:
    """Return what shares a scale in a group whose weights are in FP8, or the packing of weights in 4 bits.

    Raises ModelFolderError and UnsupportedModelError.
    """
    weights = member(group, "weights")
    if not isinstance(weights, dict):
        raise ModelFolderError(f"{where} has a group of compressed-tensors without a 'weights' object: {group!r}")
    form = group.get("format") or found.get("format")
    kind, bits, strategy = weights.get("type"), weights.get("num_bits"), str(weights.get("strategy"))
    if (kind, bits, form) == ("int", 4, "pack-quantized") and strategy in ("group", "channel"):
        return "integers"
    if (kind, bits, form, weights.get("group_size")) == ("float", 4, "nvfp4-pack-quantized", 16):
        return "floats"
    if (kind, bits) != ("float", 8) or form not in ("float-quantized", "naive-quantized"):
        raise refused(where, f"compressed-tensors' {form} ({bits}-bit {kind})")
    if strategy not in COMPRESSED_FP8:
        raise refused(where, f"compressed-tensors' FP8 with a scale for each {strategy}")
    if strategy == "block" and weights.get("block_structure") not in ([BLOCK, BLOCK], f"{BLOCK}x{BLOCK}"):
        raise refused(where, f"compressed-tensors' FP8 in blocks of {weights.get('block_structure')}")
    return strategy


def names_of(found: Mapping[str, Any], where: str, *keys: str) -> tuple[str, ...]:
    """Return the module names in the first of `keys` that is given; () if none is. Raises ModelFolderError."""
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
