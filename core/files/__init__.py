"""Reads untrusted files within limits, and writes files that survive a crash.

bounds   limits the memory and nesting that a file may require, before a reader allocates anything
durable  forces contents and folders to disk before renaming
"""
