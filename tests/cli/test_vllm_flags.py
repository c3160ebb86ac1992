"""The flags that a script written for `vllm serve` carries."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from forkpoint.cli.options import engine_options, option_values
from forkpoint.cli.parser import build_parser
from forkpoint.cli.spellings import OTHER_NAMES, known_name
from forkpoint.cli.vllm_flags import TABLE, notice_lines
from forkpoint.cli.vllm_variables import INSTEAD, variable_lines
from forkpoint.config import EngineConfig
from forkpoint.server.config import ServerConfig

FLAGS_OF_VLLM = Path(__file__).with_name("vllm_serve_flags.txt")  # those of `vllm serve`, 0.33.0
SCRIPT = """serve MODEL --host 0.0.0.0 --port 8000 --trust-remote-code --enable-auto-tool-choice
  --tool-call-parser hermes -tp 1 --pipeline-parallel-size 1 --data-parallel-size=1 --gpu-memory-utilization 0.85
  --max-model-len 4096 --dtype auto --enable-chunked-prefill --enable-prefix-caching --disable-log-requests
  --swap-space 4 --block-size 16
  --kv-cache-dtype auto --distributed-executor-backend mp --no-enable-log-requests --disable-uvicorn-access-log
  --guided-decoding-backend xgrammar --limit-mm-per-prompt {"image":0} --revision main -O3 --hf-token
  --mm-processor-cache-gb 4
  --structured-outputs-config {"backend":"xgrammar"} -sc {"method":"qwen3_5_mtp","num_speculative_tokens":2}"""


# Commands of vLLM's recipes (github.com/vllm-project/recipes, 21 August 2026), with the names of their models left out.
RECIPES = """
qwen3.8: --tensor-parallel-size 4 --max-model-len 262144 --kv-cache-dtype fp8 --reasoning-parser qwen3
  --enable-auto-tool-choice --tool-call-parser qwen3_coder --mm-encoder-tp-mode data
  --speculative-config {"method":"mtp","num_speculative_tokens":3}
qwen3.8 on Ascend: --tensor-parallel-size 1 --max-num-batched-tokens 16384 --enable-prefix-caching
  --mm-encoder-tp-mode data --compilation-config {"cudagraph_mode":"FULL_DECODE_ONLY"}
  --speculative-config {"method":"qwen3_5_mtp","num_speculative_tokens":3,"enforce_eager":true}
  --additional-config {"enable_cpu_binding":true}
qwen3.8 on one card: --max-model-len 32768 --kv-cache-dtype fp8 --enforce-eager --language-model-only --max-num-seqs 8
qwen3.6: --tensor-parallel-size 8 --max-model-len 262144 --reasoning-parser qwen3
  --speculative-config {"method":"mtp","num_speculative_tokens":2}
qwen3.8, longer: --max-model-len 1010000 --hf-overrides {"text_config":{"max_position_embeddings":1010000}}
qwen3.5, text: --enable-expert-parallel --language-model-only --reasoning-parser qwen3 --enable-prefix-caching
qwen3.5, images: --enable-expert-parallel --mm-encoder-tp-mode data --mm-processor-cache-type shm
  --all2all-backend flashinfer_nvlink_two_sided
qwen3.5 without thinking: --reasoning-parser qwen3 --default-chat-template-kwargs {"enable_thinking":false}
qwen3-next: --tensor-parallel-size 4 --served-model-name qwen3-next --tokenizer-mode auto --gpu-memory-utilization 0.8
  --speculative-config {"method":"qwen3_next_mtp","num_speculative_tokens":2}
nemotron 3 nano: --trust-remote-code --async-scheduling --kv-cache-dtype fp8 --max-num-seqs 8 --max-model-len 262144
  --enable-auto-tool-choice --tool-call-parser qwen3_coder --reasoning-parser-plugin nano_v3_reasoning_parser.py
  --reasoning-parser nano_v3
nemotron 3 super: --kv-cache-dtype fp8 --trust-remote-code --served-model-name nemotron --tool-call-parser qwen3_xml
  --reasoning-parser nemotron_v3 --load-format fastsafetensors --attention-backend flashinfer --mamba-cache-mode align
  --mamba-ssm-cache-dtype float32 --speculative-config {"method":"mtp","num_speculative_tokens":3}
nemotron 3 ultra: --max-num-seqs 16 --gpu-memory-utilization 0.90 --max-num-batched-tokens 32768
  --enable-flashinfer-autotune --async-scheduling --mamba-backend triton --mamba-ssm-cache-dtype float32
  --speculative-config {"method":"mtp","num_speculative_tokens":5}
nemotron 3.5 lightning: --mamba-backend flashinfer --mamba-cache-mode align --enable-prefix-caching
  --moe-backend humming --linear-backend humming --mamba-ssu-algorithm horizontal --max-num-batched-tokens 16384
  --speculative-config {"method":"mtp","num_speculative_tokens":3,"moe_backend":"triton"}
nemotron 2 nano: --trust-remote-code --mamba_ssm_cache_dtype float32 --max-num-seqs 64
nemotron omni, text: --max-model-len 131072 --media-io-kwargs {"video":{"num_frames":512,"fps":1}}
  --video-pruning-rate 0
kimi-linear: --port 8000 --tensor-parallel-size 4 --max-model-len auto --trust-remote-code --no-enable-prefix-caching
lfm2.5: --max-model-len 32768 --optimization-level 3 --enable-auto-tool-choice --tool-call-parser lfm2
  --reasoning-parser qwen3 --uvicorn-log-level=info
lfm2.5-vl: --limit-mm-per-prompt {"image":4} --mm-processor-cache-type lru --mamba-backend triton
ling-3.0: --trust-remote-code --dtype bfloat16 --gpu-memory-utilization 0.9 --enable-chunked-prefill
  --compilation-config {"cudagraph_mode":"FULL_AND_PIECEWISE"} --enable-prefix-caching --enable-auto-tool-choice
  --tool-call-parser ling3 --reasoning-parser ling3 --speculative-config {"method":"mtp","num_speculative_tokens":3}
minicpm-v: --trust-remote-code --max_model_len=32k --gdn-prefill-backend triton --reasoning-parser minicpmv
qwen3.8-flash-next: --enable-hc-sp --sparse-indexer-topk-backend auto --prefix-cache-retention-interval 0
  --enable-ep-weight-filter --dcp-comm-backend ag_rs --disable-chunked-mm-input --allowed-local-media-path /
  --speculative-config {"method":"qwen4_exp_mtp","num_speculative_tokens":3}
intern-s2: --tensor-parallel-size 2 --prefix-match-unit 32 --reasoning-parser qwen3 --tool-call-parser qwen3_coder
glm-5.3: --tool-call-parser glm47 --reasoning-parser glm45 --kv-cache-dtype fp8_e4m3 --log-level INFO
  --mamba-ssm-cache-dtype auto --dtype float
fields: --speculative-config.method mtp --speculative_config.num_speculative_tokens=3 --device-memory-utilization 0.8
  --compilation_config.cudagraph_mode=FULL -cc.pass_config.fuse_allreduce_rms true --limit-mm-per-prompt.video 0
  --limit-mm-per-prompt.image 2 --default-chat-template-kwargs.enable_thinking false --hf_overrides.architectures+ A,B
  --max-num-batched-tokens 16k --disable-prefix-caching --enable-log-stats --disable-lora -q fp8 --shutdown-timeout 5
"""


SUBPARSERS = argparse._SubParsersAction


def recipes() -> dict[str, str]:
    """Return the flags of each recipe by its name."""
    lines = RECIPES.strip().replace("\n  ", " ").splitlines()
    return dict(line.split(": ", 1) for line in lines)


def parse(text: str) -> argparse.Namespace:
    return build_parser().parse_args(text.split())


def test_a_script_for_vllm_is_taken_and_told_what_changes_nothing() -> None:
    options = parse(SCRIPT)
    assert (options.port, options.max_model_len, options.tool_call_parser) == (8000, 4096, "hermes")
    assert notice_lines(options) == [
        "--trust-remote-code changes nothing here: no code that comes with a model is ever run",
        "--swap-space changes nothing here: nothing is swapped to the host's memory",
        "--block-size changes nothing here: a block has 64 tokens",
        "-O changes nothing here: CUDA graphs are recorded unless --enforce-eager is given",
        "--hf-token changes nothing here: the hub's token is that of HF_TOKEN, or of `hf auth login`",
        "--mm-processor-cache-gb changes nothing here: each reader keeps 64 MiB of resized images; "
        "--encoder-cache-size bounds the encoded ones",
    ]
    assert notice_lines(parse("serve MODEL --no-enable-lora -pp 1")) == []


def test_a_script_for_vllms_batches_is_taken() -> None:
    options = parse(
        "run-batch -i a.jsonl -o b.jsonl --model MODEL --trust-remote-code --max-model-len 4k -pp 1 --max-inflight 7 "
        "--served-model-name a b --reasoning-parser qwen3 --enable-auto-tool-choice --tool-call-parser hermes"
    )
    assert (options.max_concurrency, options.served_model_name, options.reasoning_parser) == (7, ("a", "b"), "qwen3")
    assert engine_options(options) == {"model": "MODEL", "max_model_len": 4000}
    assert notice_lines(options) == [
        "--trust-remote-code changes nothing here: no code that comes with a model is ever run"
    ]


def test_none_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    given = "--quantization None --max-model-len=None --seed 3 --chat-template None --uds None --tool-server None"
    options = parse(f"serve MODEL {given}")
    assert engine_options(options) == {"seed": 3} and options.uds is None
    assert ServerConfig(**option_values(options, ServerConfig)) == ServerConfig()
    for wrong, says in {
        "--port None": "argument --port: invalid int value: 'None'",
        "--quantization none": "argument --quantization: invalid choice: 'none'",
        "--max-inter-token-latency-ms x": "invalid int value: 'x'",
    }.items():
        with pytest.raises(SystemExit):
            parse(f"serve MODEL {wrong}")
        assert says in capsys.readouterr().err


def test_no_flag_is_taken_for_the_start_of_a_hidden_one(capsys: pytest.CaptureFixture[str]) -> None:
    """argparse would read --middle as --middleware, whose error does not name the flag that was given."""
    with pytest.raises(SystemExit):
        parse("run-batch -i a.jsonl -o b.jsonl --model MODEL --middle none")
    assert "unrecognized arguments: --middle none" in capsys.readouterr().err
    shortened = parse("run-batch -i a.jsonl -o b.jsonl --model MODEL --max-model 4k")
    assert engine_options(shortened)["max_model_len"] == 4000


@pytest.mark.parametrize("name", recipes())
def test_recipes_of_served_families_start(name: str) -> None:
    options = parse(f"serve MODEL {recipes()[name]}")
    config = EngineConfig.from_flat(**engine_options(options))
    server = ServerConfig(**option_values(options, ServerConfig))
    if name == "qwen3.8 on Ascend":
        assert config.speculative_config is not None and config.speculative_config.ignored == ("enforce_eager",)
    if name == "qwen3.8, longer":
        assert config.hf_overrides == {"text_config": {"max_position_embeddings": 1010000}}
    if name == "glm-5.3":
        assert (config.kv_cache_dtype, config.mamba_ssm_cache_dtype) == ("fp8", "float32")
        assert (config.dtype, config.log_level) == ("float32", "info")
    if name == "fields":
        assert config.speculative_config is not None and config.speculative_config.num_speculative_tokens == 3
        assert config.hf_overrides == {"architectures": ["A", "B"]}
        assert (config.gpu_memory_utilization, config.quantization) == (0.8, "fp8")
        assert not config.cache.enable_prefix_caching and config.scheduler["max_num_batched_tokens"] == 16_000
        assert (server.disable_log_stats, server.shutdown_timeout_s) == (False, 5)
        assert server.default_chat_template_kwargs == {"enable_thinking": False}
    lengths = {"kimi-linear": None, "minicpm-v": 32_000, "lfm2.5": 32_768}
    assert config.max_model_len == lengths.get(name, config.max_model_len)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("--data-parallel-size 2", "2 is not possible here: one engine runs the model, every layer of it on all its"),
        ("-pp=4", "4 is not possible here"),
        ("--mamba-cache-dtype float32", "float32 is not possible here: the convolutions' windows are of the model's"),
        ("--kv-cache-dtype fp8_e5m2", "invalid choice: 'fp8_e5m2' (choose from 'auto', 'bfloat16', 'fp8')"),
        ("--quantization gguf", "invalid choice: 'gguf' (choose from 'fp8', 'modelopt', 'modelopt_fp4', "),
        ("--no-enable-chunked-prefill", "long prompts are always computed in chunks; leave it out"),
        ("--enable-lora", "adapters are not supported; leave it out"),
        ("--mamba-ssm-cache-dtype float16", "invalid choice: 'float16' (choose from 'float32', 'bfloat16')"),
        ("--enable-mamba-cache-stochastic-rounding", "--mamba-ssm-cache-dtype float32 does not round them"),
        ("--max-model-len long", "'long' is not a number of tokens; give an integer, one with a unit such as 32k"),
        ("--video-pruning-rate 0.5", "0.5 is not possible here: no tokens of videos are left out; give 0 or 0.0"),
        ("--rope-scaling {}", "--hf-overrides changes fields of config.json, such as rope_parameters; leave it out"),
        ("--spec-method mtp", "--speculative-config has the method and its num_speculative_tokens; leave it out"),
        ("--kv-cache-dtype-skip-layers 0 2", "keys and values of all layers have one dtype, --kv-cache-dtype; leave"),
        ("--logprobs-mode raw_logits", "the model's own logits; give raw_logprobs, or leave it out"),
        ("--data-parallel-start-rank 1", "1 is not possible here: there is one node; give 0, or leave it out"),
        ("--device-ids 2,3", "CUDA_VISIBLE_DEVICES (on Ascend ASCEND_RT_VISIBLE_DEVICES) chooses the devices; leave"),
        ("--max-num-queued-reqs 9", "--max-open-requests bounds all requests, and --max-queue-len those that wait; l"),
        ("--disable-chunked-prefill", "off is not possible here: long prompts are always computed in chunks"),
        ("--tool-strict-level function", "function is not possible here: tool_choice required, or a named function,"),
        ("--speculative-config {} -sc.method mtp --speculative-config.method mtp", "as a whole and by its fields; gi"),
        ("--limit-mm-per-prompt.image", "--limit-mm-per-prompt.image has no value; give --limit-mm-per-prompt.image="),
        ("--distributed-executor-backend ray", "invalid choice: 'ray' (choose from 'uni', 'mp')"),
    ],
)
def test_what_is_not_here_is_refused_in_one_line(given: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(f"serve MODEL {given}")
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert error.startswith("error: ") and error.count("\n") == 1 and says in error


def test_every_flag_of_vllm_is_known() -> None:
    (serve,) = (action.choices["serve"] for action in build_parser()._actions if isinstance(action, SUBPARSERS))
    known = serve._option_string_actions
    assert [flag for flag in FLAGS_OF_VLLM.read_text().split() if known_name(flag, known) not in known] == []
    assert [name for name in OTHER_NAMES.values() if name not in known] == []


def test_variables_of_vllm_are_read_or_named() -> None:
    variables = {"VLLM_API_KEY": "secret", "VLLM_BATCH_INVARIANT": "1", "VLLM_USE_V1": "1", "VLLM_B": "2", "PATH": ""}
    assert variable_lines(variables) == [
        "VLLM_BATCH_INVARIANT is not read here; give --deterministic",
        "vLLM's variables VLLM_B, VLLM_USE_V1 change nothing here",
    ]
    (serve,) = (action.choices["serve"] for action in build_parser()._actions if isinstance(action, SUBPARSERS))
    flags = [word for text in INSTEAD.values() for word in text.split() if word.startswith("--")]
    assert [flag for flag in flags if flag not in serve._option_string_actions] == []


def test_help_stays_readable_and_no_flag_is_there_twice() -> None:
    shown = next(action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction))
    text = shown.choices["serve"].format_help()
    assert "--pipeline-parallel-size" not in text and "--help=vllm" in text
    flags = [flag.split("/")[0] for row in TABLE for flag in row.flags.split()]
    assert len(flags) == len(set(flags))
    assert text.startswith("usage: forkpoint serve ")
    titles = [line for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert {"server options:", "HTTPS options:", "log and metrics options:", "engine options:"} <= set(titles)
