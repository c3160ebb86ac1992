"""Reads the fields of the text model from config.json, which may be that of a multimodal model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from forkpoint.checks import read_config
from forkpoint.errors import ModelFolderError
from forkpoint.models.fields import Fields

TIES: Final = "tie_word_embeddings"
TEXT_OBJECT: Final = "text_config"
# Fields of a multimodal model that also apply to its text part.
SHARED: Final[tuple[str, ...]] = (
    TIES,
    "compression_config",
    "dtype",
    "eos_token_id",
    "quantization_config",
    "torch_dtype",
    "transformers_version",
)


@dataclass(frozen=True, slots=True)
class TextPart:
    """The text part of a multimodal architecture, which runs as a text model of its own.

    `object` is the field of config.json that describes the text model. `others` maps the starts of canonical names of
    weights to parts that do not run; a part called TOWER runs if images are read. `default_type` is the text's
    model_type if config.json has none.
    """

    others: Mapping[str, str]
    object: str = TEXT_OBJECT
    default_type: str | None = None


TOWER: Final = "the vision tower"
IDLE_TOWER: Final = "the vision tower, which forkpoint does not run for this model"
SOUND: Final = "the sound encoder"
NEMOTRON: Final = TextPart(
    {
        "mlp1.": TOWER,
        "multi_modal_projector.": TOWER,
        "sound": SOUND,
        "audio": SOUND,
        "vision_model.": TOWER,
        "vision_final_layernorm.": TOWER,
        "vision_projector.": TOWER,
    },
    object="llm_config",
    default_type="nemotron_h",
)
MINICPM_V: Final = TextPart(
    {name + part: IDLE_TOWER for part in ("merger.", "vision_tower.", "vpm.") for name in ("model.", "")},
    default_type="qwen3_5_text",
)
TEXT_PARTS: Final[Mapping[str, TextPart]] = {
    "BailingMoeV3VLForConditionalGeneration": TextPart(
        {name + part: TOWER for part in ("visual.", "linear_proj.") for name in ("model.", "")},
        default_type="bailing_hybrid",
    ),
    "InternS2PreviewForConditionalGeneration": TextPart(
        {"model.visual.": IDLE_TOWER, "visual.": IDLE_TOWER}
        | {name + "time_series.": "the encoder of time series" for name in ("model.", "")},
        default_type="qwen3_5_moe_text",
    ),
    "Lfm3VlForConditionalGeneration": TextPart(
        {name + part: IDLE_TOWER for part in ("multi_modal_projector.", "vision_tower.") for name in ("model.", "")},
        default_type="lfm3",
    ),
    "MiniCPMV4_6ForConditionalGeneration": MINICPM_V,
    "MiniCPMV4_7ForConditionalGeneration": MINICPM_V,
    "NemotronH_Nano_VL_V2": NEMOTRON,
    "NemotronH_Nano_Omni_Reasoning_V3": NEMOTRON,
    "NemotronH_Omni_Reasoning_V3": NEMOTRON,
    "NemotronH_Super_Omni_Reasoning_V3": NEMOTRON,
}


@dataclass(frozen=True, slots=True)
class ConfigJson:
    """The fields of the text model, and those of the whole config.json, `outer`.

    `other_parts` maps starts of names of weights to parts that do not run, and to TOWER.
    """

    fields: Fields
    outer: Fields
    other_parts: Mapping[str, str] = field(default_factory=dict)


def read_config_json(folder: Path, architectures: Collection[str], overrides: Mapping[str, Any] | None) -> ConfigJson:
    """Read the text model's fields of config.json, changed by `overrides`.

    `architectures` are the names of text and multimodal models that have a family. The fields of the text model's
    object replace those of the outer one; a model of TEXT_PARTS takes only SHARED from the outer one. The embeddings
    are tied if either object says so. Raises ModelFolderError.
    """
    outer, where = read_config(folder, overrides), str(folder / "config.json")
    if overrides:
        where += " with --hf-overrides"
    named = outer.get("architectures") or named_by_type(outer.get("model_type"), architectures)
    part = TEXT_PARTS.get(named[0]) if isinstance(named, list) and named and isinstance(named[0], str) else None
    name = TEXT_OBJECT
    if part is not None and outer.get(TEXT_OBJECT) is None:
        name = part.object
    inner = outer.get(name)
    if inner is None and part is None:
        inner = {}
    if not isinstance(inner, dict):
        raise ModelFolderError(f"{where} has {name}={inner!r}; an object with the text model's fields is needed")
    if part is None:
        fields = _merged(outer, inner, {"architectures": named}, where)
        return ConfigJson(fields, fields)
    kind = inner.get("model_type") or part.default_type
    named = named_by_type(kind, architectures) or [str(kind)]
    shared = {name: outer[name] for name in SHARED if name in outer}
    fields = _merged(shared, inner, {"architectures": named}, where)
    return ConfigJson(fields, Fields(outer, where), part.others)


def _merged(outer: Mapping[str, Any], inner: Mapping[str, Any], more: Mapping[str, Any], where: str) -> Fields:
    given = {k: v for k, v in inner.items() if v is not None}
    values = {**inner, **outer, **given, **more}  # null in the inner object stays, if the outer one has no value
    ties = [each[TIES] for each in (given, outer) if each.get(TIES) is not None]
    if ties:
        # the family refuses wrong values when it reads the field
        wrong = [value for value in ties if not isinstance(value, bool)]
        values[TIES] = wrong[0] if wrong else any(ties)
    return Fields(values, where)


def named_by_type(model_type: Any, architectures: Collection[str]) -> list[str]:
    """Return the architectures called like transformers' `model_type` plus `ForCausalLM`; [] if none is.

    Capitals, underscores and an ending `_text` do not count. Some files of the hub leave `architectures` out.
    """
    kind = str(model_type).removesuffix("_text")
    said = f"{kind}ForCausalLM".replace("_", "").lower()
    return [name for name in architectures if name.replace("_", "").lower() == said]
