"""Wheel, sdist, editable and git-URL installs: the root folders arrive as subpackages, with their data."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
ROOTS = ("stages", "transports", "api")
WHAT_IS_INSTALLED = """
import importlib.metadata, importlib.resources, importlib.util, json, pathlib
import omni_async, omni_async.api.config, omni_async.cli.main, omni_async.stages.executor
import omni_async.transports.channel
from omni_async import deploy, models
root = pathlib.Path(str(importlib.resources.files("omni_async")))
modules = (omni_async, omni_async.api.config, omni_async.stages.executor, omni_async.transports.channel)
print(json.dumps({
    "files": [module.__file__ for module in modules],
    "top_level": [name for name in ("stages", "transports", "api") if importlib.util.find_spec(name)],
    "models": sorted(models.catalogue()),
    "kind": deploy.load(model="echo").pipelines[0].stages[0].kind,
    "typed": (root / "py.typed").is_file(),
    "version": importlib.metadata.version("omni_async"),
    "license": importlib.metadata.metadata("omni_async")["License-Expression"],
}))
"""


def run(*command: str | Path, cwd: Path) -> str:
    """A command's standard output; it must succeed."""
    done = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A git repository with the files of this tree, so that no build litters ours."""
    copy = tmp_path_factory.mktemp("packaging") / "checkout"
    kept = ("omni_async", *ROOTS, "setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in")
    copy.mkdir()
    for path in (ROOT / name for name in kept):
        if path.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(path, copy / path.name, symlinks=True, ignore=ignored)
        elif path.exists():
            shutil.copy(path, copy)
    run("git", "init", "-q", cwd=copy)
    run("git", "add", "-A", cwd=copy)
    author = ("-c", "user.name=test", "-c", "user.email=test@localhost")
    run("git", *author, "commit", "-q", "-m", "all", cwd=copy)
    return copy


@pytest.fixture(scope="module")
def sdist(checkout: Path) -> Path:
    """The source distribution."""
    script = "from setuptools import build_meta; print(build_meta.build_sdist('../sdist'))"
    name = run(sys.executable, "-c", script, cwd=checkout).splitlines()[-1]
    return checkout.parent / "sdist" / name


@pytest.fixture(scope="module")
def wheel(checkout: Path) -> Path:
    """The wheel, built from the checkout."""
    return build_wheel(checkout, checkout.parent / "wheel")


def build_wheel(source: Path, folder: Path) -> Path:
    """The wheel of a folder or sdist."""
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    run(*pip, "--wheel-dir", folder, source, cwd=folder.parent)
    (built,) = folder.glob("*.whl")
    return built


def install(folder: Path, *what: str | Path) -> dict[str, Any]:
    """Install into a fresh environment that sees this one's packages, and ask it what it has."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "outer.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--force-reinstall")
    run(*pip, "--no-deps", "--no-build-isolation", *what, cwd=folder)
    found = json.loads(run(python, "-I", "-c", WHAT_IS_INSTALLED, cwd=folder))
    assert run(folder / "bin" / "omni-async", "--version", cwd=folder).strip() == found["version"]
    return found


def expected_files() -> set[str]:
    """Every file that an install must have, by its path under site-packages."""
    suffixes = (".py", ".yaml", ".json", ".md", ".txt", ".safetensors", ".typed")
    sources = [*ROOT.glob("omni_async/*"), *ROOT.glob("omni_async/cli/**/*")]
    rooted = [path for root in ROOTS for path in (ROOT / root).rglob("*")]
    return {
        *(str(p.relative_to(ROOT)) for p in sources if p.is_file() and p.suffix in suffixes),
        *(f"omni_async/{p.relative_to(ROOT)}" for p in rooted if p.is_file() and p.suffix in suffixes),
    }


def test_the_wheel_has_every_file_once_and_nothing_at_the_top(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert len(names) == len(set(names))
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"omni_async"}
    assert {name for name in names if ".dist-info/" not in name} == expected_files()
    assert any(name.endswith("/licenses/LICENSE") for name in names)


def test_the_sdist_has_no_links_and_builds_the_same_wheel(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        assert all(member.isfile() or member.isdir() for member in archive)
    with zipfile.ZipFile(build_wheel(sdist, tmp_path / "again")) as again, zipfile.ZipFile(wheel) as first:
        assert sorted(again.namelist()) == sorted(first.namelist())


@pytest.mark.parametrize("how", ["wheel", "sdist", "editable", "git"])
def test_every_way_to_install_gives_the_same_package(
    how: str, wheel: Path, sdist: Path, checkout: Path, tmp_path: Path
) -> None:
    ways: dict[str, tuple[str | Path, ...]] = {
        "wheel": (wheel,),
        "sdist": (sdist,),
        "editable": ("--editable", checkout),
        "git": (f"git+file://{checkout}",),
    }
    found = install(tmp_path / "env", *ways[how])
    home = checkout if how == "editable" else tmp_path / "env"
    assert all(Path(file).resolve().is_relative_to(home.resolve()) for file in found["files"])
    assert found["top_level"] == []
    assert {"echo", "hibari"} <= set(found["models"])
    assert (found["kind"], found["typed"], found["license"]) == ("echo", True, "Apache-2.0")
