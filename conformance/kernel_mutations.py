"""Small changes of Triton kernels, made on their source: what could a slip of the pen have written instead?

From the text of a module to one changed text per mutant. Only the bodies of `@triton.jit` functions are changed, one
expression at a time, as text at the place that the syntax tree names, so that everything else keeps its line. Knows
nothing of what a kernel does; `conformance.kernel_mutants` runs the mutants.

Changes that cannot matter by construction are not made: another `other` of a load whose value goes nowhere but to
loads and stores under the same mask, and pointers dropped from pointer arithmetic, which is a type error.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

COMPARISON, CONSTANT, TERM, OPERATOR = "comparison", "constant", "dropped term", "operator"
OFFSET, MASK, OTHER, POINTER = "offset", "mask", "other", "swapped pointer"
EXTREME, BRANCH, STATEMENT, WIDENING, TIE = "min/max", "where", "dropped statement", "widening", "tie"

_COMPARISONS = {
    ast.Lt: ("<=", ">="), ast.LtE: ("<", ">"), ast.Gt: (">=", "<="), ast.GtE: (">", "<"), ast.Eq: ("!=",),
    ast.NotEq: ("==",),
}  # fmt: skip
_OPERATORS = {
    ast.Add: "-", ast.Sub: "+", ast.BitAnd: "|", ast.BitOr: "&", ast.LShift: ">>", ast.RShift: "<<", ast.FloorDiv: "%",
    ast.Mod: "//",
}  # fmt: skip
# Of these the right operand says how far or by how much; it is nothing on its own.
_ONE_SIDED = (ast.Sub, ast.FloorDiv, ast.Mod, ast.LShift, ast.RShift, ast.Div)
_EXTREMES = {"minimum": "maximum", "maximum": "minimum", "max": "min", "min": "max"}
_WRITES = ("store", "atomic_add", "atomic_or")
_ACCESSES = ("load", *_WRITES)
# Calls whose numbers name axes and shapes: another number is no kernel at all.
_ACROSS_LANES = {"sum", "max", "min", "argmax", "argmin", "cumsum", "dot"}
_SHAPES = {*_ACROSS_LANES, "arange", "zeros", "static_range"}


@dataclass(frozen=True, slots=True)
class KernelMutant:
    """One changed file. `old` and `new` are the changed expression; `line` and `column` say where it starts."""

    path: str
    function: str
    line: int
    column: int
    kind: str
    old: str
    new: str
    original: str  # the file's text
    source: str  # and what it is changed to

    @property
    def id(self) -> str:
        """Names the change by its words, not by its line number, so that it stays when lines move."""
        code = self.original.splitlines()[self.line - 1].partition("  # ")[0].strip()
        return f"{self.function}: {code}: {' '.join(self.old.split())} => {' '.join(self.new.split())}"


@dataclass(frozen=True, slots=True)
class JitFunction:
    """A `@triton.jit` function of a module, and the names it calls."""

    name: str
    calls: frozenset[str]


def jit_functions(text: str) -> list[JitFunction]:
    """The jitted functions of a module, in order."""
    return [JitFunction(f.name, frozenset(_called(f))) for f in _functions(ast.parse(text))]


def mutants_of(path: str, text: str) -> list[KernelMutant]:
    """Every mutant of the kernels in a module, in order of its text, each changed text once."""
    seen, found = {text}, []
    functions = _functions(ast.parse(text))
    lane_wise = {f.name for f in functions if not any(_tl(n, *_ACCESSES, *_ACROSS_LANES) for n in ast.walk(f))}
    for function in functions:
        for mutant in _Mutator(path, text, function, lane_wise).mutants():
            if mutant.source not in seen:
                seen.add(mutant.source)
                found.append(mutant)
    return sorted(found, key=lambda m: (m.line, m.column))


def _functions(tree: ast.Module) -> list[ast.FunctionDef]:
    return [
        f for f in tree.body
        if isinstance(f, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in f.decorator_list)
    ]  # fmt: skip


def _called(node: ast.AST) -> Iterator[str]:
    for n in ast.walk(node):
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Name):
            yield n.func.id


def _tl(node: ast.AST, *names: str) -> bool:
    """Is it a call `tl.name(…)`?"""
    f = node.func if isinstance(node, ast.Call) else None
    return isinstance(f, ast.Attribute) and isinstance(f.value, ast.Name) and f.value.id == "tl" and f.attr in names


def _may_go(node: ast.AST) -> bool:
    """A statement without which there still is a kernel."""
    if isinstance(node, ast.Return):
        return node.value is None
    return isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and _tl(node.value, *_WRITES))


def _base(node: ast.AST) -> ast.Name | None:
    """The leftmost name of a sum: the pointer of pointer arithmetic."""
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        node = node.left
    return node if isinstance(node, ast.Name) else None


class _Mutator:
    """Makes the mutants of one function."""

    def __init__(self, path: str, text: str, function: ast.FunctionDef, lane_wise: set[str]) -> None:
        """lane_wise: functions that may be called with garbage in lanes that nobody looks at."""
        self.path, self.text, self.function, self.lane_wise = path, text, function, lane_wise
        self.data = text.encode()
        self.starts = [0]
        for line in self.data.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.parent = {child: node for node in ast.walk(function) for child in ast.iter_child_nodes(node)}
        self.assigned = {
            n.targets[0].id: n.value
            for n in ast.walk(function)
            if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name)
        }
        self.pointers = self._pointer_names()
        self.pointer_arguments = [a.arg for a in function.args.args if a.arg in self.pointers]

    def mutants(self) -> Iterator[KernelMutant]:
        body = self.function.body
        has_docstring = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
        for statement in body[has_docstring:]:
            for node in ast.walk(statement):
                for kind, new in self._changes(node):
                    yield self._made(node, kind, new)

    def _made(self, node: ast.AST, kind: str, new: str) -> KernelMutant:
        first, last = self._span(node)
        source = (self.data[:first] + new.encode() + self.data[last:]).decode()
        return KernelMutant(
            self.path, self.function.name, node.lineno, node.col_offset, kind, self._text(node), new,  # type: ignore[attr-defined]
            self.text, source,
        )  # fmt: skip

    def _span(self, node: ast.AST) -> tuple[int, int]:
        return (
            self.starts[node.lineno - 1] + node.col_offset,  # type: ignore[attr-defined]
            self.starts[node.end_lineno - 1] + node.end_col_offset,  # type: ignore[attr-defined]
        )

    def _text(self, node: ast.AST) -> str:
        first, last = self._span(node)
        return self.data[first:last].decode()

    def _pointer_names(self) -> set[str]:
        """Arguments and variables that hold pointers: what loads and stores start from, and what that came from."""
        names, todo = set(), [n.args[0] for n in ast.walk(self.function) if _tl(n, *_ACCESSES)]
        while todo:
            name = _base(todo.pop())
            if name is not None and name.id not in names:
                names.add(name.id)
                if name.id in self.assigned:
                    todo.append(self.assigned[name.id])
        return names

    def _changes(self, node: ast.AST) -> Iterator[tuple[str, str]]:
        """(kind, new text) of each way of getting this node wrong."""
        if isinstance(node, ast.Compare):
            left, right = self._text(node.left), self._text(node.comparators[0])
            for sign in _COMPARISONS.get(type(node.ops[0]), ()):
                yield COMPARISON, f"({left}) {sign} ({right})"
        elif isinstance(node, ast.BinOp):
            yield from self._of_operation(node)
        elif isinstance(node, ast.Constant):
            yield from self._of_constant(node)
        elif isinstance(node, ast.UnaryOp) and not isinstance(node.operand, ast.Constant):
            yield OPERATOR, f"({self._text(node.operand)})"
        elif isinstance(node, ast.Name) and node.id in self.pointer_arguments and len(self.pointer_arguments) > 1:
            i = self.pointer_arguments.index(node.id)
            if isinstance(node.ctx, ast.Load) and not isinstance(self.parent[node], ast.Attribute | ast.Call):
                yield POINTER, self.pointer_arguments[(i + 1) % len(self.pointer_arguments)]
        elif isinstance(node, ast.Call):
            yield from self._of_call(node)
        elif _may_go(node):
            yield STATEMENT, "pass"

    def _of_operation(self, node: ast.BinOp) -> Iterator[tuple[str, str]]:
        left, right = self._text(node.left), self._text(node.right)
        yield TERM, f"({left})"
        base = _base(node)
        is_pointer = base is not None and base.id in self.pointers
        if not is_pointer and not isinstance(node.op, _ONE_SIDED):
            yield TERM, f"({right})"
        if type(node.op) in _OPERATORS:
            yield OPERATOR, f"({left}) {_OPERATORS[type(node.op)]} ({right})"

    def _of_constant(self, node: ast.Constant) -> Iterator[tuple[str, str]]:
        above = self.parent[node]
        if isinstance(above, ast.UnaryOp):
            above = self.parent[above]
        if isinstance(above, ast.keyword):  # `other` is changed with its load
            if isinstance(node.value, bool) and "tie_break" in (above.arg or ""):
                yield TIE, str(not node.value)
            return
        if isinstance(node.value, bool) or not isinstance(node.value, int | float):
            if node.value == "-inf":
                yield CONSTANT, '"inf"'
            return
        if isinstance(above, ast.Call) and _tl(above, *_SHAPES):
            return
        for change in (1, -1):
            yield CONSTANT, repr(node.value + change)

    def _of_call(self, node: ast.Call) -> Iterator[tuple[str, str]]:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if name == "to" and self._text(node.args[0]) == "tl.int64":
            yield WIDENING, f"({self._text(node.func.value)})"  # type: ignore[attr-defined]
        elif _tl(node, *_ACCESSES):
            yield from self._of_access(node)
        elif _tl(node, *_EXTREMES):
            yield EXTREME, self._call(node, function=f"tl.{_EXTREMES[name]}")
            if name in ("minimum", "maximum"):
                yield from ((TERM, f"({self._text(a)})") for a in node.args)
        elif _tl(node, "where"):
            condition, a, b = (self._text(x) for x in node.args)
            yield BRANCH, f"tl.where({condition}, {b}, {a})"

    def _of_access(self, node: ast.Call) -> Iterator[tuple[str, str]]:
        place = self._text(node.args[0])
        yield OFFSET, self._call(node, {0: f"({place}) + 1"})
        yield OFFSET, self._call(node, {0: f"({place}) - 1"})
        keywords = {k.arg: k.value for k in node.keywords}
        if "mask" in keywords:
            yield MASK, self._call(node, without=("mask", "other"))
        other = keywords.get("other")
        if other is not None and not self._value_is_masked_again(node, self._text(keywords["mask"])):
            yield OTHER, self._call(node, {"other": "float('inf')" if "inf" in self._text(other) else _bumped(other)})

    def _call(
        self, node: ast.Call, changed: dict[int | str, str] | None = None, function: str | None = None,
        without: tuple[str, ...] = (),
    ) -> str:  # fmt: skip
        changed = changed or {}
        args = [changed.get(i, self._text(a)) for i, a in enumerate(node.args)]
        args += [
            f"{k.arg}={changed.get(k.arg or '', self._text(k.value))}" for k in node.keywords if k.arg not in without
        ]
        return f"{function or self._text(node.func)}({', '.join(args)})"

    def _value_is_masked_again(self, load: ast.Call, mask: str) -> bool:
        """Does a load's value go to loads and stores under the same mask and nowhere else, lane by lane?"""
        return self._use_is_masked(load, mask, load.lineno)

    def _use_is_masked(self, use: ast.AST, mask: str, line: int) -> bool:
        while not isinstance(use, ast.stmt):
            before, use = use, self.parent[use]
            if _tl(use, "where") and before is not use.args[0] and self._text(use.args[0]) == mask:  # type: ignore[attr-defined]
                return before is use.args[1]  # type: ignore[attr-defined]
            if _tl(use, *_ACCESSES):
                return any(k.arg == "mask" and self._text(k.value) == mask for k in use.keywords)  # type: ignore[attr-defined]
            if _tl(use, *_ACROSS_LANES):
                return False
            if isinstance(use, ast.Call) and isinstance(use.func, ast.Name) and use.func.id not in self.lane_wise:
                return False
        if isinstance(use, ast.Assign) and isinstance(use.targets[0], ast.Name):
            name = use.targets[0].id
        elif isinstance(use, ast.AugAssign) and isinstance(use.target, ast.Name):
            name = use.target.id
        else:
            return False
        # The uses of this value of the name: up to the next assignment.
        names = [n for n in ast.walk(self.function) if isinstance(n, ast.Name) and n.id == name and n.lineno > line]
        stores = (n for n in names if isinstance(n.ctx, ast.Store) and not isinstance(self.parent[n], ast.AugAssign))
        end = min((n.lineno for n in stores), default=1 << 30)
        uses = [n for n in names if n.lineno <= end and (isinstance(n.ctx, ast.Load) or n.lineno < end)]
        return bool(uses) and all(self._use_is_masked(n, mask, n.lineno) for n in uses)


def _bumped(value: ast.expr) -> str:
    """Another number of the same type."""
    return f"({ast.unparse(value)}) + 1"
