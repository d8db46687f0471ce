"""What `/v1/completions` and `/v1/chat/completions` take alike.

Fields of `SamplingParams` and `RequestOptions` are not checked here: those types know best,
and say what was wanted. The annotations are for readers and for `/openapi.json`.
"""

from typing import Annotated, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, SkipValidation

from cluster.api.openai.structure_body import ResponseFormat, Schema, StructuredOutputsBody

Int: TypeAlias = Annotated[int | None, SkipValidation]
Float: TypeAlias = Annotated[float | None, SkipValidation]
Bool: TypeAlias = Annotated[bool | None, SkipValidation]
Text: TypeAlias = Annotated[str | None, SkipValidation]
Texts: TypeAlias = Annotated[list[str] | None, SkipValidation]
TextOrTexts: TypeAlias = Annotated[str | list[str] | None, SkipValidation]
Ids: TypeAlias = Annotated[list[int] | None, SkipValidation]
Bias: TypeAlias = Annotated[dict[str, float] | None, SkipValidation]
Anything: TypeAlias = Annotated[object, SkipValidation]


class StreamOptions(BaseModel):
    """Only with `stream`."""

    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool | None = Field(
        None, description="One more chunk at the end, without choices, with `usage`."
    )
    continuous_usage_stats: bool | None = Field(
        None, description="With `include_usage`: the usage so far in every chunk."
    )
    include_obfuscation: bool | None = Field(None, description="Accepted; nothing is padded.")


class GenerationBody(BaseModel):
    """A call that makes text. `null` means the same as leaving a field out."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = Field(None, description="One of `GET /v1/models`; none: the one there is.")
    stream: bool | None = Field(None, description="Answer with server-sent events.")
    stream_options: StreamOptions | None = None

    n: Int = Field(None, description="Independent outputs for each prompt. 1 if left out.")
    max_tokens: Int = Field(None, description="Most tokens to produce.")
    temperature: Float = Field(None, description="0 to 2; below 0.01 is greedy.")
    top_p: Float = Field(None, description="Likeliest tokens that reach this share, (0, 1].")
    top_k: Int = Field(None, description="This many likeliest tokens; 0 or -1: all.")
    min_p: Float = Field(
        None, description="No token less probable than this share of the likeliest, [0, 1]."
    )
    seed: Int = Field(None, description="Same seed, same text.")
    presence_penalty: Float = Field(None, description="-2 to 2, once per token in the output.")
    frequency_penalty: Float = Field(
        None, description="-2 to 2, for each time that a token is in the output."
    )
    repetition_penalty: Float = Field(
        None, description="0.01 to 100, for tokens in prompt and output; 1: none."
    )
    logit_bias: Bias = Field(None, description="-100 to 100 by token id, added to its logit.")
    stop: TextOrTexts = Field(None, description="Texts that end the output; at most 64.")
    stop_token_ids: Ids = Field(None, description="Token ids that end the output; at most 128.")
    min_tokens: Int = Field(None, description="Nothing ends the output before that many tokens.")
    ignore_eos: Bool = Field(None, description="Go on after the model's own end tokens.")
    allowed_token_ids: Ids = Field(None, description="Only these tokens are sampled.")
    bad_words: Texts = Field(None, description="Texts that are never produced; at most 256.")
    prompt_logprobs: Int = Field(
        None, description="Likeliest tokens to report for each prompt token, 0 to 20."
    )
    skip_special_tokens: Bool = Field(None, description="Leave special tokens out. True.")
    include_stop_str_in_output: Bool = Field(
        None, description="Keep the stop text, or the text of a stop token, in the output."
    )

    response_format: ResponseFormat | None = Field(
        None, description="Text, any JSON object, or JSON by a schema."
    )
    structured_outputs: StructuredOutputsBody | None = Field(
        None, description="The form of the output, in more ways than `response_format` knows."
    )
    guided_json: Schema = Field(None, description="As `structured_outputs.json`.")
    guided_regex: Text = Field(None, description="As `structured_outputs.regex`.")
    guided_choice: Texts = Field(None, description="As `structured_outputs.choice`.")
    guided_grammar: Text = Field(None, description="As `structured_outputs.grammar`.")
    guided_whitespace_pattern: Text = Field(
        None, description="With `guided_json`: as `structured_outputs.whitespace_pattern`."
    )

    priority: Int = Field(None, description="Lower starts first, under that policy.")
    cache_salt: Text = Field(
        None, description="Cached prefixes are shared between calls of one salt only."
    )
    timeout: Float = Field(
        None, description="Seconds until the call ends with an error; also `X-Request-Timeout`."
    )
    truncate_prompt_tokens: int | None = Field(
        None, description="Keep only the last so many tokens of the prompt; -1: what fits."
    )
    return_token_ids: bool | None = Field(
        None, description="Also give ids of prompt and output, and log-probabilities of each."
    )

    user: Anything = Field(None, description="Accepted; means nothing here.")
    metadata: Anything = Field(None, description="Accepted; means nothing here.")
    store: Anything = Field(None, description="Accepted; nothing is stored.")

    @property
    def wants_stream(self) -> bool:
        return bool(self.stream)

    @property
    def wants_usage_chunk(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_usage_always(self) -> bool:
        options = self.stream_options
        return (
            self.wants_usage_chunk and options is not None and bool(options.continuous_usage_stats)
        )
