"""YAML that people write: no name stands twice in a mapping, and a mistake is named by its line."""

from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    """Reads YAML in which no name stands twice in one mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return the mapping. Raises YAMLError for a name that stands twice: the first value would be lost."""
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                line = key.start_mark.line + 1
                if key.value in lines:
                    problem = f"{key.value!r} stands twice, in lines {lines[key.value]} and {line}; put both into one"
                    raise yaml.MarkedYAMLError(problem=problem)
                lines[key.value] = line
        return super().construct_mapping(node, deep)


def read_yaml(text: str) -> Any:
    """Return the value of a YAML text.

    Raises ValueError for a text that is none, or with a name twice in one mapping; the message names the line.
    """
    try:
        return yaml.load(text, _Loader)  # a safe loader
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f"line {error.problem_mark.line + 1}: "
        raise ValueError(f"{line}{' '.join(str(error.problem).split())}") from None
    except yaml.reader.ReaderError as error:  # its position is a character's, and it knows no file
        number = text.count("\n", 0, error.position) + 1
        raise ValueError(f"line {number}: {chr(error.character)!r} is not allowed in YAML") from None
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
