"""Memory of a GPU that another process reads, and prompts that a decode engine copies from there."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_pair import ASKS, DECODE, PREFILL, RemoteEngine
from benchmarks.gpu_tiers import bits_of
from benchmarks.random_model import make_random_model
from forkpoint.engine.llm import LLM
from forkpoint.params import SamplingParams
from forkpoint.platforms.device_memory import DeviceMemory
from forkpoint.runtime.rings import PeerRings

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
NUM_BYTES = 1 << 24


def own(connection: Connection) -> None:
    """Fill memory, pass its handle on, and free it when told to."""
    memory = DeviceMemory(torch.device("cuda", 0))
    tensor, handle = memory.allocate(NUM_BYTES)
    tensor.fill_(7)
    torch.cuda.synchronize()
    connection.send(handle)
    connection.recv()
    memory.free(tensor)
    connection.send("freed")
    connection.recv()


def test_memory_of_another_process_is_read_whatever_becomes_of_it() -> None:
    there, here = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=own, args=(there,), daemon=True)
    process.start()
    assert here.poll(120)
    handle, memory = here.recv(), DeviceMemory(torch.device("cuda", 0))
    for wrong, size in ((handle[:-1], NUM_BYTES), (bytes(64), NUM_BYTES), (handle, 1 << 40)):
        with pytest.raises(OSError, match=r"bytes, not|CUDA error"):
            memory.open(wrong, size)
    tensor = memory.open(handle, NUM_BYTES)
    assert tensor.device == torch.device("cuda", 0) and (tensor == 7).all()
    here.send("free")
    assert here.poll(60) and here.recv() == "freed"
    assert (tensor.clone() == 7).all()
    process.kill()
    process.join()
    assert (tensor.clone() == 7).all(), "the device keeps it"
    memory.close(tensor)
    assert (torch.ones(8, device="cuda") == 1).all()


def test_prompts_from_a_ring_have_the_bits_of_one_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_random_model(tmp_path / "model")
    options: dict[str, Any] = {"skip_tokenizer_init": True, "deterministic": True, "kv_cache_memory_bytes": 64 << 20}
    found, find = list[object](), PeerRings.find

    def noted(*given: Any) -> Any:
        found.append(find(*given))
        return found[-1]

    monkeypatch.setattr(PeerRings, "find", noted)
    prompts = [[3 + (seed * 31 + i * 7) % 200 for i in range(700)] for seed in range(4)]
    params = SamplingParams(max_tokens=8, temperature=0.0, logprobs=1, ignore_eos=True)
    with LLM(str(model), enable_prefix_caching=False, **options) as llm:
        expected = [bits_of(output) for output in llm.generate(prompts, params, use_tqdm=False)]
    first = RemoteEngine(model, PREFILL, options, "0")
    first.receive(240.0)
    link = {"kv_connector": "NixlConnector", "kv_role": DECODE}
    with LLM(str(model), kv_transfer_config=link, **options) as llm:
        for prompt, bits in zip(prompts, expected, strict=True):
            offer = first.ask(prompt, ASKS).offer
            wanted = SamplingParams(
                max_tokens=8, temperature=0.0, logprobs=1, ignore_eos=True, kv_transfer_params=offer
            )
            [output] = llm.generate([prompt], wanted, use_tqdm=False)
            assert output.cache.num_peer_tokens == 640 and bits_of(output) == bits
    first.close()
    assert len(found) >= 3 * 10 and None not in found, "the first prompt comes over the host's memory"
