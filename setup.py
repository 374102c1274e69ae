"""Maps the folders ops/, tools/ and recipes/ of the repository into the package telechat_moe."""

from setuptools import find_packages, setup

ROOTS = ("ops", "tools", "recipes")

packages = find_packages(include=["telechat_moe", "telechat_moe.*"])
package_dir = {}
for root in ROOTS:
    package_dir[f"telechat_moe.{root}"] = root
    packages.append(f"telechat_moe.{root}")
    packages += [f"telechat_moe.{root}.{p}" for p in find_packages(root)]

setup(
    version="0.1.0",
    packages=packages,
    package_dir=package_dir,
    package_data={"telechat_moe": ["py.typed"], "telechat_moe.recipes": ["*/*.yaml", "*.json"]},
)
