"""Who may import whom. Every import of every source file is looked at, also those inside functions."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STDLIB = sys.stdlib_module_names

PURE = {
    *(
        "chat",
        "config",
        "deadlines",
        "echo",
        "errors",
        "events",
        "graph",
        "image",
        "invariants",
        "messages",
        "outputs",
        "plan",
        "playback",
    ),
    *("pool", "request", "restarts", "scheduler", "sound", "speech", "status", "throughput"),
}
"""Core modules that decide and describe: they know the standard library, msgspec and one another."""

CORE = "core"
API_MAY_NAME = {
    "chat",
    "client",
    "config",
    "echo",
    "errors",
    "ids",
    "image",
    "logs",
    "outputs",
    "sound",
    "speech",
    "status",
}
"""What of the core the API may import; engine, scheduler and the like are behind `client`."""

HEAVY = {"torch", "diffusers", "transformers", "vllm", "onnxruntime"}
THIRD_PARTY = {
    "pure": {"msgspec"},
    "core": {"msgspec", "numpy", "yaml", "huggingface_hub"},
    "transports": {"msgspec", "numpy", "zmq"},
    "api": {
        "msgspec",
        "numpy",
        "starlette",
        "uvicorn",
        "prometheus_client",
        "av",
        "soxr",
        "multipart",
        "PIL",
    },
    "cli": {"msgspec", "yaml", "uvicorn", "uvloop", "httpx"},
}
ARROWS = {
    "pure": {"pure"},
    "core": {"pure", "core", "transports"},
    "transports": {"pure", "transports"},
    "stages": {"pure", "core", "transports", "stages"},
    "api": {"pure", "core", "api"},
    "cli": {"pure", "core", "transports", "stages", "api", "cli"},
}
STAGES_MAY_NAME = {"logs", "environment"}
"""What stages may import of the core beside its pure modules."""


def sources() -> list[Path]:
    """Every source file, once: the links inside omni_async/ are not followed."""
    folders = (
        "omni_async/*.py",
        "omni_async/cli/**/*.py",
        "stages/**/*.py",
        "transports/**/*.py",
        "api/**/*.py",
    )
    return sorted(path for pattern in folders for path in ROOT.glob(pattern))


def module_name(path: Path) -> str:
    """`stages/worker.py` → `omni_async.stages.worker`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "omni_async" else ("omni_async", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer(module: str) -> str:
    """The layer that a module of ours belongs to."""
    parts = module.split(".")
    if len(parts) > 1 and parts[1] in ("stages", "transports", "api", "cli"):
        return parts[1]
    if len(parts) == 2 and parts[1] == "__main__":
        return "cli"
    return "pure" if len(parts) == 2 and parts[1] in PURE else CORE


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Every module that is imported when the program runs, with its line."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    unloaded = {
        id(node) for block in ast.walk(tree) if is_for_type_checkers(block) for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if id(node) in unloaded:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            assert node.module is not None
            yield from ((name, node.lineno) for name in names_of(node.module, node.names))


def is_for_type_checkers(node: ast.AST) -> bool:
    """Whether it is an `if TYPE_CHECKING:` block."""
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def names_of(module: str, aliases: list[ast.alias]) -> list[str]:
    """`from omni_async import deploy` imports a module; `from omni_async.config import X` a name of one."""
    inner = [f"{module}.{alias.name}" for alias in aliases]
    return [name if name in MODULES else module for name in inner]


MODULES = {module_name(path) for path in sources()}


def breach(importer: str, imported: str) -> str:
    """Why `importer` may not import `imported`; empty when it may."""
    top, here = imported.split(".")[0], layer(importer)
    if top != "omni_async":
        return third_party_breach(here, top)
    if imported == "omni_async":
        return ""
    there = layer(imported)
    if there not in ARROWS[here]:
        return f"{here} may not import {there}"
    name = imported.split(".")[1]
    if here == "api" and there in ("pure", CORE) and name not in API_MAY_NAME:
        return f"the API knows the engine through its client alone, not {name}"
    if here == "stages" and there == CORE and name not in STAGES_MAY_NAME:
        return f"stages know the messages and the transports, not {name}"
    return ""


def third_party_breach(here: str, top: str) -> str:
    """Why a module of layer `here` may not import the package `top`."""
    if top in ("stages", "transports", "api"):
        return f"import omni_async.{top} instead"
    if top in STDLIB or here == "stages":
        return ""
    return "" if top in THIRD_PARTY[here] else f"{here} may not import {top}"


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_only_what_its_layer_may(path: Path) -> None:
    importer = module_name(path)
    breaches = [
        f"line {line}: {imported}: {why}"
        for imported, line in imports(path)
        if (why := breach(importer, imported))
    ]
    assert not breaches, "\n".join(breaches)


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("omni_async.scheduler", "zmq"),
        ("omni_async.scheduler", "omni_async.engine"),
        ("omni_async.engine", "omni_async.stages.worker"),
        ("omni_async.engine", "torch"),
        ("omni_async.transports.codec", "omni_async.engine"),
        ("omni_async.transports.codec", "omni_async.stages.executor"),
        ("omni_async.stages.worker", "omni_async.engine"),
        ("omni_async.stages.worker", "omni_async.api.app"),
        ("omni_async.api.app", "omni_async.engine"),
        ("omni_async.api.app", "omni_async.scheduler"),
        ("omni_async.api.app", "omni_async.transports.codec"),
        ("omni_async.api.app", "torch"),
        ("omni_async.client", "omni_async.cli.serve"),
        ("omni_async.client", "omni_async.api.app"),
        ("omni_async.client", "stages"),
    ],
)
def test_the_rules_refuse_what_they_are_for(importer: str, imported: str) -> None:
    assert breach(importer, imported)


def test_heavy_libraries_are_named_in_no_list_but_the_stages() -> None:
    assert all(not HEAVY & allowed for allowed in THIRD_PARTY.values())


def test_every_pure_module_exists() -> None:
    assert {f"omni_async.{name}" for name in PURE} <= MODULES


def test_the_environment_is_read_in_one_file() -> None:
    readers = [
        path.relative_to(ROOT).as_posix()
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv")
    ]
    assert set(readers) == {"omni_async/environment.py"}


def loaded_by(statement: str) -> set[str]:
    """The top-level packages that a fresh interpreter has loaded after `statement`."""
    script = (
        f"import sys, json; {statement}; print(json.dumps(sorted({{m.split('.')[0] for m in sys.modules}})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_omni_async_loads_the_standard_library_alone() -> None:
    bare = loaded_by("pass")
    assert loaded_by("import omni_async") - bare - set(STDLIB) == {"omni_async"}


def test_a_request_can_be_described_without_numpy_or_zmq() -> None:
    loaded = loaded_by("from omni_async import Speech, StageConfig, InvalidRequest")
    assert "msgspec" in loaded
    assert not loaded & {"numpy", "zmq", "starlette", "yaml", *HEAVY}


def test_the_api_process_never_loads_a_model_library() -> None:
    loaded = loaded_by("import omni_async.cli.serve, omni_async.client, omni_async.launcher")
    assert "starlette" in loaded
    assert not loaded & HEAVY


def test_asking_for_the_version_or_the_usage_loads_no_server() -> None:
    loaded = loaded_by("from omni_async.cli.main import main; main(['--help'])")
    assert not loaded & {"numpy", "zmq", "starlette", "uvicorn", *HEAVY}
