"""Chat messages to one prompt text, through the model's own Jinja template.

Templates are foreign code: they run in Jinja's immutable sandbox, see plain data only, and
whatever they raise becomes a `ChatTemplateError`. The environment offers what templates
in the wild rely on: loop controls, `tojson`, `raise_exception`, `strftime_now`, and the
`{% generation %}` block, which marks training targets and prints its body here.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cluster.frontend.chat_messages import Json, Message
from scheduler.errors import InvalidRequest

CONTINUE_MARK = "\ufdd4"
"""A Unicode noncharacter, so never text: shows where a template put the end of a message."""


class ChatTemplateError(InvalidRequest):
    """A chat template refused these messages, or failed on them; the message says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the model's chat template: {reason}", param="messages")
        self.reason = reason


class NoChatTemplate(InvalidRequest):
    """The model has no chat template, so messages cannot become a prompt."""

    def __init__(self, wanted: str, available: Sequence[str]) -> None:
        names = ", ".join(available)
        which = f" {wanted!r} (it has templates named {names})" if available else ""
        super().__init__(
            f"the model has no chat template{which}. Send a plain prompt, or put a "
            "chat_template.jinja into the model directory",
            param="messages",
        )


class ChatTemplate:
    """One compiled template. Any thread may render with it.

    Raises:
        ChatTemplateError: the source is not a valid template.
    """

    def __init__(self, source: str, *, clock: Callable[[], datetime] = datetime.now) -> None:
        self.source = source
        try:
            self._template = _environment(clock).from_string(source)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"cannot be compiled: {error}") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        variables: Mapping[str, Json],
    ) -> str:
        """The prompt text of a conversation.

        Args:
            add_generation_prompt: end with the header of the assistant's answer.
            continue_final_message: end inside the last message, for the model to go on with.
            variables: what else the template sees: special tokens, tools, its own options.
        Raises:
            ChatTemplateError: the template refused, failed, or dropped the message to continue.
        """
        if continue_final_message:
            if add_generation_prompt:
                raise InvalidRequest(
                    "continue_final_message and add_generation_prompt exclude each other: the "
                    "first goes on with the last message, the second starts a new one",
                    param="continue_final_message",
                )
            messages = [*messages[:-1], _marked(messages[-1])]
        try:
            text = self._template.render(
                {**variables, "messages": messages, "add_generation_prompt": add_generation_prompt}
            )
        except Exception as error:  # foreign code: anything may come
            raise ChatTemplateError(_reason(error)) from error
        return _cut_at_mark(text) if continue_final_message else text


def _marked(message: Message) -> Message:
    content = message.get("content")
    if not isinstance(content, str):
        raise InvalidRequest(
            "continue_final_message needs content in the last message", param="messages"
        )
    return {**message, "content": f"{content}{CONTINUE_MARK} "}


def _cut_at_mark(text: str) -> str:
    """End the prompt where the last message ends.

    The mark was followed by a space. If that is gone, the template trims messages, and
    would have trimmed the end of this one too.
    """
    end = text.rfind(CONTINUE_MARK)
    if end < 0:
        raise ChatTemplateError("it does not print the final message, so none can be continued")
    is_kept = text[end + 1 : end + 2] == " "
    return text[:end] if is_kept else text[:end].rstrip()


def _reason(error: Exception) -> str:
    message = str(error) or "no reason given"
    return (
        message if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {message}"
    )


def _environment(clock: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: clock().strftime(pattern)
    return environment


class _GenerationBlock(Extension):
    """`{% generation %} body {% endgeneration %}` prints its body."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without Jinja's HTML escapes. Our own marks stay as they are, also in ASCII."""
    text = json.dumps(
        value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
    )
    return _BEYOND_ASCII.sub(_escaped, text) if ensure_ascii else text


def _escaped(found: re.Match[str]) -> str:
    return json.dumps(found.group())[1:-1]


_BEYOND_ASCII = re.compile("[^\x00-\x7f\ufdd0-\ufdef]")
