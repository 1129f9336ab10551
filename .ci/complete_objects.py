"""Check that objects are complete at construction: no file assigns a field of another file's object.

Usage: python .ci/complete_objects.py. Prints each assignment in the rooms of CHECKED, and exits with 1 if there is any.
`x.y = ...` is refused unless x is `self`, or a local of the same function that was made there, or y is a field of a
record that the same file declares. `RECORDS` lists what else is meant to change.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
CHECKED = ("workers/model", "workers/draft", "workers/replica", "cluster/dispatch", "router", "kvtransfer")
MODULES = "a module of transformers, changed in place: its layers are cut or replaced"
REQUEST = "a request of the small model changes while it is computed"
LEARNT = "what steps cost is measured with the engine, and learnt as it runs"
RECORDS = {  # an object, or one field of it: why it may change
    **dict.fromkeys(
        ("module", "mixer", "attention", "norm", "linear", "decoder", "experts", "mixture", "mixture.experts"), MODULES
    ),
    **dict.fromkeys(("model.lm_head", "parameter", "replacement.module", "rotary"), MODULES),
    **dict.fromkeys(
        ("model.config.rms_norm_eps", "tokenizer", "backend", "backend.model"), "written to a converted checkpoint"
    ),
    **dict.fromkeys(("part.request", "self.seen", "stream.seen", "other"), REQUEST),
    **dict.fromkeys(
        ("engine.scheduler.forecast.scored_factor", "self.scheduler.encoding.cost", "self.pipeline.deadline"), LEARNT
    ),
    **dict.fromkeys(("shipment.figures", "expected.figures"), "the figures of a transfer are counted while it runs"),
    **dict.fromkeys(("logging", "logging.config", "serve_replica"), "a library, which has no setting for it"),
    **dict.fromkeys(("message", "self._message"), "a message is filled until its reader fetches it"),
    "delta": "a delta of the scheduler gets what the sampler kept for its request",
    "row.allowed": "the tokens that a grammar allows, found again for each step",
    "connection.is_connecting": "a socket that listens has connected",
    "self.part": "the cut of a model writes its part, which no process uses yet",
    "pictures": "the pictures of a step are encoded, or received, while it runs",
    "_current": "thread-local: the forward pass that runs",
    "modeling_gguf_pytorch_utils.tqdm": "no progress bar while the default model is converted",
}


def outside(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield line, object and field of each assignment to a field of an object that was not made there."""
    tree = ast.parse(source)
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    own = {ast.unparse(each.target) for cls in classes for each in cls.body if isinstance(each, ast.AnnAssign)}
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        made = {"self", "cls"}
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                made |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        for node in ast.walk(function):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
                for target in targets:
                    yield from (each for each in _fields(target, made) if each[2] not in own)


def _fields(target: ast.expr | None, made: set[str]) -> Iterator[tuple[int, str, str]]:
    for each in target.elts if isinstance(target, ast.Tuple) else [target]:
        if isinstance(each, ast.Attribute) and (name := ast.unparse(each.value)) not in made:
            yield each.lineno, name, each.attr


def main() -> int:
    """Print every assignment from outside. Return the exit status."""
    found = set()
    for path in (path for room in CHECKED for path in sorted((ROOT / room).rglob("*.py"))):
        found |= {(path.relative_to(ROOT).as_posix(), *each) for each in outside(path.read_text())}
    wrong = sorted(each for each in found if not {each[2], f"{each[2]}.{each[3]}"} & RECORDS.keys())
    for path, line, name, field in wrong:
        print(f"{path}:{line}: {name}.{field} is assigned outside the object: pass it when the object is made")
    print(f"{len(wrong)} fields assigned from outside")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
