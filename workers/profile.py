"""What a replica says it can do, in seconds: the only thing routers compare."""

from pydantic import BaseModel, ConfigDict


class SchedulingProfile(BaseModel):
    """The static part: fixed once the replica has started."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_model_len: int  # tokens, prompt and output together
    vocab_size: int
    page_size: int  # tokens
    num_pages: int
    max_num_batched_tokens: int  # per step
    max_num_seqs: int
    seconds_per_prompt_token: float  # measured at start, prompts alone
    seconds_per_decode: float  # measured at start: what one more running stream adds to a step
