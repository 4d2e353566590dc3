"""One file out of several of our modules: what a module needs of the others, and nothing else."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IMPORTS = ast.Import, ast.ImportFrom


def flat(path):
    """The code of a module behind all that it needs of our other modules. No name may be in two of them."""
    modules = {}  # file: its statements; those that others need come first
    collect(path, modules)
    makers = {}  # name: the statements that make it
    for statements in modules.values():
        definitions = {name for s in statements if not isinstance(s, IMPORTS) for name in made(s)}
        twice = [n for n in definitions & makers.keys() if not isinstance(makers[n][0], IMPORTS)]
        assert not twice, f"two of our modules have {twice}"
        for statement in statements:
            for name in made(statement):
                makers.setdefault(name, []).append(statement)
    needed, waiting = set(), [name for statement in modules[path] for name in made(statement)]
    while waiting:
        name = waiting.pop()
        if name not in needed:
            needed.add(name)
            used = (node for statement in makers.get(name, ()) for node in ast.walk(statement))
            waiting += [node.id for node in used if isinstance(node, ast.Name)]
    kept = [s for statements in modules.values() for s in statements if needed.intersection(made(s))]
    imports = sorted({ast.unparse(s) for s in kept if isinstance(s, IMPORTS)})
    return "\n".join(imports) + "\n" + "".join(f"\n\n{ast.unparse(s)}\n" for s in kept if not isinstance(s, IMPORTS))


def collect(path, modules):
    statements, aliases = [], set()
    for node in ast.parse(path.read_text()).body:
        ours = imported(node) if isinstance(node, IMPORTS) else {}
        aliases |= ours.keys()
        for file in ours.values():
            if file not in modules:
                collect(file, modules)
        if not ours and made(node):
            statements.append(node)
    modules[path] = [Flattened(aliases).visit(statement) for statement in statements]


def imported(node):
    """The files of our modules that an import names, by the name that the module has from then on, if any."""
    if isinstance(node, ast.ImportFrom) and file_of(node.module):
        return {None: file_of(node.module)}
    package = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
    return {alias.name: file_of(package + alias.name) for alias in node.names if file_of(package + alias.name)}


def file_of(module):
    file = ROOT / (module.replace(".", "/") + ".py")
    return file if file.is_file() else None


def made(statement):
    """The names that a top-level statement makes."""
    if isinstance(statement, IMPORTS):
        return [alias.asname or alias.name.partition(".")[0] for alias in statement.names]
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return [statement.name]
    targets = getattr(statement, "targets", [getattr(statement, "target", None)])
    return [node.id for target in targets if target for node in ast.walk(target) if isinstance(node, ast.Name)]


class Flattened(ast.NodeTransformer):
    """MODULE.name becomes name. A method that imports one of our modules is left out: it serves this project only."""

    def __init__(self, aliases):
        self.aliases = aliases

    def visit_Attribute(self, node):
        self.generic_visit(node)
        of_module = isinstance(node.value, ast.Name) and node.value.id in self.aliases
        return ast.Name(node.attr, node.ctx) if of_module else node

    def visit_FunctionDef(self, node):
        self.generic_visit(node)
        return None if any(isinstance(inner, IMPORTS) and imported(inner) for inner in ast.walk(node)) else node
