"""Paths of OpenAI's and vLLM's servers that are not served here: why, and what to use instead."""

_TEXT = "this server's models write text"
_REASONS = {  # by the path, or by its beginning up to a slash
    "/v1/responses": "responses are created, fetched, continued, cancelled and deleted here, and nothing else",
    "/v1/messages": "of Anthropic's API, /v1/messages and /v1/messages/count_tokens are served",
    "/v1/moderations": f"{_TEXT}, not classes",
    "/v1/images": f"{_TEXT}, not pictures",
    "/v1/audio": f"{_TEXT}, not sound",
    "/v1/rerank": f"{_TEXT}, not scores",
    "/v1/score": f"{_TEXT}, not scores",
    "/v1/files": "nothing is stored here",
    "/v1/batches": "send the requests one by one: class 'batch' lets others go first",
    "/v1/fine_tuning": "nothing is trained here",
    "/v1/assistants": "use /v1/chat/completions",
    "/v1/threads": "use /v1/chat/completions",
}


def why_absent(path: str) -> str | None:
    """Return why a path is not served, and what is; None for an unknown path."""
    return next((reason for known, reason in _REASONS.items() if f"{path}/".startswith(f"{known}/")), None)
