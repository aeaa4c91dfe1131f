"""How many small mistakes in important modules the tests of each find: mutants killed, and those that survive.

    python benchmarks/mutation.py [--each 60] [--seed 0] [MODULE …]

A mutant is a module with one change: another comparison, operator, number or truth value, a
condition the other way round, a statement left out. The module's own tests run against it, in a
forked process that has loaded everything already: a change inside a function takes the place of its
code, and for any other change the package is loaded anew. A mutant is killed if one of them fails, or if they take far
more processor time than before, or ten minutes. `--each` mutants are drawn for each. Strings, annotations, docstrings,
decorators, raised messages and `__all__` are left as they are.
"""

import argparse
import ast
import contextlib
import copy
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import io
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
TESTS = {
    "rules/formula.py": "tests/rules/test_formula.py",
    "rules/bias_correction.py": (
        "tests/rules/test_formula.py tests/rules/test_rules.py tests/rules/test_reference.py"
    ),
    "gradients/norm_bound.py": "tests/gradients/test_norm_bound.py tests/gradients/test_opposition.py",
    "mixture/mixing.py": "tests/mixture/test_weights.py tests/mixture/test_mixing.py",
    "mixture/posterior.py": "tests/mixture/test_posterior.py",
    "mixture/prior.py": "tests/mixture/test_prior.py",
    "privacy/accountant.py": "tests/privacy/test_accountant.py",
    "privacy/masks.py": (
        "tests/privacy/test_agreement.py tests/privacy/test_member.py tests/privacy/test_masks.py"
        " tests/privacy/test_split_noise.py"
    ),
    "privacy/calls.py": "tests/privacy/test_calls.py tests/federation/test_everyone_jobs.py",
    "engines/peer/ledger.py": "tests/engines/peer/test_spending.py tests/engines/peer/test_ledger.py",
    "engines/engine.py": "tests/engines/test_engine.py tests/engines/test_asking.py",
    "recording/checkpoint.py": "tests/recording/test_run_folder.py tests/recording/test_checkpoint.py",
    "training/loop.py": (
        "tests/training/test_train.py tests/training/many/test_loop.py tests/training/test_own_code.py"
        " tests/training/test_hooks.py tests/everyone/test_together.py"
    ),
}
"""The modules, and what tests each."""
HEAVY = ("torch", "scipy.optimize", "scipy.stats", "pandas", "sklearn.linear_model")
"""What tests and modules import that takes long; a process that is forked has it."""
LONGEST = 600
"""Seconds by the clock that the tests of one module may take."""

OPPOSITES: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Pow: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.MatMult: ast.Mult, ast.USub: ast.UAdd,
}  # fmt: skip


def places(tree: ast.AST) -> Iterator[tuple[ast.AST, ast.AST | None, str]]:
    """Yield what may be changed: a node, the node to put there (None: leave it out), and the change in words."""
    for node in _meant(tree):
        other: Any = copy.deepcopy(node)
        if isinstance(node, ast.Compare):
            other.ops[0] = OPPOSITES[type(node.ops[0])]()
            yield node, other, f"{ast.unparse(node)} → {ast.unparse(other)}"
        elif (
            isinstance(node, ast.BinOp | ast.BoolOp | ast.UnaryOp | ast.AugAssign)
            and type(node.op) in OPPOSITES
        ):
            other.op = OPPOSITES[type(node.op)]()
            yield node, other, f"{ast.unparse(node)} → {ast.unparse(other)}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
            value = not node.value if isinstance(node.value, bool) else node.value + 1
            yield node, ast.copy_location(ast.Constant(value), node), f"{node.value} → {value}"
        elif isinstance(node, ast.If | ast.IfExp | ast.While):
            other.test = ast.UnaryOp(ast.Not(), other.test)
            yield node, other, f"if {ast.unparse(node.test)} → if not"
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield node, None, f"{ast.unparse(node)} → left out"


def _meant(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that compute something."""
    if isinstance(node, ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom | ast.arg):
        return
    yield node
    skipped = {"decorator_list", "annotation", "returns", "type_params"}
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "warn"
    ):
        skipped |= {"args", "keywords"}
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and name not in skipped:
                yield from _meant(child)


def mutant(tree: ast.Module, number: int) -> tuple[ast.Module, bool, str]:
    """Return a copy of a module with one change, whether that is inside a function, and where and what it is."""
    changed = copy.deepcopy(tree)
    old, new, words = next(place for n, place in enumerate(places(changed)) if n == number)
    functions = (node for node in ast.walk(changed) if isinstance(node, ast.FunctionDef))
    inside = any(node is old for one in functions for part in one.body for node in ast.walk(part))

    class Change(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> Any:
            if node is old:
                return ast.copy_location(ast.Pass(), node) if new is None else new
            return self.generic_visit(node)

    where = f"{getattr(old, 'lineno', 0)}: {words}"
    return ast.fix_missing_locations(Change().visit(changed)), inside, where


class Mutated(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import one module from a changed tree, and all others as they are."""

    def __init__(self, name: str, path: Path, tree: ast.Module) -> None:
        self.name, self.path, self.tree = name, path, tree

    def find_spec(
        self, fullname: str, path: Any, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Claim the one module."""
        if fullname != self.name:
            return None
        return importlib.util.spec_from_file_location(fullname, self.path, loader=self)

    def exec_module(self, module: ModuleType) -> None:
        """Run the changed tree."""
        exec(compile(self.tree, str(self.path), "exec"), module.__dict__)  # noqa: S102


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of every function in a module."""
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield one
            yield from _codes(one)


def _put_in_place(path: Path, tree: ast.Module) -> None:
    """Give the functions of a module that is loaded the code that they have in this tree."""
    made = compile(tree, str(path), "exec")
    codes = {(one.co_qualname, one.co_firstlineno): one for one in _codes(made)}
    for function in gc.get_objects():
        if isinstance(function, FunctionType):
            old = function.__code__
            if old.co_filename == str(path):
                new = codes[old.co_qualname, old.co_firstlineno]
                if new.co_freevars == old.co_freevars:  # `__class__` where it calls `super()`
                    function.__code__ = new


def _load_anew(module: str, path: Path, tree: ast.Module) -> None:
    """Let the package and its tests be imported anew, one module from this tree."""
    for name in list(sys.modules):
        if name.partition(".")[0] in {"coterie", "tests", "conftest"}:
            del sys.modules[name]
    name = "coterie." + module.removesuffix(".py").replace("/", ".")
    sys.meta_path.insert(0, Mutated(name, path, tree))


OPTIONS = ("-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist")


def fails(
    module: str, tree: ast.Module, tests: Sequence[str], limit: int, *, inside: bool = True
) -> bool:
    """Return whether tests fail with this tree in the place of the module, or take more processor time.

    `inside`: it differs inside functions only.
    """
    child = os.fork()
    if not child:
        os.setpgid(0, 0)
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        path = ROOT / "src" / "coterie" / module
        _put_in_place(path, tree) if inside else _load_anew(module, path, tree)
        os._exit(int(bool(pytest.main([*OPTIONS, *tests]))))
    end = time.monotonic() + LONGEST
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return bool(status)
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


def _processor_time() -> float:
    """Return the processor time of the processes that were waited for, which other work does not move."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime


def measure(module: str, each: int, seed: int) -> tuple[int, int, list[str]]:
    """Return how many mutants of a module were tried and killed, and those that survive."""
    path = ROOT / "src" / "coterie" / module
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tests = [*(str(ROOT / name) for name in TESTS[module].split()), str(path)]
    with contextlib.redirect_stdout(io.StringIO()):  # so that forked processes have imported them
        pytest.main([*OPTIONS, "--collect-only", *tests])
    before = _processor_time()
    if fails(module, tree, tests, LONGEST):
        sys.exit(f"the tests of {module} fail as it is: {' '.join(tests)}")
    limit = 10 + 5 * round(_processor_time() - before)
    n = sum(1 for _ in places(tree))
    tried = sorted(random.Random(seed).sample(range(n), min(each, n)))  # noqa: S311
    alive = []
    for number in tried:
        changed, inside, where = mutant(tree, number)
        if not fails(module, changed, tests, limit, inside=inside):
            alive.append(f"{module}:{where}")
    return len(tried), len(tried) - len(alive), alive


def main() -> None:
    """Print a line for each module, and the survivors."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("modules", nargs="*", default=list(TESTS), metavar="MODULE")
    parser.add_argument("--each", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.chdir(ROOT)
    for name in HEAVY:
        importlib.import_module(name)
    total, killed = 0, 0
    for module in options.modules:
        tried, found, alive = measure(module, options.each, options.seed)
        total, killed = total + tried, killed + found
        print(
            f"{module:32} {found:3} of {tried:3} killed, {found / tried:.0%}",
            *alive,
            sep="\n    ",
            flush=True,
        )
    print(f"{'all':32} {killed:3} of {total:3} killed, {killed / total:.0%}")


if __name__ == "__main__":
    main()
