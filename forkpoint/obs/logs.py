"""The log on standard error: lines about operators and memory at the start, then lines about the load."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TextIO

from forkpoint.cache.layout import CacheLayout
from forkpoint.config import BLOCK_SIZE, GIB, EngineConfig

LOGGER: Final = logging.getLogger("forkpoint")
COLORS: Final = {"DEBUG": "36", "INFO": "32", "WARNING": "33", "ERROR": "31", "CRITICAL": "31"}
MIB: Final = 2**20
CONTROLS: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

MISSED: Final = ("no_checkpoint", "evicted")
RESTORED: Final = (  # counters of tokens, and what they count
    ("host_hit_tokens", "restored from the host tier"),
    ("disk_hit_tokens", "restored from the disk tier"),
    ("peer_hit_tokens", "fetched from other servers"),
)


class Formatter(logging.Formatter):
    """Formats `LEVEL time [file:line] message`, with the level in colour on a terminal.

    Clients cannot forge log lines: control characters are escaped, and the lines of a traceback are indented.
    """

    def __init__(self, *, color: bool) -> None:
        super().__init__("%(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s", "%H:%M:%S")
        self._color = color

    def format(self, record: logging.LogRecord) -> str:
        first, *others = super().format(record).split("\n")
        return "\n".join([first, *("    " + shown_plain(line) for line in others)])

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = shown_plain(super().formatMessage(record))
        if not self._color:
            return line
        level = record.levelname
        return f"\033[{COLORS.get(level, '0')}m{level}\033[0m{line[len(level) :]}"


def shown_plain(text: str) -> str:
    """Return `text` with line breaks and terminal control characters escaped."""
    return CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


class LossCountingHandler(logging.StreamHandler[TextIO]):
    """Counts lines that cannot be written (full disk, closed pipe) and reports them when writing works again."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self.num_lost = 0
        self._unreported = 0
        self._why = ""

    def emit(self, record: logging.LogRecord) -> None:
        unreported = self._unreported
        try:
            if unreported:
                self.stream.write(f"{unreported} log lines were lost: {self._why}{self.terminator}")
            self.stream.write(self.format(record) + self.terminator)
            self.stream.flush()
        except (OSError, ValueError) as error:
            self.num_lost += 1
            self._unreported += 1
            self._why = str(error)
        except Exception:
            self.handleError(record)
        else:
            self._unreported -= unreported


def num_lost_lines() -> int:
    """Return the number of log lines of this process that could not be written."""
    return sum(handler.num_lost for handler in LOGGER.handlers if isinstance(handler, LossCountingHandler))


def set_up_logging(level: str) -> None:
    """Send forkpoint's log from `level` upward to standard error. A second call replaces the first."""
    handler = LossCountingHandler(sys.stderr)
    handler.setFormatter(Formatter(color=wants_color(sys.stderr)))
    for old in list(LOGGER.handlers):
        LOGGER.removeHandler(old)
    LOGGER.addHandler(handler)
    LOGGER.setLevel(level.upper())
    LOGGER.propagate = False


def wants_color(stream: TextIO) -> bool:
    """Return whether to use colour: NO_COLOR decides first, then FORCE_COLOR, then whether `stream` is a terminal."""
    return not os.environ.get("NO_COLOR") and (bool(os.environ.get("FORCE_COLOR")) or stream.isatty())


def counted(number: int, noun: str) -> str:
    """Return the number and the noun: "1 slot", "2,000 slots"."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun}s"


def cache_plan_lines(
    layout: CacheLayout,
    num_pages: int,
    config: EngineConfig,
    max_model_len: int,
    num_host_pages: int = 0,
    num_disk_entries: int | None = None,
) -> list[str]:
    """Return start-up lines: the arena's contents, sizes of block, slot and tiers, what prefix caching does."""
    lines = [
        f"arena: {num_pages} pages of {layout.page_bytes:,} bytes ({num_pages * layout.page_bytes / MIB:.1f} MiB); "
        f"a page holds {_contents(layout)}, {layout.padding:.1%} padding at most"
    ]
    if layout.has_kv:
        most = (num_pages - 1) * layout.blocks_per_page
        lines.append(f"block: {BLOCK_SIZE} tokens, {layout.block_bytes:,} bytes; {most:,} at most")
    for group in layout.windows:
        most = (num_pages - 1) * group.blocks_per_page
        lines.append(f"block of a window of {group.window} tokens: {group.block_bytes:,} bytes; {most:,} at most")
    if layout.has_states:
        most = (num_pages - 1) * layout.slots_per_page
        lines.append(f"slot: one state of any length, {layout.slot_bytes:,} bytes; {most:,} at most")
    room = num_pages // max(1, layout.num_pages_for(max_model_len, 1))
    lines.append(f"room for {counted(room, 'request')} of max_model_len={max_model_len} at once")
    if num_host_pages:
        size = num_host_pages * layout.in_tiers().page_bytes / MIB
        lines.append(f"host tier: {num_host_pages} pages ({size:.1f} MiB) for what the arena evicts")
    if num_disk_entries is not None:
        limit = config.disk_write_limit_bytes / GIB
        lines.append(
            f"disk tier: {config.kv_disk_path}, {config.kv_disk_size:g} GiB, at most {limit:g} GiB written a day; "
            f"{num_disk_entries:,} entries of earlier runs"
        )
    return [*lines, _caching_line(layout, config)]


def operators_line(backends: Mapping[str, str]) -> str:
    """Return a start-up line with the number of operators of each backend."""
    numbers = Counter(backends.values())
    return "operators: " + ", ".join(f"{number} by {backend}" for backend, number in sorted(numbers.items()))


def operator_lines(backends: Mapping[str, str], copied: Iterable[str]) -> list[str]:
    """Return start-up lines on each operator's backend and on state operators that need copies before a step."""
    by_backend: dict[str, list[str]] = {}
    for name, backend in sorted(backends.items()):
        by_backend.setdefault(backend, []).append(name)
    lines = [f"operators by {backend}: {', '.join(names)}" for backend, names in sorted(by_backend.items())]
    copied = sorted(copied)
    if copied:
        lines.append(f"state_copy before each step for: {', '.join(copied)}")
    else:
        lines.append("state_copy: not needed, all state operators redirect")
    return lines


def _contents(layout: CacheLayout) -> str:
    kinds = []
    if layout.has_kv:
        kinds.append(counted(layout.blocks_per_page, "block"))
    if layout.has_states:
        kinds.append(counted(layout.slots_per_page, "slot"))
    kinds += (f"{counted(group.blocks_per_page, 'block')} of a window" for group in layout.windows)
    return " or ".join(kinds)


def _caching_line(layout: CacheLayout, config: EngineConfig) -> str:
    cache = config.cache
    if not cache.enable_prefix_caching:
        return "prefix caching: off"
    if layout.has_states and not cache.checkpoints:
        return "prefix caching: no state checkpoints (mamba_cache_mode=none), so this model never hits"
    interval = layout.capture_interval(cache.checkpoint_interval)
    checkpoints = f", periodic checkpoints every {interval} tokens" if interval else ", periodic checkpoints off"
    if cache.capture_policy != "default":
        checkpoints = f", checkpoints by {cache.capture_policy}"
    if not layout.has_states:
        checkpoints = ""
    return (
        f"prefix caching: on, smallest reusable prefix {BLOCK_SIZE} tokens{checkpoints}, "
        f"eviction by {cache.eviction_policy}"
    )


@dataclass(frozen=True, slots=True)
class Reading:
    """Counters at one moment: tokens since the start, and the engine's statistics."""

    time_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    stats: Mapping[str, Any]


def load_line(before: Reading, now: Reading) -> str:
    """Return a line on the load between two readings and on the engine's state now."""
    elapsed = max(now.time_s - before.time_s, 1e-9)
    stats = now.stats
    pages = max(1, stats["num_pages"] - 1)
    parts = [
        f"prompts {(now.num_prompt_tokens - before.num_prompt_tokens) / elapsed:,.1f} tokens/s",
        f"answers {(now.num_output_tokens - before.num_output_tokens) / elapsed:,.1f} tokens/s",
        f"running {stats['num_running']}, waiting {stats['num_waiting']}",
        f"arena {stats['num_pages_held'] / pages:.1%} held by requests",
    ]
    if stats["slots_per_page"]:
        parts.append(f"slots {stats['num_slots_held']} running + {stats['num_checkpoints']} checkpoints")
    queried, hit = _grown(before, now, "query_tokens"), _grown(before, now, "hit_tokens")
    parts.append(f"prefix cache hit rate {hit / queried:.1%}" if queried else "no prompts looked up")
    parts += [f"{count:,} tokens {what}" for name, what in RESTORED if (count := _grown(before, now, name))]
    lost = sum(stats["lost_tokens"].get(reason, 0) - before.stats["lost_tokens"].get(reason, 0) for reason in MISSED)
    if lost > 0:
        parts.append(f"computed {lost:,} tokens again that had been cached")
    drafted, accepted = _grown(before, now, "num_draft_tokens"), _grown(before, now, "num_accepted_tokens")
    if drafted:
        length = 1 + accepted / max(1, _grown(before, now, "num_drafts"))
        parts.append(f"drafts accepted {accepted / drafted:.1%} of {drafted:,}, mean acceptance length {length:.2f}")
    encoded, kept = (_grown(before, now, f"num_image_tokens_{name}") for name in ("encoded", "kept"))
    if encoded or kept:
        parts.append(f"images {encoded:,} tokens encoded, {kept:,} reused")
    preempted = _grown(before, now, "num_preemptions")
    if preempted:
        parts.append(f"preempted {preempted}")
    return ", ".join(parts)


def is_idle(before: Reading, now: Reading) -> bool:
    return now.num_output_tokens == before.num_output_tokens and not now.stats["num_running"] + now.stats["num_waiting"]


def _grown(before: Reading, now: Reading, name: str) -> int:
    return int(now.stats[name]) - int(before.stats[name])
