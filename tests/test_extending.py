"""The Python of docs/extending.md is one program that runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "extending.md").read_text()


def test_the_code_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 5
    (tmp_path / "page.py").write_text("\n".join(blocks))
    given = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    shown = subprocess.run(
        [sys.executable, "page.py"], cwd=tmp_path, env=given, capture_output=True, text=True, check=False
    )
    assert shown.returncode == 0, shown.stderr


def test_the_family_is_the_outside_package_s() -> None:
    outside = (ROOT / "tests" / "outside" / "forkpoint_outside" / "arcee.py").read_text()
    body = outside[outside.index("    @classmethod") :]
    assert body in PAGE
    assert len(outside.splitlines()) <= 60
