"""The parser of the `forkpoint` command: its subcommands and their flags."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from forkpoint.cli.config_file import add_config_flag
from forkpoint.cli.options import Parser, add_engine_options, add_option_group, option_values
from forkpoint.cli.vllm_flags import add_vllm_flags
from forkpoint.fleet.config import FleetConfig
from forkpoint.params import SamplingParams
from forkpoint.server.config import OF_BATCHES, ServerConfig
from forkpoint.version import installed_version

MODEL_HELP: Final = "a model folder, or an id on the Hugging Face hub; default: the demo model of the checkout"
DEFAULT_URL: Final = "http://127.0.0.1:8000"


def build_parser() -> Parser:
    parser = Parser(prog="forkpoint", description="Run hybrid language models with exact, fine-grained prefix caching.")
    parser.add_argument("--version", action="version", version=f"forkpoint {installed_version()}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(name: str, command: str, help: str, description: str | None = None, **extra: Any) -> Any:
        described = description or help[0].upper() + help[1:] + "."
        added = commands.add_parser(name, help=help, description=described, **extra)
        added.set_defaults(command=_later(command))
        return added

    generate = add("generate", "generate:generate", "complete prompts")
    generate.add_argument("--prompt", action="append", help="may be given several times; default: standard input")
    generate.add_argument("--n", type=int, default=1, metavar="INT", help="completions per prompt (default: 1)")
    generate.add_argument("--stream", action="store_true", help="print the text as it comes (one prompt, n 1)")
    add_option_group(generate, "sampling options", SamplingParams, max_tokens=128)
    add_engine_options(generate)

    chat = add("chat", "chat:chat", "talk to a model")
    chat.add_argument("--system-prompt", metavar="TEXT", help="the first message")
    chat.add_argument("-q", "--quick", metavar="MESSAGE", help="answer this one message and exit")
    _add_server(chat).add_argument(
        "--model-name", metavar="TEXT", help="the server's model to use (default: the first)"
    )
    add_option_group(chat, "sampling options", SamplingParams, max_tokens=512)
    add_engine_options(chat)

    complete = add("complete", "remote:complete", "complete prompts on a server")
    several = "may be given several times; default: standard input"
    complete.add_argument("--prompt", "-q", "--quick", action="append", metavar="PROMPT", help=several)
    server = _add_server(complete, DEFAULT_URL)
    server.add_argument("--model-name", metavar="TEXT", help="the server's model to use (default: the first)")
    add_option_group(complete, "sampling options", SamplingParams, max_tokens=128)

    _add_batch(add)
    _add_bench(commands)

    _add_servers(add)

    text = (
        "A chat, a shared system prompt and forks, with the cache on and off; exit code 1 if an answer differs. "
        "Without --model the demo model of a checkout answers."
    )
    demo = add("demo", "demo:demo", "show what the cache saves", text)
    demo.add_argument("--max-tokens", type=int, default=32, metavar="INT", help="tokens per answer (default: 32)")
    add_engine_options(demo)

    text = (
        "Replay request traces through the engine's scheduler and cache, with a cost model in place of a model and a "
        "device."
    )
    simulate = add("simulate", "simulate:simulate", "replay request traces without a model", text)
    simulate.fill = _later("simulate:add_simulate_options")
    add("collect-env", "env:collect_env", "print what a bug report needs")
    return parser


def _add_servers(add: Callable[..., Any]) -> None:
    serve = add(
        "serve",
        "serve:serve",
        "serve a model over HTTP, with OpenAI's and Anthropic's APIs",
        epilog="vLLM's flags that change nothing here are accepted too: --help=vllm lists them.",
    )
    add_vllm_flags(serve)

    deploy = add(
        "deploy",
        "serve:deploy",
        "serve replicas of a model on Ray Serve",
        epilog="pip install 'forkpoint[ray]'; docs/deploy.md has examples.",
    )
    add_option_group(deploy, "replica options", FleetConfig)
    for command in (serve, deploy):
        command.add_argument("model_tag", nargs="?", metavar="MODEL", help=MODEL_HELP)
        add_config_flag(command)
        add_option_group(command, "server options", ServerConfig)
        add_engine_options(command)

    text = (
        "Compile the kernels that `forkpoint serve` needs with the same engine options. Later starts on such a device "
        "find them in Triton's cache folder (TRITON_CACHE_DIR). With --load-format dummy the model's "
        "config.json is enough."
    )
    compile = add("compile", "compile:compile_kernels", "compile a model's kernels ahead of time", text)
    compile.add_argument("model_tag", nargs="?", metavar="MODEL", help=MODEL_HELP)
    add_engine_options(compile)


def _add_batch(add: Callable[..., Any]) -> None:
    text = "Answer a JSON-lines file in OpenAI's batch format. Run it again to resume where it stopped."
    batch = add("run-batch", "run_batch:run_batch_command", "answer a file of requests", text)
    add_vllm_flags(batch)
    batch.add_argument("-i", "--input-file", type=Path, required=True, metavar="PATH", help="JSON lines of requests")
    batch.add_argument("-o", "--output-file", type=Path, required=True, metavar="PATH", help="JSON lines of answers")
    batch.add_argument(
        *("--max-concurrency", "--max-inflight"),  # the second is vLLM's
        type=int,
        default=128,
        metavar="INT",
        help="most requests in flight (default: 128)",
    )
    batch.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    _add_server(batch)
    add_option_group(batch, "answer options", ServerConfig, only=OF_BATCHES)
    add_engine_options(batch)


def _add_bench(commands: argparse._SubParsersAction[Any]) -> None:
    bench = commands.add_parser("bench", help="measure speed", description="Measure speed.")
    serve = bench.add_subparsers(title="benches", required=True, metavar="BENCH").add_parser(
        "serve",
        help="load on a running server",
        description="Send a workload to a running server that speaks OpenAI's API, and measure latency, throughput "
        "and its prefix cache. Flags, definitions and results are those of `vllm bench serve`.",
    )
    serve.fill = _fill_bench


def _fill_bench(parser: argparse.ArgumentParser) -> None:
    from forkpoint.bench.run import GROUPS, ServeBench

    def bench(options: argparse.Namespace) -> int:
        return ServeBench(**{name: kind(**option_values(options, kind)) for name, kind in GROUPS.items()}).run()

    for title, kind in GROUPS.items():
        add_option_group(parser, title, kind)
    parser.set_defaults(command=bench)


def _add_server(parser: argparse.ArgumentParser, default: str | None = None) -> Any:
    group = parser.add_argument_group("server")
    shown = "; no --model is loaded then"
    if default is not None:
        shown = f" (default: {default})"
    group.add_argument("--url", default=default, metavar="URL", help="a running server, with or without /v1" + shown)
    group.add_argument("--api-key", metavar="TEXT", help="default: the environment's FORKPOINT_API_KEY")
    return group


def _later(name: str) -> Callable[[Any], Any]:
    """Return the function `module:name` of forkpoint.cli, imported at its call, so that --help does not load torch."""

    def run(given: Any) -> Any:
        module, _, function = name.partition(":")
        return getattr(import_module(f"forkpoint.cli.{module}"), function)(given)

    return run
