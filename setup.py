"""Install the root folders as subpackages of omni_async (README, "Layout")."""

from setuptools import find_packages, setup

ROOTS = ("stages", "transports", "api")
CORE = [p for p in find_packages(include=["omni_async", "omni_async.*"]) if p.split(".")[1:2] not in [[r] for r in ROOTS]]
ROOTED = [p for root in ROOTS for p in find_packages(include=[root, f"{root}.*"])]

setup(
    packages=[*CORE, *(f"omni_async.{p}" for p in ROOTED)],
    package_dir={f"omni_async.{root}": root for root in ROOTS},
)
