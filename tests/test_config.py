"""Defaults that depend on the device, and what may be asked for."""

from __future__ import annotations

import json
import os
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from forkpoint.config import EngineConfig, SchedulerConfig
from forkpoint.errors import ConfigError
from forkpoint.json_options import SpeculativeConfig, StructuredOutputsConfig
from forkpoint.media_limits import MAX_IMAGES
from forkpoint.platforms.cpu import CpuPlatform
from forkpoint.platforms.cuda import CudaPlatform
from forkpoint.transfer_options import KVTransferConfig

CPU, GPU = CpuPlatform.defaults, CudaPlatform.defaults


def test_the_device_decides_what_the_user_left_open() -> None:
    assert CPU.with_options({}) == SchedulerConfig()
    on_gpu = GPU.with_options({})
    assert on_gpu == SchedulerConfig(max_num_batched_tokens=8192, max_num_seqs=256, async_scheduling=True)


def test_what_the_user_gives_stands() -> None:
    options = {"max_num_batched_tokens": 512, "max_num_seqs": 3, "max_queue_len": 7, "async_scheduling": False}
    expected = SchedulerConfig(max_num_batched_tokens=512, max_num_seqs=3, max_queue_len=7, async_scheduling=False)
    assert GPU.with_options(options) == CPU.with_options(options) == expected
    assert CPU.with_options({"async_scheduling": True}).async_scheduling


@hypothesis.given(
    budget=st.none() | st.integers(64, 20_000),
    rows=st.none() | st.integers(1, 10_000),
    base=st.sampled_from([CPU, GPU]),
)
def test_a_full_decode_batch_leaves_room_for_a_chunk(
    budget: int | None, rows: int | None, base: SchedulerConfig
) -> None:
    options = {"max_num_batched_tokens": budget, "max_num_seqs": rows}
    given_options = {name: value for name, value in options.items() if value is not None}
    try:
        config = EngineConfig.from_flat(model="m", **given_options)
    except ConfigError as error:
        assert budget is not None and rows is not None and budget < rows + 63
        assert "must exceed" in str(error)
        return
    found = base.with_options(config.scheduler)
    assert found.max_num_batched_tokens >= found.max_num_seqs + 63
    assert found.max_num_seqs == (rows or found.max_num_seqs)
    assert found.max_num_batched_tokens == (budget or found.max_num_batched_tokens)


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_num_batched_tokens", 63), ("max_num_seqs", 0), ("max_num_seqs", "many"), ("max_queue_len", 0)],
)
def test_bad_values_are_named(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        EngineConfig.from_flat(model="m", **{name: value})


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ((1, 2, None), "decode_context_parallel_size=2 does not divide tensor_parallel_size=1"),
        ((6, 3, None), "decode_context_parallel_size=3 does not divide a block of 64 tokens; give a power of 2"),
        (
            (2, 2, 64),
            "cp_kv_cache_interleave_size=64 .*each device keeps 32 tokens .*give a divisor of 32",
        ),
        ((4, 4, 5), "give a divisor of 16"),
        ((2, 2, 0), "cp_kv_cache_interleave_size=0"),
    ],
)
def test_how_tokens_are_dealt_to_ranks(given: tuple[int, int, int | None], says: str) -> None:
    names = ("tensor_parallel_size", "decode_context_parallel_size", "cp_kv_cache_interleave_size")
    with pytest.raises(ConfigError, match=says):
        EngineConfig.from_flat(model="m", **dict(zip(names, given, strict=True)))
    assert EngineConfig.from_flat(model="m", tensor_parallel_size=8, decode_context_parallel_size=4).interleave == 16


def test_the_speculative_config() -> None:
    def read(given: object) -> SpeculativeConfig | None:
        return EngineConfig.from_flat(model="m", speculative_config=given).speculative_config

    wanted = SpeculativeConfig(method="ngram", num_speculative_tokens=3)
    assert read('{"method": "ngram", "num_speculative_tokens": 3}') == read(wanted) == wanted and read(None) is None
    ranges = {(None, None): (5, 5), (2, None): (2, 2), (None, 4): (4, 4), (2, 4): (2, 4)}
    for (least, most), found in ranges.items():
        assert replace(wanted, prompt_lookup_min=least, prompt_lookup_max=most).lookup_range == found
    good = {"method": "ngram", "num_speculative_tokens": 3}
    for name in ("qwen3_next_mtp", "qwen3_5_mtp"):  # as scripts of vLLM's call it
        assert read({**good, "method": name}) == read({**good, "method": "mtp"})
    for changes, says in (
        ({"method": "deepseek_mtp"}, "one of 'mtp', 'ngram', 'suffix', 'cache'"),
        ({"method": ["mtp"]}, "one of 'mtp', 'ngram', 'suffix', 'cache'"),
        ({"draft_sample_method": "greedy"}, "'draft_sample_method' is not supported here; fields are method, num_"),
        ({"num_tokens": 3}, "'num_tokens' is not supported"),
        ({"method": "eagle"}, "one of 'mtp', 'ngram', 'suffix', 'cache'"),
        ({"method": None}, "needs 'method'"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"num_speculative_tokens": 64}, "num_speculative_tokens"),
        ({"prompt_lookup_min": 4, "prompt_lookup_max": 2}, "prompt_lookup_max"),
        ({"suffix_decoding_max_tree_depth": 9}, "'suffix_decoding_max_tree_depth' is a field of the method 'suffix'"),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 3}, "max_tree_depth=3 is not allowed; give an integer"),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": "9"}, "suffix_decoding_max_tree_depth"),
        ({"method": "suffix", "suffix_decoding_max_cached_requests": -1}, "max_cached_requests"),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": -0.5}, "max_spec_factor"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 1.5}, "min_token_prob"),
    ):
        with pytest.raises(ConfigError, match=says):
            read({**good, **changes})
        if set(changes) <= {item.name for item in fields(SpeculativeConfig)} and None not in changes.values():
            with pytest.raises(ConfigError, match=says):  # nor is an object
                SpeculativeConfig(**{**good, **changes})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="is a field of the method 'suffix'"):  # though it is what holds anyway
        read({**good, "suffix_decoding_max_tree_depth": 24})
    suffix = read({"method": "suffix", "suffix_decoding_max_tree_depth": 16, "suffix_decoding_max_spec_factor": 2})
    assert suffix is not None and suffix.num_speculative_tokens == 13 and suffix.lookup_range == (3, 15)
    for bad in ("{", "[]", "{}", 3):
        with pytest.raises(ConfigError, match="speculative_config"):
            read(bad)


@pytest.mark.parametrize(
    ("given", "most"),
    [
        ("image=4", 4),
        ("video=2,image=3", 3),
        ('{"image": 5}', 5),
        ({"image": {"count": 6, "width": 512, "height": 512}}, 6),
        ({"image": 0}, 0),
        ({"video": 1, "audio": 2}, MAX_IMAGES),
        (None, MAX_IMAGES),
    ],
)
def test_the_limit_of_images_has_the_forms_of_vllm(given: Any, most: int) -> None:
    config = EngineConfig.from_flat(limit_mm_per_prompt=given)
    assert config.max_images == most
    assert config.max_videos == {"video=2,image=3": 2}.get(str(given), 1 if "video" in str(given) else MAX_IMAGES)


@pytest.mark.parametrize(
    "given",
    [
        "image=x",
        "image",
        "image=4;video=1",
        "4",
        "[1]",
        '{"image"',
        {"video": -1},
        {"image": -1},
        {"image": {"count": 2000}},
    ],
)
def test_wrong_limits_of_images_are_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="limit_mm_per_prompt") as refused:
        EngineConfig.from_flat(limit_mm_per_prompt=given)
    if isinstance(given, str) and given[0] != "{":
        assert 'give image=4,video=1, or JSON: {"image": 4}' in str(refused.value)


def test_the_size_of_the_host_tier() -> None:
    def read(**given: Any) -> int:
        return EngineConfig.from_flat(model="m", **given).host_tier_bytes

    connector = {"kv_connector": "OffloadingConnector"}
    good = {**connector, "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 20}}
    assert read() == 0
    assert read(kv_offloading_size=0.5, kv_offloading_backend="native") == 1 << 29
    assert read(kv_offloading_size=1e-12) == 1, "a size that is given is never no tier"
    nested = json.dumps({"cpu_bytes_to_use": 1 << 20})
    assert read(kv_transfer_config={**connector, "kv_connector_extra_config": nested}) == 1 << 20
    assert (
        read(kv_transfer_config=good) == read(kv_transfer_config=json.dumps({**good, "kv_role": "kv_both"})) == 1 << 20
    )
    for changes, says in (
        ({"kv_connector": "LMCacheConnectorV1"}, "kv_connector='LMCacheConnectorV1' is not allowed; give .*Offloading"),
        ({"kv_connector": "NixlConnector"}, "is not allowed; give a JSON object with side_channel_host"),
        ({"kv_role": "kv_producer"}, "kv_role='kv_producer' is not allowed"),
        ({"kv_load_failure_policy": "fail"}, "kv_load_failure_policy='fail' is not allowed"),
        ({"kv_connector_extra_config": {}}, "needs 'cpu_bytes_to_use'"),
        ({"kv_connector_extra_config": {"cpu_bytes_to_use": 0}}, "cpu_bytes_to_use=0 is not allowed"),
        ({"kv_connector_extra_config": {"cpu_bytes_to_use": 9, "lru": 1}}, "is not allowed; give a JSON object with"),
        ({"kv_port": 1}, "'kv_port' is not supported here"),
    ):
        with pytest.raises(ConfigError, match=says):
            read(kv_transfer_config={**good, **changes})
    for bad, says in (
        ({"kv_transfer_config": {}}, "needs 'kv_connector'"),
        ({"kv_offloading_size": -1}, "kv_offloading_size"),
        ({"kv_offloading_size": 1, "kv_offloading_backend": "lmcache"}, "kv_offloading_backend='lmcache'"),
        ({"kv_offloading_size": 1, "kv_transfer_config": good}, "give one"),
        ({"kv_offloading_size": 1, "enable_prefix_caching": False}, "needs the prefix cache"),
    ):
        with pytest.raises(ConfigError, match=says):
            read(**bad)


def test_the_exchange_of_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(**given: Any) -> KVTransferConfig:
        extra = {"kv_connector_extra_config": given.pop("extra")} if "extra" in given else {}
        config = EngineConfig.from_flat(
            model="m", kv_transfer_config={"kv_connector": "NixlConnector", **extra}, **given
        )
        assert config.links_peers and config.kv_transfer_config is not None and config.host_tier_bytes == 0
        return config.kv_transfer_config

    assert read().side_channel == ("127.0.0.1", 0) and read().remote_hosts == ("loopback",)
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "10.0.0.1")
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "5600")
    assert read().side_channel == ("10.0.0.1", 5600), "the variables of vLLM"
    assert read(extra={"side_channel_port": 1, "backends": ["UCX"]}).side_channel == ("10.0.0.1", 1)
    assert read().ring_bytes == 10**9 and read(extra={"ring_bytes": 0}).ring_bytes == 0
    for bad, says in (
        ({"enable_prefix_caching": False}, "needs the prefix cache"),
        ({"extra": {"side_channel_port": 70000}}, "side_channel_port=70000"),
        ({"extra": {"ring_bytes": -1}}, "ring_bytes=-1"),
        ({"extra": {"remote_hosts": "all"}}, "remote_hosts='all'"),
        ({"extra": {"fetch_timeout_s": 0}}, "fetch_timeout_s=0"),
    ):
        with pytest.raises(ConfigError, match=says):
            read(**bad)
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "none")
    with pytest.raises(ConfigError, match="VLLM_NIXL_SIDE_CHANNEL_PORT='none'"):
        read()


def test_options_of_structured_outputs_are_json_or_a_mapping() -> None:
    wanted = StructuredOutputsConfig(disable_any_whitespace=True)
    for good in ('{"disable_any_whitespace": true}', {"disable_any_whitespace": True, "backend": "auto"}, wanted):
        assert EngineConfig.from_flat(model="m", structured_outputs_config=good).structured_outputs_config == wanted
    wrong = [{"disable_any_whitespace": "false"}, {"backend": "outlines"}, {"nonsense": 1}]
    for bad in ("{", "[]", "[" * 9999, 3, *wrong):
        with pytest.raises(ConfigError):
            EngineConfig.from_flat(model="m", structured_outputs_config=bad)


def test_a_disk_tier_needs_a_folder_that_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    EngineConfig.from_flat(model="m", kv_disk_path=str(tmp_path / "new"), kv_disk_size=1)
    with pytest.raises(ConfigError, match=r"cannot be made, because .*/missing' is not a folder; create it"):
        EngineConfig.from_flat(model="m", kv_disk_path=str(tmp_path / "missing" / "new"), kv_disk_size=1)
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(ConfigError, match="link' is not a folder; give the path of one"):
        EngineConfig.from_flat(model="m", kv_disk_path=str(tmp_path / "link"), kv_disk_size=1)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    with pytest.raises(ConfigError, match="new' cannot be written: permission denied; give another path"):
        EngineConfig.from_flat(model="m", kv_disk_path=str(tmp_path / "new"), kv_disk_size=1)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_RDONLY))
    with pytest.raises(ConfigError, match="new' cannot be written: its file system is read-only; give another path"):
        EngineConfig.from_flat(model="m", kv_disk_path=str(tmp_path / "new"), kv_disk_size=1)
