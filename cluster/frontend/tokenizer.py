"""Text to token ids and back, for one model.

What the rules are:

- A plain prompt is encoded with the tokens that the tokenizer puts around a text (a begin
  token, for many models), and control tokens typed in it count: its author writes the whole
  prompt. Both can be switched off.
- A chat is rendered by the model's template and encoded with nothing put around it, because
  the template writes its own begin token. Control tokens typed in messages are plain text:
  no user can end a turn or speak as another. `parse_control_tokens=True` lifts that.
- Decoding gives exactly what the tokenizer gives, without clean-up of spaces, and leaves
  special tokens out unless asked.
"""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from cluster.frontend.bad_words import bad_word_ids
from cluster.frontend.chat_messages import Json, plain_json, plain_messages
from cluster.frontend.chat_template import ChatTemplate, NoChatTemplate
from cluster.frontend.control_tokens import ChatGuard, ControlTokens
from cluster.frontend.detokenizer import Detokenizer
from cluster.frontend.grammar_process import GrammarProcess
from cluster.frontend.raw_tokenizer import ids_of, raw_tokenizer_of, special_tokens_of
from cluster.frontend.stop_strings import StopStrings
from cluster.frontend.text_stream import TextStream
from cluster.frontend.token_pieces import LARGEST_ID, DecoderKind, TokenPieces
from cluster.frontend.tokenizer_files import TokenizerFiles, files_of
from scheduler.errors import InvalidRequest
from scheduler.sampling import SamplingParams


class Tokenizer:
    """One model's tokenizer and chat templates.

    Any number of threads may use it at once: nothing of it changes after construction but
    caches, and the work is done outside Python's lock.

    Args:
        grammars: what several tokenizers of the same files shall share.
    Raises:
        TokenizerDamaged: the files do not make a tokenizer.
    """

    def __init__(self, files: TokenizerFiles, grammars: GrammarProcess | None = None) -> None:
        self.files = files
        self.special_tokens = special_tokens_of(files)
        """Texts of named special tokens, such as "eos_token"; templates see them."""
        self._raw = raw_tokenizer_of(files, self.special_tokens)
        self._pieces = TokenPieces(self._raw)
        self._control = ControlTokens(self._raw)
        self._chats: dict[str, tuple[ChatTemplate, ChatGuard]] = {}
        self._lock = threading.Lock()
        self._grammars = grammars or GrammarProcess(files.tokenizer_json)

    @classmethod
    def from_files(cls, files: TokenizerFiles) -> "Tokenizer":
        return cls(files)

    @classmethod
    def from_directory(cls, directory: str | Path) -> "Tokenizer":
        """The tokenizer of a model directory.

        Raises:
            TokenizerNotFound: no tokenizer.json there.
        """
        return cls(files_of(directory))

    @property
    def vocab_size(self) -> int:
        """Ids that have a text. A model may have more rows than that in its embedding."""
        return self._raw.get_vocab_size(with_added_tokens=True)

    @property
    def special_ids(self) -> frozenset[int]:
        """Tokens that decoding leaves out."""
        return self._pieces.special_ids

    @property
    def joins_bytes(self) -> bool:
        """Whether the bytes of tokens one after the other are the text, but for a space at its
        start; otherwise what a token adds can only be seen by decoding."""
        return self._pieces.kind is not DecoderKind.OTHER

    @property
    def bos_token_id(self) -> int | None:
        return self._special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._special_id("eos_token")

    @property
    def has_chat_template(self) -> bool:
        return bool(self.files.chat_templates)

    def token_id(self, text: str) -> int | None:
        """The id of the token of exactly this name, such as "<|im_end|>"."""
        return self._raw.token_to_id(text)

    # Text to ids

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_control_tokens: bool = True
    ) -> list[int]:
        """Token ids of a plain prompt.

        Args:
            add_special_tokens: put the model's begin token (and the like) around the text.
            parse_control_tokens: "<|im_end|>" in the text is that token, not ten letters.
        Raises:
            InvalidRequest: not a text, or one that is not valid Unicode.
        """
        _check_text(text)
        if not parse_control_tokens:
            return self._control.encode_as_text(text, add_special_tokens=add_special_tokens)
        return ids_of(self._raw, text, add_special_tokens=add_special_tokens)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        template_options: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt text of a conversation, as the model's template writes it. For people
        to read: use `encode_chat` for ids, because it keeps typed control tokens apart.

        Args as in `encode_chat`.
        """
        template, _ = self._chat(tools is not None)
        return template.render(
            plain_messages(messages),
            add_generation_prompt=_wants_header(add_generation_prompt, continue_final_message),
            continue_final_message=continue_final_message,
            variables=self._variables(_plain_others(tools, template_options)),
        )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        parse_control_tokens: bool = False,
        template_options: Mapping[str, object] | None = None,
    ) -> list[int]:
        """Token ids of a conversation.

        Args:
            messages: maps with "role" and "content" (a text or a list of text parts).
            tools: descriptions of functions, for templates that show them to the model.
            add_generation_prompt: end with the header of the assistant's answer. None: yes,
                unless the final message is to be continued.
            continue_final_message: end inside the last message, for the model to go on with.
            parse_control_tokens: let control tokens typed in messages count as such.
            template_options: more variables for the template, such as `enable_thinking`.
        Raises:
            NoChatTemplate: the model has none.
            ChatTemplateError: the template refused the messages; `reason` says why.
            InvalidRequest: the messages are not what they should be.
        """
        template, guard = self._chat(tools is not None)
        plain, others = plain_messages(messages), _plain_others(tools, template_options)
        is_guarded = not parse_control_tokens and guard.has_typed_control_tokens(plain, others)
        if is_guarded:
            plain, others = guard.mark(plain, others)
        text = template.render(
            plain,
            add_generation_prompt=_wants_header(add_generation_prompt, continue_final_message),
            continue_final_message=continue_final_message,
            variables=self._variables(others),
        )
        _check_text(text, param="messages")
        if is_guarded:
            return self._control.encode_marked(text)
        return ids_of(self._raw, text, add_special_tokens=False)

    def bad_word_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The token sequences to ban for these words.

        Raises:
            InvalidRequest: too many words, an empty one, or one of too many tokens.
        """
        return bad_word_ids(words, lambda text: self.encode(text, add_special_tokens=False))

    def grammar(self, sampling: SamplingParams) -> str | None:
        """What the output must be derived from, if the caller wants it to have a form. The first
        call starts a process; see `close`.

        Raises:
            InvalidRequest: it is wrong, not supported, or over a limit.
        """
        wanted = sampling.structured_outputs or sampling.grammar
        return None if wanted is None else self._grammars.grammar_of(wanted)

    def close(self) -> None:
        """End the process that makes grammars, if it was needed; another call starts it again."""
        self._grammars.close()

    # Ids to text

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of these ids. Ids outside the vocabulary have none."""
        known = [token_id for token_id in ids if 0 <= token_id <= LARGEST_ID]
        return self._raw.decode(known, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """Exactly the bytes that a token stands for, maybe a part of a character."""
        return self._pieces.bytes_of(token_id)

    def token_text(self, token_id: int) -> str:
        """A token as text, for people: a part of a character becomes U+FFFD."""
        return self._pieces.bytes_of(token_id).decode(errors="replace")

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """Turns the ids of one output into text as they come."""

        def decode(ids: Sequence[int]) -> str:
            return self.decode(ids, skip_special_tokens=skip_special_tokens)

        return Detokenizer(self._pieces, decode, skip_special_tokens=skip_special_tokens)

    def text_stream(self, sampling: SamplingParams) -> TextStream:
        """Turns the ids of one output into text, and finds the stop strings asked for."""
        return TextStream(
            self.detokenizer(skip_special_tokens=sampling.skip_special_tokens),
            StopStrings(sampling.stop, include_in_output=sampling.include_stop_str_in_output),
            min_tokens=sampling.min_tokens,
        )

    def _special_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self._raw.token_to_id(text)

    def _chat(self, has_tools: bool) -> tuple[ChatTemplate, ChatGuard]:
        """The template to use, compiled when first asked for."""
        sources = self.files.chat_templates
        name = "tool_use" if has_tools and "tool_use" in sources else "default"
        if name not in sources:
            raise NoChatTemplate(name, sorted(sources))
        with self._lock:
            if name not in self._chats:
                source = sources[name]
                self._chats[name] = ChatTemplate(source), self._control.guard(source)
            return self._chats[name]

    def _variables(self, others: Json) -> dict[str, Json]:
        assert isinstance(others, dict)
        return {"tools": None, "documents": None, **self.special_tokens, **others}


def _wants_header(asked: bool | None, continue_final_message: bool) -> bool:
    return not continue_final_message if asked is None else asked


def _plain_others(
    tools: Sequence[Mapping[str, object]] | None, options: Mapping[str, object] | None
) -> Json:
    others = plain_json(options or {}, "chat_template_kwargs")
    assert isinstance(others, dict)
    reserved = {"messages", "add_generation_prompt"} & others.keys()
    if reserved:
        raise InvalidRequest(
            f"chat_template_kwargs may not set {sorted(reserved)[0]}", param="chat_template_kwargs"
        )
    return others if tools is None else {**others, "tools": plain_json(tools, "tools")}


def _check_text(text: str, param: str = "prompt") -> None:
    if not isinstance(text, str):
        raise InvalidRequest(f"{param} must be a text, got {type(text).__name__}", param=param)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{param} is not valid Unicode: half of a surrogate pair at character {error.start}",
            param=param,
        ) from error
