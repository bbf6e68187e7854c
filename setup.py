"""Lists the packages of the folder ``core``, which is installed as ``shardstack``. All else is in pyproject.toml."""

from setuptools import find_packages, setup

setup(packages=["shardstack", *(f"shardstack.{name}" for name in find_packages("core")), "shardstack.examples.gpt"])
