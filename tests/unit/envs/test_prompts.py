"""F09: the ids that are checked are the ids that are used."""

import pytest

from tithe.envs import encode_prompts
from tithe.errors import DataError
from tithe.types import PromptItem


class LetterRenderer:
    """One id a character, with a template of six around the last message."""

    def render(self, prompt, system_prompt=None):
        if isinstance(prompt, str):
            return tuple(map(ord, prompt))
        texts = [system_prompt or "", *(message["content"] for message in prompt)]
        return tuple(map(ord, "<u>" + "".join(texts) + "<a>"))


def item(name, *contents, text=None):
    messages = tuple({"role": "user", "content": content} for content in contents)
    return PromptItem(name, messages=messages, text=text, answer="1")


ITEMS = (item("short", "abc"), item("long", "keep?", "x" * 40 + "end"), item("raw", text="r" * 30))


def encode(policy, items=ITEMS, limit=16, **more):
    return encode_prompts(items, LetterRenderer(), max_prompt_tokens=limit, on_long_prompt=policy, **more)


def test_long_prompts_are_dropped_and_counted():
    prompts = encode("drop")
    assert [kept.id for kept in prompts.items] == ["short"]
    assert prompts.dropped == ("long", "raw")
    assert prompts.prompt_ids("short") == tuple(map(ord, "<u>abc<a>"))
    with pytest.raises(KeyError):
        prompts.prompt_ids("long")


def test_a_cut_keeps_the_template_and_the_end_of_the_question():
    prompts = encode("cut")
    assert prompts.cut == ("long", "raw")
    assert prompts.prompt_ids("long") == tuple(map(ord, "<u>keep?xxend<a>"))
    assert prompts.prompt_ids("raw") == tuple(map(ord, "r" * 16))
    for kept in prompts.items:
        again = LetterRenderer().render(kept.text if kept.text is not None else kept.messages)
        assert prompts.prompt_ids(kept.id) == again
        assert len(again) <= 16


def test_an_error_names_the_prompt_and_the_key():
    with pytest.raises(
        DataError, match=r"prompt long \('xxxx.*has 54 tokens, more than rollout\.max_prompt_tokens = 16"
    ):
        encode("error")


def test_the_system_prompt_counts():
    assert encode("drop", limit=12).dropped == ("long", "raw")
    assert encode("drop", limit=12, items=(ITEMS[0], item("one", "a")), system_prompt="1234").dropped == ("short",)


def test_what_no_cut_can_help_is_an_error():
    with pytest.raises(DataError, match="even without its question"):
        encode("cut", limit=5)
    with pytest.raises(DataError, match="all 3 prompts are longer"):
        encode("drop", limit=5)
    assert encode("drop", items=()).items == ()
