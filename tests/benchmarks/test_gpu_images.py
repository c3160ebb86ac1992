"""The image benchmark on a model that a CPU runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import gpu_images
from benchmarks.gpu_9b.measures import ProtocolError
from benchmarks.gpu_images import ImageSizes, Pictures, main
from tests.benchmarks.test_gpu_9b import SHAPE, SIZES

TINY = replace(SHAPE, head_dim=64, num_layers=4)
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "num_position_embeddings": 64}
SMALL = ImageSizes(
    side=512,
    text=100,
    new=20,
    num_at_once=3,
    text_at_once=4,
    text_only=replace(SIZES, prompt=128, decode_batches=(2,)),
    arena_bytes=1 << 26,
    max_num_seqs=4,
)
FLAGS = ["--device", "cpu", "--repeats", "1", "--commit", "0000000"]


def test_every_line_is_printed_and_the_tower_ran_as_often_as_it_has_to(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("PIL")
    assert main(FLAGS, TINY, VISION, SMALL) == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 3 + 1 + 2 + 1 + 3
    assert [row[-1] for row in rows].count(">= 0.99 |") == 3
    monkeypatch.setattr(Pictures, "forget_embeddings", lambda self: self.client.forget())
    with pytest.raises(ProtocolError, match="the tower ran 1 times instead of 0"):
        main([*FLAGS, "--only", gpu_images.IMAGES], TINY, VISION, SMALL)
