r"""Mathematics: the last stated answer of a response against the true one, compared by the math-verify library.

An answer is stated as `\boxed{…}` or on a line `Answer: …` (DAPO's prompt, arXiv:2503.14476, appendix A); the last one
counts. What the library takes for formulas although it is not (words, choices, numbers such as 1e5) or does not look at
(units that differ) is compared here. It evaluates what it reads, which can take for ever: run it in scorer processes
(`reward.workers` above 0), which are killed when they overrun.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

MAX_ANSWER_CHARACTERS = 1000

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns with each call that its own time limits are off

_LINE = re.compile(r"(\*\*|__)?(?:\bfinal )?\banswer\s*:[ \t]*(?(1)(?:\*\*|__)?)[ \t]*([^\n]+)", re.IGNORECASE)
_PHRASES = re.compile(
    r"^(?:the )?(?:final )?answer is\s*:?\s*|\s*\.?\s*I hope (?:it|this) is correct\.?$", re.IGNORECASE
)
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*")
_WRAPPINGS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"))
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_SPACING = re.compile(r"\\[!,;: ]|\\(?:left|right|displaystyle|quad|qquad)(?![a-zA-Z])|~")
_WORDS = re.compile(r"[a-z]{2,}(?:[\s,'-]+[a-z]+)*")
_CHOICE = re.compile(r"\(?([a-z])[).]?")
_SCIENTIFIC = re.compile(r"([+-]?\d+(?:\.\d+)?)[eE]([+-]?\d+)")
_QUANTITY = re.compile(
    r"(.*[\d}.!)])\s*([a-z°$€£%]+(?:\s*\^?\{?-?\d\}?)?(?:\s*(?:/|per)\s*[a-z]+(?:\^?\{?\d\}?)?)?)", re.DOTALL
)
_PLAIN_PI = re.compile(r"(?<![a-zA-Z\\])pi(?![a-zA-Z])|π")
_PLAIN_ROOT = re.compile(r"(?:(?<![a-zA-Z\\])sqrt|√)\s*\(?([\w.]+)\)?")
_CURRENCY = re.compile(r"\\?([$€£])\s*(?=[\d.])")
_UNITS = {
    unit: names[0]
    for names in (
        ("$", "dollar", "dollars", "usd"),
        ("€", "euro", "euros"),
        ("£", "pound", "pounds"),
        ("cent", "cents"),
        ("°", "degree", "degrees", "deg"),
        ("%", "percent", "pct"),
        ("mm", "millimeter", "millimeters", "millimetre", "millimetres"),
        ("cm", "centimeter", "centimeters", "centimetre", "centimetres"),
        ("m", "meter", "meters", "metre", "metres"),
        ("km", "kilometer", "kilometers", "kilometre", "kilometres"),
        ("in", "inch", "inches"),
        ("ft", "foot", "feet"),
        ("mi", "mile", "miles"),
        ("g", "gram", "grams"),
        ("kg", "kilogram", "kilograms"),
        ("s", "sec", "second", "seconds"),
        ("min", "minute", "minutes"),
        ("h", "hr", "hrs", "hour", "hours"),
        ("day", "days"),
        ("l", "liter", "liters", "litre", "litres"),
        ("mi/h", "mph"),
        ("km/h", "kph"),
    )
    for unit in names
}


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Accuracy 1 if the last stated answer equals the ground truth, else 0; `answer` is None if none was stated."""
    answer = last_answer(solution_str)
    if answer is None:
        return {"accuracy": 0.0, "answer": None}
    return {"accuracy": float(same_answer(answer, ground_truth)), "answer": answer}


def last_answer(response: str) -> str | None:
    r"""What stands in the last `\boxed{…}` or after the last `Answer:`, whichever comes later; None without either."""
    stated = [(match.start(), match[2]) for match in _LINE.finditer(response)]
    stated += [(match.start(), _braced(response, match.end())) for match in _BOXED.finditer(response)]
    found = [(place, _unwrapped(answer)) for place, answer in stated if answer is not None]
    return max(((place, answer) for place, answer in found if answer), default=(0, None))[1]


def _braced(text: str, start: int) -> str | None:
    """What stands between the brace at `start` and its partner; a single token without braces; None if unclosed."""
    if text[start : start + 1] != "{":
        return match[0] if (match := re.compile(r"[^\s{}$\\]+").match(text, start)) else None
    depth = 0
    for place in range(start, len(text)):
        if text[place] in "{}" and text[place - 1] != "\\":
            depth += 1 if text[place] == "{" else -1
            if not depth:
                return text[start + 1 : place]
    return None


def _unwrapped(answer: str) -> str:
    before = None
    while answer != before:
        before, answer = answer, _PHRASES.sub("", answer.strip()).removesuffix(".").removesuffix("\\").strip()
        for opening, closing in _WRAPPINGS:
            if len(answer) > len(opening + closing) and answer.startswith(opening) and answer.endswith(closing):
                inside = answer[len(opening) : -len(closing)]
                answer = answer if opening in inside or closing in inside else inside
        if answer.endswith("**") and "**" not in answer[:-2]:
            answer = answer[:-2]
        boxed = _BOXED.match(answer)
        if boxed and (content := _braced(answer, boxed.end())) is not None and answer.endswith(content + "}"):
            answer = content
    return answer


def same_answer(answer: str, truth: str) -> bool:
    """Whether two answers, as they were written, say the same. An answer of over 1,000 characters says nothing."""
    if len(answer) > MAX_ANSWER_CHARACTERS:
        return False
    answer, truth = _unwrapped(answer), _unwrapped(truth)
    one, other = _plain(answer), _plain(truth)
    if one == other or _squeezed(one) == _squeezed(other):
        return True
    for kind in (_CHOICE, _WORDS):
        true_words = kind.fullmatch(other)
        if true_words is not None and other not in ("pi", "infty", "oo"):
            words = kind.fullmatch(one)
            return words is not None and _letters(words[0]) == _letters(true_words[0])
    (one_number, one_unit), (other_number, other_unit) = _quantity(one), _quantity(other)
    if one_unit and other_unit and one_unit != other_unit:
        return False
    if one_unit and one_unit == other_unit and one_unit != "%":
        return _same_formula(one_number, other_number)
    return _same_formula(_formula(answer, one_number, one_unit), _formula(truth, other_number, other_unit))


def _plain(answer: str) -> str:
    """Without what only sets the type; words as they are, small."""
    answer = _CURRENCY.sub(r"\1", answer)
    answer = _SPACING.sub(" ", _TEXT.sub(r" \1 ", answer)).replace("\\%", "%").replace("^\\circ", "°")
    answer = answer.replace("^{\\circ}", "°").replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    return " ".join(answer.split()).lower()


def _squeezed(plain: str) -> str:
    return plain.replace(" ", "")


def _letters(words: str) -> list[str]:
    return re.findall(r"[a-z]+", words)


def _quantity(plain: str) -> tuple[str, str]:
    """A number and its unit under one name; no unit where there is none that is known."""
    if plain[:1] in "$€£" and len(plain) > 1:
        return plain[1:].strip(), plain[0]
    if (match := _QUANTITY.fullmatch(plain)) is None:
        return plain, ""
    parts = [_unit(part) for part in re.split(r"\s*(?:/|\bper\b)\s*", match[2].strip())]
    return (match[1].strip(), "/".join(parts)) if all(parts) else (plain, "")


def _unit(written: str) -> str:
    """One unit, with its power, under one name; empty if it is not known."""
    base = re.match(r"[^\d^{\s-]+", written)
    return _UNITS[base[0]] + re.sub(r"[\s^{}]", "", written[base.end() :]) if base and base[0] in _UNITS else ""


def _formula(answer: str, number: str, unit: str) -> str:
    """What is given to the library: the number of a quantity, or the answer as it was written."""
    if unit and unit != "%":
        return number
    if scientific := _SCIENTIFIC.fullmatch(answer):
        return rf"{scientific[1]} \times 10^{{{scientific[2]}}}"
    return _PLAIN_PI.sub(r"\\pi ", _PLAIN_ROOT.sub(r"\\sqrt{\1}", answer))


def _same_formula(answer: str, truth: str) -> bool:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    kinds = [LatexExtractionConfig(), ExprExtractionConfig()]
    parsed = [parse(f"${text.replace('$', '')}$", kinds, parsing_timeout=None) for text in (truth, answer)]
    return bool(parsed[0] and parsed[1]) and verify(*parsed, timeout_seconds=None, allow_set_relation_comp=True)
