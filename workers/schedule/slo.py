"""What a class of requests is promised: its first token, every token after it, and its place when time runs short."""

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field


class SloClass(BaseModel):
    """One class of requests. Classes are listed most urgent first; the place in that list is the class's priority."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[a-z][a-z0-9_-]*$", description="What `service_tier` and configuration call it.")
    ttft_s: float = Field(gt=0, description="Seconds to the first token.")
    tpot_s: float = Field(gt=0, description="Seconds per output token after the first.")
    weight: float = Field(default=1.0, gt=0, description="What one broken promise counts for among others.")
    decode_share: float = Field(default=0.0, ge=0, le=1, description="Share of max_num_seqs kept for its streams.")

    def ttft_deadline(self, seconds_alone: float) -> float:
        """Seconds after arrival by which the first token is due. A prompt that takes longer than the class's `ttft_s`
        even on an idle replica may take twice the time it takes alone."""
        return max(self.ttft_s, 2 * seconds_alone)


DEFAULT_CLASSES = (
    SloClass(name="interactive", ttft_s=1.0, tpot_s=0.05, weight=4.0, decode_share=0.1),
    SloClass(name="standard", ttft_s=10.0, tpot_s=0.1),
    SloClass(name="batch", ttft_s=600.0, tpot_s=2.0, weight=0.25),
)
DEFAULT_CLASS = "standard"


def priority_of(classes: Sequence[SloClass], name: str) -> int:
    """The place of class `name`, 0 the most urgent. ValueError, naming the field, if there is none."""
    for priority, slo in enumerate(classes):
        if slo.name == name:
            return priority
    known = ", ".join(slo.name for slo in classes)
    raise ValueError(f"slo_class {name!r} is not served here; there are {known}")
