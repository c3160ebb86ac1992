"""The memory that steps need next to the arena, and the error message if memory runs out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from forkpoint.checks import first_line
from forkpoint.config import BLOCK_SIZE, GIB
from forkpoint.errors import ConfigError
from forkpoint.runtime.dealt_keys import MOST_GATHERED
from forkpoint.runtime.loaded import Loaded
from forkpoint.runtime.records import records_bytes
from forkpoint.runtime.runner import ModelRunner
from forkpoint.worker.trial import encode_largest_image, full_step, full_step_pages, run_full_step

SAMPLER_BYTES_PER_LOGIT = 20  # bytes; a few fp32 copies of the logits of all rows, and the counts for penalties
NUM_TRIALS = 4  # graphs whose size is measured; recording all of them twice would take too long
GATHERED_COPIES = 3  # of keys: a rank's own part and all parts, apart and in the order of the tokens
SLACK_BYTES = 256 << 20  # for workspaces of libraries and the rounding of allocators


@contextmanager
def explained_exhaustion(doing: str, remedy: str) -> Iterator[None]:
    """Turn a lack of memory in a `with` block into a ConfigError that names `doing` and the `remedy`."""
    try:
        yield
    except RuntimeError as error:
        # torch has no exception of its own for a lack of host memory.
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        raise ConfigError(f"memory ran out while {doing}; {remedy} ({first_line(error)})") from error


def bytes_beside_arena(loaded: Loaded) -> int:
    """Return the bytes of device memory that steps need next to weights and arena.

    The bytes are for:

    - activations of a full step, measured by running one;
    - activations of the vision tower for the largest image, and the most embeddings that are kept during a step;
    - the sampler's copies of the logits;
    - graphs of the `shapes`;
    - records of tokens;
    - keys that are gathered from other ranks.

    Raises ConfigError if a full step does not fit next to the weights.
    """
    sched, platform, config, shapes = loaded.sched, loaded.platform, loaded.model.config, loaded.shapes
    remedy = (
        f"lower max_num_batched_tokens={sched.max_num_batched_tokens}, or use a device with more than the "
        f"{platform.free_bytes() / GIB:.1f} GiB that the weights leave here"
    )
    encoding, vision = 0, loaded.model.vision
    if vision is not None:
        images_remedy = f"lower max_pixels of mm_processor_kwargs, or start with --language-model-only; or {remedy}"
        with explained_exhaustion("encoding the largest image", images_remedy):
            encoding = platform.peak_bytes(partial(encode_largest_image, vision))
        num_kept = sched.encoder_cache_size + max(sched.encoder_budget, vision.config.settings.max_tokens)
        encoding += num_kept * vision.bytes_per_token
    with explained_exhaustion("running a full step", remedy):
        activations = platform.peak_bytes(lambda: run_full_step(loaded))
    activations -= full_step_pages(loaded.layout, sched, config.max_model_len) * loaded.layout.page_bytes
    logits = sched.max_num_seqs * config.vocab_size * SAMPLER_BYTES_PER_LOGIT
    largest = max((shape.num_tokens for shape in shapes), default=0)
    recorded = activations * largest // sum(full_step(sched, config.max_model_len))
    with explained_exhaustion("recording graphs on trial", "give enforce_eager, or " + remedy):
        recorded += len(shapes) * graph_bytes(loaded)
    most_tokens, interval = 1 + loaded.max_num_drafts, loaded.state_write_interval
    records = records_bytes(loaded.layout, sched.max_num_seqs, most_tokens, interval)
    gathered = gathered_bytes(loaded)
    return max(0, activations) + encoding + logits + recorded + records + gathered + SLACK_BYTES


def gathered_bytes(loaded: Loaded) -> int:
    """Return the bytes that the keys of one layer take when they are gathered from all ranks, with their copies."""
    if loaded.ranks.size == 1:
        return 0
    specs = (spec for spec in loaded.layout.kv if spec.window is None)
    largest = max((spec.block_bytes(BLOCK_SIZE) for spec in specs), default=0)
    num_tokens = max(MOST_GATHERED, loaded.model.config.max_model_len)
    return GATHERED_COPIES * num_tokens // BLOCK_SIZE * largest


def graph_bytes(loaded: Loaded) -> int:
    """Return the bytes of device memory that a graph of the `shapes` keeps, on average.

    Found by recording a few of them twice.
    """
    layout, platform = loaded.layout, loaded.platform
    trials = loaded.shapes[:: max(1, len(loaded.shapes) // NUM_TRIALS)]

    def record() -> tuple[ModelRunner, int]:
        runner = ModelRunner(replace(loaded, shapes=trials), 1 + layout.num_pages_for(BLOCK_SIZE, 1))
        before = platform.free_bytes()
        while runner.record_next():
            pass
        return runner, before - platform.free_bytes()

    if not trials:
        return 0
    first, _ = record()  # the second run counts neither loaded kernels nor memory that graphs share
    second, taken = record()
    for runner in (first, second):
        runner.close()
    del runner, first, second
    platform.release_unused()
    return max(0, taken) // len(trials)
