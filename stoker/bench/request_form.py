"""The bodies of requests: what the user set, and what measuring needs, and nothing else.

No temperature, no penalty, no end-token rule is sent that was not asked for: a server's defaults
are what its users get, and some of them cost time (a forced greedy run never pays for sampling).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from stoker.bench.errors import BenchError
from stoker.bench.load import Sending
from stoker.bench.workload import Call

COMPLETIONS = "completions"
CHAT = "chat"
PATHS = {COMPLETIONS: "/v1/completions", CHAT: "/v1/chat/completions"}
"""Where each kind of request goes, below the base URL."""


class BadRequestForm(BenchError):
    """Fields that a measurement cannot be made with."""


@dataclass(frozen=True, slots=True)
class RequestForm:
    """Makes the bodies for one route.

    Raises:
        BadRequestForm: fields that would make the figures wrong.
    """

    endpoint: str
    model: str
    fields: Mapping[str, object]
    """What the user set; these win over everything else."""

    def __post_init__(self) -> None:
        if self.fields.get("stream") is False:
            raise BadRequestForm("stream is false, and an answer that is not streamed has no TTFT")
        for name in ("n", "best_of"):
            if self.fields.get(name) not in (None, 1):
                raise BadRequestForm(
                    f"{name} is {self.fields[name]}, and latencies per token are those of one "
                    "output; leave it out and send more requests"
                )

    @property
    def path(self) -> str:
        return PATHS[self.endpoint]

    def body(self, call: Call) -> dict[str, object]:
        """The JSON object of one request."""
        made: dict[str, object] = {"model": self.model}
        made["messages" if self.endpoint == CHAT else "prompt"] = self._prompt(call)
        if call.max_tokens is not None:
            made["max_tokens"] = call.max_tokens
        made |= {"stream": True, "stream_options": {"include_usage": True}}
        return {**made, **self.fields}

    def sending(self, call: Call) -> Sending:
        """One request, ready to go out."""
        body = self.body(call)
        asked = body.get("max_tokens", body.get("max_completion_tokens"))
        return Sending(msgspec.json.encode(body), asked if isinstance(asked, int) else None)

    def shown(self, call: Call) -> dict[str, object]:
        """A body for people to read, its prompt only by its kind and length."""
        body = self.body(call)
        for name in ("prompt", "messages"):
            value = body.get(name)
            if isinstance(value, str):
                body[name] = f"<text of {len(value)} characters>"
            elif isinstance(value, list):
                kind = "messages" if name == "messages" else "token ids"
                body[name] = f"<{len(value)} {kind}>"
        return body

    def _prompt(self, call: Call) -> object:
        """The prompt as the route takes it: a text is a user's message, and the other way round a
        conversation is its texts."""
        prompt, is_chat = call.prompt, self.endpoint == CHAT
        if isinstance(prompt, str):
            return [{"role": "user", "content": prompt}] if is_chat else prompt
        if prompt and isinstance(prompt[0], dict):
            texts = [str(turn.get("content", "")) for turn in prompt]
            return prompt if is_chat else "\n\n".join(texts)
        if is_chat:
            raise BadRequestForm(
                "token ids cannot be sent to the chat route; use --endpoint completions, or a "
                "workload of texts"
            )
        return prompt
