"""Whatever the bytes of an entry depend on changes the namespace, each thing alone."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import pytest

from forkpoint.cache.layout import CacheLayout
from forkpoint.config import EngineConfig
from forkpoint.disk.namespace import namespace_of, weights_digest
from forkpoint.models.config import ModelConfig
from forkpoint.models.registry import load_config
from forkpoint.ops.ranks import Ranks
from forkpoint.runtime.loaded import Loaded
from forkpoint.worker.disk import namespace_facts
from tests.cache.shapes import layout_of, state
from tests.checkpoints import write_checkpoint
from tests.sched.harness import LAYOUTS

NOT_OF_NUMBERS = {"unknown_fields", "eos_token_ids"}  # fields of a model that its forward pass does not read


@dataclass(frozen=True)
class FakeModel:
    config: ModelConfig


@dataclass(frozen=True)
class FakeOps:
    backends: dict[str, str]


@dataclass(frozen=True)
class FakePlatform:
    hardware: str = "cpu"


@dataclass(frozen=True)
class FakeRanks:
    rank: int = 0
    size: int = 1


@dataclass(frozen=True)
class Worker:
    """What a namespace is made from: the options, what was loaded, and the rank."""

    config: EngineConfig
    model: FakeModel
    layout: CacheLayout
    ops: FakeOps = FakeOps({"linear": "torch", "attention": "cpp"})
    platform: FakePlatform = FakePlatform()
    ranks: FakeRanks = FakeRanks()

    @property
    def namespace(self) -> bytes:
        return namespace_of(namespace_facts(self.config, cast(Loaded, self), cast(Ranks, self.ranks)))

    def with_options(self, **options: Any) -> Worker:
        return replace(self, config=replace(self.config, **options))

    def with_model(self, **changes: Any) -> Worker:
        return replace(self, model=FakeModel(replace(self.model.config, **changes)))


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Worker:
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder, "qwen3_next", hidden_size=32, vocab_size=64, num_hidden_layers=2)
    config = EngineConfig.from_flat(model=str(folder), deterministic=True)
    return Worker(config, FakeModel(load_config(str(folder))), LAYOUTS["several blocks a page"])


CHANGES: dict[str, Callable[[Worker], Worker]] = {
    "the seed of dummy weights": lambda worker: worker.with_options(load_format="dummy", seed=1),
    "the rank": lambda worker: replace(worker, ranks=FakeRanks(1, 2)),
    "the number of ranks": lambda worker: replace(worker, ranks=FakeRanks(0, 2)),
    "the ranks that share tokens": lambda worker: worker.with_options(
        tensor_parallel_size=2, decode_context_parallel_size=2, cp_kv_cache_interleave_size=64
    ),
    "the tokens of a turn": lambda worker: worker.with_options(cp_kv_cache_interleave_size=1),
    "exact numbers or not": lambda worker: worker.with_options(deterministic=False),
    "an operator's backend": lambda worker: replace(worker, ops=FakeOps({"linear": "torch", "attention": "torch"})),
    "the hardware": lambda worker: replace(worker, platform=FakePlatform("another cpu")),
}


@pytest.mark.parametrize("what", CHANGES)
def test_each_option_alone_changes_the_namespace(worker: Worker, what: str) -> None:
    if "dummy" in what:
        worker = worker.with_options(load_format="dummy")
    assert CHANGES[what](worker).namespace != worker.namespace


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("torch.__version__", "0.1"),
        ("forkpoint.worker.disk.installed_version", lambda: "0.0.1"),
        ("torch.get_num_threads", lambda: 77),
        ("forkpoint.worker.disk.Origin", []),
        ("forkpoint.disk.namespace.FORMAT", 0),
    ],
)
def test_each_version_alone_changes_the_namespace(
    worker: Worker, name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = worker.namespace
    monkeypatch.setattr(name, value)
    assert worker.namespace != before
    plain = worker.with_options(deterministic=False)
    assert plain.namespace == replace(plain, platform=FakePlatform("another cpu")).namespace


@pytest.mark.parametrize("name", [field.name for field in fields(ModelConfig)])
def test_each_field_of_the_model_alone_changes_the_namespace(worker: Worker, name: str) -> None:
    """MTP and the dtypes of weights, keys and states are among them."""
    changed = worker.with_model(**{name: "something else"})
    assert (changed.namespace != worker.namespace) is (name not in NOT_OF_NUMBERS)


@pytest.mark.parametrize("name", [field.name for field in fields(CacheLayout)])
def test_each_field_of_the_layout_alone_changes_the_namespace(worker: Worker, name: str) -> None:
    assert replace(worker, layout=replace(worker.layout, **{name: 12345})).namespace != worker.namespace


def test_parts_do_not_run_into_each_other(worker: Worker) -> None:
    one = layout_of([state((2, 8), (4, 32, 32), "float32")])
    other = layout_of([state((2, 8), (4, 32, 32), "bfloat16")])
    assert replace(worker, layout=one).namespace != replace(worker, layout=other).namespace
    facts = [{"a": "bc"}, {"ab": "c"}, {"a": ["b", "c"]}, {"a": {"b": "c"}}, {"a": [["b"], "c"]}, {"a": {"b", "c"}}]
    assert len({namespace_of(each) for each in facts}) == len(facts)
    assert namespace_of({"a": 1, "b": {"x": 1, "y": 2}}) == namespace_of({"b": {"y": 2, "x": 1}, "a": 1})


def test_the_bytes_and_names_of_weights(worker: Worker, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(worker.config.model, tmp_path / "model"))
    moved = worker.with_options(model=str(folder))
    assert moved.namespace == worker.namespace, "the folder's place does not matter"
    [path] = folder.glob("*.safetensors")
    path.rename(folder / "renamed.safetensors")
    assert moved.namespace != worker.namespace
    (folder / "renamed.safetensors").rename(path)
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert moved.namespace != worker.namespace
    path.write_bytes(data)
    assert moved.namespace == worker.namespace
    (folder / "more.safetensors").write_bytes(b"")
    assert moved.namespace != worker.namespace
    assert weights_digest(tmp_path / "nothing") is None
