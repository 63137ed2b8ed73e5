"""Install the root folders as subpackages of omni_async (CONTRIBUTING.md, "Where things go")."""

from setuptools import find_packages, setup

ROOTS = ("stages", "transports", "api")

core = find_packages(
    include=["omni_async", "omni_async.*"], exclude=[f"omni_async.{root}*" for root in ROOTS]
)
rooted = find_packages(include=[pattern for root in ROOTS for pattern in (root, f"{root}.*")])

setup(
    packages=[*core, *(f"omni_async.{package}" for package in rooted)],
    package_dir={f"omni_async.{root}": root for root in ROOTS},
)
