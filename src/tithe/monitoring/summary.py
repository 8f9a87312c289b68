"""The table before → after, or of one evaluation, for the terminal."""

from __future__ import annotations

from collections.abc import Mapping

from tithe.monitoring._format import MISSING, format_score

_LABEL_WIDTH, _VALUE_WIDTH = 24, 24


def summary_table(before: Mapping[str, float], after: Mapping[str, float] | None = None) -> str:
    """Right and readable answers before and after training, as fixed-width text without a final newline. Without
    `after` the one column is "evaluated": whether the policy was trained is not known here.

    Both take the names of an evaluation row (`eval_sampled`, `eval_sampled_lo`, `eval_sampled_hi`, `eval_greedy`…,
    `eval_readable`, `eval_greedy_readable`, `eval_failed`; `questions` and `samples_per_question` for the foot line); a
    missing name shows as a dash. Where a row says `eval_is_reward`, scores are shown as they are and not in percent.

    >>> print(summary_table({"eval_sampled": 0.12, "eval_sampled_lo": 0.08, "eval_sampled_hi": 0.17},
    ...                     {"eval_sampled": 0.85, "eval_sampled_lo": 0.8, "eval_sampled_hi": 0.89}))
                                              before                   after     change
    right, sampled at T = 1      12.0 % [ 8.0, 17.0]     85.0 % [80.0, 89.0]     + 73.0
    """
    columns = [before] if after is None else [before, after]
    heads = ["evaluated"] if after is None else ["before", "after"]
    lines = [" " * _LABEL_WIDTH + "".join(head.rjust(_VALUE_WIDTH) for head in heads)]
    if after is not None:
        lines[0] += "change".rjust(11)
    paid = any(column.get("eval_is_reward") for column in columns)
    rows = [
        ("reward, sampled at T = 1" if paid else "right, sampled at T = 1", "eval_sampled", paid),
        ("readable, sampled", "eval_readable", False),
        ("reward, greedy" if paid else "right, greedy", "eval_greedy", paid),
        ("readable, greedy", "eval_greedy_readable", False),
        ("failed, taken as wrong", "eval_failed", False),
    ]
    for label, name, is_reward in rows:
        if not any(name in column for column in columns):
            continue
        cells = [_cell(column, name, is_reward=is_reward) for column in columns]
        line = label.ljust(_LABEL_WIDTH) + "".join(cell.rjust(_VALUE_WIDTH) for cell in cells)
        if after is not None:
            line += _change(before.get(name), after.get(name), is_reward=is_reward).rjust(11)
        lines.append(line.rstrip())
    foot = _foot(columns[-1], paid=paid, compares=after is not None)
    return "\n".join([*lines, foot] if foot else lines)


def _cell(values: Mapping[str, float], name: str, *, is_reward: bool) -> str:
    value = values.get(name)
    if value is None:
        return MISSING
    text = format_score(value, is_reward=is_reward)
    lo, hi = values.get(f"{name}_lo"), values.get(f"{name}_hi")
    if lo is None or hi is None:
        return text
    return f"{text} [{lo:.2f}, {hi:.2f}]" if is_reward else f"{text} [{100 * lo:4.1f}, {100 * hi:4.1f}]"


def _change(before: float | None, after: float | None, *, is_reward: bool) -> str:
    if before is None or after is None:
        return MISSING
    if is_reward:
        return f"{after - before:+.2f}"
    points = round(100 * (after - before), 1)
    return f"{'-' if points < 0 else '+'}{abs(points):5.1f}"


def _foot(values: Mapping[str, float], *, paid: bool, compares: bool) -> str:
    questions, samples = values.get("questions"), values.get("samples_per_question")
    if questions is None:
        return ""
    asked = f"{questions:.0f} held-out questions"
    if samples is not None:
        asked += f", {samples:.0f} samples each"
    if paid:
        return f"{asked}; rewards as they are, with 95 % intervals over questions"
    change = "; change in points" if compares else ""
    return f"{asked}; percent, with 95 % intervals over questions{change}"
