"""Words that must not be produced, as sequences of token ids.

A word is usually another token at the start of a line than after a space, so each word
gives a sequence for either, and one for the middle of a text where the tokenizer puts a
space before every text of its own accord. A model can still spell a word with other tokens
than its tokenizer would; banning is by token sequence, as everywhere in the field.
"""

from collections.abc import Callable, Sequence

from scheduler.errors import InvalidRequest
from scheduler.sampling import MAX_BAD_WORDS

MAX_BAD_WORD_TOKENS = 128

Encode = Callable[[str], Sequence[int]]


def bad_word_ids(words: Sequence[str], encode: Encode) -> tuple[tuple[int, ...], ...]:
    """The token sequences to ban for these words, without repetitions.

    Raises:
        InvalidRequest: too many words, an empty one, or one of too many tokens.
    """
    if len(words) > MAX_BAD_WORDS:
        raise InvalidRequest(
            f"bad_words has {len(words)} entries, at most {MAX_BAD_WORDS} may be",
            param="bad_words",
        )
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        found.update(dict.fromkeys(_sequences_of(word, encode)))
    return tuple(found)


def _sequences_of(word: str, encode: Encode) -> list[tuple[int, ...]]:
    if not word:
        raise InvalidRequest("bad_words must be made of non-empty texts, got ''", param="bad_words")
    bare = word.lstrip() or word
    candidates = {tuple(encode(bare)), tuple(encode(f" {bare}")), _after_newline(bare, encode)}
    candidates.discard(())
    longest = max(map(len, candidates), default=0)
    if longest > MAX_BAD_WORD_TOKENS:
        raise InvalidRequest(
            f"the bad word {word[:40]!r} has {longest} tokens, "
            f"at most {MAX_BAD_WORD_TOKENS} may be",
            param="bad_words",
        )
    # Banning a sequence bans every longer one that ends with it.
    return sorted(
        ids
        for ids in candidates
        if not any(other != ids and ids[-len(other) :] == other for other in candidates)
    )


def _after_newline(word: str, encode: Encode) -> tuple[int, ...]:
    """The word's ids inside a text; empty if its border is not a token border there."""
    newline, both = tuple(encode("\n")), tuple(encode(f"\n{word}"))
    return both[len(newline) :] if both[: len(newline)] == newline else ()
