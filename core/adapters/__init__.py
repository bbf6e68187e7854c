"""The interfaces of sibling systems, over this library's engines: each file translates, and computes nothing."""
