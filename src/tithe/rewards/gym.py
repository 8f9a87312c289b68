"""reasoning_gym's own graders as a reward: ``reward.function: tithe.rewards.gym:score``, for its datasets whose answers
are not plain numbers. Needs the package reasoning-gym in the worker."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from tithe.rewards.extraction import AnswerForm, find_answer

if TYPE_CHECKING:
    from tithe.types import PromptItem


def score(item: PromptItem, text: str) -> float:
    """Between 0 and 1, as the dataset that made the question judges it. A bare last number is taken for the answer only
    where the right one is a number too; otherwise the whole text is."""
    found = find_answer(text)
    answer = text.strip()
    if found is not None and (found.form is not AnswerForm.NUMBER or _is_float(item.answer or "")):
        answer = found.text
    metadata = item.extra["metadata"]
    entry = {"question": item.messages[-1]["content"], "answer": item.answer, "metadata": metadata}
    return float(_grader(metadata["source_dataset"])(answer=answer, entry=entry))


@lru_cache
def _grader(dataset: str) -> Any:
    import reasoning_gym  # noqa: PLC0415  a second to import

    return reasoning_gym.get_score_answer_fn(dataset)


def _is_float(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
