"""Grammars by llguidance: a model's vocabulary, and matchers over it, within limits.

Front ends check a grammar with the same limits under which workers follow it, so nothing that
was accepted fails here for its size. Loads neither torch nor numpy.
"""

from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_LEXER_STATES = 50_000
"""About 100 MB for one sequence."""
MAX_GRAMMAR_SIZE = 200_000
"""Symbols; a few megabytes of JSON schema have half a million."""


class GrammarFailed(Exception):
    """A grammar cannot be followed, or no further; the message says why."""


def read_tokenizer(tokenizer_json: str, vocab_size: int | None = None) -> LLTokenizer:
    """The vocabulary of a model.

    Args:
        vocab_size: rows of the model's logits; ids beyond the tokenizer's own match nothing.
    Raises:
        GrammarFailed: llguidance does not know this kind of tokenizer.
    """
    try:
        return LLTokenizer(tokenizer_json, n_vocab=vocab_size)
    except ValueError as error:
        if "vocab size too small" in str(error):  # the tokenizer has more ids than the model
            return read_tokenizer(tokenizer_json)
        raise GrammarFailed(f"guided decoding cannot use the model's tokenizer: {error}") from error


def tokenizer_of(model_dir: Path, vocab_size: int) -> LLTokenizer:
    """`read_tokenizer` of a model's directory."""
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        raise GrammarFailed("guided decoding needs tokenizer.json, which the model does not have")
    return read_tokenizer(path.read_text(encoding="utf-8"), vocab_size)


def new_matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher at the grammar's start. Takes milliseconds, without Python's lock.

    Raises:
        GrammarFailed: the grammar is wrong or too large.
    """
    limits = LLParserLimits(
        max_lexer_states=MAX_LEXER_STATES, max_grammar_size=MAX_GRAMMAR_SIZE, verbose_errors=False
    )
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    check(matcher)
    return matcher


def check(matcher: LLMatcher) -> None:
    """Raise what went wrong with the matcher, if anything did."""
    if matcher.is_error():
        raise GrammarFailed(plain_error(matcher.get_error()))


def plain_error(message: str) -> str:
    """llguidance's message without what it appends for its own developers."""
    return message.split("\n<", 1)[0].strip()
