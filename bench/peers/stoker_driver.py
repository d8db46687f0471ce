"""Stoker as its users run it, offline: `LLM(...)` with the settings given as NAME=VALUE."""

import argparse
import statistics
import time
from collections.abc import Sequence
from importlib.metadata import version

from bench.peers.driver import HEAD_LEN, Asked, Ran, answer_runs, own_stdout
from cluster.config import load_config
from stoker import LLM, SamplingParams
from stoker.outputs import RequestOutput

SETTINGS: dict[str, str | int | float | bool] = {
    "max_model_len": 2048,
    "max_num_seqs": 64,
    "kv_cache_memory_bytes": 2 << 30,
    "log_level": "warning",
}
"""Beside what is asked for: the same room for sequences and K/V as the peers have."""


def settings_of(words: Sequence[str]) -> dict[str, str | int | float | bool]:
    """Settings from NAME=VALUE; `true`, `false` and whole numbers are what they look like."""
    truth = {"true": True, "false": False}
    settings = dict(SETTINGS)
    for word in words:
        name, _, value = word.partition("=")
        settings[name] = int(value) if value.isdigit() else truth.get(value, value)
    return settings


def replay(llm: LLM, requests: list[Asked]) -> Ran:
    prompts = [{"prompt_token_ids": asked.prompt} for asked in requests]
    params = [
        SamplingParams(temperature=0.0, max_tokens=asked.max_tokens, ignore_eos=True)
        for asked in requests
    ]
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    made = [len(output.outputs[0].token_ids) for output in outputs]
    wanted = [asked.max_tokens for asked in requests]
    assert made == wanted, f"asked for {wanted} tokens, got {made}"
    return Ran(
        seconds=seconds,
        output_tokens=sum(made),
        ttft_s=median_ttft(outputs),
        decode_rate=decode_rate(outputs),
        heads=[list(output.outputs[0].token_ids[:HEAD_LEN]) for output in outputs],
    )


def median_ttft(outputs: Sequence[RequestOutput]) -> float | None:
    known = [output.metrics.ttft_s for output in outputs]
    return statistics.median(ttft for ttft in known if ttft is not None)


def decode_rate(outputs: Sequence[RequestOutput]) -> float | None:
    """Tokens per second after the first, of a stream that was alone."""
    gaps = outputs[0].metrics.itl_s
    return len(gaps) / sum(gaps) if len(outputs) == 1 and gaps else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("settings", nargs="*", metavar="NAME=VALUE")
    args = parser.parse_args()
    out = own_stdout()
    settings = settings_of(args.settings)
    with LLM.of_config(load_config(None, None, model=args.model, **settings)) as llm:
        replay(llm, [Asked([1000, 1001], 1)])
        answer_runs(out, lambda requests: replay(llm, requests), f"stoker {version('stoker')}")


if __name__ == "__main__":
    main()
