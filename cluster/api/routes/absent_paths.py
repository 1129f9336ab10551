"""Paths of OpenAI's, vLLM's and SGLang's servers that are not served here, with what to use instead; and typos."""

from collections.abc import Collection
from difflib import get_close_matches

_LONGEST = 100  # characters of a path that are compared with served ones
_TEXT = "this server's models write text"
_ROLLOUTS = "the operator enables the paths of trainers with --enable-rollouts (http.rollouts)"
_CACHED = "cached pages go when others need their place; 'cache_salt' separates caches"
_OF_TRAINERS = (
    *("/pause", "/resume", "/is_paused", "/reset_prefix_cache", "/flush_cache", "/get_world_size", "/server_info"),
    *("/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"),
    *("/update_weights_from_disk", "/weight_info", "/weight_checker", "/sleep", "/wake_up", "/is_sleeping"),
)
ABSENT = {  # by the path, or by its beginning up to a slash
    "/v1/responses": "responses are created, fetched, continued, cancelled and deleted here, and nothing else",
    "/v1/responses/compact": "conversations are not compacted here: send the items that matter",
    "/v1/responses/input_tokens": "/tokenize returns the tokens of a chat",
    "/v1/messages": "of Anthropic's API, /v1/messages and /v1/messages/count_tokens are served",
    "/v1/moderations": f"{_TEXT}, not classes",
    "/v1/images": f"{_TEXT}, not pictures",
    "/v1/audio": f"{_TEXT}, not sound",
    "/v1/realtime": f"{_TEXT}, not sound",
    "/v1/videos": f"{_TEXT}, not videos",
    "/pooling": "use /v1/embeddings",
    "/encode": "use /v1/embeddings",
    "/v2/embed": "use /v1/embeddings",
    "/v1/files": "the operator names a folder for files and batches with --batch-folder (http.batch_folder)",
    "/v1/batches": "the operator names a folder for files and batches with --batch-folder (http.batch_folder)",
    "/v1/chat/completions/batch": "send the requests one by one: class 'batch' lets others go first",
    "/v1/chat/completions/render": "/tokenize returns the tokens of a chat",
    "/v1/completions/render": "/tokenize returns the tokens of a prompt",
    "/v1/fine_tuning": "nothing is trained here",
    "/v1/assistants": "use /v1/chat/completions",
    "/v1/threads": "use /v1/chat/completions",
    "/v1/conversations": "use 'previous_response_id' of /v1/responses",
    "/generate": "use /v1/completions",
    "/inference/v1/generate": "use /v1/completions, with 'prompt' as token ids and 'return_token_ids'",
    "/invocations": "use /v1/chat/completions or /v1/completions",
    "/api": "use /v1/chat/completions or /v1/completions",
    "/ping": "use /health, or /ready, which says whether a replica can serve",
    "/health_generate": "use /ready, which says whether a replica can serve",
    "/load": "use /v1/requests, /v1/replicas or /metrics",
    "/get_load": "use /v1/requests, /v1/replicas or /metrics",
    "/get_server_info": "use /v1/replicas",
    "/model_info": "use /v1/models",
    "/get_model_info": "use /v1/models",
    "/tokenizer_info": "use /tokenize and /detokenize",
    "/playground": "use /simulator",
    "/docs": "use /openapi.json",
    "/redoc": "use /openapi.json",
    "/reset_mm_cache": _CACHED,
    "/reset_encoder_cache": _CACHED,
    **dict.fromkeys(_OF_TRAINERS, _ROLLOUTS),
    "/pause_generation": "use /pause?mode=keep",
    "/continue_generation": "use /resume",
    "/init_weights_update_group": "use /init_weight_transfer_engine",
    "/update_weights_from_distributed": "use /update_weights",
    "/update_weights_from_tensor": "use crossdock.cluster.serve.rollouts.push_weights, from Python",
    "/release_memory_occupation": "use /sleep",
    "/resume_memory_occupation": "use /wake_up",
    "/init_communicator": "use /init_weight_transfer_engine",
    "/update_named_param": "use /update_weights",
    "/update_weight_version": "give 'weight_version' to /finish_weight_update",
    "/weights_checker": "use /weight_checker",
    "/collective_rpc": "there are no calls into the ranks",
    "/start_profile": "use 'crossdock tune', py-spy or torch's profiler",
    "/stop_profile": "use 'crossdock tune', py-spy or torch's profiler",
    "/abort_request": "close the connection: its pages are free before the next step",
    "/abort_requests": "close the connection: its pages are free before the next step",
}


def advice(path: str, served: Collection[str]) -> str | None:
    """Return a sentence on why a path is not served, or on which one of `served` may be meant; None for neither."""
    if path in ("/", "/v1", "/v1/"):
        return "The paths of the API are at /openapi.json, and the dashboard is at /dashboard."
    beginnings = [known for known in ABSENT if f"{path}/".startswith(f"{known}/")]
    if beginnings:
        reason = ABSENT[max(beginnings, key=len)]
        return f"{reason[0].upper()}{reason[1:]}."
    meant = _meant(path.rstrip("/")[:_LONGEST], served)
    return None if meant is None else f"Did you mean {meant}?"


def _meant(path: str, served: Collection[str]) -> str | None:
    """Return the served path that `path` becomes with or without a prefix such as /v1; else a similar served path."""
    alike = [known for known in served if known == f"/v1{path}" or path.endswith(known)]
    return max(alike, key=len) if alike else next(iter(get_close_matches(path, served, 1, 0.8)), None)
