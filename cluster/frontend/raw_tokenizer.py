"""Building the tokenizers library's object from a model's files, as transformers does.

tokenizer.json describes most of it. Beside it the config may name more added tokens, say
which tokens are special, and switch begin and end tokens on or off.
"""

from tokenizers import AddedToken
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.processors import TemplateProcessing

from cluster.frontend.tokenizer_files import TokenizerDamaged, TokenizerFiles, json_object

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
    config = _config(files)
    _add_tokens(raw, config, special_tokens)
    if "add_bos_token" in config or "add_eos_token" in config:
        _set_border_tokens(raw, config, special_tokens)
    return raw


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
    texts = [*special_tokens.values()]
    for name in ("additional_special_tokens", "extra_special_tokens"):
        more = config.get(name)
        listed = list(more.values()) if isinstance(more, dict) else more
        if isinstance(listed, list):
            texts += filter(None, map(_text_of, listed))
    added = raw.get_added_tokens_decoder().values()
    special = {token.content for token in added if token.special}
    missing = [text for text in dict.fromkeys(texts) if text not in special]
    raw.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in missing])


def _added_token(declared: object) -> AddedToken:
    text = _text_of(declared)
    if text is None or not isinstance(declared, dict):
        raise TokenizerDamaged(
            f"added_tokens_decoder in tokenizer_config.json holds {declared!r:.80}, not a token"
        )
    return AddedToken(text, **{flag: bool(declared[flag]) for flag in _FLAGS if flag in declared})


def _state(token: AddedToken) -> tuple[str, ...]:
    return (token.content, *(str(getattr(token, flag)) for flag in _FLAGS))


def _set_border_tokens(
    raw: RawTokenizer, config: dict[str, object], special_tokens: dict[str, str]
) -> None:
    """Put begin and end tokens around a text as the config says, whatever the file does."""
    names = [name for name in ("bos_token", "eos_token") if config.get(f"add_{name}")]
    around = ["$A"]
    for name in names:
        if text := special_tokens.get(name):
            around = [text, *around] if name == "bos_token" else [*around, text]
    ids = [(text, raw.token_to_id(text)) for text in dict.fromkeys(around) if text != "$A"]
    raw.post_processor = TemplateProcessing(single=around, pair=[*around, "$B"], special_tokens=ids)
