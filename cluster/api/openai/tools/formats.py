"""How families of models write tool calls, as data."""

import re
from dataclasses import dataclass
from typing import Literal, TypeAlias

ToolFormatName: TypeAlias = Literal["hermes", "llama3"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """Marks around calls; a call itself is always an object with a name and arguments."""

    name: ToolFormatName
    opening: str
    """The mark before a call."""
    closing: str = ""
    """The mark after a call, or after several of one opening."""
    may_be_bare: bool = False
    """Whether a call may come without the opening mark. Then only objects that name an
    offered tool are calls, since a model may also be asked for plain JSON."""
    before_object: str = ""
    """Letters that may stand between the opening mark and the call."""
    between_calls: str = ""
    """Letters that may stand after a call."""
    arguments_key: Literal["arguments", "parameters"] = "arguments"
    """What the arguments are called where we write or force a call."""

    def first_opening(self, text: str) -> tuple[int, int] | None:
        """Where the first call in the text may begin: the mark's place and its end."""
        pattern = re.escape(self.opening) + (r"|(?=\{)" if self.may_be_bare else "")
        found = re.search(pattern, text)
        return found.span() if found else None


HERMES = ToolFormat(
    name="hermes",
    opening="<tool_call>",
    closing="</tool_call>",
    before_object="[",
    between_calls=",]",
)
"""`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as Hermes and Qwen are trained; also
several in a list between one pair of marks, as SmolLM2 writes them."""

LLAMA3 = ToolFormat(
    name="llama3",
    opening="<|python_tag|>",
    may_be_bare=True,
    between_calls=";",
    arguments_key="parameters",
)
"""`{"name": …, "parameters": {…}}`, as Llama 3.1 and later; several separated by `;`."""

FORMATS: dict[ToolFormatName, ToolFormat] = {each.name: each for each in (HERMES, LLAMA3)}


def format_of(template: str) -> ToolFormat:
    """The format that a model's chat template shows it. One that shows none (the model was
    not trained on tools) gets Hermes's, whose marks no other text has."""
    if HERMES.opening in template:
        return HERMES
    is_llama = LLAMA3.opening in template or "<|start_header_id|>" in template
    return LLAMA3 if is_llama else HERMES
