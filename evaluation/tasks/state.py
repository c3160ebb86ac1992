"""States that no single message contains: where somebody faces, sits or stands after many small moves."""

from __future__ import annotations

from functools import partial

from evaluation.tasks.builder import Scene, Setting, pick, shuffled
from evaluation.tasks.tracking import TableMachine, TrackingThread


def _step(size: int, by: int, index: int) -> int:
    return (index + by) % size


def _swap(first: int, second: int, index: int) -> int:
    return {first: second, second: first}.get(index, index)


COMPASS = TableMachine(
    ("north", "east", "south", "west"),
    "{name} faces {state}.",
    "Where does {name} face?",
    (
        ("{name} turns right.", partial(_step, 4, 1)),
        ("{name} turns left.", partial(_step, 4, -1)),
        ("{name} turns around.", partial(_step, 4, 2)),
    ),
)
CUPS = TableMachine(
    ("left", "middle", "right"),
    "{name} hides a ball under the {state} cup.",
    "Where is the ball of {name}?",
    (
        ("{name} swaps left and middle.", partial(_swap, 0, 1)),
        ("{name} swaps middle and right.", partial(_swap, 1, 2)),
        ("{name} swaps left and right.", partial(_swap, 0, 2)),
    ),
)
LAMP = TableMachine(
    ("on", "off"),
    "The lamp of {name} is {state}.",
    "Is the lamp of {name} on or off?",
    (
        ("{name} flips the switch.", partial(_step, 2, 1)),
        ("{name} flips the switch twice.", partial(_step, 2, 0)),
    ),
)
RING = TableMachine(
    tuple("0123456789"),
    "{name} stands on {state} of a ring from 0 to 9.",
    "Where does {name} stand?",
    (
        ("{name} goes 1 up.", partial(_step, 10, 1)),
        ("{name} goes 2 up.", partial(_step, 10, 2)),
        ("{name} goes 3 up.", partial(_step, 10, 3)),
        ("{name} goes 1 down.", partial(_step, 10, -1)),
        ("{name} goes 2 down.", partial(_step, 10, -2)),
    ),
)
WEEK = TableMachine(
    ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"),
    "The visit of {name} is on {state}.",
    "When is the visit of {name}?",
    (
        ("The visit of {name} moves a day later.", partial(_step, 7, 1)),
        ("The visit of {name} moves two days later.", partial(_step, 7, 2)),
        ("The visit of {name} moves a day earlier.", partial(_step, 7, -1)),
    ),
)
MACHINES = (COMPASS, CUPS, LAMP, RING, WEEK)


def state(setting: Setting) -> Scene:
    """Build a scene of one or two kinds of machines, each for one to three names."""
    rng = setting.rng
    threads = []
    for machine in shuffled(rng, MACHINES, 1 + int(rng.random() * 2)):
        num_names, waits, patience = 1 + int(rng.random() * 3), rng.random() < 0.35, pick(rng, (1, 2, 3))
        threads.append(TrackingThread(rng, setting.split, machine, num_names, waits=waits, patience=patience))
    return Scene(setting.system, tuple(threads))
