"""Ling-3.0 VL: its sizes and prompts of images, the published config, and what is refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forkpoint.engine.image_processor import ImageProcessor
from forkpoint.engine.placeholders import expand, image_expansions
from forkpoint.errors import ModelFolderError, UnsupportedModelError
from forkpoint.image_families.ling_vl import LingVlImages
from forkpoint.image_families.settings import CLIP_MEAN, View
from forkpoint.image_families.table import read_image_settings
from forkpoint.models.ling_vision import LingVisionConfig
from forkpoint.models.registry import load_config, load_model
from forkpoint.ops.select import torch_table
from tests.image_models import END, IMAGE, START, picture
from tests.json_files import change_json
from tests.ling_vl_models import NEWLINE, write_ling_vl
from tests.models.test_hub_configs import FOLDER


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ling_vl")
    write_ling_vl(folder)
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy that may be changed."""
    return shutil.copytree(original, tmp_path, dirs_exist_ok=True)


@pytest.mark.parametrize(
    "written",
    [[IMAGE], [START, IMAGE, END], [START, IMAGE, END, NEWLINE], [START, IMAGE], [IMAGE, END], [IMAGE, NEWLINE]],
)
def test_tokens_around_an_image_are_there_once(original: Path, written: list[int]) -> None:
    """The model's processor writes a newline behind an image, unless there is one."""
    settings = read_image_settings(original)
    assert settings is not None
    images = [picture(1, 64, 96), picture(2, 32, 32)]
    ids = np.asarray([7, *written, 8, *written, *written, 9], np.int32)
    found = expand(ids, image_expansions(ids, ImageProcessor(settings, 3), [*images, images[1]]))
    first, second = ([START, *[IMAGE] * count, END, NEWLINE] for count in (6, 1))
    assert found.token_ids.tolist() == [7, *first, 8, *second, *second, 9]
    assert [image.start for image in found.images] == [2, 12, 16]


def test_the_published_config(folder: Path) -> None:
    """The published fields around the published text model; other sizes are defaults of transformers."""
    text = json.loads((FOLDER / "ling-3.0-flash.json").read_text())
    outer = {"image_token_id": 157157, "mrope_section": [8, 12, 12], "model_type": "bailing_moe_v3_vl"}
    vision = {"model_type": "qwen3_moe_vit", "disable_merger_proj": True}
    change_json(folder / "config.json", **outer, text_config=text, vision_config=vision)
    (folder / "preprocessor_config.json").unlink()
    settings = read_image_settings(folder)
    assert isinstance(settings, LingVlImages) and settings.mean == CLIP_MEAN
    assert (settings.token_side, settings.min_pixels, settings.max_pixels) == (32, 4096, 4194304)
    assert settings.layout(1080, 1920) == [START, View.whole(1088, 1920), END, NEWLINE]
    config = load_config(folder, vision=settings)
    found = config.vision
    assert isinstance(found, LingVisionConfig) and found.centred and not config.unknown_fields
    assert (found.num_layers, found.hidden_size, found.num_heads, found.intermediate_size) == (27, 1152, 16, 4304)
    assert (found.grid_side, found.num_frames, found.out_size) == (48, 2, 2560)
    assert found.axes == (1, 2) * 12 + (0,) * 8
    assert load_config(folder).vision is None


def test_the_projector_may_have_its_older_name(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    path, settings = folder / "model.safetensors", read_image_settings(folder)
    weights = {name.replace("linear_proj", "model.linear_proj"): weight for name, weight in load_file(path).items()}
    save_file(weights, path, {"format": "pt"})
    tower = load_model(folder, ops=torch_table(), vision=settings).vision
    assert tower is not None and tower(torch.zeros(64, 96, 3, dtype=torch.uint8)).shape == (6, 64)


@pytest.mark.parametrize(
    ("outer", "vision", "says"),
    [
        ({"mrope_section": [2, 2, 4]}, {}, r"mrope_section=\[2, 2, 4\]; forkpoint runs three sections, 8 pairs in all"),
        ({"mrope_section": [3, 3, 3]}, {}, r"with as many for rows as for columns; start with --language-model-only"),
        ({}, {"disable_merger_proj": False}, "has no disable_merger_proj=true"),
        ({}, {"deepstack_visual_indexes": [1]}, "deepstack_visual_indexes"),
    ],
)
def test_other_towers_are_refused_unless_the_text_model_runs_alone(
    folder: Path, outer: dict[str, Any], vision: dict[str, Any], says: str
) -> None:
    path = folder / "config.json"
    change_json(path, **outer, vision_config=json.loads(path.read_text())["vision_config"] | vision)
    with pytest.raises(UnsupportedModelError, match=says):
        load_config(folder, vision=read_image_settings(folder))
    assert load_config(folder).vision is None


def test_a_tokenizer_without_a_newline_is_refused(folder: Path) -> None:
    change_json(folder / "tokenizer.json", model={"vocab": {"a": 1}})
    with pytest.raises(ModelFolderError, match="has no token for a newline"):
        read_image_settings(folder)
