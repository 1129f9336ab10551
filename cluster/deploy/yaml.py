"""Write manifests as YAML: block style, keys in their given order, long texts as literal blocks."""

from collections.abc import Sequence
from typing import Any

import yaml


class Literal(str):
    """A text of several lines, written as a literal block."""

    __slots__ = ()


class _Dumper(yaml.SafeDumper):
    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)  # lists are indented, as is usual in manifests

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _literal(dumper: _Dumper, text: Literal) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", str(text), style="|")


_Dumper.add_representer(Literal, _literal)


def to_yaml(documents: Sequence[Any]) -> str:
    """Return the documents as one text, separated by `---`; a single document has no separator."""
    return str(yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=110, explicit_start=len(documents) > 1))
