"""Several conversations at once with asyncio; one is given up half-way.

Start a cluster with `stoker serve`; it prints the address to give here.
"""

import asyncio
import sys

from stoker import AsyncClient, SamplingParams


async def tell(client: AsyncClient, name: str, question: str, most_pieces: int) -> None:
    sampling = SamplingParams(temperature=0.7, max_tokens=60)
    messages = [{"role": "user", "content": question}]
    async with await client.submit_chat(messages, sampling, request_id=name) as handle:
        num_pieces = 0
        async for piece in handle:
            num_pieces += 1
            print(f"{name}: {piece.text!r}")
            if num_pieces == most_pieces:
                break  # leaving the block cancels the request on the engine
    completion = handle.snapshot().outputs[0]
    print(f"{name}: ended by {completion.finish_reason}, {len(completion.token_ids)} tokens")


async def main(address: str) -> None:
    async with AsyncClient(address) as client:
        await asyncio.gather(
            tell(client, "patient", "Name three rivers.", most_pieces=1000),
            tell(client, "impatient", "Tell me a long story.", most_pieces=5),
        )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/stream_async.py ADDRESS")
    asyncio.run(main(sys.argv[1]))
