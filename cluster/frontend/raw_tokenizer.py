"""Building the tokenizers library's object from a model's files, as transformers does.

tokenizer.json describes almost all of it, also which tokens go around a text: `add_bos_token`
and `add_eos_token` of the config are left aside, as in transformers 5. The config may name
more added tokens.
"""

from collections.abc import Iterator

from tokenizers import AddedToken, Encoding
from tokenizers import Tokenizer as RawTokenizer

from cluster.frontend.tokenizer_files import TokenizerDamaged, TokenizerFiles, json_object

LONG_CHARS = 2_000
"""Texts from this length on are encoded without Python's lock. Less: shorter waits of other
threads, at the price of a hop to the library's own threads."""

_NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def special_tokens_of(files: TokenizerFiles) -> dict[str, str]:
    """Texts of the named special tokens, such as "bos_token", that the model has."""
    config = _config(files)
    older = json_object(files.special_tokens_json, "special_tokens_map.json")
    found: dict[str, str] = {}
    for name in (f"{short}_token" for short in _NAMES):
        text = _text_of(config[name] if name in config else older.get(name))
        if text:
            found[name] = text
    return found


def raw_tokenizer_of(files: TokenizerFiles, special_tokens: dict[str, str]) -> RawTokenizer:
    """The tokenizer that the files describe; it must not be changed afterwards.

    Raises:
        TokenizerDamaged: the tokenizers library cannot read tokenizer.json.
    """
    try:
        raw = RawTokenizer.from_buffer(files.tokenizer_json)
    except Exception as error:  # the library raises bare ones
        raise TokenizerDamaged(
            f"tokenizer.json ({len(files.tokenizer_json)} bytes) cannot be read: {error}"
        ) from error
    raw.no_truncation()
    raw.no_padding()
    _add_tokens(raw, _config(files), special_tokens)
    return raw


def ids_of(raw: RawTokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """The ids of a text. Other threads of Python go on meanwhile, however long it is.

    The library's `encode` holds Python's lock (0.8 s for a text of a megabyte); its batches
    do not, and without offsets they take half the time.
    """
    if len(text) < LONG_CHARS:
        return raw.encode(text, add_special_tokens=add_special_tokens).ids
    return raw.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


def encoding_of(raw: RawTokenizer, text: str, *, add_special_tokens: bool) -> Encoding:
    """The same, with the offsets of each id in the text."""
    if len(text) < LONG_CHARS:
        return raw.encode(text, add_special_tokens=add_special_tokens)
    return raw.encode_batch([text], add_special_tokens=add_special_tokens)[0]


def _config(files: TokenizerFiles) -> dict[str, object]:
    return json_object(files.config_json, "tokenizer_config.json")


def _text_of(token: object) -> str | None:
    """Configs write a token as its text, or as a map with its flags."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _add_tokens(
    raw: RawTokenizer, config: dict[str, object], special_tokens: dict[str, str]
) -> None:
    declared = config.get("added_tokens_decoder")
    if isinstance(declared, dict):
        there = {_state(token) for token in raw.get_added_tokens_decoder().values()}
        tokens = [_added_token(declared[key]) for key in sorted(declared, key=int)]
        raw.add_tokens([token for token in tokens if _state(token) not in there])
    added = raw.get_added_tokens_decoder().values()
    special = {token.content for token in added if token.special}
    missing = [text for text in special_tokens.values() if text not in special]
    known = {token.content for token in added}
    missing += [text for text in _more_special_tokens(config) if text not in known]
    raw.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in dict.fromkeys(missing)]
    )


def _more_special_tokens(config: dict[str, object]) -> Iterator[str]:
    """Special tokens without a role. Those that tokenizer.json has stay as they are there."""
    for name in ("additional_special_tokens", "extra_special_tokens"):
        listed = config.get(name)
        if isinstance(listed, dict):
            listed = list(listed.values())
        if isinstance(listed, list):
            yield from filter(None, map(_text_of, listed))


def _added_token(declared: object) -> AddedToken:
    text = _text_of(declared)
    if text is None or not isinstance(declared, dict):
        raise TokenizerDamaged(
            f"added_tokens_decoder in tokenizer_config.json holds {declared!r:.80}, not a token"
        )
    return AddedToken(text, **{flag: bool(declared[flag]) for flag in _FLAGS if flag in declared})


def _state(token: AddedToken) -> tuple[str, ...]:
    return (token.content, *(str(getattr(token, flag)) for flag in _FLAGS))
