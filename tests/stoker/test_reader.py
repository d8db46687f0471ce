"""Reading requests while anything happens to them."""

from hypothesis import given
from hypothesis import strategies as st

from cluster.frontend.draft import RequestOptions, draft_of
from cluster.frontend.errors import EngineLost
from cluster.frontend.requests import LiveRequest
from cluster.frontend.session import FrontSession
from cluster.frontend.tokenizer import Tokenizer
from cluster.wire import PROTOCOL_VERSION
from scheduler.request import Finish, Rejection
from scheduler.sampling import SamplingParams
from stoker.outputs import Piece
from stoker.reader import PieceReader, request_output
from tests.cluster.frontend.fake_engine import make_info, tokens
from tests.cluster.frontend.tiny_tokenizers import llama3_like

TOKENIZER = Tokenizer(llama3_like())

EVENTS = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 3), st.booleans()),
    st.tuples(
        st.just("tokens"),
        st.integers(0, 9),
        st.lists(st.integers(0, 511), max_size=5),
        st.sampled_from(list(Finish)),
    ),
    st.tuples(st.just("reject"), st.integers(0, 9)),
    st.tuples(st.just("cancel"), st.integers(0, 9)),
    st.tuples(st.just("lose")),
    st.tuples(st.just("read"), st.integers(0, 9)),
)


class Scene:
    """One session, and for each request a reader that looks now and then."""

    def __init__(self) -> None:
        self.session = FrontSession(PROTOCOL_VERSION)
        self.lives: list[LiveRequest] = []
        self.readers: list[PieceReader] = []
        self.pieces: list[list[Piece]] = []
        self.connect()

    def connect(self) -> None:
        self.session.receive(make_info(), 0.0)

    def submit(self, n: int, has_stop: bool) -> None:
        stop = ("the", "o") if has_stop else ()
        sampling = SamplingParams(n=n, max_tokens=50, stop=stop, temperature=0.9)
        draft = draft_of(
            "hi",
            sampling,
            RequestOptions(),
            info=make_info(),
            tokenizer=TOKENIZER,
            seed=1,
            request_id="r",
        )
        live, _ = self.session.submit(draft, 0.0)
        self.lives.append(live)
        self.readers.append(PieceReader(live))
        self.pieces.append([])

    def tokens(self, handle: int, ids: list[int], finish: Finish) -> None:
        self.session.receive(tokens(handle, ids, finish), 1.0)

    def reject(self, handle: int) -> None:
        self.session.receive(Rejection(handle=handle, reason="queue_full", message="full"), 1.0)

    def cancel(self, index: int) -> None:
        if index < len(self.lives) and not self.lives[index].is_done:
            self.session.cancel(self.lives[index])

    def lose(self) -> None:
        self.session.lose(EngineLost("gone"))
        self.connect()

    def read(self, index: int) -> None:
        if index < len(self.lives):
            self.pieces[index] += self.readers[index].read()


@given(st.lists(EVENTS, max_size=40))
def test_pieces_join_to_the_whole_and_the_session_holds_what_is_live(
    events: list[tuple[object, ...]],
) -> None:
    scene = Scene()

    for name, *arguments in [*events, *(("read", i) for i in range(10))]:
        getattr(scene, str(name))(*arguments)
        live = sum(output.is_live for request in scene.lives for output in request.outputs)
        assert scene.session.num_live == live

    for request, pieces, reader in zip(scene.lives[:10], scene.pieces, scene.readers, strict=False):
        whole = request_output(request)
        assert reader.is_at_end == request.is_done == whole.finished
        for completion in whole.outputs:
            own = [piece for piece in pieces if piece.index == completion.index]
            assert "".join(piece.text for piece in own) == completion.text
            assert [i for piece in own for i in piece.token_ids] == completion.token_ids
            ends = [piece.finish_reason for piece in own if piece.finish_reason]
            assert ends == ([completion.finish_reason] if completion.finished else [])
