"""Nemotron 3 Omni: its vision tower against transformers, its sizes of images, and what is refused by name."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from forkpoint.engine.image_processor import ImageProcessor
from forkpoint.errors import ConfigError, ModelFolderError, UnsupportedModelError
from forkpoint.image_families.nemotron_omni import NemotronOmniImages
from forkpoint.image_families.settings import CLIP_MEAN, CLIP_STD
from forkpoint.image_families.table import read_image_settings
from forkpoint.images import ImageSpan
from forkpoint.models.radio_vision import RadioVisionConfig
from forkpoint.models.registry import load_config, load_model
from forkpoint.ops.select import torch_table
from tests.image_models import picture
from tests.json_files import change_json
from tests.models.test_hub_configs import FOLDER
from tests.nemotron_omni_models import PROCESSOR, grid_of, resized, write_nemotron_omni

# Fields of the published config.json around the text model's.
PUBLISHED: dict[str, Any] = {
    "architectures": ["NemotronH_Nano_Omni_Reasoning_V3"],
    "model_type": "NemotronH_Nano_Omni_Reasoning_V3",
    "downsample_ratio": 0.5,
    "force_image_size": 512,
    "img_context_token": "<image>",
    "img_context_token_id": 18,
    "img_end_token": "</img>",
    "img_start_token": "<img>",
    "patch_size": 16,
    "projector_hidden_size": 20480,
    "ps_version": "v2",
    "vit_hidden_size": 1280,
    "sound_config": {"model_type": "parakeet", "hidden_size": 1024},
    "vision_config": {
        "args": {"model": "vit_huge_patch16_224", "min_num_patches": 1024, "max_num_patches": 13312},
        "max_resolution": 2048,
        "patch_size": 16,
        "separate_video_embedder": True,
        "version": "radio_v2.5-h",
        "video_temporal_patch_size": 2,
    },
}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("nemotron_omni")
    return folder, write_nemotron_omni(folder)


@pytest.fixture
def folder(original: tuple[Path, Any], tmp_path: Path) -> Path:
    """A copy that may be changed."""
    return shutil.copytree(original[0], tmp_path, dirs_exist_ok=True)


@torch.no_grad()
def test_the_tower_is_that_of_transformers(original: tuple[Path, Any], folder: Path) -> None:
    """With factors on both sums of a layer, which transformers saves, and without them, as published."""
    theirs, settings = original[1], read_image_settings(folder)
    assert settings is not None
    scales = {name: weight for name, weight in theirs.named_parameters() if "layer_scale" in name}
    assert len(scales) == 4
    path = folder / "model.safetensors"
    for published in (False, True):
        if published:
            save_file({k: v for k, v in load_file(path).items() if "layer_scale" not in k}, path, {"format": "pt"})
        tower = load_model(folder, ops=torch_table(), vision=settings).vision
        kept = [scale.clone() for scale in scales.values()]
        for scale in scales.values():
            scale.copy_(torch.ones(()) if published else scale)
        for height, width in [(64, 64), (32, 480), (300, 100), (512, 640)]:
            image, grid = picture(height, height, width), grid_of(height, width)
            (want,) = theirs.get_image_features(resized(image, *grid), torch.tensor([grid])).pooler_output
            parts = ImageProcessor(settings, 1).parts_of([image])[0]
            (pixels,) = [part.pixels for part in parts if isinstance(part, ImageSpan)]
            assert tower is not None and pixels.dtype == "float32"
            assert (tower(torch.from_numpy(pixels)) - want).abs().max() <= 1e-4 * want.std()
        for scale, before in zip(scales.values(), kept, strict=True):
            scale.copy_(before)


def test_the_published_config(folder: Path) -> None:
    """The published fields around the published text model; the tower's sizes are defaults of transformers."""
    text = json.loads((FOLDER / "nemotron-3-nano-30b-a3b.json").read_text())
    (folder / "config.json").write_text(json.dumps({**PUBLISHED, "llm_config": text}))
    (folder / "preprocessor_config.json").unlink()
    settings = read_image_settings(folder)
    assert isinstance(settings, NemotronOmniImages) and settings.max_tokens == 3328
    assert (settings.image_token_id, settings.mean, settings.std) == (18, CLIP_MEAN, CLIP_STD)
    config = load_config(folder, vision=settings)
    vision = config.vision
    assert isinstance(vision, RadioVisionConfig) and not config.unknown_fields and vision.axes == ()
    assert (vision.num_layers, vision.hidden_size, vision.num_heads, vision.intermediate_size) == (32, 1280, 16, 5120)
    assert (vision.grid_side, vision.num_extra, vision.projector_size, vision.out_size) == (128, 10, 20480, 2688)
    assert not vision.final_norm and load_config(folder).vision is None


# Width and height of a picture, and its tokens as vLLM 0.28 has them.
COUNTS = {
    (224, 224): 256,
    (64, 32): 276,
    (512, 512): 256,
    (1000, 500): 512,
    (500, 1000): 512,
    (1024, 1024): 1024,
    (1536, 1536): 2304,
    (1920, 1080): 2040,
    (4000, 3000): 3300,
}


def test_sizes_are_the_published_processors(folder: Path) -> None:
    change_json(folder / "preprocessor_config.json", min_num_patches=1024, max_num_patches=13312)
    settings = read_image_settings(folder)
    assert isinstance(settings, NemotronOmniImages)

    def num_tokens(settings: NemotronOmniImages, width: int, height: int) -> int:
        start, view, end = settings.layout(height, width)
        assert (start, end) == (252, 253) and not isinstance(view, int)
        return view.height * view.width // 1024

    assert {size: num_tokens(settings, *size) for size in COUNTS} == COUNTS
    low = settings.low_detail()
    assert isinstance(low, NemotronOmniImages) and num_tokens(low, 1920, 1080) <= 256
    smallest = replace(settings, min_pixels=256, max_pixels=1024)
    assert num_tokens(smallest, 1, 200) == num_tokens(smallest, 3000, 20) == 1
    change_json(folder / "preprocessor_config.json", max_model_len=1000)
    budget = read_image_settings(folder)
    assert budget is not None and budget.max_tokens == 996
    given = read_image_settings(folder, {"max_num_patches": 2048})
    assert given is not None and given.max_tokens == 512


@pytest.mark.parametrize(
    ("outer", "vision", "says"),
    [
        ({"ps_version": "v1"}, {}, "ps_version='v1'; forkpoint runs v2"),
        ({"vit_hidden_size": 64}, {}, "the projector reads 64 values"),
        ({}, {"hidden_act": "relu"}, "hidden_act='relu'"),
        ({}, {"use_swiglu_ffn": True}, "use_swiglu_ffn=true"),
        (
            {},
            {"vitdet_window_size": 14},
            "has vitdet_window_size; forkpoint runs RADIO without it; start with --language",
        ),
    ],
)
def test_other_towers_are_refused_unless_the_text_model_runs_alone(
    folder: Path, outer: dict[str, Any], vision: dict[str, Any], says: str
) -> None:
    path = folder / "config.json"
    change_json(path, **outer, vision_config=json.loads(path.read_text())["vision_config"] | vision)
    with pytest.raises((ModelFolderError, UnsupportedModelError), match=says):
        load_config(folder, vision=read_image_settings(folder))
    assert load_config(folder).vision is None


def test_what_a_folder_lacks_is_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match="give min_num_patches and max_num_patches"):
        read_image_settings(folder, {"max_pixels": 1 << 20})
    (folder / "preprocessor_config.json").write_text(
        json.dumps({**PROCESSOR, "min_num_patches": 2, "max_num_patches": 2})
    )
    with pytest.raises(ModelFolderError, match="has max_num_patches=2; a token has 4 patches"):
        read_image_settings(folder)
    (folder / "tokenizer.json").write_text('{"added_tokens": [{"content": "<img>", "id": 19}]}')
    with pytest.raises(ModelFolderError, match="has no token '</img>'"):
        read_image_settings(folder)
