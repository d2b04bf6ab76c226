"""A reward that a random policy earns about half of the time: 1 if the response has an even number of digits."""


def compute_score(data_source, solution_str, ground_truth, extra_info):
    return float(sum(character.isdigit() for character in solution_str) % 2 == 0)
