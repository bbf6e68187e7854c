"""``python -m shardstack`` is the command ``shardstack``."""

import sys

from .commands import main

sys.exit(main())
