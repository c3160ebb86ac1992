"""The place of blocks and slots in a room's memory."""

from __future__ import annotations

from forkpoint.cache.layout import CacheLayout
from forkpoint.sched.plan import MoveKind


def unit_bytes(layout: CacheLayout, kind: MoveKind, group: int = 0) -> int:
    """Return the bytes of a group's block or of a slot, without padding at its end; 0 without groups."""
    if kind is MoveKind.SLOT:
        return layout.slot_bytes
    return layout.groups[group].unit_bytes if layout.groups else 0


def unit_extent(layout: CacheLayout, kind: MoveKind, unit: int, group: int = 0) -> slice:
    """Return the place of a unit's bytes."""
    stride = layout.slot_stride_bytes if kind is MoveKind.SLOT else layout.groups[group].stride_bytes
    return slice(unit * stride, unit * stride + unit_bytes(layout, kind, group))
