"""transformers' static batches: left-padded, greedy, requests of similar lengths together."""

import argparse
from importlib.metadata import version

from bench.peers.driver import Asked, Ran, answer_runs, own_stdout
from bench.transformers_peer import batches, load, run_static_batch
from stoker.bench.trace import Traced


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--batch-size", type=int, default=32)
    args = parser.parse_args()
    out = own_stdout()
    model = load(args.model, args.threads)

    def replay(requests: list[Asked]) -> Ran:
        trace = [Traced(prompt_token_ids=a.prompt, max_tokens=a.max_tokens) for a in requests]
        is_single = len(trace) == 1 and requests[0].max_tokens > 1
        first_s = run_static_batch(model, trace, 1) if is_single else None
        seconds = sum(
            run_static_batch(model, batch, max(item.max_tokens or 1 for item in batch))
            for batch in batches(trace, args.batch_size)
        )
        made = sum(asked.max_tokens for asked in requests)
        return Ran(
            seconds=seconds,
            output_tokens=made,
            ttft_s=first_s,
            decode_rate=None if first_s is None else (made - 1) / (seconds - first_s),
        )

    replay([Asked([1000, 1001], 1)])
    answer_runs(out, replay, f"transformers {version('transformers')}")


if __name__ == "__main__":
    main()
