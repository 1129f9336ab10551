"""How many prefill tokens a step may carry, and where a chunk ends. Pure functions: a policy is changed here."""


def prefill_budget(max_num_batched_tokens: int, num_decodes: int) -> int:
    """Tokens left for prefill chunks in a step that `num_decodes` running streams share (vLLM's fixed budget)."""
    return max_num_batched_tokens - num_decodes


def chunk_tokens(start: int, end: int, budget: int, threshold: int, page_size: int) -> int:
    """How many tokens to compute now of those in `[start, end)`, the uncached rest of a prompt.

    At most `budget`, and at most `threshold` where that is not 0. Every chunk but the last ends on a page boundary, so
    that a finished chunk leaves only full pages, which others can share and which can be shipped. 0: not this step.
    """
    stop = min(end, start + budget, start + threshold if threshold else end)
    if stop < end:
        stop -= stop % page_size
    return max(stop - start, 0)
