"""Prompts of the end-to-end tests: real text in many lengths, questions, chats, code, scripts."""

from pathlib import Path

from cluster.frontend.tokenizer import Tokenizer

LICENSE = Path(__file__).parents[2] / "LICENSE"

OPENINGS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "import numpy as np\n\ndef softmax(x):\n    return",
    "1, 1, 2, 3, 5, 8, 13,",
    "Die Hauptstadt von Deutschland ist",
    "La Tour Eiffel se trouve à",
    "日本の首都は",
    "To bake bread you need flour, water, yeast and",
    "Water boils at 100 degrees",
    "SELECT name, COUNT(*) FROM orders GROUP BY",
    "The three primary colours are",
    "Dear Sir or Madam,\n\nI am writing to",
    "In 1969, Neil Armstrong",
    "Q: What is 7 times 8?\nA:",
)

QUESTIONS = (
    "What is the capital of France?",
    "Name three animals that live in the sea.",
    "Write one sentence about the moon.",
    "How many legs does a spider have?",
    "Give me a word that rhymes with cat.",
    "What do bees make?",
    "Is water wet? Answer briefly.",
    "Translate 'good morning' to Spanish.",
)


def chat(tokenizer: Tokenizer, question: str) -> list[int]:
    return tokenizer.encode_chat([{"role": "user", "content": question}])


def passage(tokenizer: Tokenizer, length: int, *, start: int = 0) -> list[int]:
    """`length` tokens of English prose from token `start` on."""
    ids = tokenizer.encode(LICENSE.read_text(encoding="utf-8"))
    assert start + length <= len(ids), f"the text has {len(ids)} tokens"
    return ids[start : start + length]


def sixty(tokenizer: Tokenizer) -> list[list[int]]:
    """60 prompts of 1 to 1,500 tokens, all different, lengths around block borders included."""
    prompts = [passage(tokenizer, n, start=61 * n) for n in range(1, 28)]
    prompts += [tokenizer.encode(text) for text in OPENINGS]
    prompts += [chat(tokenizer, question) for question in QUESTIONS]
    lengths = (31, 32, 33, 63, 64, 65, 100, 129, 300, 1500)
    prompts += [passage(tokenizer, n, start=11 * at) for at, n in enumerate(lengths)]
    assert len(prompts) == 60
    return prompts


def probes(tokenizer: Tokenizer) -> list[list[int]]:
    """A few prompts for runs that repeat many times: block borders, chats, several chunks."""
    return [
        tokenizer.encode("The"),
        tokenizer.encode(OPENINGS[1]),
        passage(tokenizer, 16, start=200),
        passage(tokenizer, 33, start=400),
        passage(tokenizer, 64, start=600),
        passage(tokenizer, 90, start=800),
        chat(tokenizer, QUESTIONS[1]),
    ]
