"""Each setting of a replica that changes its steps or its admission is advertised, or predictions do not need it."""

from typing import Any

import pytest

from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.report.profile import SchedulingProfile
from crossdock.workers.schedule.config import SchedulerConfig
from crossdock.workers.schedule.first_token import PromptSteps
from crossdock.workers.schedule.request.slo import SloClass

NOT_ADVERTISED = {
    "mixed_chunks": "off for comparisons alone: predictions take steps as mixed",
    "long_prefill_token_threshold": "what it takes from the chunks of a long prompt goes to other prompts of the step",
    "max_num_partial_prefills": "which prompts share a step: predictions take that a shorter one goes first",
    "max_long_partial_prefills": "as max_num_partial_prefills",
    "short_lane_share": "which prompts share a step: predictions let a short prompt pass longer ones at once",
    "prefill_order": "fcfs is for comparisons alone: predictions take the shortest rest of the most urgent class first",
    "starvation_s": "a request that starves has waited for a minute, which predictions do not reach",
    "default_slo_class": "an ingress gives each request its class before a replica is chosen",
}
"""Settings of the scheduler, and why predictions do not need them."""

MEASURED = {
    "enable_prefix_caching": "advertised as caches_prefixes; cached pages are reported",
    "async_scheduling": "advertised as runs_ahead, as the engine decides it",
    "kv_cache_host_memory": "advertised as a tier",
    "kv_cache_files": "advertised as a tier",
    "mm_encoder_cache": "advertised as encoder_tokens",
    "disable_hybrid_kv_cache_manager": "advertised as windows",
    "kv_cache_memory": "advertised as num_pages",
    "gpu_memory_utilization": "advertised as num_pages",
    "kv_cache_dtype": "advertised as page_bytes; steps are measured with it",
    "cpu_kernels": "advertised as kernels; steps are measured with them",
    "speculative_config": "reported as gap_share, the seconds per token of streams with drafts",
    "enforce_eager": "steps are measured with it",
    "attention_backend": "steps are measured with it",
    "batch_invariant": "steps are measured with it",
    "quantization": "steps are measured with it",
    "enable_lora": "what adapters add to steps is learnt and reported",
    "max_loras": "adapters in slots and the seconds to load one are reported",
    "max_lora_rank": "the size of an adapter counts in each request",
    "kv_events_config": "changes no step: what is published waits for no reader",
    "load_format": "changes no step",
    "log_chunks": "changes no step",
    "fault_token_ids": "of tests alone",
}
"""Other settings of an engine, and how predictions know their effect."""


def test_every_setting_of_the_scheduler_is_advertised_or_not_needed() -> None:
    unknown = SchedulerConfig.model_fields.keys() - SchedulingProfile.model_fields.keys()
    assert unknown == NOT_ADVERTISED.keys(), "advertise the setting, or say why predictions do not need it"


def test_effect_of_every_other_setting_of_an_engine_is_advertised() -> None:
    own = EngineConfig.model_fields.keys() - SchedulerConfig.model_fields.keys() - SchedulingProfile.model_fields.keys()
    assert own == MEASURED.keys(), "say how predictions know what the setting changes"


OTHERS: dict[str, Any] = {
    "max_num_batched_tokens": 4096,
    "max_num_seqs": 8,
    "chunk_policy": "fixed",
    "min_chunk_tokens": 64,
    "enable_chunked_prefill": False,
    "max_prefill_tokens": 256,
    "idle_step_share": 0.1,
    "slo_classes": (SloClass(name="standard", ttft_s=3.0, tpot_s=0.1),),
    "admission": "queue",
    "page_size": 32,
}
"""A value for each advertised setting that is not its default."""


@pytest.mark.parametrize("name", sorted(SchedulerConfig.model_fields.keys() & SchedulingProfile.model_fields.keys()))
def test_profile_has_the_setting_that_the_scheduler_has(name: str) -> None:
    config = SchedulerConfig(**{name: OTHERS[name]})
    settings = SchedulingProfile.settings_of(config)
    assert settings[name] == OTHERS[name] != SchedulingProfile.settings_of(SchedulerConfig())[name]
    fixed = {"max_model_len": 4096, "vocab_size": 10, "num_pages": 100}
    cost = {"base": 1e-3, "per_prefill_token": 1e-4}
    profile = SchedulingProfile.model_validate({**fixed, "cost": cost, **settings})
    assert PromptSteps.of(profile, profile.cost) == PromptSteps.of(config, profile.cost)
