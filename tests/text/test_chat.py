"""Chat templates render like in transformers, and the sandbox stops everything that they must not do."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from clearhead.base.errors import InputError
from clearhead.text import chat
from clearhead.text.chat import ChatTemplate

CHAT = [
    {"role": "system", "content": 'be <kind> & "short"'},
    {"role": "user", "content": "naïve 😀?"},
    {"role": "assistant", "content": "yes"},
]
TEMPLATES = [
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>\n{{ m['content'] | trim }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    "{% for m in messages %}\n    {% if m.role == 'system' %}\n        {% continue %}\n    {% endif %}\n"
    "    {{ m | tojson }}\n{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{{ m.role }}{% endfor %}",
    "{% for m in messages %}{% generation %}{{ m.content | upper }}{% endgeneration %}{% endfor %}",
    "{{ strftime_now('%Y') }}{{ messages[0].content | tojson(indent=2) }}{{ tools is none }}",
]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("starts_answer", [False, True])
def test_the_text_is_that_of_the_other_library(template: str, starts_answer: bool) -> None:
    chat = ChatTemplate({"default": template}, {"bos_token": "<s>", "eos_token": "</s>"})
    expected, _ = render_jinja_template(
        [CHAT], chat_template=template, add_generation_prompt=starts_answer, bos_token="<s>", eos_token="</s>"
    )
    assert chat.render(CHAT, starts_answer=starts_answer) == expected[0]


def test_where_templates_are_found(tmp_path: Path) -> None:
    assert ChatTemplate.read(tmp_path, {}) is None
    several = ChatTemplate.read(
        tmp_path, {"chat_template": [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]}
    )
    assert several is not None and several.render(CHAT, name="tool_use") == "b"
    with pytest.raises(InputError, match="no chat template 'other'; it has: default, tool_use"):
        several.render(CHAT, name="other")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "additional_chat_templates").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="a link out of the folder is not followed"):
        ChatTemplate.read(tmp_path / "linked", {})
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}!", encoding="utf-8")
    template = ChatTemplate.read(tmp_path, {"chat_template": "a", "eos_token": {"content": "</s>"}})
    assert template is not None and template.render(CHAT) == "</s>!"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses this chat: roles must alternate"),
        ("{% for %}", "syntax error in line 1"),
        ("{{ messages.append(1) }}", "refuses this chat"),
        ("{{ ''.__class__.__mro__ }}", "refuses this chat"),
        ("{{ messages[9].content }}", "refuses this chat"),
        ("{{ 1 / 0 }}", "cannot be run on this chat"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "cannot be run on this chat: maximum recursion"),
        ("{{ 'a' * 10**10 }}", "more than the 512 MB"),
        ("{{ '%9999999999d' % 1 }}", "more than the 512 MB"),
        ("{{ 'a' * 5000000 }}", r"makes 5,000,000 characters of this chat, but at most 33,\d\d\d are allowed"),
        ("{% for i in range(20000) %}hello {% endfor %}", "makes 120,000 characters of this chat"),
        ("{{ strftime_now('%c' * 3000000) }}", "a date format must have at most 256 characters"),
        ("{{ raise_exception('x' * 1000000) }}", r"refuses this chat: x{77}\.\.\.$"),
    ],
)
def test_what_a_template_may_not_do(template: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        ChatTemplate({"default": template}, {}).render(CHAT)


def test_a_template_may_repeat_a_long_chat() -> None:
    long = [{"role": "user", "content": "é\n" * 20_000}]
    twice = ChatTemplate({"default": "{{ messages[0].content }}{{ messages | tojson }}"}, {})
    assert len(twice.render(long)) > 80_000
    with pytest.raises(InputError, match="characters of this chat"):
        ChatTemplate({"default": "{{ messages[0].content * 6 }}"}, {}).render(long)


@pytest.mark.parametrize(
    ("messages", "message"),
    [([], "at least one message"), ([{"role": "user"}], "message 1 needs a role and a content, got: role")],
)
def test_a_chat_that_is_none(messages: list[dict[str, str]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ChatTemplate({"default": "a"}, {}).render(messages)


def test_a_template_that_does_not_end_is_ended_and_the_next_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ChatTemplate({"default": "{{ messages[0].role }}"}, {}).render(CHAT[:1]) == CHAT[0]["role"]
    loops = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
    with monkeypatch.context() as patch:
        patch.setattr(chat, "SECONDS", 0.5)
        with pytest.raises(InputError, match=r"took more than 0\.5 seconds"):
            ChatTemplate({"default": loops}, {}).render(CHAT)
    assert ChatTemplate({"default": "{{ messages[0].role }}"}, {}).render(CHAT[:1]) == CHAT[0]["role"]


def test_the_process_of_templates_imports_little_and_stays() -> None:
    template = ChatTemplate({"default": "{{ messages[0].role }}"}, {})
    chat._worker()._end()
    template.render(CHAT)
    started = chat._worker()._process
    assert started is not None
    worker = psutil.Process(started.pid)
    # The interpreter and jinja2 take 21 MB and 0.08 s; torch alone 200 MB and seconds.
    assert worker.memory_info().rss < 60 * 2**20
    began = sum(worker.cpu_times()[:2])
    assert began < 1.5
    for _ in range(200):
        template.render(CHAT)
    assert chat._worker()._process is started
    # 0.1 ms for each, on an idle machine.
    assert sum(worker.cpu_times()[:2]) - began < 200 * 0.003
