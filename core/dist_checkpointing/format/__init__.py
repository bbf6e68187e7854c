"""A checkpoint on disk: its folder and lock, the index, the bytes of the pieces, and their hashes.

folders, folder_lock            name and publish folders, point to the latest; allow one writer per folder
index, safe_metadata            check the description of a checkpoint; read and write it without running a file
reader, writer, staging         read and write pieces; copy them to the host so that training goes on
content_hash, verification      compare loaded or stored tensors with what was saved
torch_files                     reads the files of torch's own writer without running them
"""
