"""A checkpoint on disk: its folder and lock, the index, the bytes of the pieces, and their hashes.

folders                         names, locks and publishes folders, and points to the latest
index                           checks the description of a checkpoint; reads and writes it without running a file
reader                          reads the stored pieces that overlap a box of a tensor
content_hash                    a hash of a whole tensor, which does not depend on how it was cut
torch_files                     reads the files of torch's own writer without running them
"""
