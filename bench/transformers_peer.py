"""Hugging Face transformers on the same trace, as a process that runs it once per input line.

Requests go into padded static batches (left-padded, greedy, fixed lengths), its documented way
to serve a batch. Requests of similar output length share a batch, which wastes least; batches
are small, since it copies the K/V of all rows in each step. Each run prints one JSON line.
"""

import argparse
import json
import sys
import time

import torch

from bench.traces import Traced, read_trace


def load(model: str, threads: int) -> "torch.nn.Module":
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    assert isinstance(loaded, torch.nn.Module)
    loaded.train(False)
    return loaded


def run_static_batch(model: "torch.nn.Module", trace: list[Traced], new_tokens: int) -> float:
    """Seconds for one padded batch in which every row gets `new_tokens` tokens."""
    longest = max(len(item.prompt_token_ids) for item in trace)
    pads = [longest - len(item.prompt_token_ids) for item in trace]
    ids = torch.tensor(
        [[2] * pad + item.prompt_token_ids for pad, item in zip(pads, trace, strict=True)]
    )
    mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in pads])
    started = time.perf_counter()
    with torch.inference_mode():
        model.generate(  # type: ignore[operator]  # of GenerationMixin
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=2,
        )
    return time.perf_counter() - started


def batches(trace: list[Traced], size: int) -> list[list[Traced]]:
    """The trace cut into batches of similar output lengths."""
    ordered = sorted(trace, key=lambda item: item.max_tokens)
    return [ordered[start : start + size] for start in range(0, len(ordered), size)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace")
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=8)
    args = parser.parse_args()
    trace = read_trace(args.trace)
    model = load(args.model, args.threads)
    run_static_batch(model, trace[:2], 2)
    print(json.dumps({"event": "ready"}), flush=True)
    wanted = sum(item.max_tokens for item in trace)
    for _ in sys.stdin:
        answer: dict[str, float] = {"output_tokens": wanted}
        if len(trace) == 1:
            answer["ttft_s"] = run_static_batch(model, trace, 1)
        answer["seconds"] = sum(
            run_static_batch(model, batch, max(item.max_tokens for item in batch))
            for batch in batches(trace, args.batch_size)
        )
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
