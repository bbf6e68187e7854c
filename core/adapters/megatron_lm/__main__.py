"""Runs a script on the wrappers of this library: ``python -m core.adapters.megatron_lm pretrain_gpt.py ...``."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from ...base.errors import ConfigError


def main() -> None:
    """Runs the script that the first argument names, as Python would, with the other arguments."""
    if len(sys.argv) < 2 or not Path(sys.argv[1]).is_file():
        raise ConfigError(
            f"{' '.join(sys.argv[1:2]) or 'no script'} was given, which is no file; give the path of a script: "
            "python -m core.adapters.megatron_lm pretrain_gpt.py --use-torch-fsdp2"
        )
    del sys.argv[0]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
