"""The replica's side of the vetting process, which compiles a grammar within limits: asks for verdicts."""

from collections.abc import Sequence

from crossdock.workers.model.grammar.matcher import invalid
from crossdock.workers.sandbox.limited_child import Limits
from crossdock.workers.sandbox.sandbox import Sandbox
from crossdock.workers.schedule.submission import Grammar, InvalidField

LIMITS = Limits(
    cpu_seconds=1.0,  # of one compile and a few steps; the largest useful grammars take 0.3 s
    wall_seconds=4.0,
    memory_bytes=512 << 20,
    stack_bytes=1 << 20,  # an eighth of a thread's stack, so that the replica's own threads never overflow theirs
)

_MODULE = "crossdock.workers.model.grammar.vetting"
_START_PATIENCE_S = 30.0  # a start takes half a second on an idle machine


def new_vetter(tokenizer: str, eos_token_ids: Sequence[int]) -> Sandbox:
    """Return the vetting process, which is not started yet. `tokenizer`: the JSON of a fast Hugging Face tokenizer."""
    return Sandbox(
        _MODULE,
        {"tokenizer": tokenizer, "eos_token_ids": list(eos_token_ids)},
        title="the process that compiles grammars",
        limits=LIMITS,
        start_patience_s=_START_PATIENCE_S,
    )


def vet(vetter: Sandbox, grammar: Grammar) -> int:
    """Return the bytes that a grammar takes when it is compiled, about. Calls must not overlap.

    Raises:
        InvalidField: the grammar cannot be served; the message gives the reason.
        SandboxBusy: there is no verdict.
    """
    verdict = vetter.ask({"kind": grammar.kind, "source": grammar.source})
    if reason := verdict.get("reason"):
        raise invalid(grammar, reason)
    if error := verdict.get("error"):
        raise InvalidField(error, "grammar")
    return int(verdict["bytes"])
