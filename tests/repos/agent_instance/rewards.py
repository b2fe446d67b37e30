"""Functions that -m repositories score with, beside the loop's module."""


def compute_reward(solution_str: str, ground_truth: str, extra_info: dict = None, **kwargs) -> float:
    return 1.0 if solution_str.strip() == ground_truth else 0.0


def used_a_tool(messages: list, ground_truth: str, metadata: dict, **kwargs) -> float:
    return 1.0 if any(message["role"] == "tool" for message in messages) else 0.0
