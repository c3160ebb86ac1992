"""Joins the metrics of several replicas into one text."""

from __future__ import annotations

import re
from collections.abc import Mapping

SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (.*)")


def joined_metrics(texts: Mapping[str, str]) -> str:
    """Return Prometheus texts, keyed by the name of their replica, as one text.

    Each sample gets a label `replica`. The samples of a metric are grouped, as the format demands.
    """
    described: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for replica, text in texts.items():
        name = ""
        for line in text.split("\n"):
            if line.startswith("# "):
                name = line.split(" ", 3)[2]
                lines = described.setdefault(name, [])
                if line not in lines:
                    lines.append(line)
            elif found := SAMPLE.fullmatch(line):
                labels = ",".join(filter(None, (f'replica="{replica}"', found[2])))
                samples.setdefault(name, []).append(f"{found[1]}{{{labels}}} {found[3]}")
    return "".join(f"{line}\n" for name, lines in described.items() for line in lines + samples.get(name, []))
