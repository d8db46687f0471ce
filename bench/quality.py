"""What narrower weights cost: perplexity over shipped text, and how often the same next token.

The text is read once in float32 and once more with each setting asked for. Perplexity is
exp(-mean log-probability) of the text's own tokens; agreement is how often the most probable next
token is the one that float32 would choose, over all positions.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.report import ROOT, header, table
from stoker import LLM, SamplingParams

TEXTS = (
    "LICENSE",
    *(
        f"docs/{name}.md"
        for name in (
            *("architecture", "request-lifecycle", "scheduling", "kv-cache", "determinism"),
            *("benchmarking", "errors"),
        )
    ),
)
"""Prose, and enough of it: over a few thousand tokens a change of 0.5% drowns in chance."""

SETTINGS = ("quantization=int8", "dtype=bfloat16")


@dataclass(frozen=True, slots=True)
class Reading:
    """What a model makes of a text."""

    logprobs: tuple[float, ...]
    """Of each token but the first of a window, given those before it."""
    choices: tuple[int, ...]
    """The most probable token in each of these places."""

    @property
    def perplexity(self) -> float:
        return math.exp(-sum(self.logprobs) / len(self.logprobs))

    def agreement(self, other: "Reading") -> float:
        """In how many of the places both would choose the same token, 0 to 1."""
        same = sum(one == two for one, two in zip(self.choices, other.choices, strict=True))
        return same / len(self.choices)


def read(model: Path, windows: Sequence[Sequence[int]], settings: dict[str, str]) -> Reading:
    """Have a cluster of its own read windows of tokens."""
    asking = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    given: dict[str, Any] = {"dtype": "float32", "backend": "local", "log_level": "warning"}
    given["step_timeout_s"] = 600.0  # the log-probabilities of a whole window are one step's work
    with LLM(model, **given | settings) as llm:
        prompts = [{"prompt_token_ids": list(window)} for window in windows]
        outputs = llm.generate(prompts, asking, use_tqdm=False)
    logprobs, choices = [], []
    for window, output in zip(windows, outputs, strict=True):
        assert output.prompt_logprobs is not None
        for token, found in zip(window[1:], output.prompt_logprobs[1:], strict=True):
            assert found is not None
            logprobs.append(found[token].logprob)
            choices.append(max(found, key=lambda each: found[each].logprob))
    return Reading(tuple(logprobs), tuple(choices))


def windows_of(tokens: Sequence[int], size: int) -> list[Sequence[int]]:
    """Pieces of one size; what is left over is not read."""
    return [tokens[at : at + size] for at in range(0, len(tokens) - size + 1, size)]


def tokens_of(model: Path, texts: Sequence[str]) -> list[int]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    text = "\n\n".join((ROOT / name).read_text() for name in texts)
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("settings", nargs="*", default=SETTINGS, help="as a=b,c=d")
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "smollm2-135m-instruct")
    parser.add_argument("--texts", nargs="+", default=TEXTS)
    parser.add_argument("--window", type=int, default=512, help="tokens that are read at once")
    args = parser.parse_args()
    windows = windows_of(tokens_of(args.model, args.texts), args.window)
    exact = read(args.model, windows, {})
    rows = [["", "perplexity", "against float32", "same next token"]]
    rows.append(["float32", f"{exact.perplexity:.4f}", "", ""])
    for name in args.settings:
        found = read(args.model, windows, dict(part.split("=", 1) for part in name.split(",")))
        change = 100 * (found.perplexity / exact.perplexity - 1)
        same = 100 * exact.agreement(found)
        rows.append([name, f"{found.perplexity:.4f}", f"{change:+.3f}%", f"{same:.2f}%"])
    print(header())
    print(f"\n{args.model.name}, {len(exact.logprobs)} tokens in windows of {args.window}\n")
    print(table(rows))


if __name__ == "__main__":
    main()
