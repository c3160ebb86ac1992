"""Makes the README's speed table from the JSON files of `benchmarks.gpu_peer`, one column for each file.

    python -m benchmarks.peer_table forkpoint.json vllm.json

The lines below the table say what was run and where. With `--details` the table has every measure and the number of
cached tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.pages import wrapped
from benchmarks.peer_run import Measure, PeerRun, PeerRunError, read_run


def table(runs: Sequence[PeerRun], details: bool) -> str:
    """Return the rows of all measures that any run has. A cell is empty where a run lacks the measure.

    Raises PeerRunError for runs of different models or prompt lengths, which a table must not compare.
    """
    for run in runs[1:]:
        if run.config != runs[0].config or run.shorter != runs[0].shorter:
            raise PeerRunError(
                f"{runs[0].command!r} and {run.command!r} ran different models or prompt lengths; "
                "give runs with the same --config, --quantization and --shorter"
            )
    several_cards = len({run.card for run in runs}) > 1
    heads = [f"{run.title} ({run.card})" if several_cards else run.title for run in runs]
    found = [{measure.name: measure for measure in run.measures} for run in runs]
    names = dict.fromkeys(m.name for run in runs for m in run.measures if details or not m.is_detail)
    rows = [f"| | {' | '.join(heads)} |", "|---" * (len(runs) + 1) + "|"]
    rows += [f"| {name} | {' | '.join(_cell(column.get(name), details) for column in found)} |" for name in names]
    return "\n".join(rows)


def notes(runs: Sequence[PeerRun]) -> str:
    """Return a list item for each run with its command, card, versions, commit and date."""
    items = []
    for run in runs:
        versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
        items.append(f"- {run.title}: `{run.command}`, {run.card}, {versions}, commit {run.commit}, {run.date}.")
    return wrapped("\n".join(items))


def _cell(measure: Measure | None, details: bool) -> str:
    if measure is None:
        return ""
    if not details or not measure.num_cached:
        return measure.shown
    least, most = min(measure.num_cached), max(measure.num_cached)
    if most == 0:
        return f"{measure.shown}, none cached"
    span = f"{most:,}" if least == most else f"{least:,} to {most:,}"
    return f"{measure.shown}, {span} cached"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help="JSON files of benchmarks.gpu_peer, a column each")
    parser.add_argument("--details", action="store_true", help="show every measure and the cached tokens")
    given = parser.parse_args(argv)
    try:
        runs = [read_run(path) for path in given.files]
        print(f"{table(runs, given.details)}\n\n{notes(runs)}")
    except PeerRunError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
