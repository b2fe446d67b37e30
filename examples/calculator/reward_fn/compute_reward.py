"""Rewards that need no judge: is the number right, and is it where it was asked for?"""

import math
import re

from osmosis_ai import osmosis_reward

ANSWER = re.compile(r"####\s*[$€£]?\s*([-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)")


def extract_number(text: str) -> float | None:
    """Return the number after the last `####`, or None if there is none."""
    found = ANSWER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def parse_number(text: str) -> float | None:
    """Return a text as a number, or None if it isn't one."""
    try:
        return float(text.strip().replace(",", ""))
    except ValueError:
        return None


@osmosis_reward
def numbers_match_reward(solution_str: str, ground_truth: str, extra_info: dict | None = None, **kwargs) -> float:
    """1.0 if the answer after `####` equals the expected number up to rounding, else 0.0."""
    answer = extract_number(solution_str or "")
    expected = parse_number(ground_truth or "")
    if answer is None or expected is None:
        return 0.0
    return 1.0 if math.isclose(answer, expected, rel_tol=1e-6, abs_tol=1e-6) else 0.0


@osmosis_reward
def answer_format_reward(solution_str: str, ground_truth: str, extra_info: dict | None = None, **kwargs) -> float:
    """1.0 if the last line is `#### <number>` and nothing else, else 0.0."""
    lines = (solution_str or "").strip().splitlines()
    return 1.0 if lines and ANSWER.fullmatch(lines[-1].strip()) else 0.0
