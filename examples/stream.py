"""Stream an answer from a running cluster, while other requests are in flight.

Start one with `stoker serve`; it prints the address to give here.
"""

import sys

from stoker import Client, SamplingParams


def main(address: str) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=100)
    with Client(address) as client:
        others = [client.submit(f"{number} is a number that") for number in range(1, 9)]
        for piece in client.submit_chat(
            [{"role": "user", "content": "Why is the sky blue?"}], sampling
        ):
            print(piece.text, end="", flush=True)
        print()
        for handle in others:
            output = handle.result(timeout_s=60.0)
            print(f"{output.prompt!r} -> {output.outputs[0].text!r}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/stream.py ADDRESS")
    main(sys.argv[1])
