"""The name `core` of the installed package: the same module object as `shardstack`."""

import sys

import shardstack

sys.modules[__name__] = shardstack
