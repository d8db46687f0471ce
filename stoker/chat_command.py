"""`stoker chat`: a conversation in the terminal, or over piped lines."""

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator

from scheduler.errors import InvalidRequest
from scheduler.sampling import SamplingParams
from stoker.cli import EXIT_OK
from stoker.client import Client
from stoker.cluster_argument import cluster_of
from stoker.prompts_file import Chat
from stoker.sampling_arguments import sampling_of

HELP = """/reset   forget the conversation
/exit    leave (also Ctrl-D)
/help    this list
Ctrl-C stops an answer."""


def chat(arguments: argparse.Namespace) -> int:
    """Run the command until the input ends or /exit."""
    sampling_of(arguments, SamplingParams())
    with cluster_of(arguments) as client:
        sampling = sampling_of(arguments, client.get_default_sampling_params())
        is_terminal = sys.stdin.isatty()
        if is_terminal:
            print(f"{client.info().model}. /help lists the commands.", file=sys.stderr)
        talk = Conversation(client, sampling, arguments.system, _write)
        for line in _lines_of_terminal() if is_terminal else _lines_of_pipe():
            if not talk.take(line):
                break
    return EXIT_OK


class Conversation:
    """The history of one chat, and what each line of input does to it."""

    def __init__(
        self,
        client: Client,
        sampling: SamplingParams,
        system: str | None,
        write: Callable[[str], None],
    ) -> None:
        self._client = client
        self._sampling = sampling
        self._write = write
        self._beginning: Chat = [] if system is None else [{"role": "system", "content": system}]
        self.messages: Chat = list(self._beginning)

    def take(self, line: str) -> bool:
        """Obey a command or answer a message; False if that was the end."""
        text = line.strip()
        if text in ("/exit", "/quit"):
            return False
        if text == "/reset":
            self.messages = list(self._beginning)
            self._write("(forgotten)\n")
        elif text == "/help":
            self._write(f"{HELP}\n")
        elif text.startswith("/") and " " not in text and text[1:].isalpha():
            self._write(f"there is no command {text}; /help lists them\n")
        elif text:
            self._answer(text)
        return True

    def _answer(self, text: str) -> None:
        """Stream the answer to one message; Ctrl-C keeps what came until then."""
        messages: Chat = [*self.messages, {"role": "user", "content": text}]
        try:
            handle = self._client.submit_chat(messages, self._sampling)
        except InvalidRequest as error:
            self._write(f"({error})\n")
            return
        try:
            for piece in handle:
                self._write(piece.text)
        except KeyboardInterrupt:
            handle.cancel()
            self._write(" (stopped)")
        self._write("\n")
        completion = handle.snapshot().outputs[0]
        if completion.finish_reason == "length":
            self._write("(the answer was cut: --max-tokens, or the context is full; /reset)\n")
        self.messages = [*messages, {"role": "assistant", "content": completion.text}]


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _lines_of_terminal() -> Iterator[str]:
    """Lines typed, with editing and history where Python has readline."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # input() uses it once it is loaded
    while True:
        try:
            yield input("> ")
        except EOFError:
            print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            print("\n(Ctrl-D or /exit leaves)", file=sys.stderr)


def _lines_of_pipe() -> Iterator[str]:
    yield from sys.stdin
