"""Without Lightning there is nothing to test here."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("lightning") else ["test_*.py"]
