"""`python -m forkpoint` is the `forkpoint` command."""

from forkpoint.cli.main import run

if __name__ == "__main__":
    run()
