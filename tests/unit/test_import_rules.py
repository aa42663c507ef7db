"""Imports point down only; the doors to kernels, host globals and the environment stay few."""

import ast
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = "megatron_gdn"

RULE_PARTS = ("torch", "fla", "flash_qla", "gates")
ATTENTION_KERNELS = ("torch", "flash", "cudnn", "cudnn_packed", "merge")

# What the lower modules may import of ours, and what the layers may not. "a.*" stands for all in package a.
ALLOWED = {
    "cp_layout": set(),
    "rows": {"cp_layout"},
    "stream": {"cp_layout", "rows"},
    "cp_comm": {"cp_layout", "rows", "stream"},
    "ops.attention": {"cp_layout", "rows"} | {f"ops.attention_{kernel}" for kernel in ATTENTION_KERNELS},
    # The doors, and the kernels behind them.
    "ops.gated_delta_rule": {"rows", *(f"ops.gated_delta_rule_{part}" for part in RULE_PARTS)},
    "ops.causal_conv": {"cp_layout", "rows", "ops.causal_conv_triton"},
    "ops.norms": {"cp_layout", "rows", "ops.norms_triton", "ops.triton_rows"},
    "ops.qk_norm_rope": {"ops.qk_norm_rope_triton", "ops.norms", "ops.triton_rows"},
    "ops.*": {"cp_layout", "rows", "ops.triton_math", "ops.triton_rows"},
    # It sees kernels through their doors, as layers do, and no layer.
    "self_test.*": {"rows", "ops.*", "self_test.*"},
}
_ABOVE_LAYERS = {"layer_specs", "checkpoint", "checkpoint.*", "planner", "prepare_data", "cpu", "__main__"}
_ABOVE_LAYERS |= {"doctor", "self_test", "self_test.*"}
DENIED = {
    "gated_delta_net": _ABOVE_LAYERS | {"attention"},
    "attention": _ABOVE_LAYERS | {"gated_delta_net"},
}
KERNELS = ("fla", "flash_qla", "tilelang", "triton", "cudnn")
PARALLEL_STATE = ("megatron.core.parallel_state", "megatron.core.mpu")
PARALLEL_STATE_MODULES = {"checkpoint.huggingface.verify"}  # a world of its own, whose groups it makes
TRAINING = ("megatron.training",)
TRAINING_MODULES = {"cpu"}  # it adapts the host to a machine without a GPU
ENVIRON_MODULES = {"cpu", "__main__"}
ENVIRON = ("environ", "environb", "getenv", "putenv", "unsetenv")


def _matches(name: str, patterns) -> bool:
    return any(name == p or (p.endswith(".*") and name.startswith(p[:-1])) for p in patterns)


def _within(name: str, packages) -> bool:
    return any(name == p or name.startswith(p + ".") for p in packages)


def module_name(path: Path) -> str:
    """Dotted name below the package: `ops.norms`; "" for the package itself."""
    parts = path.relative_to(ROOT / PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_files() -> dict[str, Path]:
    return {module_name(p): p for p in sorted((ROOT / PACKAGE).rglob("*.py"))}


def imports_of(source: str, package: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of all that `source` imports, at any depth; `from a import b` gives `a.b`.

    Args:
        source: Python text.
        package: dotted name that relative imports start from; "" for a script.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = parents[: len(parents) - node.level + 1] if node.level else []
            base = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__"):
                yield node.lineno, str(node.args[0].value)


def environ_lines(source: str) -> Iterator[int]:
    """Lines that reach for the process environment."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in ENVIRON:
            if isinstance(node.value, ast.Name) and node.value.id == "os":
                yield node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            if any(alias.name in ENVIRON for alias in node.names):
                yield node.lineno


def our_module(name: str, known) -> str | None:
    """The module of ours that importing `name` loads; None if it is not ours.

    `megatron_gdn.rows.Rows` loads `rows`; `megatron_gdn.Qwen35Config` loads the package itself, "".
    """
    if not _within(name, [PACKAGE]):
        return None
    parts = name.split(".")[1:]
    for end in range(len(parts), 0, -1):
        if ".".join(parts[:end]) in known:
            return ".".join(parts[:end])
    return parts[0] if len(parts) > 1 else ""  # `megatron_gdn.new.Thing`: a module still to be written


def faults_of(module: str, source: str, known, *, is_package: bool = False) -> list[str]:
    """Every rule that `source`, as module `module` of the package, breaks."""
    full = f"{PACKAGE}.{module}".rstrip(".")
    package = full if is_package else full.rpartition(".")[0]
    faults = []
    allowed = next((names for m, names in ALLOWED.items() if _matches(module, [m])), None)
    denied = DENIED.get(module, ())
    for line, name in imports_of(source, package):
        ours = our_module(name, known)
        if ours == "" and not is_package:
            faults.append(f"{module}:{line} imports {name} from the package itself; name the module")
        elif ours and allowed is not None and not _matches(ours, allowed):
            faults.append(f"{module}:{line} imports {ours}; of ours it may: {sorted(allowed)}")
        elif ours and _matches(ours, denied):
            faults.append(f"{module}:{line} imports {ours}, which is not below it")
        if _within(name, KERNELS) and not module.startswith("ops."):
            faults.append(f"{module}:{line} imports {name}; only ops may")
        if _within(name, PARALLEL_STATE) and module not in PARALLEL_STATE_MODULES:
            faults.append(f"{module}:{line} imports {name}; groups come from pg_collection")
        if _within(name, TRAINING) and module not in TRAINING_MODULES:
            faults.append(f"{module}:{line} imports {name}; only pretrain_qwen35.py may")
        if module == "cp_layout" and ours is None and name.partition(".")[0] not in sys.stdlib_module_names:
            faults.append(f"{module}:{line} imports {name}; it is integers only")
    if module not in ENVIRON_MODULES:
        faults += [f"{module}:{line} reads the environment" for line in environ_lines(source)]
    return faults


FILES = package_files()


@pytest.mark.parametrize("module", FILES)
def test_module_keeps_the_import_rules(module):
    """Each module of the package imports only what its place in the house allows."""
    path = FILES[module]
    source = path.read_text(encoding="utf-8")
    faults = faults_of(module, source, FILES, is_package=path.name == "__init__.py")
    assert not faults


def test_imports_have_no_cycle():
    """Also for modules without a row in the table, down is down: no module reaches itself."""
    graph = {}
    for module, path in FILES.items():
        if path.name != "__init__.py":
            package = f"{PACKAGE}.{module}".rpartition(".")[0]
            loaded = {our_module(n, FILES) for _, n in imports_of(path.read_text(encoding="utf-8"), package)}
            graph[module] = loaded - {None, module}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"modules import each other in a circle: {' -> '.join(error.args[1])}")


def test_scripts_reach_kernels_through_ops():
    """The training script and the examples open no door to a kernel of their own."""
    scripts = [p for p in (ROOT / "pretrain_qwen35.py", *(ROOT / "examples").rglob("*.py")) if p.exists()]
    for path in scripts:
        for line, name in imports_of(path.read_text(encoding="utf-8"), ""):
            assert not _within(name, KERNELS), f"{path.name}:{line} imports {name}; only ops may"


def test_reference_imports_nothing_of_ours():
    """The truth is independent of what it judges."""
    source = (ROOT / "tests/helpers/reference.py").read_text(encoding="utf-8")
    ours = [name for _, name in imports_of(source, "tests.helpers") if _within(name, [PACKAGE])]
    assert not ours


KNOWN = {"", "cp_layout", "rows", "stream", "cp_comm", "ops", "ops.norms", "ops.causal_conv", "attention"}
KNOWN |= {"gated_delta_net", "layer_specs", "cpu"}


@pytest.mark.parametrize(
    ("module", "source", "word"),
    [
        ("cp_layout", "from megatron_gdn.rows import Rows", "rows"),
        ("cp_layout", "import torch", "integers only"),
        ("rows", "from megatron_gdn import stream", "stream"),
        ("rows", "from .stream import StreamPlan", "stream"),
        ("stream", "def f():\n    import megatron_gdn.cp_comm", "cp_comm"),
        ("cp_comm", "from megatron_gdn.ops import norms", "ops.norms"),
        ("ops.norms", "from megatron_gdn.ops.causal_conv import conv", "ops.causal_conv"),
        ("ops.norms", "from ..stream import StreamPlan", "stream"),
        ("attention", "from megatron_gdn.gated_delta_net import GatedDeltaNet", "gated_delta_net"),
        ("gated_delta_net", "from megatron_gdn import layer_specs", "layer_specs"),
        ("layer_specs", "from megatron_gdn import Qwen35Config", "name the module"),
        ("rows", "from megatron_gdn.unwritten import Thing", "unwritten"),
        ("attention", "import triton.language as tl", "only ops"),
        ("attention", "from fla.ops import chunk_gated_delta_rule", "only ops"),
        ("attention", "import importlib\nimportlib.import_module('flash_qla')", "only ops"),
        ("attention", "from megatron.core import parallel_state", "pg_collection"),
        ("ops.norms", "from megatron.core import mpu", "pg_collection"),
        ("cpu", "from megatron.core.parallel_state import get_context_parallel_group", "pg_collection"),
        ("layer_specs", "from megatron.training import get_args", "only pretrain_qwen35.py"),
        ("stream", "import os\nos.environ['A'] = '1'", "environment"),
        ("stream", "import os\nos.getenv('A')", "environment"),
        ("stream", "from os import environ", "environment"),
    ],
)
def test_faults_of_finds(module, source, word):
    """A source that breaks one rule is reported, once, with the rule's word."""
    found = faults_of(module, source, KNOWN)
    assert len(found) == 1
    assert word in found[0]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("rows", "from megatron_gdn import cp_layout\nfrom megatron_gdn.cp_layout import borders_in"),
        ("rows", "from typing import get_args\nimport flatten, tritonic"),
        ("ops.norms", "import triton\nfrom fla.modules import l2norm\nfrom ..rows import Rows"),
        ("gated_delta_net", "from megatron_gdn.new_part import Part\nfrom megatron_gdn import rows"),
        ("gated_delta_net", "from megatron_gdn.ops.norms import rms_norm\nfrom megatron_gdn import cp_comm"),
        (
            "layer_specs",
            "from megatron_gdn.attention import A\nfrom megatron.core.transformer import spec_utils",
        ),
        ("cpu", "import os\nimport megatron.training\nos.environ['A'] = '1'"),
    ],
)
def test_faults_of_lets_pass(module, source):
    """What the rules allow is not reported."""
    assert faults_of(module, source, KNOWN) == []
