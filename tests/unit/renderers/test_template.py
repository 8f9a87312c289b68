"""The chat template is a stranger's program: it works as in transformers, and it cannot leave its bounds."""

from datetime import datetime

import pytest

from tithe.errors import ModelError
from tithe.renderers.template import MAX_TEXT_CHARS, ChatTemplate

DAY = datetime(2025, 3, 1)  # noqa: DTZ001  a fixed date
CHAT = [{"role": "system", "content": "  be brief "}, {"role": "user", "content": "3 < 4 & é"}]


def render(source, messages=CHAT, *, generation_prompt=True, names=None):
    return ChatTemplate(source, names or {}, DAY).render(messages, generation_prompt=generation_prompt)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            "{% for m in messages %}<{{ m.role }}>{{ m['content'] | trim }}{% endfor %}",
            "<system>be brief<user>3 < 4 & é",
        ),
        ("{{ messages[1] | tojson }}", '{"role": "user", "content": "3 < 4 & é"}'),
        ("{{ strftime_now('%d %b %Y') }}", "01 Mar 2025"),
        ("{% if add_generation_prompt %}go{% endif %}", "go"),
        ("{{ bos_token }}x", "<s>x"),
        ("{%- for m in messages -%}\n  {% if loop.last %}{{ loop.length }}{% endif %}\n{%- endfor -%}", "2"),
        ("{% for m in messages %}\n  {% if m.role == 'user' %}\nu\n  {% endif %}\n{% endfor %}", "u\n"),
        (
            "{% for m in messages[::-1] %}{% if m.role == 'user' %}{% continue %}{% endif %}{{ m.role }}{% endfor %}",
            "system",
        ),
        ("{% generation %}{{ 'a' ~ 1 ~ none }}{% endgeneration %}", "a1None"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "2"),
        ("{% for x in missing %}{% endfor %}{{ tools is none }}", "True"),
        ("{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f('a' * 3) + f(2 ** 3) }}", "[aaa][8]"),
    ],
)
def test_the_language_is_that_of_transformers(source, expected):
    assert render(source, names={"bos_token": "<s>"}) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
        "{{ 'x' * 10 ** 9 }}",
        "{{ [0] * 10 ** 9 }}",
        "{{ 2 ** (9 ** 20) }}",
        "{% set ns = namespace(x='xx') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='xx') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% for i in range(90000) %}{{ 'abcdefghij' * 20 }}{% endfor %}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ range(10 ** 9) | list }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_hostile_template_is_stopped(source):
    with pytest.raises(ModelError, match="chat template"):
        render(source)


def test_the_templates_own_refusal_is_passed_on():
    with pytest.raises(ModelError, match="no system role here"):
        render("{{ raise_exception('no system role here') }}")


@pytest.mark.parametrize("source", ["{% if %}", "{% import os %}", "{{ 'x' | nofilter }}"])
def test_a_broken_template_is_refused_when_it_is_read(source):
    with pytest.raises(ModelError, match="does not compile"):
        ChatTemplate(source, {}, DAY)


@pytest.mark.parametrize(
    "source", ["{% include '/etc/passwd' %}", "{{ messages[9].content.x }}", "{{ 1 / 0 }}", "{{ none.x() }}"]
)
def test_a_failure_while_rendering_is_a_model_error(source):
    with pytest.raises(ModelError, match="refuses this conversation"):
        render(source)


def test_messages_are_not_changed_and_long_content_is_allowed():
    messages = [{"role": "user", "content": "x" * (MAX_TEXT_CHARS // 2)}]
    assert len(render("{{ messages[0].content }}", messages)) == MAX_TEXT_CHARS // 2
    assert list(messages[0]) == ["role", "content"]
