"""vLLM's own engine core for a CUDA card that is not there. Import this module only where vLLM is installed.

vLLM makes its configuration, its layers (on the meta device, without memory), its KV cache groups and its scheduler.
Three parts are replaced because no card is here: the facts of the card (`H200`), the compiled kernels, and the worker
that runs the model (`ScriptedWorker`).
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import benchmarks.peers.vllm_site.sitecustomize  # noqa: F401  # torchvision's schemas
from benchmarks.hits.cases import Case
from benchmarks.hits.results import Played
from forkpoint.sim.trace import TraceRequest

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ["VLLM_DISABLE_SHARED_EXPERTS_STREAM"] = "1"  # a stream of the card
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # keeps Triton importable without a card

KERNELS = ("_C_stable_libtorch", "_moe_C_stable_libtorch", "vllm_flash_attn._vllm_fa2_C", "vllm_flash_attn._vllm_fa3_C")
for _name in KERNELS:  # compiled for CUDA: they cannot be loaded without its driver
    sys.modules[f"vllm.{_name}"] = ModuleType(_name)

import torch  # noqa: E402
from vllm import _custom_ops, platforms  # noqa: E402
from vllm.platforms.cuda import CudaPlatformBase  # noqa: E402
from vllm.platforms.interface import DeviceCapability  # noqa: E402

GIB = 1 << 30


class H200(CudaPlatformBase):
    """The card that vLLM's configuration asks for."""

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
        return DeviceCapability(9, 0)

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return "NVIDIA H200"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return 140 * GIB

    @classmethod
    def get_cuda_runtime_major(cls) -> int:
        return 13

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        return 132

    @classmethod
    def device_count(cls) -> int:
        return 1

    @classmethod
    def current_device(cls) -> torch.device:
        return torch.device("meta")


class NoKernels:
    """A namespace of torch operators. Every operator and overload can be looked up, and none can be called."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> NoKernels:
        if name.startswith("__"):
            raise AttributeError(name)
        return NoKernels(f"{self._name}.{name}")

    def __call__(self, *args: object, **kwargs: object) -> None:
        raise RuntimeError(f"{self._name} was called, but no model runs here")


platforms._current_platform = H200()
for _name in dir(_custom_ops):  # asks the kernels what they support
    if "supports" in _name:
        setattr(_custom_ops, _name, lambda *args, **kwargs: False)
for _name in ("_C", "_moe_C"):
    setattr(torch.ops, _name, NoKernels(_name))

from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.distributed import init_distributed_environment, initialize_model_parallel  # noqa: E402
from vllm.distributed.parallel_state import (  # noqa: E402
    destroy_distributed_environment,
    destroy_model_parallel,
)
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.model_executor.model_loader.utils import initialize_model  # noqa: E402
from vllm.model_executor.models import registry  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.usage.usage_lib import UsageContext  # noqa: E402
from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: E402
from vllm.utils.torch_utils import set_default_torch_dtype  # noqa: E402
from vllm.v1.core.sched.output import SchedulerOutput  # noqa: E402
from vllm.v1.engine import EngineCoreRequest  # noqa: E402
from vllm.v1.engine.core import EngineCore  # noqa: E402
from vllm.v1.executor.uniproc_executor import UniProcExecutor  # noqa: E402
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput  # noqa: E402
from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec  # noqa: E402
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase  # noqa: E402


def _call(function: Callable[[], Any]) -> Any:
    return function()


registry._run_in_subprocess = _call  # a process of its own would look for the card and the kernels again


class ScriptedWorker(WorkerBase):
    """Makes the model's layers and answers every step with the tokens of a script. It rejects all drafts."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.start({})

    def start(self, outputs: dict[str, list[int]]) -> None:
        """Begin a script: the tokens of each request's output, by its id."""
        self.outputs = outputs
        self.chunks: dict[str, list[int]] = {}  # the tokens of each step up to the first sampled token
        self.resumed_at: dict[str, int] = {}  # cached tokens of requests that were preempted
        self._lengths: dict[str, int] = {}  # prompt tokens and tokens sampled so far
        self._num_sampled: dict[str, int] = {}
        self._sampled = ModelRunnerOutput([], {})

    def init_device(self) -> None:
        with set_current_vllm_config(self.vllm_config):
            init_distributed_environment(1, 0, self.distributed_init_method, 0, backend="gloo")
            initialize_model_parallel(1, 1)

    def load_model(self) -> None:
        """Make the layers, and those of the MTP head if there are drafts."""
        config, spec = self.vllm_config, self.vllm_config.speculative_config
        with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype), torch.device("meta"):
            initialize_model(config)
            targets = set(config.compilation_config.static_forward_context)
            if spec is not None:
                initialize_model(spec.apply_draft_overrides(config), model_config=spec.draft_model_config)
        for name, layer in config.compilation_config.static_forward_context.items():
            if name not in targets:
                layer.is_draft_layer = True

    def get_kv_cache_spec(self) -> Any:
        return get_kv_cache_spec(self.vllm_config)

    def determine_available_memory(self) -> int:
        return 60 * GIB

    def initialize_from_config(self, kv_cache_config: object) -> None:
        """Allocate nothing."""

    def compile_or_warm_up_model(self) -> CompilationTimes:
        return CompilationTimes(0.0, 0.0)

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput | None:
        """Sample for the rows of a step. `sample_tokens` hands the tokens over, unless the step has no rows."""
        starts = {}
        for new in plan.scheduled_new_reqs:
            starts[new.req_id] = new.num_computed_tokens
            if new.req_id in self._lengths:
                self.resumed_at[new.req_id] = new.num_computed_tokens
            else:
                self._lengths[new.req_id] = len(new.prompt_token_ids)
                self._num_sampled[new.req_id] = 0
                self.chunks[new.req_id] = []
        known = plan.scheduled_cached_reqs
        starts.update(zip(known.req_ids, known.num_computed_tokens, strict=True))
        sampled: dict[str, list[int]] = {}
        for name, count in plan.num_scheduled_tokens.items():
            if not self._num_sampled[name]:
                self.chunks[name].append(count)
            sampled[name] = self._sample(name) if starts[name] + count >= self._lengths[name] else []
        names = list(sampled)
        self._sampled = ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, list(sampled.values()))
        return None if names else self._sampled

    def _sample(self, name: str) -> list[int]:
        """Return a request's next token. A step in flight beyond its end samples nothing of the script."""
        done = self._num_sampled[name]
        self._num_sampled[name] += 1
        self._lengths[name] += 1
        return self.outputs[name][done : done + 1] or [0]

    def sample_tokens(self, grammar_output: object) -> ModelRunnerOutput:
        return self._sampled

    def take_draft_token_ids(self) -> DraftTokenIds:
        names = [
            name for name, tokens in zip(self._sampled.req_ids, self._sampled.sampled_token_ids, strict=True) if tokens
        ]
        count = self.vllm_config.speculative_config.num_speculative_tokens
        return DraftTokenIds(names, [[0] * count for _ in names])


class VllmEngine:
    """An engine core as `vllm serve MODEL FLAGS` starts it. The model is a config.json without weights."""

    def __init__(self, config_json: str, flags: Sequence[str]) -> None:
        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(config_json)
            fixed = ["--model", folder, "--skip-tokenizer-init", "--language-model-only", "--max-model-len", "32768"]
            worker = ["--worker-cls", f"{__name__}.{ScriptedWorker.__name__}"]
            given = EngineArgs.from_cli_args(parser.parse_args([*fixed, *worker, *flags]))
            self._config = given.create_engine_config(UsageContext.OPENAI_API_SERVER)
            self._core = EngineCore(self._config, UniProcExecutor, log_stats=True)
        self._worker: ScriptedWorker = self._core.model_executor.driver_worker.worker

    @property
    def block_tokens(self) -> int:
        return int(self._config.cache_config.block_size)

    @property
    def match_unit(self) -> int:
        """The finest boundary, in tokens, at which a hit can end."""
        return int(self._core.scheduler.hash_block_size)

    def close(self) -> None:
        """Let the process make another engine. vLLM's own shutdown empties the memory of a card."""
        destroy_model_parallel()
        destroy_distributed_environment()

    def play(self, case: Case) -> Played:
        """Run a case on an empty cache."""
        if not self._core.reset_prefix_cache():
            raise RuntimeError(f"vLLM still holds blocks before {case.key!r}")
        asked = [request for requests in case.rounds for request in requests]
        self._worker.start({request.id: request.output.array().tolist() for request in asked})
        cached: dict[str, int] = {}
        for requests in case.rounds:
            for request in requests:
                self._add(request)
            while self._is_busy():
                self._step(cached)
                if case.preempt_after:
                    self._preempt(case)
        if case.preempt_after:
            cached[case.measured.id] = self._worker.resumed_at[case.measured.id]
        return Played([cached[request.id] for request in asked], self._worker.chunks[case.measured.id])

    def _add(self, request: TraceRequest) -> None:
        length = request.output.num_tokens
        params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False)
        asked = EngineCoreRequest(
            request_id=request.id,
            prompt_token_ids=request.prompt.array().tolist(),
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        self._core.add_request(*self._core.preprocess_add_request(asked))

    def _is_busy(self) -> bool:
        return bool(self._core.scheduler.has_requests() or self._core.batch_queue)

    def _step(self, cached: dict[str, int]) -> None:
        """Run a step and note the cached tokens that vLLM reports with a request's first token."""
        outputs, executed = self._core.step_fn()
        self._core.post_step(executed)
        for output in (outputs or {}).values():
            for one in output.outputs:
                if one.prefill_stats is not None:
                    cached[one.request_id] = one.prefill_stats.num_cached_tokens

    def _preempt(self, case: Case) -> None:
        """Preempt the measured request as the scheduler does when blocks run out."""
        scheduler = self._core.scheduler
        request = scheduler.requests.get(case.measured.id)
        if request and not request.num_preemptions and request.num_output_tokens >= case.preempt_after:
            scheduler.running.remove(request)
            scheduler._preempt_request(request, 0.0)
