"""A sparse model that reads images, with the C++ operators, against float64: operators alone and all logits.

Two engines in fp32 may differ by far more than the sum of their operators' errors. A head whose recurrent output
nearly cancels is normalised, which makes its rounding error large; the first tokens of a prompt often have one. And a
router whose next best expert is as good as the last one it takes may take either.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from forkpoint.ops.cpu.build import load_operators
from forkpoint.ops.select import select_table, torch_table
from forkpoint.worker import build
from tests.float64 import ROUNDING, Compared, Float64Oracle
from tests.image_models import Part, Watched, picture, write_vision_checkpoint
from tests.lfm2_vl_models import Lfm2VlOracle, lfm2_vl_prompt, write_lfm2_vl

if load_operators().module is None:
    pytest.skip("no C++ operators here", allow_module_level=True)

TOLERANCE = 1e-4  # of the standard deviation of logits, and of router scores
NUM_NOISY, NOISE_FACTOR = 4, 4  # runs of the oracle with rounding errors, and what their largest error is multiplied by
NUM_LAYERS = 8  # the more layers, the more rounding errors grow
MAX_ROW_ERROR = 4e-6  # of an operator's result, as a share of its row's length; fp32 rounds to 6e-8
OPERATORS = (
    "linear",
    "rmsnorm",
    "add_rmsnorm",
    "gated_rmsnorm",
    "qk_norm_rope_write",
    "paged_attention",
    "conv_prefill",
    "conv_update",
    "recurrence_prefill",
    "recurrence_decode",
    "route",
    "experts",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder, and transformers' instance of it in fp32."""
    pytest.importorskip("PIL.Image")
    folder = tmp_path_factory.mktemp("moe")
    return folder, write_vision_checkpoint(folder, moe=True, num_hidden_layers=NUM_LAYERS)


def ids(seed: int, count: int) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(2, 240, count).tolist()
    return found


class Routed(Watched):
    """An engine whose routers' scores and choices are kept, and compared with float64 as its logits are."""

    def __init__(self, folder: Path, theirs: Any, oracle: Float64Oracle, **options: Any) -> None:
        super().__init__(folder, theirs, cpu_ops="cpp", checkpoint_interval=64, **options)
        self._oracle = oracle
        self._mlps = [layer._blocks[-1][1] for layer in self._model._layers]
        self._scores: list[list[Tensor]] = [[] for _ in self._mlps]
        self._chosen: list[Tensor] = []  # the experts that each layer chose in the last request
        for mlp, kept in zip(self._mlps, self._scores, strict=True):
            mlp._router = self._noting(mlp._router, kept)

    @staticmethod
    def _noting(router: Any, kept: list[Tensor]) -> Any:
        def noting(x: Tensor) -> Tensor:
            found: Tensor = router(x)
            kept.append(found.clone())
            return found

        return noting

    def excess(self, parts: list[Part], num_outputs: int = 1) -> float:
        """Ask, and return the largest error of a token's logits or router scores, as a multiple of the allowed one.

        float64 is told the experts that the engine chose, because a tie may be decided either way. It then must have
        the same scores, so only ties can have been decided otherwise. An error beyond TOLERANCE is allowed where
        float64 makes it too, once each of its linear layers has the rounding error of an fp32 operator.

        Cached tokens must be those of the request before.
        """
        for kept in self._scores:
            kept.clear()
        found = self.ask(parts, num_outputs)
        cached = found.cached
        moe = self._mlps[0]._moe
        scores = [torch.cat(kept)[:, : moe.num_experts] for kept in self._scores]
        chosen = [each.topk(moe.rule.top_k, dim=-1).indices for each in scores]
        if cached:
            chosen = [torch.cat((old[:cached], new)) for old, new in zip(self._chosen, chosen, strict=True)]
        self._chosen = chosen
        ours = [self.computed(), *scores]

        def exact(noise: float = 0.0) -> list[Tensor]:
            logits = self._oracle.run(found.ids, parts, chosen, noise)
            return [each[cached:] for each in (logits, *self._oracle.scores)]

        want = exact()
        error = errors(ours, want)
        allowed = torch.full_like(error, TOLERANCE)
        if bool((error > allowed).any()):
            torch.manual_seed(0)
            noisy = [errors(exact(ROUNDING), want) for _ in range(NUM_NOISY)]
            allowed = torch.maximum(allowed, NOISE_FACTOR * torch.stack(noisy).amax(0))
        return float((error / allowed).max())


def errors(found: list[Tensor], want: list[Tensor]) -> Tensor:
    """Return each token's largest error, in standard deviations: `[outputs, T]`."""
    pairs = zip(found, want, strict=True)
    return torch.stack([(got.double() - exact).abs().amax(1) / exact.std() for got, exact in pairs])


@pytest.fixture(scope="module")
def oracle(model: tuple[Path, Any]) -> Float64Oracle:
    return Float64Oracle(model[0])


@pytest.fixture(scope="module")
def routed(model: tuple[Path, Any], oracle: Float64Oracle) -> Iterator[Routed]:
    found = Routed(*model, oracle)
    yield found
    found.llm.close()


INTRO, QUESTION, OTHER = ids(1, 100), ids(2, 40), ids(3, 70)


def test_operators_are_as_exact_as_those_of_torch(model: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """On the inputs that they have in this model, with and without cancelling heads."""
    compared = Compared(torch_table(), select_table("cpp", False, False), OPERATORS)
    monkeypatch.setattr(build, "select_table", lambda *given: compared.table)
    watched = Watched(*model)
    watched.ask([INTRO, picture(1, 320, 448), QUESTION], 4)
    watched.ask([ids(57, 99)])
    watched.llm.close()
    assert sorted(compared.errors) == sorted(OPERATORS)
    for name, pairs in compared.errors.items():
        torchs, ours = (torch.cat(errors) for errors in zip(*pairs, strict=True))
        assert ours.max() <= MAX_ROW_ERROR, name
        assert ours.median() <= 2 * torchs.median(), name


def test_logits_cold_after_hits_and_decoding(routed: Routed) -> None:
    image = picture(1, 320, 448)
    for parts, num_outputs in (
        ([INTRO, image, QUESTION], 1),
        ([INTRO, image, QUESTION], 40),  # a hit behind the image
        ([INTRO, image, OTHER], 1),  # inside it
        ([INTRO, picture(3, 320, 448), QUESTION, image], 1),  # before it
    ):
        assert routed.excess(parts, num_outputs) <= 1


@pytest.mark.parametrize("budget", [64, 128, 192])
def test_logits_in_chunks(model: tuple[Path, Any], oracle: Float64Oracle, budget: int) -> None:
    routed = Routed(*model, oracle, max_num_batched_tokens=budget, max_num_seqs=1)
    assert routed.excess([INTRO, picture(1, 320, 448), QUESTION]) <= 1
    routed.llm.close()


@pytest.mark.parametrize("seed", [29, 57, 116])
def test_logits_where_heads_cancel_and_routers_tie(routed: Routed, seed: int) -> None:
    """With seed 57 the first token's logits are off by 2.5e-3. With 29 and 116, experts are 5e-6 and 1e-6 apart."""
    rng = np.random.default_rng(seed)
    text: list[Part] = [ids(seed, int(rng.integers(3, 200)))]
    image: list[Part] = [ids(seed, int(rng.integers(3, 100)))]
    image += [picture(seed, *(int(side) for side in rng.integers(64, 300, 2))), ids(seed + 100, 20)]
    for parts in text, image:
        routed.llm.reset_prefix_cache()
        assert routed.excess(parts) <= 1


@pytest.mark.parametrize("family", ["qwen3_5", "lfm2_vl", "lfm2_vl_moe"])
def test_other_families_have_the_logits_of_transformers(tmp_path: Path, family: str) -> None:
    options: dict[str, Any] = {"cpu_ops": "cpp", "checkpoint_interval": 64}
    if family == "qwen3_5":
        watched = Watched(tmp_path, write_vision_checkpoint(tmp_path), **options)
    else:
        theirs = write_lfm2_vl(tmp_path, moe=family == "lfm2_vl_moe")
        watched = Watched(tmp_path, theirs, lfm2_vl_prompt, Lfm2VlOracle(tmp_path), **options)
    image = picture(1, 320, 448)
    for question, num_outputs in (QUESTION, 40), (QUESTION, 1), (OTHER, 1):
        assert watched.ask([INTRO, image, question], num_outputs).error <= TOLERANCE
    watched.llm.close()
