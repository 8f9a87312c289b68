"""reasoning_gym's own graders as a reward: ``reward.function: tithe.rewards.gym:score``, for its datasets whose answers
are not plain numbers. Needs the package reasoning-gym in the worker.

Some of these graders hand the answer to Python's `eval`, or to sympy's `parse_expr`, which evaluates too. They are
asked only about answers in which nothing can be called but a function of mathematics; any other is worth 0.
"""

from __future__ import annotations

import importlib
import re
import warnings
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from tithe.rewards.extraction import AnswerForm, find_answer
from tithe.rewards.spec import prepared

if TYPE_CHECKING:
    from tithe.types import PromptItem


_LIST: Final = re.compile(r"[\[\]\s,'\"A-Za-z0-9_]*+")
_FORMULA: Final = re.compile(
    r"(?:\d++(?:\.\d*+)?|\.\d++|(?:sin|cos|tan|sec|csc|cot|sinh|cosh|tanh|asin|acos|atan|exp|log|ln|sqrt|pi|[A-Za-z])"
    r"(?![A-Za-z])|[-+*/^()\s])*+"
)
EVALUATED: Final = {
    **dict.fromkeys(("string_insertion", "spiral_matrix", "binary_matrix", "n_queens"), _LIST),
    **dict.fromkeys(("countdown", "puzzle24", "polynomial_multiplication"), _FORMULA),
    **dict.fromkeys(("simple_integration", "intermediate_integration"), _FORMULA),
}
"""Datasets of reasoning-gym 0.1.25 whose graders evaluate the answer, and what an answer may then be made of."""


def import_gym() -> ModuleType:
    """The package reasoning-gym, without the warnings that some of its own packages give when they are compiled. It
    takes a second to import, and several on a busy machine."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        return importlib.import_module("reasoning_gym")


@prepared(import_gym)
def score(item: PromptItem, text: str) -> float:
    """Between 0 and 1, as the dataset that made the question judges it. A bare last number is taken for the answer only
    where the right one is a number too; otherwise the whole text is."""
    found = find_answer(text)
    answer = text.strip()
    if found is not None and (found.form is not AnswerForm.NUMBER or _is_float(item.answer or "")):
        answer = found.text
    metadata = item.extra["metadata"]
    dataset = metadata["source_dataset"]
    if dataset in EVALUATED and EVALUATED[dataset].fullmatch(answer) is None:
        return 0.0
    entry = {"question": item.messages[-1]["content"], "answer": item.answer, "metadata": metadata}
    return float(_grader(dataset)(answer=answer, entry=entry))


@lru_cache
def _grader(dataset: str) -> Any:
    return import_gym().get_score_answer_fn(dataset)


def _is_float(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
