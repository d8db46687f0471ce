"""The application on a real socket, over an engine without a model."""

import asyncio
import threading
from collections.abc import Iterable
from pathlib import Path

import httpx
import numpy as np
import openai
import uvicorn
import uvloop

from cluster.api.api_server import ApiServer
from cluster.api.app import create_app
from cluster.api.guard import guarded
from cluster.api.server_main import uvicorn_config
from cluster.frontend.engine_client import ClientConfig, seeds_from
from cluster.frontend.loop_client import LoopClient
from cluster.frontend.tokenizer import Tokenizer
from cluster.frontend.tokenizer_files import TokenizerFiles
from cluster.frontend.tokenizer_pool import TokenizerPool
from cluster.http_config import HttpConfig
from cluster.listener import Listener
from cluster.messages.clients import ServerInfo
from cluster.messages.sockets import ToClient
from scheduler.arrays import int32
from scheduler.plan import LogprobRows
from scheduler.request import Ended, Finish, Request, Started
from tests.cluster.frontend.fake_engine import FakeEngine, Script, ipc_address, make_info, tokens

START_S = 30.0


class ApiRig:
    """One API server in a thread of its own, and the engine that it speaks to."""

    def __init__(
        self,
        folder: Path,
        *,
        script: Script,
        info: ServerInfo | None = None,
        files: TokenizerFiles | None = None,
        hello_answer: ToClient | None = None,
        **http: object,
    ) -> None:
        self.engine = FakeEngine(
            ipc_address(folder), script=script, info=info, files=files, hello_answer=hello_answer
        )
        self._is_loaded = hello_answer is None
        self.tokenizer = Tokenizer(self.engine.files)
        self._config = HttpConfig(**http)  # type: ignore[arg-type]
        self._listener = Listener("127.0.0.1", 0)
        self.url = self._listener.url
        self.http = httpx.Client(base_url=self.url, timeout=30)
        self._openai: openai.OpenAI | None = None
        self._is_ready = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="api-rig")
        self._thread.start()
        assert self._is_ready.wait(START_S)
        if self._failure is not None:
            raise self._failure

    def openai(self, **fields: object) -> openai.OpenAI:
        """The official client, which gives up at the first error."""
        if self._openai is None or fields:
            values = {"base_url": f"{self.url}/v1", "api_key": "any", "max_retries": 0, **fields}
            client = openai.OpenAI(**values)  # type: ignore[arg-type]
            if fields:
                return client
            self._openai = client  # kept, since making one takes longer than most calls
        return self._openai

    def post(self, path: str, **body: object) -> httpx.Response:
        return self.http.post(path, json=body)

    def close(self) -> None:
        self.http.close()
        if self._openai is not None:
            self._openai.close()
        self.server.should_exit = True
        self._thread.join(START_S)
        self.engine.close()
        self._listener.close()

    def __enter__(self) -> "ApiRig":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            uvloop.run(self._serve())
        except BaseException as error:
            self._failure = error
        finally:
            self._is_ready.set()

    async def _serve(self) -> None:
        config = ClientConfig(address=self.engine.address, shortest_redial_s=0.01)
        client = LoopClient(config, draw_seed=seeds_from(0))
        pool = TokenizerPool(self._config.encode_threads)
        self.api = ApiServer(self._config, client, pool)
        self.loop = asyncio.get_running_loop()
        self.app = create_app(self.api)
        self.server = uvicorn.Server(uvicorn_config(guarded(self.app, self.api), self._config))
        serving = asyncio.create_task(self.server.serve(sockets=[self._listener.socket]))
        if self._is_loaded:
            await client.wait_ready(START_S)
        self._is_ready.set()
        await serving
        pool.close()


def spoken(
    request: Request,
    ids: Iterable[int],
    *,
    finish: Finish = Finish.STOP,
    per_step: int = 1,
    num_cached: int = 0,
) -> list[ToClient]:
    """These tokens, some in each step, the last one with the end; log-probabilities if asked.

    Token i of the sequence has log-probability -(i + 1), the likeliest ones follow it.
    """
    ids, handle = list(ids), request.handle
    num_prompt = request.prompt.size
    answers: list[ToClient] = []
    for first in range(0, len(ids), per_step):
        part = ids[first : first + per_step]
        is_last = first + per_step >= len(ids)
        positions = range(num_prompt + first, num_prompt + first + len(part))
        if request.sampling.prompt_logprobs is not None and first == 0:
            positions = range(1, num_prompt + len(part))
        sequence = [*request.prompt.tolist(), *ids]
        answers.append(
            tokens(
                handle,
                part,
                finish if is_last else Finish.NOT_YET,
                started=(Started(handle=handle, num_cached_tokens=num_cached),)
                if first == 0
                else (),
                ended=(Ended(handle=handle),) if is_last else (),
                logprobs=logprob_rows(request, sequence, positions),
            )
        )
    return answers


def logprob_rows(request: Request, sequence: list[int], positions: range) -> LogprobRows | None:
    asked = (request.sampling.logprobs, request.sampling.prompt_logprobs)
    widths = [count + 1 for count in asked if count is not None]
    if not widths:
        return None
    width = max(widths)
    ids: list[int] = []
    logprobs: list[float] = []
    for position in positions:
        ids += [sequence[position], *range(300, 300 + width - 1)]
        logprobs += [-float(position + 1), *(-0.5 * (i + 1) for i in range(width - 1))]
    return LogprobRows(
        row=int32([0] * len(positions)),
        position=int32(list(positions)),
        width=width,
        token=int32(ids),
        logprob=np.asarray(logprobs, dtype=np.float32),
        rank=int32([7] * len(positions)),
    )


def script_of(tokenizer: Tokenizer, text: str, **fields: object) -> Script:
    """Every request is answered by this text, as far as its limit allows."""
    ids = tokenizer.encode(text, add_special_tokens=False)

    def script(request: Request) -> list[ToClient]:
        limit = request.sampling.max_tokens or len(ids)
        end = [] if limit < len(ids) or request.sampling.ignore_eos else [*request.end_ids[:1]]
        said = [*ids[:limit], *end]
        finish = Finish.STOP if end else Finish.LENGTH
        return spoken(request, said, finish=finish, **fields)  # type: ignore[arg-type]

    return script


__all__ = ["ApiRig", "make_info", "script_of", "spoken"]
