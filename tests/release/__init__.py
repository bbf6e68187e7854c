"""Makes a release: `python -m tests.release`, which `make release` runs. docs/releases.md has the steps."""
