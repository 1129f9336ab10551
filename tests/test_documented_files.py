"""docs/files.md has a row for each field of foreign files that the code knows, with the same verdict."""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from crossdock.cluster.api.body.generation_defaults import HARMLESS_FIELDS, GenerationConfig
from crossdock.cluster.api.media import processor_fields
from crossdock.cluster.api.text import tokenizer_fields
from crossdock.workers.model.weights.config_fields import COMPUTED, HARMLESS, OF_ENCODERS, OF_OLDER_CODE, READ_HERE
from crossdock.workers.model.weights.gguf_config import ARCHITECTURES
from crossdock.workers.model.weights.gguf_keys import KEYS, TENSORS, KeyVerdict
from crossdock.workers.model.weights.gguf_tokenizer import PRE_TOKENIZERS

TEXT = (Path(__file__).parents[1] / "docs" / "files.md").read_text()


def rows_of(title: str) -> list[tuple[str, ...]]:
    """Return the cells of the table in the section of that title, sorted, with a row for each field."""
    rows = [[cell.strip() for cell in row[1:-1].split("|")] for row in section(title) if row.startswith("| `")]
    found = [(name, *cells) for names, *cells in rows for name in re.split(", (?=`)", names)]
    assert len({tuple(cells[1:]) for cells in found}) == len(rows), f"{title}: fields of one verdict share a row"
    return sorted(found)


def section(title: str) -> list[str]:
    found = re.search(rf"^##+ {re.escape(title)}\n(.*?)(?=^##|\Z)", TEXT, re.MULTILINE | re.DOTALL)
    assert found is not None, title
    return found[1].splitlines()


def names_in(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        yield from re.findall(r"`([^`]+)`", line)


@pytest.mark.parametrize(("title", "table"), [("GGUF", KEYS), ("Tensors in GGUF", TENSORS)])
def test_table_of_gguf_has_the_rows_of_the_code(title: str, table: dict[str, KeyVerdict]) -> None:
    expected = []
    for key, each in table.items():
        but = f", but for {each.which}" if each.allowed else ""
        expected.append((f"`{key}`", f"{each.verdict}{but}", each.about))
    assert rows_of(title) == sorted(expected)


def test_architectures_and_divisions_of_text_are_those_of_the_code() -> None:
    text = [line for line in section("GGUF") if not line.startswith("|")]
    assert set(ARCHITECTURES) <= set(names_in(text))
    assert set(PRE_TOKENIZERS) <= set(names_in(section("Tokenizers in GGUF")))


def test_table_of_configurations_has_the_rows_of_the_code() -> None:
    assert rows_of("config.json") == sorted((f"`{name}`", "harmless", about) for name, about in HARMLESS.items())
    assert {*READ_HERE, *OF_ENCODERS} <= set(names_in(section("config.json")))


def test_tables_of_fields_of_one_model_type_have_the_rows_of_the_code() -> None:
    """If this fails, put the rows of its message there."""
    values: dict[str, dict[str, list[str]]] = {}
    for kind, fields in COMPUTED.items():
        for name, value in fields.items():
            values.setdefault(json.dumps(value), {}).setdefault(name, []).append(kind)
    rows = []
    for value, of_value in values.items():
        named = "; ".join(f"`{name}` of {', '.join(kinds)}" for name, kinds in of_value.items())
        rows.append(f"| `{value}` | {named} |")
    kinds_of: dict[tuple[str, ...], list[str]] = {}
    for kind, names in OF_OLDER_CODE.items():
        kinds_of.setdefault(tuple(names), []).append(kind)
    rows += [
        f"| {', '.join(kinds)} | {', '.join(f'`{name}`' for name in names)} |" for names, kinds in kinds_of.items()
    ]
    found = [row for row in section("Fields of one model_type") if row.startswith("| ") and "`" in row]
    assert found == rows, "\n".join(rows)


def test_table_of_sampling_has_the_rows_of_the_code() -> None:
    expected = [(f"`{name}`", "harmless", about) for name, about in HARMLESS_FIELDS.items()]
    assert rows_of("generation_config.json") == sorted(expected)
    assert set(GenerationConfig.model_fields) <= set(names_in(section("generation_config.json")))


def test_tables_of_tokenizers_and_processors_have_the_rows_of_the_code() -> None:
    rows = rows_of("tokenizer_config.json")
    named = [row[0] for row in rows if len(row) == 2]
    assert named == sorted(f"`{name}`" for name in (*tokenizer_fields.OBSERVED, "auto_map"))
    harmless = [(f"`{name}`", "harmless", about) for name, about in tokenizer_fields.HARMLESS.items()]
    assert [row for row in rows if len(row) == 3] == sorted(harmless)
    title = "preprocessor_config.json, processor_config.json and video_preprocessor_config.json"
    harmless = [(f"`{name}`", "harmless", about) for name, about in processor_fields.HARMLESS.items()]
    assert rows_of(title) == sorted(harmless)
    names = set(names_in(section(title)))
    assert {*processor_fields.READ_OF_PROCESSOR, *processor_fields.READ_OF_VIDEOS} <= names
