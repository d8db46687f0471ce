"""What the documents say is there is there, and the code in them runs."""

import ast
import importlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cluster.keys import write_key_file
from cluster.links.sockets import fresh_keys
from scheduler.journal import Record, encode_record
from stoker.cli import make_parser
from tests.cluster.cluster_rig import Rig
from tests.cluster.frontend.fake_engine import ANSWER, FakeEngine, answer_at_once
from tests.cluster.scripted import Script, tokens_after

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/*.md", "docs/adr/*.md", "deploy/*.md", ".github/*.md")
    for page in ROOT.glob(pattern)
)
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in PAGES}

TOP_FOLDERS = "kvcache|scheduler|worker|cluster|stoker|tests|bench|docs|scripts|examples|deploy"


def code_spans(text: str) -> list[str]:
    """What stands between single backticks, outside blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"(?ms)^```.*?^```$", "", text))


def code_of(text: str) -> str:
    """Everything that is shown as code, block or span, as lines."""
    return "\n".join([*re.findall(r"(?ms)^```[^\n]*\n(.*?)^```$", text), *code_spans(text)])


def anchors_of(text: str) -> set[str]:
    """The anchors that a page's headings get on the common hosts."""
    headings = re.findall(r"(?m)^#+ (.+)$", re.sub(r"(?ms)^```.*?^```$", "", text))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links_of(text: str) -> list[str]:
    bare = re.sub(r"`[^`\n]+`", "", re.sub(r"(?ms)^```.*?^```$", "", text))
    return re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", bare)


# --- names and links ------------------------------------------------------------------------


@pytest.mark.parametrize("name", TEXTS)
def test_every_link_leads_somewhere(name: str) -> None:
    here = ROOT / name
    for link in links_of(TEXTS[name]):
        if re.match(r"(https?|mailto):", link):
            continue
        path, _, anchor = link.partition("#")
        target = (here.parent / path).resolve() if path else here
        assert target.exists(), f"{name} links to {link}, which is not there"
        if anchor:
            known = anchors_of(target.read_text(encoding="utf-8"))
            assert anchor in known, f"{name} links to {link}; {target.name} has no such heading"


@pytest.mark.parametrize("name", TEXTS)
def test_every_path_in_backticks_exists(name: str) -> None:
    for span in code_spans(TEXTS[name]):
        for path in re.findall(rf"(?<![\w./-])((?:{TOP_FOLDERS})/[\w./-]*)", span):
            found = (ROOT / path.rstrip(".")).exists()
            assert found, f"{name} names `{path}`, which is not there"
        if re.fullmatch(r"[\w.-]+\.(md|toml|lock|cpp)|Makefile|LICENSE|\.ci/run", span):
            places = (ROOT, ROOT / "docs", (ROOT / name).parent)
            found = any((place / span).exists() for place in places)
            assert found, f"{name} names `{span}`, which is not there"


@pytest.mark.parametrize("name", TEXTS)
def test_every_module_in_backticks_exists(name: str) -> None:
    """`scheduler.replay`, `worker.ops.table`: a module, or a name in one."""
    for span in code_spans(TEXTS[name]):
        for dotted in re.findall(
            r"(?<![\w./-])((?:kvcache|scheduler|worker|cluster)(?:\.\w+)+)", span
        ):
            parts = dotted.split(".")
            for length in range(len(parts), 1, -1):
                place = ROOT.joinpath(*parts[:length])
                if place.with_suffix(".py").is_file() or place.is_dir():
                    break
            else:
                pytest.fail(f"{name} names `{dotted}`, which is no module")
            if length < len(parts) and place.with_suffix(".py").is_file():
                source = place.with_suffix(".py").read_text(encoding="utf-8")
                assert re.search(rf"\b{parts[length]}\b", source), f"{name} names `{dotted}`"


@pytest.mark.parametrize("name", TEXTS)
def test_every_command_exists(name: str) -> None:
    shown = code_of(TEXTS[name])
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"(?m)(?:^|[\s(])make ([a-z][a-z-]*)", shown):
        assert re.search(rf"(?m)^{target}:", makefile), f"{name}: no target {target}"
    for module in re.findall(r"python -m ((?:bench|cluster|stoker)[\w.]*)", shown):
        path = ROOT / module.replace(".", "/")
        is_there = path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()
        assert is_there, f"{name}: no module {module}"
    for script in re.findall(r"python ((?:bench|scripts|examples)/[\w/]+\.py)", shown):
        assert (ROOT / script).is_file(), f"{name}: no script {script}"


@pytest.mark.parametrize("name", TEXTS)
def test_every_stoker_command_is_one_that_the_parser_takes(name: str) -> None:
    """With its options, up to what a shell would cut off."""
    shown = re.sub(r"\\\n\s*", " ", code_of(TEXTS[name]))
    for line in re.findall(
        r"(?m)(?:^|\| *|\$ )(?:\.venv/bin/)?stoker ((?:[a-z]+)(?: .*)?)$", shown
    ):
        words = shlex.split(line, comments=True)
        cut = next(
            (i for i, word in enumerate(words) if word in ("|", "&", "<", ">", ";")), len(words)
        )
        if "…" in line or "COMMAND" in line:
            words, cut = [words[0], "--help"], 2
        assert is_taken(words[:cut]), f"{name} shows `stoker {line}`, which the command refuses"


def is_taken(words: list[str]) -> bool:
    try:
        make_parser().parse_args(words)
    except SystemExit as end:
        return not end.code
    return True


@pytest.mark.parametrize("name", TEXTS)
def test_python_in_the_documents_compiles_and_imports_what_there_is(name: str) -> None:
    for code in re.findall(r"(?ms)^```python\n(.*?)^```$", TEXTS[name]):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom):
                module = importlib.import_module(node.module or "")
                for alias in node.names:
                    assert hasattr(module, alias.name), f"{name}: no {alias.name} in {module}"


def test_the_index_of_the_documents_names_each_page() -> None:
    linked = {link.partition("#")[0] for link in links_of(TEXTS["docs/README.md"])}
    pages = {Path(name).name for name in TEXTS if re.fullmatch(r"docs/[\w-]+\.md", name)}
    assert pages - {"README.md"} <= linked


def test_the_index_of_decisions_names_each_record() -> None:
    linked = set(links_of(TEXTS["docs/adr/README.md"]))
    records = {Path(name).name for name in TEXTS if re.match(r"docs/adr/\d", name)}
    assert records <= linked


# --- tables made from the code --------------------------------------------------------------


def doc_tables(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "scripts" / "doc_tables.py", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_tables_of_settings_and_messages_are_those_of_the_code() -> None:
    done = doc_tables("--check")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_table_that_differs_from_the_code_is_found_and_mended(tmp_path: Path) -> None:
    for page in ("configuration.md", "doctor.md", "wire-protocol.md", "metrics.md"):
        (tmp_path / page).write_text(TEXTS[f"docs/{page}"], encoding="utf-8")
    stale = tmp_path / "configuration.md"
    stale.write_text(stale.read_text().replace("| `block_size` | `16` |", "| `block_size` | `8` |"))

    assert doc_tables("--check", "--docs", str(tmp_path)).returncode == 1
    assert doc_tables("--docs", str(tmp_path)).returncode == 0
    assert stale.read_text() == TEXTS["docs/configuration.md"]


# --- programs of the README -----------------------------------------------------------------


def readme_programs() -> list[str]:
    """Those over our own clients; tests/system/api/test_examples.py runs the one over HTTP."""
    programs: list[str] = re.findall(r"(?ms)^```python\n(.*?)^```$", TEXTS["README.md"])
    return [program for program in programs if "from stoker" in program]


@pytest.mark.parametrize("number", [1, 2])
def test_the_client_programs_of_the_readme_stream_an_answer(
    number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    program = readme_programs()[number]
    with FakeEngine("tcp://127.0.0.1:0", script=answer_at_once) as engine:
        assert "tcp://127.0.0.1:5555" in program
        run(program.replace("tcp://127.0.0.1:5555", engine.address))

    assert ANSWER.strip() in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.ray
def test_the_first_program_of_the_readme_answers_with_a_model(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STOKER_MODELS_DIR", str(smollm2.parent))
    run(readme_programs()[0])

    printed = capsys.readouterr().out
    assert "The capital of France is" in printed
    assert "Paris" in printed.splitlines()[-1]


def run(program: str) -> None:
    exec(compile(program, "README.md", "exec"), {"__name__": "__main__"})


def test_the_journal_reader_of_the_scheduling_page_reads_a_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    records: list[Record] = []
    with Rig(tmp_path, journal=records) as rig:
        rig.start_worker(Script(num_blocks=4))
        client = rig.client()
        client.finish(*(client.submit(num_prompt=40, max_tokens=3) for _ in range(3)))
    (tmp_path / "journal.msgpack").write_bytes(b"".join(map(encode_record, records)))
    monkeypatch.chdir(tmp_path)
    (program,) = re.findall(r"(?ms)^```python\n(.*?)^```$", TEXTS["docs/scheduling.md"])
    capsys.readouterr()

    run(program)

    printed = capsys.readouterr().out
    assert len(printed.splitlines()) == len(records)
    assert ": 'blocks'}" in printed, "somebody was deferred, for want of blocks"


# --- the client in twenty lines -------------------------------------------------------------


def the_client() -> str:
    (code,) = re.findall(
        r"(?ms)^<!-- the client .*?-->\n```python\n(.*?)^```$", TEXTS["docs/wire-protocol.md"]
    )
    return str(code)


def test_the_client_of_the_wire_protocol_page_is_short_and_knows_nothing_of_ours() -> None:
    lines = [line for line in the_client().splitlines() if line.strip()]
    imported = {line.split()[1] for line in lines if line.startswith(("import ", "from "))}

    assert imported == {"struct", "sys", "msgpack", "zmq"}
    assert len(lines) <= 20


def test_the_client_of_the_wire_protocol_page_prints_tokens_as_they_stream(
    tmp_path: Path,
) -> None:
    with Rig(tmp_path) as rig:
        script = rig.start_worker(Script(hang_at_step=4))
        with the_client_running(tmp_path, rig.front, "5", "6", "7") as client:
            assert client.stdout is not None
            early = [int(client.stdout.readline()) for _ in range(3)]
            script.released.set()
            rest, errors = client.communicate(timeout=60)

    assert early + [int(word) for word in rest.split()] == tokens_after(3, 40)
    assert "finish code 2" in errors


def test_the_client_of_the_wire_protocol_page_speaks_to_an_encrypted_engine(tmp_path: Path) -> None:
    (keys_of_page,) = re.findall(
        r"(?ms)^<!-- what that client needs .*?-->\n```python\n(.*?)^```$",
        TEXTS["docs/wire-protocol.md"],
    )
    program = the_client().replace("engine.connect", f"{keys_of_page}engine.connect")
    keys = fresh_keys()
    write_key_file(tmp_path / "stoker.key", keys.client)
    with Rig(tmp_path, front_address="tcp://127.0.0.1:0", front_keys=keys) as rig:
        rig.start_worker()
        with the_client_running(tmp_path, rig.front, "5", "6", program=program) as client:
            tokens, _ = client.communicate(timeout=60)

    assert [int(word) for word in tokens.split()] == tokens_after(2, 40)


def test_the_client_of_the_wire_protocol_page_says_why_it_was_refused(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        rig.start_worker()
        with the_client_running(tmp_path, rig.front, "5", "1000") as client:
            tokens, errors = client.communicate(timeout=60)

    assert tokens == ""
    assert "token id 1000; the model's vocabulary has ids 0 to 999" in errors


@contextmanager
def the_client_running(
    folder: Path, *arguments: str, program: str = ""
) -> Iterator[subprocess.Popen[str]]:
    """The client as its own program, away from our packages."""
    path = folder / "client.py"
    path.write_text(program or the_client(), encoding="utf-8")
    with subprocess.Popen(
        [sys.executable, "-P", str(path), *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as client:
        try:
            yield client
        finally:
            client.kill()
