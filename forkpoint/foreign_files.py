"""Files of model folders that forkpoint does not read, and what to do about them."""

from __future__ import annotations

from pathlib import Path
from typing import Final

ADAPTERS: Final = "adapters (LoRA) do not run; merge this one into its base model, with peft's merge_and_unload"
# Patterns of file names, and why forkpoint does not read such files. Unpickling a file could run code.
FOREIGN: Final = (
    (("adapter_*",), ADAPTERS),
    (("*.gguf",), "GGUF is not read"),
    (("*.bin", "*.pt", "*.pth", "*.ckpt"), "pickles can run code and are never loaded"),
)
LFS_POINTER: Final = b"version https://git-lfs.github.com/spec/"


def foreign_files(folder: Path) -> str:
    """Return, for an error about a missing file, which foreign files the folder holds and why they are not read.

    Empty if it also holds the weights of a model, next to which such files say nothing.
    """
    if any(not path.match("adapter_*") for path in folder.glob("*.safetensors")):
        return ""
    for patterns, reason in FOREIGN:
        names = sorted({path.name for pattern in patterns for path in folder.glob(pattern)})
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            return f", only {names[0]!r}{more}: {reason}"
    return ""


def is_lfs_pointer(path: Path) -> bool:
    """Return whether Git LFS has left a pointer in place of the file's content."""
    try:
        with path.open("rb") as file:
            return file.read(len(LFS_POINTER)) == LFS_POINTER
    except OSError:
        return False
