"""The MTP head against the training code's, which transformers' own layers confirm, and its folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.indices import attention_index
from forkpoint.errors import UnsupportedModelError
from forkpoint.models.context import ForwardContext
from forkpoint.models.mtp import FIRST_KEY
from forkpoint.models.registry import load_config, load_model
from forkpoint.ops.ranks import ALONE, Ranks
from forkpoint.ops.select import select_table, torch_table
from tests.checkpoints import write_checkpoint
from tests.driver import BLOCK, Driver, Row, Work
from tests.json_files import change_json
from tests.mtp_heads import ReferenceHead, add_mtp, add_published_mtp, rms_norm
from tests.thread_ranks import on_each
from tests.train.small import small_model, small_shape
from train.delta_rule import torch_delta_rule
from train.model import HybridModel, make_rows
from train.storage import load_model as load_training_model
from train.storage import save_model

TOLERANCE = 1e-4  # of the logits' standard deviation
LENGTH, DEPTH = 192, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mtp")
    save_model(small_model(), folder, 1, 2)
    return folder


@pytest.fixture(scope="module")
def theirs(folder: Path) -> HybridModel:
    return load_training_model(folder, torch_delta_rule, torch.float32, torch.device("cpu"))


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, small_shape().vocab_size, (LENGTH,), generator=generator).tolist()


@torch.no_grad()
def wanted(model: HybridModel, tokens: Sequence[int], known: int) -> list[Tensor]:
    """Logits of the drafts after `known` tokens and the one that follows, each told the text's own next token."""
    flat = torch.tensor([*tokens])
    rows = make_rows(model.shape, 1, len(flat), flat.device)
    outputs = model.drafts(model(flat, rows), [flat.roll(-count) for count in range(1, DEPTH + 1)], rows)
    return [model.logits(output)[known - 1] for output in outputs]


@torch.no_grad()
def drafted(driver: Driver, row: Row, tokens: Sequence[int]) -> list[Tensor]:
    """The same by the engine's model, whose row has computed `known` tokens."""
    known, model = row.num_computed, driver.model
    while len(row.blocks) * BLOCK < known + DEPTH:
        row.blocks.append(driver._blocks.pop())
    hidden, found = driver.caches[-1]["conv"][row.read_slot, -1:], []
    table = torch.tensor([row.blocks], dtype=torch.int32)
    for at in range(known, known + DEPTH):
        place = torch.tensor([row.blocks[at // BLOCK] * BLOCK + at % BLOCK])
        index = attention_index([1], [at + 1], table, place, 1, first_key=FIRST_KEY)
        ctx = ForwardContext(torch.tensor([at]), 1, index, {}, {}, driver.caches)
        output, hidden = model.draft(torch.tensor(tokens[at : at + 1]), hidden, ctx)
        found.append(model.logits(output)[0].float())
    return found


@pytest.mark.parametrize(("known", "cuts"), [(1, []), (64, []), (65, [64]), (127, [1, 63, 65]), (129, [64, 128])])
def test_logits_are_those_of_the_training_code(
    folder: Path, theirs: HybridModel, tokens: list[int], known: int, cuts: list[int]
) -> None:
    driver = Driver(load_model(folder, ops=torch_table(), dtype="float32", mtp=True))
    row = driver.row()
    decoded = known // 3  # the last tokens one by one
    driver.prefill(row, tokens[: known - decoded], [cut for cut in cuts if cut < known - decoded])
    for token in tokens[known - decoded : known]:
        driver.run([Work(row, [token], decode=True)])
    for want, got in zip(wanted(theirs, tokens, known), drafted(driver, row, tokens), strict=True):
        assert float((got - want).abs().max() / want.std()) < TOLERANCE


def test_the_rest_of_the_model_is_the_same_with_it(folder: Path, tokens: list[int]) -> None:
    found = []
    for mtp in (False, True):
        driver = Driver(load_model(folder, ops=torch_table(), dtype="float32", mtp=mtp))
        found.append(driver.prefill(driver.row(), tokens, [64]))
    assert torch.equal(*found)
    assert len(load_config(folder, mtp=True).layer_specs) == len(load_config(folder).layer_specs) + 1


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_next_moe", "qwen3_5", "qwen3_5_moe", "qwen3_5_multimodal"])
def test_folders_of_all_families(tmp_path: Path, family: str) -> None:
    write_checkpoint(tmp_path, family, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    with pytest.raises(UnsupportedModelError, match=r"holds no MTP head .* 'ngram'"):
        load_model(tmp_path, ops=torch_table(), mtp=True)
    plain = load_model(tmp_path, ops=torch_table())
    add_mtp(tmp_path, "mtp_num_hidden_layers" if "5" in family else "num_nextn_predict_layers")
    model = load_model(tmp_path, ops=torch_table(), mtp=True)
    assert load_model(tmp_path, ops=torch_table()).layer_specs == plain.layer_specs
    driver = Driver(model)
    row = driver.row()
    driver.prefill(row, [5, 6, 7, 8])
    assert all(bool(logits.isfinite().all()) for logits in drafted(driver, row, [5, 6, 7, 8, 9, 10, 11]))


@pytest.mark.parametrize(
    ("count", "told"),
    [(0, "has no MTP head"), (2, "has 2 MTP heads, where forkpoint drafts with a single one; --speculative-config")],
)
def test_other_numbers_of_layers_are_refused(tmp_path: Path, count: int, told: str) -> None:
    write_checkpoint(tmp_path, "qwen3_next")
    change_json(tmp_path / "config.json", num_nextn_predict_layers=count)
    with pytest.raises(UnsupportedModelError, match=told):
        load_config(tmp_path, mtp=True)
    assert not load_config(tmp_path).draft_layer


@pytest.mark.parametrize(
    ("family", "fields", "told"),
    [
        ("olmo_hybrid", {}, "has no MTP head"),
        ("nemotron_h", {"num_nextn_predict_layers": 2}, "has 2 MTP heads, where forkpoint drafts with a single one"),
        ("nemotron_h", {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "M*E"}, "an MTP head of a kind"),
    ],
)
def test_other_heads_are_refused(tmp_path: Path, family: str, fields: dict[str, Any], told: str) -> None:
    write_checkpoint(tmp_path, family)
    change_json(tmp_path / "config.json", mtp_layers_block_type=None, **fields)
    with pytest.raises(UnsupportedModelError, match=told):
        load_config(tmp_path, mtp=True)


@pytest.mark.parametrize("family", ["nemotron_h", "bailing_hybrid", "bailing_moe_v2_5"])
@torch.no_grad()
def test_heads_of_nemotron_and_ling_have_transformers_logits(family: str, tmp_path: Path) -> None:
    main = write_checkpoint(tmp_path, family)
    head, joining = add_published_mtp(tmp_path, family)
    head.lm_head.weight.copy_(main.lm_head.weight)
    tokens, known = [5 + (7 * i * i + 3 * i) % 200 for i in range(90)], 70
    hidden = main(torch.tensor([tokens]), use_cache=False, output_hidden_states=True).hidden_states[-1][0]
    embedded = main.get_input_embeddings()(torch.tensor(tokens))

    eps = getattr(main.config, "layer_norm_epsilon", None) or main.config.rms_norm_eps

    def joined(at: int, before: Tensor) -> Tensor:
        parts = ((embedded[at], "embedding_norm"), (before, "hidden_norm"))
        return joining["join"] @ torch.cat([rms_norm(x, joining[name], eps) for x, name in parts])

    inputs, want = [joined(at, hidden[at - 1]) for at in range(1, known + 1)], list[Tensor]()
    for at in range(known, known + DEPTH):
        found = head(inputs_embeds=torch.stack(inputs)[None], use_cache=False, output_hidden_states=True)
        want.append(found.logits[0, -1])
        inputs.append(joined(at + 1, found.hidden_states[-1][0, -1]))
    driver = Driver(load_model(tmp_path, ops=torch_table(), mtp=True))
    row = driver.row()
    driver.prefill(row, tokens[:known], [64])
    for theirs, ours in zip(want, drafted(driver, row, tokens), strict=True):
        assert float((ours - theirs).abs().max() / theirs.std()) < TOLERANCE
    assert len(load_model(tmp_path, ops=torch_table()).layer_specs) == len(driver.model.layer_specs) - 1


# Attention to all keys is what an index of so many tokens chooses, and what the newest tokens are.
REFERENCES: dict[str, dict[str, Any]] = {
    "glm5_next": {"index_topk": 256},
    "qwen4_exp": {"indexer_budget": 256},
    "alice_ai": {},
}


@pytest.mark.parametrize("family", REFERENCES)
@torch.no_grad()
def test_heads_have_the_logits_of_transformers_parts(family: str, tmp_path: Path) -> None:
    config = REFERENCES[family]
    main = write_checkpoint(tmp_path, family, **config)
    theirs = ReferenceHead(family, main, *add_published_mtp(tmp_path, family, **config))
    tokens, known = [5 + (7 * i * i + 3 * i) % 200 for i in range(90)], 70
    hidden, embedded = theirs.hidden(tokens), main.get_input_embeddings()(torch.tensor(tokens))
    inputs = [theirs.joined(embedded[at], hidden[at - 1]) for at in range(1, known + 1)]
    want = list[Tensor]()
    for at in range(known, known + DEPTH):
        output, carried = theirs.last(inputs)
        want.append(main.lm_head(output))
        inputs.append(theirs.joined(embedded[at + 1], carried))

    @torch.no_grad()
    def found(table: str, ranks: Ranks = ALONE) -> list[Tensor]:
        driver = Driver(load_model(tmp_path, ops=select_table(table, False, False), ranks=ranks, mtp=True))
        row = driver.row()
        driver.prefill(row, tokens[:known], [64])
        return drafted(driver, row, tokens)

    for got in (found("torch"), found("cpp"), *on_each(2, False, lambda ranks: found("torch", ranks))):
        for wanted_logits, ours in zip(want, got, strict=True):
            assert float((ours - wanted_logits).abs().max() / wanted_logits.std()) < TOLERANCE
