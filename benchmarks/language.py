"""What does our worker cost beside vLLM's bare `step` loop?

`python -m benchmarks.language`: one engine in one process, driven in turn by a bare loop and by our worker,
whose other end of the ZeroMQ channel is another process. Rounds are interleaved and medians count.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import goal, save, table

CLIENTS = (1, 8)
ROUNDS = 7
TOKENS = 96
MODEL: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}


def prompt_ids(number: int) -> list[int]:
    """Prompts of several lengths that share no prefix."""
    return [3 + number, *range(4, 12 + 4 * number)]


def bare(engine: Any, clients: int) -> None:
    """What a script does with vLLM: add, step until all have ended."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        temperature=0, max_tokens=TOKENS, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    for number in range(clients):
        engine.add_request(f"bare-{number}", {"prompt_token_ids": prompt_ids(number)}, params)
    made = 0
    while engine.has_unfinished_requests():
        made += sum(len(output.outputs[0].token_ids) for output in engine.step())
    if made != clients * TOKENS:
        raise RuntimeError(f"{made} tokens were made")


def timed(work: Callable[[], None], tokens: int) -> tuple[float, float]:
    """Milliseconds of wall and of process CPU time a token."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return (time.perf_counter() - wall) * 1000 / tokens, (time.process_time() - cpu) * 1000 / tokens


def measure(worked: Callable[[int], None], engine: Any, clients: int) -> dict[str, list[float]]:
    """Medians of wall and CPU time a token, of each; and of the rounds' ratios."""
    rounds: list[list[float]] = []
    for _ in range(ROUNDS):
        mine = timed(lambda: worked(clients), clients * TOKENS)
        theirs = timed(lambda: bare(engine, clients), clients * TOKENS)
        rounds.append([*mine, *theirs, mine[0] / theirs[0], mine[1] / theirs[1]])
    wall, cpu, bare_wall, bare_cpu, ratio, cpu_ratio = (
        median(column) for column in zip(*rounds, strict=True)
    )
    return {"worker": [wall, cpu], "vLLM": [bare_wall, bare_cpu], "ratio": [ratio, cpu_ratio]}


def main() -> None:
    """Measure, print and save."""
    from omni_async.config import StageConfig
    from omni_async.stages.kinds.vllm import create
    from omni_async.stages.worker import Worker
    from omni_async.transports.shm import Arena, ArenaReader
    from omni_async.transports.zeromq import SyncZmqChannel
    from tests.tiny.cache import built_once
    from tests.tiny.language import ENGINE, build_language_model

    folder = built_once("language-40m", lambda path: build_language_model(path, **MODEL))
    config = StageConfig(
        stage_id=0, name="llm", kind="vllm", model=str(folder), final_output=True, engine_extras=ENGINE
    )
    executor: Any = create(config)
    executor.load()
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory)
        address = f"ipc://{run_dir}/worker"
        command = [sys.executable, "-m", "benchmarks.peers.caller", address]
        caller = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert caller.stdin is not None
        assert caller.stdout is not None
        channel = SyncZmqChannel(address)
        arena, reader = Arena(run_dir, "worker", 0), ArenaReader(run_dir)

        def worked(clients: int) -> None:
            print(clients, TOKENS, file=caller.stdin, flush=True)
            Worker(channel, config, executor, arena, reader, inline_limit=1 << 16).run()

        worked(1)
        results = {clients: measure(worked, executor.engine, clients) for clients in CLIENTS}
        caller.stdin.close()
        caller.wait()
        channel.close()
    executor.close()
    rows = [[clients, name, *values] for clients, each in results.items() for name, values in each.items()]
    table(f"Text, {TOKENS} tokens a request; ms a token", ["clients", "loop", "wall", "CPU"], rows)
    goals = [
        goal(f"worker over bare loop, {clients} clients", each["ratio"][0], 1.05, at_least=False)
        for clients, each in results.items()
    ]
    save("language", {"results": results, "goals": goals})


if __name__ == "__main__":
    main()
