from osmosis_ai import osmosis_reward


@osmosis_reward
def numbers_match_reward(solution_str: str, ground_truth: str, extra_info: dict = None, **kwargs) -> float:
    return 1.0 if solution_str.rpartition("####")[2].strip() == ground_truth else 0.0
