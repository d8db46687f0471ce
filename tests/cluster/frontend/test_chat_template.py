import json
from datetime import datetime
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from cluster.frontend.chat_messages import Json, Message
from cluster.frontend.chat_template import ChatTemplate, ChatTemplateError
from scheduler.errors import InvalidRequest
from tests.cluster.frontend.tiny_tokenizers import CHATML, llama3_like

USER: Message = {"role": "user", "content": 'Hello <there> & "you", é 你!'}
ANSWER: Message = {"role": "assistant", "content": "Well, "}
TOOL: Json = {"type": "function", "function": {"name": "weather", "parameters": {"é": [1, None]}}}

TEMPLATES = {
    "chatml": CHATML,
    "default system turn": (
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
        "{{ '[sys]You are helpful[/sys]' }}{% endif %}[{{ message['role'] }}]"
        "{{ message['content'] | trim }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    ),
    "block trimming": (
        "{%- for message in messages %}\n"
        "    {%- if message.role == 'user' %}\n"
        "User: {{ message.content }}\n"
        "    {%- else %}\n"
        "Other: {{ message.content }}{{ eos_token }}\n"
        "    {%- endif %}\n"
        "  {% endfor %}\n"
        "{% if add_generation_prompt %}\nOther:{% endif %}"
    ),
    "tools and JSON": (
        "{{ bos_token }}{% if tools is not none %}{% for tool in tools %}{{ tool | tojson }}\n"
        "{{ tool | tojson(indent=2) }}{{ tool | tojson(ensure_ascii=true, sort_keys=true) }}"
        "{% endfor %}{% endif %}{% for m in messages %}{{ m.content | tojson }}{% endfor %}"
    ),
    "loop controls": (
        "{% for message in messages %}{% if message.role == 'system' %}{% continue %}{% endif %}"
        "{{ message.content }}{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}"
    ),
    "generation block": (
        "{% for message in messages %}{% if message.role == 'assistant' %}"
        "{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}"
        "{% else %}{{ message.content }}{% endif %}{% endfor %}"
    ),
    "namespace and macro": (
        "{% macro turn(role, text) %}<{{ role }}>{{ text }}{% endmacro %}"
        "{% set ns = namespace(count=0) %}{% for message in messages %}"
        "{% set ns.count = ns.count + 1 %}{{ turn(message.role, message.content) }}{% endfor %}"
        "{{ ns.count }}{{ '\\n' if add_generation_prompt }}"
    ),
    "reasoning": (
        "{% for message in messages %}{% set text = message.content %}"
        "{% if '</think>' in text %}{% set text = text.split('</think>')[-1].lstrip('\\n') %}"
        "{% endif %}{{ text }}{% endfor %}{% if enable_thinking is defined %}<think>{% endif %}"
    ),
}
CHATS: tuple[list[Message], ...] = (
    [USER],
    [USER, ANSWER],
    [{"role": "system", "content": " Be brief.\n"}, USER, ANSWER, USER],
    [USER, {"role": "assistant", "content": "<think>hm</think>\n\nYes"}, USER, USER],
)


def render(source: str, messages: list[Message], **variables: Json) -> str:
    return ChatTemplate(source).render(messages, add_generation_prompt=True, variables=variables)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> AutoTokenizer:
    """transformers' tokenizer, which renders any template given to it."""
    folder = tmp_path_factory.mktemp("reference")
    (folder / "tokenizer.json").write_bytes(llama3_like().tokenizer_json)
    (folder / "tokenizer_config.json").write_bytes(llama3_like().config_json)
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("tools", [None, [TOOL]])
def test_templates_render_as_transformers_renders_them(
    reference: AutoTokenizer, name: str, messages: list[Message], tools: Json
) -> None:
    source = TEMPLATES[name]
    variables: dict[str, Json] = {
        "bos_token": "<|begin|>",
        "eos_token": "<|im_end|>",
        "tools": tools,
        "enable_thinking": False,
    }
    for header in (True, False):
        expected = reference.apply_chat_template(
            messages,
            tools=tools,
            chat_template=source,
            add_generation_prompt=header,
            tokenize=False,
            enable_thinking=False,
        )
        rendered = ChatTemplate(source).render(
            messages, add_generation_prompt=header, variables=variables
        )
        assert rendered == expected


@pytest.mark.parametrize(
    "name", ["chatml", "default system turn", "block trimming", "generation block"]
)
@pytest.mark.parametrize("content", ["The answer is ", "x\n", " y", "1 2"])
def test_the_final_message_is_continued_where_transformers_continues_it(
    reference: AutoTokenizer, name: str, content: str
) -> None:
    messages: list[Message] = [USER, {"role": "assistant", "content": content}]
    rendered = ChatTemplate(TEMPLATES[name]).render(
        messages,
        add_generation_prompt=False,
        continue_final_message=True,
        variables={"bos_token": "<|begin|>", "eos_token": "<|im_end|>"},
    )
    assert rendered == reference.apply_chat_template(
        messages,
        chat_template=TEMPLATES[name],
        continue_final_message=True,
        add_generation_prompt=False,
        tokenize=False,
    )


def test_a_refusal_of_the_template_is_an_error_with_its_reason() -> None:
    source = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}"
    )
    assert render(source, [USER, ANSWER]) == f"{USER['content']}Well, "
    with pytest.raises(ChatTemplateError, match="roles must alternate") as caught:
        render(source, [USER, USER])
    assert caught.value.reason == "roles must alternate"
    assert isinstance(caught.value, InvalidRequest)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",  # a Python error
        "{{ messages[7].content.strip() }}",  # an undefined value
        "{{ 1 / 0 }}",
        "{{ messages.append(1) }}",  # the sandbox is immutable
        "{{ ''.__class__.__mro__ }}{{ messages.__class__.__init__.__globals__ }}",
        "{% macro loop_() %}{{ loop_() }}{% endmacro %}{{ loop_() }}",  # endless recursion
        "{% for i in range(10000000) %}{% endfor %}",  # the sandbox limits ranges
    ],
)
def test_whatever_goes_wrong_in_a_template_is_a_named_error(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        render(source, [USER])


def test_a_template_that_cannot_be_compiled_is_a_named_error() -> None:
    with pytest.raises(ChatTemplateError, match="cannot be compiled"):
        ChatTemplate("{% for m in messages %}")


def test_the_date_comes_from_the_clock_given() -> None:
    template = ChatTemplate(
        "{{ strftime_now('%d %b %Y') }}", clock=lambda: datetime(2024, 7, 26, 12, 0)
    )
    assert template.render([USER], add_generation_prompt=True, variables={}) == "26 Jul 2024"


def test_a_message_that_the_template_drops_cannot_be_continued() -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    with pytest.raises(ChatTemplateError, match="final message"):
        template.render(
            [USER, ANSWER],
            add_generation_prompt=False,
            continue_final_message=True,
            variables={},
        )


def test_continuing_and_starting_a_message_exclude_each_other() -> None:
    with pytest.raises(InvalidRequest, match="exclude each other") as caught:
        ChatTemplate(CHATML).render(
            [USER, ANSWER], add_generation_prompt=True, continue_final_message=True, variables={}
        )
    assert caught.value.param == "continue_final_message"


def test_json_in_ascii_is_what_json_writes() -> None:
    rendered = render("{{ messages[0].content | tojson(ensure_ascii=True) }}", [USER])
    assert rendered == json.dumps(USER["content"])


@pytest.mark.model
def test_the_real_template_renders_as_transformers_renders_it(smollm2: Path) -> None:
    reference = AutoTokenizer.from_pretrained(smollm2)
    template = ChatTemplate((smollm2 / "chat_template.jinja").read_text())
    for messages in CHATS:
        rendered = template.render(
            messages, add_generation_prompt=True, variables={"bos_token": "<|im_start|>"}
        )
        assert rendered == reference.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
