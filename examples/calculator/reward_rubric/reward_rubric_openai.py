"""A judge for what a number alone doesn't show: is the answer presented clearly?"""

from osmosis_ai import osmosis_rubric

RUBRIC = """\
Judge how well the reply answers an arithmetic question.
1.0: the last line is `#### <number>`, and everything before it is correct and to the point.
0.5: the final number can be found, but the form differs or there is text that doesn't help.
0.0: there is no final number, or the reply contradicts itself."""


@osmosis_rubric
def answer_clarity_rubric(solution_str: str, ground_truth: str | None, extra_info: dict, **kwargs) -> float:
    """Ask a language model how clearly the answer is given, from 0.0 to 1.0."""
    from osmosis_ai import evaluate_rubric

    return evaluate_rubric(
        rubric=RUBRIC,
        solution_str=solution_str,
        ground_truth=ground_truth,
        original_input=extra_info.get("original_input"),
        model_info={
            "provider": extra_info.get("provider", "openai"),
            "model": extra_info.get("model", "gpt-5-mini"),
            "api_key_env": extra_info.get("api_key_env", "OPENAI_API_KEY"),
        },
        score_min=0.0,
        score_max=1.0,
    )
