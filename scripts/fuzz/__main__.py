"""Sends wild requests to a server, next to a stream that must not notice them.

    python -m scripts.fuzz                        # a server of its own with the demo model, 10,000 requests
    python -m scripts.fuzz --requests 500 --seed 3
    python -m scripts.fuzz --url http://HOST      # one that runs with --enable-dev-endpoints

The exit code is 1, with a list of problems, if the server dies, a request is answered by an unforeseen error, or the
victim's text changes. It is also 1 if anything is left over, or the victim waits longer between tokens than next to
good requests.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from scripts.fuzz.run import Fuzz, run_fuzz
from scripts.load_server import served


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.fuzz", description="Wild requests on a server.")
    parser.add_argument("--url", help="a running server (default: start one)")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=4, help="wild requests that are open at once")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log_path = Path(folder) / "server.log"
        with served(options.url, log_path) as (url, _):
            report = run_fuzz(Fuzz(url, options.requests, options.workers, options.seed))
        log = log_path.read_text() if log_path.exists() else ""
    problems = [*report.problems, *(["a traceback in the log:\n" + log[-3000:]] if "Traceback" in log else [])]
    print(report.text())
    print("\n".join(problems) or "nothing went wrong, nothing is left over")
    return int(bool(problems))


if __name__ == "__main__":
    raise SystemExit(main())
