"""Recorded steps of ranks that keep tokens in turn, on a device with memory of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from forkpoint.params import SamplingParams
from forkpoint.runtime.graphs import graph_shapes
from tests.engine.drafters import RandomDrafter
from tests.engine.real import ModelBank, Options, start
from tests.runtime.test_graphs import RecordingPlatform

PROMPTS = [[5 + (7 * i + 3 * n) % 90 for i in range(40 + 45 * n)] for n in range(3)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def answers(bank: ModelBank, options: Options) -> tuple[list[list[int]], int]:
    """Return the ids of prompts that are asked twice, and the number of recorded steps."""
    platform, shapes = None, ()
    if options.num_ranks > 1:
        platform, every = RecordingPlatform(), graph_shapes(options.max_num_seqs, max_num_drafts=options.max_num_drafts)
        shapes = tuple(shape for shape in every if not shape.num_segments)
    drafter = RandomDrafter(3, options.max_num_drafts, bank.vocab_size, options.mtp)
    run = start(bank, options, drafter, platform, shapes)
    names = []
    for _ in range(2):
        names += [run.add(prompt, PARAMS) for prompt in PROMPTS]
        run.run()
    run.check_nothing_leaked()
    return [list(run.outputs[name].outputs[0].token_ids) for name in names], run.core.num_replayed_steps


def test_ids_are_those_of_one_device(tmp_path: Path) -> None:
    """With drafts of the model itself, steps ahead, and lists of work for latents and for one KV head."""
    bank = ModelBank(tmp_path)
    for model in ("bailing_hybrid", "qwen3_next"):
        one = Options(model, max_num_drafts=3, mtp=True, async_scheduling=True, max_num_seqs=4)
        found, num_replayed = answers(bank, replace(one, num_ranks=2, context_size=2, interleave=8))
        assert found == answers(bank, one)[0] and num_replayed > 5
