"""Compares CPU speed: forkpoint, transformers and vLLM run one checkpoint, alternating in one run."""

from __future__ import annotations

import argparse
import os
import random
import shlex
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from benchmarks import machine
from benchmarks.cpu_peers_page import write_page
from benchmarks.measured import Measured, Sample, Workload
from benchmarks.model131m import SHAPE_131M, write_checkpoint
from benchmarks.peers.process import PeerFailedError, PeerProcess
from benchmarks.peers.protocol import Job, PeerOptions, repository_root

PEERS = ("forkpoint", "transformers", "vllm", "vllm-eager")


def measure_round(peer: PeerProcess, work: Workload, rng: random.Random) -> Iterator[Sample]:
    """Run each phase once, with token ids from `rng`."""

    def ids(count: int) -> list[int]:
        return [rng.randrange(1, SHAPE_131M.vocab_size) for _ in range(count)]

    prompt = ids(work.prompt)
    cold = peer.run(Job([prompt], 1))
    yield Sample("cold", cold.first_token_s + cold.decode_s, cold.cached_tokens)
    warm = peer.run(Job([prompt + ids(work.extension)], 1))
    yield Sample("warm", warm.first_token_s + warm.decode_s, warm.cached_tokens)
    for batch in (1, work.batch):
        answer = peer.run(Job([ids(work.decode_prompt) for _ in range(batch)], work.decode))
        yield Sample(f"decode {batch}", batch * (work.decode - 1) / answer.decode_s, answer.cached_tokens)


def measure(peers: Sequence[PeerProcess], work: Workload) -> list[Measured]:
    """Run all rounds, in which the peers take turns. In each round all peers get the same token ids."""
    for peer in peers:
        small = replace(work, prompt=min(512, work.prompt), decode=4)
        list(measure_round(peer, small, random.Random(0)))
    samples: dict[str, list[Sample]] = {peer.name: [] for peer in peers}
    for index in range(work.repeats):
        for peer in peers:
            for sample in measure_round(peer, work, random.Random(1 + index)):
                samples[peer.name].append(sample)
                note = f"{sample.value:10.3f}, cached {sample.cached_tokens}, load {machine.load_average():.1f}"
                print(f"round {index + 1} {peer.name:14} {sample.phase:10} {note}", flush=True)
    return [Measured(peer.name, peer.description, tuple(samples[peer.name])) for peer in peers]


def start_peer(name: str, options: PeerOptions, vllm_python: str, preload: str, logs: Path) -> PeerProcess:
    """Start one of PEERS."""
    module = "run_vllm" if name.startswith("vllm") else f"run_{name}"
    python = vllm_python if module == "run_vllm" else sys.executable
    env = {"OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1"}
    if module == "run_vllm":
        cpus = sorted(os.sched_getaffinity(0))[: options.threads]
        env |= {
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus)),
            "VLLM_CPU_KVCACHE_SPACE": str(options.kv_cache_gib),
            "VLLM_NO_USAGE_STATS": "1",
            "PYTHONPATH": str(Path(__file__).parent / "peers" / "vllm_site"),
        }
        env |= {"LD_PRELOAD": preload} if preload else {}
    mine = replace(options, eager=name == "vllm-eager")
    return PeerProcess(name, python, f"benchmarks.peers.{module}", mine, logs / f"{name}.log", env)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm-python", default="", help="the interpreter of vLLM's environment; without it: no vLLM")
    parser.add_argument("--vllm-preload", default="", help="libraries that vLLM preloads: tcmalloc and iomp")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--model", default="", help="checkpoint folder; written when missing, default: a temporary one")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=Workload().repeats)
    parser.add_argument("--prompt", type=int, default=Workload().prompt, help="tokens of the cold prompt")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()), help="folder of the peers' logs")
    page = repository_root() / "docs" / "benchmarks" / "cpu_peers.md"
    parser.add_argument("--page", type=Path, default=page, help="where the table is written")
    return parser


def _without_paths(argv: Sequence[str]) -> str:
    """Return the command line for the page, without this machine's paths."""
    names = {"--vllm-preload": "LIBTCMALLOC:LIBIOMP5", "--model": "MODEL", "--logs": "LOGS", "--page": "PAGE"}
    names["--vllm-python"] = "$VLLM_ENV/bin/python"
    before = ["", *argv]
    return " ".join(names.get(option) or shlex.quote(word) for option, word in zip(before, argv, strict=False))


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    work = Workload(repeats=args.repeats, prompt=args.prompt)
    args.logs.mkdir(parents=True, exist_ok=True)
    names = [name for name in args.peers if args.vllm_python or not name.startswith("vllm")]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that stopped peers do not outlive this process
    with ExitStack() as stack:
        model = Path(args.model or stack.enter_context(tempfile.TemporaryDirectory()))
        if not (model / "model.safetensors").exists():
            write_checkpoint(model)
        options = PeerOptions(str(model), args.threads, 2 * args.prompt, 2, eager=False)
        peers: list[PeerProcess] = []
        for name in names:
            try:
                peer = start_peer(name, options, args.vllm_python, args.vllm_preload, args.logs)
            except PeerFailedError as error:
                print(f"skipped: {error}", file=sys.stderr)
                continue
            stack.callback(peer.close)
            peers.append(peer)
            print(f"{name}: {peer.description}", flush=True)
        results = measure(peers, work)
    command = "python -m benchmarks.cpu_peers " + _without_paths(sys.argv[1:] if argv is None else argv)
    print(write_page(args.page, results, work, args.threads, command))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
