"""Small tokenizers of each family, made on the spot, with the traits that matter."""

import json
from functools import cache

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer

from cluster.frontend.tokenizer import Tokenizer
from cluster.frontend.tokenizer_files import TokenizerFiles

CORPUS = (
    "the quick brown fox jumps over the lazy dog and then the other dogs jump over it",
    "one two three four five six seven eight nine ten, one hundred and twenty-three",
    "system user assistant think tool call: Paris is the capital of France",
)
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + "
    "message['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def make_files(
    raw: RawTokenizer, *, template: str | None = CHATML, **config: object
) -> TokenizerFiles:
    return TokenizerFiles(
        tokenizer_json=raw.to_str().encode(),
        config_json=json.dumps(
            {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
            | config
        ).encode(),
        chat_templates={} if template is None else {"default": template},
    )


@cache
def llama3_like() -> TokenizerFiles:
    """Byte-level BPE; special tokens beyond the vocabulary; begins every text with a token."""
    raw = RawTokenizer(models.BPE(ignore_merges=True))
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}| ?\p{L}+|\s+|[^\s\p{L}\p{N}]+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(
        CORPUS, BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    raw.add_special_tokens(["<|begin|>", "<|im_start|>", "<|im_end|>"])
    # As Qwen3 does, and DeepSeek for the tokens of its template: added, but not special.
    raw.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    raw.add_tokens([AddedToken("<｜a b｜>é", special=False)])  # letters beyond the byte alphabet
    begin = raw.token_to_id("<|begin|>")
    raw.post_processor = TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", begin)]
    )
    return make_files(raw, bos_token="<|begin|>", eos_token="<|im_end|>")


@cache
def llama2_like() -> TokenizerFiles:
    """BPE as SentencePiece makes it: "▁" for a space, one put before every text, and a token
    for each byte that has no letter."""
    learner = RawTokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Metaspace()
    learner.train_from_iterator(CORPUS, BpeTrainer(vocab_size=200, show_progress=False))
    learned = json.loads(learner.to_str())["model"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    names += [name for name in learned["vocab"] if name not in names]
    raw = RawTokenizer(
        models.BPE(
            vocab={name: i for i, name in enumerate(names)},
            merges=[tuple(pair) for pair in learned["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    raw.add_special_tokens(
        [AddedToken(text, normalized=False) for text in ("<unk>", "<s>", "</s>")]
    )
    raw.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    raw.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return make_files(raw, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@cache
def unigram() -> TokenizerFiles:
    """A tokenizer whose decoder we do not take apart, and whose pieces include `</s>`."""
    pieces = [("<unk>", 0.0), ("<s>", -1.0), ("</s>", -1.0), ("▁", -4.0)]
    letters = sorted({letter for line in CORPUS for letter in line if letter != " "} | set("<>/|_"))
    pieces += [(letter, -6.0) for letter in letters]
    pieces += [("▁the", -3.0), ("▁dog", -3.5), ("umps", -4.0), ("▁j", -4.0)]
    raw = RawTokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Metaspace()
    raw.add_special_tokens(["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"])
    return make_files(raw, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@cache
def unknown_decoder() -> TokenizerFiles:
    """Tokens are parts of characters, and the decoder is none that we take apart."""
    raw = RawTokenizer.from_buffer(llama3_like().tokenizer_json)
    raw.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    return make_files(raw, bos_token="<|begin|>", eos_token="<|im_end|>")


FAMILIES = {
    "llama3_like": llama3_like,
    "llama2_like": llama2_like,
    "unigram": unigram,
    "unknown_decoder": unknown_decoder,
}


@cache
def make_tokenizer(family: str) -> Tokenizer:
    return Tokenizer.from_files(FAMILIES[family]())
