from osmosis_ai import osmosis_reward


@osmosis_reward
def exact_match(solution_str: str, ground_truth: str, extra_info: dict = None) -> float:
    return 1.0 if solution_str.strip().split()[-1:] == [ground_truth] else 0.0
