"""Small faults in a source text: each is one edit, like a typing mistake."""

import ast
import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_FLIPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.Add,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
_RENAMED = {"min": "max", "max": "min", "any": "all", "all": "any"}
_TRANSPARENT = {"reversed", "sorted"}
_NO_TARGETS = ast.Assert | ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom
"""Not mutated: assertions, messages, and code that would fail at import."""


@dataclass(frozen=True)
class Mutant:
    path: Path
    """Relative to the root of the tree."""
    function: str
    """The function it is in."""
    line: int
    """The line at which that function begins, or the outermost one around it."""
    before: str
    after: str

    @property
    def removed(self) -> str:
        """The lines that the edit changes, as they were, joined into one."""
        return _lines_not_in(self.before, self.after)

    @property
    def added(self) -> str:
        """These lines with the fault."""
        return _lines_not_in(self.after, self.before)

    def diff(self) -> str:
        """Return the edit as a unified diff."""
        name = str(self.path)
        texts = self.before.splitlines(), self.after.splitlines()
        return "\n".join(difflib.unified_diff(*texts, name, name, n=2, lineterm=""))


def _lines_not_in(text: str, other: str) -> str:
    """Return the lines of `text` from the first to the last that differ from those of `other`."""
    lines, others = text.splitlines(), other.splitlines()
    while lines and others and lines[-1] == others[-1]:
        lines.pop()
        others.pop()
    is_same = [line == there for line, there in zip(lines, others, strict=False)]
    first = is_same.index(False) if False in is_same else len(is_same)
    return " ".join(line.strip() for line in lines[first:])


def mutants_of(path: Path, source: str) -> Iterator[Mutant]:
    text = source.encode()
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node, new, function, line in _edits(ast.parse(source), "", 0):
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        yield Mutant(
            path, function, line, source, (text[:start] + new.encode() + text[end:]).decode()
        )


class _Edit(NamedTuple):
    node: ast.stmt | ast.expr
    text: str
    """Replaces the node."""
    function: str
    line: int


def _edits(node: ast.AST, function: str, line: int) -> Iterator[_Edit]:
    """Yield the edits inside a node. `function` is empty outside functions: nothing is edited
    there, because constants are choices."""
    if isinstance(node, ast.FunctionDef):
        function = node.name
        line = line or min(part.lineno for part in [node, *node.decorator_list])
    elif function:
        if isinstance(node, ast.stmt) and function != "__init__" and _can_go(node):
            yield _Edit(node, "pass", function, line)
        if isinstance(node, ast.If | ast.While):
            yield _Edit(node.test, f"(not ({ast.unparse(node.test)}))", function, line)
        if isinstance(node, _NO_TARGETS) or (
            isinstance(node, ast.keyword) and node.arg == "strict"
        ):
            return
        if isinstance(node, ast.expr):
            for new in _variants(node):
                yield _Edit(node, f"({ast.unparse(new)})", function, line)
    for child in _children(node):
        yield from _edits(child, function, line)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what a node consists of, without types and decorators."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases"):
            continue
        if isinstance(node, ast.FunctionDef) and name == "args":
            continue  # defaults are evaluated outside the function
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield child


def _can_go(node: ast.stmt) -> bool:
    """Whether to drop a statement. Assignments to names stay, because without them every test
    fails."""
    match node:
        case ast.Assign(targets=[ast.Name()]):
            return False
        case ast.Expr(value=value):
            return not isinstance(value, ast.Constant)
        case ast.Return(value=value):
            return value is None
    kinds = ast.Assign | ast.AugAssign | ast.Delete | ast.Raise | ast.Break | ast.Continue
    return isinstance(node, kinds)


def _variants(node: ast.expr) -> Iterator[ast.expr]:
    """Yield faulty variants of an expression."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _FLIPPED:
            yield ast.Compare(left, [_FLIPPED[type(op)]()], [right])
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _FLIPPED:
            yield ast.BinOp(left, _FLIPPED[type(op)](), right)
        case ast.BoolOp(op=op, values=values):
            yield ast.BoolOp(_FLIPPED[type(op)](), values)
            yield from values
        case ast.UnaryOp(operand=operand):
            yield operand
        case ast.Constant(value=bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(value=int() as value):
            yield ast.Constant(value + 1)
        case ast.IfExp(body=body, orelse=orelse):
            yield from (body, orelse)
        case ast.Subscript(value=value, slice=ast.Slice(lower=lower, upper=upper), ctx=ctx):
            if lower is not None:
                yield ast.Subscript(value, ast.Slice(None, upper), ctx)
            if upper is not None:
                yield ast.Subscript(value, ast.Slice(lower, None), ctx)
        case ast.Call(func=ast.Name(id=name), args=[inner]) if name in _TRANSPARENT:
            yield inner
        case ast.Call(func=ast.Name(id=name), args=args, keywords=words) if name in _RENAMED:
            yield ast.Call(ast.Name(_RENAMED[name]), args, words)
        case ast.Call(func=ast.Attribute(value=value, attr="popleft")):
            yield ast.Call(ast.Attribute(value, "pop"), [], [])
        case ast.Call(func=func, args=[first, second, *rest], keywords=words):
            if ast.dump(first) != ast.dump(second):
                yield ast.Call(func, [second, first, *rest], words)
        case ast.ListComp(elt=elt, generators=[ast.comprehension(ifs=[_]) as only]):
            yield ast.ListComp(elt, [ast.comprehension(only.target, only.iter, [], 0)])
        case ast.GeneratorExp(elt=elt, generators=[ast.comprehension(ifs=[_]) as only]):
            yield ast.GeneratorExp(elt, [ast.comprehension(only.target, only.iter, [], 0)])
