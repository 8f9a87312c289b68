r"""Field cases about math answers, as far as numbers, fractions, lists and words go, with the policies written down in
`tithe.rewards.extraction` and `tithe.rewards.exact`."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tithe.rewards import AnswerForm, Verdict, extract_answer, find_answer, gold_answer, judge, same_answer

RIGHT, WRONG, UNREADABLE = Verdict.RIGHT, Verdict.WRONG, Verdict.UNREADABLE

CASES = [
    # M01 nested braces in the box
    (r"\frac{7}{12}", r"So the total is \boxed{\frac{7}{12}}.", RIGHT),
    (r"\sqrt{\frac{5}{3+\frac{1}{2}}}", r"\boxed{\sqrt{\frac{5}{3+\frac{1}{2}}}}", RIGHT),
    # M03 same answer boxed twice
    ("37", r"It must be \boxed{37}. ... **Final Answer** \boxed{37}", RIGHT),
    ("19", r"\boxed{019} ... \boxed{019}", RIGHT),
    # M05 optional braces
    (r"\frac58", r"\boxed{5/8}", RIGHT),
    (r"\frac{5}8", r"\boxed{\dfrac{5}{8}}", RIGHT),
    # M07 tiny magnitudes
    (r"\frac{1}{2^{80}}", r"\boxed{\frac{1}{2^{81}}}", WRONG),
    (r"\frac{1}{900!}", r"\boxed{\frac{1}{901!}}", WRONG),
    ("0.1", r"\boxed{0.10000001}", WRONG),  # [P] exact
    # M09, M11 names, as far as they name one value or list
    ("n=4,6,9", r"\boxed{n=4,6,8}", WRONG),
    ("n=4,6,9", r"\boxed{4,6,9}", RIGHT),
    ("n=4,6,9", r"\boxed{9,4,6}", RIGHT),
    ("5", r"\boxed{x=5}", RIGHT),
    ("x=5", r"\boxed{y=5}", WRONG),
    # M17 formulas that share a number
    (r"4-\frac{2}{\mathrm{e}}", r"\boxed{4+\frac{2}{\mathrm{e}}}", WRONG),
    # M19 bold answers [P: unboxed answers are allowed]
    ("58", "391 + 12 = 403\nFinal Answer: **58**", RIGHT),
    ("58", "391 + 12 = 403\n**Final Answer**\n\n58", RIGHT),
    # M21 separators against lists
    ("48,250", r"\boxed{48250}", RIGHT),
    ("2,7", r"\boxed{(2,7)}", RIGHT),  # [P]
    ("2,7", r"\boxed{27}", WRONG),
    ("56,78", r"\boxed{5678}", WRONG),
    ("11000", r"\boxed{11,\!000}", RIGHT),
    ("1250", r"\boxed{1{,}250}", RIGHT),
    ("3,141,592", r"\boxed{3\,141\,592}", RIGHT),
    # asterisks are no dressing where they stand for a product or a power
    ("34", r"\boxed{3*4}", WRONG),
    ("3400", r"\boxed{3 * 400}", WRONG),
    ("23", r"\boxed{2**3}", WRONG),
    ("34", "The answer is 3*4.", WRONG),
    ("3", "The answer is 3 + 4", WRONG),
    ("5", "The answer is **5** apples.", RIGHT),
    ("5", r"\boxed{**5**}", RIGHT),
    ("7", "The answer is 3 + 4 = *7*", RIGHT),
    ("5", "The answer is not 5.", UNREADABLE),
    # two answers are no answer, one in two forms is one
    ("5", "The answer is 5 or 6", WRONG),
    ("5", "The answer is either 5 or 6.", WRONG),
    ("6", "The answer is either 5 or 6.", WRONG),
    ("5", "The answer is x = 5 or x = 6", WRONG),
    ("6", "The answer is x = 5 or x = 6", WRONG),
    ("5", "The answer is **5** or maybe **6**", WRONG),
    ("5", "The answer is $5$ or $6$", WRONG),
    ("5", "The answer is 5 apples or 6 apples", WRONG),
    ("0.5", "The answer is 1/2 or 0.5", RIGHT),
    ("2", "The answer is 2 hours or 120 minutes", RIGHT),
    ("5", "The answer is 5 or so.", RIGHT),
    ("5", "The answer is 5, or five in words; 6 is too many", RIGHT),
    # how an answer came is no answer of its own
    ("1000", "The answer is 1000 (= 10^3)", RIGHT),
    ("15", "The answer is 15 = 3 * 5", RIGHT),
    ("15", "The answer is x = 15 = 3 * 5.", RIGHT),
    ("-15", "The answer is -15 = -3 * 5.", RIGHT),
    ("3", "The answer is 15 = 3 * 5", WRONG),
    ("15", "The answer is 3 * 5 = 3 * 5", WRONG),
    ("15", "The answer is 15 - 2 = 3 * 5", WRONG),
    ("5", "The answer is **not 5**", UNREADABLE),
    # digits that dressing separates are two numbers
    ("56", r"\boxed{5\(6\)}", WRONG),
    ("56", r"\boxed{5$6$}", WRONG),
    # words that change the number, and answers of two minds, are no units
    ("5", r"\boxed{5 squared}", WRONG),
    ("3", r"\boxed{3 thirds}", WRONG),
    ("5", r"\boxed{5 but maybe 7}", WRONG),
    # M23 signs
    ("-9", "#### -9", RIGHT),
    ("-9", "#### 9", WRONG),
    ("-9", r"\boxed{-9.0}", RIGHT),
    ("-9", "\\boxed{\u22129}", RIGHT),
    ("9", "#### +9", RIGHT),
    ("9", "#### -9", WRONG),
    ("... so 2-11 = -9 #### -9", r"\boxed{-9}", RIGHT),
    # M31 garbage
    ("7", "\\boxed{" + "{@ 12 34 " * 3000 + "}", UNREADABLE),
    ("7", "\\boxed{" + "\u597d" * 5000 + "}", WRONG),
    # M35 thinking tags [P: an unclosed one hides what follows]
    ("21", r"\boxed{21}", RIGHT),
    ("21", r"<think>..</think> \boxed{21}", RIGHT),
    ("21", r"<think> maybe \boxed{21}", UNREADABLE),
    ("21", r"<think> \boxed{20} </think> 21", RIGHT),
    # M37 echoed instruction, empty or unclosed box
    ("64", r"I will write it in \boxed{}: \boxed{64}", RIGHT),
    ("64", r"I will put \boxed{answer} at the end. It is 64.", RIGHT),
    ("64", r"Mark your solution with \boxed", UNREADABLE),
    ("64", r"\boxed{64", UNREADABLE),
    ("3", r"\boxed{3} no, wait: \boxed{4", UNREADABLE),
    ("0", r"\boxed{}", UNREADABLE),
    ("5", r"With 5 apples: \boxed{ }", UNREADABLE),
    # M39 numbers from a data file
    ("42", "6*7 is 42.0", RIGHT),
    ("42.0", r"\boxed{42}", RIGHT),
    # M41 degrees and units [P]
    ("60", r"\boxed{60^\circ}", RIGHT),
    ("60", "\\boxed{60\u00b0}", RIGHT),
    ("15", r"\boxed{15\text{ cm}}", RIGHT),
    ("15", r"\boxed{15\,\mathrm{cm}^2}", RIGHT),
    (r"15\text{ m}", r"\boxed{15\text{ cm}}", WRONG),
    ("50", r"\boxed{50\%}", RIGHT),
    (r"\frac12", r"\boxed{50\%}", RIGHT),
    ("5", r"\boxed{5x}", WRONG),
    ("5", r"\boxed{5 million}", WRONG),
    # M43 containment and double extraction
    ("1", r"\boxed{21}", WRONG),
    ("4, 7", r"\boxed{4, 7}", RIGHT),
    ("4, 7", r"\boxed{7}", WRONG),
    ("42", "I thought of 42 but the result is 17", WRONG),
    ("12", r"\boxed{12.}", RIGHT),
    ("12", "\\boxed{12\\ }", RIGHT),
    ("12", r"\boxed{\text{The answer is } 12}", RIGHT),
    # plain ways to say a number
    ("7", "7", RIGHT),
    ("7", "3 + 4 = 7.", RIGHT),
    ("7", "**7**", RIGHT),
    ("7", "The answer is 3 + 4 = 7, as asked.", RIGHT),
    ("7", r"the final answer is \(7\).", RIGHT),
    ("7", "Answer: 7\nIs that all?", RIGHT),
    ("-2", "so 2-4 = -2", RIGHT),
    ("2", "so 4-2", RIGHT),
    ("7", "the 3rd and 4th number", UNREADABLE),
    ("7", "I do not know.", UNREADABLE),
    ("7", "The answer is unclear.", UNREADABLE),
    ("7", "3 + 4: the answer is", UNREADABLE),
    ("1250", "The answer is 1,250 dollars.", RIGHT),
    ("5/8", "The answer is 5/8.", RIGHT),
    (r"\frac{7}{12}", r"we get \frac{7}{12}.", RIGHT),
    ("3", "#### Step 3: multiply\nso 4", WRONG),
    ("4", "#### Step 3: multiply\nso 4", RIGHT),
    # kinds of value
    ("5/2", r"\boxed{2\frac{1}{2}}", RIGHT),
    ("5/2", r"\boxed{2 1/2}", RIGHT),
    (r"-\frac12", r"\boxed{\frac{-1}{2}}", RIGHT),
    ("1/3", r"\boxed{0.333}", WRONG),
    ("1000", r"\boxed{1e3}", RIGHT),
    ("(1,2)", r"\boxed{(2,1)}", WRONG),
    (r"\{1,2\}", r"\boxed{\{2,1\}}", RIGHT),
    ("[1,2]", r"\boxed{(1,2)}", WRONG),
    ("yes", "The answer is Yes.", RIGHT),
    ("B", r"\boxed{\text{B}}", RIGHT),
    ("B", r"\boxed{b}", WRONG),
    ("10", r"\boxed{\boxed{10}}", RIGHT),
    ("3", r"\boxed{2 + \boxed{3}}", WRONG),
]


@pytest.mark.parametrize(("gold", "text", "verdict"), CASES)
def test_field_cases(gold, text, verdict):
    assert judge(gold, text) is verdict


@pytest.mark.parametrize("gold", [None, "", "  ", r"work \boxed{", "steps ####"])
def test_a_question_without_readable_answer_is_no_verdict(gold):
    assert judge(gold, r"\boxed{0}") is Verdict.NO_GOLD


def test_gold_is_taken_as_it_stands():
    assert gold_answer("2 then 4, 7") == "2 then 4, 7"
    assert gold_answer(r"so \boxed{\frac12}") == r"\frac12"


def test_the_form_of_an_answer_is_known():
    forms = {r"\boxed{1}": "box", "#### 1": "marker", "answer is 1": "phrase", "it is 1": "number"}
    assert {text: find_answer(text).form for text in forms} == {text: AnswerForm(form) for text, form in forms.items()}


HOSTILE = [
    "\\boxed{" * 60_000,
    "\\boxed{" * 3_000 + "5" + "}" * 3_000,
    "\\boxed" + " " * 200_000,
    "answer is " * 40_000,
    "answer" + "*" * 100_000,
    "final answer" * 30_000,
    "#### 1\n" * 50_000,
    "1," * 100_000,
    "1/" * 100_000,
    "1e" * 100_000,
    "9" * 300_000,
    "-" * 200_000,
    "\\frac{1" * 50_000,
    "{" * 200_000,
    "<think>" * 50_000 + "</think>" * 50_000,
]


@pytest.mark.liveness
@pytest.mark.timeout(30)
@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_texts_take_linear_time(text):
    """Quadratic scanning of any of these takes minutes."""
    assert judge("123", text) is not RIGHT
    assert judge(text, text) in set(Verdict)


FRAGMENTS = [
    *"0123456789+-−./,;=(){}[]$%^_\\ \n",
    "\\boxed{", "\\frac", "\\frac{1}{2}", "\\text{", "\\{", "\\}", "\\left", "\\circ", "####", "answer is ", "e9",
    "Final Answer", "**", "<think>", "</think>", " cm", "x = ", "٣", "²", "½", "\\,", "1e999", "\x00",
]  # fmt: skip
MESS = st.lists(st.sampled_from(FRAGMENTS), max_size=30).map("".join)


@given(gold=MESS, text=MESS)
def test_nothing_raises(gold, text):
    assert judge(gold, text) in set(Verdict)
    assert isinstance(same_answer(gold, text), bool)


@given(numerator=st.integers(-(10**30), 10**30), denominator=st.integers(1, 10**9))
def test_equal_and_unequal_fractions_are_told_apart_exactly(numerator, denominator):
    gold = f"{numerator}/{denominator}"
    assert judge(gold, rf"\boxed{{\frac{{{3 * numerator}}}{{{3 * denominator}}}}}") is RIGHT
    assert judge(gold, rf"\boxed{{\frac{{{3 * numerator + 1}}}{{{3 * denominator}}}}}") is WRONG


@given(
    number=st.integers(-(10**18), 10**18),
    text=st.sampled_from(["{}", "It is {}.", "so = {}!", "#### {}", "Answer: **{}**"]),
)
def test_any_integer_is_read_back(number, text):
    assert same_answer(str(number), extract_answer(text.format(number)))
    assert same_answer(str(number), extract_answer(text.format(f"{number:,}")))
    assert not same_answer(str(number + 1), extract_answer(text.format(number)))


@pytest.mark.liveness
@pytest.mark.timeout(30)
def test_a_number_of_many_groups_does_not_hang():
    """Each group began a search to the end of the text again: a million characters took twenty minutes."""
    assert judge("5", "1" + ",111" * 250_000 + "1") is WRONG
