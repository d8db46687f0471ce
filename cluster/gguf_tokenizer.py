"""The tokenizer inside a GGUF file, rebuilt as the files that a Hugging Face tokenizer reads.

GGUF keeps the vocabulary and the name of a scheme; the scheme itself (how text is cut before
merging, how spaces are written) is code in llama.cpp, of which this module knows two kinds:
byte-level BPE ("gpt2") with the cuts in `PRE_TOKENIZERS`, and SentencePiece BPE ("llama").
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from cluster.errors import ModelError
from cluster.gguf_file import GGUFFile

# Token types, from the GGUF specification (tokenizer.ggml.token_type).
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

SPACE = "\u2581"  # SentencePiece writes a space as this character
FILLER = re.compile(r"\[PAD\d+\]")  # llama.cpp fills a vocabulary up to the embedding's rows

GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
MODERN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens in id order with their types, and the ids that have a role."""

    tokens: list[str]
    types: list[int]
    bos_id: int | None
    eos_ids: tuple[int, ...]
    """Ids that end an answer, the tokenizer's own first."""
    pad_id: int | None
    unk_id: int | None

    def text(self, token_id: int | None) -> str | None:
        return None if token_id is None else self.tokens[token_id]

    def of_type(self, token_type: int) -> list[str]:
        return [t for t, kind in zip(self.tokens, self.types, strict=True) if kind == token_type]


def read_vocabulary(file: GGUFFile) -> Vocabulary:
    """Read tokens, types and special ids, without the filler at the vocabulary's end.

    Raises:
        ModelError: the vocabulary is missing, has the wrong length, or repeats a token.
    """
    tokens = file.find_list("tokenizer.ggml.tokens", str)
    if not tokens:
        raise ModelError(f"{file.path} has no tokenizer (no tokenizer.ggml.tokens)")
    types = file.find_list("tokenizer.ggml.token_type", int) or [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ModelError(f"{file.path} has {len(tokens)} tokens, but {len(types)} token types")
    length = len(tokens)
    while length and types[length - 1] == UNUSED and FILLER.fullmatch(tokens[length - 1]):
        length -= 1
    tokens, types = tokens[:length], types[:length]
    if len(set(tokens)) != length:
        raise ModelError(f"{file.path}: {length - len(set(tokens))} tokens occur more than once")

    def special_id(role: str) -> int | None:
        token_id = file.find(f"tokenizer.ggml.{role}_token_id", int)
        if token_id is not None and not 0 <= token_id < length:
            raise ModelError(f"{file.path}: {role} token id {token_id} is not below {length}")
        return token_id

    ends = dict.fromkeys(i for i in map(special_id, ("eos", "eot", "eom")) if i is not None)
    return Vocabulary(
        tokens=tokens,
        types=types,
        bos_id=special_id("bos"),
        eos_ids=tuple(ends),
        pad_id=special_id("padding"),
        unk_id=special_id("unknown"),
    )


def write_tokenizer(file: GGUFFile, vocabulary: Vocabulary, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json, special_tokens_map.json and the chat template.

    Raises:
        ModelError: a tokenizer of a kind that is not known here, or one that contradicts itself.
    """
    tokenizer = build_tokenizer(file, vocabulary)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {
        "bos_token": vocabulary.text(vocabulary.bos_id),
        "eos_token": vocabulary.text(next(iter(vocabulary.eos_ids), None)),
        "unk_token": vocabulary.text(vocabulary.unk_id),
        "pad_token": vocabulary.text(vocabulary.pad_id),
    }
    special = {role: token for role, token in named.items() if token is not None}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": file.require(f"{file.architecture}.context_length", int),
        "clean_up_tokenization_spaces": False,
        **special,
    }
    write_json(folder / "tokenizer_config.json", settings)
    write_json(folder / "special_tokens_map.json", special)
    template = file.find("tokenizer.chat_template", str)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def build_tokenizer(file: GGUFFile, vocabulary: Vocabulary) -> Tokenizer:
    kind = file.require("tokenizer.ggml.model", str)
    builders = {"gpt2": _byte_level_bpe, "llama": _sentencepiece_bpe}
    if kind not in builders:
        raise ModelError(
            f"{file.path} has a tokenizer of kind {kind!r}; "
            f"these can be rebuilt: {', '.join(sorted(builders))}"
        )
    tokenizer, adds_bos = builders[kind](file, vocabulary)
    tokenizer.add_special_tokens([_added(t, special=True) for t in vocabulary.of_type(CONTROL)])
    tokenizer.add_tokens([_added(t, special=False) for t in vocabulary.of_type(USER_DEFINED)])
    given = file.find("tokenizer.ggml.add_bos_token", bool)
    _add_ends(
        tokenizer,
        vocabulary,
        adds_bos=adds_bos if given is None else given,
        adds_eos=bool(file.find("tokenizer.ggml.add_eos_token", bool)),
    )
    return tokenizer


def _added(token: str, *, special: bool) -> AddedToken:
    return AddedToken(token, special=special, normalized=False)


def _add_ends(
    tokenizer: Tokenizer, vocabulary: Vocabulary, *, adds_bos: bool, adds_eos: bool
) -> None:
    """Begin and end plain text as the model's makers want it; a chat template does so itself."""
    first = vocabulary.bos_id if adds_bos else None
    last = next(iter(vocabulary.eos_ids), None) if adds_eos else None
    pieces, ids = ["$A"], [i for i in (first, last) if i is not None]
    if first is not None:
        pieces.insert(0, vocabulary.tokens[first])
    if last is not None:
        pieces.append(vocabulary.tokens[last])
    if ids:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=pieces,
            pair=[*pieces, *(p.replace("$A", "$B") + ":1" for p in pieces)],
            special_tokens=[(vocabulary.tokens[i], i) for i in dict.fromkeys(ids)],
        )


def _byte_level_bpe(file: GGUFFile, vocabulary: Vocabulary) -> tuple[Tokenizer, bool]:
    """BPE over bytes written as printable characters, as GPT-2 introduced it."""
    name = file.find("tokenizer.ggml.pre", str) or "default"
    if name not in PRE_TOKENIZERS:
        raise ModelError(
            f"{file.path} cuts text into words by the rule {name!r}; "
            f"these rules are known: {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    merges = file.find_list("tokenizer.ggml.merges", str)
    if merges is None:
        raise ModelError(f"{file.path} has a BPE tokenizer without tokenizer.ggml.merges")
    scheme = PRE_TOKENIZERS[name]
    tokenizer = Tokenizer(
        _bpe(
            file,
            {token: i for i, token in enumerate(vocabulary.tokens)},
            [_pair(file, merge) for merge in merges],
            ignore_merges=scheme.keeps_whole_words,
        )
    )
    if scheme.composes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = scheme.cuts()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, scheme.adds_bos


def _pair(file: GGUFFile, merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if not left or not right:
        raise ModelError(f"{file.path}: {merge!r} is not a merge of two tokens")
    return left, right


def _sentencepiece_bpe(file: GGUFFile, vocabulary: Vocabulary) -> tuple[Tokenizer, bool]:
    """SentencePiece BPE: no cuts, spaces as a visible character, bytes where no piece fits."""
    scores = file.find_list("tokenizer.ggml.scores", float)
    if scores is None or len(scores) < len(vocabulary.tokens):
        raise ModelError(f"{file.path} has a SentencePiece tokenizer without a score per token")
    vocab = {token: i for i, token in enumerate(vocabulary.tokens)}
    tokenizer = Tokenizer(
        _bpe(
            file,
            vocab,
            merges_by_score(vocabulary, scores),
            unk_token=vocabulary.text(vocabulary.unk_id),
            fuse_unk=True,
            byte_fallback=BYTE in vocabulary.types,
        )
    )
    prefix = file.find("tokenizer.ggml.add_space_prefix", bool)
    prefix = True if prefix is None else prefix
    spaces = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefix else spaces
    )
    back: list[decoders.Decoder] = [
        decoders.Replace(SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if prefix:
        back.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(back)
    return tokenizer, True


def merges_by_score(vocabulary: Vocabulary, scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece's "join the pair whose piece scores highest" as a list of merges.

    Every way to cut a piece into two known pieces is a merge; those of a better piece come first.
    """
    ids = {
        token: i
        for i, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind == NORMAL
    }
    ranked = sorted(ids, key=lambda piece: (-scores[ids[piece]], ids[piece]))
    return [
        (piece[:cut], piece[cut:])
        for piece in ranked
        for cut in range(1, len(piece))
        if piece[:cut] in ids and piece[cut:] in ids
    ]


def _bpe(
    file: GGUFFile,
    vocab: dict[str, int],
    merges: list[tuple[str, str]],
    *,
    unk_token: str | None = None,
    fuse_unk: bool = False,
    byte_fallback: bool = False,
    ignore_merges: bool = False,
) -> models.BPE:
    known = vocab.keys()
    for left, right in merges:
        for piece in (left, right, left + right):
            if piece not in known:
                raise ModelError(
                    f"{file.path}: the merge {left!r} + {right!r} needs the token {piece!r}, "
                    "which the vocabulary does not have"
                )
    return models.BPE(
        vocab=vocab,
        merges=merges,
        unk_token=unk_token,
        fuse_unk=fuse_unk,
        byte_fallback=byte_fallback,
        ignore_merges=ignore_merges,
    )


@dataclass(frozen=True, slots=True)
class Scheme:
    """How one family cuts text before merging."""

    cuts: Callable[[], pre_tokenizers.PreTokenizer]
    keeps_whole_words: bool = False
    """A word that is a token as it stands is taken without merging."""
    composes: bool = False
    """Text is brought to Unicode's composed form (NFC) first."""
    adds_bos: bool = False


def _cut_gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _cut_smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _cut_gpt2()])


def _cut_by(*patterns: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    def build() -> pre_tokenizers.PreTokenizer:
        steps: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns
        ]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        return pre_tokenizers.Sequence(steps)

    return build


_LLAMA3 = Scheme(
    _cut_by(MODERN_WORDS.replace("DIGITS", "{1,3}")), keeps_whole_words=True, adds_bos=True
)
_QWEN2 = Scheme(_cut_by(MODERN_WORDS.replace("DIGITS", "")), composes=True)

# By `tokenizer.ggml.pre`. "default" is what llama.cpp takes where a file names no rule.
PRE_TOKENIZERS = {
    "default": Scheme(_cut_by(r"[\p{P}\$\+<=>\^~\|]+", GPT2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]")),
    "deepseek-r1-qwen": _QWEN2,
    "gpt-2": Scheme(_cut_gpt2),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _QWEN2,
    "smollm": Scheme(_cut_smollm),
}
