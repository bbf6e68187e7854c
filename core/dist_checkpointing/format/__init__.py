"""A checkpoint on disk: its folder and lock, the index, the bytes of the pieces, and their hashes.

folders                         names, locks and publishes folders, and points to the latest
index                           checks the description of a checkpoint; reads and writes it without running a file
reader, writer                  read and write pieces; decide which rank writes what several ranks hold
content_hash, verification      compare loaded or stored tensors with what was saved
torch_files                     reads the files of torch's own writer without running them
"""
