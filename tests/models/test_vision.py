"""What a multimodal folder may say of its images, and what is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from forkpoint.config import EngineConfig
from forkpoint.engine import image_processor
from forkpoint.engine.image_processor import ImageProcessor
from forkpoint.errors import ConfigError, ModelFolderError, UnsupportedModelError
from forkpoint.image_families.table import read_image_settings
from forkpoint.models.registry import load_config, load_model
from forkpoint.ops.select import torch_table
from tests.checkpoints import write_checkpoint
from tests.image_models import picture, processed, write_vision_checkpoint
from tests.json_files import change_json


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("vision")
    return folder, write_vision_checkpoint(folder)


@pytest.fixture
def folder(original: tuple[Path, Any], tmp_path: Path) -> Path:
    """A copy that may be changed."""
    return shutil.copytree(original[0], tmp_path, dirs_exist_ok=True)


def change(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    values = json.loads(path.read_text())
    edit(values)
    path.write_text(json.dumps(values))


@torch.no_grad()
@pytest.mark.parametrize(("height", "width"), [(32, 32), (64, 224), (320, 96), (1024, 32)])
def test_the_tower_is_that_of_transformers(original: tuple[Path, Any], height: int, width: int) -> None:
    import numpy as np

    folder, theirs = original
    tower = load_model(folder, ops=torch_table(), vision=read_image_settings(folder)).vision
    assert tower is not None
    image = picture(height, height, width)
    inputs = processed([image])
    (want,) = theirs.model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"]).pooler_output
    assert (tower(torch.from_numpy(np.array(image))) - want).abs().max() <= 1e-4 * want.std()


def test_dummy_weights_make_a_tower(folder: Path) -> None:
    settings = read_image_settings(folder)
    model = load_model(folder, ops=torch_table(), load_format="dummy", vision=settings)
    assert model.vision is not None and model.vision(torch.zeros(64, 96, 3, dtype=torch.uint8)).shape == (6, 64)


@pytest.mark.parametrize(("mtp", "heads"), [(False, 1), (True, 2)])
def test_tables_have_room_for_the_images_of_a_step(tmp_path: Path, mtp: bool, heads: int) -> None:
    """It is a part of the weights, after which the arena is sized. Without a tower there is none."""
    write_vision_checkpoint(tmp_path, mtp=True)
    kept: dict[str, Any] = {"ops": torch_table(), "mtp": mtp, "max_model_len": 100, "max_image_tokens": 70}
    seeing, blind = (load_model(tmp_path, vision=each, **kept) for each in (read_image_settings(tmp_path), None))
    assert seeing.images is not None and blind.images is None
    vocab_size, (ids, lines) = seeing.config.vocab_size, (seeing.images._embedding, seeing.images._cos_sin)
    assert lines is not None and len(ids) == vocab_size + 70 and len(lines) == 100 + heads * 70
    assert blind._embedding.equal(ids[:vocab_size]) and not ids[vocab_size:].any() and not lines[100:].any()


def test_older_folders_name_the_tower_otherwise(folder: Path) -> None:
    path = folder / "model.safetensors"
    weights = {name.replace("model.visual.", "visual."): weight for name, weight in load_file(path).items()}
    save_file(weights, path, {"format": "pt"})
    assert load_model(folder, ops=torch_table(), vision=read_image_settings(folder)).vision is not None


def test_a_folder_without_the_towers_weights_says_what_to_do(folder: Path) -> None:
    path = folder / "model.safetensors"
    save_file({k: v for k, v in load_file(path).items() if "visual" not in k}, path, {"format": "pt"})
    with pytest.raises(ModelFolderError, match=r"no tensor 'model.visual.*--language-model-only"):
        load_model(folder, ops=torch_table(), vision=read_image_settings(folder))
    assert load_model(folder, ops=torch_table()).vision is None


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda c: c["vision_config"].update(deepstack_visual_indexes=[1]), "deepstack_visual_indexes"),
        (lambda c: c["vision_config"].update(hidden_act="relu"), "hidden_act='relu'"),
        (lambda c: c["vision_config"].update(num_position_embeddings=63), "needs a square"),
        (lambda c: c["vision_config"].update(out_hidden_size=32), "out_hidden_size=32"),
        (lambda c: c["text_config"]["rope_parameters"].update(mrope_interleaved=False), "three interleaved sections"),
    ],
)
def test_other_towers_are_refused_unless_the_text_model_runs_alone(folder: Path, edit: Any, says: str) -> None:
    change(folder / "config.json", edit)
    with pytest.raises((ModelFolderError, UnsupportedModelError), match=says):
        load_config(folder, vision=read_image_settings(folder))
    assert load_config(folder).vision is None


@pytest.mark.parametrize(
    ("name", "value"), [("use_bidirectional_attention", "vision"), ("image_bidirectional", True), ("is_causal", False)]
)
def test_text_models_that_attend_both_ways_inside_images_are_refused(folder: Path, name: str, value: Any) -> None:
    """A chunk that ends inside an image, and a hit inside one, would change their logits."""
    for where in ("text_config", None):
        copy = json.loads((folder / "config.json").read_text())
        change(folder / "config.json", lambda c, where=where: (c[where] if where else c).update({name: value}))  # type: ignore[misc]
        for settings in (read_image_settings(folder), None):
            with pytest.raises(UnsupportedModelError, match=f"has {name}={value!r}; forkpoint runs this architecture"):
                load_config(folder, vision=settings)
        (folder / "config.json").write_text(json.dumps(copy))
    change(folder / "config.json", lambda c: c["text_config"].update({name: value != "vision" and not value}))
    assert load_config(folder, vision=read_image_settings(folder)).vision is not None
    change_json(folder / "config.json", architectures=["Gemma3ForConditionalGeneration"])
    with pytest.raises(UnsupportedModelError, match="is of a Gemma3ForConditionalGeneration"):
        load_config(folder, vision=read_image_settings(folder))


def test_settings_are_read_where_they_are(folder: Path) -> None:
    found = read_image_settings(folder)
    assert found is not None and (found.token_side, found.min_pixels, found.max_pixels) == (32, 1024, 1 << 22)
    assert found.mean == (0.5, 0.4, 0.5) and found.max_tokens == 4096
    inner = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").unlink()
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": inner}))
    assert read_image_settings(folder) == found
    (folder / "processor_config.json").unlink()
    default = read_image_settings(folder)
    assert default is not None and (default.min_pixels, default.mean) == (65536, (0.5, 0.5, 0.5))
    assert read_image_settings(folder, {"max_pixels": 1 << 24}) is not None


@pytest.mark.parametrize(
    "given", [{"max_pixels": 0}, {"max_pixels": 1 << 25}, {"max_pixels": 900}, {"min_pixels": 1.5}, {"fps": 2}]
)
def test_wrong_bounds_are_refused(folder: Path, given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="mm_processor_kwargs"):
        read_image_settings(folder, given)


@pytest.mark.parametrize("given", [{"size": 5}, {"size": {"shortest_edge": -1}}, {"image_std": [0.5, 0.5, 0]}])
def test_broken_processor_files_are_refused(folder: Path, given: dict[str, Any]) -> None:
    change_json(folder / "preprocessor_config.json", **given)
    with pytest.raises(ModelFolderError, match=r"preprocessor_config\.json"):
        read_image_settings(folder)


def test_models_without_a_tower_have_no_settings(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3_5")
    assert read_image_settings(tmp_path) is None


def test_without_pillow_images_are_refused_and_texts_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig.from_flat(model=str(folder))
    monkeypatch.setattr(image_processor, "find_spec", lambda name: None)
    assert ImageProcessor.load(config) is None
