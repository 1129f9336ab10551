"""Replace the flags of other servers in a command line: by words of ours, warnings, or errors."""

import difflib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from crossdock.cluster.config_file import gone_setting
from crossdock.cluster.serve.other_flags import Verdict, takes_value, verdict, verdict_on_value

Part: TypeAlias = tuple[str, list[str]]  # an option's name, "" for an argument, and the words of the command line

_REPLICAS = ("--data-parallel-size", "-dp", "--dp-size", "--dp")
_WIDE_EXPERTS = {"--enable-expert-parallel", "-ep"}  # of vLLM: the ranks of all data-parallel replicas share experts
_SHARED_ATTENTION = {"--enable-dp-attention", "--attn-dp-size"}  # of SGLang: --tp-size counts all ranks already
_RANKS = ("--tensor-parallel-size", "--tp-size", "--tp", "-tp")
_LIMITS = "--limit-mm-per-prompt"
_OFF = ("false", "False", "FALSE")
_MOST_NAMED = 6  # flags in one line


@dataclass(slots=True)
class Adopted:
    """The parts of a command line in our own forms, and a line for each flag that is not as it was written.

    `notes`: the start goes on. `errors`: the command ends.
    """

    parts: list[Part] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def value_of(words: Sequence[str]) -> str | None:
    """Return the value in the words of an option; None: no value was given."""
    if len(words) > 1:
        return words[-1]
    _, equals, value = words[0].partition("=")
    return value if equals else None


def adopt(
    parts: Sequence[Part], ours: Collection[str], absent: Mapping[str, str], *, is_strict: bool = False
) -> Adopted:
    """Return a command line with the flags of other servers replaced, left out or refused.

    Args:
        parts: the options and arguments of the line.
        ours: the names of our options.
        absent: flags that the command does not have, with the reason.
        is_strict: refuse every flag that is not ours.
    """
    line = Adopted()
    given = {name for name, _ in parts}
    if not is_strict:
        parts = list(_with_replicas(parts, given, line))
    for name, words in parts:
        option = name.partition(".")[0]
        if not name or option in ours:
            line.parts.append((name, words))
            continue
        if name in absent:
            line.errors.append(f"{name}: {absent[name]}")
        elif gone := gone_setting(name):
            line.errors.append(f"{name}: {gone}")
        elif (found := verdict(name)) is None or _is_short(name, ours):
            line.errors.append(_unknown(name, ours))
        elif is_strict:
            line.errors.append(found.line(name))
        else:
            _take(name, words, found, given, line)
    line.notes = list(dict.fromkeys(line.notes))
    line.errors = list(dict.fromkeys(line.errors))
    return line


def without_words_of_others(parts: Sequence[Part]) -> Adopted:
    """Leave out flags of ours whose values, or whose use beside each other, only other servers know.

    `parts`: each with its value as a whole.
    """
    line = Adopted()
    for name, words in parts:
        value = value_of(words) if name else None
        found = None if value is None else verdict_on_value(name, value, _object(value))
        if found is None:
            line.parts.append((name, words))
        else:
            line.notes.append(found.line(f"{name} {value}"))
    line.parts = [(name, _without_sound(words, line) if name == _LIMITS else words) for name, words in line.parts]
    names = {name for name, _ in line.parts}
    if {"--async-scheduling", "--speculative-config"} <= names:
        line.parts = [part for part in line.parts if part[0] != "--async-scheduling"]
        line.notes.append("--async-scheduling: left out: beside drafts a step begins when the tokens before are known")
    return line


def _without_sound(words: list[str], line: Adopted) -> list[str]:
    """Return the words of the limits of pictures and videos without one of sound: requests with sound are refused."""
    limits = _object(value_of(words) or "")
    if limits is None or not limits.get("audio"):
        return words
    line.notes.append(f"{_LIMITS}: audio is left out: sound is not supported, and requests with some are refused")
    return [f"{_LIMITS}={json.dumps({**limits, 'audio': 0})}"]


def _take(name: str, words: Sequence[str], found: Verdict, given: Collection[str], line: Adopted) -> None:
    """Add to the line the words, the warning or the error for one flag of others."""
    value = value_of(words)
    is_switch = not takes_value().get(name, True)
    if is_switch and (name.startswith("--no-") or value in _OFF):
        line.notes.append(found.line(name) if found.state == "needless" else f"{name}: not needed: it is off here")
    elif found.becomes:
        _translate(name, value, found, given, line)
    elif found.state in ("needless", "lost"):
        line.notes.append(found.line(name))
    elif note := found.line_of_harmless(name, value or ""):
        line.notes.append(note)
    else:
        line.errors.append(found.line(name))


def _translate(name: str, value: str | None, found: Verdict, given: Collection[str], line: Adopted) -> None:
    """Add to the line the words of ours that mean the same as a flag of others."""
    ours, has_value, template = found.becomes.partition("=")
    if ours in given and ours != "--set":
        line.notes.append(f"{name}: left out: {ours} is given, and wins")
        return
    meant = None if value is None else found.words.get(value, found.words.get("*", value))
    try:
        words = [found.becomes]
        if has_value:
            words = [f"{ours}={_filled(template, meant)}"]
        elif meant is not None:
            words = [f"{ours}={meant}"]
    except ValueError:
        line.errors.append(f"{name}: must be a number, not {value!r}")
        return
    line.parts.append((ours, words))
    line.notes.append(f"{name}: read as {' '.join(words).replace('=', ' ', 1)}")


def _filled(template: str, value: str | None) -> str:
    """Return the words with the value of the flag in them. Raises ValueError for a size that is no number."""
    if "{GiB}" in template:
        return template.replace("{GiB}", str(round(float(value or "") * (1 << 30))))
    return template.replace("{}", value or "") if "{}" in template else template


def _with_replicas(parts: Sequence[Part], given: Collection[str], line: Adopted) -> Iterator[Part]:
    """Yield the parts, those for data parallelism as what they mean beside those for experts and attention.

    vLLM's ranks of all replicas share the experts, and SGLang's the attention of one replica: here one replica has all
    of these ranks, in the memory that they have together.
    """
    sizes = [words for name, words in parts if name in _REPLICAS]
    number = value_of(sizes[-1]) if sizes else None
    is_shared = not _SHARED_ATTENTION.isdisjoint(given)
    is_wide = not _WIDE_EXPERTS.isdisjoint(given)
    if number is None or number == "1" or not number.isdecimal() or not (is_shared or is_wide):
        for name, words in parts:
            is_replicas = name in _REPLICAS
            if is_replicas and number == "1":
                line.notes.append(f"{name} 1: not needed")
            elif is_replicas and number is not None and not number.isdecimal():
                line.errors.append(f"{name}: must be a whole number, not {number!r}")
            else:
                yield name, words
        return
    ranks = next((value_of(words) or "" for name, words in reversed(parts) if name in _RANKS), "1")
    total = int(ranks) * int(number) if ranks.isdecimal() and not is_shared else None
    for name, words in parts:
        if name in _REPLICAS:
            meaning = "the ranks of the one replica"
            if total is not None:
                meaning = f"--tensor-parallel-size {total}, one replica"
            line.notes.append(
                f"{name} {number}: read as {meaning}: all of its ranks divide experts and attention; latents, if the "
                f"model has some, are on every rank (--pipeline-parallel-size divides these)"
            )
            if total is not None:
                yield "--tensor-parallel-size", [f"--tensor-parallel-size={total}"]
        elif total is None or name not in _RANKS:
            yield name, words


def _is_short(name: str, ours: Collection[str]) -> bool:
    """Report whether a name is the beginning of several flags, and none itself."""
    return name not in takes_value() and len(_longer(name, ours)) > 1


def _longer(name: str, ours: Collection[str]) -> list[str]:
    """Return the flags, ours and others, that begin with a name."""
    return sorted(each for each in {*ours, *takes_value()} if name.startswith("--") and each.startswith(name))


def _unknown(name: str, ours: Collection[str]) -> str:
    """Return the line for a flag that no server has: the flags that it may be short for, or is alike."""
    if meant := _longer(name, ours):
        return f"{name}: short for several: {', '.join(meant[:_MOST_NAMED])}{', …' if len(meant) > _MOST_NAMED else ''}"
    close = difflib.get_close_matches(name, [each for each in ours if each.startswith("--")], 1, 0.75)
    return f"{name}: no such option{f'; did you mean {close[0]}?' if close else ''}"


def _object(text: str) -> Mapping[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
