"""Finds models by their ids on a Hugging Face hub and fetches them into a folder on this machine.

`HF_HOME`, `HF_TOKEN`, `HF_HUB_OFFLINE` and `HF_ENDPOINT` have the same effect as in huggingface_hub.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from forkpoint.checks import first_line
from forkpoint.config import EngineConfig
from forkpoint.engine.interrupt import DeferredInterrupt
from forkpoint.errors import ForkpointError, ModelFolderError
from forkpoint.foreign_files import foreign_files
from forkpoint.obs.logs import LOGGER, set_up_logging

HUB_ID: Final = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
# Configs, the index of the weights, tokenizers and chat templates: all files but weights, in the top folder.
SMALL_FILES: Final = ("*.json", "*.jinja", "*.txt", "*.model")
WEIGHTS: Final = "*.safetensors"
TEMPLATES: Final = "additional_chat_templates/*.jinja"
UNWANTED: Final = ("*/*", "consolidated*")  # files in inner folders, and Mistral's second copy of the weights


def with_folders(config: EngineConfig) -> EngineConfig:
    """Return `config` with folders in place of hub ids. Fetches models that are not on this machine yet.

    Sets up logging. Raises ModelFolderError, or what `load_config` raises.
    """
    set_up_logging(config.log_level)
    weights, shown = config.load_format != "dummy", config.shows_bars
    fetch = partial(model_folder, download_dir=config.download_dir, show_bar=shown, overrides=config.hf_overrides)
    model = fetch(config.model, revision=config.revision, weights=weights)
    if config.tokenizer is None or config.skip_tokenizer_init:
        return replace(config, model=model)
    tokenizer = fetch(config.tokenizer, revision=config.tokenizer_revision, weights=False)
    return replace(config, model=model, tokenizer=tokenizer)


def model_folder(
    name: str,
    *,
    revision: str | None = None,
    download_dir: str | None = None,
    weights: bool = True,
    show_bar: bool = False,
    overrides: Mapping[str, Any] | None = None,
) -> str:
    """Return `name` if it is a folder, otherwise the folder of the hub's model with that id.

    `revision` is a branch, tag or commit (None: main). `download_dir` replaces huggingface_hub's cache folder.
    `overrides` change fields of config.json. Raises ModelFolderError, which says what to do, if the model does not
    exist or cannot be fetched. Raises what `load_config` raises before weights are fetched.
    """
    if Path(name).is_dir():
        return name
    if Path(name).is_file():
        raise ModelFolderError(
            f"{name} is a file; give the folder with the model's config.json and safetensors files (GGUF is not read)"
        )
    if not HUB_ID.fullmatch(name):
        raise ModelFolderError(
            f"there is no model folder {name!r}; give the folder of a downloaded model, or a model's id on the "
            "Hugging Face hub, such as Qwen/Qwen3.5-9B"
        )
    from huggingface_hub import constants

    LOGGER.info("model %s (revision %s) of %s", name, revision or "main", constants.ENDPOINT)
    try:
        with DeferredInterrupt(at_once=True) as interrupt:
            return _fetch(name, revision, download_dir, weights, overrides, _bar(interrupt, show_bar))
    except ForkpointError:
        raise
    except Exception as error:  # httpx, huggingface_hub and the system raise many kinds; each is reported in one line
        raise ModelFolderError(_reason(error, name, revision, download_dir or constants.HF_HUB_CACHE)) from error


def _fetch(
    name: str,
    revision: str | None,
    download_dir: str | None,
    weights: bool,
    overrides: Mapping[str, Any] | None,
    bar: type[Any],
) -> str:
    from huggingface_hub import errors, snapshot_download

    snapshot = partial(snapshot_download, name, cache_dir=download_dir, ignore_patterns=list(UNWANTED))
    folder = str(snapshot(revision=revision, allow_patterns=list(SMALL_FILES), tqdm_class=bar))
    snapshot(revision=Path(folder).name, allow_patterns=TEMPLATES, ignore_patterns=None, tqdm_class=bar)
    if weights:
        _require(Path(folder), "config.json", "config.json", name)
        at = {"revision": Path(folder).name, "allow_patterns": [*SMALL_FILES, WEIGHTS]}
        try:
            snapshot(**at, local_files_only=True)
        except errors.LocalEntryNotFoundError:
            from forkpoint.models.registry import load_config

            load_config(folder, hf_overrides=overrides)  # report a model that cannot run before fetching gigabytes
            snapshot(**at, tqdm_class=bar)
        _require(Path(folder), WEIGHTS, "safetensors files", name)
    return folder


def _require(folder: Path, pattern: str, what: str, name: str) -> None:
    """Raise ModelFolderError if the hub's model `name` has no file of this pattern."""
    if not any(folder.glob(pattern)):
        why = foreign_files(folder) or (
            " as transformers writes them; give the id of a model that does, such as the one that was converted to "
            "GGUF or another format"
        )
        raise ModelFolderError(f"{name} holds no {what}{why}")


def _bar(interrupt: DeferredInterrupt, show_bar: bool) -> type[Any]:
    """Return a class of progress bars that stop a download at once after Ctrl-C, with InterruptedError.

    Without them, a download stops after its current files. They are invisible unless `show_bar` is set.
    """
    from huggingface_hub.utils import tqdm

    class Bar(tqdm):  # type: ignore[misc]  # mypy does not look into the library
        def __init__(self, *args: Any, **options: Any) -> None:
            if not show_bar:
                options["disable"] = True
            super().__init__(*args, **options)

        def update(self, n: float | None = 1) -> Any:
            if interrupt.requested:
                raise InterruptedError("stopped by Ctrl-C")
            return super().update(n)

    return Bar


def _reason(error: Exception, name: str, revision: str | None, cache: str) -> str:
    from huggingface_hub import constants, errors

    hub, rest = constants.ENDPOINT, "run the same command again: complete files are kept"
    match error:
        case errors.GatedRepoError():
            return f"{name} is gated: ask for access at {hub}/{name}, then set HF_TOKEN to a token of that account"
        case errors.RepositoryNotFoundError():
            return (
                f"there is no folder {name!r} here and no model of that name at {hub}; correct it, or set HF_TOKEN "
                "if the model is private"
            )
        case errors.RevisionNotFoundError():
            return f"{name} has no revision {revision!r}; give a branch, a tag or a commit of {hub}/{name}"
        case errors.LocalEntryNotFoundError() if constants.HF_HUB_OFFLINE:
            return (
                f"{name} (revision {revision or 'main'}) is not, or not completely, in {cache}, and HF_HUB_OFFLINE "
                "prevents fetching it; unset HF_HUB_OFFLINE once, or give a folder"
            )
        case errors.LocalEntryNotFoundError():
            return (
                f"{name} cannot be fetched from {hub}: {first_line(error.__cause__ or error)}; "
                f"check the network, set HF_ENDPOINT to a mirror, or give a model folder; {rest}"
            )
    return f"fetching {name} from {hub} broke off: {first_line(error)}; {rest}"
