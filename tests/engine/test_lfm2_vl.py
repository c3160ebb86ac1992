"""Pictures of LFM2-VL that are cut into tiles, against transformers' full model."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forkpoint import LLM, SamplingParams
from forkpoint.config import EngineConfig
from forkpoint.errors import ConfigError, InvalidPromptError, ModelFolderError
from forkpoint.image_families.lfm2_vl import Lfm2VlImages
from forkpoint.image_families.settings import View
from forkpoint.image_families.table import read_image_settings
from tests.engine.test_images import INTRO, OTHER, QUESTION, TOLERANCE
from tests.image_models import IMAGE, Part, Watched, picture
from tests.lfm2_vl_models import Lfm2VlOracle, lfm2_vl_prompt, write_lfm2_vl

NUM_TILED = 300  # tokens of a square picture: 9 tiles and a thumbnail of 144 tokens, with a special token for each


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    pytest.importorskip("PIL.Image")
    place = tmp_path_factory.mktemp("lfm2_vl")
    return place, write_lfm2_vl(place)


@pytest.mark.parametrize(("budget", "moe"), [(64, False), (192, True), (2048, False)])
def test_tiles_are_spans_of_their_own(folder: tuple[Path, Any], tmp_path: Path, budget: int, moe: bool) -> None:
    """Another picture with the same first tiles hits up to the tile that differs."""
    place, theirs = folder
    if moe:
        place, theirs = tmp_path, write_lfm2_vl(tmp_path, moe=True)
    options = {"max_num_batched_tokens": budget, "max_num_seqs": 1, "checkpoint_interval": 64}
    watched = Watched(place, theirs, lfm2_vl_prompt, Lfm2VlOracle(place), **options)
    image, pillow = picture(1, 640, 640), pytest.importorskip("PIL.Image")
    changed = np.array(image)
    changed[500:] = 0  # the last row of tiles, and the thumbnail
    parts: list[Part] = [INTRO, image, QUESTION]
    cold = watched.ask(parts, 4)
    assert cold.num_tokens == 100 + NUM_TILED + 40 and (cold.cached, cold.num_runs) == (0, 10)
    again = watched.ask(parts, 4)
    assert (again.cached, again.num_runs) == (384, 0), "the thumbnail is kept"
    found = watched.ask([INTRO, pillow.fromarray(changed), OTHER], 4)
    assert found.cached == 192 and found.num_runs == 4, "6 tiles of 17 tokens after the intro are the same"
    assert max(each.error for each in (cold, again, found)) <= TOLERANCE
    watched.llm.close()


def test_without_images_the_tower_is_not_loaded(folder: tuple[Path, Any]) -> None:
    """The model reads no videos, so their limit does not matter."""
    assert EngineConfig(model=str(folder[0]), limit_mm_per_prompt={"image": 1}).read_image_settings() is not None
    assert EngineConfig(model=str(folder[0]), limit_mm_per_prompt={"image": 0}).read_image_settings() is None


# Height and width of a picture; rows and columns of tiles, and the size of the whole, as transformers 5.24 has them.
CUTS = [
    ((1, 1), (1, 1), (256, 256)),
    ((40, 30), (1, 1), (320, 224)),
    ((512, 512), (1, 1), (512, 512)),
    ((600, 600), (1, 1), (512, 512)),
    ((720, 728), (1, 1), (480, 512)),
    ((725, 725), (2, 2), (512, 512)),
    ((768, 1024), (2, 3), (416, 576)),
    ((1024, 512), (1, 1), (704, 352)),
    ((1500, 1500), (3, 3), (512, 512)),
    ((3000, 2000), (3, 2), (608, 416)),
    ((50, 5000), (1, 1), (32, 5120)),
    ((300, 2900), (1, 10), (160, 1568)),
    ((1080, 1920), (2, 4), (384, 672)),
]


@pytest.mark.parametrize(("size", "grid", "whole"), CUTS)
def test_pictures_are_cut_as_by_transformers(
    folder: tuple[Path, Any], size: tuple[int, int], grid: tuple[int, int], whole: tuple[int, int]
) -> None:
    """The processor of transformers needs torchvision, which is not installed."""
    settings = read_image_settings(folder[0], {"max_image_tokens": 256, "min_image_tokens": 64})
    assert isinstance(settings, Lfm2VlImages)
    settings = replace(settings, tile_size=512)
    *tiles, last = [part for part in settings.layout(*size) if isinstance(part, View)]
    assert last == View.whole(*whole)
    num_rows, num_columns = grid
    boxes = [(c * 512, r * 512, c * 512 + 512, r * 512 + 512) for r in range(num_rows) for c in range(num_columns)]
    want = [View(num_rows * 512, num_columns * 512, box) for box in boxes]
    assert tiles == (want if len(want) > 1 else [])


def test_what_a_folder_lacks_is_named(folder: tuple[Path, Any], tmp_path: Path) -> None:
    shutil.copytree(folder[0], tmp_path, dirs_exist_ok=True)
    for kwargs, says in [
        ({"max_pixels": 1 << 20}, "give min_image_tokens and max_image_tokens"),
        ({"max_tiles": 0}, "is not"),
        ({"max_tiles": 3000}, "max_tiles of at most 100"),
        ({"min_tiles": 20}, "min_tiles of at most max_tiles"),
    ]:
        with pytest.raises(ConfigError, match=says):
            read_image_settings(tmp_path, kwargs)
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": []}')
    with pytest.raises(ModelFolderError, match=r"has no token '<\|image_start\|>'"):
        read_image_settings(tmp_path)
    options: dict[str, Any] = {"skip_tokenizer_init": True, "device": "cpu", "log_level": "error"}
    with LLM(str(tmp_path), language_model_only=True, kv_cache_memory_bytes=1 << 24, **options) as llm:
        assert llm.generate([[5, IMAGE, 6]], SamplingParams(max_tokens=1), use_tqdm=False)[0].outputs[0].token_ids
        with pytest.raises(InvalidPromptError, match="started with --language-model-only"):
            llm.generate(lfm2_vl_prompt([INTRO, picture(1, 64, 64)]), use_tqdm=False)
