"""Pages of results: prose and points are filled, the rest stays as it is."""

from __future__ import annotations

from benchmarks.pages import WIDTH, wrapped


def test_a_wrapped_page_says_the_same_in_shorter_lines() -> None:
    kept = ["# A heading", "| a | " + "b " * 70 + "|", "    a command " + "x" * 100, ""]
    words = [f"word{i}" for i in range(40)]
    page = "\n".join(
        [*kept, " ".join(words[:25]), " ".join(words[25:]), "- a point", "- " + " ".join(words), "", "end"]
    )
    lines = wrapped(page).split("\n")
    assert lines[:4] == kept and lines[-2:] == ["", "end"] and "- a point" in lines
    prose = lines[4:-2]
    assert max(map(len, prose)) <= WIDTH
    at = prose.index("- a point")
    assert " ".join(prose[:at]).split() == words
    assert prose[at + 1].startswith("- word0") and all(line.startswith("  word") for line in prose[at + 2 :])
    assert " ".join(prose[at + 1 :]).split() == ["-", *words]
