"""Finds in source text what `eagle_pangu/speculation/indexing.py` is there for: tensors indexed by computed indices.

It reads syntax alone, so it knows a tensor by how a name was annotated or made, and only within a function. What it
cannot see, the index guard sees when the tests run (`tests/index_guards.py`). Host arrays are none of its business.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

OPERATORS = frozenset(
    {
        *("gather", "index_select", "scatter", "scatter_add", "scatter_reduce", "index_copy", "index_add"),
        *("index_fill", "index_put", "index_reduce", "take", "put", "masked_scatter", "one_hot", "embedding"),
    }
)
"""Operators that take an index tensor, without the underscore of those in place."""

AMBIGUOUS = frozenset({"gather", "take", "put"})
"""Those whose names others have too (`asyncio.gather`, `slots.take`): looked for where torch is imported."""

NO_TENSORS = ("asyncio", "np", "indexing")
"""Whose own `gather` is another, or the one to use."""

WRAPS = "take_along_dim"
"""Wraps a negative index by remainder, before any guard could see it."""

MAKERS = frozenset({"tensor", "as_tensor", "full", "full_like", "new_full", "new_tensor", "LongTensor", "IntTensor"})
FILLERS = frozenset({"fill_", "masked_fill", "masked_fill_", "where", "pad"})
"""Functions that a negative literal gets into a tensor by."""

FLOATS = frozenset({"float", "double", "half", "float16", "float32", "float64", "bfloat16"})

# What is no tensor, though it is asked of one or of torch.
_OF_TENSORS = frozenset({"tolist", "item", "numpy", "size", "dim", "numel", "stride", "split", "unbind", "aminmax"})
_OF_TORCH = frozenset({"device", "Generator", "equal", "finfo", "iinfo", "Size", "split", "is_tensor", "no_grad"})
_FIELDS = frozenset({"T", "mT", "values", "indices", "data", "grad"})
_OURS = frozenset({"select", "gather", "replaced", "index_tensor"})


class Finding(NamedTuple):
    """rule: "operator", "take_along_dim", "negative" or "advanced"."""

    line: int
    rule: str
    text: str


def findings(source: str) -> list[Finding]:
    """All that a module does wrong, by line."""
    tree = ast.parse(source)
    found = [*_operators(tree), *_wraps(tree), *_negatives(tree), *_advanced(tree)]
    return sorted({Finding(node.lineno, rule, ast.unparse(node)) for node, rule in found})


Found = Iterator[tuple[ast.expr | ast.stmt, str]]
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def _operators(tree: ast.Module) -> Found:
    """An operator by name, called or handed on, or asked for by a string."""
    imports = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    sought = OPERATORS if "torch" in imports else OPERATORS - AMBIGUOUS
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if node.attr.removesuffix("_") in sought and _last_name(node.value) not in NO_TENSORS:
                yield node, "operator"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            if any(alias.name.removesuffix("_") in OPERATORS for alias in node.names):
                yield node, "operator"
        elif isinstance(node, ast.Call) and _last_name(node.func) in ("getattr", "methodcaller"):
            texts = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
            if any(isinstance(text, str) and text.removesuffix("_") in sought for text in texts):
                yield node, "operator"


def _wraps(tree: ast.Module) -> Found:
    for node in ast.walk(tree):
        named = isinstance(node, ast.Name | ast.Attribute) and _last_name(node) == WRAPS
        asked = isinstance(node, ast.Constant) and node.value == WRAPS
        if named or asked:
            assert isinstance(node, ast.expr)
            yield node, WRAPS
        elif isinstance(node, ast.ImportFrom) and any(alias.name == WRAPS for alias in node.names):
            yield node, WRAPS


def _negatives(tree: ast.Module) -> Found:
    """A negative integer written into a tensor of integers, or of who knows what."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or _last_name(node.func) not in MAKERS | FILLERS:
            continue
        if isinstance(node.func, ast.Attribute) and _last_name(node.func.value) == "np":
            continue
        dtypes = {_last_name(keyword.value) for keyword in node.keywords if keyword.arg == "dtype"}
        values = [*node.args, *(keyword.value for keyword in node.keywords if keyword.arg in ("value", "fill_value"))]
        if not dtypes & FLOATS and any(_holds_negative(value) for value in values):
            yield node, "negative"


def _holds_negative(value: ast.expr) -> bool:
    """A negative integer stands in it as an element, or is it."""
    if isinstance(value, ast.List | ast.Tuple):
        return any(map(_holds_negative, value.elts))
    if isinstance(value, ast.BinOp):  # [-1] * n
        return _holds_negative(value.left) or _holds_negative(value.right)
    minus = isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.USub)
    return minus and isinstance(value.operand, ast.Constant) and type(value.operand.value) is int  # type: ignore[attr-defined]


def _advanced(tree: ast.Module) -> Found:
    fields = _tensor_fields(tree)
    functions = [node for node in ast.walk(tree) if isinstance(node, _Function)]
    makers = {node.name for node in functions if isinstance(node, ast.FunctionDef) and _gives_tensors(node)}
    for function in functions:
        names = _Names(function, fields, _OURS | makers)
        for node in ast.walk(function):
            if isinstance(node, ast.Subscript) and names.indexes_a_tensor(node):
                yield node, "advanced"


def _tensor_fields(tree: ast.Module) -> dict[str, str]:
    """Fields and properties that a class of the module declares to be tensors -> that class."""
    fields: dict[str, str] = {}
    for owner in ast.walk(tree):
        for node in owner.body if isinstance(owner, ast.ClassDef) else ():
            if isinstance(node, ast.AnnAssign) and _is_tensor_type(node.annotation):
                fields[_last_name(node.target)] = owner.name
            elif isinstance(node, ast.FunctionDef) and node.decorator_list and _is_tensor_type(node.returns):
                fields[node.name] = owner.name
    return fields


class _Names:
    """What a function's names stand for, as far as it shows: tensors, or numbers of the host."""

    def __init__(self, function: _Function, fields: dict[str, str], makers: frozenset[str]) -> None:
        self._fields = fields
        self._makers = makers
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        self._types = {each.arg: ast.unparse(each.annotation) for each in arguments if each.annotation}
        self._tensors = {each.arg for each in arguments if _is_tensor_type(each.annotation)}
        for node in ast.walk(function):
            if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if self.is_tensor(node.value):
                    self._tensors.update(name for target in targets for name in _names(target))

    def is_tensor(self, value: ast.expr) -> bool:
        """The expression gives one, to all that can be seen."""
        match value:
            case ast.Name(id=name):
                return name in self._tensors
            case ast.Attribute(value=owner, attr=name):
                if name in self._fields:
                    kind = self._fields[name]
                    return not isinstance(owner, ast.Name) or self._types.get(owner.id, kind) == kind
                return name in _FIELDS and self.is_tensor(owner)
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch" | "F"), attr=name)):
                return name not in _OF_TORCH
            case ast.Call(func=ast.Attribute(value=owner, attr=name), keywords=keywords):
                named_dimension = any(keyword.arg == "dim" for keyword in keywords)  # NumPy's have an axis
                return named_dimension or (name not in _OF_TENSORS and self.is_tensor(owner))
            case ast.GeneratorExp(elt=element) | ast.ListComp(elt=element):
                return self.is_tensor(element)
            case ast.Call(func=ast.Name(id=name)):
                return name in self._makers
            case ast.Subscript(value=table):
                return self.is_tensor(table)
            case ast.BinOp(left=left, right=right):
                return self.is_tensor(left) or self.is_tensor(right)
            case ast.Compare(left=left, comparators=others):
                return any(map(self.is_tensor, [left, *others])) and not isinstance(value.ops[0], ast.Is | ast.IsNot)
            case ast.UnaryOp(op=ast.USub() | ast.Invert(), operand=operand):
                return self.is_tensor(operand)
            case ast.IfExp(body=body, orelse=orelse):
                return self.is_tensor(body) or self.is_tensor(orelse)
        return False

    def indexes_a_tensor(self, node: ast.Subscript) -> bool:
        """By a tensor, whatever the table; or a tensor by what is a sequence of indices."""
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if any(map(self.is_tensor, parts)):
            return True
        return self.is_tensor(node.value) and any(map(_is_sequence, parts))


def _is_sequence(value: ast.expr) -> bool:
    """A list, a range or an array, written out."""
    if isinstance(value, ast.Call):
        made_by_numpy = isinstance(value.func, ast.Attribute) and _last_name(value.func.value) == "np"
        return made_by_numpy or _last_name(value.func) in ("list", "range", "sorted", "tuple")
    if isinstance(value, ast.Subscript):  # a part of an array
        return isinstance(value.slice, ast.Slice)
    return isinstance(value, ast.List | ast.ListComp | ast.Tuple)


def _gives_tensors(function: ast.FunctionDef) -> bool:
    """One, or several."""
    kind = function.returns
    if isinstance(kind, ast.Subscript) and isinstance(kind.slice, ast.Tuple) and _last_name(kind.value) == "tuple":
        return all(map(_is_tensor_type, kind.slice.elts))
    return _is_tensor_type(kind)


def _is_tensor_type(annotation: ast.expr | None) -> bool:
    return annotation is not None and ast.unparse(annotation) in ("torch.Tensor", "torch.Tensor | None", "Tensor")


def _last_name(node: ast.expr) -> str:
    """`c` of a.b.c, of c and of a.b.c(...)."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Call(func=func):
            return _last_name(func)
    return ""


def _names(target: ast.expr) -> list[str]:
    return [node.id for node in ast.walk(target) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
