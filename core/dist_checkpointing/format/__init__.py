"""A checkpoint on disk: its folder and lock, the index, the bytes of the pieces, and their hashes.

folders, folder_lock            names, the pointer to the latest, appearing at once; one writer a folder
index, safe_metadata            what a checkpoint says it holds, checked; read and written without running a file
storage, staging                bytes on disk, and copies on the host that training need not wait for
content_hash, verification      whether what is loaded, or stored, is what was saved
inert_pickle, tensor_archive    what torch's own writer leaves, read without unpickling it
"""
