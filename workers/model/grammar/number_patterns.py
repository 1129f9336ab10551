"""Regular expressions of the numbers between two bounds, exact at any length. JSON's form, without exponents."""

_FRACTION = r"(\.[0-9]+)?"
_ZEROS = r"(\.0+)?"


def integers(low: int | None, high: int | None) -> str:
    """Return the pattern of the integers from `low` to `high`, both included; None: no bound.

    Raises ValueError where there is no such integer.
    """
    if low is not None and high is not None and low > high:
        raise ValueError("no integer is between the bounds")
    parts = []
    if low is None or low < 0:
        parts.append("-" + _counts(1 if high is None or high >= 0 else -high, None if low is None else -low))
    if high is None or high >= 0:
        parts.append(_counts(max(low or 0, 0), high))
    return _either(parts)


def numbers(low: int | None, high: int | None, *, takes_low: bool = True, takes_high: bool = True) -> str:
    """Return the pattern of the numbers from `low` to `high`; None: no bound. `takes_…`: the bound itself is allowed.

    Raises ValueError where there is no such number.
    """
    is_one = low is not None and low == high
    if low is not None and high is not None and (low > high or (is_one and not (takes_low and takes_high))):
        raise ValueError("no number is between the bounds")
    parts = []
    if low is None or low < 0:
        reaches_zero = high is None or high >= 0
        nearest = 0 if reaches_zero or high is None else -high
        parts.append("-" + _amounts(nearest, None if low is None else -low, takes_high and not reaches_zero, takes_low))
    if high is None or high > 0 or (high == 0 and takes_high):
        parts.append(_amounts(max(low or 0, 0), high, takes_low or low is None or low < 0, takes_high))
    return _either(parts)


def _amounts(low: int, high: int | None, takes_low: bool, takes_high: bool) -> str:
    """Return the pattern of the numbers between two bounds of 0 or more."""
    if low == high:
        return f"{low}{_ZEROS}"
    parts = [f"{low}{_FRACTION}" if takes_low else rf"{low}\.[0-9]*[1-9][0-9]*"]
    if high is None or high > low + 1:
        parts.append(_counts(low + 1, None if high is None else high - 1) + _FRACTION)
    if high is not None and takes_high:
        parts.append(f"{high}{_ZEROS}")
    return _either(parts)


def _counts(low: int, high: int | None) -> str:
    """Return the pattern of the integers between two bounds of 0 or more, both included."""
    first = str(low)
    last = None if high is None else str(high)
    parts = []
    if last is None:
        parts.append(rf"[1-9][0-9]{{{len(first)},}}")
    elif len(first) < len(last):
        parts.append(_lengths(len(first) + 1, len(last) - 1))
        parts.append(_equally_long("1" + "0" * (len(last) - 1), last))
    if last is None or len(first) < len(last):
        last = "9" * len(first)
    return _either([_equally_long(first, last), *filter(None, parts)])


def _lengths(shortest: int, longest: int) -> str:
    """Return the pattern of all integers with so many digits; empty: there are none."""
    return rf"[1-9][0-9]{{{shortest - 1},{longest - 1}}}" if shortest <= longest else ""


def _equally_long(first: str, last: str) -> str:
    """Return the pattern of the digits from `first` to `last`, which are equally long."""
    same = next((i for i, (one, other) in enumerate(zip(first, last, strict=True)) if one != other), len(first))
    if same == len(first):
        return first
    low = int(first[same])
    high = int(last[same])
    rest = len(first) - same - 1
    parts = [f"{low}{_up_to(first[same + 1 :], 9)}"]
    if high > low + 1:
        parts.append(f"{_digit(low + 1, high - 1)}{_any_digits(rest)}")
    parts.append(f"{high}{_up_to(last[same + 1 :], 0)}")
    return first[:same] + _either(parts)


def _up_to(digits: str, end: int) -> str:
    """Return the pattern of equally long digits, from `digits` up if `end` is 9, from `digits` down if `end` is 0."""
    if not digits.strip(str(9 - end)):
        return _any_digits(len(digits))
    parts = [digits]
    for i, digit in enumerate(map(int, digits)):
        if digit != end:
            further = _digit(digit + 1, 9) if end else _digit(0, digit - 1)
            parts.append(f"{digits[:i]}{further}{_any_digits(len(digits) - i - 1)}")
    return _either(parts)


def _digit(low: int, high: int) -> str:
    return str(low) if low == high else f"[{low}-{high}]"


def _any_digits(count: int) -> str:
    return f"[0-9]{{{count}}}" if count else ""


def _either(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"({'|'.join(parts)})"
