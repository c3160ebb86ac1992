"""Finds the family of a model folder, reads its config.json and loads the model."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, Final, Literal, TypedDict, Unpack

import torch

from forkpoint import models
from forkpoint.checks import read_json
from forkpoint.errors import ModelFolderError, UnsupportedModelError
from forkpoint.freed_memory import return_freed_memory
from forkpoint.image_families.settings import ImageSettings
from forkpoint.models.config import Build, ModelConfig
from forkpoint.models.config_json import TEXT_PARTS, TOWER, read_config_json
from forkpoint.models.decoder import Model
from forkpoint.models.fields import Fields
from forkpoint.models.quantization import read_format
from forkpoint.models.vision import VisionConfig
from forkpoint.models.weights import MTP_HEAD, VISION_TOWER, DummyWeights, FileWeights, LoadingProgress, WeightSource
from forkpoint.ops.ranks import ALONE, Ranks
from forkpoint.ops.table import OpTable
from forkpoint.plugins import Registry


def _own_families() -> Iterator[type[Model]]:
    for module in iter_modules(models.__path__, f"{models.__name__}."):
        if module.name != __name__:
            found = vars(import_module(module.name)).values()
            families = (kind for kind in found if isinstance(kind, type) and issubclass(kind, Model))
            yield from (family for family in families if getattr(family, "architectures", ()))


FAMILIES: Final = tuple(sorted(set(_own_families()), key=lambda family: family.__name__))
NO_MTP: Final = "--speculative-config takes the method 'ngram', 'suffix' or 'cache' for any model"
LOGGER: Final = logging.getLogger(__name__)
MODELS: Final[Registry[type[Model]]] = Registry(
    "model architecture",
    "forkpoint.models",
    {name: family for family in FAMILIES for name in family.architectures},
    UnsupportedModelError,
    Model,
)


def register_model(family: type[Model]) -> None:
    """Let this process load a family's `architectures`. Raises ConfigError for a name that is taken."""
    for name in family.architectures:
        MODELS.add(name, family)


class ModelOptions(TypedDict, total=False):
    """Options of a model besides its folder."""

    dtype: str  # of weights and activations; "auto": the dtype that config.json names
    max_model_len: int | None  # tokens; None: what config.json says
    state_dtype: str  # of recurrent matrices; default: "float32"
    kv_cache_dtype: str  # of keys and values: "auto", "bfloat16" or "fp8"
    quantization: str | None  # the folder's format, or "fp8" to quantise an unquantised model as it loads
    mtp: bool  # load the model's MTP layer
    hf_overrides: Mapping[str, Any] | None  # change fields of config.json
    vision: ImageSettings | None  # load the vision tower; how images are resized for it


def load_config(path: str | Path, **options: Unpack[ModelOptions]) -> ModelConfig:
    """Read config.json, and the end-of-sequence ids of generation_config.json if there is one.

    Raises ModelFolderError for a missing folder, bad JSON, and missing or wrong fields. Raises UnsupportedModelError
    for an architecture that no family serves, a feature or quantisation that forkpoint does not run, or a
    `max_model_len` beyond the model's.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ModelFolderError(f"there is no model folder {str(path)!r}; give the path of a downloaded model")
    found = read_config_json(folder, MODELS.names(), options.get("hf_overrides"))
    fields = found.fields
    family = _family(fields)  # checked first, because other architectures may use other quantisations
    stored = read_format(fields, folder, options.get("quantization"))
    config = family.read(fields)
    generation = folder / "generation_config.json"
    eos = config.eos_token_ids
    if generation.is_file():
        eos += Fields(read_json(generation), str(generation)).token_ids("eos_token_id")
    longest, mtp = options.get("max_model_len") or config.max_model_len, options.get("mtp", False)
    settings = options.get("vision")
    if longest > config.max_model_len:
        raise UnsupportedModelError(
            f"max_model_len={longest} exceeds the {config.max_model_len} positions of {path}; give at most as many"
        )
    if mtp and not config.draft_layer:
        raise UnsupportedModelError(f"{fields.where} has {_other_heads(fields, config)}; {NO_MTP}")
    dtype, kv_cache_dtype = options.get("dtype", "auto"), options.get("kv_cache_dtype", "auto")
    dtype = config.dtype if dtype == "auto" else dtype
    if kv_cache_dtype == "bfloat16" and dtype != kv_cache_dtype:
        raise UnsupportedModelError(
            f"kv_cache_dtype='bfloat16' is not possible for a model that runs in {dtype}; give 'auto' or 'fp8', or "
            "dtype='bfloat16'"
        )
    vision = family.read_vision(found.outer, config, settings) if settings else None
    return replace(
        config,
        dtype=dtype,
        max_model_len=longest,
        eos_token_ids=tuple(dict.fromkeys(eos)),
        state_dtype=options.get("state_dtype", "float32"),
        quantization=stored,
        fp8_keys=kv_cache_dtype == "fp8",
        draft_layer=config.draft_layer if mtp else (),
        vision=vision,
        other_parts=tuple(_other_parts(found.other_parts, vision).items()),
    )


def _other_parts(other_parts: Mapping[str, str], vision: VisionConfig | None) -> Mapping[str, str]:
    """Return the parts that do not run, where those of the tower may run: starts of names -> descriptions."""
    if vision is None:
        return other_parts
    return {start: part for start, part in other_parts.items() if part != TOWER} | dict(vision.unused)


def _other_heads(fields: Fields, config: ModelConfig) -> str:
    """Return, for an error, which MTP heads config.json names, none of which can be used."""
    count = config.num_draft_layers or fields.integer("mtp_num_hidden_layers", 0, low=0)
    if count == 0:
        return "no MTP head"
    if count > 1:
        return f"{count} MTP heads, where forkpoint drafts with a single one"
    return f"an MTP head of a kind that forkpoint does not run for {config.architecture}"


def _family(fields: Fields) -> type[Model]:
    """Return the family of the architecture's name. Raises ModelFolderError and UnsupportedModelError.

    No other field is read for that, because the fields of an unknown architecture are unknown.
    """
    names = fields.values["architectures"]
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ModelFolderError(f"{fields.where} has architectures={names!r}; a list with the model's name is needed")
    if names[0] not in MODELS.names():
        raise UnsupportedModelError(
            f"{fields.where} is of a {names[0]}; forkpoint runs {', '.join(MODELS.names())}, the text parts of "
            f"{', '.join(TEXT_PARTS)}, and what installed packages add (docs/extending.md)"
        )
    return MODELS.find(names[0])


def load_model(
    path: str | Path,
    *,
    ops: OpTable,
    load_format: Literal["auto", "safetensors", "fastsafetensors", "dummy"] = "auto",
    seed: int = 0,
    device: torch.device | None = None,
    progress: LoadingProgress | None = None,
    ranks: Ranks = ALONE,
    fp8_as_bytes: bool = False,
    on_host: bool = True,
    max_image_tokens: int = 2048,
    **options: Unpack[ModelOptions],
) -> Model:
    """Build this rank's part of a model from a Hugging Face folder.

    `load_format` "dummy" needs only config.json and creates random weights from `seed`. `device` (None: torch's
    default) stores the weights, `on_host` if its memory is the host's. With `fp8_as_bytes` matrices in FP8 are stored
    as bytes (uint8). `progress` is called with the bytes of weights read so far and the total. With a vision tower, a
    step may have up to `max_image_tokens` tokens of images. All of `ranks` must call it together. Raises
    ModelFolderError and UnsupportedModelError, which name the tensor or field at fault, and ConfigError if the model
    cannot be split over so many ranks.
    """
    config, mtp = load_config(path, **options), options.get("mtp", False)
    if config.unknown_fields and ranks.rank == 0:
        shown = ", ".join(config.unknown_fields)
        LOGGER.warning("fields of config.json that forkpoint does not know and does not use: %s", shown)
    torch_dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.dtype]
    device = device or torch.get_default_device()
    config = config.shared_by(ranks)
    if config.quantization is not None and config.quantization.by_block and not fp8_as_bytes:
        ops = ops.rounding or ops
    form: dict[str, Any] = {"dtype": torch_dtype, "device": device, "format": config.quantization}
    form |= {"ranks": ranks, "as_bytes": fp8_as_bytes, "on_host": on_host}
    if load_format == "dummy":
        return _build(config, DummyWeights(seed=seed, **form), ops, max_image_tokens)
    form |= {"names": MODELS.find(config.architecture).weight_names, "unused": _unused_parts(config, mtp)}
    with closing(FileWeights(folder=Path(path), progress=progress, **form)) as weights:
        if mtp and config.mtp_names and not weights.has(joined := f"{config.mtp_names.join}.weight"):
            raise UnsupportedModelError(f"{path} holds no MTP head ({joined}) to draft with; {NO_MTP}")
        if options.get("dtype", "auto") == "auto":
            _warn_of_float16(weights)
        ranks.check_equal({"names and shapes of weights": weights.named_shapes()}, device)
        model = _build(config, weights, ops, max_image_tokens)
        weights.finish()
    if on_host:
        return_freed_memory()
    return model


def _warn_of_float16(weights: FileWeights) -> None:
    embedding = "model.embed_tokens.weight"
    widens = weights.dtype == torch.float32 and weights.has(embedding) and weights.stored_type(embedding) == "F16"
    if widens and weights.ranks.rank == 0:
        LOGGER.warning("weights in float16 run in float32; --dtype bfloat16 halves their memory")


def _unused_parts(config: ModelConfig, mtp: bool) -> dict[str, str]:
    """Map the start of the names of unused tensors to a description of the part that they belong to."""
    layers = {f"model.layers.{len(config.layers) + i}.": "layers for drafts" for i in range(config.num_draft_layers)}
    tower = VISION_TOWER if config.vision is None else {}
    unused = tower | dict(config.other_parts) | layers | MTP_HEAD
    if mtp and config.mtp_names is not None:
        own = f"{config.mtp_names.join}."
        unused = {start: part for start, part in unused.items() if not own.startswith(start)}
        names = ("embed_tokens.", "shared_head.head.", "shared_head.norm.")
        copies = [start + name for start in layers for name in names]
        copies = [name for name in copies if not f"{config.mtp_names.norm}.".startswith(name)]
        unused |= dict.fromkeys(copies, "the MTP head's copies of embeddings and output head")
        unused |= dict.fromkeys(config.mtp_names.unused, "the MTP head's index of keys")
    return unused


def _build(config: ModelConfig, weights: WeightSource, ops: OpTable, max_image_tokens: int) -> Model:
    with weights.device:  # the default device for tensors that families create
        return MODELS.find(config.architecture)(Build(config, weights, ops, max_image_tokens=max_image_tokens))
