"""SLO classes: the promised time to the first token and per token after it, and who goes first when time is short."""

from collections.abc import Callable, Sequence

from pydantic import BaseModel, ConfigDict, Field

from crossdock.workers.schedule.cost.formula import Figure


class SloClass(BaseModel):
    """One class of requests. Classes are listed most urgent first; the position in the list is the priority."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[a-z][a-z0-9_-]*$", description="The name in `service_tier` and in configuration.")
    ttft_s: float = Field(gt=0, description="Seconds to the first token.")
    tpot_s: float = Field(gt=0, description="Seconds per output token after the first.")
    weight: float = Field(default=1.0, gt=0, description="Weight of the class when the router compares replicas.")
    decode_share: float = Field(default=0.0, ge=0, le=1, description="Share of max_num_seqs reserved for this class.")

    def ttft_deadline(self, seconds_alone: Figure, larger: Callable[..., Figure] = max) -> Figure:
        """Return the seconds after arrival by which the first token is due.

        A prompt may take at least twice its time on an idle replica, `seconds_alone`: no replica can compute within
        `ttft_s` a prompt that alone takes longer. `larger`: `np.maximum` for an array of replicas.
        """
        return larger(self.ttft_s, 2 * seconds_alone)


DEFAULT_CLASSES = (
    SloClass(name="interactive", ttft_s=1.0, tpot_s=0.05, weight=4.0, decode_share=0.1),
    SloClass(name="standard", ttft_s=10.0, tpot_s=0.1),
    SloClass(name="batch", ttft_s=600.0, tpot_s=2.0, weight=0.25),
)
DEFAULT_CLASS = "standard"


def priority_of(classes: Sequence[SloClass], name: str) -> int:
    """Return the position of class `name`; 0 is the most urgent.

    Raises:
        ValueError: there is no such class; the message names the field.
    """
    for priority, slo in enumerate(classes):
        if slo.name == name:
            return priority
    known = ", ".join(slo.name for slo in classes)
    raise ValueError(f"slo_class {name!r} is not served here; there are {known}")
