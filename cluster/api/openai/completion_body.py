"""What `/v1/completions` takes."""

from typing import Annotated, TypeAlias

from pydantic import Field, SkipValidation

from cluster.api.openai.generation_body import GenerationBody, Int

PromptField: TypeAlias = Annotated[str | list[str] | list[int] | list[list[int]], SkipValidation]


class CompletionBody(GenerationBody):
    """Prompts to go on with."""

    prompt: PromptField = Field(
        description="A text, token ids, or a list of either; each gets its own choices."
    )
    best_of: Int = Field(
        None, description="Make this many outputs, give the `n` likeliest. Not with `stream`."
    )
    echo: bool | None = Field(None, description="Put the prompt before the output.")
    logprobs: Int = Field(
        None, description="Log-probabilities of tokens and of that many likeliest, 0 to 20."
    )
    add_special_tokens: bool | None = Field(
        None, description="Put the model's begin token before a text prompt. True."
    )
