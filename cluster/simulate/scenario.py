"""The load of the simulator's page: decode requests that run, and prompts that arrive together a moment later."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from crossdock.workers.report.presets import preset

HERE = "here"


class Scenario(BaseModel):
    """One replica, its policy, and what it has to compute."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    policy: Literal["adaptive", "fixed", "alternating", "whole"] = Field(
        "adaptive",
        description="adaptive: chunks fit the slack of running requests; fixed: chunks fill the token budget; "
        "alternating: the same, in steps without decodes; whole: a prompt is computed in one step.",
    )
    max_num_batched_tokens: int = Field(2048, ge=128, le=65536, description="Token budget of a step.")
    num_streams: int = Field(16, ge=0, le=64, description="Requests that decode when the prompts arrive.")
    num_prompts: int = Field(1, ge=1, le=8, description="Prompts that arrive together.")
    prompt_tokens: int = Field(8192, ge=1, le=65536, description="Length of each of these prompts.")
    tpot_s: float = Field(0.05, ge=0.001, le=10, description="Target of all requests, in seconds per token.")
    profile: str = Field("h100-8b", max_length=40, description="Step costs: a preset's; here: this server's own.")

    @field_validator("profile")
    @classmethod
    def _is_a_preset(cls, name: str) -> str:
        if name != HERE:
            preset(name)  # raises ValueError
        return name
