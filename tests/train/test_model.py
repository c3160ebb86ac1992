"""The training model against transformers', its MTP head, and the folders that it is kept in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from forkpoint.models.registry import load_model as load_forkpoint
from forkpoint.ops.select import torch_table
from tests.driver import Driver
from tests.train.small import small_model, small_shape
from train.delta_rule import torch_delta_rule
from train.model import HybridModel, make_rows
from train.shape import ModelShape
from train.storage import load_model, save_model

ROWS, LENGTH = 2, 192
CPU = torch.device("cpu")


def random_tokens() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, small_shape().vocab_size, (ROWS, LENGTH), generator=generator)


@torch.no_grad()
def our_logits(model: HybridModel, tokens: Tensor) -> Tensor:
    rows = make_rows(model.shape, *tokens.shape, CPU)
    return model.logits(model(tokens.flatten(), rows)).unflatten(0, tokens.shape)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    save_model(small_model(), folder, 1, 2)
    return folder


def reloaded(folder: Path) -> HybridModel:
    return load_model(folder, torch_delta_rule, torch.float32, CPU)


def test_logits_equal_transformers(folder: Path) -> None:
    theirs = transformers.Qwen3NextForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = random_tokens()
    with torch.no_grad():
        want = theirs(tokens, use_cache=False).logits
    assert float((our_logits(reloaded(folder), tokens) - want).abs().max() / want.std()) < 1e-4


def test_logits_equal_forkpoint(folder: Path) -> None:
    driver = Driver(load_forkpoint(folder, ops=torch_table(), dtype="float32"))
    tokens = random_tokens()
    want = our_logits(reloaded(folder), tokens)[0]
    got = driver.prefill(driver.row(), tokens[0].tolist())
    assert float((got - want).abs().max() / want.std()) < 1e-4


def test_folder_holds_the_model_rounded_to_bf16(folder: Path) -> None:
    weights = reloaded(folder).state_dict()
    for name, weight in small_model().state_dict().items():
        assert torch.equal(weights[name], weight.bfloat16().float()), name


def test_large_models_are_cut_into_shards(tmp_path: Path) -> None:
    model = HybridModel(ModelShape(vocab_size=1536), torch_delta_rule, torch.float32)
    save_model(model, tmp_path, 1, 2)
    shards = list(tmp_path.glob("*.safetensors"))
    assert len(shards) == 3 and max(path.stat().st_size for path in shards) < 9 << 20
    assert torch.equal(reloaded(tmp_path).mtp.fc.weight, model.mtp.fc.weight.bfloat16().float())
    assert sum(p.numel() for p in model.parameters()) < 12_000_000


def test_config_says_the_shape() -> None:
    assert ModelShape.from_hf(small_shape().hf_config(1, 2)) == small_shape()


@torch.no_grad()
def test_draft_is_one_attention_layer_over_the_joined_inputs(folder: Path) -> None:
    """The head by transformers' own modules: its layer has the names and the arithmetic of a decoder layer."""
    model, tokens = reloaded(folder), random_tokens()
    rows = make_rows(model.shape, *tokens.shape, CPU)
    hidden, following = model(tokens.flatten(), rows), tokens.flatten().roll(-1)
    got = model.draft(hidden, following, rows)

    theirs = transformers.Qwen3NextForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    last = len(theirs.model.layers) - 1
    layer = theirs.model.layers[last]
    layer.load_state_dict(model.mtp.layers[0].state_dict())
    x = model.mtp.join(model.embedding(following), hidden).unflatten(0, tokens.shape)
    positions = theirs.model.rotary_emb(x, torch.arange(LENGTH)[None])
    mask = torch.full((LENGTH, LENGTH), -torch.inf).triu(1)[None, None]
    want = model.mtp.norm(layer(x, position_embeddings=positions, attention_mask=mask)).flatten(0, 1)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_drafts_see_no_token_beyond_the_next(folder: Path) -> None:
    model, tokens = reloaded(folder), random_tokens()
    rows = make_rows(model.shape, *tokens.shape, CPU)
    drafts = []
    for changed in (0, 7):
        other = tokens.clone()
        other[:, 100] = 3 + changed
        hidden = model(other.flatten(), rows)
        drafts.append(model.draft(hidden, other.flatten().roll(-1), rows).unflatten(0, tokens.shape))
    assert torch.equal(drafts[0][:, :99], drafts[1][:, :99])
    assert not torch.equal(drafts[0][:, 99], drafts[1][:, 99])
