"""The work of a replica that encodes pictures for another one."""

from dataclasses import replace

from crossdock.workers.schedule.pictures.items import row_prompt
from crossdock.workers.schedule.submission import Leg, SamplingParams, Submission


def encoding_leg(submission: Submission, page_size: int) -> Submission:
    """Return the submission for an `encode` replica: the rows of all items, as `row_prompt` lays them out.

    To that replica it is a prompt like any other, and its KV pages hold the embeddings. `page_size`: of these pages.
    """
    items, num_tokens = row_prompt(submission.items, page_size)
    return replace(
        submission,
        prompt_token_ids=(0,) * num_tokens,
        output_token_ids=(),
        sampling=SamplingParams(max_tokens=2, ignore_eos=True),  # a leg whose first token is its last ships nothing
        leg=Leg.SEND,
        items=items,
        encoder=b"",
        adapter=None,  # it changes no embedding of a picture
    )
