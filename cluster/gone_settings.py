"""Settings that earlier versions had, and what to use now."""

GONE_SETTINGS = {"engine.prefix_eviction": "gone, leave it out: the least recently used page is evicted first"}


def gone_setting(name: str) -> str | None:
    """Return what to use in place of a setting that is gone, by its name or its flag; None: there was none."""
    last = name.rpartition(".")[2].removeprefix("--").replace("-", "_")
    return next((line for gone, line in GONE_SETTINGS.items() if gone.rpartition(".")[2] == last), None)
